"""Convert actions of several parts, Dict and Tuple spaces, between agents and environments.

Agents see one array [k + D]: first all choices as numbers from 0, then all continuous numbers. Parts are in the order
of a tree's leaves: a dictionary's by sorted keys. Worker processes import this, so it avoids JAX; `split` takes arrays
of numpy and of JAX.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MAX_OPTIONS = 4096  # of a Box of whole numbers, over all its entries


@dataclass(frozen=True, eq=False)  # not a tuple: a leaf of trees
class Part:
    """One space of an action, and where its entries are in the agents' array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    low: np.ndarray  # [*shape]: the smallest choices, or the true lower bounds
    high: np.ndarray  # [*shape], inclusive
    is_choice: bool
    is_scalar: bool = False  # the environment takes a number, not an array of shape ()
    first: int = 0  # the place of its first entry

    @property
    def size(self) -> int:
        """Return the number of its entries."""
        return math.prod(self.shape)

    @property
    def nums(self) -> tuple[int, ...]:
        """Return the number of options of each choice."""
        pairs = zip(self.low.reshape(-1).tolist(), self.high.reshape(-1).tolist(), strict=True)
        return tuple(int(high) - int(low) + 1 for low, high in pairs)

    @property
    def expression(self) -> str:
        """Return the expression of numpy for it in actions [b, k + D] of an exported policy."""
        column = f"action[:, {self.first}:{self.first + self.size}].reshape({('b', *self.shape)})".replace("'b'", "-1")
        start = f" + np.array({self.low.tolist()})" if self.is_choice and self.low.any() else ""
        return f"({column}{start}).astype(np.{self.dtype})" if start else f"{column}.astype(np.{self.dtype})"


def choices(shape: tuple[int, ...], dtype: Any, low: Any, nums: Any) -> Part:
    """Return the part of choices with these numbers of options; the smallest ones are `low`."""
    low = np.broadcast_to(np.asarray(low), shape)
    high = low + np.reshape(nums, shape) - 1
    return Part(shape, np.dtype(dtype), low, high, is_choice=True, is_scalar=not shape)


def whole_numbers(unsupported: str, dtype: Any, low: np.ndarray, high: np.ndarray) -> Part:
    """Return the part of a Box of whole numbers. Raise ValueError, with `unsupported` first, if it is too large."""
    part = Part(low.shape, np.dtype(dtype), low, high, is_choice=True)
    if (num := sum(part.nums)) > MAX_OPTIONS or max(abs(low).max(), abs(high).max()) >= 2**31:
        problem = f"a Box of whole numbers may have {MAX_OPTIONS:,} options in all, got {num:,}"
        raise ValueError(f"{unsupported}; {problem}; declare the range that matters")
    return part


def placed(tree: Any) -> Any:
    """Return the tree with the place of each part: first those of choices, then those of numbers."""
    place, following = {}, 0
    for is_choice in (True, False):
        for part in parts(tree):
            if part.is_choice == is_choice:
                place[id(part)], following = following, following + part.size
    return mapped(lambda part: replace(part, first=place[id(part)]), tree)


def split(tree: Any, action: Any, narrow: Callable[[np.dtype], Any] = lambda dtype: dtype) -> Any:
    """Return the parts of actions [..., k + D], whose numbers are within the bounds: a tree of arrays [..., *shape].

    They have the dtypes of their spaces, as `narrow` changes them: JAX has 32 bits at most.
    """

    def one(part: Part) -> Any:
        dtype = part.dtype
        x = action[..., part.first : part.first + part.size].reshape((*action.shape[:-1], *part.shape))
        low, high = (np.broadcast_to(bound, x.shape) for bound in (part.low, part.high))
        if part.is_choice:
            wide = narrow(np.dtype(np.int64))
            found = (x.astype(wide) + low.astype(wide)).astype(narrow(dtype))
        else:
            found = x.astype(narrow(dtype)).clip(low.astype(narrow(dtype)), high.astype(narrow(dtype)))
        if part.is_scalar:
            return found[()]
        return np.asarray(found) if isinstance(found, np.generic) else found  # numpy's results lose a shape of ()

    return mapped(one, tree)


def sample(tree: Any, rng: np.random.Generator, mask: np.ndarray | None = None) -> np.ndarray:
    """Return a random action [k + D] of float64, among the choices that a mask [sum of options] allows."""
    found = list(parts(tree))
    nums = [num for part in found if part.is_choice for num in part.nums]
    bits = np.ones(sum(nums), bool) if mask is None or mask.size != sum(nums) else mask.astype(bool)
    each = [np.flatnonzero(part) if part.any() else np.arange(len(part)) for part in np.split(bits, np.cumsum(nums))]
    chosen = [rng.choice(options) for options in each[: len(nums)]]
    numbers = [np.reshape(rng.uniform(part.low, part.high), -1) for part in found if not part.is_choice]
    return np.concatenate([np.array(chosen, float), *numbers])


def parts(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yield the leaves of a tree of dictionaries and tuples."""
    for _, part in named(tree, path):
        yield part


def named(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree of dictionaries and tuples, with names such as "arm/0"."""
    if isinstance(tree, dict | tuple):
        for key in sorted(tree) if isinstance(tree, dict) else range(len(tree)):
            yield from named(tree[key], (*path, key))
    else:
        yield "/".join(map(str, path)), tree


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with the function's results in place of its leaves."""
    if isinstance(tree, dict):
        return {key: mapped(function, tree[key]) for key in sorted(tree)}
    return tuple(mapped(function, part) for part in tree) if isinstance(tree, tuple) else function(tree)
