"""Test kernels.conv2d in C against numpy in float64, patch by patch with gradients by hand, and against XLA."""

import itertools
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.kernels import build, conv2d
from jaxrl_fast.networks import conv
from tests.helpers.layers import AFTER, SLOPE, draw

pytestmark = pytest.mark.skipif(not build.is_available("conv"), reason="no C compiler here: XLA computes convolutions")
close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def oracle(x, kernel, bias, g, stride, activation):
    """Return the output and the gradients of sum(g * output), in float64, one patch after another."""
    x, kernel, bias, g = (z.astype(np.float64) for z in (x, kernel, bias, g))
    side, before = kernel.shape[0], np.zeros(g.shape)
    patches = [
        (np.s_[:, i, j], np.s_[:, i * stride : i * stride + side, j * stride : j * stride + side])
        for i, j in itertools.product(*map(range, g.shape[1:3]))
    ]
    for pixel, patch in patches:
        before[pixel] = np.einsum("bhwc,hwcf->bf", x[patch], kernel) + bias
    g = g * SLOPE[activation](before)
    to_x, to_kernel = np.zeros(x.shape), np.zeros(kernel.shape)
    for pixel, patch in patches:
        to_x[patch] += np.einsum("bf,hwcf->bhwc", g[pixel], kernel)
        to_kernel += np.einsum("bhwc,bf->hwcf", x[patch], g[pixel])
    return AFTER[activation](before), (to_x, to_kernel, g.sum((0, 1, 2)))


def compute(x, kernel, bias, g, stride, activation, wrt=(0, 1, 2)):
    """Return the same by `conv2d`, which divides uint8 images by 255."""
    kernel = kernel * np.float32(255) if x.dtype == np.uint8 else kernel
    weighted = lambda *arrays: (jnp.sum(g * (y := conv2d(*arrays, stride, "VALID", activation))), y)
    (_, y), gradients = jax.jit(jax.value_and_grad(weighted, wrt, has_aux=True))(x, kernel, bias)
    if x.dtype == np.uint8:
        gradients = (gradients[0] * 255, *gradients[1:])
    return y, gradients


def draw_layer(seed, num_images, sizes, side, channels, stride):
    """Return images of sizes (H, W, C), a kernel, a bias, and a gradient with respect to the output."""
    height, width = ((size - side) // stride + 1 for size in sizes[:2])
    x, bias, g = draw(seed, (num_images or 1, *sizes), (channels,), (num_images or 1, height, width, channels))
    kernel = np.random.default_rng(seed).normal(size=(side, side, sizes[2], channels)) / (side * sizes[2] ** 0.5)
    return x[:num_images], np.float32(kernel), bias, g[:num_images]


def check(seed, num_images, sizes, side, channels, stride, activation):
    x, kernel, bias, g = draw_layer(seed, num_images, sizes, side, channels, stride)
    expected, gradients = oracle(x, kernel, bias, g, stride, activation)
    y, found = compute(x, kernel, bias, g, stride, activation)
    close(y, expected)
    jax.tree.map(close, found, gradients)
    shades = np.random.default_rng(seed).integers(0, 256, x.shape, np.uint8)
    small = kernel / np.float32(255)
    expected, gradients = oracle(shades, small, bias, g, stride, activation)
    y, found = compute(shades, small, bias, g, stride, activation, (1, 2))
    close(y, expected, atol=1e-4)
    jax.tree.map(lambda a, b: close(a, b, atol=1e-4 * np.abs(b).max(initial=0.1)), found, gradients[1:])


@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(
    seed=st.integers(0, 2**31 - 1),
    num_images=st.sampled_from([25, 13, 2, 1, 0]),
    side=st.integers(1, 5),
    beyond=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    depth=st.sampled_from([1, 2, 3, 4, 5, 6, 16, 21]),
    channels=st.integers(1, 40),
    stride=st.integers(1, 6),
    activation=st.sampled_from(list(AFTER)),
)
@hypothesis.example(seed=0, num_images=25, side=3, beyond=(4, 4), depth=3, channels=17, stride=1, activation="relu")
@hypothesis.example(seed=0, num_images=2, side=2, beyond=(5, 3), depth=4, channels=9, stride=5, activation="relu")
@hypothesis.example(seed=0, num_images=0, side=4, beyond=(0, 0), depth=16, channels=40, stride=1, activation="relu")
def test_conv2d_values_and_gradients_equal_float64_oracle(
    seed, num_images, side, beyond, depth, channels, stride, activation
):
    """Sizes include no image, several parts, a single patch, disjoint patches, and channels that fill no register."""
    sizes = side + beyond[0], side + beyond[1], depth
    check(seed, num_images, sizes, side, channels, stride, activation)


@pytest.mark.parametrize(
    ("sizes", "side", "channels", "stride"),
    [
        ((64, 64, 4), 8, 16, 4),
        ((15, 15, 16), 4, 32, 2),
        ((9, 9, 64), 3, 64, 1),
        ((7, 7, 16), 3, 8, 2),  # the side is not a multiple of the stride: long rows of patches overlap
        ((7, 7, 6), 3, 8, 2),  # and short rows, which overlap within 16 numbers: as many as the registers of AVX2 hold
    ],
)
def test_conv2d_equals_oracle_for_layer_sizes_of_networks(sizes, side, channels, stride):
    """Check the layers of the DQN networks of 2013 and 2015, and an unusual one."""
    check(0, 2, sizes, side, channels, stride, "relu")


@pytest.mark.parametrize("activation", list(AFTER))
def test_conv2d_keeps_nan_within_its_patches(activation):
    """NaN must stay visible, so that divergence is detected. It must not affect the next image."""
    x = np.zeros((2, 3, 3, 1), np.float32)
    x[0, 0, 0] = np.nan
    y = np.asarray(conv2d(x, np.ones((2, 2, 1, 5), np.float32), np.zeros(5, np.float32), 1, "VALID", activation))
    assert np.isnan(y[0, 0, 0]).all() and np.isfinite(y[0, 1:]).all() and np.isfinite(y[1]).all()


@pytest.mark.parametrize(
    ("batched", "dtype"),
    [((0, None, None), np.float32), ((None, 0, 0), np.uint8), ((0, 0, 0), np.float32), ((0, 0, 0), np.uint8)],
)
def test_vmapped_conv2d_equals_single_calls_bitwise(batched, dtype):
    """Compare values and gradients bit for bit, as with the seeds of a population."""
    layers = [draw_layer(seed, 2, (7, 6, 3), 3, 9, 2) for seed in range(3)]
    *arrays, g = (np.stack(parts) for parts in zip(*layers))
    arrays[0] = (100 * np.abs(arrays[0])).astype(dtype)
    wrt = (0, 1, 2) if dtype == np.float32 else (1, 2)
    layer = lambda *arrays: conv2d(*arrays, 2, "VALID", "tanh")
    gradients = jax.grad(lambda *arrays: jnp.sum(g[0] * layer(*arrays)), wrt)
    take = lambda i: [x[i if axis == 0 else 0] for x, axis in zip(arrays, batched)]
    whole = [x if axis == 0 else x[0] for x, axis in zip(arrays, batched)]
    for function in (lambda *arrays: (layer(*arrays),), gradients):
        found = jax.jit(jax.vmap(function, in_axes=batched))(*whole)
        for i in range(3):
            jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), found, jax.jit(function)(*take(i)))


