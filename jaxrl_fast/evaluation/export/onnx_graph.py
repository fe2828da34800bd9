"""Build an ONNX graph: nodes, constants, and shapes that depend on the number of rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

BATCH = "b"  # the name of the number of rows
TYPES = {
    **{"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT, "bfloat16": TensorProto.FLOAT},
    **{"int32": TensorProto.INT32, "int64": TensorProto.INT64, "int8": TensorProto.INT8},
    **{"uint32": TensorProto.UINT32, "uint8": TensorProto.UINT8, "bool": TensorProto.BOOL},
}

Value = Any  # the name of a tensor in the graph (str), or a constant (array)


class Graph:
    """The nodes and constants of an ONNX graph in progress."""

    def __init__(self, batch_input: str) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[tuple[Any, ...], Any] = {}
        self.batch_input = batch_input
        self.num_names = 0

    def op(self, kind: str, *inputs: Value, **attributes: Any) -> str:
        """Add a node with one output. Return the output's name."""
        name = self._new_name()
        self.nodes.append(helper.make_node(kind, [self.name(x) for x in inputs], [name], **attributes))
        return name

    def name(self, value: Value) -> str:
        """Return the name of a value in the graph; an array becomes a constant of the graph."""
        if isinstance(value, str):
            return value
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(
                np.ascontiguousarray(array).reshape(array.shape), self._new_name()
            )
        return str(self.constants[key].name)

    def shape(self, dims: Sequence[Any]) -> Value:
        """Return an int64 vector of dimensions, some of which may be multiples of the number of rows."""
        if all(isinstance(d, int | np.integer) for d in dims):
            return np.array(dims, np.int64)
        rows = self.op("Slice", self.op("Shape", self.batch_input), *(np.array([i], np.int64) for i in (0, 1)))
        return self.op("Concat", *(self._dimension(rows, d) for d in dims), axis=0)

    def cast(self, value: Value, dtype: Any) -> str:
        """Return the value as another type."""
        return self.op("Cast", value, to=type_of(dtype))

    def transpose(self, value: Value, order: Sequence[int]) -> Value:
        """Return the value with its axes in another order."""
        if list(order) == sorted(order):
            return value
        return self.op("Transpose", value, perm=order) if isinstance(value, str) else np.transpose(value, order)

    def _dimension(self, rows: str, dim: Any) -> Value:
        if isinstance(dim, int | np.integer):
            return np.array([dim], np.int64)
        factors = [int(dim._evaluate({BATCH: n})) for n in (0, 1, 2)]
        if factors != [0, factors[1], 2 * factors[1]]:
            raise ValueError(
                f"to onnx: an array's length must be a multiple of the number of rows, got {dim}; use stablehlo"
            )
        return rows if factors[1] == 1 else self.op("Mul", rows, np.array([factors[1]], np.int64))

    def _new_name(self) -> str:
        self.num_names += 1
        return f"v{self.num_names}"


def type_of(dtype: Any) -> int:
    """Return ONNX's number of a dtype. Raise ValueError for an unsupported dtype."""
    name = np.dtype(dtype).name
    if name not in TYPES:
        raise ValueError(f"to onnx: the policy computes with an unsupported type, got {name}; use stablehlo")
    return int(TYPES[name])
