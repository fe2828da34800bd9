"""Explore epsilon-greedily in N environments, with a schedule in environment steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxrl_fast.options.declare import MAX_SCHEDULE
from jaxrl_fast.options.explore import Epsilon
from jaxrl_fast.types import Discrete, EnvSpec, Key, Parallelism

MAX_COUNT = MAX_SCHEDULE  # environment steps: the largest power of two in int32


class Noise(NamedTuple):
    """Random numbers for T decisions, [T, ...]."""

    step: Array  # [T] int32: 0, 1, 2 ...
    uniform: Array  # [T, 2, N]: the first decides whether the action is random, the second is that action


def num_actions(spec: EnvSpec, algorithm: str = "this algorithm") -> int:
    """Return the number of actions. Raises ValueError if the action space is not discrete."""
    if not isinstance(spec.action, Discrete):
        raise ValueError(f"{algorithm}: requires discrete actions, got {spec.action} of {spec.id}; try ppo")
    return spec.action.num


def sample_noise(key: Key, num_steps: int, num_envs: int) -> Noise:
    """Return the noise for T decisions of `distributions.EpsilonGreedy`."""
    uniform = jax.random.uniform(key, (num_steps, 2, num_envs))
    return Noise(jnp.arange(num_steps, dtype=jnp.int32), uniform)


def env_steps(steps_per_update: int, num_updates: Array) -> Array:
    """Return the number of environment steps of `num_updates` updates on all shards, int32, at most MAX_COUNT."""
    return jnp.minimum(num_updates, MAX_COUNT // steps_per_update) * steps_per_update


def epsilons(epsilon: Epsilon, num_envs: int, env_steps: Array, parallelism: Parallelism = Parallelism()) -> Array:
    """Return the probability of a random action in each of N environments after `env_steps` steps, f32 [N].

    With asynchronous pools, return the values for one pool, [N / num_pools], since every pool has the whole range.
    """
    num_envs = num_envs // parallelism.num_pools
    now = optax.linear_schedule(epsilon.start, epsilon.end, epsilon.steps)(env_steps)
    shard = 0 if parallelism.axis_name is None else jax.lax.axis_index(parallelism.axis_name)
    index = shard * num_envs + jnp.arange(num_envs)
    exponent = 1 + epsilon.apex_alpha * index / max(num_envs * parallelism.num_shards - 1, 1)
    return jnp.asarray(now, jnp.float32) ** exponent


def mean(epsilon: Epsilon, num_envs: int, env_steps: Array, parallelism: Parallelism = Parallelism()) -> Array:
    """Return the mean of `epsilons` over the environments of all shards, f32 []."""
    whole = Parallelism(num_pools=parallelism.num_pools)
    return epsilons(epsilon, num_envs * parallelism.num_shards, env_steps, whole).mean()
