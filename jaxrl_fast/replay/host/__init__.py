"""Keep the frames of a replay buffer in the host's memory or on its disk, compressed or not, as a `FrameStore`.

The program holds a handle, which keeps its calls in order. One call in each update writes the frames of a rollout. If
the batches of an update are small, one call reads them all. Otherwise one call requests them, threads read them, and
each gradient step takes its batch. With priorities, draws depend on earlier gradient steps, so each step reads its
batch.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.kernels import host_call
from jaxrl_fast.parallel import team
from jaxrl_fast.parallel.collectives import call_shard
from jaxrl_fast.replay.host.buffer import HostBuffer, Shape
from jaxrl_fast.replay.store import Batches, FrameStore, Place
from jaxrl_fast.types import SHARED_MEMORY_AXIS, Parallelism, PyTree
from jaxrl_fast.types.host import HostResource
from jaxrl_fast.utils.files import REPLAY

MAX_AT_ONCE = 2**20  # bytes of all batches of an update, up to which one call costs less than threads


def host_store(
    num_rows: int, num_envs: int, frame: PyTree, parallelism: Parallelism, on_disk: bool, compressed: bool
) -> FrameStore:
    """Return a store of frames like `frame` (ShapeDtypeStructs), one for each shard. Gradient workers share it."""
    num_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(frame))
    shape, workers = Shape(num_rows, num_envs, num_bytes), parallelism.num_grad_workers
    buffers = [HostBuffer(shape, on_disk, compressed, workers) for _ in range(parallelism.num_shards)]
    if workers > 1:
        axis, callers = SHARED_MEMORY_AXIS, [(buffers[0], worker) for worker in range(workers)]
    else:
        axis, callers = parallelism.axis_name or "", [(buffer, 0) for buffer in buffers]
    on_caller = lambda function, *args: _on_caller(axis, [partial(function, *caller) for caller in callers], *args)
    several, here = len(buffers) > 1, team.current().share(len(buffers))
    return FrameStore(
        init=lambda *_: jnp.zeros(host_call.HANDLE.shape, host_call.HANDLE.dtype),
        put=lambda handle, first_row, frames: on_caller(_put, handle, first_row, to_bytes(frame, frames)),
        get=lambda handle, places: _split(_get(on_caller, frame, handle, _one_batch(places), None)),
        get_ahead=partial(_get_ahead, on_caller, frame, num_bytes),
        resources=tuple(resource(buffers[i], f"{REPLAY}-{i}" if several else REPLAY) for i in here),
    )


def to_bytes(frame: PyTree, frames: PyTree) -> Array:
    """Return frames [..., *frame] as bytes, uint8 [..., B]: all leaves of a frame behind each other."""

    def one(like: jax.ShapeDtypeStruct, x: Array) -> Array:
        x = x.astype(like.dtype).reshape(*x.shape[: x.ndim - len(like.shape)], -1)
        if like.dtype == jnp.uint8:
            return x
        x = x.astype(jnp.uint8) if like.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, jnp.uint8)
        return x.reshape(*x.shape[: -1 if like.dtype.itemsize == 1 else -2], -1)

    return jnp.concatenate(jax.tree.leaves(jax.tree.map(one, frame, frames)), axis=-1)


def from_bytes(frame: PyTree, data: Array) -> PyTree:
    """Return the frames [..., *frame] of bytes, uint8 [..., B]."""
    leaves, structure = jax.tree.flatten(frame)
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in leaves]
    found = []
    for like, part in zip(leaves, jnp.split(data, np.cumsum(sizes)[:-1], axis=-1)):
        if like.dtype == jnp.bool_:
            part = part.astype(jnp.bool_)
        elif like.dtype != jnp.uint8:
            width = () if like.dtype.itemsize == 1 else (like.dtype.itemsize,)
            part = jax.lax.bitcast_convert_type(part.reshape(*part.shape[:-1], -1, *width), like.dtype)
        found.append(part.reshape(*data.shape[:-1], *like.shape))
    return jax.tree.unflatten(structure, found)


def _on_caller(axis: str, functions: Sequence[Callable[..., PyTree]], *args: PyTree) -> PyTree:
    """Call the function of this shard or gradient worker: each has its own arrays at fixed addresses."""
    return functions[0](*args) if len(functions) == 1 else call_shard(axis, functions, *args)


def _put(buffer: HostBuffer, worker: int, handle: Array, first_row: Array, data: Array) -> Array:
    write = lambda inputs, _: buffer.put(worker, int(inputs[0]), inputs[1])
    return host_call.call(write, handle, [first_row, data], [], buffer.calls)[0]


def _get(on_caller: Callable[..., PyTree], frame: PyTree, handle: Array, places: Sequence[Place], num: Any) -> PyTree:
    """Return the frames [P, K, ..., *frame] at P places [K, ...], of which those at k >= num may be anything."""
    data = on_caller(_read, handle, *_stacked(places), jnp.int32(len(places[0][0])) if num is None else num)
    return from_bytes(frame, data.reshape(len(places), *places[0][0].shape, -1))


def _get_ahead(
    on_caller: Callable[..., PyTree],
    frame: PyTree,
    num_bytes: int,
    handle: Array,
    batches: Batches,
) -> Callable[[Array], PyTree]:
    """Return a function from i to the frames of batch i; see `FrameStore.get_ahead`."""
    places, num = batches
    shape = places[0][0].shape
    if shape[0] == 1 or len(places) * math.prod(shape) * num_bytes <= MAX_AT_ONCE:
        found = _get(on_caller, frame, handle, places, num)
        return lambda i: jax.tree.map(lambda x: x[:, i], found)
    row, env = _stacked(places)
    after = on_caller(_request, handle, row, env, num)
    like = jax.ShapeDtypeStruct((len(places), row.shape[2], num_bytes), jnp.uint8)
    take = lambda i: on_caller(partial(_take, like=like), after, jnp.int32(i))
    return lambda i: from_bytes(frame, take(i).reshape(len(places), *shape[1:], -1))


def _stacked(places: Sequence[Place]) -> list[Array]:
    """Return rows and environments of P places [K, ...] as [P, K, M]."""
    return [jnp.stack([place[i].reshape(len(place[i]), -1) for place in places]) for i in (0, 1)]


def _request(buffer: HostBuffer, worker: int, handle: Array, row: Array, env: Array, num: Array) -> Array:
    begin = lambda inputs, _: buffer.request(worker, inputs[0], inputs[1], int(inputs[2]))
    return host_call.call(begin, handle, [row, env, num], [], buffer.calls)[0]


def _take(buffer: HostBuffer, worker: int, handle: Array, i: Array, like: jax.ShapeDtypeStruct) -> Array:
    take = lambda inputs, outputs: buffer.take(worker, int(inputs[0]), outputs[0])
    return host_call.call(take, handle, [i], [like], buffer.calls)[1][0]


def _read(buffer: HostBuffer, worker: int, handle: Array, row: Array, env: Array, num: Array) -> Array:
    result = jax.ShapeDtypeStruct((*row.shape, buffer.shape.num_bytes), jnp.uint8)
    read = lambda inputs, outputs: buffer.get(inputs[0], inputs[1], int(inputs[2]), outputs[0])
    return host_call.call(read, handle, [row, env, num], [result], buffer.calls)[1][0]


def _one_batch(places: Sequence[Place]) -> list[Place]:
    return [(row[None], env[None]) for row, env in places]


def _split(frames: PyTree) -> list[PyTree]:
    """Return the frames of each place from the frames of one batch, [P, 1, ..., *frame]."""
    num = len(jax.tree.leaves(frames)[0])
    return [jax.tree.map(lambda x: x[i, 0], frames) for i in range(num)]  # noqa: B023


def resource(buffer: HostBuffer, name: str) -> HostResource:
    """Return the functions of a buffer, whose files are in a folder of this name in the folder of the run."""
    return HostResource(name, buffer.open, buffer.close, buffer.save, buffer.load, buffer.prune, buffer.report)
