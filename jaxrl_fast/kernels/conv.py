"""Unpadded convolutions of images on a CPU, by functions of our own in C (convolve.c)."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from jaxrl_fast.kernels import build
from jaxrl_fast.kernels.dense import ACTIVATIONS

IMAGES_OF_PART, MAX_PARTS = 4, 16  # the fewest images that another part is made for, and the most parts
TYPES = jnp.float32, jnp.uint8


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def convolve(x: Array, kernel: Array, bias: Array, stride: int, activation: str = "none") -> Array:
    """activation(x * kernel + bias), [B, H', W', F], for x [B, H, W, C], kernel [S, S, C, F] and bias [F].

    All are float32, but x may be uint8, which counts as its numbers. Differentiated once and backwards only. To be
    called only where `dense.has_c` says so. ValueError for other types of x, or shapes that do not fit.
    """
    side = kernel.shape[0]
    if kernel.shape[:3] != (side, side, x.shape[-1]) or min(x.shape[1:3]) < side or x.dtype not in TYPES:
        raise ValueError(f"no convolution of {x.dtype}{list(x.shape)} by a kernel {list(kernel.shape)}")
    shape = _output_shape(x, kernel, stride)
    rooms = [jax.ShapeDtypeStruct((math.prod(shape[1:3]) + kernel.size // shape[-1],), jnp.int32), _scratch(x)]
    results = [jax.ShapeDtypeStruct(shape, kernel.dtype), *rooms]
    return _call("convolve_forward", results, x, stride, activation)(x, kernel, bias)[0]


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
    pixels, terms = math.prod(y.shape[1:3]), kernel.size // num_outputs
    num_places = 3 * pixels + terms + num_outputs + (-(-side // stride)) ** 2
    shapes = kernel.shape, (num_outputs,), y.shape, (kernel.size,), (_num_parts(x), kernel.size + num_outputs)
    like = [jax.ShapeDtypeStruct(shape, kernel.dtype) for shape in shapes]
    like += [jax.ShapeDtypeStruct((num_places,), jnp.int32), _scratch(x)]
    like += [jax.ShapeDtypeStruct(x.shape, x.dtype)] if wants_x is not None else []
    to_kernel, to_bias, _, _, _, _, _, *to_x = _call("convolve_backward", like, x, stride, activation)(x, kernel, y, g)
    return to_x[0] if to_x else None, to_kernel, to_bias


convolve.defvjp(_forward, _backward, symbolic_zeros=True)


def _output_shape(x: Array, kernel: Array, stride: int) -> tuple[int, ...]:
    height, width = ((size - kernel.shape[0]) // stride + 1 for size in x.shape[1:3])
    return x.shape[0], height, width, kernel.shape[-1]


def _scratch(x: Array) -> jax.ShapeDtypeStruct:
    """For an image of each part as floats, where they are bytes."""
    return jax.ShapeDtypeStruct((_num_parts(x), math.prod(x.shape[1:]) if x.dtype == jnp.uint8 else 0), jnp.float32)


def _num_parts(x: Array) -> int:
    """Of which each has a sum of its own; so they are as many wherever this runs."""
    return max(1, min(MAX_PARTS, len(x) // IMAGES_OF_PART))


def _call(name, results, x, stride, activation):
    """XLA's threads take part unless, when traced, this is for one of several devices, which have the other cores.

    That changes no bit.
    """
    attributes = {
        "activation": list(ACTIVATIONS).index(activation),
        "parts": _num_parts(x),
        "stride": stride,
        "widely": math.prod(jax.sharding.get_abstract_mesh().axis_sizes) == 1,
    }
    call = build.call(name, results, vmap_method="broadcast_all")
    return partial(call, **{name: np.int32(value) for name, value in attributes.items()})
