"""JaxMARL's agents as players. The oracle is JaxMARL's own step. The tests are skipped if it is not installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs

pytestmark = pytest.mark.skipif(not envs.is_installed("jaxmarl"), reason="JaxMARL is not installed")


@pytest.fixture(autouse=True)
def allow_rank_promotion(any_ranks):
    """Allow rank promotion, which JaxMARL relies on."""


def test_rows_match_jaxmarl_agents():
    import jaxmarl

    env, own = envs.make("jaxmarl/MPE_simple_spread_v3", 2, max_steps=3), jaxmarl.make("MPE_simple_spread_v3")
    assert env.spec.players == ("agent_0", "agent_1", "agent_2") and env.spec.num_envs == 6
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    step, own_step = jax.jit(env.step), jax.vmap(own.step_env)
    key = jax.random.split(jax.random.key(1), 2)  # MPE's step ignores the key
    for number in range(4):
        before, action = state.env, jax.random.randint(jax.random.key(number), (6,), 0, 5)
        obs, _, reward, *_ = own_step(key, before, dict(zip(own.agents, action.reshape(3, 2), strict=True)))
        state, timestep = step(state, action)
        np.testing.assert_allclose(timestep.obs, jnp.concatenate([obs[name] for name in own.agents]), rtol=1e-6)
        np.testing.assert_allclose(timestep.reward, jnp.concatenate([reward[name] for name in own.agents]), rtol=1e-6)
        assert timestep.last.tolist() == [number == 3] * 6 and timestep.discount.tolist() == [1] * 6
    _, timestep = step(state, jnp.zeros(6, jnp.int32))
    assert not timestep.reward.any() and not timestep.last.any()


@pytest.mark.parametrize("name", ["MPE_simple_tag_v3", "MPE_simple_speaker_listener_v4", "MPE_simple_adversary_v3"])
@pytest.mark.parametrize("action_type", ["Discrete", "Continuous"])
def test_shorter_observations_and_actions_are_padded(name, action_type):
    import jaxmarl

    env, own = envs.make(f"jaxmarl/{name}", 2, action_type=action_type), jaxmarl.make(name, action_type=action_type)
    num_players = len(own.agents)
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    key = jax.random.split(jax.random.key(1), 2)
    rows = lambda x: x.reshape(num_players, 2, *x.shape[1:])
    nums = [getattr(own.action_space(agent), "n", None) or own.action_space(agent).shape[0] for agent in own.agents]
    if action_type == "Discrete":
        action = jnp.repeat(jnp.asarray(nums) - 1, 2)  # the last action that each player has
        true_action = rows(action)
        if len({*nums}) > 1:
            expected = np.arange(max(nums)) < np.asarray(nums)[:, None, None]
            np.testing.assert_array_equal(rows(timestep.action_mask), np.repeat(expected, 2, axis=1))
    else:
        action = jax.random.uniform(jax.random.key(2), (2 * num_players, max(nums)), minval=-1, maxval=1)
        true_action = rows((action + 1) / 2)  # from [-1, 1] to [0, 1]
    before = state.env
    state, timestep = jax.jit(env.step)(state, action)
    given = [x if action_type == "Discrete" else x[:, :num] for x, num in zip(true_action, nums, strict=True)]
    obs, _, reward, *_ = jax.vmap(own.step_env)(key, before, dict(zip(own.agents, given, strict=True)))
    for agent, got, gained in zip(own.agents, rows(timestep.obs), rows(timestep.reward), strict=True):
        size = obs[agent].shape[1]
        np.testing.assert_allclose(got[:, :size], obs[agent], rtol=1e-5, atol=1e-6)
        assert not got[:, size:].any()
        np.testing.assert_allclose(gained, reward[agent], rtol=1e-5)


@pytest.mark.slow
def test_every_registered_environment_can_be_stepped():
    from jaxrl_fast.envs.suites import jaxmarl

    for name in jaxmarl.registered():
        env = envs.make(f"jaxmarl/{name}", 2)
        state, _ = jax.jit(env.reset)(jax.random.key(0))
        action = jnp.zeros(env.spec.num_envs, jnp.int32)
        assert np.isfinite(jax.jit(env.step)(state, action)[1].reward).all(), name
