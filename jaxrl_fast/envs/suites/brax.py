"""Provide brax's environments: continuous control with its four physics engines.

`brax.envs.create` wraps an environment in a time limit and a reset that replaces the terminal observation. The adapter
calls the environment below both, and counts the steps itself.
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
from jaxrl_fast.types import Env, Key

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)
    from brax import envs

UNMAINTAINED = "Brax System, piplines and environments are not actively being maintained"
ENGINES = ("generalized", "mjx", "positional", "spring")
FOR_TESTS = "fast"  # an environment without physics, which brax uses to test itself


class Params(NamedTuple):
    """Parameters of every environment of brax."""

    max_steps_in_episode: int = 1000


class State(NamedTuple):
    """The state of one environment."""

    env: Any  # brax's own state
    num_steps: jax.Array  # int32 [] in this episode


class BraxEnv:
    """One environment of brax, with gymnax's interface."""

    default_params = Params()

    def __init__(self, name: str, **options: Any):
        engine = options.get("backend", ENGINES[0])
        if engine not in ENGINES:
            raise ValueError(f"backend: not an engine of brax, got {engine!r}; choose {' or '.join(ENGINES)}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", UNMAINTAINED, UserWarning)
            self.env = envs.get_environment(name, **options)

    def reset_env(self, key: Key, params: Params) -> tuple[jax.Array, State]:
        """Start an episode."""
        state = self.env.reset(key)
        return state.obs, State(state, jnp.int32(0))

    def step_env(self, key: Key, state: State, action: jax.Array, params: Params) -> tuple[Any, ...]:
        """Step without a time limit and without a reset."""
        after = self.env.step(state.env, action)
        return after.obs, State(after, state.num_steps + 1), after.reward, after.done > 0, {}

    def is_truncated(self, state: State, params: Params) -> jax.Array:
        """Return whether the time limit is reached."""
        return state.num_steps >= params.max_steps_in_episode

    def action_space(self, params: Params) -> Interval:
        """Return the range of the actuators."""
        low, high = np.asarray(self.env.sys.actuator.ctrl_range, np.float32).T
        return Interval(low, high)


def registered() -> tuple[str, ...]:
    """Return the names in brax's registry."""
    return tuple(name for name in envs._envs if name != FOR_TESTS)


def is_physics(name: str) -> bool:
    """Return whether an environment simulates physics: all of brax do."""
    return True


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by brax's name for them; `host_config` does not concern the device."""
    del host_config
    kind = envs._envs[name]  # its class declares the options
    make_one = functools.partial(BraxEnv, name)
    return adapt(kind, num_envs, options, f"brax/{name}", make_one)
