"""What devices tell each other while they compute the same program, each on its own rows.

An axis of devices is known by its name. On one that is called CORES the devices are cores of one CPU and sum by way of
the memory that they share (`cores.c`), in a microsecond or so, where XLA's own sum takes some 50.

XLA keeps its own sums in one order on all devices. Nobody does that for those on CORES, so each must want the result of
the one before it, or stand in another round of a loop: two that could change places would wait for each other for ever.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from jaxrl_fast import native
from jaxrl_fast.types import CORES, MOST_FLAT, PyTree


def total(x: PyTree, axis_name: str | None) -> PyTree:
    """The sum of floats over the devices of an axis; of one device, without a name, what it has.

    All leaves are summed at once, by XLA as one vector of the type that they promote to, for each sum has the devices
    wait for each other.
    """
    if axis_name is None:
        return x
    if axis_name == CORES:
        leaves, structure = jax.tree.flatten(x)
        return jax.tree.unflatten(structure, _over_cores(leaves))
    flat, restore = ravel_pytree(x)
    return restore(jax.lax.psum(flat, axis_name))


def gather(x: PyTree, axis_name: str | None) -> PyTree:
    """What each device of an axis has, [devices, ...] floats; they wait for each other once."""
    if axis_name is None:
        return jax.tree.map(lambda x: x[None], x)
    flat, restore = ravel_pytree(x)
    if axis_name == CORES:
        of_each = total(placed(flat[None], jax.lax.psum(1, CORES)), CORES)
    else:
        of_each = jax.lax.all_gather(flat, axis_name)
    return jax.vmap(restore)(of_each)


def part(rows: PyTree, num_hands: int, axis: int = 0) -> PyTree:
    """This core's equal part of rows, which all of so many cores have."""
    if num_hands == 1:
        return rows

    def take(x: Array) -> Array:
        size = x.shape[axis] // num_hands
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(CORES) * size, size, axis)

    return jax.tree.map(take, rows)


def placed(part: Array, num_hands: int) -> Array:
    """This core's part [B / num_hands, ...] in its place among zeros [B, ...]: the sum over cores is the whole."""
    if num_hands == 1:
        return part
    size = part.shape[0]
    whole = jnp.zeros((num_hands * size, *part.shape[1:]), part.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, part, jax.lax.axis_index(CORES) * size, 0)


def _over_cores(arrays: list[Array]) -> list[Array]:
    """f32 [...] each. Not to be made twice, left out or moved out of a loop, so XLA is told that it has an effect.

    Of few numbers the sums lie one after another, as `gradients.optimiser` would have to copy them.
    """
    if wrong := {str(x.dtype) for x in arrays if x.dtype != jnp.float32}:
        raise TypeError(f"cores sum float32, not {', '.join(sorted(wrong))}")
    if not arrays:
        return []
    num_cores, sizes = jnp.int32(jax.lax.psum(1, CORES)), [x.size for x in arrays]
    together = sum(sizes) <= MOST_FLAT
    shapes = [(sum(sizes),)] if together else [x.shape for x in arrays]
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sums = native.call("sum_over_cores", like, has_side_effect=True)(num_cores, *arrays)
    if together:
        sums = jnp.split(sums[0], np.cumsum(sizes)[:-1])
    return [total.reshape(x.shape) for total, x in zip(sums, arrays, strict=True)]
