"""Read the parts of gymnasium's action spaces. Worker processes import this, so it avoids JAX."""

from typing import Any

import gymnasium
import numpy as np

from jaxrl_fast.envs import nested


def part_of(unsupported: str, space: Any) -> nested.Part:
    """Return a space of choices or numbers as a part. Raise ValueError, with `unsupported` first, for another one."""
    kinds = gymnasium.spaces
    if isinstance(space, kinds.Discrete):
        return nested.choices((), space.dtype, space.start, space.n)
    if isinstance(space, kinds.MultiDiscrete):
        return nested.choices(space.shape, space.dtype, space.start, space.nvec)
    if isinstance(space, kinds.MultiBinary):
        return nested.choices(space.shape, space.dtype, 0, np.full(space.shape, 2))
    if isinstance(space, kinds.Box) and np.issubdtype(space.dtype, np.integer):
        return nested.whole_numbers(unsupported, space.dtype, space.low, space.high)
    if isinstance(space, kinds.Box) and np.issubdtype(space.dtype, np.floating):
        return nested.Part(space.shape, np.dtype(space.dtype), space.low, space.high, is_choice=False)
    kind = type(space).__name__
    raise ValueError(
        f"{unsupported}; its parts must be Discrete, MultiDiscrete, MultiBinary or Box, in Dict and Tuple, got {kind}"
    )


def tree_of(unsupported: str, space: Any) -> Any:
    """Return the tree of parts of a Dict or Tuple, or the part of another space."""
    if isinstance(space, gymnasium.spaces.Dict):
        if len({type(name) for name in space.spaces}) > 1:
            raise ValueError(f"{unsupported}; the keys of a Dict must be of one type, such as text")
        return {name: tree_of(unsupported, part) for name, part in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(tree_of(unsupported, part) for part in space.spaces)
    return part_of(unsupported, space)
