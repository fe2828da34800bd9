"""Recurrent networks and ensembles: a scan is its steps one by one, and copies are networks one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast import networks
from jaxrl_fast.networks.ensemble import ensemble
from jaxrl_fast.networks.recurrent import recurrent

pytestmark = pytest.mark.unit

OBS = ShapeDtypeStruct((3,), jnp.float32)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_unroll_is_step_by_step_and_starts_anew_after_a_reset(cell):
    network = recurrent(OBS, 2, size=4, cell=cell, hidden=(5,))
    params = network.init(jax.random.key(0))
    obs = jax.random.normal(jax.random.key(1), (6, 2, 3))  # [T, N, ...]
    reset = np.zeros((6, 2), bool)
    reset[1, 0] = reset[3, 1] = reset[5, 1] = True
    start = jax.tree.map(lambda x: jnp.full((2, *x.shape), 0.25), network.initial_carry)
    assert all(x.shape == (4,) and not x.any() for x in jax.tree.leaves(network.initial_carry))
    carry, expected = start, []
    for row, begins in zip(obs, reset, strict=True):
        carry, output = network.step(params, carry, row)
        expected.append(output)
        carry = jax.tree.map(lambda x, begins=begins: jnp.where(begins[:, None], 0, x), carry)
    last, outputs = network.unroll(params, start, obs, jnp.array(reset))
    assert outputs.shape == (6, 2, 2)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), last, carry)
    assert not jax.tree.leaves(last)[0][1].any() and jax.tree.leaves(last)[0][0].any()


def test_an_unknown_cell_is_refused():
    with pytest.raises(ValueError, match="cell: must be one of gru, lstm, got 'rnn'"):
        recurrent(OBS, 2, cell="rnn")


@pytest.mark.parametrize("noisy", [False, True])
def test_an_ensemble_is_its_networks_one_by_one(noisy):
    one = networks.network(OBS, 2, hidden=(5,), noisy=noisy)
    both = ensemble(one, 2)
    params = both.init(jax.random.key(0))
    obs = jax.random.normal(jax.random.key(1), (4, 3))
    noise = both.noise(jax.random.key(2), ())
    outputs = both.apply(params, obs, noise)
    assert outputs.shape == (2, 4, 2)
    for i in range(2):
        own, own_noise = (jax.tree.map(lambda x, i=i: x[i], tree) for tree in (params, noise))
        np.testing.assert_allclose(outputs[i], one.apply(own, obs, own_noise), rtol=1e-5, atol=1e-6)
    kernels = [x for x in jax.tree.leaves(params) if x.ndim == 3 and x[0].std() > 1e-3]
    assert kernels and all(np.abs(x[0] - x[1]).max() > 0.1 for x in kernels), "separate parameters"
    for x in jax.tree.leaves(noise):
        assert np.abs(x[0] - x[1]).max() > 0.1, "separate noise"
    assert bool(jax.tree.leaves(noise)) == noisy
