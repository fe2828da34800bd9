"""Read observations of any shape, flattened, with residual blocks, batch statistics and unit weights (FlashSAC).

Kim et al. 2026, "FlashSAC": batch normalization (Ioffe & Szegedy 2015) of the input and within blocks, a final RMS
normalization (Zhang & Sennrich 2019), and a constraint on the parameters after each optimizer step.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_fast import kernels
from jaxrl_fast.networks.batch_renorm import STATS
from jaxrl_fast.networks.init import declare_kernel
from jaxrl_fast.networks.options import Kind, Options
from jaxrl_fast.types import Array, PyTree

EXPANSION = 4  # of the inner layer of a residual block
SHARE = 0.01  # of a batch in the running statistics
EPSILON, RMS_EPSILON, UNIT_EPSILON = 1e-5, 1e-6, 1e-8  # added to variances, mean squares, and sums of squares


class Linear(nn.Module):
    """A product with a kernel, without a bias: [..., I] to [..., features]."""

    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        kernel = declare_kernel(self, 1.0, (x.shape[-1], self.features))
        return kernels.dense(x.astype(self.dtype), kernel.astype(self.dtype), jnp.zeros(self.features, self.dtype))


class BatchNorm(nn.Module):
    """Normalization of each feature of [..., F] over all other axes, then activation: scale (x - mean) / std + offset.

    While training, mean and variance are those of the batch, and the running ones move towards them by SHARE (the
    unbiased variance). Else they are the running ones.
    """

    activation: str = "none"

    @nn.compact
    def __call__(self, x):
        size = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, size)
        offset = self.param("bias", nn.initializers.zeros, size)
        running_mean = self.variable(STATS, "mean", jnp.zeros, size)
        running_var = self.variable(STATS, "var", jnp.ones, size)
        if self.is_mutable_collection(STATS) and not self.is_initializing():
            y, mean, var = kernels.batch_norm(x, scale, offset, EPSILON, self.activation)
            num = x.size // x.shape[-1]
            running_mean.value += SHARE * (mean - running_mean.value)
            running_var.value += SHARE * (var * (num / max(num - 1, 1)) - running_var.value)
            return y
        rows = x.reshape(-1, *size).astype(jnp.float32) - running_mean.value[None]
        y = rows * (scale * jax.lax.rsqrt(running_var.value + EPSILON))[None] + offset[None]
        return kernels.ACTIVATIONS[self.activation](y.reshape(x.shape).astype(x.dtype))


class RMSNorm(nn.Module):
    """Division of [..., F] by the root of the mean square over F, then a product with a learned scale."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        y = x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True) + RMS_EPSILON)
        return (y * scale.reshape(*(1,) * (x.ndim - 1), -1)).astype(x.dtype)


class FlashBlocks(nn.Module):
    """Residual blocks of one width W: [..., F] to [..., W].

    First BatchNorm and a linear layer, then `num` blocks x + act(norm(linear(act(norm(linear(x)))))), whose inner width
    is EXPANSION times W, then an RMSNorm. No layer has a bias.
    """

    width: int
    num: int
    activation: str
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        x = Linear(self.width, self.dtype)(BatchNorm()(x))
        for _ in range(self.num):
            y = BatchNorm(self.activation)(Linear(EXPANSION * self.width, self.dtype)(x))
            x = x + BatchNorm(self.activation)(Linear(self.width, self.dtype)(y))
        return RMSNorm()(x)


def constrain(params: PyTree) -> PyTree:
    """Return parameters whose kernels [..., I, O] have columns of norm 1, and whose normalizations have norm sqrt(F).

    A column holds the weights of one output, a row of the weight matrix in the authors' code. The norm of a
    normalization is that of its scale and its offset [..., F] together.
    """
    if "kernel" in params:
        kernel = params["kernel"]
        return {**params, "kernel": kernel * _inverse_norm(kernel, -2, 0.0)}
    if "scale" in params:
        parts = jnp.stack([*params.values()], axis=-2)  # [..., parts, F]
        factor = jnp.sqrt(parts.shape[-1]) * _inverse_norm(parts, (-2, -1), UNIT_EPSILON)[..., 0]
        return {name: x * factor for name, x in params.items()}
    return {name: constrain(inner) for name, inner in params.items()}


def _inverse_norm(x: Array, axis: int | tuple[int, ...], epsilon: float) -> Array:
    total = jnp.sum(x**2, axis=axis, keepdims=True) + epsilon
    return jax.lax.rsqrt(jnp.maximum(total, UNIT_EPSILON**2))


def layers(obs: PyTree, options: Options, part: slice, after_memory: bool = False) -> FlashBlocks:
    """Return the blocks. Raise ValueError for options that flash does not support."""
    widths = options.hidden
    if len(set(widths)) > 1:
        got = ", ".join(map(str, widths))
        raise ValueError(f"network.hidden_sizes: flash's blocks must have one width, got {got}; repeat {widths[0]}")
    if options.batch_renorm or options.layer_norm:
        option, got = ("target", "none") if options.batch_renorm else ("critic_layer_norm", "true")
        raise ValueError(f"{option}: network flash normalizes its layers already, got {got}; use network mlp")
    return FlashBlocks(widths[0], len(widths), options.activation, options.dtype)


KIND = Kind((128, 128), "relu", 512, layers, constrain=constrain)
