"""Operations of JAX as ONNX nodes: a model of one function each, against the function itself."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct, lax

from jaxrl_fast.types import PolicyInput
from tests.helpers import slow

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from jaxrl_fast.evaluation.export import onnx_model  # noqa: E402  # imports onnx

RNG = np.random.default_rng(0)
KERNEL = jnp.float32(RNG.normal(size=(3, 2, 2, 4)))  # [H, W, I, O]
MATRIX = jnp.float32(RNG.normal(size=(5, 3)))
TABLE = jnp.float32(RNG.normal(size=(4, 2)))


def convolve(x, **options):
    kernel = options.pop("kernel", KERNEL)
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x[None], kernel, dimension_numbers=numbers, **options)[0]


def pool(x, first, step, window, strides, padding):
    return lax.reduce_window(x, first, step, (*window, 1), (*strides, 1), padding)


CASES = {
    "convolution with uneven padding": (
        (7, 6, 2),
        lambda x: convolve(x, window_strides=(1, 1), padding=((2, 1), (0, 3))),
    ),
    "convolution with strides": ((7, 6, 2), lambda x: convolve(x, window_strides=(2, 3), padding="VALID")),
    "dilated convolution": (
        (7, 6, 2),
        lambda x: convolve(x, window_strides=(1, 1), padding="VALID", rhs_dilation=(2, 3)),
    ),
    "convolution in groups": (
        (7, 6, 4),
        lambda x: convolve(x, window_strides=(1, 1), padding="SAME", feature_group_count=2),
    ),
    "maximum pool": (
        (7, 6, 2),
        lambda x: pool(x, -jnp.inf, lax.max, (3, 2), (2, 1), ((1, 1), (0, 1), (0, 0))),
    ),
    "mean pool": ((7, 6, 2), lambda x: pool(x, 0.0, lax.add, (3, 2), (2, 1), ((1, 1), (0, 1), (0, 0))) / 6),
    "matrix": ((5,), lambda x: x @ MATRIX),
    "transposed matrix": ((3,), lambda x: lax.dot_general(x, MATRIX, (((0,), (1,)), ((), ())))),
    "matrix of leading axis": ((5, 2), lambda x: lax.dot_general(x, MATRIX, (((0,), (0,)), ((), ())))),
    "product of rows": ((4, 5), lambda x: lax.dot_general(x, x + 1, (((1,), (1,)), ((0,), (0,))))),
    "squared length": ((4,), lambda x: jnp.broadcast_to(x @ (x + 1), 1)),
    "two axes": ((5, 3), lambda x: lax.dot_general(x, MATRIX, (((0, 1), (0, 1)), ((), ())))),
    "slice with stride": ((9, 3), lambda x: x[1:8:3, 1:]),
    "padding": ((4, 3), lambda x: jnp.pad(x, ((1, 2), (0, 3)), constant_values=7.0)),
    "cropping": ((6, 3), lambda x: lax.pad(x, jnp.float32(0), ((-1, -2, 0), (2, 0, 0)))),
    "split": ((6, 3), lambda x: [part.sum(0) * i for i, part in enumerate(jnp.split(x, (1, 3)), 1)]),
    "stack": ((4,), lambda x: jnp.stack([x, 2 * x, x + 1], axis=1)),
    "concatenation": ((4, 2), lambda x: jnp.concatenate([x, -x[:1], 3 * x], axis=0)),
    "rows of a table": ((4,), lambda x: TABLE[jnp.abs(x * 10).astype(jnp.int32) % 4]),
    "sums": ((4, 3), lambda x: x.sum(0) + x.sum() + x.sum(1)[:3]),
    "extremes": ((4, 3), lambda x: x.max(0) * 2 + x.min(0) + x.prod(0)),
    "places of extremes": ((4, 3), lambda x: x.argmax(0) * 10 + x.argmin(0)),
    "all and any": ((4, 3), lambda x: (x > 0).all(0) * 2.0 + (x > 1).any(0)),
    "cumulative sum": ((4, 3), lambda x: jnp.cumsum(x, axis=0)),
    "cumulative sum from the end": ((4, 3), lambda x: lax.cumsum(x, axis=1, reverse=True)),
    "choice": ((4,), lambda x: jnp.where(x > 0, x, -2 * x)),
    "comparisons": ((4,), lambda x: 1.0 * (x < 0.1) + 2 * (x <= 0) + 4 * (x >= 1) + 8 * (x == x) + 16 * (x != x)),
    "clip": ((4,), lambda x: lax.clamp(-0.5, x, 0.25)),
    "powers": ((4,), lambda x: x**2 + x**3 + lax.rsqrt(jnp.abs(x) + 1) + 2.0**x),
    "exponents": ((4,), lambda x: jnp.log1p(jnp.abs(x)) + jnp.expm1(x) + jnp.exp2(x) + jax.nn.sigmoid(x)),
    "remainder": ((4,), lambda x: lax.rem(5 * x, jnp.float32(2)) + jnp.floor(x) + jnp.sign(x)),
    "finite": ((4,), lambda x: jnp.isfinite(x / (x > 0)) * 1.0 + jnp.isfinite(jnp.log(x))),
    "broadcast": ((4, 1), lambda x: jnp.broadcast_to(x, (2, 4, 3)) + jnp.arange(3.0)[None, None]),
    "order of axes": ((4, 3, 2), lambda x: x.transpose(2, 0, 1).reshape(2, 12)),
    "types": ((4,), lambda x: (x * 10).astype(jnp.int32).astype(jnp.uint8) // 2),
}


RARE = {"rows of a table", "finite", "two axes", "remainder", "types", "broadcast", "comparisons"}
RARE |= {"dilated convolution", "places of extremes", "cumulative sum from the end", "stack", "order of axes"}
RARE |= {"convolution with strides", "matrix of leading axis", "cropping", "all and any", "slice with stride"}


@pytest.mark.parametrize(
    "shape, function",
    [slow(*case, id=name) if name in RARE else pytest.param(*case, id=name) for name, case in CASES.items()],
)
def test_model_of_operation_equals_jax(shape, function, any_ranks):
    """A batch of three rows; the model is made for any number."""

    def act(given, noise, memory):
        found = function(given.obs)
        return (jnp.concatenate(found) if isinstance(found, list) else found), ()

    given = PolicyInput(ShapeDtypeStruct(shape, jnp.float32))
    action, _ = jax.eval_shape(act, given, (), ())
    made = SimpleNamespace(act=act, given=given, noise=(), memory=(), action=action)
    session = onnxruntime.InferenceSession(onnx_model.serialize(made), providers=["CPUExecutionProvider"])
    rows = RNG.normal(size=(3, *shape)).astype(np.float32)
    (found,) = session.run(None, {session.get_inputs()[0].name: rows})
    expected = np.stack([act(PolicyInput(jnp.asarray(row)), (), ())[0] for row in rows])
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


UNSUPPORTED = {
    "this kind of pooling": (
        (7, 6, 2),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2, 1), (1, 1, 1), "VALID", window_dilation=(2, 1, 1)),
    ),
    "a transposed convolution": (
        (7, 6, 2),
        lambda x: convolve(x, window_strides=(1, 1), padding=((1, 1), (1, 1)), lhs_dilation=(2, 2)),
    ),
    "padding between elements": ((4,), lambda x: lax.pad(x, jnp.float32(0), ((0, 0, 1),))),
    "And of integers": ((4,), lambda x: x.astype(jnp.int32) & 3),
    "a choice of several arrays": ((4,), lambda x: lax.select_n(x.astype(jnp.int32) % 3, x, 2 * x, 3 * x)),
    "an operation of the policy": ((4,), lambda x: jnp.sort(x)),
}


@pytest.mark.parametrize("problem", UNSUPPORTED)
def test_unsupported_operation_is_refused_in_one_line(problem, any_ranks):
    shape, function = UNSUPPORTED[problem]
    act = lambda given, noise, memory: (function(given.obs), ())
    given = PolicyInput(ShapeDtypeStruct(shape, jnp.float32))
    made = SimpleNamespace(act=act, given=given, noise=(), memory=(), action=jax.eval_shape(act, given, (), ())[0])
    with pytest.raises(ValueError, match=rf"^to onnx: {problem} .*; use stablehlo$"):
        onnx_model.serialize(made)
