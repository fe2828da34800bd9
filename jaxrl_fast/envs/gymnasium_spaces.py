"""Convert gymnasium's spaces, and the observations in them, to what agents see. For backends that depend on gymnasium.

Agents see images as uint8 [H, W, C], small counts as one-hot vectors, and other observations as float32.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs.spaces import Bounds, true_bounds
from jaxrl_fast.types import Box, Discrete, PyTree

MAX_ONE_HOT = 1024  # values of a Discrete space; a larger one becomes a single number


def action_space(env_id: str, space: Any) -> tuple[Discrete | Box, int, Bounds]:
    """Return the action space for agents, the smallest discrete action, and the true bounds of a continuous one."""
    unsupported = f"{env_id}: unsupported action space, got {space}"
    if isinstance(space, gymnasium.spaces.Discrete):
        return Discrete(int(space.n)), int(space.start), ()
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"{unsupported}; it must be Discrete or a Box of floats")
    return Box(space.shape or (1,)), 0, true_bounds(unsupported, space.low, space.high, space.shape)


def as_tree(space: Any) -> PyTree:
    """Return a tree of spaces: each Dict becomes a dictionary."""
    inner = getattr(space, "spaces", space) if isinstance(space, gymnasium.spaces.Dict) else space
    return {name: as_tree(part) for name, part in inner.items()} if isinstance(inner, Mapping) else inner


def encode(spaces: PyTree, obs: PyTree) -> PyTree:
    """Return raw observations [n, ...] as agents see them; `spaces` is a tree of the same structure."""
    return jax.tree.map(_encode, obs, spaces)


def _encode(x: jax.Array, space: Any) -> jax.Array:
    num = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 0
    if 0 < num <= MAX_ONE_HOT:
        return jax.nn.one_hot(x - int(space.start), num, dtype=jnp.float32)
    if is_channel_first_image(x.shape[1:], x.dtype):
        return jnp.moveaxis(x, 1, -1)
    if x.ndim == 2 and x.dtype == jnp.uint8:  # text or memory: bytes become [0, 1)
        return x.astype(jnp.float32) / 256
    x = x[:, None] if x.ndim == 1 else x
    return x if x.dtype in (jnp.bool_, jnp.uint8) else x.astype(jnp.float32)


def is_channel_first_image(shape: tuple[int, ...], dtype: Any) -> bool:
    """Return whether one environment's observation is an image [C, H, W]."""
    return len(shape) == 3 and dtype == jnp.uint8 and shape[0] < min(shape[1:])
