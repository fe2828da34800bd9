"""value_distributions: projection on fixed atoms and quantile loss, against rlax and hand calculation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.dqn import DQN
from jaxrl_fast.options.sac import SAC
from jaxrl_fast.rl import value_distributions

pytestmark = pytest.mark.unit


def test_projection_matches_rlax(rlax):
    rng = np.random.default_rng(0)
    support = jnp.linspace(-2, 3, 11, dtype=jnp.float32)
    goal = value_distributions.Atoms(
        jnp.float32(3 * rng.normal(size=(20, 7))), jnp.float32(rng.dirichlet(np.ones(7), 20))
    )
    expected = jax.vmap(rlax.categorical_l2_project, (0, 0, None))(goal.atom, goal.weight, support)
    projected = value_distributions.project(goal, support)
    np.testing.assert_allclose(projected, expected, atol=1e-5)
    np.testing.assert_allclose(projected.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(("huber", "expected"), [(True, 0.28125), (False, 0.5)])
def test_quantile_loss_equals_hand_calculation(huber, expected):
    # quantiles 0 and 1 at levels 1/4 and 3/4, towards 2 (weight 1/4) and 0 (weight 3/4)
    # towards 2: u = 2, 1;   1/4 * 1.5 + 3/4 * .5 = .75,  without Huber 1/4 * 2 + 3/4 * 1 = 1.25
    # towards 0: u = 0, -1;  |3/4 - 1| * .5 = .125,       without Huber .25
    # 1/4 * .75 + 3/4 * .125 = .28125,                    without Huber 1/4 * 1.25 + 3/4 * .25 = .5
    goal = value_distributions.Atoms(jnp.float32([[2, 0]]), jnp.float32([[0.25, 0.75]]))
    np.testing.assert_allclose(
        value_distributions.quantile_loss(jnp.float32([[0, 1]]), goal, huber), [expected], rtol=1e-6
    )


@pytest.mark.parametrize("huber", [False, True])
def test_quantile_loss_matches_rlax(rlax, huber):
    """Both losses sum over quantiles and average over target atoms.

    rlax has no weights of atoms, so an atom of weight 3/4 is repeated three times next to one of weight 1/4.
    rlax's Huber parameter is 1, or 0 for no Huber loss.
    """
    rng = np.random.default_rng(0)
    quantile, atom = jnp.float32(rng.normal(size=(20, 5))), jnp.float32(2 * rng.normal(size=(20, 4)))
    level = (jnp.arange(5) + 0.5) / 5
    oracle = lambda atom: jax.vmap(rlax.quantile_regression_loss, (0, None, 0, None))(
        quantile, level, atom, 1.0 if huber else 0.0
    )
    equal = value_distributions.Atoms(atom, jnp.full(atom.shape, 1 / 4))
    np.testing.assert_allclose(value_distributions.quantile_loss(quantile, equal, huber), oracle(atom), rtol=1e-5)
    uneven = value_distributions.Atoms(atom[:, :2], jnp.broadcast_to(jnp.float32([0.25, 0.75]), (20, 2)))
    repeated = atom[:, jnp.array([0, 1, 1, 1])]
    np.testing.assert_allclose(value_distributions.quantile_loss(quantile, uneven, huber), oracle(repeated), rtol=1e-5)


def test_error_of_c51_is_divergence_from_projected_goal():
    """The goal lies on one of two atoms with 3/4; the output gives both 1/2. KL = 3/4 log(3/2) + 1/4 log(1/2)."""
    form = value_distributions.head_of(configure(DQN, value=dict(kind="c51", atoms=2, v_min=0.0, v_max=1.0)).value)
    goal = value_distributions.Atoms(jnp.float32([[0.25]]), jnp.ones((1, 1)))  # a quarter of the way to the second
    loss, error = value_distributions.losses(form, jnp.zeros((1, 2)), goal, jnp.float32([9.0]), False)
    np.testing.assert_allclose(loss, [np.log(2)], rtol=1e-5)
    np.testing.assert_allclose(error, [0.75 * np.log(1.5) + 0.25 * np.log(0.5)], rtol=1e-5)


# HL-Gauss

HL_GAUSS = dict(kind="hl_gauss", atoms=11, v_min=-2.0, v_max=3.0)


def hl_gauss(**options):
    return value_distributions.head_of(configure(SAC, value=HL_GAUSS | options).value)


@pytest.mark.parametrize("sigma", [0.75, 2.0])
def test_gaussian_matches_normal_distribution_within_bins(sigma):
    """The bins are half as wide as the distance 0.5 on each side of an atom: from -2.25 to 3.25."""
    head, values = hl_gauss(smoothing=sigma), np.array([-2.0, -0.7, 0.25, 3.0])
    ends = np.linspace(-2.25, 3.25, 12)
    below = scipy.stats.norm.cdf((ends[None] - values[:, None]) / (sigma * 0.5))
    expected = np.diff(below) / (below[:, -1:] - below[:, :1])
    found = value_distributions.gaussian(head, jnp.float32(values))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)


def test_gaussian_keeps_mean_of_values_inside_and_clips_others():
    head = hl_gauss()
    inside = jnp.float32([-0.5, 0.1, 1.33])
    found = value_distributions.gaussian(head, inside) @ value_distributions.support(head)
    np.testing.assert_allclose(found, inside, atol=1e-3)
    outside, edge = (value_distributions.gaussian(head, jnp.float32(x)) for x in ([-1e9, 1e9], [-2, 3]))
    np.testing.assert_array_equal(outside, edge)


def test_hl_gauss_learns_mean_of_goal():
    """Its loss is the cross entropy with the distribution of the goal's mean, its error that of the mean."""
    head, rng = hl_gauss(), np.random.default_rng(0)
    output = rng.normal(size=(4, 11))
    atom, weight = rng.normal(size=(4, 3)), rng.dirichlet(np.ones(3), 4)
    goal = value_distributions.Atoms(jnp.float32(atom), jnp.float32(weight))
    log_prob = output - np.log(np.exp(output).sum(-1, keepdims=True))
    value = (np.exp(log_prob) * np.linspace(-2, 3, 11)).sum(-1)
    np.testing.assert_allclose(value_distributions.mean(head, jnp.float32(output)), value, rtol=1e-5)
    error = (atom * weight).sum(-1) - value
    losses, errors = value_distributions.losses(head, jnp.float32(output), goal, jnp.float32(error), huber=False)
    wanted = value_distributions.gaussian(head, goal.mean)
    np.testing.assert_allclose(losses, -(np.asarray(wanted) * log_prob).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(errors, np.abs(error), rtol=1e-5)


def test_hl_gauss_rejects_reversed_bounds():
    with pytest.raises(ValueError, match=r"^value.v_min: must be less than v_max \(-3.0\), got -2.0"):
        hl_gauss(v_max=-3.0)
