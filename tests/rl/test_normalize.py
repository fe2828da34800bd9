"""normalize: statistics against numpy in float64, for any order and number of devices, and after long runs."""

import contextlib
from types import SimpleNamespace

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given

from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.ppo import PPO
from jaxrl_fast.rl import normalize
from jaxrl_fast.types import Rollout, Transition
from jaxrl_fast.utils import target

update = jax.jit(normalize.update)
update_reward = jax.jit(normalize.update_reward)
seeds = st.integers(0, 2**32 - 1)


def batches(seed, num_batches=3):
    """Rows [T, N, D] on different scales far from zero, and masks [T, N]."""
    rng = np.random.default_rng(seed)
    center, scale = rng.choice([0, -3, 500], size=3), rng.choice([0.01, 1, 30], size=3)
    xs = rng.normal(center + scale * rng.normal(size=(num_batches, 1, 1, 3)), scale, size=(num_batches, 5, 4, 3))
    return xs.astype(np.float32), rng.random((num_batches, 5, 4)) < 0.7


def statistics_of(xs, masks):
    stats = normalize.init(jnp.zeros(3))
    for x, mask in zip(xs, masks):
        stats = update(stats, x, mask)
    return stats


def assert_close(stats, mean, var):
    """Compare with a tolerance of 1e-5 standard deviations plus the rounding of float32 at the mean."""
    std, coarse = np.sqrt(var), 1e-6 * np.abs(mean)
    assert (np.abs(stats.mean - mean) <= 1e-5 * std + coarse).all(), (stats.mean, mean)
    assert (np.abs(np.sqrt(stats.var) - std) <= 1e-5 * std + coarse).all(), (stats.var, var)


@given(seed=seeds)
def test_statistics_match_numpy_over_valid_rows(seed):
    xs, masks = batches(seed)
    rows = xs[masks].astype(np.float64)
    stats = statistics_of(xs, masks)
    assert stats.num_rows == len(rows)
    assert_close(stats, rows.mean(0), rows.var(0))


@given(seed=seeds, garbage=st.sampled_from([np.nan, np.inf, 1e30]))
def test_masked_rows_do_not_affect_statistics(seed, garbage):
    xs, masks = batches(seed)
    disturbed = np.where(masks[..., None], xs, garbage).astype(np.float32)
    jax.tree.map(np.testing.assert_array_equal, statistics_of(xs, masks), statistics_of(disturbed, masks))


def test_batch_without_valid_rows_leaves_statistics_unchanged():
    xs, masks = batches(0)
    for stats in (normalize.init(jnp.zeros(3)), statistics_of(xs, masks)):
        after = update(stats, xs[0], np.zeros_like(masks[0]))
        jax.tree.map(np.testing.assert_array_equal, after, stats)


@pytest.mark.slow
@given(seed=seeds)
def test_update_combines_statistics_of_all_devices(seed):
    """Environments are split over a mapped axis. Each device gets the statistics of all environments."""
    xs, masks = batches(seed)
    split = jax.vmap(
        lambda stats, x, mask: normalize.update(stats, x, mask, "devices"), (None, 1, 1), axis_name="devices"
    )
    stats = statistics_of(xs[:2], masks[:2])
    together = split(stats, xs[2].reshape(5, 2, 2, 3), masks[2].reshape(5, 2, 2))
    rows = xs[masks].astype(np.float64)
    for stats in (normalize.Stats(*leaves) for leaves in zip(*together)):
        assert_close(stats, rows.mean(0), rows.var(0))


