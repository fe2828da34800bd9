"""Define the options of optimizers and of learning-rate schedules. `rl.optim` makes them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxrl_fast.options.declare import FRACTION, NON_NEGATIVE, POSITIVE, Bounds, Part, choice, option


@dataclass(frozen=True)
class Adam(Part):
    """Adam (Kingma & Ba 2015) or RAdam (Liu et al. 2020), after the gradient's global norm is clipped."""

    kind: str = dataclasses.field(default="adam", kw_only=True)
    epsilon: float = option(1e-8, "Epsilon of the optimizer.", bounds=POSITIVE, traced=True)
    beta1: float = option(
        0.9, "Beta1 of the optimizer: decay rate of the gradients' mean.", bounds=Bounds(0, 0.9999), traced=True
    )
    max_grad_norm: float = option(
        0.0,
        "Maximum global norm of the gradient; 0 disables clipping.",
        bounds=NON_NEGATIVE,
        traced="nonzero",
    )
    freeze: tuple[str, ...] = option(
        (),
        "Pieces of the network that are not trained: torso, memory, head, actor, critic, or one of an actor or critic, "
        "such as actor.torso.",
        sweepable=False,
    )


@dataclass(frozen=True)
class Constant(Part):
    """A constant learning rate."""


@dataclass(frozen=True)
class Linear(Part):
    """A learning rate that decays linearly to 0 over all gradient steps."""


@dataclass(frozen=True)
class Cosine(Part):
    """A learning rate that decays along half a period of a cosine over all gradient steps."""

    final: float = option(0.0, "Final learning rate, as a share of the initial one.", bounds=FRACTION, traced=True)


@dataclass(frozen=True)
class AdaptiveKL(Part):
    """A learning rate that keeps the KL divergence of an update near a target (code of Rudin et al. 2022)."""

    target: float = option(
        0.01,
        "Multiply or divide the learning rate by 1.5 before each gradient step but the first of an update, so that the "
        "approximate KL stays between half and twice this. The rate stays between 1e-5 and 1e-2; a learning_rate "
        "outside replaces the bound that it exceeds.",
        bounds=POSITIVE,
        traced=True,
    )


SCHEDULES: dict[str, Part] = {"constant": Constant(), "linear": Linear(), "cosine": Cosine()}


def optimizer(default: str = "adam", *, epsilon: float, max_grad_norm: float) -> Any:
    """Return a field for the optimizer."""
    part = Adam(epsilon=epsilon, max_grad_norm=max_grad_norm)
    return choice(default, "Optimizer: Adam (Kingma & Ba 2015) or RAdam (Liu et al. 2020).", adam=part, radam=part)


def schedule(default: str, **others: Part) -> Any:
    """Return a field for the schedule of the learning rate: constant, linear, cosine, or one of the others."""
    meaning = "Schedule of the learning rate: constant, linear decay to 0 over all gradient steps, or a cosine"
    meaning += "; kl: adapted to the KL divergence of updates." if "kl" in others else "."
    return choice(default, meaning, **SCHEDULES, **others)
