"""Define the options of memories: recurrent layers after the network. `networks.memory` makes them."""

from dataclasses import dataclass
from typing import Any

from jaxrl_fast.options.declare import COUNT, MAX_SCHEDULE, Bounds, Part, choice, option


@dataclass(frozen=True)
class Recurrent(Part):
    """A recurrent layer: gru, lstm, or lru (a linear recurrence)."""

    burn_in = 0  # an option of some algorithms

    size: int = option(128, "Width of the recurrent layer.", bounds=Bounds(1, 2**16))
    sequence_length: int | None = option(
        None,
        "Steps of each training sequence, over which gradients flow back in time; none: the whole rollout.",
        bounds=COUNT,
    )


@dataclass(frozen=True)
class WithBurnIn(Recurrent):
    """A recurrent layer whose state is recomputed at the start of each sequence."""

    burn_in: int = option(
        0,
        "Steps at the start of a sequence that only compute the recurrent state, without a loss (Kapturowski et al. "
        "2019).",
        bounds=Bounds(0, MAX_SCHEDULE),
    )


@dataclass(frozen=True)
class OfReplay(WithBurnIn):
    """A recurrent layer that is trained on sequences of a replay."""

    sequence_length: int = option(
        40, "Steps of each sampled sequence, burn_in included; batch_size then counts sequences.", bounds=COUNT
    )
    burn_in: int = option(
        8,
        "Steps at the start of a sequence that only compute the recurrent state, without a loss (Kapturowski et al. "
        "2019).",
        bounds=Bounds(0, MAX_SCHEDULE),
    )


@dataclass(frozen=True)
class NoMemory(Part):
    """No recurrent layer."""

    burn_in = 0


def memory(recurrent: Recurrent) -> Any:
    """Return a field for a memory with these defaults."""
    return choice(
        "none",
        "Recurrent layer after the network, for partially observable environments; lru is a linear recurrence. "
        "package.module:Class is a subclass of networks.memory.Memory.",
        custom=recurrent,
        none=NoMemory(),
        gru=recurrent,
        lstm=recurrent,
        lru=recurrent,
    )