@pytest.mark.slow
@given(seed=seeds, num_devices=st.sampled_from([1, 2, 4]))
def test_pooled_moments_match_weighted_rows_of_all_devices(seed, num_devices):
    """A column may have no row with positive weight on some devices, or on all of them."""
    rng = np.random.default_rng(seed)
    weight = rng.uniform(0.1, 2, (num_devices, 3, 6)) * (rng.random((num_devices, 3, 1)) < 0.7)
    x = np.where(weight > 0, rng.normal(rng.choice([0, -3, 500]), rng.choice([0.1, 30]), weight.shape), np.nan)
    of_device = lambda x, weight: normalize.pool(normalize.moments(x, weight), "devices")
    found = jax.vmap(of_device, axis_name="devices")(jnp.float32(x), jnp.float32(weight))
    for device, k in np.ndindex(num_devices, 3):
        rows, share, least = x[:, k], weight[:, k], weight[:, k] > 0
        rows, total = np.where(least, rows, 0.0), share.sum() or 1
        mean = (share * rows).sum() / total
        var = (share * (rows - mean) ** 2).sum() / total
        np.testing.assert_allclose(found.weight[device, k], share.sum(), rtol=1e-5)
        np.testing.assert_allclose(found.mean[device, k], mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found.var[device, k], var, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.bool_])
def test_statistics_accept_integer_and_bool_observations(dtype):
    x = np.random.default_rng(0).integers(0, 2, (5, 4, 3)).astype(dtype)
    stats = update(normalize.init(jnp.zeros(3)), x, np.ones((5, 4), bool))
    assert_close(stats, x.mean((0, 1)), x.var((0, 1)))
    assert normalize.apply(stats, x).dtype == jnp.float32


def test_apply_standardizes_and_clips():
    stats = normalize.init(jnp.zeros(2))._replace(mean=jnp.array([1.0, 0.0]), var=jnp.array([4.0, 1e-4]))
    # (5 - 1) / sqrt(4) = 2;  1 / sqrt(1e-4) = 100, clipped to 10
    np.testing.assert_allclose(normalize.apply(stats, jnp.array([5.0, 1.0])), [2, 10], rtol=1e-5)


def test_apply_only_clips_before_first_update():
    stats = normalize.init(jnp.zeros(()))
    np.testing.assert_allclose(normalize.apply(stats, jnp.array([0.5, -20.0])), [0.5, -10], rtol=1e-6)


@pytest.mark.slow
def test_each_array_of_observation_tree_has_separate_statistics():
    """The oracle is each array alone. Without statistics, functions return their input or None."""
    xs, masks = batches(0, num_batches=1)
    rows = {"a": xs[0], "b": (xs[0, ..., :1] * 7,)}
    stats = normalize.update(normalize.init(jax.tree.map(lambda x: x[0, 0], rows)), rows, masks[0])
    for found, x in ((stats["a"], rows["a"]), (stats["b"][0], rows["b"][0])):
        alone = normalize.update(normalize.init(x[0, 0]), x, masks[0])
        jax.tree.map(np.testing.assert_array_equal, found, alone)
    whole = normalize.apply(stats, rows)
    np.testing.assert_array_equal(whole["b"][0], normalize.apply(stats["b"][0], rows["b"][0]))
    assert normalize.apply(None, rows) is rows
    assert normalize.seen(None, rows, masks[0]) is normalize.merge(None, None) is None


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.slow
@given(xs=st.lists(st.lists(finite, min_size=4, max_size=4), min_size=1, max_size=4))
@example(xs=[[1e20, -1e20, 0.0, 1.0]])
@example(xs=[[3e38, -3e38, 3e38, -3e38], [-3e38, 3e38, 0.0, 3e38]])
def test_statistics_stay_finite_for_all_finite_inputs(xs):
    """Observations and rewards over several batches. Normalized numbers are within [-10, 10]."""
    stats, scale = normalize.init(jnp.zeros(())), normalize.init_reward(4)
    valid, last = np.ones((1, 4), bool), np.zeros((1, 4), bool)
    for x in xs:
        x = np.float32([x])
        stats = update(stats, x, valid)
        scale = update_reward(scale, x, last, valid, 0.99)
        for numbers in (normalize.apply(stats, x), normalize.apply_reward(scale, x)):
            assert (np.abs(numbers) <= 10).all()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((stats, scale)))
        assert stats.var >= 0 and scale.stats.var >= 0


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_make_mean_nonfinite(number):
    stats = update(normalize.init(jnp.zeros(())), np.float32([[1.0, number]]), np.ones((1, 2), bool))
    assert not np.isfinite(stats.mean)


