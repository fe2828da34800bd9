"""on_env_restart: the state that agents clear when all environments restart, as on resume with host environments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast.agents import dqn, ppo
from jaxrl_fast.options.declare import configure
from jaxrl_fast.types import Discrete, EnvSpec
from tests.helpers.trees import same_bits

pytestmark = pytest.mark.unit

SPEC = EnvSpec("test", ShapeDtypeStruct((1,), jnp.float32), Discrete(2), 3)


def test_ppo_restart_clears_discounted_reward_sums_and_keeps_statistics():
    agent = ppo.make(configure(ppo.Config, rollout_length=4, hidden_sizes=(4,), rewards="normalized"), SPEC, 10)
    state = agent.init(jax.random.key(0))
    state = state._replace(rewards=state.rewards._replace(total=jnp.array([1.0, -2.0, 3.0])))
    after = agent.learning.on_env_restart(state)
    np.testing.assert_array_equal(after.rewards.total, [0, 0, 0])
    assert same_bits(after, state._replace(rewards=state.rewards._replace(total=jnp.zeros(3))))


def test_ppo_restart_changes_nothing_without_reward_normalization():
    agent = ppo.make(configure(ppo.Config, rollout_length=4, hidden_sizes=(4,), rewards="raw"), SPEC, 10)
    state = agent.init(jax.random.key(0))
    assert same_bits(agent.learning.on_env_restart(state), state)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_dqn_restart_truncates_episodes_at_newest_row(kind):
    """It has no successor, and is not drawn; a target of two steps ends there."""
    of_replay = dict(kind=kind, size=96, n_step=2)
    config = configure(dqn.Config, rollout_length=4, batch_size=4, learning_starts=0, replay=of_replay)
    agent = dqn.make(config, SPEC, 10)
    state = agent.init(jax.random.key(0))
    prioritized = kind == "prioritized"
    ring = lambda state: state.replay.ring if prioritized else state.replay
    full = ring(state)._replace(valid=jnp.ones((32, 3), bool), head=jnp.int32(8), size=jnp.int32(32))
    state = state._replace(replay=state.replay._replace(ring=full) if prioritized else full)
    after = jax.tree.map(np.asarray, ring(agent.learning.on_env_restart(state)))
    number = np.arange(32)[:, None] + np.zeros((1, 3), int)
    np.testing.assert_array_equal(after.valid, number != 7)
    np.testing.assert_array_equal(after.last, number == 6)
    assert agent.policy_state(state).replay is None
