"""distributions: against scipy and integrals, sampling frequencies, and the far ends of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from jaxrl_fast.rl.distributions import Categorical, EpsilonGreedy, Gaussian, TanhGaussian

pytestmark = pytest.mark.unit

NUM_SAMPLES = 200_000
LOGITS = np.array([[0.3, -1.0, 2.0, 0.0], [5.0, 5.0, -5.0, 1.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
MEAN, LOG_STD = np.array([[0.5, -1.0], [0.0, 2.0]], np.float32), np.array([[-1.0, 0.3], [0.0, -2.0]], np.float32)
CONTINUOUS = [Gaussian, TanhGaussian]


def repeat(distribution, num_samples=NUM_SAMPLES):
    """The same distribution num_samples times, as a leading axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_samples, *leaf.shape)), distribution)


def gradients_are_finite(function, *arguments):
    return all(bool(jnp.isfinite(g).all()) for g in jax.grad(function, argnums=range(len(arguments)))(*arguments))


# Categorical


@pytest.mark.parametrize("offset", [0, 1e4, -1e4])
def test_categorical_agrees_with_scipy(offset):
    """Adding a constant to all logits changes nothing but their own rounding, 1e4 * 6e-8."""
    policy, probs = Categorical(jnp.asarray(LOGITS + offset)), scipy.special.softmax(LOGITS, -1)
    tolerance = {"rtol": 1e-5, "atol": 1e-6 if offset == 0 else 2e-3}
    for action in range(4):
        np.testing.assert_allclose(policy.log_prob(jnp.full(3, action)), np.log(probs[:, action]), **tolerance)
    np.testing.assert_allclose(policy.entropy(), scipy.stats.entropy(probs, axis=-1), **tolerance)
    other = Categorical(policy.logits[::-1])
    np.testing.assert_allclose(policy.kl(other), scipy.stats.entropy(probs, probs[::-1], axis=-1), **tolerance)
    np.testing.assert_array_equal(policy.mode(), [2, 0, 0])


def test_categorical_samples_with_its_probabilities():
    """Chi-square with 3 degrees of freedom for each row."""
    actions = np.asarray(repeat(Categorical(LOGITS)).sample(jax.random.key(0)))
    assert actions.dtype == np.int32
    for row, probs in enumerate(scipy.special.softmax(LOGITS.astype(float), -1)):
        counts = np.bincount(actions[:, row], minlength=4)
        assert scipy.stats.chisquare(counts, NUM_SAMPLES * probs).pvalue > 1e-3


def test_a_forbidden_action_is_never_taken_and_harms_nothing():
    """Logits of -inf: as if the action did not exist, in values and gradients."""
    masked, without = jnp.array([1.0, -jnp.inf, 0.5]), jnp.array([1.0, 0.5])
    assert not (repeat(Categorical(masked)).sample(jax.random.key(1)) == 1).any()
    assert Categorical(masked).log_prob(jnp.int32(1)) == -jnp.inf
    for statistic in (
        lambda logits: Categorical(logits).entropy(),
        lambda logits: Categorical(logits).log_prob(jnp.int32(0)),
        lambda logits: Categorical(logits).kl(Categorical(logits * 0.5)),
    ):
        np.testing.assert_allclose(statistic(masked), statistic(without), rtol=1e-6)
        gradient = jax.grad(statistic)(masked)
        np.testing.assert_allclose(gradient[jnp.array([0, 2])], jax.grad(statistic)(without), rtol=1e-5, atol=1e-7)
        assert gradient[1] == 0


@pytest.mark.parametrize("logits", [[1e30, 0.0], [-1e30, 0.0], [200.0, -200.0], [3e38, -3e38]])
def test_categorical_stays_finite_at_extremes(logits):
    logits = jnp.array(logits)
    assert jnp.isfinite(Categorical(logits).entropy())
    assert gradients_are_finite(lambda logits: Categorical(logits).entropy(), logits)
    assert gradients_are_finite(lambda logits: Categorical(logits).log_prob(jnp.int32(1)), logits)


def test_log_prob_gradient_is_one_hot_less_probabilities():
    logits, action = jnp.asarray(LOGITS), jnp.array([1, 0, 3])
    gradient = jax.grad(lambda logits: Categorical(logits).log_prob(action).sum())(logits)
    np.testing.assert_allclose(gradient, np.eye(4)[action] - scipy.special.softmax(LOGITS, -1), atol=1e-6)


# EpsilonGreedy