def test_apply_maps_constant_observation_to_zero():
    x = jnp.full((5, 4, 1), 7.0)
    stats = update(normalize.init(jnp.zeros(1)), x, jnp.ones((5, 4), bool))
    np.testing.assert_array_equal(normalize.apply(stats, x), jnp.zeros_like(x))


def run_long(stats, pool, num_batches):
    """The statistics after `num_batches` updates with the batches of pool [P, B] in turn."""
    everything = jnp.ones(pool.shape[1], bool)
    update_once = lambda i, stats: normalize.update(stats, pool[i % len(pool)], everything)
    return jax.jit(lambda stats: jax.lax.fori_loop(0, num_batches, update_once, stats))(stats)


@pytest.mark.slow
def test_statistics_stay_accurate_and_adaptive_after_200_million_rows():
    """The mean is 1000, where float32 has a rounding of 6e-5. Then all rows shift by one standard deviation."""
    rows = np.random.default_rng(0).normal(1000, 1, (32, 1000)).astype(np.float32)
    exact = rows.astype(np.float64)
    stats = run_long(normalize.init(jnp.zeros(())), jnp.asarray(rows), 200_000)
    assert stats.num_rows > 1.9e8
    assert abs(stats.mean - exact.mean()) < 2e-3
    assert abs(stats.var - exact.var()) < 1e-2
    moved = run_long(stats, jnp.asarray(rows + 1), 50_000)
    expected = exact.mean() + 1 - (1 - normalize.SMALLEST_WEIGHT) ** 50_000  # 0.39 of the way
    assert abs(moved.mean - expected) < 5e-3


def test_single_row_still_changes_statistics_after_2_to_the_24_rows():
    """A float32 counter stops at 16,777,216. A new row still has weight SMALLEST_WEIGHT."""
    stats = normalize.init(jnp.zeros(()))._replace(num_rows=jnp.float32(2**24))
    after = update(stats, jnp.array([3.0]), jnp.array([True]))
    np.testing.assert_allclose(after.mean, 3 * normalize.SMALLEST_WEIGHT, rtol=1e-5)


def episodes(seed, num_steps=12, num_envs=3):
    """Random reward, last and valid, [T, N]. A reset row follows each episode end."""
    rng = np.random.default_rng(seed)
    last = rng.random((num_steps, num_envs)) < 0.2
    valid = np.ones_like(last)
    for t in range(1, num_steps):
        valid[t] = ~last[t - 1]
        last[t] &= valid[t]
    return np.where(valid, rng.normal(1, 2, last.shape), 0).astype(np.float32), last, valid


def reward_oracle(reward, last, valid, gamma):
    """The discounted sums of rewards up to each valid step, in float64."""
    totals = []
    for i in range(reward.shape[1]):
        total = 0.0
        for t in range(reward.shape[0]):
            total = gamma * total + float(reward[t, i])
            totals += [total] if valid[t, i] else []
            total = 0.0 if last[t, i] else total
    return np.array(totals)


@given(seed=seeds, cut=st.sampled_from([4, 12]))
def test_rewards_are_scaled_by_std_of_discounted_sums(seed, cut):
    """The result is the same for one rollout and for three, because sums continue across rollouts."""
    reward, last, valid = episodes(seed)
    scale = normalize.init_reward(3)
    for start in range(0, 12, cut):
        scale = update_reward(scale, *(x[start : start + cut] for x in (reward, last, valid)), 0.9)
    totals = reward_oracle(reward, last, valid, 0.9)
    np.testing.assert_allclose(scale.stats.var, totals.var(), rtol=1e-4)
    expected = np.clip(reward / np.sqrt(totals.var() + 1e-8), -10, 10)
    np.testing.assert_allclose(normalize.apply_reward(scale, reward), expected, rtol=1e-4)


