"""Skipped steps on the device: each has a random key of its own, and any of them may end the episode."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.types import Discrete
from tests.helpers import slow

SKIP, N = 3, 2


class Dice:
    """The observation is the last three random numbers drawn by `step_env`."""

    default_params = SimpleNamespace()

    def reset_env(self, key, params):
        return jnp.zeros(SKIP), jnp.zeros(SKIP)

    def step_env(self, key, state, action, params):
        state = jnp.append(state[1:], jax.random.uniform(key))
        return state, state, jnp.float32(0), jnp.bool_(False), {}

    def is_truncated(self, state, params):
        return jnp.bool_(False)

    def action_space(self, params):
        return Discrete(2)


class Bell(Dice):
    """The observation is the time t, and step t has reward 10^t. The episode ends at `ends` alone, not after it."""

    def __init__(self, ends, terminal):
        self.ends, self.terminal = ends, terminal

    def reset_env(self, key, params):
        return jnp.zeros(1), jnp.int32(0)

    def step_env(self, key, state, action, params):
        state += 1
        is_end = jnp.bool_(self.terminal) & (state == self.ends)
        return state[None].astype(jnp.float32), state, 10.0 ** state.astype(jnp.float32), is_end, {}

    def is_truncated(self, state, params):
        return jnp.bool_(not self.terminal) & (state == self.ends)


def play(env, num_steps):
    def run(key):
        return jax.lax.scan(env.step, env.reset(key)[0], jnp.zeros((num_steps, N), jnp.int32))[1]

    return jax.device_get(jax.jit(run)(jax.random.key(0)))


def test_every_skipped_step_has_its_own_key():
    steps = play(envs.make(Dice, N, frame_skip=SKIP), 4)
    assert steps.obs.shape == (4, N, SKIP) and len(np.unique(steps.obs)) == steps.obs.size


@pytest.mark.parametrize(("ends", "terminal"), [(4, False), (5, False), (6, True), slow(6, False), slow(4, True)])
def test_episode_ends_at_first_middle_or_last_skipped_step(ends, terminal):
    """Three steps at a time: 1, 2, 3, then 4 up to the end. The state after the end shows no end any more."""
    steps = play(envs.make(Bell, N, frame_skip=SKIP, ends=ends, terminal=terminal), 5)
    second = sum(10.0**t for t in range(4, ends + 1))
    np.testing.assert_array_equal(steps.obs[:, 0, 0], [3, ends, 0, 3, ends])
    np.testing.assert_array_equal(steps.reward[:, 1], np.float32([1110, second, 0, 1110, second]))
    np.testing.assert_array_equal(steps.last[:, 0], [False, True, False, False, True])
    np.testing.assert_array_equal(steps.discount[:, 0], [1, 1 - terminal, 1, 1, 1 - terminal])


@pytest.mark.slow
def test_time_limit_counts_skipped_steps():
    """The limit of 7 steps ends each third action after one of its three steps. CartPole stands for 9 steps."""
    env = envs.make("CartPole-v1", N, frame_skip=SKIP, max_steps_in_episode=7)
    steps = play(env, 8)
    np.testing.assert_array_equal(steps.reward[:, 0], [3, 3, 1, 0] * 2)
    np.testing.assert_array_equal(steps.last[:, 0], [False, False, True, False] * 2)
    np.testing.assert_array_equal(steps.discount, 1)
