"""A terminating time limit: truncations have discount 0, and nothing else changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.agents import ppo
from jaxrl_fast.config import load
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.wrappers import time_limit
from jaxrl_fast.training import build
from tests.helpers import probes

T = 24


def play(env):
    """Return T time steps with action 0."""
    actions = jnp.zeros((T, env.spec.num_envs), jnp.int32)
    run = lambda key: jax.lax.scan(env.step, env.reset(key)[0], actions)[1]
    return jax.device_get(jax.jit(run)(jax.random.key(0)))


def assert_only_ends_differ(plain, terminating):
    np.testing.assert_array_equal(terminating.discount, np.where(plain.last, 0, plain.discount))
    assert (plain.last & (plain.discount == 1)).any()
    for name in ("obs", "reward", "last"):
        np.testing.assert_array_equal(getattr(terminating, name), getattr(plain, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        partial(envs.make, "CartPole-v1", max_steps_in_episode=5),
        lambda num_envs: envs.make("CartPole-v1", 1, max_steps_in_episode=5).view.resize(num_envs, HostEnvConfig()),
        partial(envs.make, "envpool/CartPole-v1", max_episode_steps=5),
    ],
    ids=["gymnax", "resized", "envpool"],
)
def test_terminating_time_limit_sets_discount_zero_at_truncation(make):
    plain, terminating = make(3), time_limit.terminating(make(3))
    assert_only_ends_differ(play(plain), play(terminating))


def test_terminating_time_limit_survives_resize():
    env = time_limit.terminating(envs.make("CartPole-v1", 2, max_steps_in_episode=5))
    steps = play(env.view.resize(7, HostEnvConfig()))
    assert steps.last.shape == (T, 7)
    np.testing.assert_array_equal(steps.discount, 1 - steps.last)


def test_terminating_time_limit_applies_to_async_pools():
    env = time_limit.terminating(probes.pooled(probes.constant_reward(4)))  # truncated after 10 steps

    @jax.jit
    def run(key):
        def step(state, _):
            state, timestep = env.pools.receive(0, env.pools.send(0, state, jnp.zeros(4, jnp.int32)))
            return state, timestep

        return jax.lax.scan(step, env.reset(key)[0], length=T)[1]

    steps = run(jax.random.key(0))
    assert steps.last.any()
    np.testing.assert_array_equal(steps.discount, 1 - steps.last)


@pytest.mark.parametrize("option", ["", "--wrap time-limit"])
def test_wrapper_time_limit_applies_to_every_shard(option):
    """In 5 steps, CartPole never falls, so every episode ends by the time limit."""
    line = f"ppo --env CartPole-v1 --env-option max_steps_in_episode=5 --num-envs 8 --devices 2 {option}"
    settings = load.from_command_line(line.split())
    _, env, _, placement = build.build(settings, ppo, 10)
    assert placement.num_shards == 2
    steps = play(env)
    assert steps.last.any()
    np.testing.assert_array_equal(steps.discount, 1 - steps.last if option else 1)
