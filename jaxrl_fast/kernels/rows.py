"""Write the rows of a loop with few kernels: arrays of one dtype as columns of one array.

XLA writes each array that a loop stacks with another kernel. At the sizes of a rollout, a kernel costs an
accelerator as much as its launch, whatever it writes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.types import PyTree
from jaxrl_fast.utils import target

Packed = Mapping[str, Array]  # dtype to [..., columns]


def scan(
    function: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    num_axes: int = 0,
    length: int | None = None,
) -> Any:
    """Return the result of `lax.scan`, whose outputs share their first `num_axes` axes."""
    if target.platform() == "cpu":
        return jax.lax.scan(function, init, xs, length)
    like = jax.eval_shape(function, init, jax.tree.map(lambda x: x[0], xs))[1]

    def packed(carry: PyTree, x: PyTree) -> tuple[PyTree, Packed]:
        carry, row = function(carry, x)
        return carry, pack(row, num_axes)

    carry, rows = jax.lax.scan(packed, init, xs, length)
    return carry, unpack(rows, like, num_axes)


def pack(tree: PyTree, num_axes: int = 0) -> Packed:
    """Return arrays that share their first `num_axes` axes as one array for each dtype, [..., columns]."""
    of_dtype: dict[str, list[Array]] = {}
    for x in jax.tree.leaves(tree):
        of_dtype.setdefault(x.dtype.name, []).append(x.reshape(*x.shape[:num_axes], -1))
    return {name: jnp.concatenate(x, axis=-1) for name, x in of_dtype.items()}


def unpack(packed: Packed, like: PyTree, num_axes: int = 0) -> PyTree:
    """Return the arrays of packed rows [T, ..., columns] as a tree of arrays [T, ...], where one row was `like`."""
    start, found = dict.fromkeys(packed, 0), []
    for x in jax.tree.leaves(like):
        name = x.dtype.name
        stop = start[name] + math.prod(x.shape[num_axes:])
        part = packed[name][..., start[name] : stop]
        found.append(part.reshape(*part.shape[:-1], *x.shape[num_axes:]))
        start[name] = stop
    return jax.tree.unflatten(jax.tree.structure(like), found)
