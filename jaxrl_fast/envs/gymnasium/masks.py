"""Sample actions that an action mask allows. Worker processes import this, so it avoids JAX."""

from typing import Any

import gymnasium
import numpy as np


def flat(mask: Any) -> np.ndarray:
    """Return a mask, an array or one for each choice, as one array [num_outputs]."""
    parts = mask if isinstance(mask, tuple | list) else [mask]
    return np.concatenate([np.zeros(0, bool), *(np.asarray(part).reshape(-1) for part in parts)])


def of(obs: Any, info: Any) -> Any:
    """Return the action mask of a step: a part of the observation or an entry of `info`; None if there is none."""
    for found in (obs, info):
        if isinstance(found, dict) and found.get("action_mask") is not None:
            return found["action_mask"]
    return None


def sample(space: Any, mask: Any) -> Any:
    """Return a random action that a mask allows. A mask of another size, or one that allows nothing, is ignored."""
    action = space.sample()
    nums, start = _choices(space)
    if mask is None or not nums or flat(mask).size != sum(nums):
        return action
    allowed = [np.flatnonzero(part) for part in np.split(flat(mask), np.cumsum(nums)[:-1])]
    if not all(map(len, allowed)):
        return action
    chosen = np.array([space.np_random.choice(part) for part in allowed]) + start
    return chosen.reshape(np.shape(action)).astype(np.asarray(action).dtype)[()]


def _choices(space: Any) -> tuple[list[int], Any]:
    """Return the numbers of actions of each choice, and the smallest action; no numbers for a continuous space."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return [int(space.n)], space.start
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return space.nvec.reshape(-1).tolist(), space.start.reshape(-1)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return [2] * int(np.prod(space.shape)), 0
    return [], 0
