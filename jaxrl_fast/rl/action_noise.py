"""Explore with continuous actions: noise that is drawn for each step or correlated in time, and uniform actions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.options.explore import Held
from jaxrl_fast.types import Box, EnvSpec, Key, PyTree
from jaxrl_fast.types.spaces import Hybrid


class HeldNoise(NamedTuple):
    """Noise that is held for some steps: the carry of one environment."""

    noise: Array  # f32 [D]
    num_left: Array  # int32 []: the steps for which it is still held


class Noise(NamedTuple):
    """Random numbers for T decisions, [T, ...]."""

    step: Array  # [T] int32: 0, 1, 2 ...
    normal: Array  # [T, N, D] f32: independent standard normal numbers; for held noise, [T, N, D + 1]


def action_size(spec: EnvSpec, algorithm: str) -> int:
    """Return D, the numbers of a continuous action. Raise ValueError for another space, naming algorithms for it."""
    if not isinstance(spec.action, Box):
        others = "ppo" if isinstance(spec.action, Hybrid) else "dqn, ppo or sac"
        raise ValueError(f"{algorithm}: requires continuous actions, got {spec.action} of {spec.id}; try {others}")
    if len(spec.action.shape) != 1:
        shape = list(spec.action.shape)
        raise ValueError(f"{algorithm}: requires actions of shape [D], got {shape} of {spec.id}; flatten them")
    return spec.action.num_outputs


def sample_noise(size: int, key: Key, num_steps: int, num_envs: int) -> Noise:
    """Return the noise for T decisions on actions of D = `size` numbers."""
    normal = jax.random.normal(key, (num_steps, num_envs, size))
    return Noise(jnp.arange(num_steps, dtype=jnp.int32), normal)


def initial_carry(size: int, theta: float) -> PyTree:
    """Return the value of the process at the start of an episode, f32 [D]; () if numbers are independent."""
    return () if theta == 1 else jnp.zeros(size)


def correlated(theta: float, carry: PyTree, normal: Array) -> tuple[Array, PyTree]:
    """Return the next values x [N, D] of an Ornstein-Uhlenbeck process, and the carry for the step after.

    x' = (1 - theta) x + sqrt(1 - (1 - theta)^2) normal, whose variance becomes 1 (Uhlenbeck & Ornstein 1930; Lillicrap
    et al. 2016, section 3). With theta 1, the numbers are independent.
    """
    if theta == 1:
        return normal, ()
    x = (1 - theta) * carry + np.sqrt(1 - (1 - theta) ** 2) * normal
    return x, x


def held_carry(size: int) -> HeldNoise:
    """Return held noise at the start of an episode, where it is drawn again."""
    return HeldNoise(jnp.zeros(size), jnp.int32(0))


def hold(options: Held, carry: HeldNoise, normal: Array) -> tuple[Array, HeldNoise]:
    """Return the next noise [N, D] from normal numbers [N, D + 1], and the carry for the step after.

    Where it ends, new noise is held for n steps with a probability proportional to n^-exponent, up to the longest
    (Dabney et al. 2021, "Temporally-extended epsilon-greedy exploration", section 3). The last number decides n.
    """
    chance = jnp.arange(1, options.longest + 1, dtype=jnp.float32) ** -options.exponent
    bounds = jnp.cumsum(chance / chance.sum())[:-1]
    level = (1 + uniform(normal[..., -1:])) / 2  # uniform on [0, 1]
    num_steps = 1 + (level > bounds[None]).sum(-1, dtype=jnp.int32)
    begins = carry.num_left == 0
    noise = jnp.where(begins[..., None], normal[..., :-1], carry.noise)
    return noise, HeldNoise(noise, jnp.where(begins, num_steps, carry.num_left) - 1)


def uniform(x: Array) -> Array:
    """Return uniform numbers in [-1, 1] from standard normal ones: 2 Phi(x) - 1."""
    return jax.lax.erf(x * np.float32(np.sqrt(0.5)))
