"""Provide the MiniGrid tasks of XLand-MiniGrid."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import xminigrid

from jaxrl_fast.envs.gymnax.adapter import adapt
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.types import Discrete, Env, Key

NO_RULES = "its rules come from a benchmark that is downloaded, and without rules no step has a reward"


class XMiniGridEnv:
    """One environment of XLand-MiniGrid, with gymnax's interface."""

    default_params = ()

    def __init__(self, name: str, max_steps: int | None = None, view_size: int = 7):
        if view_size < 3 or view_size % 2 == 0:
            raise ValueError(f"view_size: must be odd and at least 3, got {view_size}")
        self.env, self.params = xminigrid.make(name, view_size=view_size)
        if max_steps is not None:
            if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
                raise ValueError(f"max_steps: must be a whole number of at least 1, got {max_steps!r}")
            self.params = self.params.replace(max_steps=max_steps)

    def reset_env(self, key: Key, params: Any) -> tuple[jax.Array, Any]:
        """Start an episode."""
        timestep = self.env.reset(self.params, key)
        return timestep.observation, timestep

    def step_env(self, key: Key, state: Any, action: jax.Array, params: Any) -> tuple[Any, ...]:
        """Step without a reset; the state is the suite's time step."""
        state = self.env.step(self.params, state, action)
        return state.observation, state, state.reward, state.discount == 0, {}

    def is_truncated(self, state: Any, params: Any) -> jax.Array:
        """Return whether the time limit is reached in a state that is not terminal."""
        return state.last() & (state.discount > 0)

    def action_space(self, params: Any) -> Discrete:
        """Return the space of the suite's actions."""
        return Discrete(self.env.num_actions(self.params))


def registered() -> tuple[str, ...]:
    """Return the names in the suite's registry."""
    return xminigrid.registered_environments()


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by the suite's name for them; `host_config` does not concern the device."""
    del host_config
    if name.startswith("XLand"):
        raise ValueError(f"xminigrid/{name} cannot be used: {NO_RULES}")
    make_one = functools.partial(XMiniGridEnv, name)
    return adapt(make_one, num_envs, options, f"xminigrid/{name}", make_one)
