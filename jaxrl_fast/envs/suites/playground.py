"""Provide the DM control suite of MuJoCo Playground, with the physics of MJX in JAX.

The time limit of Playground is in a wrapper, whose reset replaces the terminal observation. The adapter calls the
environment below it, and counts the steps itself. Locomotion and manipulation are left out: they download their models.
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs.gymnax.adapt import adapt
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.spaces import Interval
from jaxrl_fast.types import Env, Key, PyTree

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)  # of brax, which it imports
    from mujoco_playground import dm_control_suite

PHYSICS = {"impl": "jax"}  # Playground's default, Warp, requires an NVIDIA GPU to be fast


class Params(NamedTuple):
    """Parameters of every environment of the suite."""

    max_steps_in_episode: int


class State(NamedTuple):
    """The state of one environment."""

    env: Any  # Playground's own state
    num_steps: jax.Array  # int32 [] in this episode


class PlaygroundEnv:
    """One environment of MuJoCo Playground, with gymnax's interface."""

    def __init__(self, name: str):
        config = dm_control_suite.get_default_config(name)
        self.env = dm_control_suite.load(name, config, PHYSICS)
        self.default_params = Params(int(config.episode_length))

    def reset_env(self, key: Key, params: Params) -> tuple[PyTree, State]:
        """Start an episode."""
        state = self.env.reset(key)
        return state.obs, State(state, jnp.int32(0))

    def step_env(self, key: Key, state: State, action: jax.Array, params: Params) -> tuple[Any, ...]:
        """Step without a time limit and without a reset. Only diverged physics are a terminal state."""
        after = self.env.step(state.env, action)
        return after.obs, State(after, state.num_steps + 1), after.reward, after.done > 0, {}

    def is_truncated(self, state: State, params: Params) -> jax.Array:
        """Return whether the time limit is reached."""
        return state.num_steps >= params.max_steps_in_episode

    def action_space(self, params: Params) -> Interval:
        """Return the range of the actuators' controls, which is [-1, 1] in all of the suite."""
        one = np.ones(self.env.action_size, np.float32)
        return Interval(-one, one)


def registered() -> tuple[str, ...]:
    """Return the names of the DM control suite."""
    return tuple(dm_control_suite.ALL_ENVS)


def is_physics(name: str) -> bool:
    """Return whether an environment simulates physics: all of the suite do."""
    return True


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by Playground's name for them; `host_config` does not concern the device."""
    del host_config
    make_one = functools.partial(PlaygroundEnv, name)
    return adapt(make_one, num_envs, options, f"playground/{name}", make_one)
