"""Epsilon-greedy exploration by N environments: a coin for each, a schedule in environment steps, a ladder."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxrl_fast.types import Discrete, EnvSpec, Key

MAX_COUNT = 2**30  # environment steps; an int32 has room for no more, and schedules are over by then


class Epsilon(NamedTuple):
    """Falls linearly; environment i of N has epsilon ^ (1 + ladder i / (N - 1)) (Horgan et al. 2018, section 4)."""

    start: float
    end: float
    steps: int  # environment steps, of all environments together
    ladder: float


class Noise(NamedTuple):
    """What T decisions need of chance, [T, ...]."""

    place: Array  # [T] int32: 0, 1, 2 ...
    uniform: Array  # [T, 2, N]: coins and actions


def num_actions(spec: EnvSpec, algorithm: str = "this algorithm") -> int:
    """ValueError where there is no finite number of them."""
    if not isinstance(spec.action, Discrete):
        shape = list(spec.action.shape)
        raise ValueError(f"{spec.id}: {algorithm} wants a finite number of actions, not vectors of shape {shape}")
    return spec.action.num


def noise(key: Key, num_steps: int, num_envs: int) -> Noise:
    """For `distributions.EpsilonGreedy`, and the place of each step in its rollout for the schedule."""
    uniform = jax.random.uniform(key, (num_steps, 2, num_envs))
    return Noise(jnp.arange(num_steps, dtype=jnp.int32), uniform)


def env_steps(spec: EnvSpec, rollout_length: int, num_updates: Array) -> Array:
    """int32: environment steps of all environments, on all devices, in so many updates; up to MOST_COUNTED."""
    per_update = rollout_length * spec.total_num_envs
    return jnp.minimum(num_updates, MAX_COUNT // per_update) * per_update


def epsilons(epsilon: Epsilon, spec: EnvSpec, env_steps: Array) -> Array:
    """[N] f32: the chance of a random action in each environment after so many environment steps.

    Where environments are dealt to pools it is that in each environment of a pool: every pool has a whole ladder.
    """
    num_envs = spec.num_envs // spec.num_pools
    now = optax.linear_schedule(epsilon.start, epsilon.end, epsilon.steps)(env_steps)
    shard = 0 if spec.axis_name is None else jax.lax.axis_index(spec.axis_name)
    place = shard * num_envs + jnp.arange(num_envs)
    exponent = 1 + epsilon.ladder * place / max(num_envs * spec.num_shards - 1, 1)
    return jnp.asarray(now, jnp.float32) ** exponent


def mean(epsilon: Epsilon, spec: EnvSpec, env_steps: Array) -> Array:
    """f32: of `epsilons` in all environments, also those of other devices."""
    whole = spec._replace(axis_name=None, num_envs=spec.total_num_envs, num_shards=1)
    return epsilons(epsilon, whole, env_steps).mean()
