"""pgx's time limit, which counts the actions of the agent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs

pytest.importorskip("pgx")
N = 4


def test_time_limit_truncates_at_its_last_action(any_ranks):
    """A game of 2048 does not end within two moves. Every third step resets."""
    env = envs.make("pgx/2048", N, max_steps_in_episode=2)

    def act(carry, _):
        state, mask = carry
        state, after = env.step(state, mask.argmax(-1).astype(jnp.int32))
        return (state, after.action_mask), (after.last, after.discount)

    def run(key):
        state, first = env.reset(key)
        return jax.lax.scan(act, (state, first.action_mask), length=6)[1]

    last, discount = jax.device_get(jax.jit(run)(jax.random.key(0)))
    np.testing.assert_array_equal(last, np.repeat([[False], [True], [False]] * 2, N, axis=1))
    np.testing.assert_array_equal(discount, 1)
