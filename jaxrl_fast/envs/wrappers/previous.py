"""Let agents observe their previous action and reward: the wrapper `previous`.

A policy with memory can then find out how its actions work and what they earn (Duan et al. 2016, "RL^2: Fast
Reinforcement Learning via Slow Reinforcement Learning", section 2.2). Both are zero at the start of an episode.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.envs.wrappers.wrapper import Rules, raw_parts, resized, wrap
from jaxrl_fast.types import Array, Box, Discrete, Env, MultiDiscrete, PyTree, Space, TimeStep
from jaxrl_fast.types.spaces import Hybrid


class Memory(NamedTuple):
    """The memory of n environments between two steps."""

    action: Array  # [n, A] f32 as agents observe it, of the step that is taken
    begins: Array  # [n] bool: this step begins an episode


def observe(env: Env) -> Env:
    """Return the environments with the previous action and reward in their observations.

    A vector of float32 [D] becomes [D + A + 1]; any other observation becomes (observation, action [A], reward [1]).
    The action is a one-hot vector for each choice, or its numbers in [-1, 1]. The reward is that of the environment.
    """
    spec, view = env.spec, env.view
    joined = _is_vector(spec.obs) and sum(x.size for x in raw_parts(env)) >= spec.obs.size  # a one-hot vector is wider
    size = spec.action.num_outputs
    parts = spec.obs, *(jax.ShapeDtypeStruct((n,), jnp.float32) for n in (size, 1))
    together: Any = jax.ShapeDtypeStruct((sum(x.shape[0] for x in parts),), jnp.float32) if joined else parts
    rules = Rules(partial(_first, joined, size), partial(_follow, joined), remember=partial(_remember, spec.action))
    told = view._replace(
        raw_obs=(spec.obs if view.raw_obs is None else view.raw_obs, *parts[1:]),
        encode_obs=lambda obs: _joined(joined, view.encode_obs(obs[0]), *obs[1:]),
        raw_mask=None if (mask_of := view.raw_mask) is None else lambda obs: mask_of(obs[0]),
        whole_spec=view.whole_spec or spec,
        whole_obs=partial(_whole, env, joined),
    )
    return wrap(env, rules)._replace(spec=spec._replace(obs=together, frame_stack=0), view=resized(told, observe))


def encode_action(space: Space, action: Array) -> Array:
    """Return actions of agents [n, ...] as they are observed, float32 [n, num_outputs]."""
    if isinstance(space, Box):
        flat = action.reshape(len(action), math.prod(space.shape)).astype(jnp.float32)
        return jnp.where(jnp.isnan(flat), 0.0, jnp.clip(flat, -1.0, 1.0))  # as it is executed
    if isinstance(space, Hybrid):
        num = len(space.nums)
        one_hots = encode_action(MultiDiscrete(space.nums), action[:, :num].astype(jnp.int32))
        return jnp.concatenate([one_hots, encode_action(Box((space.size,)), action[:, num:])], axis=1)
    nums = (space.num,) if isinstance(space, Discrete) else space.nums
    choices = jnp.split(action.reshape(len(action), len(nums)), len(nums), axis=1)
    one_hot = lambda choice, num: jax.nn.one_hot(jnp.clip(choice[:, 0], 0, num - 1), num, dtype=jnp.float32)
    return jnp.concatenate([one_hot(choice, num) for choice, num in zip(choices, nums, strict=True)], axis=1)


def _first(joined: bool, size: int, timestep: TimeStep) -> tuple[Memory, TimeStep]:
    """Return the memory and the time step of a reset."""
    nothing = jnp.zeros((len(timestep.last), size), jnp.float32)
    return Memory(nothing, timestep.last), _told(joined, timestep, nothing, nothing[:, :1])


def _remember(space: Space, memory: Memory, action: Array) -> Memory:
    return memory._replace(action=encode_action(space, action))


def _follow(joined: bool, memory: Memory, after: TimeStep) -> tuple[Memory, TimeStep]:
    """Return the memory and the time step after a step."""
    begins = memory.begins[:, None]
    action, reward = jnp.where(begins, 0.0, memory.action), jnp.where(begins, 0.0, after.reward[:, None])
    return Memory(action, after.last), _told(joined, after, action, reward)


def _told(joined: bool, timestep: TimeStep, action: Array, reward: Array) -> TimeStep:
    return timestep._replace(obs=_joined(joined, timestep.obs, action, reward.astype(jnp.float32)))


def _joined(joined: bool, *parts: PyTree) -> PyTree:
    return jnp.concatenate(parts, axis=1) if joined else parts


def _whole(env: Env, joined: bool, state: Any, obs: PyTree) -> PyTree:
    """Return the observation that a video draws: without action and reward, but with hidden parts."""
    own = obs[:, : env.spec.obs.shape[0]] if joined else obs[0]
    return env.view.whole_obs(state.env, own)


def _is_vector(obs: PyTree) -> bool:
    return isinstance(obs, jax.ShapeDtypeStruct) and obs.ndim == 1 and obs.dtype == jnp.float32
