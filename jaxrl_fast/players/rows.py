"""Arrange the rows of an environment with players, and mark them with the player's number."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from jaxrl_fast.networks import views
from jaxrl_fast.options.sees import ALL, Sees
from jaxrl_fast.types import Agent, EnvSpec, PyTree, Rollout

Make = Callable[[Any, EnvSpec], Agent]  # (config, spec): an algorithm without players


def split(num_players: int, tree: PyTree, axis: int = 0) -> PyTree:
    """Return rows [..., P * N, ...] with an axis of players in front, [P, ..., N, ...]."""
    to = lambda x: x.reshape(*x.shape[:axis], num_players, -1, *x.shape[axis + 1 :])
    return jax.tree.map(lambda x: jnp.moveaxis(to(x), axis, 0), tree)


def join(tree: PyTree) -> PyTree:
    """Return rows [P * N, ...] of players' rows [P, N, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def map_rows(rollout: Rollout, function: Callable[[PyTree, int], PyTree]) -> Rollout:
    """Return a rollout with `function(rows, axis)` of each of its parts, where `axis` is that of rows."""
    return Rollout(function(rollout.steps, 1), *(function(part, 0) for part in rollout[1:]))


def mark(num_players: int, obs: PyTree, player: int | None = None) -> PyTree:
    """Return observations (obs [P * N, ...], one-hot f32 [P * N, P]) with the player of each row.

    With `player`, all rows are of this player; there may be any number of them.
    """
    num_rows = jax.tree.leaves(obs)[0].shape[0]
    if player is None:
        each = jnp.repeat(jnp.arange(num_players), num_rows // num_players)
    else:
        each = jnp.full(num_rows, player)
    return obs, jax.nn.one_hot(each, num_players, dtype=jnp.float32)


def marked_spec(spec: EnvSpec, num_envs: int) -> EnvSpec:
    """Return the spec of environments without players whose observation is marked.

    Stacks of frames are stored whole: a player's number is not a frame.
    """
    obs: Any = (spec.obs, ShapeDtypeStruct((len(spec.players),), jnp.float32))
    return spec._replace(obs=obs, num_envs=num_envs, frame_stack=0, players=())


def marked_config(config: Any, obs: PyTree) -> Any:
    """Return an algorithm's options for marked observations: actor and critic see the player's number, too."""
    if not isinstance(config.actor, Sees):
        return config
    views.views(config, obs)  # its errors name the parts as the environment does
    of = lambda part: part if ALL in part.sees else replace(part, sees=(*(f"0/{name}" for name in part.sees), "1"))
    return replace(config, actor=of(config.actor), critic=of(config.critic))


def agent_of_player(inner: Agent, num_players: int, player: int) -> Agent:
    """Return the agent that acts for one player with the policy of all, which knows the player's number."""
    own = lambda inputs: inputs._replace(obs=mark(num_players, inputs.obs, player))
    return inner._replace(
        explore=lambda state, inputs, carry, noise: inner.explore(state, own(inputs), carry, noise),
        exploit=lambda state, inputs, carry, noise: inner.exploit(state, own(inputs), carry, noise),
        learning=inner.learning._replace(compress_obs=lambda obs: obs, gradient_steps=None),
    )
