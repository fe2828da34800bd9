"""Describe the arrays that hold the rows of n environments. Only numpy: worker processes import this without JAX."""

import mmap
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_fast.envs.schedules import Schedule

ALIGNMENT = 64  # bytes between the starts of two arrays in shared memory are a multiple of this


class Leaf(NamedTuple):
    """One array of an environment's observation, as its space declares it."""

    path: tuple[Any, ...]  # keys and indices from the observation to the array
    shape: tuple[int, ...]
    dtype: np.dtype
    stored: np.dtype  # of at most 32 bits
    low: Any = None  # inclusive bounds; None: without bounds, or none that the dtype does not imply
    high: Any = None
    is_index: bool = False  # whole numbers, which select an entry of a one-hot vector

    @property
    def name(self) -> str:
        """Return "observation", or "observation['camera']"."""
        return "observation" + "".join(f"[{key!r}]" for key in self.path)

    def accepted(self, within_bounds: bool = True) -> tuple[Any, Any] | None:
        """Return the lowest and the highest number that are accepted without a closer check; None: all numbers.

        NaN and infinite numbers are never accepted. Bounds of other arrays than indices need `within_bounds`.
        """
        low: Any = None
        high: Any = None
        if within_bounds or self.is_index:
            low, high = self.low, self.high
        if self.stored.kind != "f":
            return None if low is None else (low, high)
        limits = np.finfo(self.stored)
        return (limits.min, limits.max) if low is None else (np.maximum(low, limits.min), np.minimum(high, limits.max))


class Layout(NamedTuple):
    """The arrays of one environment's row."""

    leaves: tuple[Leaf, ...]
    tree: Any  # the observation with the indices of leaves in place of arrays; None for parts that are left out
    action_shape: tuple[int, ...]
    action_dtype: np.dtype
    mask_size: int = 0  # entries of the action mask in `info`; 0: there is none
    action_tree: Any = None  # of `nested.Part`, for an action in several parts


class Recipe(NamedTuple):
    """How the environments of a pool are made, and how their results are checked."""

    env_id: str
    make: Callable[[], Any]  # of one environment
    layout: Layout
    quarantine: bool = False  # numbers that are not finite truncate the episode; otherwise they are an error
    schedules: Mapping[str, Schedule] = {}  # of attributes
    num_envs: int = 1  # over which their environment steps are summed


class Arrays(NamedTuple):
    """The rows of n environments."""

    obs: tuple[np.ndarray, ...]  # one for each leaf, [n, *shape]
    mask: np.ndarray  # [n, mask_size] bool
    reward: np.ndarray  # [n] f32
    terminated: np.ndarray  # [n] bool
    truncated: np.ndarray  # [n] bool
    action: np.ndarray  # [n, *action_shape]
    episode: np.ndarray  # [n] int64: number of the episode, from 1
    length: np.ndarray  # [n] int64: number of the step in the episode, from 1; 0 in a reset
    busy: np.ndarray  # [n] bool: the environment is inside `reset` or `step`

    def rows(self, first: int, last: int) -> "Arrays":
        """Return the part of some environments, in the same memory."""
        return Arrays(tuple(x[first:last] for x in self.obs), *(x[first:last] for x in self[1:]))

    def where(self, i: int, first: int = 0) -> str:
        """Return the place of environment i, for messages. `first` is the number of environment 0 in its pool."""
        length = int(self.length[i])
        now = f"step {length}, action {few(self.action[i])}" if length else "reset"
        return f"environment {first + i}, episode {int(self.episode[i])}, {now}"


def few(array: Any) -> str:
    """Return some numbers in one line."""
    text = np.array2string(np.asarray(array), precision=4, threshold=6, edgeitems=2, separator=", ")
    return " ".join(text.split())


def allocate(layout: Layout, num_envs: int) -> Arrays:
    """Return zeros in this process's memory."""
    return arrays_in(layout, num_envs, bytearray(num_bytes(layout, num_envs)))


class SharedMemory:
    """Memory that a worker process maps through a file descriptor. The file has no name, so none can be left behind."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.file = None
        if descriptor is None:
            self.file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
            self.file.truncate(size)
            descriptor = self.file.fileno()
        self.descriptor = descriptor
        self.map = mmap.mmap(descriptor, size)

    def arrays(self, layout: Layout, num_envs: int) -> Arrays:
        """Return arrays in this memory."""
        return arrays_in(layout, num_envs, self.map)

    def close(self) -> None:
        """Close the file. The memory is released with the last array in it."""
        if self.file is not None:
            self.file.close()


def num_bytes(layout: Layout, num_envs: int) -> int:
    """Return the bytes that the arrays need."""
    return sum(_padded(shape, dtype) for shape, dtype in _kinds(layout, num_envs))


def build(tree: Any, leaves: tuple[Any, ...] | list[Any]) -> Any:
    """Return the tree with leaves in place of their indices."""
    if isinstance(tree, dict):
        return {key: build(part, leaves) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(build(part, leaves) for part in tree)
    return None if tree is None else leaves[tree]


def arrays_in(layout: Layout, num_envs: int, memory: Any) -> Arrays:
    """Return arrays of n environments in a buffer of `num_bytes`."""
    found, offset = [], 0
    for shape, dtype in _kinds(layout, num_envs):
        count = int(np.prod(shape))
        found.append(np.frombuffer(memory, dtype, count, offset).reshape(shape))
        offset += _padded(shape, dtype)
    num_leaves = len(layout.leaves)
    return Arrays(tuple(found[:num_leaves]), *found[num_leaves:])


def _kinds(layout: Layout, num_envs: int) -> list[tuple[tuple[int, ...], Any]]:
    """Return shapes and dtypes of all arrays: first the leaves, then the others in the order of `Arrays`."""
    per_env: list[tuple[tuple[int, ...], Any]] = [(leaf.shape, leaf.stored) for leaf in layout.leaves]
    per_env += [((layout.mask_size,), np.bool_), ((), np.float32), ((), np.bool_), ((), np.bool_)]
    per_env += [(layout.action_shape, layout.action_dtype), ((), np.int64), ((), np.int64), ((), np.bool_)]
    return [((num_envs, *shape), np.dtype(dtype)) for shape, dtype in per_env]


def _padded(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return -(-int(np.prod(shape)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
