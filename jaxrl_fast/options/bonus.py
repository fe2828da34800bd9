"""Define the options of bonuses: what is added to rewards or to the loss of an algorithm."""

from dataclasses import dataclass
from typing import Any

from jaxrl_fast.options.declare import (
    FRACTION,
    MAX_SCHEDULE,
    NON_NEGATIVE,
    POSITIVE,
    SIZE,
    Bounds,
    Part,
    choice,
    not_an_option,
    option,
)

MINARI = "minari:"  # begins the id of a dataset of Minari


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


@dataclass(frozen=True)
class Annealed(Part):
    """A loss whose weight may fall to 0. `training.bonus_data` reads what it learns from into `data`."""

    weight: float = option(1.0, "Weight of the loss.", bounds=NON_NEGATIVE, traced=True)
    anneal: int | None = option(
        None,
        "Environment steps over which the weight falls linearly to 0; none: it is constant.",
        bounds=Bounds(1, MAX_SCHEDULE),
    )
    data: Any = not_an_option()


@dataclass(frozen=True)
class BC(Annealed):
    """Behavior cloning: a loss that raises the probability of the actions in a dataset."""

    dataset: str = option(
        "",
        "File of steps, .npz, such as evaluate --collect writes; or minari:ID or the folder of a dataset of Minari.",
        resumable=True,
    )


@dataclass(frozen=True)
class Distill(Annealed):
    """The divergence from the policy of another run, KL(teacher || policy), as a loss."""

    run: str = option(
        "", "Directory of the run whose policy is the teacher, or one of its checkpoints.", resumable=True
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
    return choice(
        "none",
        "Bonus that is added to advantages or to the loss: a reward for observations that are new (rnd, random network "
        "distillation, Burda et al. 2018), behavior cloning from a dataset (bc), or the divergence from the policy of "
        "another run (distill).",
        none=NoBonus(),
        rnd=RND(),
        bc=BC(),
        distill=Distill(),
    )


def bonus_of_sac() -> Any:
    """Return a field for a bonus of SAC, which `agents.demonstrations` and `agents.distillation` add."""
    return choice(
        "none",
        "Loss that is added to that of the policy: behavior cloning from a dataset (bc), or, for continuous actions, "
        "the divergence from the policy of another run (distill).",
        none=NoBonus(),
        bc=BC(),
        distill=Distill(),
    )


def bonus_of_actors() -> Any:
    """Return a field for a bonus of TD3 and DDPG, which `agents.demonstrations` adds."""
    return choice(
        "none",
        "Loss that is added to that of the policy: behavior cloning from a dataset (bc).",
        none=NoBonus(),
        bc=BC(),
    )
