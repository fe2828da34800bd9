"""Test kernels.dense, in C and by XLA, against numpy in float64 with gradients by hand."""

import platform
import subprocess
import sys
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.kernels import build, dense
from tests.helpers.layers import AFTER, SLOPE, draw

needs_native = pytest.mark.skipif(
    not build.is_available("dense"), reason="no C compiler here: XLA computes dense layers"
)
SIZES = st.integers(1, 70)


def oracle(x, kernel, bias, g, activation):
    """Return the layer's output and the gradients of sum(g * output), computed in float64."""
    x, kernel, bias, g = (z.astype(np.float64) for z in (x, kernel, bias, g))
    before = x @ kernel + bias
    g = g * SLOPE[activation](before)
    return AFTER[activation](before), (g @ kernel.T, x.T @ g, g.sum(0))


def layer_of(activation, board):
    """Return `dense` for x [R, I]. With `board`, x is passed as [R, I, 1, 1], which C reads column by column."""

    def layer(x, kernel, bias):
        axes = (1, 1) if board else ()
        return dense(x.reshape(*x.shape, *axes), kernel.reshape(len(kernel), *axes, -1), bias, activation)

    return layer


def compute(x, kernel, bias, g, activation, board, wrt=(0, 1, 2)):
    """Return the same by `dense`."""
    layer = layer_of(activation, board)
    weighted = lambda *arrays: (jnp.sum(g * (y := layer(*arrays))), y)
    (_, y), gradients = jax.jit(jax.value_and_grad(weighted, wrt, has_aux=True))(x, kernel, bias)
    return y, gradients


def check(seed, sizes, activation, board):
    rows, inputs, outputs = sizes
    x, kernel, bias, g = draw(seed, (rows, inputs), (inputs, outputs), (outputs,), (rows, outputs))
    expected, gradients = oracle(x, kernel, bias, g, activation)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    y, found = compute(x, kernel, bias, g, activation, board)
    close(y, expected)
    jax.tree.map(close, found, gradients)
    for wrt in ((1, 2), (0,), (2,)):  # C computes only gradients that are needed
        chosen = [gradients[i] for i in wrt]
        jax.tree.map(close, list(compute(x, kernel, bias, g, activation, board, wrt)[1]), chosen)


@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(
    seed=st.integers(0, 2**31 - 1),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    activation=st.sampled_from(list(AFTER)),
    board=st.booleans(),
)
@hypothesis.example(seed=0, sizes=(1, 9, 30), activation="tanh", board=True)
@hypothesis.example(seed=0, sizes=(13, 1, 30), activation="tanh", board=False)
@hypothesis.example(seed=0, sizes=(13, 9, 1), activation="tanh", board=True)
def test_dense_values_and_gradients_equal_float64_oracle(seed, sizes, activation, board):
    """Sizes include one row, one input, one output, and widths that fill no register."""
    check(seed, sizes, activation, board)


LESSER = """
import ctypes, sys
from jaxrl_fast.kernels import build
build._load = lambda: ctypes.CDLL(sys.argv[1])
assert not build.unavailable_reason()
from tests.kernels import test_batch_norm, test_conv, test_dense, test_layer_norm
for width in (5, 21, 70):
    test_layer_norm.check(width, 3, width, "tanh")
    test_batch_norm.check(width, 3, width, "relu")
for sizes, side, channels, stride in [((9, 7, 4), 3, 40, 1), ((13, 12, 3), 4, 21, 3)]:
    test_conv.check(0, 2, sizes, side, channels, stride, "relu")
for seed, sizes in enumerate([(64, 120, 84), (13, 5, 30), (24, 30, 7), (1, 1, 1), (31, 40, 65)]):
    for board in (False, True):
        test_dense.check(seed, sizes, ("none", "tanh", "relu")[seed % 3], board)
print("right")
"""


