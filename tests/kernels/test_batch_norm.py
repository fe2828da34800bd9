"""Test kernels.batch_norm in C and in XLA against numpy in float64, and gradients by finite differences."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.kernels import batch_norm, build
from jaxrl_fast.networks import Options, network
from tests.helpers.layers import AFTER, check_gradients

needs_c = pytest.mark.skipif(not build.is_available("batch_norm"), reason="no C compiler here: XLA normalizes")
EPSILON = 1e-3


def oracle(x, scale, offset, activation):
    """Return the layer in float64, and mean and variance: one feature at a time."""
    x, scale, offset = (z.astype(np.float64) for z in (x, scale, offset))
    y, mean, variance = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)
    for f in range(x.shape[1]):
        column = x[:, f]
        mean[f] = sum(column) / len(column)
        variance[f] = sum((column - mean[f]) ** 2) / len(column)
        y[:, f] = scale[f] * (column - mean[f]) / (variance[f] + EPSILON) ** 0.5 + offset[f]
    return AFTER[activation](y), mean, variance


def draw(seed, num_rows, width):
    rng = np.random.default_rng(seed)
    shapes = (num_rows, width), (width,), (width,), (num_rows, width)
    x, scale, offset, g = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return 3 * x + 1, scale, offset, g


def gradients(x, scale, offset, g, activation):
    return jax.grad(lambda *arrays: jnp.sum(g * batch_norm(*arrays, EPSILON, activation)[0]), (0, 1, 2))(
        x, scale, offset
    )


def check(seed, num_rows, width, activation):
    """Compare values with the oracle, and gradients along a random direction with its central differences."""
    x, scale, offset, g = draw(seed, num_rows, width)
    found = jax.jit(batch_norm, static_argnums=(3, 4))(x, scale, offset, EPSILON, activation)
    for ours, right in zip(found, oracle(x, scale, offset, activation), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-3, atol=1e-4)
    values = lambda *arrays: oracle(*arrays, activation)[0]
    check_gradients(values, (x, scale, offset), gradients(x, scale, offset, g, activation), g, seed + 1)


@needs_c
@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(
    seed=st.integers(0, 2**31 - 1),
    num_rows=st.integers(2, 9),
    width=st.integers(1, 70),
    activation=st.sampled_from(list(AFTER)),
)
def test_batch_norm_values_and_gradients_equal_float64_oracle(seed, num_rows, width, activation):
    check(seed, num_rows, width, activation)


@pytest.mark.parametrize("activation", list(AFTER))
@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_batch_norm_equals_oracle_in_c_and_in_xla(monkeypatch, kernels, activation):
    monkeypatch.setenv(build.VARIABLE, kernels)
    check(0, 13, 21, activation)


@needs_c
def test_batch_norm_of_constant_column_is_offset():
    offset = np.arange(3, dtype=np.float32)
    y, mean, variance = batch_norm(np.full((5, 3), 7, np.float32), np.ones(3, np.float32), offset, EPSILON)
    np.testing.assert_array_equal(y, offset[None].repeat(5, 0))
    np.testing.assert_array_equal((mean, variance), [[7] * 3, [0] * 3])


@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_mean_and_variance_have_no_gradient(monkeypatch, kernels):
    monkeypatch.setenv(build.VARIABLE, kernels)
    x, scale, offset, _ = draw(0, 4, 5)
    gradient = jax.grad(lambda x: sum(z.sum() for z in batch_norm(x, scale, offset, EPSILON)[1:]))(x)
    np.testing.assert_array_equal(gradient, np.zeros_like(x))


@needs_c
@pytest.mark.parametrize("batched", [(0, None, None), (None, 0, 0), (0, 0, 0)])
def test_vmapped_batch_norm_equals_single_calls_bitwise(batched):
    """Compare values and gradients bit for bit, as with twin critics and the seeds of a population."""
    *arrays, g = (np.stack(parts) for parts in zip(*(draw(seed, 6, 19) for seed in range(3))))
    take = lambda i: [x[i if axis == 0 else 0] for x, axis in zip(arrays, batched)]
    whole = [x if axis == 0 else x[0] for x, axis in zip(arrays, batched)]
    for function in (lambda *rows: batch_norm(*rows, EPSILON, "tanh"), lambda *rows: gradients(*rows, g[0], "tanh")):
        found = jax.jit(jax.vmap(function, in_axes=batched))(*whole)
        for i in range(3):
            jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), found, jax.jit(function)(*take(i)))


@needs_c
def test_flash_trains_with_c_batch_norm_for_float32_only():
    """Check a network with one block, which has three normalizations."""
    obs = jax.ShapeDtypeStruct((5,), jnp.float32)
    for dtype, count in ((jnp.float32, 3), (jnp.bfloat16, 0)):
        made = network(obs, 2, Options(kind="flash", hidden=(8,), dtype=dtype))
        params = jax.eval_shape(made.init, jax.random.key(0))
        said = str(jax.make_jaxpr(made.train)(params, made.init_stats(), jnp.zeros((4, 5))))
        assert said.count("batch_norm_forward") == count
