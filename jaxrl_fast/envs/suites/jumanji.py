"""Provide jumanji's environments for one agent, with their action masks.

jumanji reports its time limits as terminal states. The adapter removes the limit from the environment and counts the
steps itself, so that a time limit is a truncation.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
from jumanji import specs

from jaxrl_fast.envs.gymnax.adapter import adapt
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.types import Discrete, Env, Key, MultiDiscrete, PyTree

UNSUPPORTED = {"Sokoban-v0": "it downloads its levels from the internet when it is made"}
SEVERAL_AGENTS = "it has a reward for each of several agents, and jaxrl_fast trains one agent"
NO_LIMIT = 2**30  # steps; a step counter in int32 cannot exceed it within an episode


class State(NamedTuple):
    """The state of one environment."""

    env: PyTree  # jumanji's own state
    mask: PyTree  # bool, one for each action, or ()
    num_steps: jax.Array  # int32 [] in this episode
    truncated: jax.Array  # bool []: jumanji has reported a truncation


class JumanjiEnv:
    """One environment of jumanji, with gymnax's interface."""

    default_params = ()

    def __init__(self, name: str, **options: Any):
        self.env = jumanji.make(name, **options)
        self.time_limit = getattr(self.env, "time_limit", NO_LIMIT)
        self.env.time_limit = NO_LIMIT
        spec = self.env.action_spec
        mask = getattr(self.env.observation_spec, "action_mask", None)
        self.nums = () if isinstance(spec, specs.DiscreteArray) else _nums(spec)
        self.is_joint = mask is not None and mask.shape == self.nums  # one entry for each combination of choices
        if mask is not None:
            self.action_mask = lambda state, params: state.mask

    def reset_env(self, key: Key, params: Any) -> tuple[PyTree, State]:
        """Start an episode."""
        state, timestep = self.env.reset(key)
        obs, mask = _split(timestep.observation)
        return obs, State(state, mask, jnp.int32(0), jnp.array(False))

    def step_env(self, key: Key, state: State, action: jax.Array, params: Any) -> tuple[Any, ...]:
        """Step without a time limit and without a reset."""
        if self.is_joint:
            action = jnp.stack(jnp.unravel_index(action, self.nums)).astype(jnp.int32)
        env_state, timestep = self.env.step(state.env, action)
        obs, mask = _split(timestep.observation)
        is_terminal = jnp.all(timestep.discount == 0)
        after = State(env_state, mask, state.num_steps + 1, timestep.last() & ~is_terminal)
        return obs, after, timestep.reward, timestep.last() & is_terminal, {}

    def is_truncated(self, state: State, params: Any) -> jax.Array:
        """Return whether the time limit is reached."""
        return state.truncated | (state.num_steps >= self.time_limit)

    def action_space(self, params: Any) -> Discrete | MultiDiscrete:
        """Return jumanji's actions. Several choices with a joint mask become one choice among all combinations."""
        if not self.nums:
            return Discrete(int(self.env.action_spec.num_values))
        return Discrete(int(np.prod(self.nums))) if self.is_joint else MultiDiscrete(self.nums)


def registered() -> tuple[str, ...]:
    """Return the names in jumanji's registry."""
    return tuple(sorted(jumanji.registered_environments()))


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by jumanji's name for them; `host_config` does not concern the device."""
    del host_config
    env_id = f"jumanji/{name}"
    if name in UNSUPPORTED:
        raise ValueError(f"{env_id} cannot be used: {UNSUPPORTED[name]}")
    env = jumanji.make(name)  # its class declares the options
    if env.reward_spec.shape:
        raise ValueError(f"{env_id} cannot be used: {SEVERAL_AGENTS}")
    return adapt(type(env), num_envs, options, env_id, functools.partial(JumanjiEnv, name))


def _nums(spec: Any) -> tuple[int, ...]:
    """Return the number of options of each choice."""
    if not jnp.issubdtype(spec.dtype, jnp.integer) or np.any(np.asarray(spec.minimum)):
        raise ValueError(f"unsupported action space, got {spec}; it must consist of choices from 0 to n - 1")
    return tuple((np.broadcast_to(np.asarray(spec.maximum), spec.shape) + 1).reshape(-1).tolist())


def _split(obs: PyTree) -> tuple[PyTree, PyTree]:
    """Return an observation without its mask, as an array or a dictionary, and the mask."""
    parts = _as_dict(obs)
    if not isinstance(parts, dict):
        return parts, ()
    mask = parts.pop("action_mask", ())
    return (next(iter(parts.values())) if len(parts) == 1 else parts), mask


def _as_dict(tree: PyTree) -> PyTree:
    """Return a tree with a dictionary for each record."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    elif hasattr(tree, "__dataclass_fields__"):
        tree = {name: getattr(tree, name) for name in tree.__dataclass_fields__}
    return {name: _as_dict(part) for name, part in tree.items()} if isinstance(tree, dict) else tree
