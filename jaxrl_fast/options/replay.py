"""Define the options of replay buffers. `jaxrl_fast.replay` makes them."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_fast.options.declare import COUNT, FRACTION, Bounds, Part, choice, option

Storage = Literal["auto", "device", "host", "disk"]
Compression = Literal["auto", "none", "zstd"]


@dataclass(frozen=True)
class Uniform(Part):
    """A replay that samples all transitions with equal probability."""

    size: int = option(
        100_000,
        "Transitions in the replay over all environments, rounded down to whole rollouts.",
        bounds=Bounds(1, 2**30),  # indices are int32, and so is the sum of two
    )
    n_step: int = option(1, "Number of rewards summed before bootstrapping (n-step returns).", bounds=COUNT)
    storage: Storage = option(
        "auto",
        "Where observations are stored: device memory, host memory, or disk (the run directory). Results are the same. "
        "auto: the first of device, host and disk where they fit.",
    )
    compression: Compression = option(
        "auto",
        "Lossless compression of observations in host or disk storage. auto: zstd for uint8 and bool observations if "
        "zstandard is installed.",
    )


@dataclass(frozen=True)
class Prioritized(Uniform):
    """A replay that samples transitions in proportion to their temporal-difference errors (Schaul et al. 2016)."""

    alpha: float = option(0.5, "Exponent of the errors in the sampling probabilities.", bounds=FRACTION, traced=True)
    beta: float = option(
        0.4,
        "Initial exponent of the importance weights, which rises to 1 over the run.",
        bounds=FRACTION,
        traced=True,
    )


def replay(size: int) -> Any:
    """Return a field for a replay of this many transitions."""
    return choice(
        "uniform",
        "Sampling of transitions: uniform, or in proportion to their errors (Schaul et al. 2016).",
        uniform=Uniform(size=size),
        prioritized=Prioritized(size=size),
    )
