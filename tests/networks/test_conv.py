"""networks.conv: convolutions are flax's, values and gradients, whichever way they are computed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.kernels import blocks, boards, build
from jaxrl_fast.kernels.layer_norm import EPSILON
from jaxrl_fast.networks import conv
from jaxrl_fast.networks.conv import Boards, Conv, Residual
from tests.helpers import slow
from tests.helpers.convolutions import WAYS, compute_by


@pytest.mark.parametrize(
    ("shape", "side", "stride", "padding"),
    [
        ((10, 10, 4), 3, 1, "VALID"),
        ((11, 6, 3), 3, 1, "SAME"),
        ((20, 21, 2), 8, 4, "VALID"),
        ((4, 4, 2), 4, 3, "VALID"),
        ((10, 11, 2), 4, 3, "VALID"),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_patches_times_a_matrix_are_the_convolution(shape, side, stride, padding, way, monkeypatch):
    """Values and gradients to rounding, whichever way; the tree of parameters is that of flax."""
    x = jax.random.normal(jax.random.key(0), (6, *shape))
    plain = nn.Conv(5, (side, side), (stride, stride), padding)
    params = {
        "params": {"kernel": jax.random.normal(jax.random.key(1), (side, side, shape[-1], 5)), "bias": jnp.ones(5)}
    }
    assert jax.tree.structure(params) == jax.tree.structure(jax.eval_shape(plain.init, jax.random.key(0), x))

    def answer(module):
        """The output, and a gradient towards parameters and input."""
        output, pull_back = jax.vjp(module.apply, params, x)
        return output, pull_back(jnp.sin(output))

    expected = jax.jit(lambda: answer(plain))()
    compute_by(way, monkeypatch)
    found = jax.jit(lambda: answer(Conv(5, side, stride, padding, jnp.float32)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), expected, found)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_computes_in_its_own_way(way, monkeypatch):
    """Or the tests of all three would be tests of one."""
    compute_by(way, monkeypatch)
    layer, x = Conv(5, 3, 1, "VALID", jnp.float32), jnp.ones((32, 9, 9, 2))
    params = layer.init(jax.random.key(0), x)
    said = str(jax.make_jaxpr(layer.apply)(params, x))
    found = {"c": "conv2d_forward" in said, "patches": "dot_general" in said, "xla": "conv_general" in said}
    assert found == {name: name == (way if way != "c" or build.is_available("conv") else "patches") for name in WAYS}
    assert ("scan" in said) == found["patches"], "four blocks of eight"


LAYERS = (4, 3, 2), (5, 2, 1)


class Activated(nn.Module):
    """flax's convolutions, each normalized if asked for and then activated."""

    layer_norm: bool

    @nn.compact
    def __call__(self, x):
        for channels, side, stride in LAYERS:
            x = nn.Conv(channels, (side, side), (stride, stride), "VALID")(x)
            x = nn.relu(nn.LayerNorm(epsilon=EPSILON)(x) if self.layer_norm else x)
        return x


@pytest.mark.parametrize("layer_norm", [False, True])
def test_convolutions_activate_each_layer_last(layer_norm):
    """Compare with flax: a layer without its activation has negative numbers."""
    x = jax.random.normal(jax.random.key(0), (3, 9, 9, 2))
    plain = Activated(layer_norm)
    params = plain.init(jax.random.key(1), x)
    found = conv.Convolutions(LAYERS, "relu", layer_norm, jnp.float32).apply(params, x)
    np.testing.assert_allclose(found, plain.apply(params, x), rtol=1e-4, atol=1e-5)


class Figure3(nn.Module):
    """Stages of the deep network of Espeholt et al. 2018, figure 3, box by box; parameters named as `Residual`'s."""

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
def test_residual_stages_are_those_of_the_figure(way, monkeypatch):
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
    """What `Boards` computes, by flax: parameters of the same names and shapes in one flat scope."""

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
@pytest.mark.parametrize("batch", [(), (4, 128), *map(slow, [(1,), (3, 7), (128,), (300,)])])
@pytest.mark.slow
def test_boards_are_flax_with_the_channels_first(batch, way, layer_norm, monkeypatch):
    """Also in several blocks, of 128 boards at the most."""
    compute_by(way, monkeypatch)
    module = Boards(16, 3, "relu", layer_norm, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.bernoulli(keys[0], 0.3, (*batch, 10, 9, 4)).astype(jnp.float32)
    params = jax.jit(module.init)(keys[1], x)
    random = jax.random.normal(keys[2], (sum(leaf.size for leaf in jax.tree.leaves(params)),))
    params = jax.tree.unflatten(jax.tree.structure(params), split_like(random, jax.tree.leaves(params)))

    def answer(apply):
        output, pull_back = jax.vjp(apply, params, x)
        return output, pull_back(jnp.sin(output))

    plain = lambda params, x: Plain(layer_norm).apply({}, x, params)
    expected, got = jax.jit(lambda: (answer(plain), answer(module.apply)))()
    assert expected[0].shape == (*batch, 16, 8, 7)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(1, float(jnp.abs(a).max())))
    jax.tree.map(close, expected, got)


def split_like(flat, leaves):
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    return [part.reshape(leaf.shape) for part, leaf in zip(jnp.split(flat, ends), leaves)]


def test_normalize_is_layer_norm_in_float64():
    """Against numpy in double precision, gradients by finite differences; a pixel without any spread is zero."""
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
    [
        (0, 8, 0),
        (5, 8, 5),
        (8, 8, 8),
        (24, 8, 8),
        (12, 8, 6),
        (11, 8, 11),
        (14, 8, 7),
        (256, 128, 128),
        (131, 128, 131),
    ],
)
def test_blocks_are_equal_and_neither_too_large_nor_too_small(num_rows, max_size, size, monkeypatch):
    assert blocks.block_size(num_rows, max_size) == (size if jax.default_backend() == "cpu" else num_rows)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert blocks.block_size(num_rows, max_size) == num_rows


@pytest.mark.parametrize(("size", "seen_at_a_time"), [(2, 2), (3, 3), (6, 6)])
def test_images_are_computed_in_blocks_of_the_size_that_is_faster(size, seen_at_a_time, monkeypatch):
    seen = []

    class Doubling(nn.Module):
        def __call__(self, x):
            return conv.in_blocks(self, lambda _, x: seen.append(len(x)) or 2 * x, x)

    monkeypatch.setattr(conv.kernels, "image_block", lambda num_images: size)
    images = jnp.arange(24.0).reshape(6, 2, 2)
    np.testing.assert_array_equal(Doubling().apply({}, images), 2 * images)
    assert set(seen) == {seen_at_a_time}
