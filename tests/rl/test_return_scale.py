"""return_scale: against a plain loop over episodes, on several shards, and the traps of the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.rl import return_scale
from jaxrl_fast.types import Transition

pytestmark = pytest.mark.unit
GAMMA = 0.5


def steps_of(reward, last):
    """Steps [T, N]. The row after an end is a reset row, which has reward 0."""
    last = np.asarray(last, bool)
    valid = np.concatenate([np.ones_like(last[:1]), ~last[:-1]])
    reward = np.where(valid, np.asarray(reward, float), 0)
    return Transition((), (), jnp.float32(reward), (), jnp.asarray(last), jnp.asarray(valid), ())


def plain(rewards, lasts):
    """All discounted sums, of each environment and of valid steps only."""
    found = []
    for reward, last in zip(np.transpose(rewards), np.transpose(lasts), strict=True):
        total, after_end = 0.0, False
        for r, end in zip(reward, last, strict=True):
            if after_end:
                after_end = False
                continue
            total = GAMMA * total + r
            found.append(total)
            if end:
                total, after_end = 0.0, True
    return np.array(found)


def random_steps(seed, num_steps=12, num_envs=3):
    rng = np.random.default_rng(seed)
    last = np.zeros((num_steps, num_envs), bool)
    last[3, 0] = last[7, 1] = last[5, 2] = last[10, 2] = True
    return rng.normal(size=last.shape) * 3 + 1, last


def test_scale_matches_plain_loop_over_two_rollouts():
    parts = [random_steps(seed) for seed in (0, 1)]
    scale = return_scale.init(3)
    for reward, last in parts:
        scale = return_scale.update(scale, steps_of(reward, last), GAMMA)
    sums = plain(*(np.concatenate(x) for x in zip(*parts)))
    np.testing.assert_allclose(scale.largest, np.abs(sums).max(), rtol=1e-5)
    np.testing.assert_allclose(scale.sums.stats.var, sums.var(), rtol=1e-4)
    for bound in (0.1, 100.0):  # the largest sum, then the deviation decides
        expected = 2 / max(sums.std(), np.abs(sums).max() / bound)
        np.testing.assert_allclose(return_scale.apply(scale, jnp.float32(2), bound), expected, rtol=1e-4)


def test_sum_includes_last_reward_and_begins_again_after_it():
    """The authors' code drops the sum before the last reward, and carries the last reward into the next episode.

    Rewards 4, 4 | 0 (reset), 4 give sums 4, 6 | 4. Theirs are 4, 4, 6.
    """
    scale = return_scale.update(return_scale.init(1), steps_of([[4], [4], [9], [4]], [[0], [1], [0], [0]]), GAMMA)
    assert float(scale.largest) == 6
    np.testing.assert_allclose(scale.sums.stats.mean, 14 / 3, rtol=1e-6)
    assert float(scale.sums.stats.num_rows) == 3


def test_first_rewards_are_not_scaled_up_without_limit():
    """One sparse reward of 1 in 1,000 steps: the deviation is 0.03, but no return exceeds the bound."""
    reward, last = np.zeros((1000, 1)), np.zeros((1000, 1), bool)
    reward[400] = 1
    scale = return_scale.update(return_scale.init(1), steps_of(reward, last), GAMMA)
    np.testing.assert_allclose(return_scale.apply(scale, jnp.float32(1), 5.0), 5, rtol=1e-5)


def test_shards_have_statistics_of_all_rows():
    reward, last = random_steps(2)
    alone = return_scale.update(return_scale.init(3), steps_of(reward, last), GAMMA)
    one = lambda x: jnp.asarray(x.T[:, :, None]) if hasattr(x, "T") else x  # [shards, T, 1]
    steps = jax.tree.map(one, steps_of(reward, last))
    update = lambda steps: return_scale.update(return_scale.init(1), steps, GAMMA, "shards")
    found = jax.vmap(update, axis_name="shards")(steps)
    np.testing.assert_allclose(found.largest, [alone.largest] * 3, rtol=1e-6)
    np.testing.assert_allclose(found.sums.stats.var, [alone.sums.stats.var] * 3, rtol=1e-5)


def test_restart_forgets_sums_and_keeps_statistics():
    reward, last = random_steps(3)
    before = return_scale.update(return_scale.init(3), steps_of(reward, last), GAMMA)
    after = return_scale.restart(before)
    np.testing.assert_array_equal(after.sums.total, [0, 0, 0])
    assert after.largest is before.largest and after.sums.stats is before.sums.stats
