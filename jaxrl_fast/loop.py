"""Rollout and update as one scan. Knows environments and agents only by their functions."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.types import Agent, Array, Decision, Env, Game, Key, Metrics, PyTree, Rollout, TimeStep, Transition

Policy = Callable[[PyTree, PyTree, PyTree], Decision]  # (obs, memory, noise)


class Actors(NamedTuple):
    """Where the N environments stand."""

    env: PyTree
    timestep: TimeStep
    memory: PyTree
    score: Array  # [N] f32: reward so far in this game
    length: Array  # [N] int32: environment steps so far in this game


class TrainState(NamedTuple):
    """All there is: enough to continue, to save, to vmap over seeds and to split over devices."""

    agent: PyTree
    actors: Actors
    key: Key
    num_updates: Array  # int32; environment steps are derived from it on the host, where integers do not overflow


def init(env: Env, agent: Agent, key: Key) -> TrainState:
    """Before the first step: parameters from the key alone, environments also from the device's place."""
    key_agent, key_env, key = jax.random.split(key, 3)
    actors = reset(env, agent, _key_of_shard(env, key_env))
    return TrainState(agent.init(key_agent), actors, key, jnp.int32(0))


def train(env: Env, agent: Agent, state: TrainState, num_updates: int) -> tuple[TrainState, Metrics]:
    """`num_updates` train steps in one scan. Metrics are stacked: [num_updates]."""
    state, (scores, metrics) = jax.lax.scan(lambda state, _: train_step(env, agent, state), state, length=num_updates)
    return state, {**_over_shards(env, scores), **metrics}


def train_step(env: Env, agent: Agent, state: TrainState) -> tuple[TrainState, tuple[Metrics, Metrics]]:
    """What every algorithm here does, over and over: act for T steps, then learn from them."""
    key_noise, key_update, key = jax.random.split(state.key, 3)
    noise = agent.noise(_key_of_shard(env, key_noise), agent.rollout_length, env.spec.num_envs)
    actors, experience, scores = rollout(env, agent, partial(agent.explore, state.agent), state.actors, noise)
    learner, metrics = agent.update(state.agent, experience, _key_of_shard(env, key_update))
    return TrainState(learner, actors, key, state.num_updates + 1), (scores, metrics)


def reset(env: Env, agent: Agent, key: Key) -> Actors:
    """N actors, each at the start of an episode."""
    env_state, timestep = env.reset(key)
    num_envs = env.spec.num_envs
    return Actors(env_state, timestep, _fresh_memory(env, agent), jnp.zeros(num_envs), jnp.zeros(num_envs, jnp.int32))


def rollout(env: Env, agent: Agent, policy: Policy, actors: Actors, noise: PyTree) -> tuple[Actors, Rollout, Metrics]:
    """Lets `policy` act once for each step of `noise` [T, ...]; also returns the scores of games that ended."""

    fresh = _fresh_memory(env, agent)

    def step(actors, noise):
        now = actors.timestep
        decision = policy(now.obs, actors.memory, noise)
        env_state, after = env.step(actors.env, decision.action)
        memory = jax.tree.map(partial(_where, now.last), fresh, decision.memory)
        game = after.game or Game(after.reward, after.last)
        score, length = actors.score + game.reward, actors.length + ~now.last
        row = Transition(now.obs, decision.action, after.reward, after.discount, after.last, ~now.last, decision.extras)
        ended = jnp.where(game.over, 0.0, score), jnp.where(game.over, 0, length)
        return Actors(env_state, after, memory, *ended), (row, (game.over, score, length))

    end, (steps, games) = jax.lax.scan(step, actors, noise)
    return end, Rollout(steps, end.timestep.obs, actors.memory), _scores(steps.valid, *games)


def _fresh_memory(env: Env, agent: Agent) -> PyTree:
    """[N, ...]"""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (env.spec.num_envs, *jnp.shape(x))), agent.memory)


def _scores(valid: Array, over: Array, score: Array, length: Array) -> Metrics:
    """Sums and extremes over the games that ended; a minimum of inf says that none did."""
    return {
        "episodes": over.sum(),
        "valid_steps": valid.sum(),
        "return_sum": jnp.where(over, score, 0.0).sum(),
        "return_min": jnp.where(over, score, jnp.inf).min(),
        "return_max": jnp.where(over, score, -jnp.inf).max(),
        "length_sum": jnp.where(over, length, 0).sum(),
    }


def _over_shards(env: Env, scores: Metrics) -> Metrics:
    """The scores of all devices' games together."""
    if env.spec.axis_name is None:
        return scores
    reduce = {"return_min": jax.lax.pmin, "return_max": jax.lax.pmax}
    return {name: reduce.get(name, jax.lax.psum)(x, env.spec.axis_name) for name, x in scores.items()}


def _key_of_shard(env: Env, key: Key) -> Key:
    """A key of its own for each device that the environments are split over."""
    axis_name = env.spec.axis_name
    return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def _where(mask: Array, x: Array, y: Array) -> Array:
    return jnp.where(mask.reshape(mask.shape + (1,) * (y.ndim - 1)), x, y)
