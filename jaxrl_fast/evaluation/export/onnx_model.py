"""Export a policy as an ONNX model: each equation of its jaxpr becomes a few nodes, by the table in `onnx_ops`.

Equations of constants are computed while exporting. Types are those of the jaxpr, except that float16 and bfloat16 are
computed in float32, which onnxruntime supports everywhere.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import onnx
from jax import ShapeDtypeStruct, export
from jax.extend import core
from onnx import helper

from jaxrl_fast.evaluation.export.function import PolicyFunction, named, remembered, takes_numbers
from jaxrl_fast.evaluation.export.onnx_graph import BATCH, Graph, Value, type_of
from jaxrl_fast.evaluation.export.onnx_ops import OPS
from jaxrl_fast.utils import target

OPSET = 18  # of onnxruntime 1.14 and newer
IR_VERSION = 8
ACTION = "action"
CALLS = {"jaxpr", "call_jaxpr", "fun_jaxpr"}  # parameters that hold the body of an equation that is only a call
LOOPS = {"scan", "while", "cond"}  # equations with bodies that are not plain calls


def serialize(function: PolicyFunction) -> bytes:
    """Return the policy as an ONNX model, from observations, masks and noise [b, ...] to actions [b, ...].

    The arrays of a memory follow the observations and masks, and the next ones the actions.

    Raises:
        ValueError: If an operation of the policy has no counterpart in `onnx_ops`.
    """
    if not takes_numbers(function):
        raise ValueError("to onnx: sampled needs noise of real numbers, got PRNG keys; use stablehlo")
    (num_rows,) = export.symbolic_shape(BATCH)
    wide = lambda x: ShapeDtypeStruct((num_rows, *x.shape), x.dtype)
    memory, noise = tuple(one.initial for one in function.memory), tuple(one.spec for one in function.noise)
    act = lambda given, memory, noise: function.act(given, noise, memory)
    with target.tracing_for("any"):
        closed = jax.make_jaxpr(jax.vmap(act))(*jax.tree.map(wide, (function.given, memory, noise)))
    names = [*named(function.given), *(one.name for one in function.memory), *(one.name for one in function.noise)]
    graph = Graph(names[0])
    outputs = [ACTION, *(x.name for x in remembered(function, "next_memory"))]
    results = _evaluate(graph, closed.jaxpr, closed.consts, names, [True] * len(outputs))
    for result, name in zip(results, outputs, strict=True):
        graph.nodes.append(helper.make_node("Identity", [graph.name(result)], [name]))
    describe = lambda name, x: helper.make_tensor_value_info(name, type_of(x.dtype), [BATCH, *x.shape])
    specs = [*jax.tree.leaves(function.given), *memory, *noise]
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "policy",
            [describe(name, spec) for name, spec in zip(names, specs, strict=True)],
            [describe(name, spec) for name, spec in zip(outputs, (function.action, *memory), strict=True)],
            list(graph.constants.values()),
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="jaxrl_fast",
    )
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def _evaluate(
    graph: Graph, jaxpr: Any, constants: Sequence[Value], arguments: Sequence[Value], is_needed: Sequence[bool]
) -> list[Value]:
    """Add the equations that the needed results depend on. Return all results; those not needed are None."""
    known: dict[Any, Value] = dict(zip(jaxpr.constvars, constants)) | dict(zip(jaxpr.invars, arguments))
    of_literal = lambda x: np.asarray(x.val, x.aval.dtype)
    read = lambda x: of_literal(x) if isinstance(x, core.Literal) else known.get(x)
    equations, needed = _live(jaxpr, is_needed)
    for equation in equations:
        values = [read(x) for x in equation.invars]
        results = _results(graph, equation, values, [x in needed for x in equation.outvars])
        known |= dict(zip(equation.outvars, results))
    return [read(x) for x in jaxpr.outvars]


def _live(jaxpr: Any, is_needed: Sequence[bool]) -> tuple[list[Any], set[Any]]:
    """Return, in order, the equations that needed results depend on, and all variables that they need."""
    needed = {x for x, flag in zip(jaxpr.outvars, is_needed) if flag and not isinstance(x, core.Literal)}
    live = []
    for equation in reversed(jaxpr.eqns):
        if any(x in needed for x in equation.outvars):
            live.append(equation)
            needed |= {x for x in equation.invars if not isinstance(x, core.Literal)}
    return live[::-1], needed


def _results(graph: Graph, equation: Any, values: list[Value], is_needed: list[bool]) -> list[Value]:
    """Return the results of one equation: constants if all inputs are, else names."""
    body = next((equation.params[name] for name in CALLS if name in equation.params), None)
    if body is not None and equation.primitive.name not in LOOPS:
        inner, constants = (body.jaxpr, body.consts) if hasattr(body, "jaxpr") else (body, [])
        return _evaluate(graph, inner, constants, values, is_needed)
    is_static = all(isinstance(d, int) for x in equation.outvars for d in x.aval.shape)
    if is_static and not any(isinstance(x, str) for x in values):
        found = equation.primitive.bind(*map(jax.numpy.asarray, values), **equation.params)
        return list(found) if equation.primitive.multiple_results else [found]
    if equation.primitive.name not in OPS:
        name = equation.primitive.name
        raise ValueError(f"to onnx: an operation of the policy is not supported, got {name}; use stablehlo")
    found = OPS[equation.primitive.name](graph, equation, *values)
    return found if isinstance(found, list) else [found]
