"""An environment that a user has made is compared with a new one, attribute by attribute."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from jaxrl_fast.envs.gymnasium.instance import check_same
from tests.helpers.gym_envs import Walk

MISSING = object()


def walk(value, **options):
    env = Walk(**options)
    env.spec = gymnasium.envs.registration.EnvSpec("Walk-v0", entry_point=Walk)
    if value is not MISSING:
        env.extra = value
    return env


DIFFERENT = [
    (1.0, 2.0), (True, False), ("a", "b"), (1.0, None), ([1, 2], [1, 3]), ([1, 2], [1, 2, 3]), ([1], 1), (1, [1]),
    ([1], None), ((1, 2), None), ([1], np.array([1, 2])), ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}),
    ({"a": [1]}, {"a": [2]}),
    ({"a": 1}, [1]), (np.zeros(2), np.zeros(3)), (np.zeros(2), np.ones(2)), (spaces.Discrete(2), spaces.Discrete(3)),
    (1.0, MISSING), (MISSING, [1]),
]  # fmt: skip
SAME = [
    (1, 1.0), (np.nan, np.nan), ([1, 2], (1, 2)), ([[1], {"a": 2}], [[1], {"a": 2}]), (np.zeros(2), np.zeros(2)),
    (spaces.Discrete(2), spaces.Discrete(2)), (object(), object()), (MISSING, MISSING),
]  # fmt: skip


@pytest.mark.parametrize("given, fresh", DIFFERENT)
def test_changed_attribute_is_refused_in_one_line(given, fresh):
    with pytest.raises(ValueError) as caught:
        check_same(walk(given), lambda: walk(fresh))
    assert "\n" not in str(caught.value) and " has extra " in str(caught.value), caught.value


@pytest.mark.parametrize("given, fresh", SAME)
def test_equal_attributes_are_accepted(given, fresh):
    check_same(walk(given), lambda: walk(fresh))


def test_attributes_that_an_episode_changes_are_not_compared():
    """The position and the time of a walk change in every step; its `size` does not."""
    given = walk(MISSING)
    given.reset(seed=3)
    given.step(6)
    check_same(given, lambda: walk(MISSING))
    with pytest.raises(ValueError, match=r"has size 3\.0, where a new one has 2\.0"):
        check_same(walk(MISSING, size=3.0), lambda: walk(MISSING))


def test_wrappers_are_compared_from_outside_in():
    wrapped = lambda limit: gymnasium.wrappers.TimeLimit(walk(MISSING), limit)
    check_same(wrapped(5), lambda: wrapped(5))
    with pytest.raises(ValueError, match=r"is \S+TimeLimit in \S+Walk, where a new one has \S+Walk;"):
        check_same(wrapped(5), lambda: walk(MISSING))
    with pytest.raises(ValueError, match="max_episode_steps"):
        check_same(wrapped(5), lambda: wrapped(6))
