"""Translate JAX's operations to ONNX nodes. Each function takes the graph, the equation and its inputs.

`OPS` holds them by the name of the primitive. Images may have their axes in any order.
"""

import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxrl_fast.evaluation.export.onnx_graph import Graph, Value

SAME_NAME = (
    *("Add", "Sub", "Mul", "Div", "Max", "Min", "Neg", "Exp", "Log", "Tanh", "Sqrt", "Abs", "Sign", "Floor", "Ceil"),
    *("Erf", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Pow", "And", "Or", "Xor", "Not"),
)
OTHER_NAME = {
    **{"lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal"},
    **{"logistic": "Sigmoid", "copy": "Identity", "copy_p": "Identity", "stop_gradient": "Identity"},
}


def _op(kind: str, graph: Graph, equation: Any, *values: Value) -> str:
    """Add an elementwise operation with the same meaning in JAX and ONNX."""
    if kind in ("And", "Or", "Xor", "Not") and equation.invars[0].aval.dtype != bool:
        raise ValueError(f"to onnx: {kind} of integers is not supported, got {equation}; use stablehlo")
    return graph.op(kind, *values)


def _like(equation: Any, number: float) -> np.ndarray:
    """Return a scalar of the type of the first input."""
    dtype = equation.invars[0].aval.dtype
    return np.asarray(number, np.float32 if dtype.name in ("float16", "bfloat16") else dtype)


def _axes(axes: Sequence[int]) -> np.ndarray:
    return np.asarray(axes, np.int64)


def _integer_pow(graph, equation, x):
    y = equation.params["y"]
    return graph.op("Mul", x, x) if y == 2 else graph.op("Pow", x, _like(equation, y))


def _is_finite(graph, equation, x):
    return graph.op("Not", graph.op("Or", graph.op("IsInf", x), graph.op("IsNaN", x)))


def _select(graph, equation, which, *cases):
    if equation.invars[0].aval.dtype != bool:
        raise ValueError("to onnx: a choice of several arrays is not supported, got select_n; use stablehlo")
    return graph.op("Where", which, cases[1], cases[0])


def _broadcast(graph, equation, x, *dynamic):
    """Insert axes of length 1, then expand those that are longer."""
    shape, kept = equation.params["shape"], [int(i) for i in equation.params["broadcast_dimensions"]]
    new = [i for i in range(len(shape)) if i not in kept]
    x = graph.op("Unsqueeze", x, _axes(new)) if new else x
    old = dict(zip(kept, equation.invars[0].aval.shape))
    return x if all(old.get(i, 1) == d for i, d in enumerate(shape)) else graph.op("Expand", x, graph.shape(shape))


def _reshape(graph, equation, x, *dynamic):
    """Reshape; -1 stands for a length that depends on the number of rows, if there is one only."""
    shape = equation.outvars[0].aval.shape
    is_symbol = [not isinstance(d, int) for d in shape]
    if sum(is_symbol) == 1:
        return graph.op("Reshape", x, np.array([-1 if s else d for s, d in zip(is_symbol, shape)], np.int64))
    return graph.op("Reshape", x, graph.shape(shape))


def _slice(graph, equation, x):
    """Slice, skipping the axes that are kept whole."""
    shape = equation.invars[0].aval.shape
    starts, limits, strides = (equation.params[name] for name in ("start_indices", "limit_indices", "strides"))
    strides = strides or (1,) * len(shape)
    cut = [i for i, d in enumerate(shape) if (starts[i], limits[i], strides[i]) != (0, d, 1)]
    if not cut:
        return x
    limit = graph.shape([limits[i] for i in cut])
    return graph.op("Slice", x, _axes([starts[i] for i in cut]), limit, _axes(cut), _axes([strides[i] for i in cut]))


def _pad(graph, equation, x, value):
    config = equation.params["padding_config"]
    if any(inner for _, _, inner in config):
        raise ValueError("to onnx: padding between elements is not supported, got pad; use stablehlo")
    return graph.op("Pad", x, _axes([c[0] for c in config] + [c[1] for c in config]), value)


def _split(graph, equation, x):
    sizes, axis = equation.params["sizes"], equation.params["axis"]
    stops = np.cumsum(sizes)
    return [graph.op("Slice", x, _axes([b - n]), _axes([b]), _axes([axis])) for n, b in zip(sizes, stops)]


def _stack(graph, equation, *xs):
    axis = int(equation.params["axis"])
    return graph.op("Concat", *(graph.op("Unsqueeze", x, _axes([axis])) for x in xs), axis=axis)


def _gather(graph, equation, x, index):
    """Take whole slices along one axis: rows x[index], as an embedding does, or columns x[:, index]."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, (axis, *more) = equation.invars[0].aval.shape, numbers.start_index_map
    new = range(axis, axis + equation.invars[1].aval.ndim - 1)  # axes of the result that the index has
    others = tuple(i for i in range(equation.outvars[0].aval.ndim) if i not in new)
    whole = (*shape[:axis], 1, *shape[axis + 1 :])
    if more or numbers.collapsed_slice_dims != (axis,) or tuple(sizes) != whole or numbers.offset_dims != others:
        raise ValueError("to onnx: indexing other than along one axis is not supported, got gather; use stablehlo")
    return graph.op("Gather", x, graph.op("Squeeze", index, _axes([-1])), axis=axis)


def _reduce(kind: str, graph: Graph, equation: Any, x: Value) -> str:
    return graph.op(kind, x, _axes(equation.params["axes"]), keepdims=0)


def _reduce_bool(kind: str, graph: Graph, equation: Any, x: Value) -> str:
    return graph.cast(_reduce(kind, graph, equation, graph.cast(x, np.int32)), bool)


def _arg(kind: str, graph: Graph, equation: Any, x: Value) -> str:
    (axis,) = equation.params["axes"]
    x = graph.cast(x, np.int32) if equation.invars[0].aval.dtype == bool else x
    return graph.cast(graph.op(kind, x, axis=int(axis), keepdims=0), equation.params["index_dtype"])


def _dot(graph, equation, x, y):
    """Multiply by MatMul where one of the factors is a matrix, else by Einsum."""
    (left, right), (batch_x, batch_y) = equation.params["dimension_numbers"]
    ranks = [len(v.aval.shape) for v in equation.invars]
    if len(left) == 1 and not batch_x and ranks[1] == 2:
        order = [i for i in range(ranks[0]) if i != left[0]] + [left[0]]
        return graph.op("MatMul", graph.transpose(x, order), graph.transpose(y, [right[0], 1 - right[0]]))
    letters = iter(string.ascii_letters)
    names_x = [next(letters) for _ in range(ranks[0])]
    names_y = [next(letters) for _ in range(ranks[1])]
    for i, j in (*zip(left, right), *zip(batch_x, batch_y)):
        names_y[j] = names_x[i]
    free = [n for i, n in enumerate(names_x) if i not in (*left, *batch_x)]
    free += [n for j, n in enumerate(names_y) if j not in (*right, *batch_y)]
    result = "".join([names_x[i] for i in batch_x] + free)
    return graph.op("Einsum", x, y, equation=f"{''.join(names_x)},{''.join(names_y)}->{result}")


def _conv(graph, equation, x, kernel):
    """Convolve in [N, C, H, W], as ONNX does."""
    p = equation.params
    if set(p["lhs_dilation"]) != {1} or p["batch_group_count"] != 1:
        raise ValueError("to onnx: a transposed convolution is not supported, got conv; use stablehlo")
    lhs, rhs, out = p["dimension_numbers"]
    pads = [int(low) for low, _ in p["padding"]] + [int(high) for _, high in p["padding"]]
    y = graph.op(
        "Conv",
        graph.transpose(x, lhs),
        graph.transpose(kernel, rhs),
        strides=p["window_strides"],
        dilations=p["rhs_dilation"],
        pads=pads,
        group=p["feature_group_count"],
    )
    return graph.transpose(y, np.argsort(out).tolist())


def _pool(kind: str, graph: Graph, equation: Any, x: Value) -> str:
    """Pool in [N, C, H, W], as ONNX does; a sum is the mean times the size of the window."""
    p = equation.params
    window, strides, padding = p["window_dimensions"], p["window_strides"], p["padding"]
    space = [i for i, size in enumerate(window) if size > 1 or strides[i] > 1]
    if set((*p["base_dilation"], *p["window_dilation"])) != {1} or len(window) - len(space) < 2:
        raise ValueError(f"to onnx: this kind of pooling is not supported, got windows {window}; use stablehlo")
    others = [i for i in range(len(window)) if i not in space]
    first, channels = others[0], others[1:]
    order = [first, *channels, *space]
    shape = [equation.invars[0].aval.shape[i] for i in order]
    flat = [0, int(np.prod([shape[1 + k] for k in range(len(channels))])), *shape[1 + len(channels) :]]
    x = graph.transpose(x, order)
    x = x if len(channels) == 1 else graph.op("Reshape", x, np.array(flat, np.int64))
    options = {"count_include_pad": 1} if kind == "AveragePool" else {}
    y = graph.op(
        kind,
        x,
        kernel_shape=[window[i] for i in space],
        strides=[strides[i] for i in space],
        pads=[int(padding[i][0]) for i in space] + [int(padding[i][1]) for i in space],
        **options,
    )
    if kind == "AveragePool":
        y = graph.op("Mul", y, _like(equation, float(np.prod([window[i] for i in space]))))
    result = [equation.outvars[0].aval.shape[i] for i in order]
    y = y if len(channels) == 1 else graph.op("Reshape", y, np.array([0, *result[1:]], np.int64))
    return graph.transpose(y, np.argsort(order).tolist())


OPS: dict[str, Callable[..., Any]] = {
    **{kind.lower(): partial(_op, kind) for kind in SAME_NAME},
    **{name: partial(_op, kind) for name, kind in OTHER_NAME.items()},
    **{f"reduce_{kind.lower()}": partial(_reduce, f"Reduce{kind}") for kind in ("Sum", "Max", "Min", "Prod")},
    "reduce_and": partial(_reduce_bool, "ReduceMin"),
    "reduce_or": partial(_reduce_bool, "ReduceMax"),
    "argmax": partial(_arg, "ArgMax"),
    "argmin": partial(_arg, "ArgMin"),
    "reduce_window_max": partial(_pool, "MaxPool"),
    "reduce_window_sum": partial(_pool, "AveragePool"),
    "conv_general_dilated": _conv,
    "dot_general": _dot,
    "integer_pow": _integer_pow,
    "square": lambda graph, equation, x: graph.op("Mul", x, x),
    "rsqrt": lambda graph, equation, x: graph.op("Reciprocal", graph.op("Sqrt", x)),
    "exp2": lambda graph, equation, x: graph.op("Pow", _like(equation, 2), x),
    "log1p": lambda graph, equation, x: graph.op("Log", graph.op("Add", x, _like(equation, 1))),
    "expm1": lambda graph, equation, x: graph.op("Sub", graph.op("Exp", x), _like(equation, 1)),
    "ne": lambda graph, equation, x, y: graph.op("Not", graph.op("Equal", x, y)),
    "rem": lambda graph, equation, x, y: graph.op("Mod", x, y, fmod=1),
    "is_finite": _is_finite,
    "clamp": lambda graph, equation, low, x, high: graph.op("Min", graph.op("Max", x, low), high),
    "select_n": _select,
    "convert_element_type": lambda graph, equation, x: graph.cast(x, equation.params["new_dtype"]),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda graph, equation, x: graph.op("Squeeze", x, _axes(equation.params["dimensions"])),
    "transpose": lambda graph, equation, x: graph.transpose(x, equation.params["permutation"]),
    "concatenate": lambda graph, equation, *xs: graph.op("Concat", *xs, axis=int(equation.params["dimension"])),
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "pad": _pad,
    "gather": _gather,
    "cumsum": lambda graph, equation, x: graph.op(
        "CumSum", x, np.int64(equation.params["axis"]), reverse=int(equation.params["reverse"])
    ),
    "optimization_barrier": lambda graph, equation, *values: list(values),
}
