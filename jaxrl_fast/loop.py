"""Rollout and update as one scan. Knows environments and agents only by their functions."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast import async_rollout
from jaxrl_fast.rollout import Actors, collect, reset
from jaxrl_fast.types import Agent, Array, Env, Key, Metrics, PyTree, Rollout


class TrainState(NamedTuple):
    """All there is: enough to continue, to save, to vmap over seeds and to split over devices."""

    agent: PyTree
    actors: Actors | async_rollout.AsyncActors
    key: Key
    num_updates: Array  # int32; environment steps are derived from it on the host, where integers do not overflow
    rollout: Rollout | tuple[()] = ()  # what was played last and is still to be learned from, where play does not wait


def init(env: Env, agent: Agent, key: Key) -> TrainState:
    """Before the first step: parameters from the key alone, environments also from the device's place."""
    key_agent, key_env, key = jax.random.split(key, 3)
    learner = agent.init(key_agent)
    actors = restart_envs(env, agent, learner, key_of_shard(env, key_env))
    if not async_rollout.overlaps(env):
        return TrainState(learner, actors, key, jnp.int32(0))
    like = jax.eval_shape(lambda: act(env, agent, learner, actors, key)[1])
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)  # not one row of it is valid
    return TrainState(learner, actors, key, jnp.int32(0), nothing)


def train(env: Env, agent: Agent, state: TrainState, num_updates: int) -> tuple[TrainState, Metrics]:
    """`num_updates` train steps in one scan. Metrics are stacked: [num_updates]."""
    state, rows = jax.lax.scan(lambda state, _: train_once(env, agent, state), state, length=num_updates)
    return state, combine_shards(env, *rows)


def train_once(env: Env, agent: Agent, state: TrainState) -> tuple[TrainState, tuple[Metrics, Metrics]]:
    """One train step, overlapped or not; also returns the scores of this device's games, and the agent's metrics."""
    return (train_step_overlapped if async_rollout.overlaps(env) else train_step)(env, agent, state)


def train_step(env: Env, agent: Agent, state: TrainState) -> tuple[TrainState, tuple[Metrics, Metrics]]:
    """What every algorithm here does, over and over: act for T steps, then learn from them."""
    key_noise, key_update, key = jax.random.split(state.key, 3)
    actors, experience, scores = act(env, agent, state.agent, state.actors, key_of_shard(env, key_noise))
    learner, metrics = agent.update(state.agent, experience, key_of_shard(env, key_update))
    return TrainState(learner, actors, key, state.num_updates + 1), (scores, metrics)


def train_step_overlapped(env: Env, agent: Agent, state: TrainState) -> tuple[TrainState, tuple[Metrics, Metrics]]:
    """A train step in which pools play a rollout while the agent learns from the one before: its policy is older."""
    learning, actors, before = agent.gradient_steps, state.actors, state.rollout
    assert learning and isinstance(actors, async_rollout.AsyncActors) and isinstance(before, Rollout), (
        "the plan sees to it"
    )
    key_noise, key_update, key = jax.random.split(state.key, 3)
    num_gradient_steps = jnp.where(state.num_updates > 0, learning.num, 0)  # at first there is nothing to learn from
    by_then = lambda t: num_gradient_steps * t // agent.rollout_length  # spread evenly over the rollout
    learn = lambda t, lesson: learning.take(lesson, by_then(t), by_then(t + 1))
    lesson = learning.begin(state.agent, before, key_of_shard(env, key_update))
    policy, key_noise = partial(agent.explore, state.agent), key_of_shard(env, key_noise)
    actors, experience, scores, lesson = async_rollout.collect(env, agent, policy, actors, key_noise, learn, lesson)
    learner, metrics = learning.end(lesson)
    if "gradient_steps" not in metrics:  # so that the first update, which learns nothing, tells nothing
        some = num_gradient_steps > 0
        sums = {f"{name}_sum": jnp.where(some, num_gradient_steps * x, 0) for name, x in metrics.items()}
        metrics = sums | {"gradient_steps": num_gradient_steps}
    return TrainState(learner, actors, key, state.num_updates + 1, experience), (scores, metrics)


def cut(rollout: Rollout) -> Rollout:
    """A rollout whose episodes nobody goes on with: time runs out for all of them."""
    return rollout._replace(steps=rollout.steps._replace(last=rollout.steps.last.at[-1].set(True)))


def act(env: Env, agent: Agent, learner: PyTree, actors: PyTree, key: Key) -> tuple[PyTree, Rollout, Metrics]:
    """A rollout by the exploring policy; also returns the scores of games that ended."""
    policy, num_steps = partial(agent.explore, learner), agent.rollout_length
    if env.pools:
        return async_rollout.collect(env, agent, policy, actors, key)[:3]
    return collect(env, agent, policy, actors, agent.noise(key, num_steps, env.spec.num_envs), num_steps)


def restart_envs(env: Env, agent: Agent, learner: PyTree, key: Key) -> Actors | async_rollout.AsyncActors:
    """N actors, each at the start of an episode. Those of pools are sent their first actions."""
    if env.pools:
        return async_rollout.begin(env, agent, partial(agent.explore, learner), key)
    return reset(env, agent, key)


def key_of_shard(env: Env, key: Key) -> Key:
    """A key of its own for each device that the environments are split over."""
    axis_name = env.spec.axis_name
    return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def combine_shards(env: Env, scores: Metrics, metrics: Metrics) -> Metrics:
    """Scores of all devices' games, and metrics. Of many updates at once, for devices wait for each other here."""
    if env.spec.axis_name is not None:
        reduce = {"return_min": jax.lax.pmin, "return_max": jax.lax.pmax, "longest_episode": jax.lax.pmax}
        scores = {name: reduce.get(name, jax.lax.psum)(x, env.spec.axis_name) for name, x in scores.items()}
    return {**scores, **metrics}
