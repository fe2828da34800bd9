"""pgx's time limit, which counts the actions of the agent."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs

pytest.importorskip("pgx")
from jaxrl_fast.envs.suites import pgx  # imports pgx

N = 4


@pytest.mark.parametrize(("num_steps", "expected"), [(0, False), (2, False), (3, True), (4, True)])
def test_time_limit_counts_actions_of_agent(num_steps, expected):
    state = pgx.State(SimpleNamespace(truncated=False), jnp.int32(num_steps), jnp.float32(0))
    assert bool(pgx.PgxEnv("tic_tac_toe").is_truncated(state, pgx.Params(3))) == expected


@pytest.mark.slow
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
