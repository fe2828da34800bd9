"""Show an environment with P players as rows: each player of each game is a row, as if it were an environment.

N games have P * N rows, in the order of players: row p * N + i is the view of player p in game i. The players of a
game begin together. A player whose episode ends early waits: its rows are `last` until the game ends.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_fast.envs import spaces
from jaxrl_fast.types import Array, Env, EnvSpec, Key, PyTree, TimeStep


def as_rows(env: Env) -> Env:
    """Return rows of players.

    `env` has N games of P players: its observations, rewards, masks and actions are [N, P, ...]. `discount` and `last`
    are [N], or [N, P] if players have separate ends.
    """
    spec = env.spec
    of_player = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    obs = jax.tree.map(of_player, spec.obs)
    rows = spec._replace(obs=obs, num_envs=len(spec.players) * spec.num_envs)
    return env._replace(
        reset=partial(_reset, env),
        step=partial(_step, env, rows),
        spec=rows,
        view=env.view._replace(raw_obs=jax.tree.map(of_player, env.view.raw_obs)),
    )


def _reset(env: Env, key: Key) -> tuple[PyTree, TimeStep]:
    state, timestep = env.reset(key)
    return state, _of_players(env.spec, timestep)


def _step(env: Env, rows: EnvSpec, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
    spaces.check_action(rows, action)
    joint = jnp.moveaxis(action.reshape(len(rows.players), -1, *action.shape[1:]), 0, 1)  # [N, P, ...]
    state, timestep = env.step(state, joint)
    return state, _of_players(env.spec, timestep)


def _of_players(spec: EnvSpec, timestep: TimeStep) -> TimeStep:
    """Return the time step of games as that of all players."""
    in_order: Any = lambda x: jnp.moveaxis(x, 1, 0).reshape(-1, *x.shape[2:])
    of_each = lambda x: in_order(x) if x.ndim == 2 else jnp.tile(x, len(spec.players))
    return TimeStep(
        obs=jax.tree.map(in_order, timestep.obs),
        reward=in_order(timestep.reward),
        discount=of_each(timestep.discount),
        last=of_each(timestep.last),
        score=jax.tree.map(in_order, timestep.score),
        action_mask=jax.tree.map(in_order, timestep.action_mask),
    )
