"""Convolutions of images and of small boards, as flax modules that `networks` puts together."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.convolve import convolve
from jaxrl_fast.dense import ACTIVATIONS, has_c, is_on_cpu
from jaxrl_fast.dense_layers import activate, gain_of
from jaxrl_fast.products import multiply, multiply_rows

LAYER_NORM_EPSILON = 1e-6  # flax's
WHITE = 255  # of a picture's shades
BOARDS, IMAGES = 128, 8  # that a CPU's cache holds with all that is computed of them


class Boards(nn.Module):
    """One convolution of small boards, activated: [..., H, W, C] to [..., F, H', W'], channels first.

    Normalised over each pixel's channels. On a CPU it is a product of matrices whose columns are the pixels of all
    boards, the boards innermost: the normalisation and its gradient run along them, patches are copied in long runs,
    and the dense layer after it takes the transpose as it is. A whole gradient takes less than a tenth of what XLA's
    convolution and flax's LayerNorm take. Results agree to rounding.
    """

    channels: int
    side: int
    activation: str
    layer_norm: bool
    dtype: jnp.dtype
    conv: str  # "lax" or "matmul"

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", gain_of(np.sqrt(2)), (self.side, self.side, x.shape[-1], self.channels))
        bias = self.param("bias", nn.initializers.zeros, (self.channels,)).astype(self.dtype)
        kernel = kernel.astype(self.dtype)
        if self.layer_norm:
            scale = self.param("scale", nn.initializers.ones, (self.channels,)).astype(self.dtype)
            offset = self.param("offset", nn.initializers.zeros, (self.channels,)).astype(self.dtype)
        batch = x.shape[:-3]
        x = x.reshape(-1, *x.shape[-3:]).astype(self.dtype)
        height, width = (size - self.side + 1 for size in x.shape[1:3])
        x = {"lax": _convolve_first, "matmul": _multiply_first}[self.conv](x, kernel) + bias[:, None]
        x = normalise(x, scale, offset) if self.layer_norm else x
        x = ACTIVATIONS[self.activation](x).reshape(self.channels * height * width, -1)
        return x.T.reshape(*batch, self.channels, height, width)


class Convolutions(nn.Module):
    """Unpadded convolutions, each activated: [..., H, W, C] to [..., H', W', channels]."""

    layers: tuple[tuple[int, int, int], ...]  # (channels, kernel side, stride)
    activation: str
    layer_norm: bool
    dtype: jnp.dtype
    conv: str

    @nn.compact
    def __call__(self, x):
        activation = "none" if self.layer_norm else self.activation  # else it is a part of the convolution
        for channels, side, stride in self.layers:
            x = Conv(channels, side, stride, "VALID", self.dtype, self.conv, activation)(x)
            x = activate(self, x) if self.layer_norm else x
        return x


class Residual(nn.Module):
    """Stages of a convolution, a pool that halves, and two residual blocks."""

    channels: tuple[int, ...]
    activation: str
    layer_norm: bool
    dtype: jnp.dtype
    conv: str

    @nn.compact
    def __call__(self, x):
        for channels in self.channels:
            convolve = lambda x, channels=channels: Conv(channels, 3, 1, "SAME", self.dtype, self.conv)(x)
            x = nn.max_pool(convolve(x), (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                x = x + convolve(activate(self, convolve(activate(self, x))))
        return activate(self, x)


class Conv(nn.Module):
    """A square convolution of [..., H, W, C], activated: by XLA's convolution, or by products of matrices.

    Bytes are shades of a picture, and count as [0, 1]. Parameters are those of flax's Conv either way, and results
    agree to rounding.
    """

    channels: int
    side: int
    stride: int
    padding: str
    dtype: jnp.dtype
    how: str  # "lax" or, on a CPU only, "matmul", which is in C where that can be had
    activation: str = "none"

    @nn.compact
    def __call__(self, x):
        shape = (self.side, self.side, x.shape[-1], self.channels)
        kernel = self.param("kernel", gain_of(np.sqrt(2)), shape).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.channels,)).astype(self.dtype)
        batch, x = x.shape[:-3], x.reshape(-1, *x.shape[-3:])
        multiplied = self.how == "matmul" and is_on_cpu(x, kernel, bias)
        if multiplied and has_c(kernel, bias):
            x, kernel = (x, kernel / WHITE) if x.dtype == jnp.uint8 else (x.astype(self.dtype), kernel)
            x = convolve(self._pad(x), kernel, bias, self.stride, self.activation)
        else:
            x = x.astype(self.dtype) / WHITE if x.dtype == jnp.uint8 else x.astype(self.dtype)
            by = _multiply_patches if multiplied else _convolve
            x = ACTIVATIONS[self.activation](add_bias(by(self._pad(x), kernel, self.stride), bias))
        return x.reshape(*batch, *x.shape[1:])

    def _pad(self, x):
        sides, strides = (self.side, self.side), (self.stride, self.stride)
        pads = jax.lax.padtype_to_pads(x.shape[1:3], sides, strides, self.padding)
        return jnp.pad(x, ((0, 0), *pads, (0, 0)))


def _convolve(x: Array, kernel: Array, stride: int) -> Array:
    """[B, H, W, C] by [K, K, C, F] to [B, H', W', F], as XLA's convolution."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _multiply_patches(x: Array, kernel: Array, stride: int) -> Array:
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


