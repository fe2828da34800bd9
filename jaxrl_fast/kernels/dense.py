"""Dense layers: rows by a kernel, a bias, an activation. On a CPU by functions of our own, where they can be had."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from jaxrl_fast.kernels import build
from jaxrl_fast.kernels.matmul import dot_on_cpu

ACTIVATIONS = {"none": lambda x: x, "tanh": jnp.tanh, "relu": jax.nn.relu}  # numbered like this in activations.h
MAX_FEW_OUTPUTS = 8  # for fewer dense.c wants the kernel turned, and rows
MAX_WEIGHTS = 2**17  # of a layer in dense.c: larger ones XLA does sooner, on all cores if it may


def dense(x: Array, kernel: Array, bias: Array, activation: str = "none", columns: bool = False) -> Array:
    """activation(x kernel + bias), [..., O], for x [..., I], kernel [I, O] and bias [O] of one type of floats.

    `columns`: x lies in memory as its transpose would. Differentiated once and backwards only on a CPU, where a `vmap`
    over rows alone would copy the kernel for each member. All ways to compute it agree to rounding.
    """
    num_inputs, num_outputs = kernel.shape
    rows = x.reshape(-1, num_inputs)
    ours = is_on_cpu(rows, kernel, bias)
    if ours and x.ndim > 1 and len(rows) and kernel.size <= MAX_WEIGHTS and has_kernels(rows, kernel, bias):
        y = _dense_kernel(rows, kernel, bias, activation, columns and num_outputs >= MAX_FEW_OUTPUTS)
    else:
        dot = dot_on_cpu if ours else jnp.matmul
        y = ACTIVATIONS[activation](dot(rows, kernel) + bias[None])
    return y.reshape(*x.shape[:-1], num_outputs)


def is_on_cpu(*layer: Array) -> bool:
    """Whether a CPU computes with these, and may do so by gradients of ours.

    It may not where JAX follows what differs between devices (`shard_map` with check_vma): ours do not.
    """
    types = [jax.typeof(x) for x in layer]
    differ = any(getattr(getattr(x, "mat", x), "varying", None) or getattr(x, "vma", None) for x in types)
    return jax.default_backend() == "cpu" and not differ


def has_kernels(*layer: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether there are functions in C for such arrays."""
    return all(x.dtype == jnp.float32 for x in layer) and build.is_available()


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _dense_kernel(x: Array, kernel: Array, bias: Array, activation: str, columns: bool) -> Array:
    like = jax.ShapeDtypeStruct((x.shape[0], kernel.shape[1]), x.dtype)
    layouts = [_layout(columns), None, None]
    kernel = kernel.T if kernel.shape[1] < MAX_FEW_OUTPUTS else kernel
    return _call("dense_forward", like, activation, columns, input_layouts=layouts)(x, kernel, bias)


def _forward(x, kernel, bias, activation, columns):
    """What is saved says whether a gradient of x is wanted: None where it is not."""
    y = _dense_kernel(x.value, kernel.value, bias.value, activation, columns)
    return y, (x.value, kernel.value, y, () if x.perturbed else None)


def _backward(activation, columns, saved, g):
    """What dense.c wants room for is a result, so that it is XLA that has it."""
    x, kernel, y, wants_x = saved
    if isinstance(g, SymbolicZero):
        g = jnp.zeros(g.shape, g.dtype)
    shapes = [kernel.shape, kernel.shape[1:], y.shape, y.shape if columns else kernel.shape]
    shapes += [x.shape] if wants_x is not None else []
    like = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes]
    lies = _layout(columns)
    of_inputs, of_results = [lies, None, None, None], [None, None, None, None, lies][: len(shapes)]
    call = _call("dense_backward", like, activation, columns, input_layouts=of_inputs, output_layouts=of_results)
    to_kernel, to_bias, _, _, *to_x = call(x, kernel, y, g)
    return to_x[0] if to_x else None, to_kernel, to_bias


_dense_kernel.defvjp(_forward, _backward, symbolic_zeros=True)


def _layout(columns: bool) -> tuple[int, int] | None:
    """Of a matrix in memory, major axis first."""
    return (1, 0) if columns else None


def _call(name, results, activation, columns, **layouts):
    number = list(ACTIVATIONS).index(activation)
    call = build.call(name, results, vmap_method="broadcast_all", **layouts)
    return partial(call, activation=np.int32(number), columns=np.int32(columns))
