"""Test what a policy says about an observation that it does not take."""

import jax
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.envs.host.config import HostEnvConfig, Wrappers
from jaxrl_fast.evaluation import inputs

pytestmark = pytest.mark.unit
ONE_HOT = "axis, a one-hot vector for an index$"


def test_index_in_place_of_one_hot_vector_is_explained():
    """The previous action is observed as a one-hot vector, while the environment takes its index."""
    env = envs.make("CartPole-v1", 1, HostEnvConfig(wrappers=Wrappers(previous=True)))
    obs = np.zeros(4, np.float32)
    batch, is_one = inputs.as_batch(env, (obs, np.eye(2, dtype=np.float32)[1], np.zeros(1)))
    assert is_one and jax.tree.leaves(batch)[1].tolist() == [[0, 1]]
    for action in (1, np.array([1, 0, 1])):
        with pytest.raises(ValueError, match=rf"observes .*'float32\[2\]'.*, got .*'int64\[3?\]'.*{ONE_HOT}"):
            inputs.as_batch(env, (obs, action, np.zeros(1)))
    with pytest.raises(ValueError, match=r"with a leading axis$"):
        inputs.as_batch(env, (obs, np.zeros(3), np.zeros(1)))
