"""Provide Craftax's environments with symbolic observations: Craftax-Classic and the full Craftax.

Craftax has gymnax's interface of former versions, where a time limit is a terminal state. The adapter tells them apart.
The environments with pixels are left out: before their first step they compute textures for minutes, and store them
next to the installed package.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_fast.envs.gymnax.adapter import adapt
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.types import Discrete, Env, Key

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # Craftax imports pygame, which prints a greeting

from craftax.craftax_env import make_craftax_env_from_name

NAMES = ("Craftax-Classic-Symbolic-v1", "Craftax-Symbolic-v1")
NO_LIMIT = 2**30  # steps; a step counter in int32 cannot exceed it within an episode


class CraftaxEnv:
    """One environment of Craftax, with gymnax's interface."""

    def __init__(self, name: str):
        self.env = make_craftax_env_from_name(name, auto_reset=False)
        self.default_params = self.env.default_params

    def reset_env(self, key: Key, params: Any) -> tuple[jax.Array, Any]:
        """Start an episode in a new world."""
        return self.env.reset_env(key, params)

    def step_env(self, key: Key, state: Any, action: jax.Array, params: Any) -> tuple[Any, ...]:
        """Step without a reset."""
        obs, state, reward, _, _ = self.env.step_env(key, state, action, params)
        terminated = self.env.is_terminal(state, params.replace(max_timesteps=NO_LIMIT))
        return obs, state, reward, terminated, {}

    def is_truncated(self, state: Any, params: Any) -> jax.Array:
        """Return whether the time limit is reached."""
        return state.timestep >= params.max_timesteps

    def action_space(self, params: Any) -> Discrete:
        """Return the space of Craftax's actions."""
        return Discrete(self.env.num_actions)


def registered() -> tuple[str, ...]:
    """Return the names of the symbolic environments."""
    return NAMES


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by Craftax's name for them; `host_config` does not concern the device."""
    del host_config
    make_one = functools.partial(CraftaxEnv, name)
    return adapt(make_one, num_envs, options, f"craftax/{name}", make_one)
