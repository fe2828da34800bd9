"""Provide navix's environments: MiniGrid's tasks on the device.

navix resets by itself on the step after the last one, by a condition that costs both branches under `vmap`. The
adapter calls the step below it.
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_fast.envs.gymnax.adapter import adapt
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.types import Discrete, Env, Key
from jaxrl_fast.utils.parsing import nearest

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"jax\.core\.pytype_aval_mappings is deprecated", DeprecationWarning)
    import navix

MIN_IMAGE_SIZE = 16  # bytes with at least as many rows and columns are read as an image
OBSERVATIONS = tuple(kind + view for kind in ("symbolic", "categorical", "rgb") for view in ("", "_first_person"))


class NavixEnv:
    """One environment of navix, with gymnax's interface."""

    default_params = ()

    def __init__(self, name: str, max_steps: int = 100, observation_fn: str = "symbolic"):
        if observation_fn not in OBSERVATIONS:
            hint = nearest(observation_fn, OBSERVATIONS) or f"; choose {' or '.join(OBSERVATIONS)}"
            raise ValueError(f"observation_fn: not an observation of navix, got {observation_fn!r}{hint}")
        if max_steps < 1:
            raise ValueError(f"max_steps: must be at least 1, got {max_steps}")
        self.is_image = observation_fn.startswith("rgb")
        self.env = navix.make(name, max_steps, observation_fn=getattr(navix.observations, observation_fn))

    def reset_env(self, key: Key, params: Any) -> tuple[jax.Array, Any]:
        """Start an episode."""
        timestep = self.env.reset(key)
        return self._observation(timestep), timestep

    def step_env(self, key: Key, state: Any, action: jax.Array, params: Any) -> tuple[Any, ...]:
        """Step without a reset; the state is navix's time step."""
        state = self.env._step(state, action)
        return self._observation(state), state, state.reward, state.is_termination(), {}

    def is_truncated(self, state: Any, params: Any) -> jax.Array:
        """Return whether the time limit is reached in a state that is not terminal."""
        return state.is_truncation()

    def action_space(self, params: Any) -> Discrete:
        """Return the space of navix's actions."""
        return Discrete(len(self.env.action_set))

    def _observation(self, timestep: Any) -> jax.Array:
        """Return the observation; a large grid of indices as float32, so that the network does not see an image."""
        obs = timestep.observation
        is_grid = not self.is_image and min(obs.shape[:2]) >= MIN_IMAGE_SIZE
        return obs.astype(jnp.float32) if is_grid else obs


def registered() -> tuple[str, ...]:
    """Return the names in navix's registry."""
    return tuple(navix.registry())


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by navix's name for them; `host_config` does not concern the device."""
    del host_config
    make_one = functools.partial(NavixEnv, name)
    return adapt(make_one, num_envs, options, f"navix/{name}", make_one)
