"""Compute the weight of a loss that falls to 0 over environment steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.options.bonus import Annealed
from jaxrl_fast.rl import exploration
from jaxrl_fast.types import EnvSpec, Key, Parallelism, PyTree


class State(NamedTuple):
    """What is needed to draw rows and to count environment steps."""

    key: Key
    num_updates: Array  # int32


def init(key: Key) -> tuple[PyTree, State]:
    """Return no parameters, and the state before the first update."""
    return None, State(key, jnp.int32(0))


def weight_at(options: Annealed, env_steps: Array) -> Array:
    """Return the weight after `env_steps` environment steps of all shards, f32 []."""
    weight = jnp.asarray(options.weight, jnp.float32)
    return weight if options.anneal is None else weight * jnp.maximum(1 - env_steps / options.anneal, 0)


def weight_of_update(
    options: Annealed, spec: EnvSpec, parallelism: Parallelism, length: int, num_updates: Array
) -> Array:
    """Return the weight in the update of a rollout of `length` steps, after `num_updates` updates. f32 []"""
    steps_per_update = length * spec.num_envs * parallelism.num_shards
    return weight_at(options, exploration.env_steps(steps_per_update, num_updates))


def of_shard(parallelism: Parallelism, key: Key) -> Key:
    """Return a different key on each shard."""
    axis_name = parallelism.axis_name
    return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))
