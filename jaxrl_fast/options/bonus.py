"""Define the options of bonuses: what is added to rewards or to the loss of an algorithm."""

from dataclasses import dataclass
from typing import Any

from jaxrl_fast.options.declare import FRACTION, NON_NEGATIVE, POSITIVE, SIZE, Bounds, Part, choice, option


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


@dataclass(frozen=True)
class RND(Part):
    """The prediction error of random features of the next observation, as a second reward (Burda et al. 2018)."""

    coef: float = option(1.0, "Weight of advantages of intrinsic rewards.", bounds=NON_NEGATIVE, traced=True)
    extrinsic_coef: float = option(
        2.0, "Weight of advantages of the environment's rewards.", bounds=NON_NEGATIVE, traced=True
    )
    gamma: float = option(0.99, "Discount factor of intrinsic rewards.", bounds=FRACTION, traced=True)
    share: float = option(
        0.25,
        "Fraction of the rows that train the predictor. Fewer keep observations novel for longer.",
        bounds=Bounds(0, 1, exclusive_min=True),
        traced=True,
    )
    features: int = option(128, "Number of random features, which the predictor learns.", bounds=SIZE)
    episodic: bool = option(False, "Let intrinsic returns stop where an episode ends.")


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
    return choice(
        "none",
        "Bonus that is added to advantages or to the loss: a reward for observations that are new (rnd, random network "
        "distillation, Burda et al. 2018).",
        none=NoBonus(),
        rnd=RND(),
    )
