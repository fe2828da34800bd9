"""Test kernels.layer_norm in C against numpy in float64, with gradients by finite differences, and against flax."""

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import networks
from jaxrl_fast.kernels import build, layer_norm
from jaxrl_fast.networks.dense import LayerNorm
from tests.helpers.layers import AFTER, check_gradients

pytestmark = pytest.mark.skipif(not build.is_available("layer_norm"), reason="no C compiler here: XLA normalizes")


def oracle(x, scale, offset, activation):
    """Return the layer in float64: each row minus its mean, divided by its standard deviation."""
    x, scale, offset = (z.astype(np.float64) for z in (x, scale, offset))
    normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
    return AFTER[activation](normed * scale + offset)


def draw(seed, num_rows, width):
    rng = np.random.default_rng(seed)
    shapes = (num_rows, width), (width,), (width,), (num_rows, width)
    x, scale, offset, g = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return 3 * x + 1, scale, offset, g


def gradients(x, scale, offset, g, activation):
    return jax.grad(lambda *arrays: jnp.sum(g * layer_norm(*arrays, activation)), (0, 1, 2))(x, scale, offset)


def check(seed, num_rows, width, activation):
    """Compare values with the oracle, and gradients along a random direction with its central differences."""
    x, scale, offset, g = draw(seed, num_rows, width)
    y = jax.jit(layer_norm, static_argnums=3)(x, scale, offset, activation)
    np.testing.assert_allclose(y, oracle(x, scale, offset, activation), rtol=1e-3, atol=1e-4)
    values = lambda *arrays: oracle(*arrays, activation)
    check_gradients(values, (x, scale, offset), gradients(x, scale, offset, g, activation), g, seed + 1)


@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(
    seed=st.integers(0, 2**31 - 1),
    num_rows=st.integers(0, 9),
    width=st.integers(1, 70),
    activation=st.sampled_from(list(AFTER)),
)
def test_layer_norm_values_and_gradients_equal_float64_oracle(seed, num_rows, width, activation):
    check(seed, num_rows, width, activation)


def test_layer_norm_of_constant_row_is_offset():
    y = layer_norm(np.full((2, 20), 3, np.float32), np.ones(20, np.float32), np.arange(20, dtype=np.float32))
    np.testing.assert_allclose(y, np.arange(20)[None].repeat(2, 0), atol=1e-6)


@pytest.mark.parametrize("batched", [(0, None, None), (None, 0, 0), (0, 0, 0)])
def test_vmapped_layer_norm_equals_single_calls_bitwise(batched):
    """Compare values and gradients bit for bit, as with the seeds of a population."""
    *arrays, g = (np.stack(parts) for parts in zip(*(draw(seed, 4, 19) for seed in range(3))))
    take = lambda i: [x[i if axis == 0 else 0] for x, axis in zip(arrays, batched)]
    whole = [x if axis == 0 else x[0] for x, axis in zip(arrays, batched)]
    for function in (lambda *rows: (layer_norm(*rows, "tanh"),), lambda *rows: gradients(*rows, g[0], "tanh")):
        found = jax.jit(jax.vmap(function, in_axes=batched))(*whole)
        for i in range(3):
            jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), found, jax.jit(function)(*take(i)))


class Plain(nn.Module):
    dtype: type

    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.LayerNorm(dtype=self.dtype)(x))


class Ours(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LayerNorm("relu")(x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layer_norm_equals_flax_with_same_parameters(dtype, monkeypatch):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4, 16)), dtype)
    plain = Plain(dtype)
    params = jax.tree.map(lambda leaf: leaf + 0.5, plain.init(jax.random.key(0), x))
    shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert shapes(params) == shapes(Ours().init(jax.random.key(0), x))
    answer = lambda module: (module.apply(params, x), jax.grad(lambda p: jnp.sum(module.apply(p, x) ** 2))(params))
    error = 1e-4 if dtype == jnp.float32 else 0.1
    close = lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=error, atol=error)
    in_c = lambda: "layer_norm_forward" in str(jax.make_jaxpr(Ours().apply)(params, x))
    assert in_c() == (dtype == jnp.float32)
    jax.tree.map(close, answer(Ours()), answer(plain))
    monkeypatch.setenv(build.VARIABLE, "xla")
    assert not in_c()
    jax.tree.map(close, answer(Ours()), answer(plain))


def test_networks_use_c_layer_norm_for_float32_only():
    """Check a network with two convolutions and a dense layer, in float32 and bfloat16."""
    obs = jax.ShapeDtypeStruct((40, 40, 4), jnp.uint8)
    for dtype, count in ((jnp.float32, 3), (jnp.bfloat16, 0)):
        network = networks.network(obs, 3, networks.Options(kind="dqn2013", layer_norm=True, dtype=dtype))
        params = jax.eval_shape(network.init, jax.random.key(0))
        said = str(jax.make_jaxpr(network.apply)(params, jnp.zeros((2, *obs.shape), obs.dtype)))
        assert said.count("layer_norm_forward") == count
