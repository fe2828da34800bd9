"""optim: Adam's first steps, clipping of the gradient norm, and learning rate schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.options.optimizer import SCHEDULES, Adam, Cosine
from jaxrl_fast.rl.optim import make_optimizer, schedule_of
from jaxrl_fast.types import MAX_FLAT

pytestmark = pytest.mark.unit
LINEAR = SCHEDULES["linear"]


@pytest.mark.parametrize("final", [0.0, 0.5])
def test_cosine_schedule_ends_at_share_of_rate(final):
    schedule = schedule_of(0.2, Cosine(final), 8)
    share = final + (1 - final) * (1 + np.cos(np.pi * np.minimum(np.arange(10), 8) / 8)) / 2
    np.testing.assert_allclose([schedule(step) for step in range(10)], 0.2 * share, rtol=1e-5, atol=1e-7)


def steps_of(optimizer, gradients, params):
    """The parameters after each gradient."""
    state, found = optimizer.init(params), []
    for gradient in gradients:
        update, state = optimizer.update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, update)
        found.append(params)
    return found, state


def adam(gradients, rate, epsilon, bound):
    """Adam in a plain loop, with the gradient norm clipped (Kingma & Ba 2015, algorithm 1)."""
    m = v = x = np.zeros(len(gradients[0]))
    found = []
    for t, g in enumerate(gradients, start=1):
        norm = np.sqrt((g**2).sum())
        g = g if bound == 0 or norm < bound else g * bound / norm
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x = x - rate(t - 1) * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + epsilon)
        found.append(x)
    return np.array(found)


@pytest.mark.parametrize("size", [MAX_FLAT, MAX_FLAT + 1])
@pytest.mark.parametrize("bound", [0, 0.5, 100.0])
def test_optimizer_matches_adam_with_clipped_gradient_norm(size, bound):
    """Up to MAX_FLAT parameters are one vector, more are leaves. With a large epsilon the gradient's scale matters."""
    gradients = np.zeros((3, size))
    gradients[:, :3] = [[3.0, -4.0, 0.5], [0.1, 0.2, -0.1], [-1.0, 0.0, 2.0]]
    tree = lambda x: {"a": jnp.float32(x[:2]), "b": jnp.float32(x[2:])}
    optimizer = make_optimizer(0.1, Adam(0.3, max_grad_norm=bound, kind="adam"))
    found, state = steps_of(optimizer, [tree(g) for g in gradients], tree(np.zeros(size)))
    expected = adam(gradients, lambda t: 0.1, 0.3, bound)
    np.testing.assert_allclose([np.concatenate([x["a"], x["b"]])[:4] for x in found], expected[:, :4], rtol=2e-5)
    is_flat = any(x.shape == (size,) for x in jax.tree.leaves(state))
    assert is_flat == (size == MAX_FLAT)


def test_traced_max_grad_norm_of_0_clips_gradient_to_zero():
    """Only a Python 0 disables clipping. A traced number cannot select the program."""

    def run(bound, gradient):
        optimizer = make_optimizer(0.1, Adam(1.0, max_grad_norm=bound, kind="adam"))
        return optimizer.update(gradient, optimizer.init(gradient), gradient)[0]

    assert np.all(jax.jit(run)(0.0, jnp.array([3.0, 4.0])) == 0)


def test_radam_starts_with_plain_momentum():
    """Before the variance is tractable, a step is the mean gradient (Liu et al. 2020, algorithm 2): 0.1 * 2 = 0.2."""
    optimizer = make_optimizer(0.1, Adam(kind="radam"))
    found, _ = steps_of(optimizer, [jnp.array([2.0])] * 3, jnp.zeros(1))
    np.testing.assert_allclose(found, [[-0.2], [-0.4], [-0.6]], rtol=1e-6)


def test_last_optimizer_state_counts_steps_of_schedule():
    optimizer = make_optimizer(schedule_of(0.1, LINEAR, 4), Adam(kind="adam"))
    found, state = steps_of(optimizer, [jnp.array([2.0])] * 3, jnp.zeros(1))
    assert state[-1].count == 3
    np.testing.assert_allclose(found, [[-0.1], [-0.175], [-0.225]], rtol=2e-5)  # 0.1, 0.075 and 0.05


@pytest.mark.parametrize("kind", ["linear", "constant"])
def test_linear_schedule_ends_at_zero_and_constant_schedule_stays(kind):
    schedule = schedule_of(0.8, SCHEDULES[kind], 4)
    expected = [0.8, 0.6, 0.4, 0.2, 0.0, 0.0] if kind == "linear" else [0.8] * 6
    np.testing.assert_allclose([schedule(count) for count in range(6)], expected, rtol=1e-6)


@pytest.mark.parametrize("num_steps", [3, 1000, 12_345])
def test_linear_schedule_is_never_negative(num_steps):
    counts = jnp.arange(num_steps - 2, num_steps + 2)
    assert np.all(np.asarray(jax.vmap(schedule_of(2.5e-4, LINEAR, num_steps))(counts)) >= 0)


def test_linear_schedule_rejects_more_steps_than_int32():
    schedule_of(1e-3, LINEAR, 2**31 - 1)
    with pytest.raises(ValueError, match="at most 2147483647 gradient steps, got 2147483648"):
        schedule_of(1e-3, LINEAR, 2**31)
