"""Convert gymnasium's spaces and observations to the form that agents see. For backends that depend on gymnasium.

Agents see images as uint8 [H, W, C], boards as bool [H, W, C], small counts as one-hot vectors, and other observations
as float32.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs.gymnasium import actions
from jaxrl_fast.envs.spaces import Bounds, as_array, narrow_dtype, of_parts, true_bounds
from jaxrl_fast.envs.wrappers import hide
from jaxrl_fast.networks import reading
from jaxrl_fast.types import Box, Discrete, MultiDiscrete, PyTree, Space
from jaxrl_fast.types.spaces import mask_size
from jaxrl_fast.utils.parsing import one_line

MAX_ONE_HOT = 1024  # values of a Discrete or MultiDiscrete space; larger ones become numbers from 0
ARRAYS = (  # the spaces whose elements are arrays of a fixed size
    gymnasium.spaces.Box,
    gymnasium.spaces.Discrete,
    gymnasium.spaces.MultiBinary,
    gymnasium.spaces.MultiDiscrete,
)


def action_space(env_id: str, space: Any) -> tuple[Space, Any, Bounds, Any]:
    """Return the action space for agents, the smallest discrete action, and the true bounds of a continuous one.

    Also return the tree of parts of a Dict or Tuple, else None.
    """
    unsupported = f"{env_id}: unsupported action space, got {one_line(space)}"
    if isinstance(space, gymnasium.spaces.Discrete):
        return Discrete(int(space.n)), int(space.start), (), None
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return MultiDiscrete(tuple(space.nvec.reshape(-1).tolist())), space.start.reshape(-1).astype(np.int32), (), None
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return MultiDiscrete((2,) * math.prod(space.shape)), 0, (), None
    if isinstance(space, gymnasium.spaces.Tuple | gymnasium.spaces.Dict):
        found, bounds, tree = of_parts(unsupported, actions.tree_of(unsupported, space))
        return found, 0, bounds, tree
    part = actions.part_of(unsupported, space)
    if part.is_choice:
        return MultiDiscrete(part.nums), part.low.reshape(-1), (), None
    return Box((math.prod(space.shape),)), 0, true_bounds(unsupported, space.low, space.high, space.shape), None


def as_tree(space: Any) -> PyTree:
    """Return a tree of spaces: each Dict becomes a dictionary, each Tuple a tuple."""
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(map(as_tree, space.spaces))
    inner = getattr(space, "spaces", space) if isinstance(space, gymnasium.spaces.Dict) else space
    return {name: as_tree(part) for name, part in inner.items()} if isinstance(inner, Mapping) else inner


def observation_tree(env_id: str, space: Any, hidden: Collection[str] = ()) -> PyTree:
    """Return the tree of spaces of an observation, with None for each part that is hidden and unreadable.

    Raise ValueError unless all other parts are arrays of numbers with a fixed size.
    """
    unsupported = f"{env_id}: unsupported observation space, got {one_line(space)}"
    try:
        found, structure = jax.tree.flatten_with_path(as_tree(space))
    except (TypeError, ValueError) as error:  # keys of different types have no order
        raise ValueError(f"{unsupported}; the keys of a Dict must be of one type, such as text") from error
    parts = {hide.path_of(keys): part for keys, part in found}
    if len(parts) < len(found):
        names = [hide.path_of(keys) for keys, _ in found]
        twice = min(name for name in names if names.count(name) > 1)
        raise ValueError(f"{unsupported}; two parts have the name {twice}, rename a key")
    other = [name for name, part in parts.items() if not _is_array(part) or not math.prod(part.shape)]
    wrong = [name for name in other if not hide.is_within(name, hidden)]
    if wrong and len(other) < len(parts):
        got = ", ".join(f"{name} {type(parts[name]).__name__}{parts[name].shape or ''}" for name in wrong)
        remedy = ",".join(f"hide={name}" for name in wrong)
        raise ValueError(f"{env_id}: unsupported parts of the observation, got {got}; use --wrap {remedy}")
    if not parts or wrong and all(map(_is_array, parts.values())):
        raise ValueError(f"{unsupported}; none of its parts may be empty")
    if wrong:
        kinds = ", ".join(kind.__name__ for kind in ARRAYS)
        raise ValueError(f"{unsupported}; it must consist of {kinds}, in Dict and Tuple")
    kept = [None if name in other else part for name, part in parts.items()]
    tree: PyTree = jax.tree.unflatten(structure, kept)
    return tree


def _is_array(space: Any) -> bool:
    return isinstance(space, ARRAYS) and np.dtype(space.dtype).kind in "buif"


def limits(space: Any) -> tuple[Any, Any, bool]:
    """Return the inclusive bounds of a part of an observation (None without bounds), and whether it is an index."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1, True
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        start, nums = np.asarray(space.start, np.int64), np.asarray(space.nvec, np.int64)
        return start, start + nums - 1, True
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return 0, 1, False
    with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
        low, high = (bound.astype(stored_dtype(space)) for bound in (space.low, space.high))
    if space.dtype.kind == "f":
        has_bounds = bool(np.isfinite([low, high]).any())
    else:
        widest = np.iinfo(space.dtype) if space.dtype.kind in "ui" else None
        has_bounds = widest is not None and bool((space.low > widest.min).any() or (space.high < widest.max).any())
    return (low, high, False) if has_bounds else (None, None, False)


