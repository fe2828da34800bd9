"""Store stacks of frames with each frame kept once: the newest frame of every stack, and the stack's age.

A stack [..., F * C] has F frames of C channels in its last axis, the oldest first. Every stack begins as copies of one
frame and adds a frame per row. Its `age` is the number of rows since it began, at most F - 1. The age determines which
rows hold the other frames. Episodes are not used: a lost life may end an episode while its stack continues. If frames
are equal by coincidence, copies of the newest frame give the same stack.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jaxrl_fast.rl import minibatch
from jaxrl_fast.types import PyTree, Rollout


class CompressedStack(NamedTuple):
    """The part of the stacks that a rollout stores."""

    newest: PyTree  # [T, N, ..., C]
    same: Array  # [T, N] bool: all frames of the stack are equal


class Frames(NamedTuple):
    """The frames from which the stacks of a rollout are built."""

    frames: PyTree  # [F - 1 + T, N, ..., C]
    age: Array  # [T, N] uint8


def compressor(num_frames: int) -> Callable[[PyTree], PyTree]:
    """Return an agent's `compress_obs`: `compress` for stacks, the identity for other observations."""
    return functools.partial(compress, num_frames) if num_frames > 1 else lambda obs: obs


def compress(num_frames: int, obs: PyTree) -> CompressedStack:
    """Return the newest frame of the stacks [..., F * C] of one row, and whether all frames of a stack are equal."""
    parts = lambda x: x.reshape(*x.shape[:-1], num_frames, num_channels(num_frames, x))
    equal = lambda x: (parts(x) == parts(x)[..., :1, :]).all(axis=tuple(range(1, x.ndim + 1)))
    return CompressedStack(newest(num_frames, obs), functools.reduce(operator.and_, map(equal, jax.tree.leaves(obs))))


def newest(num_frames: int, obs: PyTree) -> PyTree:
    """Return the newest frame [..., C] of stacks [..., F * C]; other observations do not change."""
    cut = lambda x: x[..., -num_channels(num_frames, x) :]
    return jax.tree.map(cut, obs) if num_frames > 1 else obs


def num_channels(num_frames: int, x: Array | ShapeDtypeStruct) -> int:
    """Return the number of channels C of one frame of a stack."""
    assert x.shape[-1] % num_frames == 0, (x.shape, num_frames)
    return x.shape[-1] // num_frames


def stack_ages(num_frames: int, same: Array, before: Array) -> Array:
    """Return the ages of stacks, uint8 [T, N].

    `same` [T, N] is True where all frames of a stack are equal; `before` [N] uint8 are the ages one row earlier.
    """

    def step(age: Array, same: Array) -> tuple[Array, Array]:
        age = jnp.where(same, 0, jnp.minimum(age + 1, num_frames - 1)).astype(jnp.uint8)
        return age, age

    ages: Array = jax.lax.scan(step, before, same)[1]
    return ages


def rows_of_stacks(num_frames: int, age: Array, row: Array) -> Array:
    """Return the rows of the frames [B, F] of the stacks at rows [B], of age [B]; negative before the first row."""
    lag = jnp.arange(num_frames - 1, -1, -1)[None]  # the oldest frame first
    return row[:, None] - jnp.minimum(lag, age.astype(jnp.int32)[:, None])


def join_frames(frames: PyTree) -> PyTree:
    """Return stacks [B, ..., F * C] of frames [B, F, ..., C].

    The barrier completes one gather of the frames and the transpose before any other use. On a CPU, joining several
    gathers took six times as long, and so did operations fused with the transpose.
    """

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 1, -2)
        joined: Array = jax.lax.optimization_barrier(x.reshape(*x.shape[:-2], -1))
        return joined

    return jax.tree.map(join, frames)


def gather_stacks(num_frames: int, kept: PyTree, age: Array, row: Array, env: Array) -> PyTree:
    """Return the stacks [B, ..., F * C] at rows [B] of environments [B], of age [B], from a ring [R, N, ..., C]."""
    back = rows_of_stacks(num_frames, age, row)
    gather = lambda x: x.at[back % x.shape[0], env[:, None]].get(mode="promise_in_bounds")
    return join_frames(jax.tree.map(gather, kept))


def encode_rollout(num_frames: int, rollout: Rollout) -> tuple[PyTree, Frames | None]:
    """Return a rollout's observations [T, N, ...] in the form that minibatches have, and the frames for `decode`.

    If the rollout has a `CompressedStack`, the form is the number of the stack; otherwise it is the observation.
    """
    obs = rollout.steps.obs
    if num_frames <= 1:
        return obs, None
    num_steps, num_envs = obs.same.shape
    older = num_frames - 1  # rows before the first one: they hold the older frames of its stack
    unstack = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], num_frames, -1), -2, 0)[:-1]
    frames = jax.tree.map(lambda x, first: jnp.concatenate([unstack(first), x]), obs.newest, rollout.first_obs)
    age = stack_ages(num_frames, obs.same.at[0].set(False), jnp.full(num_envs, older, jnp.uint8))
    return jnp.arange(num_steps * num_envs).reshape(num_steps, num_envs), Frames(frames, age)


def map_rollout(function: Callable[[PyTree], Array], rows: PyTree, frames: Frames | None = None, num: int = 1) -> Array:
    """Return function(observations) [T, N, ...], computed in bulk for rows [T, N, ...] that `encode_rollout` returned.

    The function must treat each row independently of the others. Stacks are built for one of `num` parts at a time.
    """
    shape, rows = jax.tree.leaves(rows)[0].shape[:2], minibatch.flatten(rows)
    if frames is None:
        found = minibatch.map_chunks(function, rows)
    else:
        found = minibatch.flatten(jax.lax.map(lambda some: function(decode(frames, some)), rows.reshape(num, -1)))
    result: Array = found.reshape(*shape, *found.shape[1:])
    return result


def decode(frames: Frames | None, rows: PyTree) -> PyTree:
    """Return the observations [..., *shape] of rows [...] that `encode_rollout` returned."""
    if frames is None:
        return rows
    (num_steps, num_envs), num_rows = frames.age.shape, len(jax.tree.leaves(frames.frames)[0])
    older = num_rows - num_steps
    row, env = jnp.divmod(rows.reshape(-1), num_envs)
    stacks = gather_stacks(older + 1, frames.frames, frames.age[row, env], row + older, env)
    return jax.tree.map(lambda x: x.reshape(*rows.shape, *x.shape[1:]), stacks)
