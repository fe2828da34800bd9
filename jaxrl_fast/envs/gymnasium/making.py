"""Make one gymnasium environment, in this process or in a worker."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium


def make_one(
    construct: Callable[..., Any], arguments: Mapping[str, Any], max_episode_steps: int | None, render: bool
) -> Any:
    """Return a new environment.

    Args:
        construct: A class, a factory, or a function of gymnasium.
        arguments: Its keyword arguments.
        max_episode_steps: A time limit around the environment.
        render: Whether images will be asked for; `construct` then takes a `render_mode`.
    """
    env = construct(**arguments, **({"render_mode": "rgb_array"} if render else {}))
    return env if max_episode_steps is None else gymnasium.wrappers.TimeLimit(env, max_episode_steps)
