"""Options that follow schedules, on the device. The oracles are plain loops that set the parameter of each step."""

from typing import NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

from jaxrl_fast import envs
from jaxrl_fast.envs import schedules
from jaxrl_fast.envs.gymnax import scheduled
from jaxrl_fast.envs.host.config import HostEnvConfig, Shard
from jaxrl_fast.envs.schedules import Schedule
from jaxrl_fast.options import wrap
from jaxrl_fast.utils import target
from jaxrl_fast.utils.parsing import Number

TRAINING = HostEnvConfig(schedules=True)
N = 3


class Params(NamedTuple):
    max_steps_in_episode: int = 9
    level: float = 1.0
    count: int = 3
    gains: jax.Array = jnp.ones(2)
    wide: bool = False
    name: str = "plain"
    size: int = 3
    force: float = 1.0


class Levels:
    """Return the level as the reward, and that of the reset in the observation. Episodes have 2 to 5 steps."""

    default_params = Params()

    def reset_env(self, key, params):
        state = jnp.stack([jnp.floor(jax.random.uniform(key, minval=2.0, maxval=6.0)), 0.0, jnp.float32(params.level)])
        return self.observe(state, params), state

    def step_env(self, key, state, action, params):
        state = state.at[1].add(1)
        return self.observe(state, params), state, params.level, state[1] >= state[0], {}

    def observe(self, state, params):
        return jnp.concatenate([state, jnp.float32(params.count)[None], jnp.zeros(int(params.size))])

    def is_truncated(self, state, params):
        return state[1] >= params.max_steps_in_episode

    def action_space(self, params):
        return spaces.Box(-params.force, params.force, (1,))


def play(env, num_steps, keys=None, platform="cpu"):
    """Return the first time step [N], and the states and time steps of `num_steps` steps [T, N].

    With several keys [S], all have a leading axis [S].
    """

    def step(state, _):
        action = jnp.ones((env.spec.num_envs, *env.spec.action.shape), env.spec.action.zeros().dtype)
        after, timestep = env.step(state, action)
        return after, (after, timestep)

    def run(key):
        state, first = env.reset(key)
        return first, *jax.lax.scan(step, state, length=num_steps)[1]

    with target.tracing_for(platform):
        many = keys is not None
        found = jax.jit(jax.vmap(run) if many else run)(keys if many else jax.random.key(0))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), found)


def make(num_envs=N, config=TRAINING, **options):
    return envs.make(Levels, num_envs, config, **options)


def test_values_are_linear_between_points_and_constant_afterwards():
    """Half of 10 steps is the middle point; a quarter of them is half of the way to it."""
    schedule = schedules.read("level", "4..12..9@10", 1.0)
    assert [schedule.at(k) for k in (0, 2.5, 5, 7.5, 10, 11, 10**12)] == [4, 8, 12, 10.5, 9, 9, 9]
    assert schedule.last == 9 and schedule.fixed().at(0) == 9
    assert schedules.read("level", "4..12@callback", 1.0).at(10**9) == 4
    assert schedules.read("level", "-1e-1..+2k@1.5M", 1.0) == Schedule((-0.1, 2000.0), 1_500_000)


@pytest.mark.parametrize(
    ("text", "default", "values"),
    [
        ("1..3@4", 2, [1, 2, 2, 2, 3]),  # 1.5 and 2.5 are rounded to even
        ("1..3@4", Number(2), [1, 2, 2, 2, 3]),
        ("1.0..3@4", Number(2), [1, 1.5, 2, 2.5, 3]),
        ("1..3@4", 2.0, [1, 1.5, 2, 2.5, 3]),
    ],
)
def test_options_that_are_whole_numbers_get_rounded_values(text, default, values):
    found = [schedules.read("count", text, default).at(k) for k in range(5)]
    assert found == values and {type(x) for x in found} == {int if found == [1, 2, 2, 2, 3] else float}


