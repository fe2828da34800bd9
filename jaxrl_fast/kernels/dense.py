"""Compute a dense layer: `dense`, with its C (csrc/dense.c) and its XLA body."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from jaxrl_fast.kernels import blocks, dispatch
from jaxrl_fast.kernels.activations import ACTIVATIONS, call
from jaxrl_fast.kernels.matmul import dot_on_cpu

MIN_VECTOR_OUTPUTS = 8  # with fewer outputs, dense.c vectorizes over the inputs; it defines the same name and value
MAX_WEIGHTS = 2**17  # of a layer in C; XLA is faster for larger ones


def dense(x: Array, kernel: Array, bias: Array, activation: str = "none") -> Array:
    """Return activation(x kernel + bias), [..., O], for x [..., *I], kernel [*I, O] and bias [O] of one float type.

    The inputs may have several axes, as in `jax.numpy.tensordot`. float32 on a CPU is computed in C and can be
    differentiated once, in reverse mode. C and XLA agree up to rounding.
    """
    inputs, num_outputs = kernel.shape[:-1], kernel.shape[-1]
    batch = x.shape[: x.ndim - len(inputs)]
    if x.shape[len(batch) :] != inputs:
        raise ValueError(f"dense: inputs {list(x.shape)} do not match a kernel {list(kernel.shape)}")
    rows, kernel = x.reshape(-1, math.prod(inputs)), kernel.reshape(-1, num_outputs)
    # Without a batch, `vmap` may add one, for which the C would get one copy of the kernel per row.
    in_c = batch and len(rows) and kernel.size <= MAX_WEIGHTS and dispatch.use_c("dense", rows, kernel, bias)
    if in_c:
        y = _dense_c(rows, kernel, bias, activation, _is_transposed(inputs, num_outputs, len(rows)))
    else:
        y = _dense_xla(rows, kernel, bias, activation)
    return y.reshape(*batch, num_outputs)


def _dense_xla(x: Array, kernel: Array, bias: Array, activation: str) -> Array:
    """Compute the layer for x [R, I] by XLA."""
    dot = dot_on_cpu if dispatch.on_cpu(x, kernel, bias) else jnp.matmul
    return ACTIVATIONS[activation](dot(x, kernel) + bias[None])


def _is_transposed(inputs: tuple[int, ...], num_outputs: int, num_rows: int) -> bool:
    """Return whether the C reads x [R, I] column by column. This changes results by rounding only.

    Features [R, F, H, W] of `board_conv` lie in memory as [F, H, W, R], unless it computes them in several blocks.
    """
    one_block = blocks.block_size(num_rows, blocks.MAX_BOARDS) == num_rows
    return len(inputs) == 3 and one_block and num_outputs >= MIN_VECTOR_OUTPUTS


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _dense_c(x: Array, kernel: Array, bias: Array, activation: str, transposed_input: bool) -> Array:
    """Compute the layer for x [R, I] in C."""
    result = jax.ShapeDtypeStruct((x.shape[0], kernel.shape[1]), x.dtype)
    numbers = {"needs_weights": False, "transposed_input": transposed_input}
    layouts = [_layout(transposed_input), None, None]
    kernel = kernel.T if kernel.shape[1] < MIN_VECTOR_OUTPUTS else kernel
    return call("dense_forward", result, activation, numbers, input_layouts=layouts)(x, kernel, bias)


def _forward(x, kernel, bias, activation, transposed_input):
    """Return y and the residuals; the last two are None if x, or kernel and bias, need no gradient."""
    y = _dense_c(x.value, kernel.value, bias.value, activation, transposed_input)
    needs_x, needs_weights = (() if any(of) else None for of in ([x.perturbed], [kernel.perturbed, bias.perturbed]))
    return y, (x.value, kernel.value, y, needs_x, needs_weights)


def _backward(activation, transposed_input, residuals, g):
    """Return the gradients of x, kernel and bias, or None. Scratch memory is requested as two further results."""
    x, kernel, y, needs_x, needs_weights = residuals
    if isinstance(g, SymbolicZero):
        g = jnp.zeros(g.shape, g.dtype)
    layout, shapes = _layout(transposed_input), [y.shape, y.shape if transposed_input else kernel.shape]
    layouts: list[tuple[int, int] | None] = [None, None]
    if needs_weights is not None:
        shapes, layouts = [*shapes, kernel.shape, kernel.shape[1:]], [*layouts, None, None]
    if needs_x is not None:
        shapes, layouts = [*shapes, x.shape], [*layouts, layout]
    results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes]
    numbers = {"needs_weights": needs_weights is not None, "transposed_input": transposed_input}
    backward = call(
        "dense_backward", results, activation, numbers, input_layouts=[layout, None, None, None], output_layouts=layouts
    )
    found = backward(x, kernel, y, g)[2:]
    grad_x = found[-1] if needs_x is not None else None
    return grad_x, *(found[:2] if needs_weights is not None else (None, None))


_dense_c.defvjp(_forward, _backward, symbolic_zeros=True)


def _layout(transposed: bool) -> tuple[int, int] | None:
    """Return the layout of a matrix in memory, major axis first."""
    return (1, 0) if transposed else None
