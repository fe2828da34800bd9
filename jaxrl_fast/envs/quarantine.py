"""Reset an environment whose numbers are not finite, so that nothing is learned from them.

A simulator that blows up returns NaN or infinity. The step that returned it fails: its row is invalid, and its episode
has no score. Agents see the observation before the failed step until the environment begins another episode. A device
environment resets in the next step. A pool resets when its backend ends the episode; until then its rows are invalid.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.types import Array, Env, Key, PyTree, TimeStep

INFO = "an environment whose observation or reward is not finite is reset (--quarantine)"


class Held(NamedTuple):
    """What is known of n environments between two steps."""

    obs: PyTree  # [n, ...] the last finite observation
    action_mask: PyTree  # [n, num_outputs] bool of that observation, or ()
    waiting: Array  # [n] bool: it has failed, and has not begun another episode
    ended: Array  # [n] bool: the next step resets


class State(NamedTuple):
    """The state of N environments."""

    env: PyTree
    held: tuple[Held, ...]  # of each asynchronous pool, [N / P, ...]; without pools of all environments


def guard(env: Env) -> Env:
    """Return the same environments with `failed` time steps where an observation or a reward is not finite.

    The state of a device environment has a field `last`, [N] bool: the next step resets.
    """
    pools, resize = env.pools, env.resize
    return env._replace(
        reset=partial(_reset, env),
        step=partial(_step, env),
        pools=pools and pools._replace(send=partial(_send, env), receive=partial(_receive, env)),
        resize=resize and (lambda num_envs, config: guard(resize(num_envs, config))),
        info=(*env.info, INFO),
    )


def _reset(env: Env, key: Key) -> tuple[State, TimeStep]:
    """Start N episodes. One that begins with numbers that are not finite is over at once."""
    state, timestep = env.reset(key)
    bad = ~_finite(timestep)
    obs = jax.tree.map(lambda x: jnp.where(_like(bad, x), jnp.zeros_like(x), x), timestep.obs)
    none = jnp.zeros_like(bad)
    timestep = timestep._replace(obs=obs, last=timestep.last | bad, failed=none)
    held = jax.tree.map(jnp.copy, Held(obs, timestep.action_mask, bad, bad))  # a copy, so that all can be donated
    return State(_end(env, state, bad), _split(held, env.pools.num if env.pools else 1)), timestep


def _step(env: Env, state: State, action: Array) -> tuple[State, TimeStep]:
    """Step all N environments."""
    env_state, timestep = env.step(state.env, action)
    join: Callable[..., Array] = lambda *x: jnp.concatenate(x) if len(x) > 1 else x[0]
    held, timestep, bad = _follow(env, jax.tree.map(join, *state.held), timestep)
    return State(_end(env, env_state, bad), _split(held, len(state.held))), timestep


def _send(env: Env, pool: int, state: State, action: Array) -> State:
    assert env.pools
    return state._replace(env=env.pools.send(pool, state.env, action))


def _receive(env: Env, pool: int, state: State) -> tuple[State, TimeStep]:
    assert env.pools
    env_state, timestep = env.pools.receive(pool, state.env)
    held, timestep, _ = _follow(env, state.held[pool], timestep)
    return State(env_state, (*state.held[:pool], held, *state.held[pool + 1 :])), timestep


def _follow(env: Env, held: Held, after: TimeStep) -> tuple[Held, TimeStep, Array]:
    """Return what is held after a step of n environments, their time step, and which numbers are not finite [n]."""
    bad = ~_finite(after)
    failed = bad | held.waiting & ~held.ended
    where = lambda before, now: jax.tree.map(lambda a, b: jnp.where(_like(failed, b), a, b), before, now)
    score = after.score
    if score:
        score = score._replace(reward=jnp.where(failed, 0.0, score.reward), game_over=score.game_over & ~failed)
    timestep = TimeStep(
        obs=where(held.obs, after.obs),
        reward=jnp.where(failed, 0.0, after.reward),
        discount=jnp.where(failed, 1.0, after.discount),
        last=after.last | failed,
        score=score,
        action_mask=where(held.action_mask, after.action_mask),
        failed=failed,
    )
    ended = after.last | bad if env.on_device else after.last
    return Held(timestep.obs, timestep.action_mask, failed, ended), timestep, bad


def _end(env: Env, state: PyTree, bad: Array) -> PyTree:
    """Return the state with the episodes ended where numbers are not finite [N], if they are on the device."""
    return state._replace(last=state.last | bad) if env.on_device else state


def _finite(timestep: TimeStep) -> Array:
    """Return whether all numbers of a time step are finite, [n] bool."""
    parts = [timestep.reward, *jax.tree.leaves(timestep.obs), *(timestep.score[:1])]
    each = [jnp.isfinite(x).reshape(len(x), -1).all(axis=1) for x in parts if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack(each).all(axis=0)


def _split(held: Held, num: int) -> tuple[Held, ...]:
    """Return the parts of `num` pools."""
    each: Any = [jnp.split(x, num) for x in jax.tree.leaves(held)]
    return tuple(jax.tree.unflatten(jax.tree.structure(held), part) for part in zip(*each, strict=True))


def _like(mask: Array, x: Array) -> Array:
    """Return a mask [n] with the number of axes of x [n, ...]."""
    return mask.reshape(-1, *(1,) * (x.ndim - 1))
