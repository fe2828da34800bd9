"""Attributes of gymnasium environments that follow schedules. The oracle is a plain loop that sets the attribute."""

import itertools

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces

from jaxrl_fast import envs
from jaxrl_fast.envs.gymnasium.copying import unpack
from jaxrl_fast.envs.gymnasium.layout import Recipe
from jaxrl_fast.envs.gymnasium.pool import LocalPool, WorkerPool
from jaxrl_fast.envs.gymnasium.stepping import Stepper
from jaxrl_fast.envs.host.config import HostEnvConfig, Shard, Workers
from jaxrl_fast.envs.schedules import Schedule
from tests.helpers import slow

TRAINING = HostEnvConfig(schedules=True, workers=Workers(0))


class Level(gymnasium.Env):
    """Return the level as the reward, and that of the reset in the observation. Episodes have 3 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, level=1.0):
        self.level, self.count, self.overwritten, self.title, self.is_on = level, 1, 2.0, "plain", True
        self.private, self.t = 0.0, 0

    @property
    def fixed(self):
        return 3.0

    @property
    def checked(self):
        return self.private

    @checked.setter
    def checked(self, value):
        if value > 5:
            raise ValueError("too large")
        self.private = value

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.begun, self.overwritten = 0, self.level, 2.0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), self.level + self.overwritten - 2, False, self.t == 3, {}

    def observe(self):
        return np.array([self.begun, self.t, self.count], np.float32)


class Own(Level):
    """The same with `get_state` and `set_state`, which leave out the level, and without pickling."""

    def __init__(self, **options):
        super().__init__(**options)
        self.squares = (x**2 for x in itertools.count())

    def get_state(self):
        return self.t, self.begun

    def set_state(self, state):
        self.t, self.begun = state


def expected(level, count, num_envs, num_steps):
    """Return observations and rewards [T, ...] of gymnasium's own environment, whose attributes this loop sets."""
    env, found, ended = Level(level[1][0]), [], False
    env.reset()
    for t in range(num_steps):
        env.level = float(np.interp(t * num_envs, *level))
        env.count = round(float(np.interp(t * num_envs, *count)))
        obs, reward = (env.reset()[0], 0.0) if ended else env.step(0)[:2]
        ended = env.t == 3
        found.append((obs, reward))
    return [np.array(x, np.float32) for x in zip(*found)]


def play(env, num_steps):
    """Return observations and rewards [T, N, ...] after a reset."""
    state, _ = env.reset(jax.random.key(0))
    step, found = jax.jit(env.step), []
    for _ in range(num_steps):
        state, timestep = step(state, np.zeros(env.spec.num_envs, np.int32))
        found.append(jax.device_get((timestep.obs, timestep.reward)))
    env.host.close()
    return [np.stack(x) for x in zip(*found)]


@pytest.mark.parametrize(("num_workers", "num_pools"), [(0, 0), (0, 2), slow(2, 0), slow(1, 2)])
def test_rewards_are_those_of_a_loop_that_sets_the_attributes(num_workers, num_pools):
    """Starts have the value of their step. Both shards count, and neither workers nor pools change anything."""
    config = TRAINING._replace(workers=Workers(num_workers, 60.0), num_async_pools=num_pools, shard=Shard(0, 2))
    env = envs.make(Level, 4, config, level="4..12..9@80", count="1..3@60")
    assert "scheduled: level 4 to 12 to 9 in 80 steps; count 1 to 3 in 60 steps" in env.view.info[-1]
    obs, reward = play(env, 14)
    first_obs, first_reward = expected(([0, 40, 80], [4, 12, 9]), ([0, 60], [1, 3]), 8, 14)
    np.testing.assert_array_equal(obs, np.repeat(first_obs[:, None], 4, axis=1))
    np.testing.assert_array_equal(reward, np.repeat(first_reward[:, None], 4, axis=1))


def test_attribute_that_a_reset_overwrites_is_set_again():
    _, reward = play(envs.make(Level, 2, TRAINING, overwritten="7@callback"), 6)
    assert reward[:, 0].tolist() == [6, 6, 6, 0, 6, 6]


