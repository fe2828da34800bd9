"""Learn one policy for both players of a game, against earlier versions of itself.

The learner plays the left side (the first player) in even games and the right one in odd games; its policy sees the
side, as in `shared`. The opponent acts with the parameters and the exploration of one of `pool_size` snapshots, drawn
again after each update. The snapshots are a window of earlier learners, as in Bansal et al. 2018, "Emergent complexity
via multi-agent competition", section 3.2. Only the learner's rows are learned from, and only its games count as scores.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.players.rows import Make, agent_of_player, map_rows, mark, marked_spec
from jaxrl_fast.types import (
    Agent,
    AgentPlayers,
    Array,
    Decision,
    EnvSpec,
    Key,
    Metrics,
    Parallelism,
    PolicyInput,
    PyTree,
    Rollout,
)

PARTS = 4  # parts of a run: the pool covers one of them, with evenly spaced snapshots


class State(NamedTuple):
    """The state of the learner and of its opponents."""

    learner: PyTree
    pool: PyTree  # [pool_size, ...] acting parameters of earlier learners; at first copies of the initial ones
    opponent: Array  # int32: the snapshot that plays in the next rollout
    num_updates: Array  # int32


def make(
    make_inner: Make, config: Any, spec: EnvSpec, parallelism: Parallelism, num_updates: int, pool_size: int
) -> Agent:
    """Return an agent for 2 * N rows from one for N single players. Raises ValueError unless there are two players."""
    if len(spec.players) != 2:
        names = " and ".join(spec.players)
        raise ValueError(
            f"players: self-play requires 2 players, got the {len(spec.players)} of {spec.id} ({names}); "
            "use shared or independent"
        )
    inner = make_inner(config, marked_spec(spec, spec.num_games))
    period = max(num_updates // (PARTS * pool_size), 1)

    def init(key: Key) -> State:
        learner = inner.init(key)
        copies = lambda x: jnp.repeat(x[None], pool_size, axis=0)
        return State(learner, jax.tree.map(copies, inner.policy_state(learner)), jnp.int32(0), jnp.int32(0))

    def explore(state: State, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
        snapshot = jax.tree.map(lambda x: x[state.opponent], state.pool)
        return act(inner.explore, (state.learner, snapshot), inputs, carry, noise)

    def exploit(state: State, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
        return act(inner.exploit, (state.learner, state.learner), inputs, carry, noise)

    def update(state: State, rollout: Rollout, key: Key) -> tuple[State, Metrics]:
        key_update, key_opponent = jax.random.split(key)
        rollout = rollout._replace(next_obs=mark(2, rollout.next_obs), first_obs=mark(2, rollout.first_obs))
        learner, metrics = inner.update(state.learner, learner_rollout(rollout), key_update)
        num_updates = state.num_updates + 1
        pool = add_snapshot(period, state.pool, inner.policy_state(learner), num_updates)
        opponent = jax.random.randint(key_opponent, (), 0, pool_size)
        return State(learner, pool, opponent, num_updates), metrics

    def sample_noise(key: Key, num_steps: int, num_envs: int) -> PyTree:
        return tuple(inner.sample_noise(key, num_steps, num_envs // 2) for key in jax.random.split(key))

    return inner._replace(
        init=init,
        explore=explore,
        exploit=exploit,
        update=update,
        sample_noise=sample_noise,
        policy_state=lambda state: state._replace(learner=inner.policy_state(state.learner)),
        parameters=lambda state: (inner.parameters(state.learner), inner.parameters(state.pool)),
        learning=inner.learning._replace(
            compress_obs=lambda obs: inner.learning.compress_obs(mark(2, obs)),
            on_env_restart=lambda state: state._replace(learner=inner.learning.on_env_restart(state.learner)),
            gradient_steps=None,
        ),
        players=AgentPlayers(lambda player: of_learner(agent_of_player(inner, 2, player)), is_learner),
    )


def is_learner(num_rows: int) -> np.ndarray:
    """Return which of 2 * N rows belong to the learner, bool [2 * N]: in even games, the first player's."""
    game, player = np.arange(num_rows) % (num_rows // 2), np.arange(num_rows) // (num_rows // 2)
    return game % 2 == player


def learner_rows(num_rows: int) -> np.ndarray:
    """Return the learner's row in each of N games among 2 * N rows, [N]."""
    rows = np.flatnonzero(is_learner(num_rows))
    return rows[np.argsort(rows % (num_rows // 2))]


def opponent_rows(num_rows: int) -> np.ndarray:
    """Return the opponent's row in each of N games among 2 * N rows, [N]."""
    return (learner_rows(num_rows) + num_rows // 2) % num_rows


def act(
    policy: Callable[..., Decision], states: tuple[PyTree, PyTree], inputs: PolicyInput, carry: PyTree, noise: PyTree
) -> Decision:
    """Return the decisions of the learner and of its opponent, with a state and noise for each, in 2 * N rows."""
    inputs = inputs._replace(obs=mark(2, inputs.obs))
    num_rows = jax.tree.leaves(inputs.obs)[0].shape[0]
    both = learner_rows(num_rows), opponent_rows(num_rows)
    decisions = [
        policy(state, *take((inputs, carry), rows, 0), own_noise)
        for state, rows, own_noise in zip(states, both, noise, strict=True)
    ]
    place = np.argsort(np.concatenate(both))
    return jax.tree.map(lambda *x: jnp.concatenate(x)[place], *decisions)


def take(tree: PyTree, rows: np.ndarray, axis: int) -> PyTree:
    """Return these rows of a tree."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=axis), tree)


def learner_rollout(rollout: Rollout) -> Rollout:
    """Return the learner's rows of a rollout."""
    rows = learner_rows(rollout.steps.last.shape[1])
    return map_rows(rollout, lambda tree, axis: take(tree, rows, axis))


def add_snapshot(period: int, pool: PyTree, snapshot: PyTree, num_updates: Array) -> PyTree:
    """Return the pool with another snapshot in place of its oldest one, in every `period`-th update."""
    place = num_updates // period % len(jax.tree.leaves(pool)[0])
    is_due = num_updates % period == 0
    return jax.tree.map(lambda old, new: old.at[place].set(jnp.where(is_due, new, old[place])), pool, snapshot)


def of_learner(inner: Agent) -> Agent:
    """Return an agent for single players that acts from the state of self-play."""
    return inner._replace(
        explore=lambda state, *given: inner.explore(state.learner, *given),
        exploit=lambda state, *given: inner.exploit(state.learner, *given),
    )