def stored_dtype(space: Any) -> np.dtype:
    """Return the dtype of at most 32 bits that holds a part of an observation: float32 for larger whole numbers."""
    narrow = np.dtype(narrow_dtype(space.dtype))
    if narrow.kind not in "iu" or narrow == space.dtype or not isinstance(space, gymnasium.spaces.Box):
        return narrow
    widest = np.iinfo(narrow)
    fits = (space.low >= widest.min).all() and (space.high <= widest.max).all()
    return narrow if fits else np.dtype(np.float32)


def warnings(env_id: str, tree: PyTree) -> tuple[str, ...]:
    """Return a warning for each index that agents see as a number, because its one-hot vector would be too long."""
    large = [space for space in jax.tree.leaves(tree) if _num_values(space) > MAX_ONE_HOT]
    problem = f"an index of more than {MAX_ONE_HOT} values is observed as a number, not as a one-hot vector"
    remedy = "use network MODULE:CLASS with an embedding, or a wrapper of gymnasium"
    return tuple(f"observations of {env_id}: {problem}, got {one_line(space)}; {remedy}" for space in large)


def _num_values(space: Any) -> int:
    """Return the length of the one-hot vector for an index; 0 for other spaces."""
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return int(space.nvec.sum())
    return int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 0


def is_action_mask(tree: PyTree, action: Space) -> bool:
    """Return whether observations are dictionaries with an action mask: `action_mask`, one bit for each action."""
    part: Any = tree.get("action_mask") if isinstance(tree, dict) and len(tree) > 1 else None
    is_bits = isinstance(part, gymnasium.spaces.MultiBinary | gymnasium.spaces.Box)
    return is_bits and not isinstance(action, Box) and math.prod(part.shape) == mask_size(action)


def encode(spaces: PyTree, obs: PyTree) -> PyTree:
    """Return raw observations [n, ...] as agents see them; `spaces` is a tree of the same structure."""
    return jax.tree.map(_encode, obs, spaces)


def seen(tree: PyTree) -> PyTree:
    """Return shapes and dtypes of one environment's observation, as agents see it, from a tree of spaces."""
    raw = jax.tree.map(lambda part: jax.ShapeDtypeStruct((1, *part.shape), stored_dtype(part)), tree)
    obs = jax.eval_shape(lambda raw: encode(tree, raw), raw)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), obs)


def _encode(x: jax.Array, space: Any) -> jax.Array:
    has_one_hot = 0 < _num_values(space) <= MAX_ONE_HOT
    if has_one_hot and isinstance(space, gymnasium.spaces.Discrete):
        return jax.nn.one_hot(x - int(space.start), int(space.n), dtype=jnp.float32)
    if has_one_hot:
        flat, nums = x.reshape(x.shape[0], -1) - space.start.reshape(1, -1), space.nvec.reshape(-1).tolist()
        each = [jax.nn.one_hot(flat[:, i], num, dtype=jnp.float32) for i, num in enumerate(nums)]
        return jnp.concatenate(each, axis=1)
    if isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        return as_array((x - np.broadcast_to(space.start, x.shape).astype(x.dtype)).astype(jnp.float32), high=0)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return as_array(x.astype(bool) if x.ndim > 2 else x, high=1)
    return as_array(jnp.moveaxis(x, 1, -1) if is_channel_first_image(x.shape[1:], x.dtype) else x, space.high)


def is_channel_first_image(shape: tuple[int, ...], dtype: Any) -> bool:
    """Return whether one environment's observation is an image [C, H, W], uint8."""
    return dtype == jnp.uint8 and reading.has_channels_first(jax.ShapeDtypeStruct(shape, dtype))
