"""Collect rollouts: a policy acts in N environments, and every step is recorded.

Scores are of games. In Atari, a game is a full game with all lives: an episode may end at a lost life while the game
continues. In other environments, a game is an episode.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.kernels import rows
from jaxrl_fast.kernels.allreduce import call_on_first_core
from jaxrl_fast.types import (
    Agent,
    Array,
    Decision,
    Env,
    EpisodeScore,
    Key,
    Metrics,
    PolicyInput,
    PyTree,
    Rollout,
    TimeStep,
    Transition,
)

Policy = Callable[[PolicyInput, PyTree, PyTree], Decision]  # (input, carry, noise)


class Scores(NamedTuple):
    """The games of N environments after a step."""

    over: Array  # [N] bool: the game is over
    score: Array  # [N] f32: reward so far in the game
    length: Array  # [N] int32: environment steps so far in the game
    failed: Array | None  # [N] bool: the step failed; None: none can


class Actors(NamedTuple):
    """The state of N environments and of the policy that acts in them."""

    env: PyTree
    timestep: TimeStep
    carry: PyTree
    score: Array  # [N] f32: reward so far in this game
    length: Array  # [N] int32: environment steps so far in this game


def reset(env: Env, agent: Agent, key: Key) -> Actors:
    """Return N actors, each at the start of an episode."""
    env_state, timestep = _once(env, env.reset, key)
    num_envs = env.spec.num_envs
    length = jnp.zeros(num_envs, jnp.int32)
    return Actors(env_state, timestep, initial_carry(agent, num_envs), jnp.zeros(num_envs), length)


def collect(
    env: Env, agent: Agent, policy: Policy, actors: Actors, noise: PyTree, num_steps: int
) -> tuple[Actors, Rollout, Metrics]:
    """Act with `policy` for T = `num_steps` steps, with `noise` [T, ...].

    Returns the actors afterwards, the rollout, and the scores of games that ended.
    """
    take_steps = lambda actors, noise: rows.scan(partial(step, env, agent, policy), actors, noise, 1, num_steps)
    with jax.named_scope("environment_steps"):
        end, (steps, scores) = _once(env, take_steps, actors, noise)
    experience = as_rollout(steps, scores.failed, actors.carry, actors.timestep, end.timestep)
    if env.spec.players:
        return end, experience, scores_of_games(env, agent, steps.valid, scores)
    return end, experience, scores_of(steps.valid, scores)


def _once(env: Env, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """Call a function that steps environments; those on the host are stepped by one gradient worker for all."""
    on_first = not env.on_device and env.parallelism.num_grad_workers > 1
    return call_on_first_core(function, *arguments) if on_first else function(*arguments)


def as_rollout(steps: Transition, failed: Array | None, carry: PyTree, first: TimeStep, after: TimeStep) -> Rollout:
    """Return T steps as a rollout, with the time steps before the first and after the last one.

    An episode is truncated before a step that `failed` [T, N]: the failed step then resembles a reset.
    """
    if failed is not None:
        steps = steps._replace(last=steps.last.at[:-1].set(steps.last[:-1] | failed[1:]))
    return Rollout(steps, after.obs, carry, first.obs, after.action_mask)


def step(
    env: Env, agent: Agent, policy: Policy, actors: Actors, noise: PyTree
) -> tuple[Actors, tuple[Transition, Scores]]:
    """Take one step in all N environments: one row of a rollout."""
    decision = policy(policy_input(actors.timestep), actors.carry, noise)
    return follow(agent, actors, decision, *env.step(actors.env, decision.action))


def policy_input(timestep: TimeStep) -> PolicyInput:
    """Return the parts of a time step that a policy may use."""
    return PolicyInput(timestep.obs, timestep.action_mask)


def follow(
    agent: Agent, actors: Actors, decision: Decision, env_state: PyTree, after: TimeStep
) -> tuple[Actors, tuple[Transition, Scores]]:
    """Return the actors after the step that took a decision, the row of the rollout, and the scores of games.

    This function alone resets the recurrent state where an episode begins. A game in which a step failed has no score.
    """
    now, extras = actors.timestep, decision.extras
    reward, game_over = after.score or EpisodeScore(after.reward, after.last)
    valid, stopped = ~now.last, game_over
    if after.failed is not None:
        valid, stopped, game_over = valid & ~after.failed, game_over | after.failed, game_over & ~after.failed
    carry = jax.tree.map(partial(_where, ~valid), initial_carry(agent, len(now.last)), decision.carry)
    score, length = actors.score + reward, actors.length + valid
    row = Transition(
        agent.learning.compress_obs(now.obs),
        decision.action,
        after.reward,
        after.discount,
        after.last,
        valid,
        extras,
        now.action_mask,
    )
    ended = jnp.where(stopped, 0.0, score), jnp.where(stopped, 0, length)
    return Actors(env_state, after, carry, *ended), (row, Scores(game_over, score, length, after.failed))


def scores_of(valid: Array, scores: Scores) -> Metrics:
    """Return sums and extremes over the games that ended, [T, N]; the minimum is inf if none did."""
    over, score, length, failed = scores
    quarantined = {} if failed is None else {"quarantined": failed.sum()}
    return quarantined | {
        "episodes": over.sum(),
        "valid_steps": valid.sum(),
        "return_sum": jnp.where(over, score, 0.0).sum(),
        "return_min": jnp.where(over, score, jnp.inf).min(),
        "return_max": jnp.where(over, score, -jnp.inf).max(),
        "longest_episode": length.max(),  # unfinished ones included
        "length_sum": jnp.where(over, length, 0).astype(jnp.float32).sum(),  # exceeds int32 if many end at once
    }


def scores_of_games(env: Env, agent: Agent, valid: Array, scores: Scores) -> Metrics:
    """Return `scores_of` with games counted once, as means over their players, and sums for each player.

    A step of a game is valid while any of its players acts.

    Of player "left", "return_sum/left" is the sum over the "episodes/left" that ended and in which it is scored.
    """
    players, num_rows = env.spec.players, valid.shape[1]
    is_scored = agent.players.is_scored(num_rows) if agent.players.is_scored else np.ones(num_rows, bool)
    num_scored = int(is_scored.sum()) // env.spec.num_games  # players of each game
    in_game, over = valid.reshape(len(valid), len(players), -1).any(axis=1), scores.over & is_scored[None]
    found = scores_of(in_game, scores._replace(over=over))
    counts = {"episodes": found["episodes"] // num_scored}
    sums = {name: found[name] / num_scored for name in ("return_sum", "length_sum")}
    rows = [slice(i * env.spec.num_games, (i + 1) * env.spec.num_games) for i in range(len(players))]
    episodes = {f"episodes/{player}": over[:, own].sum() for player, own in zip(players, rows)}
    returns = {
        f"return_sum/{player}": jnp.where(over, scores.score, 0.0)[:, own].sum() for player, own in zip(players, rows)
    }
    return {**found, **counts, **sums, **episodes, **returns}


def initial_carry(agent: Agent, num_envs: int) -> PyTree:
    """Return the recurrent state at the start of an episode in N environments, [N, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_envs, *jnp.shape(x))), agent.initial_carry)


def _where(last: Array, fresh: Array, x: Array) -> Array:
    return jnp.where(last.reshape(-1, *(1,) * (x.ndim - 1)), fresh, x)
