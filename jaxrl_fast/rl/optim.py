"""Make the optimizer, an optax chain, and its learning rate schedule."""

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxrl_fast.networks import flat, pieces
from jaxrl_fast.options.declare import Part
from jaxrl_fast.options.optimizer import Adam, AdaptiveKL, Cosine, Linear
from jaxrl_fast.types import MAX_FLAT, PyTree

LR_FACTOR, LR_RANGE = 1.5, (1e-5, 1e-2)  # of `adapt_lr`: the factor of a change, and the bounds of the rate
KINDS = {"adam": optax.scale_by_adam, "radam": optax.scale_by_radam}


def make_optimizer(
    learning_rate: optax.ScalarOrSchedule,
    options: Adam,
    transform: optax.GradientTransformation | None = None,
    prefix: str = "",
) -> optax.GradientTransformation:
    """Return an optimizer that clips the gradient's global norm, then applies Adam (Kingma & Ba 2015) or RAdam.

    The gradient of frozen pieces is 0 before all else, and so are their updates; `prefix` begins the paths of the
    parameters (`networks.pieces`). Then `transform` changes the gradient. A Python 0 for `max_grad_norm` disables
    clipping. If the learning rate is a schedule, `state[-1].count` is the number of steps so far. Up to MAX_FLAT
    parameters are updated as one vector, with a few kernels instead of dozens. This does not depend on the device,
    since checkpoints store the state in this form.
    """
    max_grad_norm = options.max_grad_norm
    no_bound = isinstance(max_grad_norm, (int, float)) and max_grad_norm == 0
    clip = optax.identity() if no_bound else optax.clip_by_global_norm(max_grad_norm)
    adam, step = KINDS[options.kind](b1=options.beta1, eps=options.epsilon), optax.scale_by_learning_rate(learning_rate)
    by_tree = optax.chain(transform or optax.identity(), clip, adam, step)
    flattened = optax.flatten(by_tree)
    choose = lambda tree: flattened if _worth_flattening(tree) else by_tree

    def update(gradient: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        if options.freeze:
            gradient = pieces.without(gradient, options.freeze, prefix)
        if transform is None or not flat.is_packed(gradient):
            after: tuple[PyTree, PyTree] = choose(gradient).update(gradient, state, params)
            return after
        gradient, state, params = flat.unpack((gradient, state, params))  # the transformation may depend on arrays
        packed: tuple[PyTree, PyTree] = flat.pack(choose(gradient).update(gradient, state, params))
        return packed

    return optax.GradientTransformation(lambda params: choose(params).init(params), update)


def schedule_of(learning_rate: float | Array, options: Part, num_steps: int) -> optax.Schedule:
    """Return the schedule of the learning rate over `num_steps` gradient steps: linear to 0, cosine, or constant.

    The cosine is rate (final + (1 - final) (1 + cos(pi step / num_steps)) / 2) (Loshchilov & Hutter 2017, eq. 5).
    Raises ValueError if int32 cannot count the steps.
    """
    if num_steps >= 2**31:
        raise ValueError(f"total_steps: must give at most {2**31 - 1} gradient steps, got {num_steps}; use fewer steps")
    if isinstance(options, Cosine):
        return optax.cosine_decay_schedule(learning_rate, num_steps, alpha=options.final)
    schedule = optax.linear_schedule(learning_rate, 0.0 if isinstance(options, Linear) else learning_rate, num_steps)
    return lambda count: jnp.maximum(schedule(count), 0)  # rounding may make the last value negative


def adapt_lr(options: AdaptiveKL, learning_rate: float | Array, scale: Array, approx_kl: Array) -> Array:
    """Return the next scale of the learning rate, f32 [], from the KL divergence of the policy from that before.

    It falls if the divergence exceeds twice its target, and rises if the divergence is below half of its target. The
    rate stays in LR_RANGE, which is extended to include the configured rate.
    """
    target = options.target
    factor = jnp.where(approx_kl > 2 * target, 1 / LR_FACTOR, jnp.where(approx_kl < target / 2, LR_FACTOR, 1.0))
    low, high = (bound / learning_rate for bound in LR_RANGE)
    return jnp.clip(scale * factor, jnp.minimum(low, 1.0), jnp.maximum(high, 1.0))


def _worth_flattening(tree: PyTree) -> bool:
    return bool(sum(x.size for x in jax.tree.leaves(tree)) <= MAX_FLAT)
