"""Convolutions as products of matrices, and channel-first layer normalization, in plain JAX."""

import functools
import itertools
import operator
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.kernels.matmul import multiply, multiply_rows

LAYER_NORM_EPSILON = 1e-6  # flax's


def convolve_xla(x: Array, kernel: Array, stride: int) -> Array:
    """[B, H, W, C] by [K, K, C, F] to [B, H', W', F], as XLA's convolution."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def multiply_patches(x: Array, kernel: Array, stride: int) -> Array:
    """The convolution as a sum of products of matrices, one for each place in a patch.

    Inside a loop XLA's convolutions take ten times as long on a CPU as outside, products of matrices do not. With a
    stride, squares of stride x stride pixels first become the channels of one, so that the places are few.
    """
    side = kernel.shape[0]
    height, width = ((size - side) // stride + 1 for size in x.shape[1:3])
    if side % stride == 0:
        x, kernel = _squares(x, kernel, stride, height, width)
        stride = 1
    return _sum_of_products(x, kernel, (stride, height, width))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sum_of_products(x: Array, kernel: Array, patches: tuple[int, int, int]) -> Array:
    """[B, H, W, C] by [K, K, C, F] to [B, H', W', F], for patches = (stride, H', W').

    Its gradient keeps x alone, where every pixel is once.
    """
    products = [
        multiply(x[:, rows, columns].reshape(-1, x.shape[-1]), kernel[i, j])
        for i, j, rows, columns in _places(kernel, patches)
    ]
    return functools.reduce(operator.add, products).reshape(-1, *patches[1:], kernel.shape[-1]).astype(x.dtype)


def _pull_back(patches: tuple[int, int, int], saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = saved
    stride, height, width = patches
    flat = g.reshape(-1, g.shape[-1])
    parts_x, parts_kernel = [], []
    for i, j, rows, columns in _places(kernel, patches):
        parts_kernel.append(multiply_rows(x[:, rows, columns].reshape(-1, x.shape[-1]), flat))
        below = x.shape[1] - i - (height - 1) * stride - 1
        right = x.shape[2] - j - (width - 1) * stride - 1
        pads = (0, 0, 0), (i, below, stride - 1), (j, right, stride - 1), (0, 0, 0)
        parts_x.append(jax.lax.pad(multiply(flat, kernel[i, j].T).reshape(*g.shape[:-1], -1), np.float32(0), pads))
    to_x, to_kernel = functools.reduce(operator.add, parts_x), jnp.stack(parts_kernel).reshape(kernel.shape)
    return to_x.astype(x.dtype), to_kernel.astype(kernel.dtype)


_sum_of_products.defvjp(lambda x, kernel, patches: (_sum_of_products(x, kernel, patches), (x, kernel)), _pull_back)


def _places(kernel: Array, patches: tuple[int, int, int]) -> Iterator[tuple[int, int, slice, slice]]:
    """Each place in a patch, and its rows and columns over all patches."""
    stride, height, width = patches
    for i, j in itertools.product(range(kernel.shape[0]), range(kernel.shape[1])):
        yield i, j, slice(i, i + height * stride, stride), slice(j, j + width * stride, stride)


def _squares(x: Array, kernel: Array, stride: int, height: int, width: int) -> tuple[Array, Array]:
    """[B, H, W, C] as [B, H / s, W / s, s s C], and the kernel to match, of side K / s, so that the stride is 1.

    Rows and columns that no patch reaches are cut off.
    """
    side, _, in_channels, channels = kernel.shape
    side //= stride
    height, width = height - 1 + side, width - 1 + side
    x = x[:, : height * stride, : width * stride].reshape(-1, height, stride, width, stride, in_channels)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, height, width, stride * stride * in_channels)
    kernel = kernel.reshape(side, stride, side, stride, in_channels, channels).transpose(0, 2, 1, 3, 4, 5)
    return x, kernel.reshape(side, side, -1, channels)


def convolve_first(x: Array, kernel: Array) -> Array:
    """[B, H, W, C] by [K, K, C, F] to [F, H' W' B], as XLA's convolution."""
    return jnp.moveaxis(convolve_xla(x, kernel, 1), (-1, 0), (0, -1)).reshape(kernel.shape[-1], -1)


def multiply_first(x: Array, kernel: Array) -> Array:
    """The convolution as a [F, K K C] matrix times [K K C, H' W' B] patches."""
    side, channels = kernel.shape[0], kernel.shape[-1]
    height, width = (size - side + 1 for size in x.shape[1:3])
    x = jnp.moveaxis(x, (-1, 0), (0, -1))
    patches = jnp.stack([x[:, i : i + height, j : j + width] for i in range(side) for j in range(side)])
    return kernel.reshape(-1, channels).T @ patches.reshape(side * side * x.shape[0], -1)


@jax.custom_vjp
def normalize(x: Array, scale: Array, offset: Array) -> Array:
    """LayerNorm over the first axis of x [F, R], with scale and offset [F] (Ba et al. 2016, eq. 4)."""
    return _normalize(x, scale, offset)[0]


def _normalize(x: Array, scale: Array, offset: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    x = x - _mean(x)
    inverse = jax.lax.rsqrt(_mean(x * x) + LAYER_NORM_EPSILON)
    x = x * inverse
    return x * scale[:, None] + offset[:, None], (x, inverse, scale)


def _normalize_backward(saved: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, Array]:
    """With y = (x - mean) / std: dx = (h - mean(h) - y mean(h y)) / std, where h = scale g."""
    y, inverse, scale = saved
    h = g * scale[:, None]
    return inverse * (h - _mean(h) - y * _mean(h * y)), (g * y).sum(1), g.sum(1)


normalize.defvjp(_normalize, _normalize_backward)


def _mean(x: Array) -> Array:
    """[1, R] over the first axis of x [F, R]."""
    return x.mean(0, keepdims=True)


def add_bias(x: Array, bias: Array) -> Array:
    """x [..., C] and a bias [C] for all rows."""
    return x + jnp.broadcast_to(bias, x.shape)
