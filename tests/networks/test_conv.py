"""networks.conv: outputs and gradients of each implementation against flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.kernels import blocks, boards, build
from jaxrl_fast.kernels.layer_norm import EPSILON
from jaxrl_fast.networks.conv import Conv
from jaxrl_fast.networks.torsos import impala, nature
from jaxrl_fast.networks.torsos.impala import Residual
from jaxrl_fast.networks.torsos.minatar import Boards
from tests.helpers.convolutions import WAYS, compute_by


@pytest.mark.parametrize(
    ("shape", "side", "stride", "padding"),
    [
        ((11, 6, 3), 3, 1, "SAME"),
        ((20, 21, 2), 8, 4, "VALID"),
        ((4, 4, 2), 4, 3, "VALID"),
        ((10, 11, 2), 4, 3, "VALID"),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_conv_matches_flax_in_outputs_and_gradients(shape, side, stride, padding, way, monkeypatch):
    """Each implementation agrees with flax.linen.Conv to rounding and has the same parameter tree."""
    x = jax.random.normal(jax.random.key(0), (6, *shape))
    plain = nn.Conv(5, (side, side), (stride, stride), padding)
    params = {
        "params": {"kernel": jax.random.normal(jax.random.key(1), (side, side, shape[-1], 5)), "bias": jnp.ones(5)}
    }
    assert jax.tree.structure(params) == jax.tree.structure(jax.eval_shape(plain.init, jax.random.key(0), x))

    def output_and_gradients(module):
        """The output, and gradients with respect to parameters and input."""
        output, pull_back = jax.vjp(module.apply, params, x)
        return output, pull_back(jnp.sin(output))

    expected = jax.jit(lambda: output_and_gradients(plain))()
    compute_by(way, monkeypatch)
    found = jax.jit(lambda: output_and_gradients(Conv(5, side, stride, padding, jnp.float32)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), expected, found)


@pytest.mark.parametrize("way", WAYS)
def test_compute_by_selects_implementation(way, monkeypatch):
    """Otherwise the tests of three implementations could all test the same one."""
    compute_by(way, monkeypatch)
    layer, x = Conv(5, 3, 1, "VALID", jnp.float32), jnp.ones((32, 9, 9, 2))
    params = layer.init(jax.random.key(0), x)
    said = str(jax.make_jaxpr(layer.apply)(params, x))
    found = {"c": "conv2d_forward" in said, "patches": "dot_general" in said, "xla": "conv_general" in said}
    assert found == {name: name == (way if way != "c" or build.is_available("conv") else "patches") for name in WAYS}
    assert ("scan" in said) == found["patches"], "four blocks of eight"


LAYERS = (4, 3, 2), (5, 2, 1)


class Activated(nn.Module):
    """Convolutions of flax, each followed by an optional layer norm and the activation."""

    layer_norm: bool

    @nn.compact
    def __call__(self, x):
        for channels, side, stride in LAYERS:
            x = nn.Conv(channels, (side, side), (stride, stride), "VALID")(x)
            x = nn.relu(nn.LayerNorm(epsilon=EPSILON)(x) if self.layer_norm else x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("layer_norm", [False, True])
def test_convolutions_match_flax_with_activation_last_in_each_layer(layer_norm):
    """The oracle is flax. A layer without its activation would have negative outputs."""
    x = jax.random.normal(jax.random.key(0), (3, 9, 9, 2))
    plain = Activated(layer_norm)
    params = plain.init(jax.random.key(1), x)
    found = nature.Convolutions(LAYERS, "relu", layer_norm, jnp.float32).apply(params, x)
    np.testing.assert_allclose(found, plain.apply(params, x), rtol=1e-4, atol=1e-5)


class Figure3(nn.Module):
    """Stages of the deep network in figure 3 of Espeholt et al. 2018, with the parameter names of `Residual`."""

    channels: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for channels in self.channels:
            x = nn.max_pool(nn.Conv(channels, (3, 3))(x), (3, 3), (2, 2), "SAME")
            for _ in range(2):
                before = x
                x = nn.Conv(channels, (3, 3))(nn.relu(x))
                x = nn.Conv(channels, (3, 3))(nn.relu(x))
                x = x + before
        return nn.relu(x)


@pytest.mark.parametrize("way", WAYS)
def test_residual_stages_match_figure_3_of_impala_paper(way, monkeypatch):
    compute_by(way, monkeypatch)
    residual, plain = Residual((3, 5), "relu", False, jnp.float32), Figure3((3, 5))
    rng = np.random.default_rng(0)
    x = jnp.float32(rng.normal(size=(2, 9, 8, 4)))
    shapes = {"params": jax.eval_shape(plain.init, jax.random.key(0), x)["params"]}
    assert shapes["params"] == jax.eval_shape(residual.init, jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda leaf: jnp.float32(0.3 * rng.normal(size=leaf.shape)), shapes)
    expected, got = jax.jit(lambda: (plain.apply(params, x), residual.apply(params, x)))()
    assert expected.shape == (2, 3, 2, 5) and (expected > 0).any()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


class Plain(nn.Module):
    """`Boards` in flax: parameters have the same names and shapes in one flat scope."""

    layer_norm: bool

    @nn.compact
    def __call__(self, x, params):
        convolution = {"params": {name: params["params"][name] for name in ("kernel", "bias")}}
        x = nn.Conv(16, (3, 3), padding="VALID", parent=None).apply(convolution, x)
        if self.layer_norm:
            scaling = {"params": {"scale": params["params"]["scale"], "bias": params["params"]["offset"]}}
            x = nn.LayerNorm(parent=None).apply(scaling, x)
        return jnp.moveaxis(nn.relu(x), -1, -3)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("way", ["patches", "xla"])
@pytest.mark.parametrize("batch", [(), (4, 128)])
@pytest.mark.slow
def test_boards_match_flax_with_channels_first(batch, way, layer_norm, monkeypatch):
    """Batches of more than 128 boards are computed in several blocks."""
    compute_by(way, monkeypatch)
    module = Boards(16, 3, "relu", layer_norm, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.bernoulli(keys[0], 0.3, (*batch, 10, 9, 4)).astype(jnp.float32)
    params = jax.jit(module.init)(keys[1], x)
    random = jax.random.normal(keys[2], (sum(leaf.size for leaf in jax.tree.leaves(params)),))
    params = jax.tree.unflatten(jax.tree.structure(params), split_like(random, jax.tree.leaves(params)))

    def output_and_gradients(apply):
        output, pull_back = jax.vjp(apply, params, x)
        return output, pull_back(jnp.sin(output))

    plain = lambda params, x: Plain(layer_norm).apply({}, x, params)
    expected, got = jax.jit(lambda: (output_and_gradients(plain), output_and_gradients(module.apply)))()
    assert expected[0].shape == (*batch, 16, 8, 7)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(1, float(jnp.abs(a).max())))
    jax.tree.map(close, expected, got)


def split_like(flat, leaves):
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    return [part.reshape(leaf.shape) for part, leaf in zip(jnp.split(flat, ends), leaves)]


def test_normalize_columns_matches_layer_norm_in_float64():
    """The oracle is numpy in float64 with finite differences. A pixel with equal channels becomes zero."""
    rng = np.random.default_rng(0)
    x, scale, offset, weight = rng.normal(size=(6, 5)), rng.normal(size=6), rng.normal(size=6), rng.normal(size=(6, 5))

    def loss(x, scale, offset):
        normed = (x - x.mean(0)) / np.sqrt(x.var(0) + EPSILON)
        return (weight * (normed * scale[:, None] + offset[:, None])).sum()

    def slopes(position, step=1e-6):
        arguments = [x, scale, offset]
        result = np.zeros_like(arguments[position])
        for index in np.ndindex(result.shape):
            more, less = [a.copy() for a in arguments], [a.copy() for a in arguments]
            more[position][index] += step
            less[position][index] -= step
            result[index] = (loss(*more) - loss(*less)) / (2 * step)
        return result

    ours = lambda *arguments: (weight.astype(np.float32) * boards.normalize_columns(*arguments)).sum()
    value, gradients = jax.value_and_grad(ours, argnums=(0, 1, 2))(*(jnp.float32(a) for a in (x, scale, offset)))
    np.testing.assert_allclose(value, loss(x, scale, offset), rtol=1e-5)
    for position, gradient in enumerate(gradients):
        np.testing.assert_allclose(gradient, slopes(position), rtol=1e-3, atol=1e-4)
    still = boards.normalize_columns(jnp.full((6, 1), 3.0), jnp.ones(6), jnp.zeros(6))
    np.testing.assert_allclose(still, 0, atol=1e-6)


@pytest.mark.parametrize(
    ("num_rows", "max_size", "size"),
    [(0, 8, 0), (5, 8, 5), (24, 8, 8), (12, 8, 6), (11, 8, 11), (256, 128, 128), (131, 128, 131)],
)
def test_block_size_divides_rows_on_cpu_and_is_all_rows_on_gpu(num_rows, max_size, size, monkeypatch):
    assert blocks.block_size(num_rows, max_size) == (size if jax.default_backend() == "cpu" else num_rows)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert blocks.block_size(num_rows, max_size) == num_rows


@pytest.mark.parametrize(("size", "seen_at_a_time"), [(2, 2), (3, 3), (6, 6)])
def test_in_blocks_uses_block_size_of_image_block(size, seen_at_a_time, monkeypatch):
    seen = []

    class Doubling(nn.Module):
        def __call__(self, x):
            return impala.in_blocks(self, lambda _, x: seen.append(len(x)) or 2 * x, x)

    monkeypatch.setattr(impala.kernels, "image_block", lambda num_images: size)
    images = jnp.arange(24.0).reshape(6, 2, 2)
    np.testing.assert_array_equal(Doubling().apply({}, images), 2 * images)
    assert set(seen) == {seen_at_a_time}
