"""Normalize each feature over a batch: `batch_norm`, with its C (csrc/batch_norm.c) and its XLA body."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.kernels import dispatch
from jaxrl_fast.kernels.activations import ACTIVATIONS, call


def batch_norm(
    x: Array, scale: Array, offset: Array, epsilon: float, activation: str = "none"
) -> tuple[Array, Array, Array]:
    """Return activation(scale (x - mean) / sqrt(variance + epsilon) + offset), and mean and variance, of x [..., F].

    All others are [F]. Mean and variance are taken over all axes but the last, in float32, and are returned without a
    gradient (Ioffe & Szegedy 2015, algorithm 1, with the biased variance). float32 on a CPU is computed in C and can be
    differentiated once, in reverse mode. C and XLA agree up to rounding.
    """
    rows = x.reshape(-1, x.shape[-1])
    body = _batch_norm_c if dispatch.use_c("batch_norm", rows, scale, offset) else _batch_norm_xla
    y, mean, variance = body(rows, scale, offset, epsilon, activation)
    return y.reshape(x.shape), *jax.lax.stop_gradient((mean, variance))


def _batch_norm_xla(x: Array, scale: Array, offset: Array, epsilon: float, activation: str):
    """Normalize x [R, F] by XLA."""
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean(0), wide.var(0)
    y = (wide - mean[None]) * (scale * jax.lax.rsqrt(variance + epsilon))[None] + offset[None]
    return ACTIVATIONS[activation](y.astype(x.dtype)), mean, variance


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _batch_norm_c(x: Array, scale: Array, offset: Array, epsilon: float, activation: str):
    """Normalize x [R, F] in C."""
    return _forward(x, scale, offset, epsilon, activation)[0]


def _forward(x, scale, offset, epsilon, activation):
    """Return y, mean and variance, and the residuals, among them 1 / deviation [F]."""
    function = call("batch_norm_forward", [_like(x), *[_like(scale)] * 3], activation, {})
    y, mean, variance, inverse = function(x, scale, offset, epsilon=np.float32(epsilon))
    return (y, mean, variance), (x, scale, y, mean, inverse)


def _backward(epsilon, activation, residuals, gradients):
    """Return the gradients of x, scale and offset."""
    x, scale, *_ = residuals
    function = call("batch_norm_backward", [_like(x), _like(scale), _like(scale)], activation, {})
    return tuple(function(*residuals, gradients[0], epsilon=np.float32(epsilon)))


_batch_norm_c.defvjp(_forward, _backward)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
