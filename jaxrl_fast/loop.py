"""Alternate rollouts and updates in one scan, for any environment and agent."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast import ahead_rollout, async_rollout
from jaxrl_fast.rollout import Actors, collect, reset
from jaxrl_fast.types import Agent, Array, Env, Key, Metrics, PyTree, Rollout


class TrainState(NamedTuple):
    """The whole state of a training run: it suffices to resume, to vmap over seeds and to split over devices."""

    agent: PyTree
    actors: Actors | async_rollout.AsyncActors | ahead_rollout.AheadActors
    key: Key
    num_updates: Array  # int32; environment steps are derived from it on the host, where integers do not overflow
    rollout: Rollout | None = None  # with --overlap: the last rollout, which the next update learns from


def init(env: Env, agent: Agent, key: Key) -> TrainState:
    """Return the state before the first step. Parameters depend on the key only, environments also on the shard."""
    key_agent, key_env, key = jax.random.split(key, 3)
    learner = agent.init(key_agent)
    actors = restart_envs(env, agent, learner, key_of_shard(env, key_env))
    if not async_rollout.overlaps(env):
        return TrainState(learner, actors, key, jnp.int32(0))
    like = jax.eval_shape(lambda: act(env, agent, learner, actors, key)[1])
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)  # with no valid row
    return TrainState(learner, actors, key, jnp.int32(0), nothing)


def train(env: Env, agent: Agent, state: TrainState, num_updates: int) -> tuple[TrainState, Metrics]:
    """Run `num_updates` train steps in one scan. Metrics are stacked: [num_updates]."""
    state, rows = jax.lax.scan(lambda state, _: train_once(env, agent, state), state, length=num_updates)
    return state, combine_shards(env, *rows)


def train_once(env: Env, agent: Agent, state: TrainState) -> tuple[TrainState, tuple[Metrics, Metrics]]:
    """Run one train step, overlapped or not. Also returns this shard's episode scores and the agent's metrics."""
    return (train_step_overlapped if async_rollout.overlaps(env) else train_step)(env, agent, state)


def train_step(env: Env, agent: Agent, state: TrainState) -> tuple[TrainState, tuple[Metrics, Metrics]]:
    """Act for T steps, then learn from them."""
    key_noise, key_update, key = jax.random.split(state.key, 3)
    actors, experience, scores = act(env, agent, state.agent, state.actors, key_of_shard(env, key_noise))
    learner, metrics = agent.update(state.agent, experience, key_of_shard(env, key_update))
    return TrainState(learner, actors, key, state.num_updates + 1), (scores, metrics)


def train_step_overlapped(env: Env, agent: Agent, state: TrainState) -> tuple[TrainState, tuple[Metrics, Metrics]]:
    """Collect a rollout while the agent learns from the previous one. The policy that acts is one update old."""
    learning, actors, before = agent.learning.gradient_steps, state.actors, state.rollout
    assert learning and isinstance(actors, async_rollout.AsyncActors) and isinstance(before, Rollout)  # by the plan
    key_noise, key_update, key = jax.random.split(state.key, 3)
    num_gradient_steps = jnp.where(state.num_updates > 0, learning.num, 0)  # before the first rollout
    first = lambda t: num_gradient_steps * t // agent.rollout_length  # spread evenly over the rollout
    update = learning.prepare(state.agent, before, key_of_shard(env, key_update))
    learn = async_rollout.Work(update, lambda t, update: learning.step(update, first(t), first(t + 1)))
    policy, key_noise = partial(agent.explore, state.agent), key_of_shard(env, key_noise)
    actors, experience, scores, update = async_rollout.collect(env, agent, policy, actors, key_noise, learn)
    learner, metrics = learning.finalize(update)
    if "gradient_steps" not in metrics:  # the first update has none, and reports nothing
        some = num_gradient_steps > 0
        sums = {f"{name}_sum": jnp.where(some, num_gradient_steps * x, 0) for name, x in metrics.items()}
        metrics = sums | {"gradient_steps": num_gradient_steps}
    return TrainState(learner, actors, key, state.num_updates + 1, experience), (scores, metrics)


def cut(rollout: Rollout) -> Rollout:
    """Return the rollout with all its episodes truncated at the end."""
    return rollout._replace(steps=rollout.steps._replace(last=rollout.steps.last.at[-1].set(True)))


def act(env: Env, agent: Agent, learner: PyTree, actors: PyTree, key: Key) -> tuple[PyTree, Rollout, Metrics]:
    """Collect a rollout with the exploring policy. Also returns the scores of episodes that ended."""
    policy, num_steps = partial(agent.explore, learner), agent.rollout_length
    if env.pools and env.pools.ahead:
        return ahead_rollout.collect(env, agent, learner, actors, key)
    if env.pools:
        return async_rollout.collect(env, agent, policy, actors, key)[:3]
    return collect(env, agent, policy, actors, agent.sample_noise(key, num_steps, env.spec.num_envs), num_steps)


def restart_envs(env: Env, agent: Agent, learner: PyTree, key: Key) -> PyTree:
    """Return N actors, each at the start of an episode. Asynchronous pools are sent their first actions."""
    if env.pools and env.pools.ahead:
        return ahead_rollout.begin(env, agent, learner, key)
    if env.pools:
        return async_rollout.begin(env, agent, partial(agent.explore, learner), key)
    return reset(env, agent, key)


def key_of_shard(env: Env, key: Key) -> Key:
    """Return a different key on each shard."""
    axis_name = env.parallelism.axis_name
    return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def combine_shards(env: Env, scores: Metrics, metrics: Metrics) -> Metrics:
    """Combine the scores of all shards, for many updates at once, since this synchronizes the devices."""
    if env.parallelism.axis_name is not None:
        reduce = {"return_min": jax.lax.pmin, "return_max": jax.lax.pmax, "longest_episode": jax.lax.pmax}
        scores = {name: reduce.get(name, jax.lax.psum)(x, env.parallelism.axis_name) for name, x in scores.items()}
    return {**scores, **metrics}