def test_evaluations_have_the_last_value():
    env = envs.make(Level, 2, HostEnvConfig(workers=Workers(0)), level="4..12@80", count="5@callback")
    obs, reward = play(env, 2)
    assert reward.tolist() == [[12, 12]] * 2 and (obs == [12, 1, 5])[0].all() and env.host.schedules == {}


@pytest.mark.parametrize("kind", [Level, Own])
@pytest.mark.parametrize("num_workers", [0, slow(2)])
def test_restored_environments_continue_their_schedules(kind, num_workers):
    schedules = {"level": Schedule((0.0, 8.0), 16)}
    env = envs.make(kind, 2, TRAINING, level="0..8@16")
    layout = env.host and next(iter(env.host.schedules)) == "level" and _layout(kind)

    def open_pool():
        recipe = Recipe("Level-v0", kind, layout, schedules=schedules, num_envs=2)
        method = lambda: "own" if kind is Own else "pickle"
        if num_workers:
            return WorkerPool(recipe, [1, 2], method, num_workers=num_workers, timeout_s=60.0)
        return LocalPool(recipe, [1, 2], method)

    def step(pool):
        pool.send(np.zeros(2, np.int64))
        return pool.recv().reward.tolist()

    one = open_pool()
    one.reset()
    for _ in range(2):
        step(one)
    one.send(np.zeros(2, np.int64))
    saved = one.get_state()  # after a pending step
    rewards = [one.recv().reward.tolist(), step(one), step(one), step(one)]
    assert rewards == [[2.0] * 2, [0.0] * 2, [4.0] * 2, [5.0] * 2]
    other = open_pool()
    other.reset()
    other.set_state(saved)
    assert [step(other) for _ in range(3)] == rewards[1:]
    other.set_options({"level": 7.5}, None)
    assert step(other) == [7.5] * 2
    other.set_options({}, 2)
    step(other)  # a reset
    assert step(other) == [3.0] * 2
    one.close()
    other.close()


def _layout(kind):
    """Return the layout of one environment."""
    from jaxrl_fast.envs.gymnasium import description, source

    return description.describe(source.from_object(kind, {}, "")).layout


def test_state_without_schedules_is_as_before():
    recipe = Recipe("Level-v0", Level, _layout(Level))
    pool = LocalPool(recipe, [1])
    pool.reset()
    state = pool.get_state()
    assert "steps" not in state and unpack(pool.arrays, state)[0].num_steps == 0
    pool.close()


def test_failing_property_names_the_environment():
    from jaxrl_fast.envs.gymnasium.layout import allocate

    layout = _layout(Level)
    recipe = Recipe("Level-v0", Level, layout, schedules={"checked": Schedule((4.0, 8.0), 4)})
    stepper = Stepper(recipe, [0], allocate(layout, 1))
    stepper.reset()
    stepper.step()
    stepper.step()
    with pytest.raises(ValueError, match="too large") as caught:
        stepper.step()
    assert "Level-v0: setting an option failed in environment 0" in str(caught.value.__notes__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levl": "1..3@2M"}, "Level has no attribute 'levl' that could follow 1..3@2M; did you mean level?"),
        ({"zzz": "1..3@2M"}, "has no attribute 'zzz' .*; its numbers are level, count, overwritten, private, t"),
        ({"title": "1..3@2M"}, "title: must be a number in .*Level to follow a schedule, got 1..3@2M for a str"),
        ({"is_on": "0..1@2M"}, "is_on: must be a number in .* got 0..1@2M for a bool"),
        ({"fixed": "1..3@2M"}, "fixed: cannot be set in .*Level .*, got 1..3@2M"),
        ({"checked": "1..9@2M"}, r"checked: cannot be set in .*Level \(ValueError: too large\), got 1..9@2M"),
        ({"t": "1..3@2M"}, r"t: must keep the value 3 in .*Level, got \d+ after steps"),
        ({"level": "3..x@2M"}, "level: the values of a schedule must be numbers, got 3..x@2M"),
        ({"frame_skip": "1..2@2M"}, "frame_skip: must be one value for .*Level, got 1..2@2M"),
        ({"max_episode_steps": "5..9@2M"}, "has no attribute 'max_episode_steps' that could follow 5..9@2M"),
    ],
)  # fmt: skip
def test_invalid_schedule_is_rejected_with_one_line_message(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        envs.make(Level, 2, TRAINING, **options)
    assert "\n" not in str(caught.value)
