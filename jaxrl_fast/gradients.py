"""What becomes of gradients: sums over devices, and an optax chain on one flat vector: few kernels, not dozens."""

from typing import Literal

import jax
import optax
from jax import Array

from jaxrl_fast.types import PyTree

KINDS = {"adam": optax.scale_by_adam, "radam": optax.scale_by_radam}


def optimiser(
    learning_rate: optax.ScalarOrSchedule,
    *,
    epsilon: float,
    max_grad_norm: float,
    kind: Literal["adam", "radam"] = "adam",
    axis_name: str | None = None,
) -> optax.GradientTransformation:
    """Sum the gradient over devices, clip its global norm (0: do not), then Adam (Kingma & Ba 2015) or RAdam.

    The count of steps taken is `state[-1].count` where the learning rate is a schedule.
    """
    across = optax.stateless(lambda gradient, _: total(gradient, axis_name))
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    return optax.flatten(
        optax.chain(across, clip, KINDS[kind](eps=epsilon), optax.scale_by_learning_rate(learning_rate))
    )


def linear(learning_rate: float | Array, anneal: bool, num_steps: int) -> optax.Schedule:
    """A learning rate that stays, or falls to 0 over so many gradient steps; ValueError beyond what int32 counts."""
    if num_steps >= 2**31:
        raise ValueError(f"{num_steps} gradient steps in all are more than {2**31 - 1}; fewer steps or larger rollouts")
    return optax.linear_schedule(learning_rate, 0.0 if anneal else learning_rate, num_steps)


def total(x: PyTree, axis_name: str | None) -> PyTree:
    """The sum over devices, where environments are split over several."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)
