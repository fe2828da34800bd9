"""distributions: densities against scipy and integrals, sampling frequencies, and extreme float32 inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from jaxrl_fast.rl import distributions, heads
from jaxrl_fast.rl.distributions import Categorical, EpsilonGreedy, Gaussian, MultiCategorical, TanhGaussian
from jaxrl_fast.types import Box, Discrete, MultiDiscrete

pytestmark = pytest.mark.unit

NUM_SAMPLES = 200_000
LOGITS = np.array([[0.3, -1.0, 2.0, 0.0], [5.0, 5.0, -5.0, 1.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
VALUE = np.array([[0.0, 3.0, 1.0, 2.0], [5.0, -1.0, 5.0, 0.0]], np.float32)
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
    """Adding a constant to all logits changes results only by the rounding of the logits, 1e4 * 6e-8."""
    policy, probs = Categorical(jnp.asarray(LOGITS + offset)), scipy.special.softmax(LOGITS, -1)
    tolerance = {"rtol": 1e-5, "atol": 1e-6 if offset == 0 else 2e-3}
    for action in range(4):
        np.testing.assert_allclose(policy.log_prob(jnp.full(3, action)), np.log(probs[:, action]), **tolerance)
    np.testing.assert_allclose(policy.entropy(), scipy.stats.entropy(probs, axis=-1), **tolerance)
    other = Categorical(policy.logits[::-1])
    np.testing.assert_allclose(policy.kl(other), scipy.stats.entropy(probs, probs[::-1], axis=-1), **tolerance)
    np.testing.assert_array_equal(policy.mode(), [2, 0, 0])


def test_categorical_sample_frequencies_match_probabilities():
    """Chi-square test with 3 degrees of freedom for each row."""
    actions = np.asarray(repeat(Categorical(LOGITS)).sample(jax.random.key(0)))
    assert actions.dtype == np.int32
    for row, probs in enumerate(scipy.special.softmax(LOGITS.astype(float), -1)):
        counts = np.bincount(actions[:, row], minlength=4)
        assert scipy.stats.chisquare(counts, NUM_SAMPLES * probs).pvalue > 1e-3


@pytest.mark.parametrize("logits", [[1e30, 0.0], [-1e30, 0.0], [200.0, -200.0], [3e38, -3e38]])
def test_categorical_is_finite_for_extreme_logits(logits):
    logits = jnp.array(logits)
    assert jnp.isfinite(Categorical(logits).entropy())
    assert gradients_are_finite(lambda logits: Categorical(logits).entropy(), logits)
    assert gradients_are_finite(lambda logits: Categorical(logits).log_prob(jnp.int32(1)), logits)


def test_log_prob_gradient_is_one_hot_minus_probabilities():
    logits, action = jnp.asarray(LOGITS), jnp.array([1, 0, 3])
    gradient = jax.grad(lambda logits: Categorical(logits).log_prob(action).sum())(logits)
    np.testing.assert_allclose(gradient, np.eye(4)[action] - scipy.special.softmax(LOGITS, -1), atol=1e-6)


# Masks


def test_masked_changes_only_masked_entries():
    logits, mask = jnp.asarray(LOGITS), jnp.asarray(LOGITS) > 0
    np.testing.assert_array_equal(distributions.masked(logits, mask), np.where(mask, LOGITS, distributions.FORBIDDEN))
    assert distributions.masked(logits) is logits


def test_categorical_with_masked_action_equals_one_without_action():
    """Statistics and gradients agree, including the KL divergence from another policy with the same mask."""
    mask, keep = jnp.array([True, False, True]), np.array([0, 2])
    logits, other = jnp.array([1.0, 7.0, 0.5]), jnp.array([-1.0, -3.0, 0.2])
    assert not (repeat(Categorical(distributions.masked(logits, mask))).sample(jax.random.key(1)) == 1).any()
    for statistic in (
        lambda logits, other: Categorical(logits).entropy(),
        lambda logits, other: Categorical(logits).log_prob(jnp.int32(0)),
        lambda logits, other: Categorical(logits).kl(Categorical(other)),
    ):
        shown = lambda x, y, f=statistic: f(distributions.masked(x, mask), distributions.masked(y, mask))
        without = (logits[keep], other[keep])
        np.testing.assert_allclose(shown(logits, other), statistic(*without), rtol=1e-6)
        for argument in (0, 1):
            gradient = jax.grad(shown, argument)(logits, other)
            expected = jax.grad(statistic, argument)(*without)
            np.testing.assert_allclose(gradient[keep], expected, rtol=1e-5, atol=1e-7)
            assert gradient[1] == 0


@pytest.mark.parametrize("allowed", [[1], [0, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_epsilon_greedy_explores_allowed_actions_uniformly(allowed, epsilon):
    """Chi-square test: epsilon over the number of allowed actions, and 1 - epsilon more for the best of them."""
    mask = np.isin(np.arange(4), allowed)
    value = distributions.masked(jnp.asarray(VALUE), jnp.broadcast_to(mask, VALUE.shape))
    policy = EpsilonGreedy(value, np.full(2, epsilon, np.float32), jnp.broadcast_to(mask, VALUE.shape))
    actions = np.asarray(repeat(policy).sample(jax.random.key(0)))
    assert actions.dtype == np.int32
    for row, best in enumerate(np.argmax(np.where(mask, VALUE, -np.inf), axis=-1)):
        counts = np.bincount(actions[:, row], minlength=4)
        expected = NUM_SAMPLES * (epsilon * mask / mask.sum() + (1 - epsilon) * np.eye(4)[best])
        np.testing.assert_array_equal(counts[~mask], 0)
        if len(allowed) > 1:
            assert scipy.stats.chisquare(counts[mask], expected[mask]).pvalue > 1e-3


def test_epsilon_greedy_with_mask_per_row_equals_hand_calculation():
    # allowed 1 3, 2, 0 1 2. Of two, .49 selects the first and .5 the second. The largest float32 below 1 selects the
    # last action.
    mask = jnp.array([[0, 1, 0, 1], [0, 1, 0, 1], [0, 0, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]], bool)
    which = jnp.float32([0.49, 0.5, 0.7, 0, np.nextafter(np.float32(1), np.float32(0))])
    policy = EpsilonGreedy(distributions.masked(jnp.zeros((5, 4)), mask), 1.0, mask)
    np.testing.assert_array_equal(policy.sample_from(jnp.stack([jnp.zeros(5), which])), [1, 3, 2, 0, 2])


def test_epsilon_greedy_with_full_mask_equals_one_without_mask():
    noise = jax.random.uniform(jax.random.key(0), (2, 1000, 2))
    value = jnp.broadcast_to(VALUE, (1000, 2, 4))
    found = EpsilonGreedy(value, 0.5, jnp.ones(value.shape, bool)).sample_from(noise)
    np.testing.assert_array_equal(found, EpsilonGreedy(value, 0.5).sample_from(noise))


# MultiCategorical

NUMS = (3, 1, 2)
MANY_LOGITS = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)  # of two policies in five states


def product(logits):
    """The joint distribution of independent choices: probabilities [3, 1, 2] of all combinations."""
    parts = [scipy.special.softmax(part.astype(float)) for part in np.split(logits, np.cumsum(NUMS)[:-1])]
    return np.einsum("i,j,k->ijk", *parts)


def test_multi_categorical_matches_joint_distribution_of_categoricals():
    """The joint distribution gives log_prob of each combination, entropy, KL divergence and mode."""
    one, two = (MultiCategorical(jnp.asarray(logits), NUMS) for logits in MANY_LOGITS)
    joint, other = (np.stack([product(row) for row in logits]) for logits in MANY_LOGITS)
    for action in np.ndindex(NUMS):
        found = one.log_prob(jnp.broadcast_to(jnp.int32(action), (5, 3)))
        np.testing.assert_allclose(found, np.log(joint[:, *action]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one.entropy(), -(joint * np.log(joint)).sum((1, 2, 3)), rtol=1e-5)
    divergence = (joint * np.log(joint / other)).sum((1, 2, 3))
    np.testing.assert_allclose(one.kl(two), divergence, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(one.kl(one), 0, atol=1e-6)
    best = np.stack(np.unravel_index(joint.reshape(5, -1).argmax(-1), NUMS), axis=-1)
    np.testing.assert_array_equal(one.mode(), best)
    assert one.mode().dtype == jnp.int32


@pytest.mark.slow
def test_multi_categorical_sample_frequencies_match_probabilities():
    """Chi-square test over the 6 combinations in each state, which also tests that choices are independent."""
    policy = MultiCategorical(jnp.asarray(MANY_LOGITS[0]), NUMS)
    actions = np.asarray(repeat(policy).sample(jax.random.key(0)))
    assert actions.shape == (NUM_SAMPLES, 5, 3) and actions.dtype == np.int32
    for row in range(5):
        counts = np.bincount(np.ravel_multi_index(actions[:, row].T, NUMS), minlength=6)
        assert scipy.stats.chisquare(counts, NUM_SAMPLES * product(MANY_LOGITS[0, row]).reshape(-1)).pvalue > 1e-3


def test_multi_categorical_is_pytree_of_its_logits():
    """vmap and indexing act on the logits. The numbers of actions are static."""
    policy = MultiCategorical(jnp.asarray(MANY_LOGITS), NUMS)
    assert [x.shape for x in jax.tree.leaves(policy)] == [(2, 5, 6)]
    each = jax.jit(jax.vmap(lambda policy: policy.entropy()))(policy)
    np.testing.assert_array_equal(each, policy.entropy())
    first = jax.tree.map(lambda x: x[0], policy)
    assert isinstance(first, MultiCategorical) and first.nums == NUMS and first.mode().shape == (5, 3)


def test_multi_categorical_never_samples_masked_choices():
    mask = jnp.array([True, False, True, True, False, True])
    policy = MultiCategorical(distributions.masked(jnp.asarray(MANY_LOGITS[0]), mask), NUMS)
    actions = repeat(policy, 1000).sample(jax.random.key(0))
    assert set(np.unique(actions[..., 0])) == {0, 2} and set(np.unique(actions[..., 2])) == {1}
    assert jnp.isfinite(policy.entropy()).all()


# EpsilonGreedy


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy_sample_frequencies_match_probabilities(epsilon):
    """Chi-square test for each row: epsilon / 4 for any action, and 1 - epsilon more for the first best action."""
    actions = np.asarray(repeat(EpsilonGreedy(VALUE, np.full(2, epsilon, np.float32))).sample(jax.random.key(0)))
    assert actions.dtype == np.int32
    for row, best in enumerate((1, 0)):
        counts = np.bincount(actions[:, row], minlength=4)
        expected = NUM_SAMPLES * (epsilon / 4 + (1 - epsilon) * np.eye(4)[best])
        np.testing.assert_array_equal(counts[expected == 0], 0)
        if epsilon:
            assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3


def test_epsilon_greedy_uses_epsilon_of_each_row():
    epsilon = jnp.tile(jnp.float32([0.0, 0.2, 1.0]), (NUM_SAMPLES, 1))
    policy = EpsilonGreedy(jnp.broadcast_to(VALUE[0], (NUM_SAMPLES, 3, 4)), epsilon)
    greedy = np.asarray(policy.sample(jax.random.key(1)) == 1).mean(0)
    np.testing.assert_allclose(greedy, [1, 0.85, 0.25], atol=5e-3)  # 1 - 3/4 epsilon


def test_epsilon_greedy_equals_hand_calculation():
    # four actions of a quarter each: .24 is action 0, .25 action 1, .99 action 3; coin < epsilon explores
    coin, place = [0.1, 0.1, 0.1, 0.3, 0.3, 0.9], [0.24, 0.25, 0.99, 0.99, 0.0, 0.0]
    policy = EpsilonGreedy(np.tile(VALUE[0][[0, 2, 1, 3]], (6, 1)), jnp.float32([0.3] * 6))
    np.testing.assert_array_equal(policy.sample_from(jnp.float32([coin, place])), [0, 1, 3, 2, 2, 2])


@pytest.mark.parametrize("num_actions", [1, 3, 18, 1000])
def test_epsilon_greedy_maps_extreme_uniform_numbers_to_valid_actions(num_actions):
    """The largest float32 below 1 times n may round up to n, the number of actions. Epsilon 0 never explores."""
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


def test_gaussian_kl_equals_hand_calculation():
    # N(1, 1) from N(0, 2^2): log 2 + (1 + 1) / (2 * 4) - 1 / 2 = 0.6931 - 0.25
    one, two = Gaussian(jnp.ones(1), jnp.zeros(1)), Gaussian(jnp.zeros(1), jnp.log(2 * jnp.ones(1)))
    np.testing.assert_allclose(one.kl(two), np.log(2) - 0.25, rtol=1e-6)
    np.testing.assert_allclose(one.kl(one), 0, atol=1e-7)


@pytest.mark.parametrize("kind", CONTINUOUS)
def test_shared_log_std_is_broadcast_to_all_states(kind):
    shared = np.array([-1.0, 0.5], np.float32)
    narrow, wide = kind(MEAN, shared), kind(MEAN, np.broadcast_to(shared, MEAN.shape))
    action = wide.mode() + 0.01
    np.testing.assert_array_equal(narrow.log_prob(action), wide.log_prob(action))
    np.testing.assert_array_equal(narrow.entropy(), wide.entropy())
    np.testing.assert_array_equal(narrow.sample(jax.random.key(0)), wide.sample(jax.random.key(0)))
    np.testing.assert_array_equal(narrow.kl(kind(MEAN + 1, shared)), wide.kl(kind(MEAN + 1, shared)))


@pytest.mark.parametrize("kind", CONTINUOUS)
def test_continuous_samples_match_density(kind):
    """Kolmogorov-Smirnov test for each coordinate, before the tanh if there is one."""
    samples = np.asarray(repeat(kind(MEAN, LOG_STD), 20_000).sample(jax.random.key(0)), float)
    for index in np.ndindex(MEAN.shape):
        normal = scipy.stats.norm(MEAN[index], np.exp(LOG_STD[index]))
        assert scipy.stats.kstest(samples[:, *index], normal.cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    ("policy", "noise"),
    [
        (Categorical(LOGITS), lambda key: jax.random.gumbel(key, (3, 4))),
        (MultiCategorical(MANY_LOGITS[0], NUMS), lambda key: jax.random.gumbel(key, (5, 6))),
        (Gaussian(MEAN, LOG_STD), lambda key: jax.random.normal(key, (2, 2))),
        (TanhGaussian(MEAN, LOG_STD), lambda key: jax.random.normal(key, (2, 2))),
        (EpsilonGreedy(VALUE, 0.5), lambda key: jax.random.uniform(key, (2, 2))),
        (EpsilonGreedy(VALUE, 0.5, VALUE > 0), lambda key: jax.random.uniform(key, (2, 2))),
    ],
)
def test_sample_equals_sample_from_with_same_noise(policy, noise):
    key = jax.random.key(3)
    np.testing.assert_array_equal(policy.sample(key), policy.sample_from(noise(key)))


# TanhGaussian


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.0, -1.0), (-2.0, 0.5), (0.3, -3.0)])
def test_tanh_gaussian_density_integrates_to_one_and_gives_entropy(mean, log_std):
    """The oracle is integrals over actions, at 400,001 points that are denser towards -1 and 1."""
    x = np.linspace(-8, 8, 400_001)
    policy = TanhGaussian(np.full((1, 1), mean, np.float32), np.full((1, 1), log_std, np.float32))
    log_density = np.asarray(policy.log_prob(x.astype(np.float32)[:, None]), float)
    density, actions = np.exp(log_density), np.tanh(x)
    np.testing.assert_allclose(np.trapezoid(density, actions), 1, atol=1e-3)
    np.testing.assert_allclose(policy.entropy()[0], -np.trapezoid(density * log_density, actions), atol=2e-3)


@pytest.mark.parametrize("x", [0.0, 8.0, -20.0, 50.0])
def test_tanh_gaussian_log_prob_is_accurate_when_action_rounds_to_one(x):
    """log p = log N(x) - log tanh'(x), and log tanh'(x) = 2 log 2 - 2 |x| to float64 beyond |x| = 20."""
    policy = TanhGaussian(jnp.array([x + 0.1]), jnp.array([-2.0]))
    log_slope = 2 * (np.log(2) - abs(x) - np.log1p(np.exp(-2 * abs(x))))
    expected = scipy.stats.norm(x + 0.1, np.exp(-2)).logpdf(x) - log_slope
    np.testing.assert_allclose(policy.log_prob(jnp.array([x])), expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.0, 30.0, -1e4])
def test_tanh_gaussian_gradients_are_finite_when_tanh_saturates(mean):
    def both(mean, log_std):
        policy = TanhGaussian(mean, log_std)
        x = policy.sample(jax.random.key(0))
        return jnp.tanh(x).sum() + policy.log_prob(x) + policy.entropy()

    assert gradients_are_finite(both, jnp.array([mean]), jnp.array([0.0]))


def test_tanh_gaussian_has_kl_and_mode_of_gaussian():
    one, two = (MEAN, LOG_STD), (MEAN[::-1], LOG_STD[::-1])
    np.testing.assert_array_equal(TanhGaussian(*one).kl(TanhGaussian(*two)), Gaussian(*one).kl(Gaussian(*two)))
    np.testing.assert_array_equal(TanhGaussian(*one).mode(), MEAN)


# Heads


@pytest.mark.parametrize(
    ("space", "tanh_squash", "kind", "num_outputs", "noise"),
    [
        (Discrete(4), False, Categorical, 4, (6, 5, 4)),
        (MultiDiscrete(NUMS), False, MultiCategorical, 6, (6, 5, 6)),
        (Box((2,)), False, Gaussian, 2, (6, 5, 2)),
        (Box((2,)), True, TanhGaussian, 2, (6, 5, 2)),
    ],
)
def test_head_makes_distribution_of_action_space(space, tanh_squash, kind, num_outputs, noise):
    """Noise, parameters, samples and actions have the shapes and types of the action space."""
    head = heads.head(space, tanh_squash)
    drawn = head.sample_noise(jax.random.key(0), 6, 5)
    assert (head.num_outputs, drawn.shape) == (num_outputs, noise)
    params = head.init(-0.5)
    policy = head.make(jnp.zeros((5, num_outputs)), params)
    assert isinstance(policy, kind)
    zeros = space.zeros(5)
    for sample in (policy.sample_from(drawn[0]), policy.mode()):
        action = head.to_action(sample)
        assert (action.shape, action.dtype) == (zeros.shape, zeros.dtype)
    if isinstance(space, Box):
        np.testing.assert_array_equal(params, np.float32([-0.5, -0.5]))
        np.testing.assert_array_equal(policy.log_std, np.full((5, 2), np.float32(-0.5)))
        x = jnp.float32([[3.0, -0.2]])
        np.testing.assert_allclose(head.to_action(x), np.tanh(x) if tanh_squash else x, rtol=1e-6)
    else:
        assert params is None


@pytest.mark.parametrize("space", [Discrete(6), MultiDiscrete(NUMS)])
def test_head_applies_action_mask(space):
    head, mask = heads.head(space), jnp.array([True, False, True, True, False, True])
    policy = head.make(jnp.asarray(MANY_LOGITS[0]), (), jnp.broadcast_to(mask, (5, 6)))
    np.testing.assert_array_equal(policy.logits, distributions.masked(jnp.asarray(MANY_LOGITS[0]), mask))
    np.testing.assert_array_equal(head.make(jnp.asarray(MANY_LOGITS[0]), ()).logits, MANY_LOGITS[0])


def test_head_noise_samples_from_distribution():
    """Chi-square test for Gumbel noise (discrete), Kolmogorov-Smirnov test for normal noise (continuous)."""
    noise = heads.head(Discrete(4)).sample_noise(jax.random.key(0), 1000, 20).reshape(-1, 4)
    actions = np.asarray(Categorical(jnp.asarray(np.tile(LOGITS[0], (20_000, 1)))).sample_from(noise))
    expected = 20_000 * scipy.special.softmax(LOGITS[0].astype(float))
    assert scipy.stats.chisquare(np.bincount(actions, minlength=4), expected).pvalue > 1e-3
    normal = np.asarray(heads.head(Box((2,))).sample_noise(jax.random.key(0), 1000, 20), float).reshape(-1)
    assert scipy.stats.kstest(normal, scipy.stats.norm.cdf).pvalue > 1e-3


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_head_rejects_box_that_is_not_a_vector(shape):
    with pytest.raises(ValueError, match=rf"^action: requires shape \[D\], got \[{', '.join(map(str, shape))}\]$"):
        heads.head(Box(shape))


@pytest.mark.parametrize("tanh_squash", [False, True])
def test_head_adds_offset_to_log_std_outputs(tanh_squash):
    """Means 0.3 and -0.2, standard deviations exp(-0.5 + 0.1) and exp(-0.5 - 0.4)."""
    head = heads.head(Box((2,)), tanh_squash, log_std_offset=-0.5)
    assert head.num_outputs == 4 and head.init(-0.5) is None
    pi = head.make(jnp.float32([[0.3, -0.2, 0.1, -0.4]]), ())
    sample = jnp.float32([[0.5, 0.1]])
    density = scipy.stats.norm.logpdf([0.5, 0.1], [0.3, -0.2], np.exp([-0.4, -0.9])).sum()
    slope = np.log(1 - np.tanh([0.5, 0.1]) ** 2).sum() if tanh_squash else 0
    np.testing.assert_allclose(pi.log_prob(sample), [density - slope], rtol=1e-5)
