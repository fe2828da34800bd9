"""Convolve and normalize small boards: `board_conv`, by XLA on every device, in a layout that suits a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.kernels import blocks
from jaxrl_fast.kernels.activations import ACTIVATIONS
from jaxrl_fast.kernels.conv import convolve_xla
from jaxrl_fast.kernels.layer_norm import EPSILON
from jaxrl_fast.utils import target


def board_conv(
    x: Array,
    kernel: Array,
    bias: Array,
    scale: Array | None = None,
    offset: Array | None = None,
    activation: str = "none",
) -> Array:
    """Convolve boards x [B, H, W, C] of any dtype to features [B, F, H', W'], with kernel [S, S, C, F] and bias [F].

    If `scale` and `offset`, both [F], are given, each pixel's F channels are normalized before the activation.

    On a CPU this is one matrix product whose columns are the pixels of all boards, with the board as the innermost
    axis. Normalization and its gradient run along that axis, and patches are copied in long runs. A gradient takes less
    than a tenth of the time of XLA's convolution and flax's LayerNorm. `kernels.dense` reads this layout from memory
    without a copy.
    """
    layer = partial(_board_conv, kernel=kernel, bias=bias, scale=scale, offset=offset, activation=activation)
    return blocks.in_blocks(layer, x, blocks.MAX_BOARDS)


def _board_conv(x, kernel, bias, scale, offset, activation):
    """Compute the layer for all boards at once."""
    side, channels = kernel.shape[0], kernel.shape[-1]
    height, width = (size - side + 1 for size in x.shape[1:3])
    convolve = convolve_columns if target.platform() == "cpu" else convolve_columns_xla
    y = convolve(x.astype(kernel.dtype), kernel) + bias[:, None]
    y = y if scale is None else normalize_columns(y, scale, offset)
    y = ACTIVATIONS[activation](y).reshape(channels * height * width, -1)
    return y.T.reshape(-1, channels, height, width)


def convolve_columns_xla(x: Array, kernel: Array) -> Array:
    """Convolve x [B, H, W, C] with kernel [S, S, C, F] to [F, H' W' B], by XLA's convolution."""
    return jnp.moveaxis(convolve_xla(x, kernel, 1), (-1, 0), (0, -1)).reshape(kernel.shape[-1], -1)


def convolve_columns(x: Array, kernel: Array) -> Array:
    """Convolve x [B, H, W, C] with kernel [S, S, C, F] to [F, H' W' B], by a product [F, S S C] [S S C, H' W' B]."""
    side, channels = kernel.shape[0], kernel.shape[-1]
    height, width = (size - side + 1 for size in x.shape[1:3])
    x = jnp.moveaxis(x, (-1, 0), (0, -1))
    patches = jnp.stack([x[:, i : i + height, j : j + width] for i in range(side) for j in range(side)])
    return kernel.reshape(-1, channels).T @ patches.reshape(side * side * x.shape[0], -1)


@jax.custom_vjp
def normalize_columns(x: Array, scale: Array, offset: Array) -> Array:
    """Normalize x [F, R] over its first axis, with scale and offset [F] (Ba et al. 2016, eq. 4)."""
    return _normalize(x, scale, offset)[0]


def _normalize(x: Array, scale: Array, offset: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    x = x - _mean(x)
    inverse = jax.lax.rsqrt(_mean(x * x) + EPSILON)
    x = x * inverse
    return x * scale[:, None] + offset[:, None], (x, inverse, scale)


def _normalize_backward(residuals: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, Array]:
    """Return the gradients. With y = (x - mean) / std and h = scale g: dx = (h - mean(h) - y mean(h y)) / std."""
    y, inverse, scale = residuals
    h = g * scale[:, None]
    return inverse * (h - _mean(h) - y * _mean(h * y)), (g * y).sum(1), g.sum(1)


normalize_columns.defvjp(_normalize, _normalize_backward)


def _mean(x: Array) -> Array:
    """Return the mean over the first axis of x [F, R], [1, R]."""
    return x.mean(0, keepdims=True)
