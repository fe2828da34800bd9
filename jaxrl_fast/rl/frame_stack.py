"""Stacks of frames, each frame kept once: the newest of every stack, and how far back the stack reaches.

A stack [..., F * C] has F frames of C channels in its last axis, the oldest first. It begins as copies of one frame and
then moves on by a frame a row, so its `age`, rows since it began, at most F - 1, says which rows the others are in.
Nothing need be known of episodes: a lost life may end one while its stack goes on. Equal frames may also come about by
chance: copies are then as right.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jaxrl_fast.types import PyTree, Rollout


class CompressedStack(NamedTuple):
    """What a rollout holds of stacks."""

    newest: PyTree  # [T, N, ..., C]
    same: Array  # [T, N] bool: all frames of the stack are equal


class Frames(NamedTuple):
    """What the stacks of a rollout are made of."""

    frames: PyTree  # [F - 1 + T, N, ..., C]
    age: Array  # [T, N] uint8


def compressor(num_frames: int) -> Callable[[PyTree], PyTree]:
    """An agent's `keep`: of stacks what is new in them, of other observations everything."""
    return functools.partial(compress, num_frames) if num_frames > 1 else lambda obs: obs


def compress(num_frames: int, obs: PyTree) -> CompressedStack:
    """What to keep of the stacks [..., F * C] of one row: the frame that is new, and whether it is the first."""
    parts = lambda x: x.reshape(*x.shape[:-1], num_frames, num_channels(num_frames, x))
    equal = lambda x: (parts(x) == parts(x)[..., :1, :]).all(axis=tuple(range(1, x.ndim + 1)))
    newest = jax.tree.map(lambda x: x[..., -num_channels(num_frames, x) :], obs)
    return CompressedStack(newest, functools.reduce(operator.and_, map(equal, jax.tree.leaves(obs))))


def num_channels(num_frames: int, x: Array | ShapeDtypeStruct) -> int:
    """The channels of one frame of a stack."""
    assert x.shape[-1] % num_frames == 0, (x.shape, num_frames)
    return x.shape[-1] // num_frames


def stack_ages(num_frames: int, same: Array, before: Array) -> Array:
    """[T, N] uint8 of rows that are all one frame [T, N], after rows of age `before` [N] uint8."""

    def step(age: Array, same: Array) -> tuple[Array, Array]:
        age = jnp.where(same, 0, jnp.minimum(age + 1, num_frames - 1)).astype(jnp.uint8)
        return age, age

    ages: Array = jax.lax.scan(step, before, same)[1]
    return ages


def gather_stacks(num_frames: int, kept: PyTree, age: Array, row: Array, env: Array) -> PyTree:
    """Stacks [B, ..., F * C] at rows [B] of environments [B], of age [B], from frames [R, N, ..., C] in a ring."""
    lag = jnp.arange(num_frames - 1, -1, -1)[None]  # the oldest frame first
    back = row[:, None] - jnp.minimum(lag, age.astype(jnp.int32)[:, None])

    def stack(x: Array) -> Array:
        """One gather of [B, F, ..., C] and a transpose, done before anything else reads it.

        On a CPU, joining several gathers took six times as long, and so does what reads through the transpose.
        """
        found = jnp.moveaxis(x.at[back % x.shape[0], env[:, None]].get(mode="promise_in_bounds"), 1, -2)
        joined: Array = jax.lax.optimization_barrier(found.reshape(*found.shape[:-2], -1))
        return joined

    return jax.tree.map(stack, kept)


def encode_rollout(num_frames: int, rollout: Rollout) -> tuple[PyTree, Frames | tuple[()]]:
    """What stands for a rollout's observations in minibatches, [T * N, ...], and what `look` makes them of again.

    Of stacks, of which the rollout has `Kept`, it is their numbers; otherwise it is the observations themselves.
    """
    obs = rollout.steps.obs
    if num_frames <= 1:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs), ()
    num_steps, num_envs = obs.same.shape
    older = num_frames - 1  # rows before the first, for what its stack has besides the newest
    unstack = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], num_frames, -1), -2, 0)[:-1]
    frames = jax.tree.map(lambda x, first: jnp.concatenate([unstack(first), x]), obs.newest, rollout.first_obs)
    age = stack_ages(num_frames, obs.same.at[0].set(False), jnp.full(num_envs, older, jnp.uint8))
    return jnp.arange(num_steps * num_envs), Frames(frames, age)


def decode(num_frames: int, frames: Frames | tuple[()], rows: PyTree) -> PyTree:
    """Observations [B, ...] of what stands for them."""
    if not frames:
        return rows
    row, env = rows // frames.age.shape[1], rows % frames.age.shape[1]
    return gather_stacks(num_frames, frames.frames, frames.age[row, env], row + num_frames - 1, env)
