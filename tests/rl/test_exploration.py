"""exploration: epsilon by environment steps, one epsilon per environment (Ape-X), noise, and int32 limits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast.agents import dqn, pqn
from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.explore import Epsilon
from jaxrl_fast.rl import exploration
from jaxrl_fast.rl.distributions import EpsilonGreedy
from jaxrl_fast.types import Box, Discrete, EnvSpec, MultiDiscrete, Parallelism, PolicyInput


def spec_of(num_envs, action=None):
    obs = ShapeDtypeStruct((1,), jnp.float32)
    return EnvSpec("test", obs, action or Discrete(2), num_envs)


def test_epsilon_schedule_equals_hand_calculation():
    # from 1 to .1 over 1000 environment steps: .55 half way, .1 at the end and beyond
    epsilon = Epsilon(1.0, 0.1, 1000, 0.0)
    for step, expected in ((0, 1), (250, 0.775), (500, 0.55), (1000, 0.1), (1001, 0.1), (10**9, 0.1)):
        found = exploration.epsilons(epsilon, 3, jnp.int32(step))
        np.testing.assert_allclose(found, [expected] * 3, rtol=1e-6)


def test_apex_epsilons_equal_hand_calculation():
    # .4 ^ (1 + 7 i / 3): exponents 1, 10/3, 17/3, 8
    found = exploration.epsilons(Epsilon(0.4, 0.4, 1, 7.0), 4, jnp.int32(0))
    np.testing.assert_allclose(found, [0.4, 0.0471556, 0.00555913, 0.00065536], rtol=1e-4)


def test_apex_epsilon_of_single_environment_has_exponent_one():
    found = exploration.epsilons(Epsilon(0.4, 0.4, 1, 7.0), 1, jnp.int32(0))
    np.testing.assert_allclose(found, [0.4], rtol=1e-6)


def test_apex_epsilons_span_environments_of_all_shards():
    """Two shards of 3 environments have the epsilons of 6 environments."""
    epsilon, split = Epsilon(0.5, 0.1, 100, 7.0), Parallelism("devices", 2)
    of_shard = lambda _: exploration.epsilons(epsilon, 3, jnp.int32(50), split)
    found = jax.vmap(of_shard, axis_name="devices")(jnp.arange(2))
    np.testing.assert_allclose(found.reshape(-1), exploration.epsilons(epsilon, 6, jnp.int32(50)), rtol=1e-6)
    means = jax.vmap(lambda _: exploration.mean(epsilon, 3, jnp.int32(50), split), axis_name="devices")(jnp.arange(2))
    np.testing.assert_allclose(means, [found.mean()] * 2, rtol=1e-6)


def test_each_pool_has_full_range_of_apex_epsilons():
    """The mean over all environments is therefore the mean of one pool."""
    epsilon = Epsilon(0.4, 0.4, 1, 7.0)
    found = exploration.epsilons(epsilon, 12, jnp.int32(0), Parallelism(num_pools=3))
    np.testing.assert_array_equal(found, exploration.epsilons(epsilon, 4, jnp.int32(0)))
    mean = exploration.mean(epsilon, 12, jnp.int32(0), Parallelism(num_pools=3))
    np.testing.assert_allclose(mean, found.mean(), rtol=1e-6)


@pytest.mark.parametrize("num_envs", [1, 3, 1000, 2**20])
@pytest.mark.parametrize("rollout_length", [1, 7, 128])
def test_env_steps_saturate_before_int32_overflow(num_envs, rollout_length):
    """Counts are exact up to 2^30 environment steps, then constant. The last step of a rollout still fits in int32."""
    per_update = num_envs * rollout_length
    count = lambda u: int(exploration.env_steps(per_update, jnp.int32(u)))
    most = 2**30 // per_update
    for num_updates in (0, 1, most - 1, most):
        assert count(num_updates) == num_updates * per_update
    for num_updates in (most + 1, 2**31 - 1):
        assert count(num_updates) == most * per_update
    last = jnp.int32(count(2**31 - 1)) + jnp.int32(rollout_length - 1) * num_envs
    assert 0 < int(last) == most * per_update + (rollout_length - 1) * num_envs
    epsilon = Epsilon(1.0, 0.1, 10**6, 0.0)
    np.testing.assert_allclose(exploration.epsilons(epsilon, 1, last), 0.1, rtol=1e-6)


AGENTS = {
    "dqn": lambda spec, **config: dqn.make(
        configure(dqn.Config, **config, noisy=True, size=1000, learning_starts=0), spec, 100
    ),
    "pqn": lambda spec, **config: pqn.make(configure(pqn.Config, **config, num_minibatches=1), spec, 100),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize(("num_envs", "rollout_length"), [(4, 5)])
def test_agents_decay_epsilon_by_environment_steps(name, num_envs, rollout_length):
    """At each update and step, a number just below the expected epsilon explores and one just above does not."""
    agent = AGENTS[name](
        spec_of(num_envs), rollout_length=rollout_length, hidden_sizes=(4,),
        explore=dict(start=1.0, end=0.1, steps=600),
    )  # fmt: skip
    state = jax.jit(agent.init)(jax.random.key(0))
    if name == "dqn":  # acting does not use the replay buffer
        state = state._replace(replay=None)
    obs, noise = jnp.ones((num_envs, 1)), agent.sample_noise(jax.random.key(1), rollout_length, num_envs)
    greedy = int(agent.exploit(state, PolicyInput(obs[:1]), (), None).action[0])
    other = (0.25, 0.75)[1 - greedy]  # the number that chooses the other action

    @jax.jit
    def explores(num_updates, step, coin):
        now = jax.tree.map(lambda x: x[step], noise)
        uniform = jnp.stack([jnp.full(num_envs, coin), jnp.full(num_envs, other)])
        if name == "dqn":
            now = dqn.Noise(now.explore._replace(uniform=uniform), jax.tree.map(jnp.zeros_like, now.network))
        else:
            now = now._replace(uniform=uniform)
        return agent.explore(state._replace(num_updates=num_updates), PolicyInput(obs), (), now).action != greedy

    for num_updates in (0, 1, 7, 10**6, 2**31 - 1):
        for step in {0, rollout_length - 1}:
            env_steps = (num_updates * rollout_length + step) * num_envs
            epsilon = 1 - 0.9 * min(env_steps / 600, 1)
            assert explores(jnp.int32(num_updates), step, epsilon - 1e-4).all(), (num_updates, step)
            assert not explores(jnp.int32(num_updates), step, epsilon + 1e-4).any(), (num_updates, step)


def test_sample_noise_is_independent_per_environment_and_step():
    """Exploration has frequency epsilon in each environment, uncorrelated between environments and successive steps."""
    num_steps, num_envs, epsilon = 20_000, 4, 0.3
    noise = exploration.sample_noise(jax.random.key(0), num_steps, num_envs)
    np.testing.assert_array_equal(noise.step, np.arange(num_steps))
    coins = np.asarray(noise.uniform)
    assert coins.shape == (num_steps, 2, num_envs) and coins.min() >= 0 and coins.max() < 1
    value = jnp.broadcast_to(jnp.float32([1] + [0] * 9), (num_envs, 10))  # greedy is 0; exploring 0 in 1 of 10
    actions = np.asarray(jax.vmap(EpsilonGreedy(value, epsilon).sample_from)(noise.uniform))
    explored = (actions != 0).astype(float)
    chance = epsilon * 0.9
    error = np.sqrt(chance * (1 - chance) / num_steps)
    assert np.abs(explored.mean(0) - chance).max() < 4 * error
    correlation = np.corrcoef(np.concatenate([explored[1:], explored[:-1]], axis=1).T)
    assert np.abs(correlation - np.eye(2 * num_envs)).max() < 5 / np.sqrt(num_steps)


@pytest.mark.parametrize("action", [Box((3,)), MultiDiscrete((2, 2))])
def test_num_actions_rejects_other_action_spaces(action):
    words = re.escape(f"this one: requires discrete actions, got {action} of test; try ppo")
    with pytest.raises(ValueError, match=f"^{words}$"):
        exploration.num_actions(spec_of(1, action=action), "this one")
    assert exploration.num_actions(spec_of(1)) == 2
