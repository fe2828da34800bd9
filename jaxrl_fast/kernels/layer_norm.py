"""Layer normalization and activation of rows on a CPU, by functions of our own in C (layer_norm.c)."""

from functools import partial

import jax
import numpy as np
from jax import Array

from jaxrl_fast.kernels import build
from jaxrl_fast.kernels.dense import ACTIVATIONS


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Array, scale: Array, offset: Array, activation: str = "none") -> Array:
    """activation(scale (x - mean) / sqrt(variance + 1e-6) + offset) over the last axis of x [R, F]; scale, offset [F].

    (Ba et al. 2016, "Layer normalization", eq. 4.) All are float32. Differentiated once and backwards only. To be
    called only where `dense.has_c` says so.
    """
    return _call("layer_norm_forward", [_like(x)], activation)(x, scale, offset)[0]


def _forward(x, scale, offset, activation):
    results = [_like(x), _like(x), jax.ShapeDtypeStruct(x.shape[:1], x.dtype)]
    y, normed, inverse = _call("layer_norm_forward", results, activation)(x, scale, offset)
    return y, (normed, scale, y, inverse)


def _backward(activation, saved, g):
    normed, scale, y, inverse = saved
    results = [_like(y), _like(scale), _like(scale), _like(y)]
    to_x, to_scale, to_offset, _ = _call("layer_norm_backward", results, activation)(normed, scale, y, inverse, g)
    return to_x, to_scale, to_offset


layer_norm.defvjp(_forward, _backward)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(name, results, activation):
    call = build.call(name, results, vmap_method="broadcast_all")
    return partial(call, activation=np.int32(list(ACTIVATIONS).index(activation)))
