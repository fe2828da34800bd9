"""Gradient steps on minibatches, in several epochs over the rows of one rollout: all at once, or a few at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast import minibatch
from jaxrl_fast.gradients import total
from jaxrl_fast.types import GradientSteps, Key, Metrics, PyTree, Rollout


class Epochs(NamedTuple):
    """How an algorithm goes through rows [num_rows, ...], which have a `weight` each: 0 for those that do not count."""

    num_epochs: int
    num_minibatches: int
    axis_name: str | None  # of the devices that share a minibatch
    gradient_step: Callable[[PyTree, Any], tuple[PyTree, PyTree]]  # (learner, rows [B]) to learner and metrics
    standardise: Callable[[Any], Any] = lambda batches: batches  # several minibatches [K, B] before their steps


def run(epochs: Epochs, learner: PyTree, rows: Any, key: Key) -> tuple[PyTree, PyTree]:
    """The learner, which is what gradient steps change, after all epochs, and the sums of the steps' metrics.

    The rows of an epoch are gathered at once, which is faster where there are few.
    """
    epoch = lambda learner, key: _take(epochs, learner, rows, _deal(epochs, rows, key))
    learner, metrics = jax.lax.scan(epoch, learner, jax.random.split(key, epochs.num_epochs))
    return learner, jax.tree.map(jnp.sum, metrics)


class UnderWay(NamedTuple):
    """An update of which some gradient steps have been taken."""

    lesson: Any
    order: Array  # int32 [steps, B]: the rows of each step
    learner: PyTree
    sums: PyTree  # of metrics


def in_parts(
    num_steps: int,
    begin: Callable[[PyTree, Rollout], Any],
    epochs_of: Callable[[Any], Epochs],
    end: Callable[[Any, PyTree, PyTree], tuple[PyTree, Metrics]],
) -> GradientSteps:
    """An update by `run`, a few of its gradient steps at a time.

    `begin` makes a lesson of an agent's state S and a rollout, with the `rows` and the `learner` of `run`; `end` makes
    the next S of the lesson and what `run` returns.
    """

    def start(state: PyTree, rollout: Rollout, key: Key) -> UnderWay:
        lesson = begin(state, rollout)
        epochs = epochs_of(lesson)
        order = jax.lax.map(lambda key: _deal(epochs, lesson.rows, key), jax.random.split(key, epochs.num_epochs))
        order = order.reshape(-1, order.shape[-1])
        once = lambda learner, order: _take(epochs, learner, lesson.rows, order)
        _, metrics = jax.eval_shape(once, lesson.learner, order[:1])
        return UnderWay(lesson, order, lesson.learner, jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), metrics))

    def take(under_way: UnderWay, first: int | Array, last: int | Array) -> UnderWay:
        lesson, order, *so_far = under_way
        epochs = epochs_of(lesson)

        def step(i, so_far):
            learner, metrics = _take(epochs, so_far[0], lesson.rows, order[i][None])
            return [learner, jax.tree.map(lambda total, x: total + x[0], so_far[1], metrics)]

        return UnderWay(lesson, order, *jax.lax.fori_loop(first, last, step, so_far))

    finish = lambda under_way: end(under_way.lesson, under_way.learner, under_way.sums)
    return GradientSteps(num_steps, start, take, finish)


def _take(epochs: Epochs, learner: PyTree, rows: Any, order: Array) -> tuple[PyTree, PyTree]:
    """One gradient step on each minibatch [K, B] of rows, whose weights become those of a mean; metrics are [K]."""
    batches = minibatch.take(rows, order)
    count = total(batches.weight.sum(1, keepdims=True), epochs.axis_name)
    batches = batches._replace(weight=batches.weight / jnp.maximum(count, 1))
    return jax.lax.scan(epochs.gradient_step, learner, epochs.standardise(batches))


def _deal(epochs: Epochs, rows: Any, key: Key) -> Array:
    return minibatch.deal(key, len(rows.weight), epochs.num_minibatches)
