"""Define the options of exploration: epsilon-greedy actions, stochastic policies, and noise on actions."""

from dataclasses import dataclass
from typing import Any

from jaxrl_fast.options.declare import (
    COUNT,
    FRACTION,
    MAX_SCHEDULE,
    NON_NEGATIVE,
    POSITIVE,
    Bounds,
    Part,
    choice,
    option,
)


@dataclass(frozen=True)
class Epsilon(Part):
    """Random actions with a probability that decays linearly."""

    start: float = option(1.0, "Initial probability of a random action.", bounds=FRACTION, traced=True)
    end: float = option(0.05, "Final probability of a random action.", bounds=FRACTION, traced=True)
    steps: int = option(
        250_000, "Environment steps over which epsilon decays linearly.", bounds=Bounds(1, MAX_SCHEDULE)
    )
    apex_alpha: float = option(
        0.0,
        "Explore in environment i of N with epsilon^(1 + alpha i / (N - 1)) (Horgan et al. 2018 use 7); 0: with the "
        "same epsilon in all.",
        bounds=NON_NEGATIVE,
        traced=True,
    )


@dataclass(frozen=True)
class Gaussian(Part):
    """A Gaussian policy of continuous actions."""

    log_std_init: float = option(0.0, "Initial log standard deviation of the policy.", traced=True)


@dataclass(frozen=True)
class StateDependent(Gaussian):
    """A Gaussian policy whose standard deviation is an output of the network."""

    squash: bool = option(False, "Use the tanh of the sample as the action.")


@dataclass(frozen=True)
class GSDE(Gaussian):
    """A policy that explores by a random function of its features (gSDE, Raffin et al. 2021)."""

    squash: bool = option(False, "Use the tanh of the sample as the action.")
    sample_freq: int | None = option(
        None,
        "Environment steps between samples of this function within an episode; none: one sample per episode.",
        bounds=COUNT,
    )


@dataclass(frozen=True)
class White(Part):
    """Independent noise at each step."""


@dataclass(frozen=True)
class OrnsteinUhlenbeck(White):
    """Noise that is correlated over steps."""

    theta: float = option(
        0.15,
        "Rate at which the noise returns to 0 (Lillicrap et al. 2016 use 0.15); 1: independent noise at each step. The "
        "variance does not depend on it.",
        bounds=Bounds(0, 1, exclusive_min=True),
    )


@dataclass(frozen=True)
class Held(White):
    """Noise that is held for a random number of steps (FlashSAC, Kim et al. 2026)."""

    exponent: float = option(
        2.0,
        "Noise is held for n steps with a probability proportional to n to the power of minus this (a zeta law).",
        bounds=POSITIVE,
        traced=True,
    )
    longest: int = option(16, "Most steps for which noise is held.", bounds=Bounds(1, 2**16))


@dataclass(frozen=True)
class Normal(White):
    """Independent normal noise on actions."""

    std: float = option(0.1, "Standard deviation of the noise on actions in [-1, 1].", bounds=NON_NEGATIVE, traced=True)


@dataclass(frozen=True)
class CorrelatedNormal(OrnsteinUhlenbeck):
    """Normal noise on actions that is correlated over steps."""

    std: float = option(0.1, "Standard deviation of the noise on actions in [-1, 1].", bounds=NON_NEGATIVE, traced=True)


def squashes(policy: Gaussian) -> bool:
    """Return whether the action is the tanh of the policy's sample."""
    return policy.kind == "tanh" or isinstance(policy, StateDependent | GSDE) and policy.squash


def explore() -> Any:
    """Return a field for the exploration of value-based algorithms."""
    return choice("epsilon", "Exploration: epsilon-greedy actions.", epsilon=Epsilon())


def policy() -> Any:
    """Return a field for the distribution of continuous actions."""
    return choice(
        "gaussian",
        "Distribution of continuous actions: a clipped Gaussian, its tanh, a Gaussian whose standard deviation depends "
        "on the state, or noise that is a function of the state (gSDE, Raffin et al. 2021). Discrete actions are "
        "categorical.",
        gaussian=Gaussian(),
        tanh=Gaussian(),
        state_dependent=StateDependent(),
        gsde=GSDE(),
    )


def noise_of_policy() -> Any:
    """Return a field for the noise by which a stochastic policy draws its samples."""
    return choice(
        "white",
        "Noise of the policy's samples over the steps of an episode: independent (white), correlated "
        "(Ornstein-Uhlenbeck, Lillicrap et al. 2016), or held for random numbers of steps (FlashSAC, Kim et al. 2026).",
        white=White(),
        ou=OrnsteinUhlenbeck(),
        held=Held(),
    )


def noise_of_actions() -> Any:
    """Return a field for the noise that is added to deterministic actions."""
    return choice(
        "normal",
        "Noise on actions: independent at each step (normal), or correlated (Ornstein-Uhlenbeck, Lillicrap et al. "
        "2016).",
        normal=Normal(),
        ou=CorrelatedNormal(),
    )
