"""Convolve images: `conv2d`, with its C (csrc/conv.c) and its XLA bodies, one for CPUs and one for other devices."""

import functools
import itertools
import math
import operator
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from jaxrl_fast.kernels import blocks, dispatch
from jaxrl_fast.kernels.activations import ACTIVATIONS, call
from jaxrl_fast.kernels.matmul import multiply, multiply_rows

WHITE = 255  # the largest value of a byte, which counts as 1
IMAGES_PER_PART, MAX_PARTS = 4, 16  # the fewest images of a part of the work, and the most parts


def conv2d(
    x: Array, kernel: Array, bias: Array, stride: int = 1, padding: str = "VALID", activation: str = "none"
) -> Array:
    """Return activation(x * kernel + bias), [B, H', W', F], for images x [B, H, W, C], kernel [S, S, C, F], bias [F].

    x has the float type of the kernel or is uint8, whose bytes are divided by 255. Padding is "VALID" or "SAME".
    float32 on a CPU is computed in C, and can be differentiated once, in reverse mode. C and XLA agree up to rounding.
    """
    side = kernel.shape[0]
    if x.ndim != 4 or kernel.shape[:3] != (side, side, x.shape[-1]) or x.dtype not in (kernel.dtype, jnp.uint8):
        raise ValueError(f"conv2d: {x.dtype}{list(x.shape)} does not match a kernel {kernel.dtype}{list(kernel.shape)}")
    pads = ((0, 0), *jax.lax.padtype_to_pads(x.shape[1:3], (side, side), (stride, stride), padding), (0, 0))
    if min(size + sum(pad) for size, pad in zip(x.shape[1:3], pads[1:3], strict=True)) < side:
        raise ValueError(f"conv2d: images {list(x.shape)} are smaller than a kernel {list(kernel.shape)}")
    if dispatch.use_c("conv", kernel, bias) and dispatch.on_cpu(x):
        kernel = kernel / WHITE if x.dtype == jnp.uint8 else kernel
        return _conv2d_c(jnp.pad(x, pads), kernel, bias, stride, activation)
    on_cpu = dispatch.on_cpu(x, kernel, bias)
    convolve = convolve_patches if on_cpu else convolve_xla

    def layer(x: Array) -> Array:
        x = x.astype(kernel.dtype) / WHITE if x.dtype == jnp.uint8 else x
        y = convolve(jnp.pad(x, pads), kernel, stride)
        return ACTIVATIONS[activation](y + jnp.broadcast_to(bias, y.shape))

    return blocks.in_blocks(layer, x, blocks.MAX_IMAGES) if on_cpu else layer(x)


