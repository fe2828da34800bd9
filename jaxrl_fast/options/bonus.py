"""Define the options of bonuses: what is added to rewards or to the loss of an algorithm."""

from dataclasses import dataclass
from typing import Any

from jaxrl_fast.options.declare import NON_NEGATIVE, POSITIVE, Bounds, Part, choice, option


@dataclass(frozen=True)
class NoBonus(Part):
    """No bonus."""


@dataclass(frozen=True)
class Munchausen(Part):
    """The scaled log-policy as a bonus (Vieillard et al. 2020)."""

    alpha: float = option(0.9, "Scale of the log-policy.", bounds=NON_NEGATIVE, traced=True)
    temperature: float = option(0.03, "Temperature of the softmax policy.", bounds=POSITIVE, traced=True)
    clip: float = option(
        -1.0, "Lower bound of temperature times log-policy.", bounds=Bounds(float("-inf"), 0), traced=True
    )


def bonus_of_values() -> Any:
    """Return a field for a bonus of an algorithm that learns the values of discrete actions."""
    return choice(
        "none",
        "Bonus that is added to rewards: the scaled log-policy (Munchausen, Vieillard et al. 2020).",
        none=NoBonus(),
        munchausen=Munchausen(),
    )


def bonus_of_policies() -> Any:
    """Return a field for a bonus of PPO, which `rl.bonuses` makes."""
    return choice("none", "Bonus that is added to advantages or to the loss.", none=NoBonus())
