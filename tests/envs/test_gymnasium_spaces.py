"""Observations, actions and action masks of gymnasium's spaces, compared with values worked out by hand."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from jaxrl_fast import envs
from jaxrl_fast.envs import spaces
from jaxrl_fast.envs.gymnasium import copying, description, masks, source
from jaxrl_fast.envs.gymnasium import spaces as gymnasium_spaces
from jaxrl_fast.envs.gymnasium.layout import Recipe
from jaxrl_fast.envs.gymnasium.pool import LocalPool
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers
from jaxrl_fast.networks import torsos

LOCAL = HostEnvConfig((0, 0, 0), workers=Workers(0))


class Shown(gymnasium.Env):
    """Returns the values it was given, one after another."""

    action_space = Discrete(2)

    def __init__(self, space, values):
        self.observation_space, self.values = space, [np.asarray(value, space.dtype) for value in values]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.values[0], {}

    def step(self, action):
        self.t = min(self.t + 1, len(self.values) - 1)
        return self.values[self.t], 0.0, False, False, {}


def shown(space, values):
    """Return what an agent sees of the values, [T, ...]."""
    env = envs.make(lambda: Shown(space, values), 1, LOCAL)
    state, first = env.reset(jax.random.key(0))
    _, rest = jax.jit(lambda state, actions: jax.lax.scan(env.step, state, actions))(
        state, jnp.zeros((len(values) - 1, 1), jnp.int32)
    )
    env.host.close()
    return np.concatenate([first.obs[None], rest.obs])[:, 0]


@pytest.mark.parametrize(
    ("space", "values", "expected"),
    [
        (Box(0, 1, (3,), np.uint8), [[0, 1, 1], [1, 0, 0]], [[0, 1, 1], [1, 0, 0]]),
        (Box(0, 9, (2,), np.uint8), [[9, 1], [0, 5]], [[9, 1], [0, 5]]),
        (Box(0, 255, (2,), np.uint8), [[0, 128], [255, 64]], [[0, 0.5], [255 / 256, 0.25]]),
        (Box(0, 7, (), np.uint8), [7, 3], [[7], [3]]),
        (Box(0, 2**40, (1,), np.int64), [[2**30], [3 * 2**33]], [[2.0**30], [3 * 2.0**33]]),
        (Box(0, np.iinfo(np.int64).max, (1,), np.int64), [[5], [2**62]], [[5], [2.0**62]]),
        (Box(0, 2**40, (1,), np.uint64), [[2**33], [1]], [[2.0**33], [1]]),
        (Box(-(2**31), 2**31 - 1, (1,), np.int64), [[-(2**31)], [7]], [[-(2.0**31)], [7]]),
        (Box(-2, 2, (1,), np.dtype(">f4")), [[1.5], [-2]], [[1.5], [-2]]),
        (Box(-2, 2, (1,), np.longdouble), [[1.5], [-2]], [[1.5], [-2]]),
        (Box(-9, 9, (1,), np.dtype(">i8")), [[7], [-9]], [[7], [-9]]),
        (Discrete(5000, start=-5), [-5, 4994], [[0], [4999]]),
        (MultiDiscrete([1000, 200], start=[3, -2]), [[3, -2], [1002, 197]], [[0, 0], [999, 199]]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_vectors_of_whole_numbers_keep_their_values(space, values, expected, capsys):
    seen = shown(space, values)
    assert seen.dtype == np.float32
    np.testing.assert_array_equal(seen, np.asarray(expected, np.float32))
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-(2**31), 2**31 - 1, "int32"), (-(2**31) - 1, 9, "float32"), (0, 2**31, "float32"), (0, 9, "int32")],
)
def test_whole_numbers_are_stored_as_such_if_32_bits_hold_them(low, high, expected):
    assert gymnasium_spaces.stored_dtype(Box(low, high, (1,), np.int64)) == expected


class Flags(Shown):
    """Returns ends of an unusual type; the episode is truncated by the third step."""

    def __init__(self, flag):
        super().__init__(Box(-9, 9, (1,), np.float32), [[0], [1], [2], [3]])
        self.flag = flag

    def step(self, action):
        obs, reward, *_ = super().step(action)
        return obs, reward, self.flag(0), self.flag(int(self.t == 3)), {}


@pytest.mark.parametrize("flag", [int, np.bool_, np.uint8, lambda x: np.array([x]), lambda x: np.array(x, bool)])
def test_flag_may_be_any_single_0_or_1(flag):
    env = envs.make(lambda: Flags(flag), 1, LOCAL)
    state, _ = env.reset(jax.random.key(0))
    found = []
    for _ in range(3):
        state, timestep = env.step(state, jnp.zeros(1, jnp.int32))
        found.append((bool(timestep.last[0]), float(timestep.discount[0])))
    env.host.close()
    assert found == [(False, 1), (False, 1), (True, 1)]


@pytest.mark.parametrize("flag", [lambda x: np.array([x, x]), float, lambda x: np.array([]), lambda x: str(x)])
def test_flag_of_another_kind_is_refused(flag):
    with pytest.raises(ValueError, match="terminated must be True or False, got"):
        envs.make(lambda: Flags(flag), 1, LOCAL)


@pytest.mark.parametrize(
    ("shape", "is_moved"),
    [((3, 16, 20), True), ((12, 16, 16), True), ((7, 9, 12), False), ((3, 7, 7), False), ((13, 16, 16), False)],
)
def test_only_images_with_few_channels_first_are_moved(shape, is_moved):
    space = Box(0, 255, shape, np.uint8)
    value = space.sample()
    seen = gymnasium_spaces.encode(space, value[None])[0]
    np.testing.assert_array_equal(seen, np.moveaxis(value, 0, -1) if is_moved else value)


@pytest.mark.parametrize(
    ("space", "dtype", "torso"),
    [
        (Box(0, 255, (84, 84), np.uint8), np.uint8, "nature   reads image 84x84x1 / 255"),
        (Box(0, 255, (16, 20, 3), np.uint8), np.uint8, "minatar   reads image 16x20x3 / 255"),
        (Box(0, 1, (8, 8), np.bool_), np.bool_, "minatar   reads board 8x8x1"),
        (MultiBinary((6, 7)), np.bool_, "minatar   reads board 6x7x1"),
        (Box(0, 4, (7, 7), np.uint8), np.uint8, "minatar   reads board 7x7x1"),
        (Box(0, 1, (24, 18), np.uint8), np.bool_, "minatar   reads board 24x18x1"),
        (Box(0, 1, (2, 24, 18), np.uint8), np.bool_, "minatar   reads board 24x18x2"),
        (Box(0, 7, (24, 18), np.uint8), np.float32, "minatar   reads board 24x18x1"),
        (Box(0, 254, (40, 40, 3), np.uint8), np.float32, "nature   reads board 40x40x3"),
        (Box(-1, 1, (8, 8), np.float32), np.float32, "mlp   reads vector 8x8"),
        (MultiBinary(6), np.float32, "mlp   reads vector 6"),
    ],
    ids=str,
)
def test_arrays_of_two_axes_and_bounds_of_bytes(space, dtype, torso):
    """Images and boards [H, W] get a channel. Bytes are shades only if their space ends at 255."""
    space.seed(0)
    value = space.sample()
    seen = gymnasium_spaces.encode(space, value[None])[0]
    moved = np.moveaxis(value, 0, -1) if value.shape == (2, 24, 18) else value
    wanted = moved[..., None] if value.ndim == 2 and dtype != np.float32 or value.shape == (24, 18) else moved
    assert seen.dtype == dtype and value.std() > 0
    np.testing.assert_array_equal(seen, wanted)
    assert torsos.describe(jax.ShapeDtypeStruct(seen.shape, seen.dtype)) == torso
    if value.shape != (2, 24, 18) and value.ndim > 1:  # a device environment has its channels last
        high = getattr(space, "high", np.ones(space.shape))
        again = spaces.as_array(jnp.asarray(value, bool if isinstance(space, MultiBinary) else None), high, 0)
        np.testing.assert_array_equal(again, seen)


def test_number_that_its_space_cannot_hold_is_rejected():
    class Overflowing(Shown):
        def step(self, action):
            return np.array([300]), 0.0, False, False, {}

    env = envs.make(lambda: Shown(Box(-9, 9, (1,), np.int8), [[1], [2]]), 1, LOCAL)
    env.host.close()
    with pytest.raises(ValueError, match=r"observation must be int8\[1\] as its space declares, got int64\[1\]"):
        envs.make(lambda: Overflowing(Box(-9, 9, (1,), np.int8), [[1], [2]]), 1, LOCAL)


@pytest.mark.parametrize(
    ("low", "high"), [(-np.pi, np.pi), (-0.1, 0.1), (0.3, 0.7), (-1.0, 1.0), (-1e-50, 1e-50), (0.1, 0.3)]
)
def test_saturated_actions_lie_within_bounds_of_float64(low, high):
    bounds = spaces.true_bounds("no", low, high, (1,))
    assert low <= float(bounds[0][0]) <= float(bounds[1][0]) <= high
    assert np.allclose(bounds, [[low], [high]], rtol=2e-7, atol=1e-45)
    space = Box(low, high, (1,), np.float64)
    env = envs.make(lambda: Strict(space), 1, LOCAL)
    state = env.reset(jax.random.key(0))[0]
    for action in (-1.0, 1.0, 0.3):
        state, timestep = jax.jit(env.step)(state, jnp.full((1, 1), action, jnp.float32))
        assert space.contains(np.asarray(timestep.obs[0], np.float64))
    env.host.close()


class Strict(gymnasium.Env):
    """Rejects actions outside its space, and returns them."""

    observation_space = Box(-np.inf, np.inf, (1,))

    def __init__(self, space):
        self.action_space = space

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.float32(action), 0.0, False, False, {}


class Masked(gymnasium.Env):
    """Rejects forbidden actions. The mask is a part of the observation or an entry of `info`."""

    def __init__(self, space, place="obs", at_end=True, at_reset=True):
        self.action_space, self.place, self.at_end, self.at_reset = space, place, at_end, at_reset
        self.nums = [int(space.n)] if isinstance(space, Discrete) else np.broadcast_to(2, space.shape).tolist()
        self.nums = space.nvec.tolist() if isinstance(space, MultiDiscrete) else self.nums
        state = Box(0, 1, (1,))
        self.observation_space = state
        if place == "obs":
            self.observation_space = Dict(state=state, action_mask=MultiBinary(sum(self.nums)))

    def outcome(self, has_mask=True):
        self.mask = np.concatenate([np.eye(num, dtype=np.int8)[self.np_random.integers(num)] for num in self.nums])
        value = np.zeros(1, np.float32)
        if self.place == "obs":
            return {"state": value, "action_mask": self.mask}, {}
        return value, {"action_mask": self.mask} if has_mask else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.outcome(self.at_reset)

    def step(self, action):
        start = getattr(self.action_space, "start", 0)
        chosen = np.concatenate([np.eye(num)[x] for num, x in zip(self.nums, np.ravel(action - start), strict=True)])
        assert (chosen <= self.mask).all(), "forbidden"
        self.t += 1
        obs, info = self.outcome(self.at_end or self.t < 5)
        return obs, 0.0, self.t >= 5, False, info


MASKED_SPACES = [Discrete(4, start=-2), MultiDiscrete([3, 2, 5]), MultiDiscrete([2, 3], start=[4, -1]), MultiBinary(6)]


@pytest.mark.parametrize("place", ["obs", "info"])
@pytest.mark.parametrize("space", MASKED_SPACES, ids=str)
def test_trials_take_only_allowed_actions(space, place):
    """An environment that rejects all others can be made, and its state can be saved."""
    make = lambda: Masked(space, place)
    described = description.describe(source.from_object(make, {}, ""))
    assert described.pool.env.has_action_mask
    assert copying.choose_method(make) == ("pickle", "")


@pytest.mark.parametrize("space", MASKED_SPACES, ids=str)
def test_masked_samples_are_uniform_over_allowed_actions(space):
    space.seed(0)
    mask = np.ones(4 if isinstance(space, Discrete) else sum(Masked(space).nums), bool)
    mask[1] = False
    found = np.array([np.ravel(masks.sample(space, mask) - getattr(space, "start", 0)) for _ in range(600)])
    assert all(space.contains(masks.sample(space, mask)) for _ in range(20))
    assert 1 not in found[:, 0]
    counts = np.bincount(found[:, 0])
    counts = counts[counts > 0]
    assert counts.sum() == 600 and abs(counts - 600 / len(counts)).max() < 60


@pytest.mark.parametrize("mask", [None, np.zeros(4), np.ones(3), (), np.zeros(0)])
def test_unusable_mask_is_ignored_when_sampling(mask):
    space = Discrete(4)
    assert {int(masks.sample(space, mask)) for _ in range(100)} == {0, 1, 2, 3}


def test_terminal_state_needs_no_mask():
    env = envs.make(lambda: Masked(Discrete(4), "info", at_end=False), 1, LOCAL)
    state, timestep = env.reset(jax.random.key(0))
    for _ in range(5):
        state, timestep = env.step(state, jnp.argmax(timestep.action_mask, axis=1).astype(jnp.int32))
    assert timestep.last.all() and timestep.action_mask.all()
    state, timestep = env.step(state, jnp.zeros(1, jnp.int32))
    assert timestep.action_mask.sum() == 1
    env.host.close()


def test_mask_that_resets_do_not_return_is_rejected():
    class Late(Masked):
        def step(self, action):
            return np.zeros(1, np.float32), 0.0, False, False, {"action_mask": np.ones(4)}

    says = r'info\["action_mask"\] must be returned by reset too, got it from step only; return it from both'
    with pytest.raises(ValueError, match=says):
        envs.make(lambda: Late(Discrete(4), "info", at_reset=False), 1, LOCAL)


@pytest.mark.parametrize(
    ("space", "warns"), [(Discrete(1025), True), (Discrete(1024), False), (Dict(a=Discrete(2000)), True)]
)
def test_index_without_one_hot_vector_is_warned_about(space, warns):
    found = gymnasium_spaces.warnings("mine", gymnasium_spaces.as_tree(space))
    assert len(found) == warns and all("not as a one-hot vector" in line and "; use network" in line for line in found)


def test_registered_environment_is_made_without_gymnasiums_own_checks():
    """Its checker would step every environment a second time at its first reset, and warn in other words."""
    env = source.from_id("CartPole-v1", {}).make()
    layers = []
    while isinstance(env, gymnasium.Wrapper):
        layers.append(type(env).__name__)
        env = env.env
    env.close()
    assert "PassiveEnvChecker" not in layers


@pytest.mark.parametrize("values", [[[5], [0], [0]], [[0], [5], [0]]], ids=["reset", "step"])
def test_number_outside_its_space_is_warned_about_where_it_occurs(values, capsys):
    """A pool of one environment, without the trial that precedes a run."""
    made = source.from_object(lambda: Shown(Box(-1, 1, (1,), np.float32), values), {}, "")
    recipe = Recipe("Shown", made.maker(render=False), description.describe(made).layout)
    capsys.readouterr()
    pool = LocalPool(recipe, [1])
    pool.reset()
    assert ("warning" in capsys.readouterr().err) == (values[0] == [5])
    pool.send(np.zeros(1, int))
    pool.recv()
    pool.close()
    assert ("warning" in capsys.readouterr().err) == (values[0] != [5])


class Closing(Shown):
    """Counts the environments that are open."""

    open = 0

    def __init__(self):
        super().__init__(Box(0, 255, (20, 20, 3), np.uint8), np.zeros((2, 20, 20, 3)))
        Closing.open += 1

    def close(self):
        Closing.open -= 1


def test_every_environment_is_closed():
    """Those that only tell their spaces, and those of the pool."""
    env = envs.make(Closing, 2, LOCAL, gray=True)
    env.reset(jax.random.key(0))
    assert Closing.open == 2
    env.host.close()
    assert Closing.open == 0
