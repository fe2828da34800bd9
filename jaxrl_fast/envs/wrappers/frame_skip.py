"""Take each action several times: the option `frame_skip` of environments that do not have it themselves."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.types import Key, PyTree
from jaxrl_fast.utils.arguments import whole_number

NAME, MAX_SKIP = "frame_skip", 16  # steps are unrolled on the device


def take(env_id: str, options: Mapping[str, Any], own: Collection[str]) -> tuple[dict[str, Any], int]:
    """Return the options without `frame_skip`, and its value, unless the environment has such an option itself."""
    rest = dict(options)
    if NAME not in rest or NAME in own:
        return rest, 1
    return rest, whole_number(env_id, NAME, rest.pop(NAME), MAX_SKIP)


def check(env_id: str, has_action_mask: bool, num_steps: int) -> None:
    """Raise ValueError for an environment with a mask, which may forbid an action while it is repeated."""
    if num_steps > 1 and has_action_mask:
        problem = f"the action masks of {env_id} may forbid an action before it is repeated"
        raise ValueError(f"{NAME}: {problem}, got {num_steps}; use 1")


class State(NamedTuple):
    """The state of one environment."""

    env: PyTree
    truncated: jax.Array  # [] or [P] bool: truncated in any step of the last action


class FrameSkip:
    """An environment with gymnax's interface that takes each action several times, up to the end of the episode.

    Rewards are summed. A time limit counts the steps of the wrapped environment.
    """

    def __init__(self, env: Any, num_steps: int) -> None:
        self.wrapped, self.num_steps = env, num_steps

    def reset_env(self, key: Key, params: Any) -> tuple[PyTree, State]:
        """Start an episode."""
        obs, state = self.wrapped.reset_env(key, params)
        return obs, State(state, jnp.zeros_like(self._truncated(state, params)))

    def step_env(self, key: Key, state: State, action: jax.Array, params: Any) -> tuple[Any, ...]:
        """Take several steps. After an end, the environment steps from `state` again and the result is discarded."""
        keys = jax.random.split(key, self.num_steps)
        *now, reward, terminated, info = self.wrapped.step_env(keys[0], state.env, action, params)
        reward, terminated = jnp.asarray(reward, jnp.float32), jnp.asarray(terminated, bool)
        truncated = self._truncated(now[1], params)
        for key in keys[1:]:
            ended = terminated | truncated  # [], or [P] of players
            over = ended.all()
            running = _choose(over, state.env, now[1])
            *after, more, ends, info = self.wrapped.step_env(key, running, action, params)
            reward += jnp.where(ended, 0.0, more)
            terminated = terminated | ~ended & ends
            truncated = truncated | ~over & self._truncated(after[1], params)
            now = _choose(over, now, after)
        return now[0], State(now[1], truncated), reward, terminated, info

    def is_truncated(self, state: State, params: Any) -> jax.Array:
        """Return whether a time limit was reached in any of the steps."""
        return state.truncated

    def _truncated(self, state: PyTree, params: Any) -> jax.Array:
        return jnp.asarray(self.wrapped.is_truncated(state, params), bool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


def _choose(first: jax.Array, a: PyTree, b: PyTree) -> PyTree:
    """Return the first tree if `first` [] is True, else the second."""
    return jax.tree.map(lambda x, y: jnp.where(first, x, y), a, b)