@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are instructions of x86-64")
@pytest.mark.parametrize("without", ["avx512f", "avx2", "avx"])
@pytest.mark.slow
def test_c_kernels_equal_oracle_without_newer_vector_instructions(tmp_path, without):
    """Older processors have narrower and fewer registers, so tiles have other shapes."""
    library = tmp_path / "native.so"
    build.compile_library(build._compiler(), library, f"-mno-{without}")
    command = [sys.executable, "-c", LESSER, str(library)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.stdout == "right\n", ended.stderr


@pytest.mark.parametrize("sizes", [(64, 120, 84), (64, 1024, 128)])
@pytest.mark.parametrize("board", [False, True])
def test_dense_equals_oracle_for_layer_sizes_of_networks(sizes, board):
    rows, inputs, outputs = sizes
    x, kernel, bias, g = draw(0, (rows, inputs), (inputs, outputs), (outputs,), (rows, outputs))
    expected, gradients = oracle(x, kernel, bias, g, "tanh")
    y, found = compute(x, kernel, bias, g, "tanh", board)
    np.testing.assert_allclose(y, expected, atol=2e-6)
    for one, other in zip(found, gradients):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@needs_native
@pytest.mark.parametrize("wrt, number", [((0,), 3), ((1, 2), 4), ((0, 1, 2), 5)])
def test_backward_in_c_computes_only_the_gradients_that_are_needed(wrt, number):
    """A policy's loss differentiates through critics to actions: a gradient of their kernels would be lost work."""
    x, kernel, bias, g = draw(0, (24, 9), (9, 16), (16,), (24, 16))
    loss = lambda x, kernel, bias: (g * dense(x, kernel, bias, "tanh")).sum()
    program = jax.make_jaxpr(jax.grad(loss, wrt))(x, kernel, bias)
    backward = [eqn for eqn in program.eqns if eqn.params.get("target_name", "").endswith("dense_backward")]
    assert [len(eqn.outvars) for eqn in backward] == [number], program  # two of them are scratch


@needs_native
def test_tanh_equals_float64_within_7_units_in_last_place():
    """Check all magnitudes. The function is odd, and its absolute value is at most 1."""
    small, large = np.logspace(-37, 0, 100_000), np.linspace(1, 40, 100_000)
    x = np.concatenate([small, large]).astype(np.float32)
    one = lambda x: np.asarray(dense(x[:, None], np.ones((1, 1), np.float32), np.zeros(1, np.float32), "tanh"))
    found, expected = one(x)[:, 0].astype(np.float64), np.tanh(x.astype(np.float64))
    assert (np.abs(found - expected) <= 7 * np.spacing(np.abs(expected).astype(np.float32))).all()
    assert np.abs(found).max() <= 1
    np.testing.assert_array_equal(one(-x)[:, 0], -found)


@pytest.mark.parametrize("activation", list(AFTER))
def test_dense_keeps_nan_and_infinity(activation):
    """No activation turns NaN into a number, so that divergence is detected. Infinity stays the largest value."""
    x = jnp.float32([[np.nan, 0.0], [np.inf, 0.0], [0.0, 1.0]])
    y = np.asarray(dense(x, jnp.ones((2, 5)), jnp.zeros(5), activation))
    assert np.isnan(y[0]).all() and np.isfinite(y[2]).all()
    np.testing.assert_allclose(y[1], 1.0 if activation == "tanh" else np.inf, rtol=3e-7)


@needs_native
@pytest.mark.parametrize(
    ("batched", "board", "num_outputs"),
    [((0, None, None), False, 9), ((None, 0, 0), True, 9), ((0, 0, 0), False, 2), ((0, 0, 0), True, 2)],
)
def test_vmapped_dense_equals_single_calls_bitwise(batched, board, num_outputs):
    """Compare values and gradients bit for bit, as with the seeds of a population."""
    *arrays, g = draw(5, (3, 21, 6), (3, 6, num_outputs), (3, num_outputs), (21, num_outputs))
    layer = layer_of("tanh", board)
    gradients = jax.grad(lambda *arrays: jnp.sum(g * layer(*arrays)), (0, 1, 2))
    take = lambda i: [x[i if axis == 0 else 0] for x, axis in zip(arrays, batched)]
    whole = [x if axis == 0 else x[0] for x, axis in zip(arrays, batched)]
    for function in (lambda *arrays: (layer(*arrays),), gradients):
        found = jax.jit(jax.vmap(function, in_axes=batched))(*whole)
        for i in range(3):
            jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), found, jax.jit(function)(*take(i)))


