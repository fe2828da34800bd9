"""Define which parts of an observation an actor and its critics see. `networks.views` selects them."""

from dataclasses import dataclass
from typing import Any

from jaxrl_fast.options.declare import Part, option, part

ALL = "all"  # the parts that are seen by default, as a name


@dataclass(frozen=True)
class Sees(Part):
    """What a network sees."""

    sees: tuple[str, ...] = ()


@dataclass(frozen=True)
class Actor(Sees):
    """The policy."""

    sees: tuple[str, ...] = option(
        (ALL,),
        "Parts of a Dict or Tuple observation that the policy sees, by name or index. all: every part.",
        sweepable=False,
    )


@dataclass(frozen=True)
class Critic(Sees):
    """The value function, or the critics. They are not needed to act, and may see what the policy must not."""

    sees: tuple[str, ...] = option(
        (ALL,),
        "Parts of a Dict or Tuple observation that the critic sees, by name or index. all: every part.",
        sweepable=False,
    )


def actor() -> Any:
    """Return a field for what the policy sees."""
    return part(Actor(), "The policy.")


def critic() -> Any:
    """Return a field for what the critic sees."""
    return part(Critic(), "The critic, which may see more than the policy.")
