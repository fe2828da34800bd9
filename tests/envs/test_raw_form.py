"""Raw form: observations and actions of agents become those of the environment and again the same."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from jaxrl_fast import envs
from jaxrl_fast.envs import raw_form
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.wrappers import hide
from tests.helpers.gym_envs import Mixed, Slide, Walk

SPACES = {
    "discrete": spaces.Discrete(3, start=5),
    "choices": spaces.MultiDiscrete([2, 3], start=[1, -1]),
    "box": spaces.Box(np.float32([-2, 0]), np.float32([2, 10]), dtype=np.float32),
    "whole numbers": spaces.Box(-1, 2, (2,), np.int8),
    "parts": spaces.Dict(
        {"arm": spaces.Box(-3, 1, (2,), np.float64), "grip": spaces.Discrete(2, start=7), "key": spaces.MultiBinary(2)}
    ),
}


class Takes(gymnasium.Env):
    """An environment with an action space from SPACES."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, kind="box"):
        self.action_space = SPACES[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert action in self.action_space
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Codes(gymnasium.Env):
    """An environment whose observations agents see in another form: bytes, an image [C, H, W], an index and a bit."""

    action_space = spaces.Discrete(2)

    def __init__(self, kind="text"):
        kinds = {
            "text": spaces.Box(0, 255, (5,), np.uint8),
            "image": spaces.Box(0, 255, (3, 40, 36), np.uint8),
            "index": spaces.Discrete(6),
            "number": spaces.Box(-1, 1, (), np.float32),
            "board": spaces.MultiBinary((4, 4)),
            "small": spaces.Box(0, 9, (4,), np.uint8),
        }
        self.observation_space = kinds[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


def make(env, **options):
    return envs.make(env, 1, HostEnvConfig(), **options)


def parts_of(env, action):
    """The arrays of actions as a dataset has them."""
    return [*raw_form.named("", raw_form.to_env_actions(env, action)).values()]


@pytest.mark.parametrize("kind", SPACES)
def test_actions_of_the_space_become_those_of_agents_and_again_the_same(kind):
    env, space = make(Takes, kind=kind), SPACES[kind]
    space.seed(0)
    sampled = [space.sample() for _ in range(50)]
    if kind == "parts":
        given = [np.stack([x[name] for x in sampled]) for name in sorted(space.spaces)]
    else:
        given = [np.stack(sampled)]
    action, outside = raw_form.from_env_actions(env, given)
    assert not np.any(outside) and action.dtype == env.spec.action.zeros().dtype
    assert action.shape == (50, *env.spec.action.shape)
    for x, y in zip(parts_of(env, action), given, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_numbers_are_scaled_by_the_bounds():
    """The bounds are -2 to 2 and 0 to 10: 1 is 0.5, and 2.5 is -0.5."""
    action, outside = raw_form.from_env_actions(make(Takes), [np.float64([[1, 2.5], [2, 0], [-2, 10]])])
    np.testing.assert_allclose(action, [[0.5, -0.5], [1, -1], [-1, 1]])
    assert not outside[0].any()


@pytest.mark.parametrize(
    ("kind", "rows", "wrong"),
    [
        ("box", [[2.00001, 5], [2.1, 5], [0, -0.1], [0, np.nan]], [False, True, True, True]),
        ("discrete", [5, 7, 8, 4], [False, False, True, True]),
        ("choices", [[1, -1], [2, 1], [3, 0], [1, 2]], [False, False, True, True]),
    ],
)
def test_rows_outside_the_space_are_found(kind, rows, wrong):
    assert raw_form.from_env_actions(make(Takes, kind=kind), [np.array(rows)])[1][0].tolist() == wrong


def test_names_of_the_parts_of_an_action():
    parts = raw_form.action_parts(make(Takes, kind="parts"))
    assert parts == [("arm", (2,), False), ("grip", (), True), ("key", (2,), True)]
    assert raw_form.action_parts(make(Walk)) == [("", (), True)]
    assert raw_form.action_parts(make(Slide)) == [("", (1,), False)]


@pytest.mark.parametrize("kind", ["text", "image", "index", "number", "small"])
def test_observations_are_decoded_exactly(kind):
    env, one = make(Codes, kind=kind), Codes(kind)
    rng = np.random.default_rng(0)
    one.observation_space.seed(int(rng.integers(100)))
    raw = np.stack([one.observation_space.sample() for _ in range(20)])
    raw = raw.astype(raw_form.spec_of(env).dtype)
    again = raw_form.decoded(env, raw_form.encoded(env, raw))
    assert again.dtype == raw.dtype
    np.testing.assert_array_equal(again, raw)


def test_observations_of_several_parts_that_cannot_be_decoded_are_none():
    """Two indices of MultiDiscrete become one vector, and an index that starts at -2 one from 0."""
    env = make(Mixed)
    raw = [Mixed().observation_space.sample() for _ in range(3)]
    seen = raw_form.encoded(env, {name: tree_stack([x[name] for x in raw]) for name in raw[0]})
    assert raw_form.decoded(env, seen) is None


def test_hidden_parts_cannot_be_decoded():
    env = hide.hide(envs.make("CartPole-v1", 2), ["1"])
    assert raw_form.decoded(env, np.zeros((2, 3), np.float32)) is None


def test_arrays_of_a_tree_are_named_by_their_paths():
    tree = {"b": (np.zeros(1), np.ones(1)), "a": np.zeros(2)}
    assert [*raw_form.named("observations", tree)] == ["observations/a", "observations/b/0", "observations/b/1"]
    assert [*raw_form.named("actions", np.zeros(2))] == ["actions"]


def tree_stack(trees):
    if isinstance(trees[0], tuple):
        return tuple(map(tree_stack, zip(*trees, strict=True)))
    if isinstance(trees[0], dict):
        return {name: tree_stack([x[name] for x in trees]) for name in trees[0]}
    return np.stack(trees)
