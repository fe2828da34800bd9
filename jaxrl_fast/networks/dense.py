"""Dense layers, noisy or not, and what may follow any layer, as flax modules that `networks` puts together."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.kernels.dense import ACTIVATIONS, dense, has_kernels, is_on_cpu
from jaxrl_fast.kernels.layer_norm import layer_norm

SPREAD = 0.5  # of noisy weights at the start, times the root of the number of inputs (the paper's sigma_0)
gain_of = nn.initializers.constant  # what a module declares for a kernel; `networks` does the rest


class MLP(nn.Module):
    """Dense layers, each activated: [..., D] to [..., hidden[-1]]."""

    hidden: tuple[int, ...]
    activation: str
    layer_norm: bool
    dtype: jnp.dtype
    noisy: bool = False

    @nn.compact
    def __call__(self, x, columns=False):
        """`columns`: x lies in memory as its transpose would."""
        activation = "none" if self.layer_norm else self.activation  # else it is a part of the dense layer
        for i, width in enumerate(self.hidden):
            layer = NoisyDense if self.noisy else Dense
            x = layer(width, np.sqrt(2), self.dtype, activation, columns and i == 0)(x)
            x = activate(self, x) if self.layer_norm else x
        return x


class Dense(nn.Module):
    """A dense layer and its activation, [..., I] to [..., features]."""

    features: int
    gain: float
    dtype: jnp.dtype = jnp.float32
    activation: str = "none"
    columns: bool = False

    @nn.compact
    def __call__(self, x):
        return dense(x.astype(self.dtype), *_weights(self, x.shape[-1]), self.activation, self.columns)


class NoisyDense(Dense):
    """A dense layer whose weights are a mean and a learned spread times factorised noise.

    w = mean + spread * f(noise_in) f(noise_out)^T,  f(x) = sign(x) sqrt(|x|)  (Fortunato et al. 2018, eq. 10 and 11).
    The noise is the collection "noise", a vector for all rows [I + O] or one for each row of x [..., I + O]; without it
    the spread does not count. The spread starts as SPREAD / sqrt(I).
    """

    @nn.compact
    def __call__(self, x):
        num_inputs = x.shape[-1]
        x, (kernel, bias) = x.astype(self.dtype), _weights(self, num_inputs)
        spread_init = nn.initializers.constant(SPREAD / np.sqrt(num_inputs))
        spread_kernel = self.param("spread_kernel", spread_init, (num_inputs, self.features)).astype(self.dtype)
        spread_bias = self.param("spread_bias", spread_init, (self.features,)).astype(self.dtype)
        if not (self.is_initializing() or self.has_variable("noise", "noise")):
            return dense(x, kernel, bias, self.activation, self.columns)
        noise = self.variable("noise", "noise", jnp.zeros, (num_inputs + self.features,)).value.astype(self.dtype)
        noise = jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
        noise_in, noise_out = noise[..., :num_inputs], noise[..., num_inputs:]
        if noise.ndim == 1:  # the same weights for all rows: one product
            kernel, bias = kernel + spread_kernel * jnp.outer(noise_in, noise_out), bias + spread_bias * noise_out
            return dense(x, kernel, bias, self.activation, self.columns)
        spread = dense(x * noise_in, spread_kernel, spread_bias)
        return ACTIVATIONS[self.activation](dense(x, kernel, bias) + noise_out * spread)


def _weights(module: Dense, num_inputs: int) -> tuple[Array, Array]:
    """Kernel [I, O] and bias [O] of a compact method of `module`, in the type that it computes in."""
    kernel = module.param("kernel", gain_of(module.gain), (num_inputs, module.features))
    bias = module.param("bias", nn.initializers.zeros, (module.features,))
    return kernel.astype(module.dtype), bias.astype(module.dtype)


def activate(module: nn.Module, x: Array) -> Array:
    """To be called inside a compact method of `module`, whose options it follows."""
    if module.layer_norm and is_on_cpu(x) and has_kernels(x):
        return LayerNorm(module.activation)(x)
    x = nn.LayerNorm(dtype=module.dtype)(x) if module.layer_norm else x
    return ACTIVATIONS[module.activation](x)


class LayerNorm(nn.Module):
    """flax's, with the same parameters, and an activation: by a function of ours in C."""

    activation: str

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], x.dtype)
        offset = self.param("bias", nn.initializers.zeros, x.shape[-1:], x.dtype)
        return layer_norm(x.reshape(-1, x.shape[-1]), scale, offset, self.activation).reshape(x.shape)
