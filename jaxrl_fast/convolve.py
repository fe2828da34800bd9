"""Unpadded convolutions of images on a CPU, by functions of our own in C (convolve.c)."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from jaxrl_fast import native
from jaxrl_fast.dense import ACTIVATIONS


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def convolve(x: Array, kernel: Array, bias: Array, stride: int, activation: str = "none") -> Array:
    """activation(x * kernel + bias), [B, H', W', F], for x [B, H, W, C], kernel [S, S, C, F] and bias [F].

    All are float32, but x may be uint8, which counts as its numbers. Differentiated once and backwards only. To be
    called only where `dense.has_c` says so.
    """
    shape = _output_shape(x, kernel, stride)
    pixels, terms = shape[1] * shape[2], kernel.size // kernel.shape[-1]
    rooms = [jax.ShapeDtypeStruct((pixels + terms,), jnp.int32), _room_of_image(x)]
    return _call("convolve_forward", [jax.ShapeDtypeStruct(shape, kernel.dtype), *rooms], stride, activation)(
        x, kernel, bias
    )[0]


def _forward(x, kernel, bias, stride, activation):
    """What is saved says whether a gradient of x is wanted: None where it is not."""
    y = convolve(x.value, kernel.value, bias.value, stride, activation)
    return y, (x.value, kernel.value, y, () if x.perturbed else None)


def _backward(stride, activation, saved, g):
    """What convolve.c wants room for is a result, so that it is XLA that has it."""
    x, kernel, y, wants_x = saved
    if isinstance(g, SymbolicZero):
        g = jnp.zeros(g.shape, g.dtype)
    side, num_outputs = kernel.shape[0], kernel.shape[-1]
    pixels, terms = y.shape[1] * y.shape[2], kernel.size // num_outputs
    num_places = 3 * pixels + terms + num_outputs + (-(-side // stride)) ** 2
    like = [jax.ShapeDtypeStruct(shape, kernel.dtype) for shape in (kernel.shape, kernel.shape[-1:], y.shape)]
    like += [jax.ShapeDtypeStruct((kernel.size,), kernel.dtype), jax.ShapeDtypeStruct((num_places,), jnp.int32)]
    like += [_room_of_image(x)] + ([jax.ShapeDtypeStruct(x.shape, x.dtype)] if wants_x is not None else [])
    to_kernel, to_bias, _, _, _, _, *to_x = _call("convolve_backward", like, stride, activation)(x, kernel, y, g)
    return to_x[0] if to_x else None, to_kernel, to_bias


convolve.defvjp(_forward, _backward, symbolic_zeros=True)


def _output_shape(x: Array, kernel: Array, stride: int) -> tuple[int, ...]:
    height, width = ((size - kernel.shape[0]) // stride + 1 for size in x.shape[1:3])
    return x.shape[0], height, width, kernel.shape[-1]


def _room_of_image(x: Array) -> jax.ShapeDtypeStruct:
    """For one as floats, where they are bytes."""
    return jax.ShapeDtypeStruct((math.prod(x.shape[1:]) if x.dtype == jnp.uint8 else 0,), jnp.float32)


def _call(name, results, stride, activation):
    number = list(ACTIVATIONS).index(activation)
    call = native.call(name, results, vmap_method="broadcast_all")
    return partial(call, activation=np.int32(number), stride=np.int32(stride))
