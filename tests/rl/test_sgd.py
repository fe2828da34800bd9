"""sgd: rows, weights and standardized advantages of each minibatch, against numpy."""

from functools import partial
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis.extra.numpy import arrays

from jaxrl_fast.rl import sgd


class Rows(NamedTuple):
    number: jax.Array
    weight: jax.Array
    advantage: jax.Array


@jax.jit
def steps(rows, key):
    """The minibatches of 4 gradient steps: two epochs of two minibatches."""
    seen = lambda learner, batch: (learner + 1, batch)
    batch = sgd.UpdateBatch(jnp.int32(0), rows)
    epochs = sgd.Epochs(2, 2, None, 1, None, seen, None, "advantage")
    order, _ = sgd._plan(epochs, batch, key)
    return jax.lax.scan(partial(sgd._train_on, epochs, batch), batch.learner, order)


@given(valid=arrays(bool, 8), seed=st.integers(0, 2**31 - 1))
@example(valid=np.eye(8, dtype=bool)[3], seed=0)
@example(valid=np.zeros(8, bool), seed=0)
def test_minibatches_are_weighted_and_standardized_over_their_valid_rows(valid, seed):
    """Each epoch has all rows once. A minibatch with one valid row keeps its advantage, which would become 0."""
    advantage = np.float32(np.random.default_rng(seed).normal(3, 2, 8))
    rows = Rows(jnp.arange(8), jnp.float32(valid), jnp.asarray(advantage))
    count, batches = jax.device_get(steps(rows, jax.random.key(seed)))
    assert count == 4
    for epoch in range(2):
        assert sorted(batches.number[epoch].ravel()) == list(range(8))
        for number, weight, found in zip(*(x[epoch] for x in batches)):
            counted = valid[number]
            num = counted.sum()
            np.testing.assert_allclose(weight, counted / max(num, 1), rtol=1e-6)
            x = advantage[number][counted].astype(np.float64)
            expected = x if num == 1 else (x - x.mean()) / (x.std() + 1e-8) if num else x
            np.testing.assert_allclose(found[counted], expected, rtol=1e-4, atol=1e-5)
