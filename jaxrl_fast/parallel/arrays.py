"""Move arrays between the host and the devices of all processes."""

from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxrl_fast.types import PyTree

Index = list[list[int]]  # first index and end on each axis


def put(x: Any, sharding: Sharding) -> Array:
    """Place an array that every process has whole on the devices of a sharding."""
    if sharding.is_fully_addressable:
        whole_there: Array = jax.device_put(x, sharding)
        return whole_there
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        keys: Array = jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
        return keys
    rows = np.asarray(x)
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def local_index(x: Array) -> Index:
    """Return where this process's part of an array lies in the whole."""
    if x.is_fully_addressable:
        return [[0, size] for size in x.shape]
    of_devices = x.sharding.addressable_devices_indices_map(x.shape).values()
    axes = zip(*([s.indices(size)[:2] for s, size in zip(index or (), x.shape)] for index in of_devices))
    return [[min(first for first, _ in axis), max(end for _, end in axis)] for axis in axes]


def local_rows(x: Any) -> np.ndarray:
    """Return this process's part of an array, or the whole of one that is not on several processes' devices."""
    if not isinstance(x, Array) or x.is_fully_addressable:
        return np.asarray(x)
    start = [first for first, _ in local_index(x)]
    rows = np.empty([end - first for first, end in local_index(x)], x.dtype)
    for part in x.addressable_shards:
        places = (s.indices(size)[:2] for s, size in zip(part.index, x.shape))
        rows[tuple(slice(a - first, b - first) for (a, b), first in zip(places, start))] = np.asarray(part.data)
    return rows


def whole_shape(x: Any, rows: np.ndarray) -> tuple[int, ...]:
    """Return the shape of an array of which `rows` are this process's part, or the first ones of all."""
    return x.shape if isinstance(x, Array) and not x.is_fully_addressable else rows.shape


def whole(tree: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """Return a tree of arrays with every array whole on a device of this process. All processes must call this."""
    copies = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), copies)