VALUE = np.array([[0.0, 3.0, 1.0, 2.0], [5.0, -1.0, 5.0, 0.0]], np.float32)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy_samples_with_its_probabilities(epsilon):
    """Chi-square for each row: epsilon / 4 for any action, and 1 - epsilon more for the first of the best."""
    actions = np.asarray(repeat(EpsilonGreedy(VALUE, np.full(2, epsilon, np.float32))).sample(jax.random.key(0)))
    assert actions.dtype == np.int32
    for row, best in enumerate((1, 0)):
        counts = np.bincount(actions[:, row], minlength=4)
        expected = NUM_SAMPLES * (epsilon / 4 + (1 - epsilon) * np.eye(4)[best])
        np.testing.assert_array_equal(counts[expected == 0], 0)
        if epsilon:
            assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3


def test_each_row_has_its_own_epsilon():
    epsilon = jnp.tile(jnp.float32([0.0, 0.2, 1.0]), (NUM_SAMPLES, 1))
    policy = EpsilonGreedy(jnp.broadcast_to(VALUE[0], (NUM_SAMPLES, 3, 4)), epsilon)
    greedy = np.asarray(policy.sample(jax.random.key(1)) == 1).mean(0)
    np.testing.assert_allclose(greedy, [1, 0.85, 0.25], atol=5e-3)  # 1 - 3/4 epsilon


def test_epsilon_greedy_worked_by_hand():
    # four actions of a quarter each: .24 is action 0, .25 action 1, .99 action 3; the coin must be below epsilon
    coin, place = [0.1, 0.1, 0.1, 0.3, 0.3, 0.9], [0.24, 0.25, 0.99, 0.99, 0.0, 0.0]
    policy = EpsilonGreedy(np.tile(VALUE[0][[0, 2, 1, 3]], (6, 1)), jnp.float32([0.3] * 6))
    np.testing.assert_array_equal(policy.sample_from(jnp.float32([coin, place])), [0, 1, 3, 2, 2, 2])


@pytest.mark.parametrize("num_actions", [1, 3, 18, 1000])
def test_the_ends_of_the_uniform_numbers_are_actions(num_actions):
    """The largest float32 below 1 times the number of actions may round up to it. An epsilon of 0 never explores."""
    place = np.float32([0, np.nextafter(np.float32(1), np.float32(0))])
    value = np.zeros((2, num_actions), np.float32)
    explore = EpsilonGreedy(value, 1.0).sample_from(jnp.stack([jnp.zeros(2), place]))
    np.testing.assert_array_equal(explore, [0, num_actions - 1])
    np.testing.assert_array_equal(EpsilonGreedy(value, 0.0).sample_from(jnp.stack([jnp.zeros(2), place])), 0)


# Gaussian


