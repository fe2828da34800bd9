"""Run minibatch SGD in several epochs over the rows of one rollout: all steps at once, or a few at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.kernels import rows as packing
from jaxrl_fast.networks import flat
from jaxrl_fast.options.algorithm import OnPolicy
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import minibatch, normalize
from jaxrl_fast.rl.frame_stack import Frames, decode
from jaxrl_fast.types import GradientSteps, Key, Metrics, Parallelism, PyTree, Rollout
from jaxrl_fast.utils import target


class UpdateBatch(NamedTuple):
    """The data of an update."""

    learner: PyTree  # the variables that gradient steps change
    rows: Any  # [num_rows, ...], each with a `weight`, 0 for rows that do not count; or sequences, with a `weight` [L]
    frames: Frames | None = None  # the frames from which the rows' `obs` are built, if they are stored as frames
    state: PyTree = None  # of the agent after the update, but for the changes by gradient steps and `moments`
    moments: PyTree = None  # Moments of this shard's rows, which are pooled over all shards
    metrics: PyTree = None  # of the rollout, equal on all shards, for `finalize`


class Epochs(NamedTuple):
    """Training on the rows of a rollout, as functions of an agent's state S."""

    num_epochs: int
    num_minibatches: int
    axis_name: str | None  # of the devices that share a minibatch
    num_grad_workers: int  # cores that have all rows and split every minibatch
    prepare: Callable[[PyTree, Rollout], UpdateBatch]
    gradient_step: Callable[[PyTree, Any], tuple[PyTree, PyTree]]  # (learner, rows [B]) to learner and metrics
    # (batch, learner, sums of the steps' metrics, moments of all shards) to S and metrics
    finalize: Callable[[UpdateBatch, PyTree, PyTree, PyTree], tuple[PyTree, Metrics]]
    standardize_field: str = ""  # the field that gets mean 0 and standard deviation 1 in each minibatch


def epochs_of(
    config: OnPolicy, parallelism: Parallelism, functions: tuple[Any, Any, Any], standardize_field: str = ""
) -> Epochs:
    """Return the training that an algorithm's options describe, with its `prepare`, `gradient_step` and `finalize`."""
    sizes = config.num_epochs, config.num_minibatches, parallelism.axis_name, parallelism.num_grad_workers
    return Epochs(*sizes, *functions, standardize_field)


def update(epochs: Epochs, state: PyTree, rollout: Rollout, key: Key) -> tuple[PyTree, Metrics]:
    """Learn from a rollout in several epochs of minibatches. Return the agent's state and metrics.

    The rows of an epoch are gathered at once, which is faster if there are few.
    """
    batch = epochs.prepare(state, rollout)
    plan, moments = _plan(epochs, batch, key)
    learner, metrics = jax.lax.scan(partial(_train_on, epochs, batch), flat.pack(batch.learner), plan)
    return epochs.finalize(batch, flat.unpack(learner), jax.tree.map(jnp.sum, metrics), moments)


class MinibatchPlan(NamedTuple):
    """The rows of each minibatch: [epochs, K, B], [K, B] for one epoch, or [B]."""

    order: Array  # int32 [..., B]: row numbers
    moments: normalize.Moments  # [...] f32 of each minibatch on all shards: the weight, and the field to standardize


class PartialUpdate(NamedTuple):
    """An update of which some gradient steps have been made."""

    batch: UpdateBatch
    plan: MinibatchPlan  # [steps, B]: the rows of each step
    learner: PyTree
    sums: PyTree  # of metrics
    moments: PyTree  # of all shards' rows


def incremental_update(epochs: Epochs) -> GradientSteps:
    """Return `update` in parts, a few gradient steps at a time."""

    def start(state: PyTree, rollout: Rollout, key: Key) -> PartialUpdate:
        batch = epochs.prepare(state, rollout)
        plan, moments = _plan(epochs, batch, key)
        plan = minibatch.flatten(plan)
        first = jax.tree.map(lambda x: x[:1], plan)
        learner = flat.pack(batch.learner)
        _, metrics = jax.eval_shape(partial(_train_on, epochs, batch), learner, first)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), metrics)
        return PartialUpdate(batch, plan, learner, nothing, moments)

    def take(update: PartialUpdate, first: int | Array, last: int | Array) -> PartialUpdate:
        def step(i: Array, so_far: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            learner, sums = so_far
            plan = jax.tree.map(lambda x: x[i][None], update.plan)
            learner, metrics = _train_on(epochs, update.batch, learner, plan)
            return learner, jax.tree.map(lambda total, x: total + x[0], sums, metrics)

        learner, sums = jax.lax.fori_loop(first, last, step, (update.learner, update.sums))
        return update._replace(learner=learner, sums=sums)

    finish = lambda update: epochs.finalize(update.batch, flat.unpack(update.learner), update.sums, update.moments)
    return GradientSteps(epochs.num_epochs * epochs.num_minibatches, start, take, finish)


def _train_on(epochs: Epochs, batch: UpdateBatch, learner: PyTree, plan: MinibatchPlan) -> tuple[PyTree, PyTree]:
    """Make one gradient step on each minibatch [K, B], with weights that sum to 1; metrics are [K]."""
    batches = minibatch.gather_rows(batch.rows, collectives.local_rows(plan.order, epochs.num_grad_workers, axis=1))
    count, mean, var = (x.reshape(-1, *(1,) * (batches.weight.ndim - 1)) for x in plan.moments)
    batches = batches._replace(weight=batches.weight / jnp.maximum(count, 1))
    if name := epochs.standardize_field:
        x = getattr(batches, name)
        # The only row of a minibatch is its mean: standardized it would be 0, and nothing would be learned from it.
        x = jnp.where(count > 1, (x - mean) / (jnp.sqrt(var) + 1e-8), x)
        batches = batches._replace(**{name: x})
    decoded = lambda rows: rows if batch.frames is None else rows._replace(obs=decode(batch.frames, rows.obs))
    step = lambda learner, rows: epochs.gradient_step(learner, decoded(rows))
    with jax.named_scope("gradient_steps"):
        trained: tuple[PyTree, PyTree] = packing.scan(step, learner, batches)
        return trained


def weighted_sums(weight: Array, loss: Array, metrics: Metrics) -> tuple[Array, Metrics]:
    """Return the sums of weighted rows [B] of a loss and of metrics; off a CPU, all in one reduction."""
    if target.platform() == "cpu":
        weigh = lambda x: jnp.sum(weight * x)
        return weigh(loss), jax.tree.map(weigh, metrics)
    terms = weight[None] * jnp.stack([loss, *metrics.values()])
    sums = terms.reshape(len(terms), -1).sum(axis=1)
    return sums[0], dict(zip(metrics, sums[1:]))


def _plan(epochs: Epochs, batch: UpdateBatch, key: Key) -> tuple[MinibatchPlan, PyTree]:
    """Return the minibatches of all epochs, [epochs, K, B], and the moments pooled over shards in one exchange."""
    rows = batch.rows

    def plan(key: Key) -> MinibatchPlan:
        order = minibatch.assign(key, len(rows.weight), epochs.num_minibatches)
        weight, x = minibatch.gather_rows((rows.weight, getattr(rows, epochs.standardize_field or "weight")), order)
        return MinibatchPlan(order, normalize.moments(*(x.reshape(len(x), -1) for x in (x, weight))))

    order, moments = jax.lax.map(plan, jax.random.split(key, epochs.num_epochs))
    moments, pooled = normalize.pool((moments, batch.moments), epochs.axis_name)
    return MinibatchPlan(order, moments), pooled
