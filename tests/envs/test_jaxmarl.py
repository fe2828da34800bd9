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


def test_make_rejects_players_with_different_observations():
    with pytest.raises(ValueError, match=r"the observations of its players must be equal, got adversary_0 .* agent_0"):
        envs.make("jaxmarl/MPE_simple_tag_v3", 1)
