"""Test types: shapes, dtypes and outputs of spaces, and the default fields of agents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.types import (
    SHARED_MEMORY_AXIS,
    Agent,
    Box,
    Discrete,
    MultiDiscrete,
    Parallelism,
    PolicyInput,
    split_keys,
)

pytestmark = pytest.mark.unit
SPACES = [
    (Discrete(5), (), 5, jnp.int32),
    (MultiDiscrete((3, 2, 4)), (3,), 9, jnp.int32),
    (MultiDiscrete((7,)), (1,), 7, jnp.int32),
    (Box((2,)), (2,), 2, jnp.float32),
    (Box((2, 3)), (2, 3), 6, jnp.float32),
    (Box(()), (), 1, jnp.float32),
]


@pytest.mark.parametrize(("space", "shape", "num_outputs", "dtype"), SPACES)
def test_space_has_shape_and_num_outputs(space, shape, num_outputs, dtype):
    assert (space.shape, space.num_outputs) == (shape, num_outputs)


@pytest.mark.parametrize("batch", [(), (4,), (6, 4)])
@pytest.mark.parametrize(("space", "shape", "num_outputs", "dtype"), SPACES)
def test_zeros_have_batch_axes_before_shape_of_space(space, shape, num_outputs, dtype, batch):
    zeros = space.zeros(*batch)
    assert (zeros.shape, zeros.dtype) == ((*batch, *shape), dtype)
    np.testing.assert_array_equal(zeros, 0)


@pytest.mark.parametrize(
    ("parallelism", "axis"),
    [
        (Parallelism(), None),
        (Parallelism("shards", 2), "shards"),
        (Parallelism(num_grad_workers=2), SHARED_MEMORY_AXIS),
        (Parallelism(num_pools=3), None),
    ],
)
def test_grad_axis_is_axis_of_grad_workers_or_shards(parallelism, axis):
    assert parallelism.grad_axis == axis


def test_split_keys_gives_each_step_different_key():
    keys = jax.random.key_data(split_keys(jax.random.key(0), 5, 3))
    assert len(np.unique(keys, axis=0)) == len(keys) == 5


def test_agent_requires_five_fields_only():
    """By default the policy has no carry, gets whole observations, and samples with a key."""
    agent = Agent(lambda key: (), None, None, None, rollout_length=4)
    assert agent.sample_noise is split_keys and agent.initial_carry == () and agent.learning.gradient_steps is None
    assert agent.learning.compress_obs("obs") == "obs"
    assert agent.policy_state("state") == agent.parameters("state") == agent.learning.on_env_restart("state") == "state"
    assert PolicyInput("obs").action_mask is None


def test_spaces_of_different_types_are_unequal():
    assert Box((2,)) != MultiDiscrete((2,)) and Discrete(2) != 2 and Discrete(2) == Discrete(2)
    assert len({Box((2,)), MultiDiscrete((2,)), Discrete(2)}) == 3
