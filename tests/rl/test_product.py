"""Products of distributions: sums of the parts' log-probabilities, entropies and divergences, by scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.ppo import PPO
from jaxrl_fast.rl import policies, product
from jaxrl_fast.rl.distributions import Gaussian, TanhGaussian
from jaxrl_fast.types import EnvSpec
from jaxrl_fast.types.spaces import Hybrid

SPACE = Hybrid((2, 3), 2)
PROBS = np.array([0.25, 0.75]), np.array([0.2, 0.3, 0.5])
MEAN, STD = np.array([0.5, -1.0]), np.array([0.5, 2.0])


def made(**options):
    head = product.ProductHead(SPACE, **options)
    outputs = jnp.float32(np.concatenate([*map(np.log, PROBS), MEAN]))[None]
    if "offset" in options:
        outputs = jnp.concatenate([outputs, jnp.float32(np.log(STD))[None] - options["offset"]], axis=1)
    assert outputs.shape[1] == head.num_outputs
    return head, head.make(outputs, None if "offset" in options else jnp.float32(np.log(STD)))


@pytest.mark.parametrize("options", [{}, dict(offset=0.5)])
def test_log_prob_entropy_and_mode_match_scipy(options):
    head, pi = made(**options)
    action = np.array([1, 0, 0.7, 0.1])
    expected = np.log(PROBS[0][1]) + np.log(PROBS[1][0]) + scipy.stats.norm(MEAN, STD).logpdf(action[2:]).sum()
    np.testing.assert_allclose(pi.log_prob(jnp.float32(action)[None]), [expected], rtol=1e-5)
    entropy = sum(map(scipy.stats.entropy, PROBS)) + scipy.stats.norm(MEAN, STD).entropy().sum()
    np.testing.assert_allclose(pi.entropy(), [entropy], rtol=1e-5)
    np.testing.assert_allclose(pi.mode(), [[1, 2, *MEAN]], rtol=1e-6)
    assert (head.init(0.0) is None) == bool(options)


def test_tanh_applies_to_numbers_only():
    head, pi = made(squash=True)
    assert isinstance(pi.numbers, TanhGaussian)
    np.testing.assert_allclose(head.to_action(pi.mode()), [[1, 2, *np.tanh(MEAN)]], rtol=1e-6)


def test_kl_is_sum_of_parts_and_zero_to_itself():
    _, pi = made()
    other = pi._replace(numbers=Gaussian(pi.numbers.mean + 1, pi.numbers.log_std))
    np.testing.assert_allclose(pi.kl(pi), [0], atol=1e-6)
    np.testing.assert_allclose(pi.kl(other), [(0.5 / STD**2).sum()], rtol=1e-5)


def test_samples_have_frequencies_and_moments():
    head, _ = made()
    outputs = jnp.float32(np.concatenate([*map(np.log, PROBS), MEAN]))
    pi = head.make(jnp.broadcast_to(outputs, (40_000, 7)), jnp.float32(np.log(STD)))
    noise = jax.tree.map(lambda x: x[0], head.sample_noise(jax.random.key(0), 1, 40_000))
    x = np.asarray(pi.sample_from(noise))
    assert x.dtype == np.float32
    for i, probs in enumerate(PROBS):
        np.testing.assert_allclose(np.bincount(x[:, i].astype(int)) / len(x), probs, atol=0.01)
    np.testing.assert_allclose(x[:, 2:].mean(0), MEAN, atol=0.05)
    np.testing.assert_allclose(x[:, 2:].std(0), STD, rtol=0.03)


def test_mask_forbids_choices():
    head = product.ProductHead(SPACE)
    outputs, mask = jnp.zeros((1000, 7)), jnp.broadcast_to(jnp.array([True, False, False, True, True]), (1000, 5))
    x = np.asarray(head.make(outputs, jnp.zeros(2), mask).sample(jax.random.key(0)))
    assert set(x[:, 0]) == {0} and set(x[:, 1]) == {1, 2}


def test_gsde_is_refused_in_one_line():
    spec = EnvSpec("test", jax.ShapeDtypeStruct((1,), jnp.float32), SPACE, 4)
    words = "^policy: test has actions with discrete parts, got gsde; use tanh or state_dependent$"
    with pytest.raises(ValueError, match=words):
        policies.make(configure(PPO, policy="gsde"), spec)
