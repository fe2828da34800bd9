"""Read [H, W, C] with three residual stages (Espeholt et al. 2018, "IMPALA", figure 3, the deep network)."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxrl_fast import kernels
from jaxrl_fast.networks.conv import Conv
from jaxrl_fast.networks.dense import LayerNorm
from jaxrl_fast.networks.options import Kind
from jaxrl_fast.networks.torsos import mlp


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


KIND = Kind((256,), "relu", 8, mlp.layers, partial(Residual, (16, 32, 32)))
