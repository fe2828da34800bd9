"""Run minibatch SGD in several epochs over the rows of one rollout: all steps at once, or a few at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import minibatch, normalize
from jaxrl_fast.types import GradientSteps, Key, Metrics, PyTree, Rollout


class Epochs(NamedTuple):
    """The settings for training on rows [num_rows, ...], each with a `weight`: 0 for rows that do not count.

    A row may be a sequence of L steps, with a `weight` [L].
    """

    num_epochs: int
    num_minibatches: int
    axis_name: str | None  # of the devices that share a minibatch
    gradient_step: Callable[[PyTree, Any], tuple[PyTree, PyTree]]  # (learner, rows [B]) to learner and metrics
    standardize_field: str = ""  # the field that gets mean 0 and standard deviation 1 in each minibatch
    num_grad_workers: int = 1  # cores that have all rows and split every minibatch


def run(
    epochs: Epochs, learner: PyTree, rows: Any, key: Key, extra_moments: PyTree = None
) -> tuple[PyTree, PyTree, PyTree]:
    """Return the learner after all epochs, the sums of the steps' metrics, and `extra_moments` pooled over all shards.

    Gradient steps change the learner only; `extra_moments` is a tree of Moments of this shard's rows. The rows of an
    epoch are gathered at once, which is faster if there are few.
    """
    epoch = lambda learner, plan: _train_on(epochs, learner, rows, plan)
    plan, extra_moments = _plan(epochs, rows, key, extra_moments)
    learner, metrics = jax.lax.scan(epoch, learner, plan)
    return learner, jax.tree.map(jnp.sum, metrics), extra_moments


class MinibatchPlan(NamedTuple):
    """The rows of each minibatch: [epochs, K, B], [K, B] for one epoch, or [B]."""

    order: Array  # int32 [..., B]: row numbers
    moments: normalize.Moments  # [...] f32 of each minibatch on all shards: the weight, and the field to standardize


class PartialUpdate(NamedTuple):
    """An update of which some gradient steps have been made."""

    update_batch: Any
    plan: MinibatchPlan  # [steps, B]: the rows of each step
    learner: PyTree
    sums: PyTree  # of metrics
    extra_moments: PyTree  # Moments of all shards' rows


def incremental_update(
    num_steps: int,
    prepare: Callable[[PyTree, Rollout], Any],
    epochs_of: Callable[[Any], Epochs],
    finalize: Callable[[Any, PyTree, PyTree, PyTree], tuple[PyTree, Metrics]],
) -> GradientSteps:
    """Return the update of `run` in parts, a few gradient steps at a time.

    `prepare` makes a batch from an agent's state S and a rollout, with the `rows`, `learner` and `moments` of `run`.
    `finalize` makes the next S from that batch and the results of `run`.
    """

    def start(state: PyTree, rollout: Rollout, key: Key) -> PartialUpdate:
        update_batch = prepare(state, rollout)
        epochs = epochs_of(update_batch)
        plan, extra_moments = _plan(epochs, update_batch.rows, key, update_batch.moments)
        plan = minibatch.flatten(plan)
        once = lambda learner, plan: _train_on(epochs, learner, update_batch.rows, plan)
        _, metrics = jax.eval_shape(once, update_batch.learner, jax.tree.map(lambda x: x[:1], plan))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), metrics)
        return PartialUpdate(update_batch, plan, update_batch.learner, nothing, extra_moments)

    def take(update: PartialUpdate, first: int | Array, last: int | Array) -> PartialUpdate:
        update_batch, plan, *so_far, extra_moments = update
        epochs = epochs_of(update_batch)

        def step(i: Array, so_far: list[Any]) -> list[Any]:
            learner, metrics = _train_on(epochs, so_far[0], update_batch.rows, jax.tree.map(lambda x: x[i][None], plan))
            return [learner, jax.tree.map(lambda total, x: total + x[0], so_far[1], metrics)]

        learner, sums = jax.lax.fori_loop(first, last, step, so_far)
        return PartialUpdate(update_batch, plan, learner, sums, extra_moments)

    finish = lambda update: finalize(update.update_batch, update.learner, update.sums, update.extra_moments)
    return GradientSteps(num_steps, start, take, finish)


def _train_on(epochs: Epochs, learner: PyTree, rows: Any, plan: MinibatchPlan) -> tuple[PyTree, PyTree]:
    """Make one gradient step on each minibatch [K, B], with weights that sum to 1; metrics are [K]."""
    batches = minibatch.gather_rows(rows, collectives.local_rows(plan.order, epochs.num_grad_workers, axis=1))
    count, mean, var = (x.reshape(-1, *(1,) * (batches.weight.ndim - 1)) for x in plan.moments)
    batches = batches._replace(weight=batches.weight / jnp.maximum(count, 1))
    if name := epochs.standardize_field:
        x = getattr(batches, name)
        # The only row of a minibatch is its mean: standardized it would be 0, and nothing would be learned from it.
        x = jnp.where(count > 1, (x - mean) / (jnp.sqrt(var) + 1e-8), x)
        batches = batches._replace(**{name: x})
    return jax.lax.scan(epochs.gradient_step, learner, batches)


def _plan(epochs: Epochs, rows: Any, key: Key, extra_moments: PyTree) -> tuple[MinibatchPlan, PyTree]:
    """Return the minibatches of all epochs, [epochs, K, B]. Moments are pooled over shards in one exchange."""

    def plan(key: Key) -> MinibatchPlan:
        order = minibatch.assign(key, len(rows.weight), epochs.num_minibatches)
        weight, x = minibatch.gather_rows((rows.weight, getattr(rows, epochs.standardize_field or "weight")), order)
        return MinibatchPlan(order, normalize.moments(*(x.reshape(len(x), -1) for x in (x, weight))))

    order, moments = jax.lax.map(plan, jax.random.split(key, epochs.num_epochs))
    moments, extra_moments = normalize.pool((moments, extra_moments), epochs.axis_name)
    return MinibatchPlan(order, moments), extra_moments
