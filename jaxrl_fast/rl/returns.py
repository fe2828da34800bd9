"""Compute returns by one backward recursion: GAE, Q(lambda), TD(0) and Monte Carlo.

Every array is [T, N] of T steps in N environments, time first, with

    reward      f32   the reward of step t
    discount    f32   gamma * the environment's discount: 0 where the state after step t is terminal
    next_value  f32   the value of obs[t + 1], which is always the true successor of obs[t]
    last        bool  the episode ended at step t: later rows belong to other episodes

At the end of the rollout, and where an episode is truncated, returns bootstrap from `next_value`. A reset row (the row
after `last`, whose action was ignored) has a return like any other row, and the loss must mask it out. This return does
not enter that of any other row, since the rows before belong to the previous episode.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.utils import target


def lambda_returns(reward: Array, discount: Array, next_value: Array, last: Array, lambda_: float | Array) -> Array:
    """Return the lambda-return of every step, f32 [T, N] (Sutton & Barto 2018, eq. 12.18).

        G[t] = reward[t] + discount[t] * ((1 - l[t]) * next_value[t] + l[t] * G[t + 1])
        l[t] = 0 where last[t], else lambda_;  G[T] = next_value[T - 1]

    lambda_ = 0 gives TD(0), and 1 gives Monte Carlo. If next_value is the greedy value max_a Q(obs[t + 1], a), the
    result is Peng's Q(lambda) (Gallici et al. 2025, "Simplifying Deep Temporal Difference Learning", section 3).

    A scan is the fastest form on a CPU: an unrolled or an associative scan is 1 to 20 times slower. Elsewhere, an
    associative scan replaces T small kernels by log T larger ones.
    """
    if target.platform() != "cpu":
        trace = jnp.where(last, 0.0, lambda_)
        now = reward + discount * (1 - trace) * next_value
        return running_sums(discount * trace, now, next_value[-1], reverse=True)

    def backup(following: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, discount, next_value, last = row
        trace = jnp.where(last, 0.0, lambda_)
        now = reward + discount * ((1 - trace) * next_value + trace * following)
        return now, now

    returns: Array
    _, returns = jax.lax.scan(backup, next_value[-1], (reward, discount, next_value, last), reverse=True)
    return returns


def running_sums(factor: Array, x: Array, first: Array, reverse: bool = False) -> Array:
    """Return y[t] = factor[t] * y[t - 1] + x[t], f32 [T, N], with `first` [N] before the first step.

    With `reverse`, t runs from T - 1 to 0. This is an associative scan: log T kernels in place of T.
    """
    begin = -1 if reverse else 0
    x = x.at[begin].add(factor[begin] * first)
    join = lambda before, now: (now[0] * before[0], now[1] + now[0] * before[1])
    sums: Array = jax.lax.associative_scan(join, (factor, x), reverse=reverse)[1]
    return sums


def gae(reward: Array, discount: Array, value: Array, next_value: Array, last: Array, lambda_: float | Array) -> Array:
    """Return generalized advantage estimates, f32 [T, N] (Schulman et al. 2016, eq. 16).

    These are the lambda-returns minus `value`, which is V(obs[t]).
    """
    return lambda_returns(reward, discount, next_value, last, lambda_) - value


RESCALING = 1e-3  # epsilon of the two functions below


def rescale(x: Array) -> Array:
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x (Pohlen et al. 2018, proposition A.2), in its stable form.

    Values of any size become small ones, and no reward has to be clipped.
    """
    return x / (jnp.sqrt(jnp.abs(x) + 1) + 1) + RESCALING * x


def unrescale(x: Array) -> Array:
    """Return the inverse of `rescale`.

    sign(x) (((sqrt(1 + 4 epsilon (|x| + 1 + epsilon)) - 1) / (2 epsilon))^2 - 1), in a form without cancellation.
    """
    root = jnp.sqrt(1 + 4 * RESCALING * (jnp.abs(x) + 1 + RESCALING))
    share = 2 / (root + 1 + 2 * RESCALING)
    return x * share * (jnp.abs(x) * share + 2)
