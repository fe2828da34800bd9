"""Rollouts: a policy acts in N environments, and what came of it is written down."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.types import (
    Agent,
    Array,
    Decision,
    Env,
    EpisodeScore,
    Key,
    Metrics,
    PyTree,
    Rollout,
    TimeStep,
    Transition,
)

Policy = Callable[[PyTree, PyTree, PyTree], Decision]  # (obs, memory, noise)
Games = tuple[Array, Array, Array]  # [N] whether it is over; its score f32 and its length int32 with this step


class Actors(NamedTuple):
    """Where the N environments stand."""

    env: PyTree
    timestep: TimeStep
    memory: PyTree
    score: Array  # [N] f32: reward so far in this game
    length: Array  # [N] int32: environment steps so far in this game


def reset(env: Env, agent: Agent, key: Key) -> Actors:
    """N actors, each at the start of an episode."""
    env_state, timestep = env.reset(key)
    num_envs = env.spec.num_envs
    length = jnp.zeros(num_envs, jnp.int32)
    return Actors(env_state, timestep, _fresh_memory(agent, num_envs), jnp.zeros(num_envs), length)


def collect(
    env: Env, agent: Agent, policy: Policy, actors: Actors, noise: PyTree, num_steps: int
) -> tuple[Actors, Rollout, Metrics]:
    """Lets `policy` act for T = `num_steps`, with `noise` [T, ...]; also returns the scores of games that ended."""
    end, (steps, games) = jax.lax.scan(partial(step, env, agent, policy), actors, noise, num_steps)
    experience = Rollout(steps, end.timestep.obs, actors.memory, actors.timestep.obs)
    return end, experience, scores_of(steps.valid, *games)


def step(
    env: Env, agent: Agent, policy: Policy, actors: Actors, noise: PyTree
) -> tuple[Actors, tuple[Transition, Games]]:
    """One step of all N, a row of a rollout; and of each the game that it is in."""
    decision = policy(actors.timestep.obs, actors.memory, noise)
    return follow(agent, actors, decision, *env.step(actors.env, decision.action))


def follow(
    agent: Agent, actors: Actors, decision: Decision, env_state: PyTree, after: TimeStep
) -> tuple[Actors, tuple[Transition, Games]]:
    """Where the actors stand when their decision is answered; what they have been through, and how games ended."""
    now, extras = actors.timestep, decision.extras
    memory = jax.tree.map(partial(_where, now.last), _fresh_memory(agent, len(now.last)), decision.memory)
    reward, game_over = after.score or EpisodeScore(after.reward, after.last)
    score, length = actors.score + reward, actors.length + ~now.last
    row = Transition(agent.keep(now.obs), decision.action, after.reward, after.discount, after.last, ~now.last, extras)
    ended = jnp.where(game_over, 0.0, score), jnp.where(game_over, 0, length)
    return Actors(env_state, after, memory, *ended), (row, (game_over, score, length))


def scores_of(valid: Array, over: Array, score: Array, length: Array) -> Metrics:
    """Sums and extremes over the games that ended, [T, N]; a minimum of inf says that none did."""
    return {
        "episodes": over.sum(),
        "valid_steps": valid.sum(),
        "return_sum": jnp.where(over, score, 0.0).sum(),
        "return_min": jnp.where(over, score, jnp.inf).min(),
        "return_max": jnp.where(over, score, -jnp.inf).max(),
        "longest_episode": length.max(),  # of those that go on, too
        "length_sum": jnp.where(over, length, 0).astype(jnp.float32).sum(),  # past int32, if many end at once
    }


def _fresh_memory(agent: Agent, num_envs: int) -> PyTree:
    """[N, ...]"""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_envs, *jnp.shape(x))), agent.memory)


def _where(mask: Array, x: Array, y: Array) -> Array:
    return jnp.where(mask.reshape(mask.shape + (1,) * (y.ndim - 1)), x, y)
