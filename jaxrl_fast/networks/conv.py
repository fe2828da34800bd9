"""Convolutions of images and of small boards, as flax modules that `networks` puts together."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.kernels.conv import convolve
from jaxrl_fast.kernels.conv_matmul import (
    add_bias,
    convolve_first,
    convolve_xla,
    multiply_first,
    multiply_patches,
    normalize,
)
from jaxrl_fast.kernels.dense import ACTIVATIONS, has_kernels, is_on_cpu
from jaxrl_fast.networks.dense import activate, gain_of

WHITE = 255  # of a picture's shades
BOARDS, IMAGES = 128, 8  # that a CPU's cache holds with all that is computed of them


class Boards(nn.Module):
    """One convolution of small boards, activated: [..., H, W, C] to [..., F, H', W'], channels first.

    Normalized over each pixel's channels. On a CPU it is a product of matrices whose columns are the pixels of all
    boards, the boards innermost: the normalization and its gradient run along them, patches are copied in long runs,
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
        x = {"lax": convolve_first, "matmul": multiply_first}[self.conv](x, kernel) + bias[:, None]
        x = normalize(x, scale, offset) if self.layer_norm else x
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
        if multiplied and has_kernels(kernel, bias):
            x, kernel = (x, kernel / WHITE) if x.dtype == jnp.uint8 else (x.astype(self.dtype), kernel)
            x = convolve(self._pad(x), kernel, bias, self.stride, self.activation)
        else:
            x = x.astype(self.dtype) / WHITE if x.dtype == jnp.uint8 else x.astype(self.dtype)
            by = multiply_patches if multiplied else convolve_xla
            x = ACTIVATIONS[self.activation](add_bias(by(self._pad(x), kernel, self.stride), bias))
        return x.reshape(*batch, *x.shape[1:])

    def _pad(self, x):
        sides, strides = (self.side, self.side), (self.stride, self.stride)
        pads = jax.lax.padtype_to_pads(x.shape[1:3], sides, strides, self.padding)
        return jnp.pad(x, ((0, 0), *pads, (0, 0)))


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
