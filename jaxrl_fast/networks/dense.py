"""Define dense layers, noisy or not, and layer normalization, as flax modules."""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast import kernels
from jaxrl_fast.networks.init import declare_kernel

SPREAD = 0.5  # initial spread of noisy weights, times the root of the number of inputs (the paper's sigma_0)


class Dense(nn.Module):
    """A dense layer and its activation: [..., *inputs] to [..., features].

    The last `input_axes` axes of x are its inputs, I numbers in all.
    """

    features: int
    gain: float
    dtype: jnp.dtype = jnp.float32
    activation: str = "none"
    input_axes: int = 1

    @nn.compact
    def __call__(self, x):
        kernel, bias = self.weights(x)
        return self.layer(x, kernel, bias)

    def weights(self, x: Array) -> tuple[Array, Array]:
        """Return the parameters, a kernel [I, O] and a bias [O], in `dtype`."""
        kernel = declare_kernel(self, self.gain, (self.num_inputs(x), self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return kernel.astype(self.dtype), bias.astype(self.dtype)

    def layer(self, x: Array, kernel: Array, bias: Array) -> Array:
        """Return the layer's output for x [..., *inputs], a kernel [I, O] and a bias [O]."""
        inputs = x.shape[x.ndim - self.input_axes :]
        return kernels.dense(x.astype(self.dtype), kernel.reshape(*inputs, -1), bias, self.activation)

    def num_inputs(self, x: Array) -> int:
        """Return I."""
        return math.prod(x.shape[x.ndim - self.input_axes :])


class NoisyDense(Dense):
    """A dense layer whose weights are a mean and a learned spread times factorized noise.

    w = mean + spread * f(noise_in) f(noise_out)^T,  f(x) = sign(x) sqrt(|x|)  (Fortunato et al. 2018, eq. 10 and 11).
    The collection "noise" holds one vector for all rows, [I + O], or one for each row of x, [..., I + O]. Without it
    the weights are their means. The spread starts at SPREAD / sqrt(I).
    """

    @nn.compact
    def __call__(self, x):
        kernel, bias = self.weights(x)
        num_inputs = self.num_inputs(x)
        spread_init = nn.initializers.constant(SPREAD / np.sqrt(num_inputs))
        spread_kernel = self.param("spread_kernel", spread_init, (num_inputs, self.features)).astype(self.dtype)
        spread_bias = self.param("spread_bias", spread_init, (self.features,)).astype(self.dtype)
        if not (self.is_initializing() or self.has_variable("noise", "noise")):
            return self.layer(x, kernel, bias)
        noise = self.variable("noise", "noise", jnp.zeros, (num_inputs + self.features,)).value.astype(self.dtype)
        noise = jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
        noise_in, noise_out = noise[..., :num_inputs], noise[..., num_inputs:]
        if noise.ndim == 1:  # all rows have the same weights, so one product is enough
            kernel, bias = kernel + spread_kernel * jnp.outer(noise_in, noise_out), bias + spread_bias * noise_out
            return self.layer(x, kernel, bias)
        x = x.reshape(*x.shape[: x.ndim - self.input_axes], num_inputs).astype(self.dtype)
        spread = kernels.dense(x * noise_in, spread_kernel, spread_bias)
        return kernels.ACTIVATIONS[self.activation](kernels.dense(x, kernel, bias) + noise_out * spread)


class LayerNorm(nn.Module):
    """Normalization of the last axis of [..., F], and an activation, with the parameters of flax's LayerNorm."""

    activation: str = "none"

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        offset = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        return kernels.layer_norm(x, scale, offset, self.activation)
