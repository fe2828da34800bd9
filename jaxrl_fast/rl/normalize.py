"""Compute means and variances, of some rows or of all rows so far, to normalize observations and to scale rewards.

A row is a tree of arrays, such as an observation. Its statistics are the same tree with Stats in place of each array.
An agent that does not normalize has the statistics None.

Rows with mask False do not count, whatever values they have (even NaN). For observations and rewards the mask is
`valid`: rows that were acted upon count, reset rows do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import returns
from jaxrl_fast.types import EnvSpec, PyTree, Rollout, Transition
from jaxrl_fast.utils import target

NOTHING = 1e-30  # the divisor if no row counts
LARGEST = 1e15  # distance from the mean: the squares of larger ones do not fit into float32
SMALLEST_WEIGHT = 1e-5  # of a batch: a smaller weight would be rounded away in float32
CLIP, EPSILON = 10.0, 1e-8  # bound of normalized numbers; added to variances


def check(config: Any, spec: EnvSpec) -> None:
    """Raise ValueError if observations would be standardized and then divided by 255."""
    if config.normalize_observations:
        check_images(config, spec, "normalize_observations")


def check_images(config: Any, spec: EnvSpec, option: str) -> None:
    """Raise ValueError if an option standardizes images that a network then divides by 255: those of floats."""
    leaves = jax.tree.leaves(spec.obs)
    has_float_image = any(jnp.issubdtype(x.dtype, jnp.floating) and len(x.shape) in (2, 3) for x in leaves)
    if config.network.observations == "image" and has_float_image:
        raise ValueError(f"network.observations: image cannot be combined with {option}, got both; drop one")


class Moments(NamedTuple):
    """Weight, mean and variance of some weighted rows."""

    weight: Array  # f32: sum over the rows
    mean: Array
    var: Array  # mean squared distance from the mean; 0 of no rows


def moments(x: Array, weight: Array, axis: int | tuple[int, ...] = -1) -> Moments:
    """Return the moments of x along some axes, with weights that broadcast to x. Rows of weight 0 do not count."""
    weight = jnp.broadcast_to(weight, x.shape).astype(jnp.float32)
    of_all = weight.sum(axis)
    mean_of = lambda rows: jnp.where(weight > 0, weight * rows, 0.0).sum(axis) / jnp.maximum(of_all, NOTHING)
    mean = mean_of(x)
    return Moments(of_all, mean, mean_of((x - jnp.expand_dims(mean, axis)) ** 2))


def explained_variance(moments: Moments) -> Array:
    """Return 1 - Var(target - value) / Var(target), f32 []; 1 is a perfect prediction, 0 as good as the mean.

    `moments` [2] are the moments of targets and of advantages; an advantage is target - value.
    """
    variance, unexplained = moments.var
    return jnp.where(variance > 0, 1 - unexplained / jnp.maximum(variance, 1e-8), 0)


def pool(moments: PyTree, axis_name: str | None) -> PyTree:
    """Return a tree of Moments with each pooled over the rows of all devices, in one exchange."""
    if axis_name is None:
        return moments
    is_moments = lambda x: isinstance(x, Moments)
    return jax.tree.map(_of_parts, collectives.all_gather(moments, axis_name), is_leaf=is_moments)


def _of_parts(parts: Moments) -> Moments:
    """Return the moments of parts [parts, ...] together (Chan, Golub & LeVeque 1979, eq. 2.1)."""
    weight, mean, var = parts
    of_all = weight.sum(0, keepdims=True)
    share = weight / jnp.maximum(of_all, NOTHING)
    of_all_mean = (share * mean).sum(0, keepdims=True)
    return Moments(of_all[0], of_all_mean[0], (share * (var + (mean - of_all_mean) ** 2)).sum(0))


class Stats(NamedTuple):
    """Statistics of one array of all rows seen so far, each of the shape [...] of the array."""

    mean: Array  # [...] f32
    residue: Array  # [...] f32: the rounding error of the additions to `mean` (Kahan 1965)
    var: Array  # [...] f32: mean squared distance from the mean; 1 before the first row
    num_rows: Array  # [] f32: exact up to 2^24, approximate beyond


def init(row: PyTree) -> PyTree:
    """Return statistics of no rows with the shapes of this one. With these, `apply` only clips."""
    return jax.tree.map(lambda x: _init(x.shape), row)


def _init(shape: tuple[int, ...] = ()) -> Stats:
    return Stats(jnp.zeros(shape), jnp.zeros(shape), jnp.ones(shape), jnp.zeros(()))


def update(stats: PyTree, x: PyTree, mask: Array, axis_name: str | None = None) -> PyTree:
    """Add a batch of rows x [*batch, ...] where mask [*batch] (bool) is True, from all devices of `axis_name`."""
    return merge(stats, pool(seen(stats, x, mask), axis_name))


def seen(stats: PyTree, x: PyTree, mask: Array) -> PyTree:
    """Return Moments of rows x [*batch, ...] where mask [*batch] (bool) is True, as distances from the means so far.

    Distances beyond LARGEST count as LARGEST.
    """
    return _map(partial(_seen, mask), stats, x)


def merge(stats: PyTree, batch: PyTree) -> PyTree:
    """Add a batch: its Moments as `seen` returns them for these statistics."""
    return _map(_merge, stats, batch)


def apply(stats: PyTree, x: PyTree, clip: float = CLIP, epsilon: float = EPSILON) -> PyTree:
    """Return x [*batch, ...] minus the mean, in standard deviations, clipped to [-clip, clip], f32.

    Without statistics, x does not change.
    """
    return _map(partial(_apply, clip, epsilon), stats, x) if stats is not None else x


def _map(function: Callable[[Stats, PyTree], PyTree], stats: PyTree, other: PyTree) -> PyTree:
    """Call a function with the Stats of each array and the same part of another tree."""
    is_stats = lambda x: isinstance(x, Stats)
    return None if stats is None else jax.tree.map(function, stats, other, is_leaf=is_stats)


def _seen(mask: Array, stats: Stats, x: Array) -> Moments:
    batch_axes = tuple(range(mask.ndim))
    mask = mask.reshape(mask.shape + (1,) * stats.mean.ndim)
    mean, residue = (jnp.broadcast_to(part, x.shape) for part in (stats.mean, stats.residue))
    return moments(_bounded(_bounded(x.astype(jnp.float32)) - mean - residue), mask, batch_axes)


def _bounded(x: Array) -> Array:
    """Return finite numbers clipped to [-LARGEST, LARGEST]; NaN and infinity stay, so that training stops at them."""
    return jnp.where(jnp.isinf(x), x, jnp.clip(x, -LARGEST, LARGEST))


def _merge(stats: Stats, batch: Moments) -> Stats:
    """Add the moments of a batch.

    This is the parallel form of Welford's update (as in `pool`) with w = batch / (seen + batch):

        mean += w * d,   var = (1 - w) * var + w * (batch_var + (1 - w) * d^2),   d = batch_mean - mean

    The weight w is at least SMALLEST_WEIGHT, so after 1e5 equal batches old rows begin to fade.
    """
    count, d, batch_var = batch
    num_new = count.max(initial=0)  # all elements are equal
    num_rows = stats.num_rows + num_new
    w = jnp.where(num_new > 0, jnp.maximum(num_new / jnp.maximum(num_rows, 1), SMALLEST_WEIGHT), 0.0)
    step = w * d + stats.residue
    mean = stats.mean + step
    return Stats(
        mean=mean,
        residue=step - (mean - stats.mean),
        var=(1 - w) * stats.var + w * (batch_var + (1 - w) * d**2),
        num_rows=num_rows,
    )


def _apply(clip: float, epsilon: float, stats: Stats, x: Array) -> Array:
    mean, scale = (jnp.broadcast_to(part, x.shape) for part in (stats.mean, jax.lax.rsqrt(stats.var + epsilon)))
    return jnp.clip((x - mean) * scale, -clip, clip)


def clip_rewards(rollout: Rollout, clip: bool = True) -> Rollout:
    """Replace rewards by their signs, so that all Atari tasks share one scale (Mnih et al. 2015, methods)."""
    steps = rollout.steps
    return rollout._replace(steps=steps._replace(reward=jnp.sign(steps.reward))) if clip else rollout


class RewardScale(NamedTuple):
    """The discounted sum of rewards so far in each running episode, and its statistics over all steps."""

    total: Array  # [N] f32
    stats: Stats  # []


def init_reward(num_envs: int) -> RewardScale:
    """Return the scale before the first step of N environments."""
    return RewardScale(jnp.zeros(num_envs), _init())


def update_reward(
    scale: RewardScale, reward: Array, last: Array, valid: Array, gamma: float | Array, axis_name: str | None = None
) -> RewardScale:
    """Add the rewards of a rollout, all [T, N]."""
    total, totals = discounted_sums(scale.total, reward, last, gamma)
    return RewardScale(total, update(scale.stats, totals, valid, axis_name))


def discounted_sums(before: Array, reward: Array, last: Array, gamma: float | Array) -> tuple[Array, Array]:
    """Return total[t] = gamma * total[t - 1] + reward[t], reset to 0 after last: after the rollout [N], and [T, N].

    `before` [N] are the sums before the rollout; rewards [T, N] beyond LARGEST count as LARGEST.
    """
    if target.platform() != "cpu":
        goes_on = jnp.concatenate([jnp.ones_like(last[:1]), ~last[:-1]])
        totals = returns.running_sums(gamma * goes_on, _bounded(reward), before)
        return jnp.where(last[-1], 0.0, totals[-1]), totals

    def step(total: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, last = row
        total = gamma * total + _bounded(reward)
        return jnp.where(last, 0.0, total), total

    sums: tuple[Array, Array] = jax.lax.scan(step, before, (reward, last))
    return sums


def scale_rewards(
    scale: RewardScale | None, steps: Transition, gamma: float | Array, axis_name: str | None = None
) -> tuple[RewardScale | None, Array]:
    """Return the scale after a rollout, and its rewards [T, N] divided by it; without a scale, its rewards."""
    if scale is None:
        return None, steps.reward
    scale = update_reward(scale, steps.reward, steps.last, steps.valid, gamma, axis_name)
    return scale, apply_reward(scale, steps.reward)


def apply_reward(scale: RewardScale, reward: Array, clip: float = CLIP, epsilon: float = EPSILON) -> Array:
    """Return rewards [...] divided by the standard deviation of `total`, clipped to [-clip, clip].

    Signs and zeros do not change. The method is that of gymnasium's NormalizeReward and of Engstrom et al. 2020,
    "Implementation Matters in Deep Policy Gradients", algorithm 1. Unlike there, all steps of a rollout are divided by
    the same number.
    """
    return jnp.clip(reward * jax.lax.rsqrt(scale.stats.var + epsilon), -clip, clip)
