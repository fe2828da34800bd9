"""networks.flat: parameters as vectors, and networks that read them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast import networks
from jaxrl_fast.networks import ensemble, flat
from jaxrl_fast.options.optimizer import Adam
from jaxrl_fast.rl import optim
from jaxrl_fast.utils import target

pytestmark = pytest.mark.unit

TREE = {"b": jnp.arange(3.0), "a": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.float32(7)}}
OBS = ShapeDtypeStruct((3,), jnp.float32)


def test_pack_makes_one_vector_of_each_dictionary():
    with target.tracing_for("gpu"):
        packed = flat.pack((TREE, None, jnp.int32(2), {"weights": TREE["b"]}))
    assert [x.shape for x in jax.tree.leaves(packed)] == [(10,), (), (3,)]
    np.testing.assert_array_equal(packed[0].vector, [7, 0, 1, 2, 3, 4, 5, 0, 1, 2])  # names in alphabetical order
    jax.tree.map(np.testing.assert_array_equal, flat.unpack(packed), (TREE, None, jnp.int32(2), {"weights": TREE["b"]}))


def test_pack_changes_nothing_on_cpu_and_for_several_dtypes_or_too_many_numbers(monkeypatch):
    with target.tracing_for("cpu"):
        assert flat.pack(TREE) is TREE
    with target.tracing_for("gpu"):
        mixed = TREE | {"c": jnp.int32(1)}
        assert flat.pack(mixed) is mixed
        monkeypatch.setattr(flat, "MAX_SIZE", 9)
        assert flat.pack(TREE) is TREE


def test_numbers_hold_a_tree():
    tree = (TREE, jnp.int32(4), jnp.ones((1, 1)), jnp.int32(5))
    found = flat.Numbers.of(tree)
    assert {name: x.shape for name, x in found.packed.items()} == {"float32": (2,), "int32": (2,)}
    jax.tree.map(np.testing.assert_array_equal, found.tree(tree), tree)


def test_networks_read_packed_parameters():
    obs = jnp.linspace(-1, 1, 12).reshape(4, 3)
    one = networks.network(OBS, 2)
    both = ensemble.ensemble(one, 2)
    for network in (one, both):
        params = network.init(jax.random.key(0))
        with target.tracing_for("gpu"):
            packed = flat.pack(params)
            assert isinstance(packed, flat.Flat)
            np.testing.assert_allclose(network.apply(packed, obs), network.apply(params, obs), rtol=1e-6)


@pytest.mark.parametrize("transform", [None, optax.scale_by_trust_ratio()])
def test_optimizer_moves_packed_parameters_as_their_tree(transform):
    """A transformation of a user, such as one of each layer, still gets the arrays."""
    optimizer = optim.make_optimizer(0.1, Adam(), transform)
    gradient = jax.tree.map(lambda x: x - 2, TREE)
    with target.tracing_for("gpu"):
        state = optimizer.init(TREE)
        wanted, _ = optimizer.update(gradient, state, TREE)
        found, after = optimizer.update(*flat.pack((gradient, state, TREE)))
        assert isinstance(found, flat.Flat)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), flat.unpack(found), wanted)
    assert jax.tree.structure(flat.unpack(after)) == jax.tree.structure(state)
