"""Recompute a memory over a rollout, for agents that learn from sequences of consecutive steps."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.options.algorithm import OnPolicy
from jaxrl_fast.rl import minibatch
from jaxrl_fast.types import EnvSpec, PyTree, Rollout

Unroll = Callable[[PyTree, PyTree, Array], tuple[PyTree, PyTree]]  # (obs, carry, reset) to outputs and carry


def validate(config: OnPolicy, spec: EnvSpec, num_shards: int = 1) -> None:
    """Raise ValueError if rollouts do not divide into sequences and minibatches."""
    length = config.sequence()
    steps, burn_in = length or 1, config.memory.burn_in
    if config.rollout_length % steps:
        divisors = [n for n in range(1, config.rollout_length + 1) if config.rollout_length % n == 0]
        near = min(divisors, key=lambda n: abs(n - steps))
        raise ValueError(
            f"memory.sequence_length: must divide rollout_length {config.rollout_length}, got {steps}; use {near}"
        )
    if length and burn_in >= length:
        raise ValueError(
            f"memory.burn_in: must be less than the {length} steps of a sequence, got {burn_in}; use {length // 2}"
        )
    minibatch.validate(config.rollout_length * spec.num_envs // steps, config.num_minibatches, num_shards, length)


def recompute(
    unroll: Unroll, rollout: Rollout, obs: PyTree, next_obs: PyTree, read: Callable[[PyTree], PyTree], length: int
) -> tuple[PyTree, PyTree]:
    """Return a network's outputs on a rollout, [T + 1, N, ...], and the carry before each sequence, [T / L * N, ...].

    The last outputs are those on `next_obs` [N, ...]. `obs` are the observations [T, N, ...] that `read` turns into the
    network's inputs. With the parameters that acted, the carry is the same as during acting.
    """

    def one(carry: PyTree, part: tuple[PyTree, Array]) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        obs, reset = part
        outputs, after = unroll(read(obs), carry, reset)
        return after, (carry, outputs)

    parts = jax.tree.map(partial(minibatch.cut, length), (obs, ~rollout.steps.valid))
    after, (before, outputs) = jax.lax.scan(one, rollout.carry, parts)
    at_end, _ = unroll(jax.tree.map(lambda x: x[:, None], next_obs), after, jnp.zeros((len(parts[1][0]), 1), bool))
    time_major = lambda x: x.swapaxes(1, 2).reshape(-1, x.shape[1], *x.shape[3:])
    join = lambda x, end: jnp.concatenate([time_major(x), end.swapaxes(0, 1)])
    return jax.tree.map(join, outputs, at_end), minibatch.flatten(before)


def after_burn_in(
    unroll: Unroll, obs: PyTree, carry: PyTree, reset: Array | None, burn_in: int
) -> tuple[PyTree, PyTree, Array | None]:
    """Return observations and resets [B, L, ...] without the first `burn_in` steps, and the carry after these [B, ...].

    The carry is the second result. No gradient flows into the burn-in (Kapturowski et al. 2019, section 3). Without a
    memory, `burn_in` is 0 and nothing changes.
    """
    if not burn_in:
        return obs, carry, reset
    first = jax.tree.map(lambda x: x[:, :burn_in], (obs, reset))
    rest = jax.tree.map(lambda x: x[:, burn_in:], (obs, reset))
    _, carry = unroll(first[0], carry, first[1])
    return rest[0], jax.lax.stop_gradient(carry), rest[1]