def _convolve_first(x: Array, kernel: Array) -> Array:
    """[B, H, W, C] by [K, K, C, F] to [F, H' W' B], as XLA's convolution."""
    return jnp.moveaxis(_convolve(x, kernel, 1), (-1, 0), (0, -1)).reshape(kernel.shape[-1], -1)


def _multiply_first(x: Array, kernel: Array) -> Array:
    """The convolution as a [F, K K C] matrix times [K K C, H' W' B] patches."""
    side, channels = kernel.shape[0], kernel.shape[-1]
    height, width = (size - side + 1 for size in x.shape[1:3])
    x = jnp.moveaxis(x, (-1, 0), (0, -1))
    patches = jnp.stack([x[:, i : i + height, j : j + width] for i in range(side) for j in range(side)])
    return kernel.reshape(-1, channels).T @ patches.reshape(side * side * x.shape[0], -1)


@jax.custom_vjp
def normalise(x: Array, scale: Array, offset: Array) -> Array:
    """LayerNorm over the first axis of x [F, R], with scale and offset [F] (Ba et al. 2016, eq. 4)."""
    return _normalise(x, scale, offset)[0]


def _normalise(x: Array, scale: Array, offset: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    x = x - _mean(x)
    inverse = jax.lax.rsqrt(_mean(x * x) + LAYER_NORM_EPSILON)
    x = x * inverse
    return x * scale[:, None] + offset[:, None], (x, inverse, scale)


def _normalise_backward(saved: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, Array]:
    """With y = (x - mean) / std: dx = (h - mean(h) - y mean(h y)) / std, where h = scale g."""
    y, inverse, scale = saved
    h = g * scale[:, None]
    return inverse * (h - _mean(h) - y * _mean(h * y)), (g * y).sum(1), g.sum(1)


normalise.defvjp(_normalise, _normalise_backward)


def _mean(x: Array) -> Array:
    """[1, R] over the first axis of x [F, R]."""
    return x.mean(0, keepdims=True)


def in_blocks(module: nn.Module, layer: Callable[[nn.Module, Array], Array], x: Array, most: int | None) -> Array:
    """layer(module, x) for x [B, ...], in equal blocks of at most so many rows, and of half of that at least.

    Where rows do not divide so, and for None, all at once. On a CPU what is computed of many images leaves the cache:
    at once, a pass over 128 of them takes up to four times as long.
    """
    size = rows_of_block(len(x), most)
    if size == len(x):
        return layer(module, x)
    step = nn.scan(
        lambda module, carry, x: (carry, layer(module, x)), variable_broadcast=True, split_rngs={"params": False}
    )
    blocks = step(module, (), x.reshape(-1, size, *x.shape[1:]))[1]
    return blocks.reshape(-1, *blocks.shape[2:])


def rows_of_block(num_rows: int, most: int | None) -> int:
    """How many rows `in_blocks` takes at a time."""
    most = most or num_rows
    sizes = (size for size in range(min(most, num_rows), most // 2 - 1, -1) if size and num_rows % size == 0)
    return next(sizes, num_rows)


def add_bias(x: Array, bias: Array) -> Array:
    """x [..., C] and a bias [C] for all rows."""
    return x + jnp.broadcast_to(bias, x.shape)