def test_sums_of_rewards_are_the_same_on_an_accelerator():
    """Sums continue after the first rollout, and end where an episode ends in its last step."""
    reward, last, valid = episodes(5)
    last = last.copy()
    last[5, 0] = True
    found = {}
    for platform in ("cpu", "gpu"):
        with target.tracing_for(platform):
            scale = normalize.init_reward(3)
            for rows in (slice(0, 6), slice(6, 12)):
                scale = normalize.update_reward(scale, *(jnp.asarray(x[rows]) for x in (reward, last, valid)), 0.9)
        found[platform] = scale
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *found.values())


def test_reward_statistics_equal_hand_calculation():
    reward, last = jnp.array([[1.0], [2.0], [0.0], [4.0]]), jnp.array([[False], [True], [False], [False]])
    valid = jnp.array([[True], [True], [False], [True]])
    scale = normalize.update_reward(normalize.init_reward(1), reward, last, valid, 0.5)
    # 1;  .5 * 1 + 2 = 2.5;  the reset row, masked;  4.  mean 2.5, variance (1.5^2 + 0 + 1.5^2) / 3 = 1.5
    np.testing.assert_allclose((scale.stats.mean, scale.stats.var), (2.5, 1.5), rtol=1e-6)
    np.testing.assert_array_equal(scale.total, [4.0])


def test_clip_rewards_replaces_rewards_by_signs():
    """-7, 0 and 0.5 become -1, 0 and 1. With clipping False they stay."""
    rows = jnp.array([[-7.0, 0.0, 0.5]])
    steps = Transition(obs=(), action=(), reward=rows, discount=(), last=(), valid=(), extras=())
    rollout = Rollout(steps, next_obs=(), carry=())
    clipped = lambda *given: normalize.clip_rewards(rollout, *given).steps.reward
    for arguments, wanted in (((), [[-1, 0, 1]]), ((True,), [[-1, 0, 1]]), ((False,), rows)):
        np.testing.assert_array_equal(clipped(*arguments), wanted)


def test_zero_rewards_stay_zero():
    reward = jnp.zeros((4, 2))
    ends, valid = jnp.zeros((4, 2), bool), jnp.ones((4, 2), bool)
    scale = normalize.update_reward(normalize.init_reward(2), reward, ends, valid, 0.99)
    np.testing.assert_array_equal(normalize.apply_reward(scale, reward), reward)


def test_moments_accept_weights_that_sum_to_less_than_one():
    """1 and 3 with equal small weights have mean 2 and variance 1, computed at once or in parts."""
    x, weight = jnp.array([1.0, 3.0, jnp.nan]), jnp.array([1e-3, 1e-3, 0.0])
    found = normalize.moments(x, weight)
    np.testing.assert_allclose(found, [2e-3, 2, 1], rtol=1e-6)
    parts = jax.vmap(normalize.moments)(x[:, None], weight[:, None])
    np.testing.assert_allclose(normalize._of_parts(parts), [2e-3, 2, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "is_rejected"),
    [
        ([((84, 84, 3), jnp.uint8), ((3,), jnp.float32), ((), jnp.float32)], False),
        ([((84, 84, 3), jnp.float32)], True),
        ([((20, 20), jnp.float32), ((3,), jnp.float32)], True),
    ],
)
def test_only_images_of_floats_cannot_be_normalized(shapes, is_rejected):
    obs = tuple(jax.ShapeDtypeStruct(*each) for each in shapes)
    config = configure(PPO, observations="image", normalize_observations=True)
    problem = "^network.observations: image cannot be combined with normalize_observations, got both; drop one$"
    with pytest.raises(ValueError, match=problem) if is_rejected else contextlib.nullcontext():
        normalize.check(config, SimpleNamespace(obs=obs))
