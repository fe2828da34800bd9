"""A policy with memory and noise as a StableHLO function, called by plain JAX."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

pytest.importorskip("flatbuffers")
from jaxrl_fast.evaluation.export import function, stablehlo
from jaxrl_fast.types import PolicyInput


@pytest.mark.parametrize("sampled", [False, True])
def test_exported_function_takes_memory_then_key(sampled):
    """The action is observation + 10 * memory, and with noise 1000 * uniform; each step adds 1 to the memory."""

    def act(given, noise, memory):
        noisy = 1000 * noise[0] if noise else 0.0
        return given.obs[0] + 10 * memory[0] + noisy, (memory[0] + 1, memory[1] - given.obs[1])

    one = SimpleNamespace(name="noise", spec=ShapeDtypeStruct((), jnp.float32), law="uniform", axis=None)
    memory = (function.Memory("memory_1", np.float32(0)), function.Memory("memory_2", np.float32(0)))
    draw = lambda key: (jax.random.uniform(key),)
    given, noise = PolicyInput(ShapeDtypeStruct((2,), jnp.float32)), (one,) if sampled else ()
    made = function.PolicyFunction(act, draw, given, noise, ShapeDtypeStruct((), jnp.float32), memory)
    call = jax.export.deserialize(bytearray(stablehlo.serialize(made))).call
    obs, before = np.float32([[1, 5], [2, 6], [3, 7]]), (np.float32([0, 1, 2]), np.float32([9, 9, 9]))
    key = [jax.random.key_data(jax.random.key(3))] * sampled
    action, *after = call(obs, *before, *key)
    np.testing.assert_array_equal(after, [[1, 2, 3], [4, 3, 2]])
    rest = np.asarray(action) - [1, 12, 23]
    if sampled:
        assert (rest > 0).all() and (rest < 1000).all() and len(np.unique(rest)) == 3
    else:
        np.testing.assert_array_equal(rest, 0)
