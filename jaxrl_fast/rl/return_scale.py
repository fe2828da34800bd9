"""Scale rewards so that returns have at most a given size and about unit deviation (FlashSAC, Kim et al. 2026)."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import normalize
from jaxrl_fast.types import Transition

EPSILON = 1e-8  # added to the variance


class ReturnScale(NamedTuple):
    """Statistics of the discounted sums of rewards within episodes."""

    sums: normalize.RewardScale
    largest: Array  # f32 []: the largest absolute value of a sum


def init(num_envs: int) -> ReturnScale:
    """Return the scale before the first step of N environments."""
    return ReturnScale(normalize.init_reward(num_envs), jnp.float32(0))


def update(scale: ReturnScale, steps: Transition, gamma: float | Array, axis_name: str | None = None) -> ReturnScale:
    """Add the rewards of a rollout [T, N]: sum[t] = gamma sum[t - 1] + reward[t], from 0 where an episode begins."""
    total, sums = normalize.discounted_sums(scale.sums.total, steps.reward, steps.last, gamma)
    stats = normalize.update(scale.sums.stats, sums, steps.valid, axis_name)
    largest = jnp.maximum(scale.largest, jnp.where(steps.valid, jnp.abs(sums), 0.0).max())
    largest = collectives.all_gather(largest, axis_name).max()
    return ReturnScale(normalize.RewardScale(total, stats), largest)


def apply(scale: ReturnScale, reward: Array, bound: float | Array) -> Array:
    """Return rewards [...] divided by max(standard deviation of the sums, largest / bound)."""
    deviation = jnp.sqrt(scale.sums.stats.var + EPSILON)
    return reward / jnp.maximum(deviation, scale.largest / bound)


def restart(scale: ReturnScale) -> ReturnScale:
    """Return the scale with all sums at 0, for episodes that an environment restart interrupts."""
    return scale._replace(sums=scale.sums._replace(total=jnp.zeros_like(scale.sums.total)))
