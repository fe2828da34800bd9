"""What becomes of gradients: an optax chain."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxrl_fast.types import MAX_FLAT, PyTree

KINDS = {"adam": optax.scale_by_adam, "radam": optax.scale_by_radam}


def make_optimizer(
    learning_rate: optax.ScalarOrSchedule,
    *,
    epsilon: float | Array,
    max_grad_norm: float | Array,
    kind: Literal["adam", "radam"] = "adam",
) -> optax.GradientTransformation:
    """Clip the gradient's global norm (a plain 0: do not), then Adam (Kingma & Ba 2015) or RAdam.

    The count of steps taken is `state[-1].count` where the learning rate is a schedule. All parameters are updated as
    one vector, a few kernels instead of dozens, unless they are many: on every device, for a checkpoint has this form.
    That is also why the chain begins with a link that does nothing.
    """
    no_bound = isinstance(max_grad_norm, (int, float)) and max_grad_norm == 0
    clip = optax.identity() if no_bound else optax.clip_by_global_norm(max_grad_norm)
    by_tree = optax.chain(optax.identity(), clip, KINDS[kind](eps=epsilon), optax.scale_by_learning_rate(learning_rate))
    flat = optax.flatten(by_tree)
    choose = lambda tree: flat if _worth_flattening(tree) else by_tree
    return optax.GradientTransformation(
        lambda params: choose(params).init(params),
        lambda gradient, state, params=None: choose(gradient).update(gradient, state, params),
    )


def linear_schedule(learning_rate: float | Array, anneal: bool, num_steps: int) -> optax.Schedule:
    """A learning rate that stays, or falls to 0 over so many gradient steps; ValueError beyond what int32 counts."""
    if num_steps >= 2**31:
        raise ValueError(f"{num_steps} gradient steps in all are more than {2**31 - 1}; train for less, or less often")
    schedule = optax.linear_schedule(learning_rate, 0.0 if anneal else learning_rate, num_steps)
    return lambda count: jnp.maximum(schedule(count), 0)  # at its end it may be rounded to less


def _worth_flattening(tree: PyTree) -> bool:
    return bool(sum(x.size for x in jax.tree.leaves(tree)) <= MAX_FLAT)
