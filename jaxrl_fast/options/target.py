"""Define the options of target networks, or of what replaces them."""

from dataclasses import dataclass
from typing import Any

from jaxrl_fast.options.declare import MAX_SCHEDULE, Bounds, Part, choice, option


@dataclass(frozen=True)
class Average(Part):
    """Target parameters that follow the online parameters."""

    tau: float = option(
        0.005,
        "Step size of a target update: 1 copies the online parameters, smaller values average (Polyak).",
        bounds=Bounds(0, 1, exclusive_min=True),
        traced=True,
    )


@dataclass(frozen=True)
class PeriodicAverage(Average):
    """Target parameters that follow the online parameters at intervals."""

    interval: int = option(
        1,
        "Environment steps between target updates; 1, or fewer than those of one gradient step: update after every "
        "gradient step.",
        bounds=Bounds(1, MAX_SCHEDULE),
    )


@dataclass(frozen=True)
class NoTarget(Part):
    """No target networks: batch renormalization in the critics instead (CrossQ, Bhatt et al. 2024)."""

    momentum: float = option(
        0.99, "Decay rate of the running statistics per gradient step.", bounds=Bounds(0, 1, exclusive_min=True)
    )
    warmup: int = option(
        100_000,
        "Gradient steps with plain batch normalization, before batch renormalization begins.",
        bounds=Bounds(0, MAX_SCHEDULE),
    )


def target(average: Average) -> Any:
    """Return a field for the target parameters of a value network."""
    return choice("average", "Target parameters: they follow the online parameters.", average=average)


def target_of_critics(average: Average) -> Any:
    """Return a field for the target critics."""
    return choice(
        "average",
        "Target critics: they follow the critics (average), or none, with batch renormalization in the critics and "
        "(s, a) and (s', a') in one batch (CrossQ, Bhatt et al. 2024).",
        average=average,
        none=NoTarget(),
    )
