"""Store the frames of a replay buffer: a record of functions. Frames are most of a buffer's bytes.

Everything else of a buffer (actions, rewards, ends, priorities) stays on the device, so drawing does not depend on the
store, and every store returns the same bits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.types import PyTree
from jaxrl_fast.types.host import HostResource

Place = tuple[Array, Array]  # rows and environments of frames, int32, of shapes that broadcast


class FrameStore(NamedTuple):
    """The frames of the last R rows of N environments, as functions of a state S."""

    init: Callable[[int, int, PyTree], PyTree]  # (R, N, frame as ShapeDtypeStructs) to S: all frames are zero
    put: Callable[[PyTree, Array, PyTree], PyTree]  # (S, first row, frames [T, N, ...]) to S
    get: Callable[[PyTree, Sequence[Place]], list[PyTree]]  # (S, P places) to the frames at each, [..., *frame]
    # (S, batches) to a function, called once with each of 0 to num - 1 before the next `put`, from k to frames
    # [P, ..., *frame]. None: use one `get` for each batch.
    get_ahead: "Callable[[PyTree, Batches], Callable[[Array], PyTree]] | None" = None
    resources: tuple[HostResource, ...] = ()  # the parts outside of the compiled program


class Batches(NamedTuple):
    """The places of the frames of K batches."""

    places: Sequence[Place]  # P places [K, ...]
    num: Array  # int32: the number of batches needed


class FramesAhead(NamedTuple):
    """The frames of one batch that were read ahead, in place of the state of a store."""

    frames: PyTree  # [P, ..., *frame] of the P places of a batch


def init_on_device(num_rows: int, num_envs: int, frame: PyTree) -> PyTree:
    """Return arrays [R, N, ...] of zeros."""
    return jax.tree.map(lambda x: jnp.zeros((num_rows, num_envs, *x.shape), x.dtype), frame)


def put_on_device(arrays: PyTree, first_row: Array, frames: PyTree) -> PyTree:
    """Write frames [T, N, ...] from a row on."""
    put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), first_row, axis=0)
    return jax.tree.map(put, arrays, frames)


def get_on_device(arrays: PyTree, places: Sequence[Place]) -> list[PyTree]:
    """Return the frames at each of the places, [..., *frame]."""
    return [jax.tree.map(lambda x: at(x, row, env), arrays) for row, env in places]  # noqa: B023


def at(x: Array, row: Array, env: Array) -> Array:
    """Return x [R, N, ...] at rows and environments. Two indices, since a flat one could exceed 2^31."""
    return x.at[row, env].get(mode="promise_in_bounds")


DEVICE = FrameStore(init_on_device, put_on_device, get_on_device)
