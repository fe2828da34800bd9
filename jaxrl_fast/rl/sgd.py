"""Gradient steps on minibatches, in several epochs over the rows of one rollout: all at once, or a few at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import minibatch, normalize
from jaxrl_fast.types import GradientSteps, Key, Metrics, PyTree, Rollout


class Epochs(NamedTuple):
    """How an algorithm goes through rows [num_rows, ...], which have a `weight` each: 0 for those that do not count."""

    num_epochs: int
    num_minibatches: int
    axis_name: str | None  # of the devices that share a minibatch
    gradient_step: Callable[[PyTree, Any], tuple[PyTree, PyTree]]  # (learner, rows [B]) to learner and metrics
    standardized: str = ""  # what of the rows gets mean 0 and standard deviation 1 in each minibatch
    num_grad_workers: int = 1  # cores that have all rows, of which each takes its part of every minibatch


def run(epochs: Epochs, learner: PyTree, rows: Any, key: Key, others: PyTree = ()) -> tuple[PyTree, PyTree, PyTree]:
    """The learner, which is what gradient steps change, after all epochs, and the sums of the steps' metrics.

    Also what `others` are, a tree of Moments, of all devices' rows together.
    The rows of an epoch are gathered at once, which is faster where there are few.
    """
    epoch = lambda learner, deal: _take(epochs, learner, rows, deal)
    deal, others = _plan(epochs, rows, key, others)
    learner, metrics = jax.lax.scan(epoch, learner, deal)
    return learner, jax.tree.map(jnp.sum, metrics), others


class MinibatchPlan(NamedTuple):
    """Some minibatches: [epochs, K, B], [K, B] of an epoch, or [B]."""

    order: Array  # int32 [..., B]: their rows
    moments: normalize.Moments  # [...] f32, of all devices' rows of each: their weight, and what is standardized


class PartialUpdate(NamedTuple):
    """An update of which some gradient steps have been taken."""

    lesson: Any
    deal: MinibatchPlan  # [steps, B]: the rows of each step
    learner: PyTree
    sums: PyTree  # of metrics
    others: PyTree  # Moments of all devices' rows


def incremental_update(
    num_steps: int,
    begin: Callable[[PyTree, Rollout], Any],
    epochs_of: Callable[[Any], Epochs],
    end: Callable[[Any, PyTree, PyTree, PyTree], tuple[PyTree, Metrics]],
) -> GradientSteps:
    """An update by `run`, a few of its gradient steps at a time.

    `begin` makes a lesson of an agent's state S and a rollout, with `rows`, `learner` and `others` as `run` wants them;
    `end` makes the next S of the lesson and what `run` returns.
    """

    def start(state: PyTree, rollout: Rollout, key: Key) -> PartialUpdate:
        lesson = begin(state, rollout)
        epochs = epochs_of(lesson)
        deal, others = _plan(epochs, lesson.rows, key, lesson.others)
        deal = minibatch.flatten(deal)
        once = lambda learner, deal: _take(epochs, learner, lesson.rows, deal)
        _, metrics = jax.eval_shape(once, lesson.learner, jax.tree.map(lambda x: x[:1], deal))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), metrics)
        return PartialUpdate(lesson, deal, lesson.learner, nothing, others)

    def take(under_way: PartialUpdate, first: int | Array, last: int | Array) -> PartialUpdate:
        lesson, deal, *so_far, others = under_way
        epochs = epochs_of(lesson)

        def step(i, so_far):
            learner, metrics = _take(epochs, so_far[0], lesson.rows, jax.tree.map(lambda x: x[i][None], deal))
            return [learner, jax.tree.map(lambda total, x: total + x[0], so_far[1], metrics)]

        learner, sums = jax.lax.fori_loop(first, last, step, so_far)
        return PartialUpdate(lesson, deal, learner, sums, others)

    finish = lambda under_way: end(under_way.lesson, under_way.learner, under_way.sums, under_way.others)
    return GradientSteps(num_steps, start, take, finish)


def _take(epochs: Epochs, learner: PyTree, rows: Any, deal: MinibatchPlan) -> tuple[PyTree, PyTree]:
    """One gradient step on each minibatch [K, B] of rows, whose weights become those of a mean; metrics are [K]."""
    batches = minibatch.gather_rows(rows, collectives.local_rows(deal.order, epochs.num_grad_workers, axis=1))
    count, mean, var = (x[:, None] for x in deal.moments)
    batches = batches._replace(weight=batches.weight / jnp.maximum(count, 1))
    if name := epochs.standardized:
        batches = batches._replace(**{name: (getattr(batches, name) - mean) / (jnp.sqrt(var) + 1e-8)})
    return jax.lax.scan(epochs.gradient_step, learner, batches)


def _plan(epochs: Epochs, rows: Any, key: Key, others: PyTree) -> tuple[MinibatchPlan, PyTree]:
    """The minibatches of all epochs, [epochs, K, B]. What devices have to tell each other of rows, they do at once."""

    def deal(key):
        order = minibatch.assign(key, len(rows.weight), epochs.num_minibatches)
        weight, x = minibatch.gather_rows((rows.weight, getattr(rows, epochs.standardized or "weight")), order)
        return MinibatchPlan(order, normalize.moments(x, weight))

    order, moments = jax.lax.map(deal, jax.random.split(key, epochs.num_epochs))
    moments, others = normalize.pool((moments, others), epochs.axis_name)
    return MinibatchPlan(order, moments), others
