"""Starts of episodes: drawn in each step for an accelerator, and from a buffer on a CPU, with the same episodes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

from jaxrl_fast import envs
from jaxrl_fast.utils import target
from tests.helpers import slow

N, T = 3, 24


class Varying:
    """Count up in episodes of 2 to 7 steps, whose lengths a quick reset draws."""

    default_params = ()

    def reset_env(self, key, params):
        state = jnp.stack([jax.random.uniform(key, minval=2.0, maxval=7.0), 0.0])
        return state, state

    def step_env(self, key, state, action, params):
        state = state + jnp.array([0.0, 1.0])
        return state, state, 1.0, state[1] >= state[0], {}

    def is_truncated(self, state, params):
        return False

    def action_space(self, params):
        return spaces.Discrete(2)


class Looping(Varying):
    """The same with a loop that draws the lengths, so that a reset is no quick one."""

    def reset_env(self, key, params):
        length = jax.lax.fori_loop(0, 4, lambda i, x: x + 1.5 * jax.random.uniform(jax.random.fold_in(key, i)), 2.0)
        state = jnp.stack([length, 0.0])
        return state, state


def play(env, platform, state, keys):
    """Return the state and the time steps [T, N] after random actions, in a program for the platform."""

    def step(state, key):
        return env.step(state, jax.random.randint(key, (N,), 0, 2))

    with target.tracing_for(platform):
        return jax.jit(lambda state: jax.lax.scan(step, state, keys))(state)


@pytest.mark.parametrize("env_id", ["CartPole-v1", slow("Breakout-MinAtar"), Varying, Looping])
@pytest.mark.parametrize("platforms", [("gpu", "gpu"), ("cpu", "gpu"), ("gpu", "cpu")])
def test_episodes_are_the_same_on_all_devices(env_id, platforms):
    """A run may also continue on the other kind of device, since both versions have the same states."""
    env = envs.make(env_id, N, **({"max_steps_in_episode": 5} if isinstance(env_id, str) else {}))
    keys = jax.random.split(jax.random.key(1), T)
    first, _ = jax.jit(env.reset)(jax.random.key(0))

    def both(platforms):
        state, one = play(env, platforms[0], first, keys[: T // 2])
        _, other = play(env, platforms[1], state, keys[T // 2 :])
        return jax.tree.map(lambda x, y: np.concatenate([x, y]), one, other)

    wanted = both(("cpu", "cpu"))
    assert wanted.last.sum(axis=0).min() >= 2
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), both(platforms), wanted)


@pytest.mark.parametrize(
    ("env_id", "platform", "branches"),
    [("CartPole-v1", "cpu", True), ("CartPole-v1", "gpu", False), (Looping, "gpu", True)],
)
def test_only_slow_resets_branch_on_accelerator(env_id, platform, branches):
    env = envs.make(env_id, N)
    with target.tracing_for(platform):
        state, _ = jax.eval_shape(env.reset, jax.random.key(0))
        program = jax.make_jaxpr(env.step)(state, jnp.zeros(N, jnp.int32))
    assert (" cond[" in str(program)) == branches