def test_reward_is_the_level_of_the_environment_steps_so_far():
    """All environments of all shards count: the step k of each begins after k * N * 2 environment steps."""
    config = TRAINING._replace(shard=Shard(1, 2))
    env = make(config=config, level="4..12..9@60", count="1..3@40")
    assert env.view.info == (
        "scheduled: level 4 to 12 to 9 in 60 steps; count 1 to 3 in 40 steps; evaluations use the last value",
    )
    _, states, steps = play(env, 15)
    before = np.arange(15) * N * 2
    begins = np.concatenate([np.zeros((1, N), bool), steps.last[:-1]])
    level = np.interp(before, [0, 30, 60], [4, 12, 9])
    np.testing.assert_allclose(steps.reward, np.where(begins, 0, level[:, None]), rtol=1e-6)
    assert (steps.reward[11:][~begins[11:]] == 9).all()
    count = np.round(np.interp(before, [0, 40], [1, 3]))
    np.testing.assert_array_equal(steps.obs[..., 3][~begins], np.broadcast_to(count[:, None], (15, N))[~begins])
    assert states.options.num_steps.tolist() == list(range(1, 16))


def test_start_is_drawn_with_the_level_at_the_begin_of_the_episode_before():
    """The first two episodes of an environment begin with the first level. Platforms and seeds agree bit by bit."""
    env = make(level="4..12@80")
    first, states, steps = play(env, 40)
    expected, before = np.full(N, 4.0), np.full(N, 4.0)
    np.testing.assert_array_equal(first.obs[:, 2], expected)
    num_begun = np.zeros(N)
    for t in range(40):
        if t:
            begins = steps.last[t - 1]
            expected = np.where(begins, before, expected)
            before = np.where(begins, np.interp(t * N, [0, 80], [4, 12]), before)
            num_begun += begins
        np.testing.assert_allclose(steps.obs[t, :, 2], expected, rtol=1e-6)
    assert num_begun.min() > 5
    _, of_gpu, on_gpu = play(env, 40, platform="gpu")
    jax.tree.map(np.testing.assert_array_equal, (states.env, steps), (of_gpu.env, on_gpu))
    _, of_seeds, seeds = play(env, 40, jnp.stack([jax.random.key(5), jax.random.key(0)]))
    both = jax.tree.map(lambda x: x[1], (of_seeds.env, seeds))
    jax.tree.map(np.testing.assert_array_equal, (states.env, steps), both)


def test_cartpole_steps_as_gymnax_does_with_the_gravity_of_each_step():
    env = envs.make("CartPole-v1", 2, TRAINING, gravity="-9.8..20@60", max_steps_in_episode="5..20@60")
    first, states, steps = play(env, 40)
    plain, params = gymnax.make("CartPole-v1")
    step = jax.jit(lambda state, gravity: plain.step_env(jax.random.key(0), state, 1, params.replace(gravity=gravity)))
    obs = np.concatenate([first.obs[None], steps.obs])
    for t in range(1, 40):
        gravity, limit = (np.interp(2 * t, [0, 60], ends) for ends in ((-9.8, 20), (5, 20)))
        for i in range(2):
            if steps.last[t - 1, i]:
                continue
            before = jax.tree.map(lambda x: x[t - 1, i], states.env)  # noqa: B023
            expected, after, _, terminated, _ = step(before, gravity)
            np.testing.assert_allclose(obs[t + 1, i], expected, rtol=1e-5, atol=1e-6)
            assert steps.last[t, i] == (bool(terminated) or after.time >= np.round(limit))


def test_evaluations_have_the_last_value_and_no_state_of_schedules():
    for env in (make(config=None, level="4..12@60"), make(level="4..12@60").view.resize(2, HostEnvConfig())):
        _, states, steps = play(env, 3)
        assert states.options is None and env.view.info == ()
        assert steps.reward[0].tolist() == [12] * env.spec.num_envs
    fixed = make(config=None, level="4..12@callback")
    assert play(fixed, 1)[2].reward[0].tolist() == [12] * N


