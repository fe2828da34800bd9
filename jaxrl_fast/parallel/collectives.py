"""Exchange values between devices that run the same program, each on its own rows.

A device axis is known by its name. The devices of SHARED_MEMORY_AXIS are cores of one CPU. They sum through the memory
that they share (`kernels/allreduce.py`), in about one microsecond; XLA's own sum takes about 50.

XLA runs its own collectives in the same order on every device, but not the sums over SHARED_MEMORY_AXIS. Each such sum
must depend on the result of the previous one, or lie in another iteration of a loop. Otherwise devices may deadlock.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from jaxrl_fast.kernels import build
from jaxrl_fast.kernels.allreduce import sum_over_cores
from jaxrl_fast.parallel import team
from jaxrl_fast.types import SHARED_MEMORY_AXIS, PyTree


def all_reduce_sum(x: PyTree, axis_name: str | None) -> PyTree:
    """Return the sum of floats over the devices of `axis_name` (psum), or x if `axis_name` is None.

    All leaves are summed at once, because devices wait for each other at every sum. XLA sums them as one vector of the
    type that they promote to.
    """
    if axis_name is None:
        return x
    if axis_name == SHARED_MEMORY_AXIS and build.is_available("allreduce"):
        leaves, structure = jax.tree.flatten(x)
        return jax.tree.unflatten(structure, sum_over_cores(leaves))
    flat, restore = ravel_pytree(x)
    return restore(jax.lax.psum(flat, axis_name))


def all_gather(x: PyTree, axis_name: str | None) -> PyTree:
    """Return the floats of all devices of `axis_name`, [devices, ...] each, or x[None] if `axis_name` is None.

    Devices wait for each other once.
    """
    if axis_name is None:
        return jax.tree.map(lambda x: x[None], x)
    flat, restore = ravel_pytree(x)
    if axis_name == SHARED_MEMORY_AXIS:
        gathered = all_reduce_sum(scatter_rows(flat[None], jax.lax.psum(1, SHARED_MEMORY_AXIS)), SHARED_MEMORY_AXIS)
    else:
        gathered = jax.lax.all_gather(flat, axis_name)
    return jax.vmap(restore)(gathered)


def local_rows(rows: PyTree, num_grad_workers: int, axis: int = 0) -> PyTree:
    """Return this worker's slice of arrays that all workers hold: [B / num_grad_workers] of [B] rows on `axis`."""
    if num_grad_workers == 1:
        return rows

    def take(x: Array) -> Array:
        size = x.shape[axis] // num_grad_workers
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(SHARED_MEMORY_AXIS) * size, size, axis)

    return jax.tree.map(take, rows)


def scatter_rows(part: Array, num_grad_workers: int) -> Array:
    """Return this worker's rows [B / num_grad_workers, ...] at their position in zeros [B, ...].

    The sum over all workers is the whole array.
    """
    if num_grad_workers == 1:
        return part
    size = part.shape[0]
    whole = jnp.zeros((num_grad_workers * size, *part.shape[1:]), part.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, part, jax.lax.axis_index(SHARED_MEMORY_AXIS) * size, 0)


def call_shard(axis_name: str, functions: Sequence[Callable[..., PyTree]], *args: PyTree) -> PyTree:
    """Return the result of this shard's function. Under vmap, call each with its part of the batch.

    With several processes, a program has only the functions of its process's shards, and a last branch that is never
    taken. So a single function is a branch too: XLA fuses no operations across it, and rounds as with several.
    """
    processes = team.current()
    here = processes.share(len(functions))
    own = [functions[i] for i in here]
    if processes.count > 1:
        own.append(lambda *args: jax.tree.map(jnp.zeros_like, jax.eval_shape(own[0], *args)))

    @jax.custom_batching.custom_vmap
    def call(index: Array, *args: PyTree) -> PyTree:
        return jax.lax.switch(index - here.start, own, *args)

    @call.def_vmap
    def call_each(size: int, batched: list[Any], index: Array, *args: PyTree) -> tuple[PyTree, PyTree]:
        assert size == len(functions) and batched[0], "only the shard axis can be vmapped"
        take = lambda i: jax.tree.map(lambda x, is_batched: x[i] if is_batched else x, args, tuple(batched[1:]))
        results = [function(*take(i)) for i, function in enumerate(functions)]
        return jax.tree.map(lambda *x: jnp.stack(x), *results), jax.tree.map(lambda _: True, results[0])

    return call(jax.lax.axis_index(axis_name), *args)
