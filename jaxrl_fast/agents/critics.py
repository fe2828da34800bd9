"""Move the critics of SAC, TD3 and DDPG towards a target computed from critic outputs at the next action.

Values are means or distributions (`rl.value_distributions`), and targets are weighted atoms. The outputs at the next
action come from target critics, or with `crossq` from the critics themselves.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxrl_fast import replay
from jaxrl_fast.agents import actor_critic
from jaxrl_fast.agents.actor_critic import Context, Learner, Params
from jaxrl_fast.networks import flat
from jaxrl_fast.networks.batch_renorm import with_stats
from jaxrl_fast.rl import value_distributions
from jaxrl_fast.rl.value_distributions import Atoms
from jaxrl_fast.types import Array, Metrics, PyTree


def step(
    context: Context,
    learner: Learner,
    buffer: PyTree,
    batch: replay.WeightedBatch,
    next_action: Array | None,
    target_of: Callable[[Array], Atoms],
) -> tuple[Learner, PyTree, Metrics]:
    """Move all critics towards the target of Q(obs, action).

    `target_of` computes it, with atoms [B, K], from the critics' outputs [num_critics, B (, M)] at (next_obs,
    next_action). These are the outputs of the target critics, or with `crossq` those of the critics in the same pass.
    With None for `next_action`, they are at all discrete actions. Layers that normalize batches see (obs, action) and
    (next_obs, next_action) together. Returns the learner, the buffer with new priorities, and metrics [B].
    """
    rows, weight = batch.rows, batch.weight / context.config.batch_size
    if learner.batch_stats is not None:
        assert next_action is not None, "`discrete_sac.check` has refused it"
        goal_of = target_of
        if learner.target_stats is not None:
            inputs = both(rows, next_action)
            output, stats = context.critic.train(learner.target_params.critic, learner.target_stats, inputs)
            target, learner = target_of(jnp.split(output, 2, axis=1)[1]), learner._replace(target_stats=stats)
            goal_of = lambda _: target
        objective = partial(joint_loss, context, learner.batch_stats, (rows, weight), next_action, goal_of)
    else:
        target = target_of(context.critic.apply(learner.target_params.critic, (rows.next_obs, next_action)))
        objective = partial(loss, context, rows, target, weight)
    gradient, (errors, metrics, batch_stats) = jax.grad(objective, has_aux=True)(learner.params.critic)
    gradient, errors = replay.sum_gradient(context.replay, context.parallelism, gradient, errors)
    if context.replay.update_priorities:
        buffer = context.replay.update_priorities(buffer, batch.index, errors)
    learner = actor_critic.apply_gradient(context, learner, Params(None, gradient))
    return learner._replace(batch_stats=batch_stats), buffer, metrics


def loss(
    context: Context, batch: replay.Sample, target: Atoms, weight: Array, params: PyTree
) -> tuple[Array, tuple[Array, Metrics, PyTree]]:
    """Return the results of `loss_of_outputs` for the critics at (obs, action), and None for statistics."""
    output = context.critic.apply(params, (batch.obs, batch.action))
    total, (errors, metrics) = loss_of_outputs(context, output, target, weight)
    return total, (errors, metrics, None)


def joint_loss(
    context: Context,
    batch_stats: PyTree,
    weighted: tuple[replay.Sample, Array],
    next_action: Array,
    target_of: Callable[[Array], Atoms],
    params: PyTree,
) -> tuple[Array, tuple[Array, Metrics, PyTree]]:
    """Return the results of `loss_of_outputs`, and the critics' running statistics after the batch.

    One pass evaluates (s, a) and (s', a'), so that both are normalized alike. No gradient flows through the target
    (Bhatt et al. 2024, CrossQ). With target critics, their output at (s', a') gives the target, after a pass of theirs
    over both (FlashSAC).
    """
    batch, weight = weighted
    output, batch_stats = context.critic.train(params, batch_stats, both(batch, next_action))
    output, following = jnp.split(output, 2, axis=1)
    target = target_of(jax.lax.stop_gradient(following))
    total, (errors, metrics) = loss_of_outputs(context, output, target, weight)
    return total, (errors, metrics, batch_stats)


def both(batch: replay.Sample, next_action: Array) -> tuple[PyTree, Array]:
    """Return (s, a) and (s', a') as one batch [2 B, ...]."""
    join = lambda x, y: jnp.concatenate([x, y])
    return jax.tree.map(join, batch.obs, batch.next_obs), join(batch.action, next_action)


def loss_of_outputs(
    context: Context, output: Array, target: Atoms, weight: Array
) -> tuple[Array, tuple[Array, Metrics]]:
    """Return the weighted losses of the critics' outputs [num_critics, B (, M)], summed over rows and critics.

    The loss of a mean is (Q_i(s, a) - target)^2 / 2; distributions use `value_distributions.losses`. Also returns the
    errors for priorities [B], means over the critics, and weighted metrics [B].
    """
    value = value_distributions.mean(context.value_head, output)  # [num_critics, B]
    td_error = target.mean[None] - value
    head, huber = context.value_head, context.value_head.kind == "quantile"  # as in TQC
    losses, errors = jax.vmap(lambda x, error: value_distributions.losses(head, x, target, error, huber))(
        output, td_error
    )
    losses, errors = losses.sum(0), errors.mean(0)
    metrics = {"td_loss": losses, "q_value": value.mean(0), "td_error_abs": jnp.abs(td_error).mean(0)}
    return (weight * losses).sum(), (errors, {"weight": weight, **jax.tree.map(lambda x: weight * x, metrics)})


def minimum(context: Context, output: Array) -> Atoms:
    """Return the atoms [B, K] of the critic with the lowest mean; for quantiles, the lower ones of all critics."""
    if context.value_head.kind == "quantile":
        return value_distributions.truncated(output, context.config.value.drop)
    return value_distributions.minimum(context.value_head, output)


def values(context: Context, learner: Learner, obs: PyTree, action: Array | None) -> Array:
    """Return the critics' expected returns [num_critics, B] for the policy's loss; [.., A] of all discrete actions."""
    params = with_stats(flat.unpack(learner.params.critic), learner.batch_stats)
    return value_distributions.mean(context.value_head, context.critic.apply(params, (obs, action)))
