"""Make one gymnasium environment, in this process or in a worker."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium


def make_one(
    construct: Callable[..., Any],
    arguments: Mapping[str, Any],
    max_episode_steps: int | None,
    render: bool,
    frame_skip: int = 1,
) -> Any:
    """Return a new environment.

    Args:
        construct: A class, a factory, or a function of gymnasium.
        arguments: Its keyword arguments.
        max_episode_steps: A time limit around the environment.
        render: Whether images will be asked for; `construct` then takes a `render_mode`.
        frame_skip: Steps for each action.
    """
    env = construct(**arguments, **({"render_mode": "rgb_array"} if render else {}))
    env = env if max_episode_steps is None else gymnasium.wrappers.TimeLimit(env, max_episode_steps)
    return FrameSkip(env, frame_skip) if frame_skip > 1 else env


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
