"""Sum float32 arrays over the cores of one CPU, through the memory that they share (`csrc/allreduce.c`)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.kernels import build
from jaxrl_fast.types import MAX_FLAT, SHARED_MEMORY_AXIS


def sum_over_cores(arrays: list[Array]) -> list[Array]:
    """f32 [...] each. Not to be made twice, left out or moved out of a loop, so XLA is told that it has an effect.

    Of few numbers the sums lie one after another, as `gradients.optimizer` would have to copy them.
    """
    if wrong := {str(x.dtype) for x in arrays if x.dtype != jnp.float32}:
        raise TypeError(f"cores sum float32, not {', '.join(sorted(wrong))}")
    if not arrays:
        return []
    num_cores, sizes = jnp.int32(jax.lax.psum(1, SHARED_MEMORY_AXIS)), [x.size for x in arrays]
    together = sum(sizes) <= MAX_FLAT
    shapes = [(sum(sizes),)] if together else [x.shape for x in arrays]
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sums = build.call("sum_over_cores", like, has_side_effect=True)(num_cores, *arrays)
    if together:
        sums = jnp.split(sums[0], np.cumsum(sizes)[:-1])
    return [total.reshape(x.shape) for total, x in zip(sums, arrays, strict=True)]
