"""What devices tell each other while they compute the same program, each on its own rows.

An axis of devices is known by its name. On one that is called CORES the devices are cores of one CPU and sum by way of
the memory that they share (`cores.c`), in a microsecond or so, where XLA's own sum takes some 50.

XLA keeps its own sums in one order on all devices. Nobody does that for those on CORES, so each must want the result of
the one before it, or stand in another round of a loop: two that could change places would wait for each other for ever.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from jaxrl_fast.kernels.allreduce import sum_over_cores
from jaxrl_fast.types import SHARED_MEMORY_AXIS, PyTree


def all_reduce_sum(x: PyTree, axis_name: str | None) -> PyTree:
    """The sum of floats over the devices of an axis; of one device, without a name, what it has.

    All leaves are summed at once, by XLA as one vector of the type that they promote to, for each sum has the devices
    wait for each other.
    """
    if axis_name is None:
        return x
    if axis_name == SHARED_MEMORY_AXIS:
        leaves, structure = jax.tree.flatten(x)
        return jax.tree.unflatten(structure, sum_over_cores(leaves))
    flat, restore = ravel_pytree(x)
    return restore(jax.lax.psum(flat, axis_name))


def all_gather(x: PyTree, axis_name: str | None) -> PyTree:
    """What each device of an axis has, [devices, ...] floats; they wait for each other once."""
    if axis_name is None:
        return jax.tree.map(lambda x: x[None], x)
    flat, restore = ravel_pytree(x)
    if axis_name == SHARED_MEMORY_AXIS:
        of_each = all_reduce_sum(scatter_rows(flat[None], jax.lax.psum(1, SHARED_MEMORY_AXIS)), SHARED_MEMORY_AXIS)
    else:
        of_each = jax.lax.all_gather(flat, axis_name)
    return jax.vmap(restore)(of_each)


def local_rows(rows: PyTree, num_grad_workers: int, axis: int = 0) -> PyTree:
    """This core's equal part of rows, which all of so many cores have."""
    if num_grad_workers == 1:
        return rows

    def take(x: Array) -> Array:
        size = x.shape[axis] // num_grad_workers
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(SHARED_MEMORY_AXIS) * size, size, axis)

    return jax.tree.map(take, rows)


def scatter_rows(part: Array, num_grad_workers: int) -> Array:
    """Put this worker's rows [B / num_grad_workers, ...] in their place among zeros [B, ...]; the sum is the whole."""
    if num_grad_workers == 1:
        return part
    size = part.shape[0]
    whole = jnp.zeros((num_grad_workers * size, *part.shape[1:]), part.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, part, jax.lax.axis_index(SHARED_MEMORY_AXIS) * size, 0)
