"""Give the interface of gymnax to environments with that of brax, whose time limit is outside of the environment."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.envs.spaces import Interval
from jaxrl_fast.types import Key, PyTree


class Params(NamedTuple):
    """Parameters of every environment."""

    max_steps_in_episode: int = 1000


class State(NamedTuple):
    """The state of one environment."""

    env: Any  # the suite's own state
    num_steps: jax.Array  # int32 [] in this episode


class PhysicsEnv:
    """One environment of a suite, with gymnax's interface. The adapter counts the steps."""

    def __init__(self, env: Any, default_params: Params, controls: Interval):
        self.env, self.default_params, self.controls = env, default_params, controls

    def reset_env(self, key: Key, params: Params) -> tuple[PyTree, State]:
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
        return self.controls


def is_physics(name: str) -> bool:
    """Return whether an environment simulates physics: all of these suites do."""
    return True