@needs_native
def test_dense_treats_leading_axes_as_rows():
    x, kernel, bias = draw(7, (4, 5, 6), (6, 8), (8,))
    found = dense(x, kernel, bias, "relu")
    assert found.shape == (4, 5, 8)
    np.testing.assert_allclose(found.reshape(20, 8), np.maximum(x.reshape(20, 6) @ kernel + bias, 0), atol=1e-6)


def test_dense_uses_c_kernel_for_small_float32_layers_only(monkeypatch):
    """XLA computes large layers, other types, and every layer if C is disabled."""

    def compiled(size, dtype):
        arrays = (jnp.ones(shape, dtype) for shape in ((2, size), (size, 512), (512,)))
        return "dense_forward" in str(jax.make_jaxpr(lambda *layer: dense(*layer))(*arrays))

    assert compiled(8, jnp.float32) == build.is_available("dense") and not compiled(8, jnp.bfloat16)
    assert not compiled(1024, jnp.float32)
    x, kernel, bias, g = draw(9, (20, 8), (8, 12), (12,), (20, 12))
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    y, gradients = compute(x, kernel, bias, g, "tanh", False)
    monkeypatch.setenv(build.VARIABLE, "xla")
    assert not compiled(8, jnp.float32)
    jax.tree.map(close, compute(x, kernel, bias, g, "tanh", False), (y, gradients))


@pytest.mark.parametrize("board", [False, True])
def test_dense_of_no_rows_has_zero_gradients(board):
    x, kernel, bias, g = (jnp.zeros(shape) for shape in ((0, 6), (6, 9), (9,), (0, 9)))
    y, (to_x, to_kernel, to_bias) = compute(x, kernel, bias, g, "relu", board)
    assert y.shape == (0, 9) and to_x.shape == (0, 6)
    assert not to_kernel.any() and not to_bias.any()


def test_vmap_over_single_rows_uses_xla():
    """For the C kernel, `vmap` would copy the weights for each row."""
    x, kernel, bias = draw(11, (30, 6), (6, 9), (9,))
    by_rows = jax.vmap(dense, (0, None, None))
    assert "dense_forward" not in str(jax.make_jaxpr(by_rows)(x, kernel, bias))
    np.testing.assert_allclose(by_rows(x, kernel, bias), x @ kernel + bias, atol=1e-6)


def test_gradient_of_replicated_kernel_is_summed_over_devices():
    """In a `shard_map` that tracks varying values, JAX sums the gradients of all devices."""
    x, kernel, bias = draw(13, (8, 6), (6, 9), (9,))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec
    loss = lambda kernel, x: jnp.sum(dense(x, kernel, bias))
    each = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec())
    np.testing.assert_allclose(jax.jit(each)(kernel, x), np.repeat(x.sum(0)[:, None], 9, 1), rtol=1e-5)


@needs_native
@pytest.mark.parametrize(("num_rows", "transposed"), [(1, True), (128, True), (131, True), (256, False)])
def test_dense_reads_board_features_by_columns_when_in_one_block(num_rows, transposed):
    """`board_conv` computes 256 rows in several blocks. Reading by columns changes results only by rounding."""
    x, kernel, bias, g = draw(15, (num_rows, 12), (12, 9), (9,), (num_rows, 9))
    lowered = jax.jit(layer_of("tanh", True)).lower(x, kernel, bias).as_text()
    assert f"transposed_input = {int(transposed)} : i32" in lowered
    rows, board = (compute(x, kernel, bias, g, "tanh", board) for board in (False, True))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), rows, board)


@pytest.mark.parametrize("shape", [(4, 7), (4, 6, 1)])
def test_dense_rejects_mismatched_shapes(shape):
    with pytest.raises(ValueError, match="do not match a kernel"):
        dense(jnp.zeros(shape), jnp.zeros((6, 9)), jnp.zeros(9))
