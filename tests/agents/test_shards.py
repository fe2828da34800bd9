"""What agents exchange between shards, against numpy over the rows of all shards."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import agents
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import distributions
from jaxrl_fast.types import Box, EnvSpec, Parallelism
from tests.helpers import slow
from tests.helpers.actor_critics import rollout_of

NUM_SHARDS, NUM_STEPS, NUM_ENVS = 2, 4, 3
OPTIONS = {
    "ppo": dict(num_minibatches=1, num_epochs=1, rewards="normalized", gamma=0.5),
    "reppo": dict(num_minibatches=2, num_epochs=1, critic_width=4, gamma=0.5),
    "td3": dict(size=96, batch_size=8, learning_starts=8, replay_ratio=0.1),
}


@cache
def after_two_rollouts(algo):
    """Return the states [shards] after updates with two rollouts, and the rollouts' steps [2, shards, T, N]."""
    spec = EnvSpec("test", jax.ShapeDtypeStruct((2,), jnp.float32), Box((1,)), NUM_ENVS)
    options = OPTIONS[algo] | dict(hidden_sizes=(4,), rollout_length=NUM_STEPS, normalize_observations=True)
    agent = agents.load(algo).make(configure(ALGORITHMS[algo], **options), spec, 10, Parallelism("shards", NUM_SHARDS))
    update = jax.jit(jax.vmap(agent.update, in_axes=(0, 0, None), axis_name="shards"))
    one = agent.init(jax.random.key(0))
    state = jax.tree.map(lambda x: jnp.stack([x] * NUM_SHARDS), one)
    seen = []
    for number in range(2):
        parts = [rollout_of(NUM_STEPS, NUM_ENVS, 2, 1, seed=10 * number + shard) for shard in range(NUM_SHARDS)]
        shifted = [move(part, 3.0 * shard + number) for shard, part in enumerate(parts)]
        whole = jax.tree.map(lambda *x: jnp.stack(x), *shifted)
        seen.append(jax.device_get(whole.steps))
        state, _ = update(state, whole, jax.random.key(number))
    return jax.device_get(state), jax.tree.map(lambda *x: np.stack(x), *seen)


def move(rollout, distance):
    """Return the rollout with other observations and rewards on each shard, and the policy that PPO keeps."""
    steps = rollout.steps
    pi = distributions.Gaussian(jnp.zeros_like(steps.action), jnp.ones_like(steps.action))
    reward = jnp.where(steps.valid, steps.reward + distance, 0)
    return rollout._replace(steps=steps._replace(obs=steps.obs + distance, reward=reward, extras=pi))


@pytest.mark.parametrize("algo", [slow("ppo"), slow("reppo"), "td3"])
def test_observation_statistics_are_of_valid_rows_of_all_shards(algo):
    """After two rollouts on two shards; observations of the second shard lie 3 higher."""
    state, steps = after_two_rollouts(algo)
    stats = state.learner.observations if algo == "td3" else state.observations
    rows = np.asarray(steps.obs, np.float64)[steps.valid]
    assert not steps.valid.all() and (stats.num_rows == len(rows)).all()
    np.testing.assert_allclose(stats.mean, [rows.mean(0)] * NUM_SHARDS, rtol=1e-5)
    np.testing.assert_allclose(stats.var, [rows.var(0)] * NUM_SHARDS, rtol=1e-4)


@pytest.mark.slow
def test_reward_scale_is_of_valid_rows_of_all_shards():
    """The discounted sums of episodes, 0.5 * total + reward; rewards of the second shard lie 3 higher."""
    state, steps = after_two_rollouts("ppo")
    total, totals = np.zeros((NUM_SHARDS, NUM_ENVS)), []
    for number in range(2):
        for t in range(NUM_STEPS):
            total = 0.5 * total + steps.reward[number, :, t]
            totals.append(total[steps.valid[number, :, t]])
            total = np.where(steps.last[number, :, t], 0, total)
    totals = np.concatenate(totals)
    np.testing.assert_allclose(state.rewards.total, total, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.rewards.stats.mean, [totals.mean()] * NUM_SHARDS, rtol=1e-5)
    np.testing.assert_allclose(state.rewards.stats.var, [totals.var()] * NUM_SHARDS, rtol=1e-4)


@pytest.mark.parametrize("algo", [slow("ppo"), slow("reppo"), "td3"])
def test_shards_keep_equal_learners(algo):
    state, _ = after_two_rollouts(algo)
    learner = state.learner if algo == "td3" else (state.params, state.optimizer)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[1]), learner)
