"""kernels.rows and kernels.branch against JAX's own scan and cond, and packing against its inverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_fast.kernels import branch, rows
from jaxrl_fast.utils import target

pytestmark = pytest.mark.unit

DTYPES = (np.float32, np.int32, np.bool_, np.uint8)
shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
leaves = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=6)


@given(leaves, st.lists(st.integers(1, 3), max_size=2).map(tuple), st.integers(0, 2**31))
def test_unpack_inverts_pack(leaves, leading, seed):
    draw = np.random.default_rng(seed)
    tree = {str(i): draw.integers(0, 2, (*leading, *shape)).astype(dtype) for i, (shape, dtype) in enumerate(leaves)}
    packed = rows.pack(jax.tree.map(jnp.asarray, tree), len(leading))
    assert {x.dtype.name for x in tree.values()} == set(packed)
    assert all(x.shape[:-1] == leading for x in packed.values())
    found = rows.unpack(packed, tree, len(leading))
    assert all(x.dtype == tree[name].dtype for name, x in found.items())
    jax.tree.map(np.testing.assert_array_equal, found, tree)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("num_axes", [0, 1])
def test_scan_is_that_of_jax(platform, num_axes):
    def step(carry, x):
        carry = carry + x["a"]
        return carry, {"flag": carry > 1, "carry": carry, "both": (jnp.int32(3) * x["b"], carry * 2)}

    shape = (5, 4)[: 1 + num_axes]
    xs = {"a": jnp.linspace(-1, 1, np.prod(shape)).reshape(shape), "b": jnp.ones(shape, jnp.int32)}
    init = jnp.zeros(shape[1:])
    with target.tracing_for(platform):
        found = rows.scan(step, init, xs, num_axes)
        stacked = len({eqn.primitive.name for eqn in jax.make_jaxpr(lambda xs: rows.scan(step, init, xs, 1))(xs).eqns})
    jax.tree.map(np.testing.assert_array_equal, found, jax.lax.scan(step, init, xs))
    assert (stacked > 1) == (platform == "gpu")  # the packed rows are taken apart again


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("condition", [True, False])
def test_cond_is_that_of_jax(platform, condition):
    sides = lambda x: {"y": x + 1}, lambda x: {"y": x * 5}
    with target.tracing_for(platform):
        run = lambda flag, x: branch.cond(flag, *sides, x)
        found = run(jnp.bool_(condition), jnp.arange(3.0))
        primitives = {eqn.primitive.name for eqn in jax.make_jaxpr(run)(jnp.bool_(True), jnp.arange(3.0)).eqns}
    np.testing.assert_array_equal(found["y"], [1, 2, 3] if condition else [0, 5, 10])
    assert ("cond" in primitives) == (platform == "cpu")
