"""Sample actions that an action mask allows. Worker processes import this, so it avoids JAX."""

from typing import Any

import gymnasium
import numpy as np

from jaxrl_fast.envs import nested
from jaxrl_fast.envs.gymnasium import actions


def flat(mask: Any) -> np.ndarray:
    """Return a mask, an array or one for each choice, as one array [mask_size].

    A mask may have the structure of a Dict or Tuple space, with None for its continuous parts.
    """
    if isinstance(mask, dict):
        mask = [mask[name] for name in sorted(mask)]
    if not isinstance(mask, tuple | list):
        return np.zeros(0, bool) if mask is None else np.asarray(mask).reshape(-1)
    return np.concatenate([np.zeros(0, bool), *map(flat, mask)])


def of(obs: Any, info: Any) -> Any:
    """Return the action mask of a step: a part of the observation or an entry of `info`; None if there is none."""
    for found in (obs, info):
        if isinstance(found, dict) and found.get("action_mask") is not None:
            return found["action_mask"]
    return None


def sample(space: Any, mask: Any, tree: Any = None) -> Any:
    """Return a random action that a mask allows. A mask of another size, or one that allows nothing, is ignored.

    With a `tree` of parts, it is an array of all of them.
    """
    if tree is not None:
        return nested.sample(tree, space.np_random, None if mask is None else flat(mask))
    if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        tree = nested.placed(actions.tree_of(str(space), space))
        return nested.split(tree, sample(space, mask, tree))
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
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.integer):
        return list(actions.part_of("", space).nums), space.low.reshape(-1)
    return [], 0
