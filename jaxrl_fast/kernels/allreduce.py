"""Sum float32 arrays over the cores of one CPU, or copy the first core's arrays, by shared memory (allreduce.c).

The XLA counterpart of the sum, `jax.lax.psum`, is called by `parallel/collectives.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.kernels import build
from jaxrl_fast.types import MAX_FLAT, SHARED_MEMORY_AXIS, PyTree


@jax.custom_batching.custom_vmap
def sum_over_cores(arrays: list[Array]) -> list[Array]:
    """Return the sum of each array, f32 [...], over the axis SHARED_MEMORY_AXIS. Raise TypeError for other types.

    The call is declared to have a side effect, so that XLA neither repeats it, drops it nor moves it out of a loop.
    Small arrays are summed into one vector, the form that `rl.optim` uses.
    """
    if wrong := {str(x.dtype) for x in arrays if x.dtype != jnp.float32}:
        raise TypeError(f"the all-reduce over cores sums float32, not {', '.join(sorted(wrong))}")
    if not arrays:
        return []
    num_cores, sizes = jnp.int32(jax.lax.psum(1, SHARED_MEMORY_AXIS)), [x.size for x in arrays]
    flat = sum(sizes) <= MAX_FLAT
    shapes = [(sum(sizes),)] if flat else [x.shape for x in arrays]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sums = build.call("sum_over_cores", results, has_side_effect=True)(num_cores, *arrays)
    if flat:
        sums = jnp.split(sums[0], np.cumsum(sizes)[:-1])
    return [total.reshape(x.shape) for total, x in zip(sums, arrays, strict=True)]


@sum_over_cores.def_vmap
def _sum_batches(size: int, batched: list[Any], arrays: list[Array]) -> tuple[list[Array], list[Any]]:
    """Sum batched arrays in one call, as arrays with one more axis."""
    return sum_over_cores(arrays), batched[0]


def call_on_first_core(function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """Return the result of a function that only the first core of SHARED_MEMORY_AXIS calls; the others wait for it.

    It may step environments on the host, which exist once. The result consists of arrays, without typed PRNG keys.
    """
    like = jax.eval_shape(function, *arguments)
    nothing = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    result = jax.lax.cond(jax.lax.axis_index(SHARED_MEMORY_AXIS) == 0, function, nothing, *arguments)
    leaves, structure = jax.tree.flatten(result)
    sent = [x for x in leaves if x.size]
    numbers = np.array([jax.lax.psum(1, SHARED_MEMORY_AXIS), *(x.nbytes for x in sent)], np.int32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in sent]
    received = iter(build.call("copy_from_first_core", shapes, has_side_effect=True)(numbers, *sent))
    return jax.tree.unflatten(structure, [next(received) if x.size else x for x in leaves])
