"""Returns: one backward recursion that serves GAE, Q(lambda), TD(0) and Monte Carlo.

Every array is [T, N] of T steps in N environments, time first, with

    reward      f32   what step t paid
    discount    f32   gamma * the environment's discount: 0 where no value lies beyond
    next_value  f32   the value of obs[t + 1], which is always the true successor of obs[t]
    last        bool  the episode ended at step t: nothing that follows belongs to it

Where the rollout breaks off, and where time ran out, returns bootstrap from `next_value`. A reset row (the one
after `last`, whose action was ignored) gets a return like any other row, to be masked out by the loss. It reaches
no other row: the rows before it belong to an episode that is over.
"""

import jax
import jax.numpy as jnp
from jax import Array


def lambda_returns(reward: Array, discount: Array, next_value: Array, last: Array, lambda_: float | Array) -> Array:
    """The lambda-return of every step, [T, N] (Sutton & Barto 2018, eq. 12.18).

        G[t] = reward[t] + discount[t] * ((1 - l[t]) * next_value[t] + l[t] * G[t + 1])
        l[t] = 0 where last[t], else lambda_;  G[T] = next_value[T - 1]

    lambda_ 0 is TD(0), 1 is Monte Carlo. With next_value the greedy value max_a Q(obs[t + 1], a), it is Peng's
    Q(lambda) (Gallici et al. 2025, "Simplifying Deep Temporal Difference Learning", section 3).

    A scan is the fastest form on a CPU: unrolled, or as an associative scan, it is 1 to 20 times slower. On a GPU an
    associative scan would trade T small kernels for log T larger ones.
    """

    def backup(following: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, discount, next_value, last = row
        trace = jnp.where(last, 0.0, lambda_)
        now = reward + discount * ((1 - trace) * next_value + trace * following)
        return now, now

    returns: Array
    _, returns = jax.lax.scan(backup, next_value[-1], (reward, discount, next_value, last), reverse=True)
    return returns


def gae(reward: Array, discount: Array, value: Array, next_value: Array, last: Array, lambda_: float | Array) -> Array:
    """Generalized advantage estimates, [T, N] (Schulman et al. 2016, eq. 16): lambda-returns less value, V(obs[t])."""
    return lambda_returns(reward, discount, next_value, last, lambda_) - value
