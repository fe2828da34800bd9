"""Draw parameters of an environment on the device at each reset (domain randomization).

The wrapped object has gymnax's interface, as the wrapper has. The drawn values are a part of the state; the policy does
not see them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.types import Key, PyTree
from jaxrl_fast.utils.arguments import as_range, coerce

MAX_INT = 2**31 - 2  # the largest integer that can be drawn
TIME_LIMIT = "max_steps_in_episode"


class Range(NamedTuple):
    """The values of one parameter: uniform in [low, high]."""

    low: float
    high: float
    shape: tuple[int, ...] = ()  # of the parameter; each entry is drawn
    is_integer: bool = False

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


class State(NamedTuple):
    """The state of one environment."""

    env: PyTree
    drawn: dict[str, jax.Array]  # parameters of this episode


class Drawn:
    """An environment with gymnax's interface that draws some of its parameters at each reset."""

    def __init__(self, env: Any, ranges: Mapping[str, Range]) -> None:
        self.wrapped, self.ranges = env, dict(ranges)
        if hasattr(env, "action_mask"):  # the method exists only with masks, because `gymnax.single` looks for it
            self.action_mask = self._action_mask

    def reset_env(self, key: Key, params: Any) -> tuple[PyTree, State]:
        """Draw the parameters, and start an episode."""
        key_env, *keys = jax.random.split(key, 1 + len(self.ranges))
        drawn = {name: draw(of, key) for (name, of), key in zip(self.ranges.items(), keys, strict=True)}
        obs, state = self.wrapped.reset_env(key_env, replace(params, drawn))
        return obs, State(state, drawn)

    def step_env(self, key: Key, state: State, action: jax.Array, params: Any) -> tuple[Any, ...]:
        """Take a step with the parameters of this episode."""
        obs, env_state, *rest = self.wrapped.step_env(key, state.env, action, replace(params, state.drawn))
        return obs, State(env_state, state.drawn), *rest

    def is_truncated(self, state: State, params: Any) -> Any:
        """Return whether the time limit is reached."""
        return self.wrapped.is_truncated(state.env, replace(params, state.drawn))

    def _action_mask(self, state: State, params: Any) -> Any:
        """Return which actions are allowed."""
        return self.wrapped.action_mask(state.env, replace(params, state.drawn))

    def action_space(self, params: Any) -> Any:
        """Return the action space."""
        return self.wrapped.action_space(params)

    def observation_space(self, params: Any) -> Any:
        """Return the observation space."""
        return self.wrapped.observation_space(params)

    @property
    def info(self) -> str:
        """Return a line for the user."""
        parts = ", ".join(f"{name} from {of}" for name, of in self.ranges.items())
        return f"drawn at each reset: {parts}"


def draw(of: Range, key: Key) -> jax.Array:
    """Return a random value, int32 or f32 [*shape]."""
    if of.is_integer:
        return jax.random.randint(key, of.shape, int(of.low), int(of.high) + 1, jnp.int32)
    return jax.random.uniform(key, of.shape, jnp.float32, of.low, of.high)


def replace(params: Any, values: Mapping[str, Any]) -> Any:
    """Return parameters, a dataclass or a NamedTuple, with some values replaced."""
    if not values:
        return params
    return params._replace(**values) if hasattr(params, "_replace") else dataclasses.replace(params, **values)


def ranges(env_id: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Range]:
    """Return the options that are ranges of parameters, such as "8..12". Raise ValueError for an invalid range."""
    found = {}
    for name, value in options.items():
        ends = as_range(value)
        if ends and name in defaults and not isinstance(defaults[name], str):
            found[name] = _range(env_id, name, value, ends, defaults[name])
    return found


def _range(env_id: str, name: str, given: str, ends: tuple[str, str], default: Any) -> Range:
    """Return the range of a parameter, with ends of the type of its default."""
    is_array = isinstance(default, np.ndarray | jax.Array)
    kind = default.dtype.kind if is_array or isinstance(default, np.generic) else ""
    if isinstance(default, bool) or kind == "b" or not (isinstance(default, int | float) or kind in "iuf" and kind):
        raise ValueError(f"{name}: must be one value for {env_id}, got {given}; only numbers can be drawn")
    is_integer = isinstance(default, int) or kind in ("i", "u")
    low, high = (coerce(env_id, name, end, 0 if is_integer else 0.0) for end in ends)
    if low > high:
        raise ValueError(f"{name}: the smaller number of a range comes first, got {given}; use {ends[1]}..{ends[0]}")
    if is_integer and not -MAX_INT <= low <= high <= MAX_INT or name == TIME_LIMIT and low < 1:
        least = 1 if name == TIME_LIMIT else -MAX_INT
        raise ValueError(f"{name}: must be {least} to {MAX_INT} for {env_id}, got {given}")
    return Range(low, high, default.shape if is_array else (), is_integer)
