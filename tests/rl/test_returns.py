"""returns: against the forward view in plain loops and hand calculation, and independence of unrelated rows."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxrl_fast.rl import returns
from jaxrl_fast.utils import target

pytestmark = pytest.mark.unit

GAMMA = 0.9
lambda_returns = jax.jit(returns.lambda_returns)
gae = jax.jit(returns.gae)
on_accelerator = jax.jit(lambda *arrays: returns.lambda_returns(*arrays))

seeds = st.integers(0, 2**32 - 1)
lambdas = st.floats(0, 1, width=32)
shapes = st.sampled_from([(1, 1), (7, 3), (16, 4)])


def history(seed, shape):
    """Random reward, gamma * discount, next_value, last and valid, [T, N], with a reset row after each episode end."""
    rng = np.random.default_rng(seed)
    valid = np.ones(shape, bool)
    last = rng.random(shape) < rng.choice([0.0, 0.1, 0.5])
    for t in range(1, shape[0]):
        valid[t] = ~last[t - 1]
        last[t] &= valid[t]
    terminal = last & (rng.random(shape) < 0.5)
    lost_life = ~last & valid & (rng.random(shape) < 0.1)
    reward = np.where(valid, rng.normal(size=shape), 0)
    discount = np.where(terminal | lost_life, 0, GAMMA)
    arrays = (reward, discount, rng.normal(size=shape))
    return *(x.astype(np.float32) for x in arrays), last, valid


def n_step_oracle(reward, discount, next_value, last, n):
    """Returns of one environment in float64: rewards of up to n steps of one episode, then the value."""
    result = np.zeros(len(reward))
    for t in range(len(reward)):
        weight = 1.0
        for k in range(t, min(t + n, len(reward))):
            result[t] += weight * reward[k]
            weight *= discount[k]
            if last[k]:
                break
        result[t] += weight * next_value[k]
    return result


def lambda_oracle(reward, discount, next_value, last, lambda_):
    """The forward view: n-step returns with weights (1 - lambda) lambda^(n - 1), the rest for the longest."""
    num_steps = len(reward)
    n_steps = [n_step_oracle(reward, discount, next_value, last, n) for n in range(1, num_steps + 1)]
    result = np.zeros(num_steps)
    for t in range(num_steps):
        ends = np.flatnonzero(last[t:])
        longest = ends[0] + 1 if len(ends) else num_steps - t
        for n in range(1, longest):
            result[t] += (1 - lambda_) * lambda_ ** (n - 1) * n_steps[n - 1][t]
        result[t] += lambda_ ** (longest - 1) * n_steps[longest - 1][t]
    return result


def each_environment(oracle, *arrays, argument):
    return np.stack([oracle(*(x[:, i].astype(float) for x in arrays), argument) for i in range(arrays[0].shape[1])], 1)


@given(seed=seeds, shape=shapes, lambda_=lambdas)
def test_lambda_returns_match_forward_view(seed, shape, lambda_):
    *arrays, _ = history(seed, shape)
    expected = each_environment(lambda_oracle, *arrays, argument=lambda_)
    result = lambda_returns(*arrays, lambda_)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    with target.tracing_for("gpu"):
        np.testing.assert_allclose(on_accelerator(*arrays, lambda_), expected, rtol=1e-5, atol=1e-5)


@given(seed=seeds, shape=shapes, lambda_=lambdas)
def test_gae_matches_sum_of_discounted_td_errors(seed, shape, lambda_):
    """A[t] = delta[t] + discount[t] * lambda * A[t + 1], cut at last, where next_value[t] is value[t + 1]."""
    reward, discount, next_value, last, _ = history(seed, shape)
    value = np.concatenate([np.full_like(next_value[:1], 0.5), next_value[:-1]])
    delta = reward + discount * next_value - value
    expected, following = np.zeros(shape), np.zeros(shape[1])
    for t in reversed(range(shape[0])):
        following = expected[t] = delta[t] + discount[t] * lambda_ * ~last[t] * following
    result = gae(reward, discount, value, next_value, last, lambda_)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@given(seed=seeds, shape=shapes, lambda_=lambdas)
def test_reset_rows_do_not_affect_other_rows(seed, shape, lambda_):
    reward, discount, next_value, last, valid = history(seed, shape)
    valid[0] = True  # the rollout starts with a valid row
    disturbed = [np.where(valid, x, 1e6).astype(np.float32) for x in (reward, discount, next_value)]
    calm = lambda_returns(reward, discount, next_value, last, lambda_)
    np.testing.assert_array_equal(
        np.where(valid, calm, 0), np.where(valid, lambda_returns(*disturbed, last, lambda_), 0)
    )


@given(seed=seeds, lambda_=lambdas)
def test_lambda_returns_do_not_cross_episode_end(seed, lambda_):
    """All episodes end at row 6, so rows 0 to 6 alone give the same returns."""
    *arrays, last, _ = history(seed, (16, 4))
    last[6] = True
    whole = lambda_returns(*arrays, last, lambda_)
    first = lambda_returns(*(x[:7] for x in (*arrays, last)), lambda_)
    np.testing.assert_allclose(whole[:7], first, rtol=1e-6, atol=1e-6)


def column(*numbers):
    return jnp.array(numbers, jnp.float32)[:, None]


HALF = {"reward": column(1, 2, 3), "next_value": column(10, 20, 30), "lambda_": 0.5}


def test_truncation_bootstraps_and_cuts_return():
    last = jnp.array([[False], [True], [False]])
    result = returns.lambda_returns(**HALF, discount=column(0.5, 0.5, 0.5), last=last)
    # 2 + .5 * 20 = 12, independent of later rows;  1 + .5 * (.5 * 10 + .5 * 12) = 6.5
    np.testing.assert_array_equal(result, column(6.5, 12, 18))


def test_termination_does_not_bootstrap():
    last = jnp.array([[False], [True], [False]])
    result = returns.lambda_returns(**HALF, discount=column(0.5, 0, 0.5), last=last)
    # 2;  1 + .5 * (.5 * 10 + .5 * 2) = 4
    np.testing.assert_array_equal(result, column(4, 2, 18))


def test_environments_and_seeds_are_independent():
    """The oracle is a separate call for each seed and environment."""
    batch = [np.stack(xs) for xs in zip(*(history(seed, (7, 3))[:4] for seed in range(2)))]
    together = jax.vmap(lambda *xs: returns.lambda_returns(*xs, 0.8))(*batch)
    for seed in range(2):
        for i in range(3):
            alone = returns.lambda_returns(*(x[seed][:, i : i + 1] for x in batch), 0.8)
            np.testing.assert_allclose(together[seed][:, i : i + 1], alone, rtol=1e-6, atol=1e-6)


X = np.concatenate([-np.logspace(5, -5, 40), [0.0], np.logspace(-5, 5, 40)])


def test_value_rescaling_matches_64_bit_formula():
    """The formulas of Pohlen et al. 2018 in 64 bits, where their cancellations do no harm; epsilon is 1 / 1000."""
    forward = np.sign(X) * (np.sqrt(np.abs(X) + 1) - 1) + X / 1000
    root = np.sqrt(1 + 0.004 * (np.abs(X) + 1.001))
    inverse = np.sign(X) * (((root - 1) / 0.002) ** 2 - 1)
    np.testing.assert_allclose(jax.jit(returns.rescale)(jnp.float32(X)), forward, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(jax.jit(returns.unrescale)(jnp.float32(X)), inverse, rtol=1e-5, atol=1e-10)


@given(num_steps=st.integers(1, 9), reverse=st.booleans(), seed=seeds)
def test_running_sums_are_those_of_a_loop(num_steps, reverse, seed):
    draw = np.random.default_rng(seed)
    factor, x, first = (draw.normal(size=shape).astype(np.float32) for shape in ((num_steps, 2), (num_steps, 2), (2,)))
    wanted, sums = np.zeros_like(x), first
    for t in reversed(range(num_steps)) if reverse else range(num_steps):
        wanted[t] = sums = factor[t] * sums + x[t]
    found = returns.running_sums(*map(jnp.asarray, (factor, x, first)), reverse)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
