"""networks.batch_renorm: against a plain loop over features, and its running statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast.networks import Options
from jaxrl_fast.networks.batch_renorm import BatchRenorm, RenormOptions, with_stats
from jaxrl_fast.networks.ensemble import critics

MOMENTUM = 0.9


def plain(x, scale, offset, running, warm):
    """Ioffe 2017, algorithm 1, a feature at a time; the running variance is kept instead of the deviation."""
    y, after = np.empty_like(x), []
    for f in range(x.shape[1]):
        mean, var = sum(x[:, f]) / len(x), sum((x[:, f] - sum(x[:, f]) / len(x)) ** 2) / len(x)
        old_mean, old_var = running[f]
        s, old_s = (var + 1e-3) ** 0.5, (old_var + 1e-3) ** 0.5
        r = min(max(s / old_s, 1 / 3), 3) if warm else 1
        d = min(max((mean - old_mean) / old_s, -5), 5) if warm else 0
        y[:, f] = scale[f] * ((x[:, f] - mean) / s * r + d) + offset[f]
        after.append((MOMENTUM * old_mean + (1 - MOMENTUM) * mean, MOMENTUM * old_var + (1 - MOMENTUM) * var))
    return y, after


def batches(num):
    """Of four features: one as the running statistics say, and three that reach the bounds of r and of d."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(num, 16, 4)) * [1, 9, 0.05, 1] + [0, 2, 0, 40]


@pytest.mark.parametrize("warmup", [0, 2])
def test_batch_renorm_matches_plain_loop(warmup):
    layer = BatchRenorm(RenormOptions(MOMENTUM, warmup))
    params = {"scale": jnp.float32([1, 2, -1, 0.5]), "bias": jnp.float32([0, 1, 2, 3])}
    stats, running = layer.init(jax.random.key(0), jnp.zeros((1, 4)))["batch_stats"], [(0.0, 1.0)] * 4
    train = jax.jit(lambda stats, x: layer.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]))
    for number, x in enumerate(batches(4)):
        found, changed = train(stats, jnp.float32(x))
        stats = changed["batch_stats"]
        expected, running = plain(x, *map(np.asarray, params.values()), running, number >= warmup)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(np.stack([stats["mean"], stats["var"]], 1), running, rtol=1e-5, atol=1e-5)
    mean, var = np.transpose(running)
    expected = np.asarray(params["scale"]) * (x - mean) / np.sqrt(var + 1e-3) + np.asarray(params["bias"])
    np.testing.assert_allclose(
        layer.apply({"params": params, "batch_stats": stats}, jnp.float32(x)), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 1])
def test_batch_renorm_gradient_treats_corrections_as_constants(warmup):
    """Against finite differences in float64 of the plain formula with r and d held."""
    x = batches(1)[0][:, :2]
    layer, weight = BatchRenorm(RenormOptions(MOMENTUM, warmup)), np.random.default_rng(1).normal(size=x.shape)
    variables = layer.init(jax.random.key(0), jnp.zeros((1, 2)))
    loss = lambda x: (jnp.float32(weight) * layer.apply(variables, x, mutable=["batch_stats"])[0]).sum()
    found = jax.grad(loss)(jnp.float32(x))
    s = np.sqrt(x.var(0) + 1e-3)
    r = np.clip(s / np.sqrt(1 + 1e-3), 1 / 3, 3) if not warmup else 1.0
    value = lambda x: (weight * (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3) * r).sum()
    for i, j in ((0, 0), (3, 1), (15, 0)):
        step = np.zeros_like(x)
        step[i, j] = 1e-5
        np.testing.assert_allclose(found[i, j], (value(x + step) - value(x - step)) / 2e-5, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_each_critic_has_separate_statistics():
    made = critics(
        ShapeDtypeStruct((3,), jnp.float32),
        2,
        2,
        Options(hidden=(8,), batch_renorm=RenormOptions(MOMENTUM, 0)),
    )
    params, stats = jax.jit(made.init)(jax.random.key(0)), made.init_stats()
    inputs = jnp.ones((5, 3)) * jnp.arange(5.0)[:, None], jnp.ones((5, 2))
    value, stats = jax.jit(made.train)(params, stats, inputs)
    assert value.shape == (2, 5) and made.apply(with_stats(params, stats), inputs).shape == (2, 5)
    before, after = (stats["torso"]["mlp"][f"BatchRenorm_{i}"]["mean"] for i in range(2))
    np.testing.assert_allclose(before[0], [0.2, 0.2, 0.2, 0.1, 0.1], rtol=1e-5)
    np.testing.assert_array_equal(before[0], before[1])
    assert np.abs(after[0] - after[1]).max() > 1e-3