@pytest.mark.slow
def test_conv_layer_uses_c_kernel_for_float32_only(monkeypatch):
    """XLA computes other types, and every layer if C is disabled. Results are equal, also for uint8 images."""
    shades = np.random.default_rng(0).integers(0, 256, (3, 9, 8, 2), np.uint8)

    def compiled(dtype, x=shades):
        layer = conv.Conv(5, 3, 2, "SAME", dtype, "relu")
        params = jax.tree.map(
            lambda leaf: jnp.linspace(-0.1, 0.3, leaf.size).reshape(leaf.shape), layer.init(jax.random.key(0), x)
        )
        return layer.apply(params, x), "conv2d_forward" in str(jax.make_jaxpr(layer.apply)(params, x))

    y, in_c = compiled(jnp.float32)
    close(compiled(jnp.float32, np.float32(shades / 255))[0], y)
    assert in_c and not compiled(jnp.bfloat16)[1]
    monkeypatch.setenv(build.VARIABLE, "xla")
    without, in_c = compiled(jnp.float32)
    assert not in_c and (y > 0).any()
    close(without, y)


def test_gradient_of_replicated_kernel_is_summed_over_devices():
    """In a `shard_map` that tracks varying values, JAX sums the gradients of all devices."""
    layer = conv.Conv(4, 3, 1, "VALID", jnp.float32, "relu")
    x, *_ = draw_layer(1, 4, (5, 6, 2), 3, 4, 1)
    params = layer.init(jax.random.key(0), x)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec
    gradient = jax.grad(lambda params, x: jnp.sum(layer.apply(params, x) ** 2))
    each = jax.shard_map(gradient, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec())
    jax.tree.map(close, jax.jit(each)(params, x), jax.jit(gradient)(params, x))


def test_multithreaded_conv2d_equals_single_threaded_bitwise():
    """A single device uses XLA's threads; one of several devices does not."""
    layers = [draw_layer(seed, 61, (20, 20, 8), 4, 32, 1) for seed in range(5)]  # parts of half a millisecond
    gradients = lambda x, kernel, bias, g: jax.grad(
        lambda *arrays: jnp.sum(g * conv2d(*arrays, 1, "VALID", "relu")), (0, 1, 2)
    )(x, kernel, bias)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec()
    on_each = jax.shard_map(gradients, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    alone, one_of_two = jax.jit(gradients), jax.jit(on_each)
    calls = lambda function, multithreaded: (
        function.lower(*layers[0]).as_text().count(f"multithreaded = {multithreaded} : i32")
    )
    assert calls(alone, 1) == calls(one_of_two, 0) == 2 and not calls(one_of_two, 1)
    for layer in layers:
        expected = one_of_two(*layer)
        for _ in range(20):
            jax.tree.map(np.testing.assert_array_equal, alone(*layer), expected)


@pytest.mark.parametrize(
    ("shape", "kernel", "words"),
    [
        ((2, 9, 9, 3), (3, 3, 4, 5), "does not match a kernel"),
        ((2, 9, 9, 3), (3, 2, 3, 5), "does not match a kernel"),
        ((9, 9, 3), (3, 3, 3, 5), "does not match a kernel"),
        ((2, 2, 9, 3), (3, 3, 3, 5), "are smaller than a kernel"),
    ],
)
def test_conv2d_rejects_mismatched_shapes(shape, kernel, words):
    with pytest.raises(ValueError, match=words):
        conv2d(jnp.zeros(shape), jnp.zeros(kernel), jnp.zeros(kernel[-1]))