def test_gaussian_agrees_with_scipy():
    policy, normal = Gaussian(MEAN, LOG_STD), scipy.stats.norm(MEAN.astype(float), np.exp(LOG_STD.astype(float)))
    action = np.array([[0.1, 0.2], [-3.0, 2.5]], np.float32)
    np.testing.assert_allclose(policy.log_prob(action), normal.logpdf(action).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(policy.entropy(), normal.entropy().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(policy.mode(), MEAN)


def test_gaussian_kl_worked_by_hand():
    # N(1, 1) from N(0, 2^2): log 2 + (1 + 1) / (2 * 4) - 1 / 2 = 0.6931 - 0.25
    one, two = Gaussian(jnp.ones(1), jnp.zeros(1)), Gaussian(jnp.zeros(1), jnp.log(2 * jnp.ones(1)))
    np.testing.assert_allclose(one.kl(two), np.log(2) - 0.25, rtol=1e-6)
    np.testing.assert_allclose(one.kl(one), 0, atol=1e-7)


@pytest.mark.parametrize("kind", CONTINUOUS)
def test_one_log_std_serves_all_states(kind):
    shared = np.array([-1.0, 0.5], np.float32)
    narrow, wide = kind(MEAN, shared), kind(MEAN, np.broadcast_to(shared, MEAN.shape))
    action = wide.mode() + 0.01
    np.testing.assert_array_equal(narrow.log_prob(action), wide.log_prob(action))
    np.testing.assert_array_equal(narrow.entropy(), wide.entropy())
    np.testing.assert_array_equal(narrow.sample(jax.random.key(0)), wide.sample(jax.random.key(0)))
    np.testing.assert_array_equal(narrow.kl(kind(MEAN + 1, shared)), wide.kl(kind(MEAN + 1, shared)))


@pytest.mark.parametrize("kind", CONTINUOUS)
def test_continuous_samples_follow_the_density(kind):
    """Kolmogorov-Smirnov, coordinate by coordinate, before the tanh where there is one."""
    samples = np.asarray(repeat(kind(MEAN, LOG_STD), 20_000).sample(jax.random.key(0)), float)
    for index in np.ndindex(MEAN.shape):
        normal = scipy.stats.norm(MEAN[index], np.exp(LOG_STD[index]))
        assert scipy.stats.kstest(samples[:, *index], normal.cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    ("policy", "noise"),
    [
        (Categorical(LOGITS), lambda key: jax.random.gumbel(key, (3, 4))),
        (Gaussian(MEAN, LOG_STD), lambda key: jax.random.normal(key, (2, 2))),
        (TanhGaussian(MEAN, LOG_STD), lambda key: jax.random.normal(key, (2, 2))),
        (EpsilonGreedy(VALUE, 0.5), lambda key: jax.random.uniform(key, (2, 2))),
    ],
)
def test_noise_may_be_drawn_elsewhere(policy, noise):
    key = jax.random.key(3)
    np.testing.assert_array_equal(policy.sample(key), policy.sample_from(noise(key)))


# TanhGaussian


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.0, -1.0), (-2.0, 0.5), (0.3, -3.0)])
def test_tanh_gaussian_is_a_density_with_its_entropy(mean, log_std):
    """Integrals over actions, at 400,001 points that are denser towards -1 and 1."""
    x = np.linspace(-8, 8, 400_001)
    policy = TanhGaussian(np.full((1, 1), mean, np.float32), np.full((1, 1), log_std, np.float32))
    log_density = np.asarray(policy.log_prob(x.astype(np.float32)[:, None]), float)
    density, actions = np.exp(log_density), np.tanh(x)
    np.testing.assert_allclose(np.trapezoid(density, actions), 1, atol=1e-3)
    np.testing.assert_allclose(policy.entropy()[0], -np.trapezoid(density * log_density, actions), atol=2e-3)


def test_tanh_gaussian_log_prob_worked_by_hand():
    # at action 0.5 of tanh(N(0, 1)): x = atanh .5 = .549306;  -x^2 / 2 - log(2 pi) / 2 - log(1 - .25) = -.782125
    policy = TanhGaussian(jnp.zeros(1), jnp.zeros(1))
    expected = -(np.arctanh(0.5) ** 2) / 2 - np.log(2 * np.pi) / 2 - np.log(0.75)
    np.testing.assert_allclose(expected, -0.782125, atol=1e-6)
    np.testing.assert_allclose(policy.log_prob(jnp.array([np.arctanh(0.5)])), expected, rtol=1e-6)


@pytest.mark.parametrize("x", [0.0, 8.0, -20.0, 50.0])
def test_tanh_gaussian_stays_right_where_the_action_rounds_to_one(x):
    """log p = log N(x) - log tanh'(x), and log tanh'(x) = 2 log 2 - 2 |x| to float64 beyond |x| = 20."""
    policy = TanhGaussian(jnp.array([x + 0.1]), jnp.array([-2.0]))
    log_slope = 2 * (np.log(2) - abs(x) - np.log1p(np.exp(-2 * abs(x))))
    expected = scipy.stats.norm(x + 0.1, np.exp(-2)).logpdf(x) - log_slope
    np.testing.assert_allclose(policy.log_prob(jnp.array([x])), expected, rtol=1e-4)


@pytest.mark.parametrize("mean", [0.0, 30.0, -1e4])
def test_tanh_gaussian_gradients_are_finite_where_tanh_is_flat(mean):
    def both(mean, log_std):
        policy = TanhGaussian(mean, log_std)
        x = policy.sample(jax.random.key(0))
        return jnp.tanh(x).sum() + policy.log_prob(x) + policy.entropy()

    assert gradients_are_finite(both, jnp.array([mean]), jnp.array([0.0]))


def test_a_bijection_changes_no_divergence():
    one, two = (MEAN, LOG_STD), (MEAN[::-1], LOG_STD[::-1])
    np.testing.assert_array_equal(TanhGaussian(*one).kl(TanhGaussian(*two)), Gaussian(*one).kl(Gaussian(*two)))
    np.testing.assert_array_equal(TanhGaussian(*one).mode(), MEAN)
