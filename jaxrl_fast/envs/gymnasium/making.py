"""Make one gymnasium environment, in this process or in a worker."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from jaxrl_fast.envs.gymnasium.resetting import takes_options
from jaxrl_fast.envs.wrappers import frames


def make_one(
    construct: Callable[..., Any],
    arguments: Mapping[str, Any],
    max_episode_steps: int | None,
    render: bool,
    frame_skip: int = 1,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """Return a new environment.

    Args:
        construct: A class, a factory, or a function of gymnasium.
        arguments: Its keyword arguments.
        max_episode_steps: A time limit around the environment.
        render: Whether images will be asked for; `construct` then takes a `render_mode`.
        frame_skip: Steps for each action.
        changes: The arguments of `ChangeFrames`; None: frames do not change.
    """
    env = construct(**arguments, **({"render_mode": "rgb_array"} if render else {}))
    is_wrapped = max_episode_steps is not None or frame_skip > 1 or changes is not None
    if is_wrapped and isinstance(env, gymnasium.Env) and not takes_options(env.reset):
        env = WithoutOptions(env)
    env = env if max_episode_steps is None else gymnasium.wrappers.TimeLimit(env, max_episode_steps)
    env = FrameSkip(env, frame_skip) if frame_skip > 1 else env
    return env if changes is None else ChangeFrames(env, **changes)


class WithoutOptions(gymnasium.Wrapper):
    """Resets an environment whose `reset` takes no `options`, which wrappers pass."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        del options
        outcome: tuple[Any, dict[str, Any]] = self.env.reset() if seed is None else self.env.reset(seed=seed)
        return outcome


class FrameSkip(gymnasium.Wrapper):
    """Takes each action several times, up to the end of the episode, and sums the rewards."""

    def __init__(self, env: Any, num_steps: int) -> None:
        super().__init__(env)
        self.num_steps = num_steps

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Return the last observation and the sum of rewards."""
        total: Any = 0.0
        for _ in range(self.num_steps):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


class ChangeFrames(gymnasium.ObservationWrapper):
    """Returns gray or resized frames, so that whole ones need not cross to the device."""

    def __init__(
        self, env: Any, gray: bool, size: tuple[int, int] | None, channels_first: bool, path: tuple[Any, ...] = ()
    ) -> None:
        """`path` has the keys and indices from an observation to its image."""
        super().__init__(env)
        self.gray, self.size, self.channels_first, self.path = gray, size, channels_first, path
        self.whole = _at(env.observation_space, path)
        shape = self._changed(np.zeros(self.whole.shape, np.uint8)).shape
        changed = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = _with_part(env.observation_space, path, changed)

    def observation(self, observation: Any) -> Any:
        """Return a valid frame as uint8 [H', W', C']. Other values are returned unchanged, and rejected later."""
        try:
            array = np.asarray(_at(observation, self.path))
        except (KeyError, IndexError, TypeError):  # a part is missing
            return observation
        if array.dtype != self.whole.dtype or array.shape != self.whole.shape:
            return observation
        return _with_part(observation, self.path, self._changed(array))

    def _changed(self, frame: np.ndarray) -> np.ndarray:
        frame = np.moveaxis(frame, 0, -1) if self.channels_first else frame
        changed: np.ndarray = frames.change(self.gray, self.size, frame[None])[0]
        return changed


def _at(whole: Any, path: tuple[Any, ...]) -> Any:
    """Return a part of an observation or of its space."""
    for key in path:
        whole = whole[key]
    return whole


def _with_part(whole: Any, path: tuple[Any, ...], part: Any) -> Any:
    """Return an observation, or its space, with another part."""
    if not path:
        return part
    inner = _with_part(whole[path[0]], path[1:], part)
    is_space = isinstance(whole, gymnasium.Space)
    if isinstance(whole, Mapping):
        changed = {**whole, path[0]: inner}
        return gymnasium.spaces.Dict(changed) if is_space else changed
    parts = tuple(inner if i == path[0] else x for i, x in enumerate(whole))
    return gymnasium.spaces.Tuple(parts) if is_space else parts
