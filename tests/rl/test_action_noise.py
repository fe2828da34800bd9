"""action_noise: noise process against a plain loop and exact statistics, uniform numbers, rejected action spaces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import ShapeDtypeStruct

from jaxrl_fast.options.explore import Held
from jaxrl_fast.rl import action_noise
from jaxrl_fast.types import Box, Discrete, EnvSpec, MultiDiscrete

pytestmark = pytest.mark.unit


def noise_process(theta, normal):
    """The values [T, N, D] of the noise process from its initial carry."""
    start = jax.tree.map(lambda x: jnp.broadcast_to(x, normal.shape[1:]), action_noise.initial_carry(2, theta))

    def once(carry, normal):
        x, carry = action_noise.correlated(theta, carry, normal)
        return carry, x

    return np.asarray(jax.lax.scan(once, start, normal)[1])


def draw(num_steps, num_envs, seed=0):
    return action_noise.sample_noise(2, jax.random.key(seed), num_steps, num_envs)


def test_sample_noise_has_step_index_and_normal_numbers():
    noise = draw(5, 3)
    np.testing.assert_array_equal(noise.step, range(5))
    assert noise.normal.shape == (5, 3, 2) and noise.step.dtype == jnp.int32


def test_sample_noise_is_standard_normal_and_uncorrelated():
    normal = np.asarray(draw(4000, 3).normal, float)
    assert scipy.stats.kstest(normal.ravel(), "norm").pvalue > 1e-3  # 24,000 numbers
    of_each = np.corrcoef(normal.reshape(4000, 6), rowvar=False)
    np.testing.assert_allclose(of_each, np.eye(6), atol=0.06)  # 4 standard deviations of 1 / sqrt(4000)
    assert abs(np.corrcoef(normal[1:].ravel(), normal[:-1].ravel())[0, 1]) < 0.03


@settings(max_examples=10)
@given(st.floats(0.01, 1))
def test_correlated_noise_matches_plain_loop(theta):
    normal = draw(20, 3).normal
    x, expected = np.zeros((3, 2)), []
    for n in np.asarray(normal, float):
        x = x - theta * x + np.sqrt(theta * (2 - theta)) * n  # 1 - (1 - theta)^2 = theta (2 - theta)
        expected.append(x)
    np.testing.assert_allclose(noise_process(theta, normal), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("theta", [0.15, 0.5])
def test_correlated_noise_has_unit_variance_and_geometric_autocorrelation(theta):
    """After 100 steps, the variance is 1 and the correlation over k steps is (1 - theta)^k."""
    x = noise_process(theta, draw(3000, 40).normal)[100:].reshape(2900, 80).astype(float)
    assert x.var() == pytest.approx(1, abs=0.03)
    for k in (1, 3):
        correlation = (x[k:] * x[:-k]).mean() / x.var()
        assert correlation == pytest.approx((1 - theta) ** k, abs=0.02)


def test_correlated_noise_starts_at_zero():
    """After k steps the variance is 1 - (1 - theta)^2k."""
    x = noise_process(0.15, draw(4, 20_000).normal).astype(float)
    np.testing.assert_allclose((x**2).mean((1, 2)), 1 - 0.85 ** (2 * np.arange(1, 5)), rtol=0.03)


def test_correlated_noise_is_uncorrelated_between_environments_and_dimensions():
    x = noise_process(0.5, draw(20_000, 2).normal)[50:].reshape(-1, 4)
    np.testing.assert_allclose(np.corrcoef(x, rowvar=False), np.eye(4), atol=0.06)


def test_uniform_is_scaled_normal_cdf():
    x = jnp.linspace(-6, 6, 101)
    np.testing.assert_allclose(action_noise.uniform(x), 2 * scipy.stats.norm.cdf(x) - 1, atol=1e-6)


def test_uniform_of_normal_noise_is_uniformly_distributed():
    x = np.asarray(action_noise.uniform(draw(10_000, 1).normal), float).ravel()
    assert scipy.stats.kstest(x, "uniform", args=(-1, 2)).pvalue > 1e-3
    assert np.abs(x).max() <= 1


@pytest.mark.parametrize("extreme", [50.0, 1e30, jnp.inf])
def test_uniform_stays_within_bounds_for_extreme_inputs(extreme):
    np.testing.assert_array_equal(action_noise.uniform(jnp.float32([-extreme, 0, extreme])), [-1, 0, 1])


def spec(action):
    return EnvSpec("test", ShapeDtypeStruct((1,), jnp.float32), action, 1)


def test_action_size_is_length_of_action_vector():
    assert action_noise.action_size(spec(Box((3,))), "sac") == 3


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Discrete(2), r"^sac: requires continuous actions, got Discrete\(num=2\) of test; try dqn, ppo or sac$"),
        (MultiDiscrete((2, 3)), r"^sac: requires continuous actions, got MultiDiscrete.*; try dqn, ppo or sac$"),
        (Box((2, 2)), r"^sac: requires actions of shape \[D\], got \[2, 2\] of test; flatten them$"),
        (Box(()), r"^sac: requires actions of shape \[D\], got \[\] of test; flatten them$"),
    ],
)
def test_action_size_rejects_other_action_spaces(action, words):
    with pytest.raises(ValueError, match=words):
        action_noise.action_size(spec(action), "sac")


# Held noise


def held(options, num_steps, num_envs, seed=0, size=2):
    """The noise [T, N, D], and the numbers [T, N, D + 1] from which it is made."""
    normal = action_noise.sample_noise(size + 1, jax.random.key(seed), num_steps, num_envs).normal
    start = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_envs, *x.shape)), action_noise.held_carry(size))

    def once(carry, normal):
        x, carry = action_noise.hold(options, carry, normal)
        return carry, x

    return np.asarray(jax.lax.scan(once, start, normal)[1]), np.asarray(normal)


def test_held_noise_matches_plain_loop():
    """Each environment draws separately (the authors' environments share one length), and keeps the drawn numbers."""
    options = Held(exponent=2.0, longest=4)
    chance = np.arange(1, 5) ** -2.0
    chance /= chance.sum()
    found, normal = held(options, 30, 5)
    for n in range(5):
        left = 0
        for t in range(30):
            if left == 0:
                x, level, left = normal[t, n, :2], scipy.stats.norm.cdf(normal[t, n, 2]), 0
                while level > chance[: left + 1].sum() and left < 3:
                    left += 1
                left += 1
            np.testing.assert_array_equal(found[t, n], x)
            left -= 1


def test_lengths_of_held_noise_follow_zeta_law():
    """Of runs that end within 20,000 steps, the frequencies of 1 to 16 steps are n^-2 / sum."""
    found, _ = held(Held(), 20_000, 1)
    begins = np.flatnonzero(np.concatenate([[True], (found[1:] != found[:-1]).any(axis=(1, 2))]))
    lengths = np.diff(begins)
    chance = np.arange(1, 17) ** -2.0
    expected = len(lengths) * chance / chance.sum()
    assert lengths.max() <= 16 and (lengths == 16).any()
    assert scipy.stats.chisquare(np.bincount(lengths, minlength=17)[1:], expected).pvalue > 1e-3
