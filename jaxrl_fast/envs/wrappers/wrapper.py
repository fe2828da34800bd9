"""Wrap environments with a memory of their time steps, whether they step together or in asynchronous pools."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.async_rollout import pools_of
from jaxrl_fast.envs.spaces import without_mask
from jaxrl_fast.types import Array, Env, Key, PyTree, TimeStep, View
from jaxrl_fast.types.host import HostEnv

Follow = Callable[[PyTree, TimeStep], tuple[PyTree, TimeStep]]  # (memory [n, ...], time step) to the next ones


class State(NamedTuple):
    """The state of N environments."""

    env: PyTree  # of the wrapped environments
    memory: tuple[PyTree, ...]  # one for each of P asynchronous pools, [N / P, ...], or one for all environments


class Rules(NamedTuple):
    """The functions of a wrapper."""

    first: Callable[[TimeStep], tuple[PyTree, TimeStep]]  # time step of a reset to the memory and the time step
    follow: Follow
    before: Callable[[PyTree, PyTree], PyTree] = lambda env_state, memory: env_state  # changes the state before a step
    remember: Callable[[PyTree, Array], PyTree] = lambda memory, action: memory  # notes the action of a step


def wrap(env: Env, rules: Rules) -> Env:
    """Return the environments with other time steps. `before` is used without pools only."""
    return env._replace(
        reset=partial(_reset, env, rules),
        step=partial(_step, env, rules),
        host=with_pools(env.host, send=partial(_send, env, rules), receive=partial(_receive, env, rules)),
        view=resized(env.view, lambda other: wrap(other, rules)),
    )


def raw_parts(env: Env) -> list[jax.ShapeDtypeStruct]:
    """Return the parts of an observation as the environment returns it, in the order of those of `spec.obs`."""
    raw: Any = env.spec.obs if env.view.raw_obs is None else env.view.raw_obs
    return list(jax.tree.leaves(without_mask(raw) if env.view.raw_mask else raw))


def with_pools(host: HostEnv | None, **changes: Any) -> HostEnv | None:
    """Return the record of the host with changed asynchronous pools, if there are any."""
    return host._replace(pools=host.pools._replace(**changes)) if host and host.pools else host


def resized(view: View, change: Callable[[Env], Env]) -> View:
    """Return the view of changed environments, so that another number of them is changed as well."""
    resize = view.resize
    return view._replace(resize=resize and (lambda num_envs, config: change(resize(num_envs, config))))


def _reset(env: Env, rules: Rules, key: Key) -> tuple[State, TimeStep]:
    env_state, timestep = env.reset(key)
    memory, timestep = rules.first(timestep)
    memory = jax.tree.map(jnp.copy, memory)  # a copy, so that all can be donated
    return State(env_state, _split(memory, env.pools.num if env.pools else 1)), timestep


def _step(env: Env, rules: Rules, state: State, action: Array) -> tuple[State, TimeStep]:
    join: Callable[..., Array] = lambda *x: jnp.concatenate(x) if len(x) > 1 else x[0]
    memory = jax.tree.map(join, *state.memory)
    env_state, timestep = env.step(rules.before(state.env, memory), action)
    memory, timestep = rules.follow(rules.remember(memory, action), timestep)
    return State(env_state, _split(memory, len(state.memory))), timestep


def _send(env: Env, rules: Rules, pool: int, state: State, action: Array) -> State:
    memory = rules.remember(state.memory[pool], action)
    return State(pools_of(env).send(pool, state.env, action), _with_part(state.memory, pool, memory))


def _receive(env: Env, rules: Rules, pool: int, state: State) -> tuple[State, TimeStep]:
    env_state, timestep = pools_of(env).receive(pool, state.env)
    memory, timestep = rules.follow(state.memory[pool], timestep)
    return State(env_state, _with_part(state.memory, pool, memory)), timestep


def _with_part(memory: tuple[PyTree, ...], pool: int, part: PyTree) -> tuple[PyTree, ...]:
    return (*memory[:pool], part, *memory[pool + 1 :])


def _split(memory: PyTree, num: int) -> tuple[PyTree, ...]:
    """Return the parts of `num` pools."""
    if num == 1 or not jax.tree.leaves(memory):
        return (memory,) * num
    parts: Any = [jnp.split(x, num) for x in jax.tree.leaves(memory)]
    return tuple(jax.tree.unflatten(jax.tree.structure(memory), part) for part in zip(*parts, strict=True))


def mapped(env: Env, change: Callable[[TimeStep], TimeStep]) -> Env:
    """Return the environments with each time step changed, without a memory of earlier ones."""
    end: Callable[[tuple[PyTree, TimeStep]], tuple[PyTree, TimeStep]] = lambda result: (result[0], change(result[1]))
    return env._replace(
        reset=lambda key: end(env.reset(key)),
        step=lambda state, action: end(env.step(state, action)),
        host=with_pools(env.host, receive=lambda pool, state: end(pools_of(env).receive(pool, state))),
        view=resized(env.view, lambda other: mapped(other, change)),
    )


def where(mask: Array, first: PyTree, second: PyTree) -> PyTree:
    """Return rows of the first tree [n, ...] where `mask` [n] is True, else rows of the second."""
    return jax.tree.map(lambda a, b: jnp.where(mask.reshape(-1, *(1,) * (b.ndim - 1)), a, b), first, second)
