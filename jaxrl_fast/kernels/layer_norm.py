"""Normalize the last axis: `layer_norm`, with its C (csrc/layer_norm.c) and its XLA body."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.kernels import dispatch
from jaxrl_fast.kernels.activations import ACTIVATIONS, call

EPSILON = 1e-6  # flax's default; same value in csrc/layer_norm.c


def layer_norm(x: Array, scale: Array, offset: Array, activation: str = "none") -> Array:
    """Return activation(scale (x - mean) / sqrt(variance + 1e-6) + offset) for x [..., F], scale [F] and offset [F].

    Mean and variance are taken over the last axis (Ba et al. 2016, "Layer normalization", eq. 4). float32 on a CPU is
    computed in C and can be differentiated once, in reverse mode. C and XLA agree up to rounding.
    """
    rows = x.reshape(-1, x.shape[-1])
    body = _layer_norm_c if dispatch.use_c("layer_norm", rows, scale, offset) else _layer_norm_xla
    return body(rows, scale, offset, activation).reshape(x.shape)


def _layer_norm_xla(x: Array, scale: Array, offset: Array, activation: str) -> Array:
    """Normalize x [R, F] by XLA, as flax's LayerNorm: statistics in float32, with variance E[x^2] - E[x]^2."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, (wide * wide).mean(-1, keepdims=True) - mean * mean)
    factor = jax.lax.rsqrt(variance + EPSILON) * scale[None]
    return ACTIVATIONS[activation](((x - mean) * factor + offset[None]).astype(x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _layer_norm_c(x: Array, scale: Array, offset: Array, activation: str) -> Array:
    """Normalize x [R, F] in C."""
    return call("layer_norm_forward", [_like(x)], activation, {})(x, scale, offset)[0]


def _forward(x, scale, offset, activation):
    """Return y and the residuals, among them the normalized rows [R, F] and 1 / deviation [R]."""
    results = [_like(x), _like(x), jax.ShapeDtypeStruct(x.shape[:1], x.dtype)]
    y, normalized, inverse = call("layer_norm_forward", results, activation, {})(x, scale, offset)
    return y, (normalized, scale, y, inverse)


def _backward(activation, residuals, g):
    """Return the gradients of x, scale and offset. Scratch memory is requested as one further result."""
    normalized, scale, y, inverse = residuals
    results = [_like(y), _like(scale), _like(scale), _like(y)]
    backward = call("layer_norm_backward", results, activation, {})
    grad_x, grad_scale, grad_offset, _ = backward(normalized, scale, y, inverse, g)
    return grad_x, grad_scale, grad_offset


_layer_norm_c.defvjp(_forward, _backward)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