# In C


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _conv2d_c(x: Array, kernel: Array, bias: Array, stride: int, activation: str) -> Array:
    """Compute the unpadded layer in C. Bytes are not divided by 255 here."""
    height, width = ((size - kernel.shape[0]) // stride + 1 for size in x.shape[1:3])
    shape = x.shape[0], height, width, kernel.shape[-1]
    scratch = [jax.ShapeDtypeStruct((height * width + kernel.size // shape[-1],), jnp.int32), _image_scratch(x)]
    results = [jax.ShapeDtypeStruct(shape, kernel.dtype), *scratch]
    return call("conv2d_forward", results, activation, _attributes(x, stride))(x, kernel, bias)[0]


def _forward(x, kernel, bias, stride, activation):
    """Return y and the residuals; the last residual is None if x needs no gradient."""
    y = _conv2d_c(x.value, kernel.value, bias.value, stride, activation)
    return y, (x.value, kernel.value, y, () if x.perturbed else None)


def _backward(stride, activation, residuals, g):
    """Return the gradients of x, kernel and bias. Scratch memory is requested as five further results."""
    x, kernel, y, needs_x = residuals
    if isinstance(g, SymbolicZero):
        g = jnp.zeros(g.shape, g.dtype)
    side, num_outputs = kernel.shape[0], kernel.shape[-1]
    num_pixels, patch_size = math.prod(y.shape[1:3]), kernel.size // num_outputs
    num_offsets = 3 * num_pixels + patch_size + num_outputs + (-(-side // stride)) ** 2
    shapes = kernel.shape, (num_outputs,), y.shape, (kernel.size,), (_num_parts(x), kernel.size + num_outputs)
    results = [jax.ShapeDtypeStruct(shape, kernel.dtype) for shape in shapes]
    results += [jax.ShapeDtypeStruct((num_offsets,), jnp.int32), _image_scratch(x)]
    results += [jax.ShapeDtypeStruct(x.shape, x.dtype)] if needs_x is not None else []
    backward = call("conv2d_backward", results, activation, _attributes(x, stride))
    grad_kernel, grad_bias, _, _, _, _, _, *grad_x = backward(x, kernel, y, g)
    return grad_x[0] if grad_x else None, grad_kernel, grad_bias


_conv2d_c.defvjp(_forward, _backward, symbolic_zeros=True)


def _image_scratch(x: Array) -> jax.ShapeDtypeStruct:
    """Return room for one image of floats per part, [parts, H W C]; nothing if x is of floats already."""
    return jax.ShapeDtypeStruct((_num_parts(x), math.prod(x.shape[1:]) if x.dtype == jnp.uint8 else 0), jnp.float32)


def _num_parts(x: Array) -> int:
    """Return the number of parts of the images. Gradients are summed by part, so it must not depend on the machine."""
    return max(1, min(MAX_PARTS, len(x) // IMAGES_PER_PART))


def _attributes(x: Array, stride: int) -> dict[str, int]:
    """Return the attributes of a C function.

    XLA's threads compute parts, unless this is traced for one of several devices, to which the other cores belong. The
    number of threads changes no bit.
    """
    multithreaded = math.prod(jax.sharding.get_abstract_mesh().axis_sizes) == 1
    return {"multithreaded": multithreaded, "parts": _num_parts(x), "stride": stride}


# By XLA


def convolve_xla(x: Array, kernel: Array, stride: int) -> Array:
    """Convolve x [B, H, W, C] with kernel [S, S, C, F] to [B, H', W', F], without padding."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def convolve_patches(x: Array, kernel: Array, stride: int) -> Array:
    """Compute `convolve_xla` as a sum of matrix products, one for each pixel of a patch.

    Inside a loop, XLA's convolutions take a CPU ten times as long as outside, and matrix products do not. Where the
    stride divides the side, squares of stride x stride pixels first become channels, so that products are few.
    """
    side = kernel.shape[0]
    height, width = ((size - side) // stride + 1 for size in x.shape[1:3])
    if side % stride == 0:
        x, kernel = _space_to_depth(x, kernel, stride, height, width)
        stride = 1
    return _sum_of_products(x, kernel, (stride, height, width))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sum_of_products(x: Array, kernel: Array, patches: tuple[int, int, int]) -> Array:
    """Convolve x [B, H, W, C] with kernel [S, S, C, F] to [B, H', W', F], for patches = (stride, H', W').

    The only residuals are x and the kernel, where XLA's own gradient would keep each pixel S x S times.
    """
    products = [
        multiply(x[:, rows, columns].reshape(-1, x.shape[-1]), kernel[i, j])
        for i, j, rows, columns in _patch_pixels(kernel, patches)
    ]
    return functools.reduce(operator.add, products).reshape(-1, *patches[1:], kernel.shape[-1]).astype(x.dtype)


def _sum_of_products_backward(
    patches: tuple[int, int, int], residuals: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    stride, height, width = patches
    flat = g.reshape(-1, g.shape[-1])
    parts_x, parts_kernel = [], []
    for i, j, rows, columns in _patch_pixels(kernel, patches):
        parts_kernel.append(multiply_rows(x[:, rows, columns].reshape(-1, x.shape[-1]), flat))
        below = x.shape[1] - i - (height - 1) * stride - 1
        right = x.shape[2] - j - (width - 1) * stride - 1
        pads = (0, 0, 0), (i, below, stride - 1), (j, right, stride - 1), (0, 0, 0)
        parts_x.append(jax.lax.pad(multiply(flat, kernel[i, j].T).reshape(*g.shape[:-1], -1), np.float32(0), pads))
    grad_x, grad_kernel = functools.reduce(operator.add, parts_x), jnp.stack(parts_kernel).reshape(kernel.shape)
    return grad_x.astype(x.dtype), grad_kernel.astype(kernel.dtype)


_sum_of_products.defvjp(
    lambda x, kernel, patches: (_sum_of_products(x, kernel, patches), (x, kernel)), _sum_of_products_backward
)


def _patch_pixels(kernel: Array, patches: tuple[int, int, int]) -> Iterator[tuple[int, int, slice, slice]]:
    """Yield each pixel (i, j) of a patch, with the rows and columns where it lies in all patches."""
    stride, height, width = patches
    for i, j in itertools.product(range(kernel.shape[0]), range(kernel.shape[1])):
        yield i, j, slice(i, i + height * stride, stride), slice(j, j + width * stride, stride)


def _space_to_depth(x: Array, kernel: Array, stride: int, height: int, width: int) -> tuple[Array, Array]:
    """Return x as [B, H / s, W / s, s s C] for stride s, and the kernel [S / s, S / s, s s C, F] with stride 1.

    Rows and columns that no patch contains are cut off.
    """
    side, _, in_channels, channels = kernel.shape
    side //= stride
    height, width = height - 1 + side, width - 1 + side
    x = x[:, : height * stride, : width * stride].reshape(-1, height, stride, width, stride, in_channels)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, height, width, stride * stride * in_channels)
    kernel = kernel.reshape(side, stride, side, stride, in_channels, channels).transpose(0, 2, 1, 3, 4, 5)
    return x, kernel.reshape(side, side, -1, channels)
