"""Replay: the last R steps of N environments in a ring, each observation kept once.

The ring is time-major, [R, N, ...]. Because environments reset on the next step, the observation of the next row is
always the true successor, so it is never stored a second time. Where observations are stacks of frames, only the newest
frame of each is kept, and the stack is put together again from the rows before it (`frames`).

Rows are numbered by their place in the ring; `head` is where the next one goes. A row can be read once it has `n_step`
successors, and while all the frames of its stack are still there. Rows whose action was ignored (resets) are never
drawn. Prioritized drawing is in `priorities.py`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jaxrl_fast.rl.frame_stack import compress, gather_stacks, num_channels, stack_ages
from jaxrl_fast.types import Box, Discrete, Key, PyTree, Transition

MAX_UNROLLED = 8  # steps of an n-step return
NUM_TRIES = 4  # draws for one sample before it is given up: all hit resets once in (episode length + 1)^4 times


class ReplayConfig(NamedTuple):
    """What is fixed while tracing."""

    num_rows: int  # R, a multiple of the length of the rollouts that are added
    num_envs: int  # N
    n_step: int = 1
    frame_stack: int = 0  # frames in the last axis of an observation; 0: observations are kept as they are


class Ring(NamedTuple):
    """The last R steps. What it holds beyond `size` rows is zero."""

    obs: PyTree  # [R, N, ...] of the environment's dtype; only the newest frame of a stack
    age: Array | tuple[()]  # [R, N] uint8: rows since the stack was all one frame, at most frame_stack - 1
    action: Array  # [R, N, ...]
    reward: Array  # [R, N] f32
    discount: Array  # [R, N] f32
    last: Array  # [R, N] bool
    valid: Array  # [R, N] bool
    head: Array  # int32: the row that is written next
    size: Array  # int32: rows written so far, at most R


class Sample(NamedTuple):
    """B transitions of up to n steps: they end sooner where the episode does."""

    obs: PyTree  # [B, ...]
    action: Array  # [B, ...]
    reward: Array  # [B] f32: discounted sum
    discount: Array  # [B] f32: of the value of next_obs, gamma included
    next_obs: PyTree  # [B, ...]


def init(layout: ReplayConfig, obs: PyTree, action: Discrete | Box) -> Ring:
    """An empty ring for observations like `obs` (ShapeDtypeStruct of one environment)."""
    zeros = lambda shape, dtype: jnp.zeros((layout.num_rows, layout.num_envs, *shape), dtype)
    stacked = layout.frame_stack > 1
    return Ring(
        obs=jax.tree.map(lambda x: zeros(_frame(layout, x).shape, x.dtype), obs),
        age=zeros((), jnp.uint8) if stacked else (),
        action=zeros((), jnp.int32) if isinstance(action, Discrete) else zeros(action.shape, jnp.float32),
        reward=zeros((), jnp.float32),
        discount=zeros((), jnp.float32),
        last=zeros((), bool),
        valid=zeros((), bool),
        head=jnp.int32(0),
        size=jnp.int32(0),
    )


def add(layout: ReplayConfig, ring: Ring, steps: Transition) -> Ring:
    """Writes T rows [T, N, ...] over the oldest ones. T divides R."""
    num_new = steps.reward.shape[0]
    assert layout.num_rows % num_new == 0, (layout.num_rows, num_new)
    put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), ring.head, axis=0)
    obs, stack = steps.obs, layout.frame_stack
    age: Array | tuple[()] = ()
    if stack > 1:
        obs, same = jax.vmap(functools.partial(compress, stack))(steps.obs)
        age = put(ring.age, stack_ages(stack, same, ring.age[ring.head - 1]))  # row -1 is the last one
    return Ring(
        obs=jax.tree.map(put, ring.obs, obs),
        age=age,
        action=put(ring.action, steps.action),
        reward=put(ring.reward, steps.reward),
        discount=put(ring.discount, steps.discount),
        last=put(ring.last, steps.last),
        valid=put(ring.valid, steps.valid),
        head=(ring.head + num_new) % layout.num_rows,
        size=jnp.minimum(ring.size + num_new, layout.num_rows),
    )


def discard_tail(layout: ReplayConfig, ring: Ring) -> Ring:
    """Nothing follows the newest row any more: those that would look beyond it are never drawn."""
    newest = (ring.head - 1 - jnp.arange(layout.n_step)) % layout.num_rows
    return ring._replace(valid=ring.valid.at[newest].set(False))


def num_lost(layout: ReplayConfig, ring: Ring) -> Array:
    """int32: the oldest rows that cannot be read, for they lack frames that were overwritten."""
    return jnp.where(ring.size == layout.num_rows, max(layout.frame_stack - 1, 0), 0)


def num_readable(layout: ReplayConfig, ring: Ring) -> Array:
    """int32: rows that can be read, at least 0."""
    return jnp.maximum(ring.size - layout.n_step - num_lost(layout, ring), 0)


def draw(
    layout: ReplayConfig, ring: Ring, key: Key, batch_size: int, own: Callable[[Array], Array] = lambda x: x
) -> tuple[Array, Array, Array]:
    """Rows [B] and environments [B], each readable step with a valid action as likely as another; and [B] bool.

    False there says that none was found, so that the sample must weigh nothing: nothing can be read yet, or all
    NUM_TRIES hit resets. The cost does not depend on the size of the ring. Where cores share a batch, each takes its
    `own` part of the last axis of what all B are drawn by.
    """
    readable = num_readable(layout, ring)
    place, env = own(_random_numbers(key, (2, NUM_TRIES, batch_size)))
    place = (place % jnp.maximum(readable, 1).astype(jnp.uint32)).astype(jnp.int32) + num_lost(layout, ring)
    row = (ring.head - ring.size + place) % layout.num_rows
    env = (env % layout.num_envs).astype(jnp.int32)
    valid = _at(ring.valid, row, env) & (readable > 0)
    first = jnp.argmax(valid, axis=0)[None]
    pick = lambda x: jnp.take_along_axis(x, first, axis=0)[0]
    return pick(row), pick(env), pick(valid)


def read(layout: ReplayConfig, ring: Ring, row: Array, env: Array, gamma: float | Array) -> Sample:
    """The transitions that begin at rows [B] of environments [B].

    reward = sum_{i < k} (prod_{j < i} gamma d_j) r_i,  discount = prod_{i < k} gamma d_i,  where the episode goes on
    for k = min(n_step, steps to its end) steps (Sutton & Barto 2018, eq. 7.1); next_obs lies k rows on.
    """

    def add(i: int | Array, sums: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        reward, discount, going, length = sums
        at = (row + i) % layout.num_rows
        reward += jnp.where(going, discount * _at(ring.reward, at, env), 0)
        discount *= jnp.where(going, gamma * _at(ring.discount, at, env), 1)
        return reward, discount, going & ~_at(ring.last, at, env), length + going

    none = jnp.zeros(row.shape), jnp.ones(row.shape), jnp.ones(row.shape, bool), jnp.zeros(row.shape, jnp.int32)
    few = min(layout.n_step, MAX_UNROLLED)  # for what is unrolled takes long to compile
    reward, discount, _, length = jax.lax.fori_loop(0, layout.n_step, add, none, unroll=few)
    look = functools.partial(_look, layout, ring)
    return Sample(
        look(row, env), _at(ring.action, row, env), reward, discount, look((row + length) % layout.num_rows, env)
    )


def _random_numbers(key: Key, shape: tuple[int, ...]) -> Array:
    """uint32: counters through two keyed rounds of MurmurHash3's mixer (Appleby 2011).

    jax.random would take ten times as long on a CPU, a tenth of a small gradient step. It has made the key, which is
    what the rounds go by. A remainder of so many bits is uniform to one part in 2^32 / R, which no sample shows.
    """
    keys = jax.random.key_data(key)
    x = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    for i in range(2):
        x = (x + keys[i]) * jnp.uint32(0x9E3779B1)
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        x ^= x >> 16
    return x


def _look(layout: ReplayConfig, ring: Ring, row: Array, env: Array) -> PyTree:
    """The observations at rows [B] of environments [B]."""
    if isinstance(ring.age, tuple):
        return jax.tree.map(lambda x: _at(x, row, env), ring.obs)
    return gather_stacks(layout.frame_stack, ring.obs, _at(ring.age, row, env), row, env)


def _frame(layout: ReplayConfig, obs: ShapeDtypeStruct) -> ShapeDtypeStruct:
    """What is kept of an observation."""
    if layout.frame_stack <= 1:
        return obs
    return ShapeDtypeStruct((*obs.shape[:-1], num_channels(layout.frame_stack, obs)), obs.dtype)


def _at(x: Array, row: Array, env: Array) -> Array:
    """x [R, N, ...] at rows and environments. Two indices, so that no flat one can pass 2^31."""
    return x.at[row, env].get(mode="promise_in_bounds")