def test_chosen_value_replaces_the_schedule():
    parts = (("level", Schedule((4.0, 12.0), 60)), ("count", Schedule((1.0, 3.0), 60, is_whole=True)))
    options = scheduled.Options(jnp.int32(5), jnp.float32([7, 0]), jnp.array([True, False]), parts, 6)
    assert jax.tree.map(float, scheduled.values(options)) == {"level": 7, "count": 2}  # 1 + 2 * 5 * 6 / 60


def test_counted_steps_do_not_overflow():
    last, none = scheduled.MAX_STEPS, jnp.zeros(0)
    options = scheduled.Options(jnp.int32(last - 1), none, none, (), 1)
    for _ in range(2):
        options = scheduled.advance(options)
        assert options.num_steps == last


def test_schedules_combine_with_drawn_parameters_frame_skip_and_wrappers():
    config = TRAINING._replace(wrappers=wrap.read(("quarantine", "previous")))
    env = make(config=config, level="4..12@60", count="1..5", frame_skip=2)
    _, _, steps = play(env, 4)
    level = 4 + 8 * N / 60
    assert {*steps.reward[1].round(4).tolist()} - {0} <= {*np.float32([level, 2 * level]).round(4).tolist()}
    assert steps.reward[1].any()
    assert "drawn at each reset: count from 1 to 5" in env.view.info
    assert np.isin(steps.obs[0][:, 3], range(1, 6)).all()


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (Levels, {"level": "4..12@"}, "level: a schedule must end with a number of environment steps"),
        (Levels, {"level": "2M@4..12"}, "level: a schedule must end with a number of environment steps, got 2M@4..12;"),
        (Levels, {"level": "4..12@2M@3"}, "level: a schedule must end with a number of environment steps"),
        (Levels, {"level": "4..12@-1"}, "level: a schedule must have 1 to 1e.12 environment steps, got 4..12@-1"),
        (Levels, {"level": "4@2M"}, "level: a schedule must have two or more values, got 4@2M; write it as 4..12@2M"),
        (Levels, {"level": "@2M"}, "level: the values of a schedule must be numbers, got @2M"),
        (Levels, {"level": "4..x@2M"}, "level: the values of a schedule must be numbers, got 4..x@2M"),
        (Levels, {"level": "4..nan@2M"}, "level: the values of a schedule must be numbers, got 4..nan@2M"),
        (Levels, {"level": "4..1e39@2M"}, "level: must be a finite number, got 1e.39"),
        (Levels, {"count": "1.5..3@2M"}, "count: must be a whole number from -16777216.* to 16777216, got 1.5"),
        (Levels, {"count": "1..17M@2M"}, "count: must be a whole number .* got 17000000"),
        (Levels, {"max_steps_in_episode": "0..3@2M"}, "max_steps_in_episode: must be a whole number from 1 to"),
        (Levels, {"wide": "0..1@2M"}, "wide: must be one value for .*, got 0..1@2M; only numbers follow a schedule"),
        (Levels, {"gains": "0..1@2M"}, "gains: must be one value for .*, got 0..1@2M; only numbers follow a schedule"),
        (Levels, {"size": "1..3@2M"}, r".*Levels cannot be made with size=1..3@2M: .* that decides a shape"),
        (Levels, {"force": "1..3@2M"}, "force: decides the bounds of actions of .*Levels, which cannot change"),
        (Levels, {"levl": "1..3@2M"}, "Levels has no option 'levl'; did you mean level?"),
        (Levels, {"frame_skip": "1..3@2M"}, "frame_skip: must be one value for .* got 1..3@2M; only numbers that an"),
        ("DeepSea-bsuite", {"size": "4..8@2M"}, "size: must be one value for gymnax/DeepSea-bsuite, got 4..8@2M"),
        ("envpool/CartPole-v1", {"max_episode_steps": "5..9@2M"}, "max_episode_steps: must be one value for envpool"),
    ],
)  # fmt: skip
def test_invalid_schedule_is_rejected_with_one_line_message(env, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        envs.make(env, N, TRAINING, **options)
    assert "\n" not in str(caught.value)


def test_text_with_at_sign_stays_text():
    assert make(config=None, name="4@home", level=2).spec.num_envs == N
