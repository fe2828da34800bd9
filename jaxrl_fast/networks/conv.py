"""Define convolutions of images and of small boards, as flax modules."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast import kernels
from jaxrl_fast.networks.dense import LayerNorm
from jaxrl_fast.networks.init import declare_kernel


class Boards(nn.Module):
    """One 'valid' convolution of small boards, activated: [..., H, W, C] to [..., F, H', W'], channels first.

    With `layer_norm`, each pixel's channels are normalized before the activation.
    """

    channels: int
    side: int
    activation: str
    layer_norm: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        shape = (self.side, self.side, x.shape[-1], self.channels)
        kernel = declare_kernel(self, np.sqrt(2), shape).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.channels,)).astype(self.dtype)
        scale = offset = None
        if self.layer_norm:
            scale = self.param("scale", nn.initializers.ones, (self.channels,)).astype(self.dtype)
            offset = self.param("offset", nn.initializers.zeros, (self.channels,)).astype(self.dtype)
        boards = x.reshape(-1, *x.shape[-3:])
        y = kernels.board_conv(boards, kernel, bias, scale, offset, self.activation)
        return y.reshape(*x.shape[:-3], *y.shape[1:])


class Convolutions(nn.Module):
    """'Valid' convolutions, each activated: [..., H, W, C] to [..., H', W', channels]."""

    layers: tuple[tuple[int, int, int], ...]  # (channels, kernel side, stride)
    activation: str
    layer_norm: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        activation = "none" if self.layer_norm else self.activation
        for channels, side, stride in self.layers:
            x = Conv(channels, side, stride, "VALID", self.dtype, activation)(x)
            x = LayerNorm(self.activation)(x) if self.layer_norm else x
        return x


class Residual(nn.Module):
    """Stages of a convolution, a pool that halves the sides, and two residual blocks."""

    channels: tuple[int, ...]
    activation: str
    layer_norm: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        for channels in self.channels:
            x = nn.max_pool(self._convolve(x, channels), (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                y = self._convolve(self._activate(x), channels)
                x = x + self._convolve(self._activate(y), channels)
        return self._activate(x)

    def _convolve(self, x, channels):
        return Conv(channels, 3, 1, "SAME", self.dtype)(x)

    def _activate(self, x):
        return LayerNorm(self.activation)(x) if self.layer_norm else kernels.ACTIVATIONS[self.activation](x)


class Conv(nn.Module):
    """A square convolution of [..., H, W, C], activated, with the parameters of flax's Conv.

    Bytes are pixels and are divided by 255; other types are cast to `dtype`.
    """

    channels: int
    side: int
    stride: int
    padding: str
    dtype: jnp.dtype
    activation: str = "none"

    @nn.compact
    def __call__(self, x):
        shape = (self.side, self.side, x.shape[-1], self.channels)
        kernel = declare_kernel(self, np.sqrt(2), shape).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.channels,)).astype(self.dtype)
        rows = x.reshape(-1, *x.shape[-3:])
        rows = rows if x.dtype == jnp.uint8 else rows.astype(self.dtype)
        y = kernels.conv2d(rows, kernel, bias, self.stride, self.padding, self.activation)
        return y.reshape(*x.shape[:-3], *y.shape[1:])


def in_blocks(module: nn.Module, layer: Callable[[nn.Module, Array], Array], x: Array) -> Array:
    """Return layer(module, x) for images x [B, ...], computed in blocks of images where `kernels` finds that faster."""
    size = kernels.image_block(len(x))
    if size == len(x):
        return layer(module, x)
    step = nn.scan(
        lambda module, carry, x: (carry, layer(module, x)), variable_broadcast=True, split_rngs={"params": False}
    )
    blocks = step(module, (), x.reshape(-1, size, *x.shape[1:]))[1]
    return blocks.reshape(-1, *blocks.shape[2:])
