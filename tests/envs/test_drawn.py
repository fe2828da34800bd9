"""Parameters drawn at each reset. The oracle is gymnax's own step with the drawn values."""

import functools
from typing import NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

import jaxrl_fast
from jaxrl_fast import envs
from jaxrl_fast.config import resume
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.wrappers import ranges as drawn
from jaxrl_fast.sweep import grid
from jaxrl_fast.training import build

T, N = 60, 4


class Params(NamedTuple):
    max_steps_in_episode: int = 5
    speed: int = 2
    gains: jax.Array = jnp.ones(3)
    wide: bool = False
    name: str = "plain"
    size: int = 3


class Push:
    """An environment whose observation contains its parameters."""

    default_params = Params()

    def reset_env(self, key, params):
        state = jnp.float32(0)
        return self.observe(state, params), state

    def step_env(self, key, state, action, params):
        return self.observe(state + 1, params), state + 1, jnp.float32(params.speed), False, {}

    def observe(self, state, params):
        limits = jnp.array([params.max_steps_in_episode, params.speed], jnp.float32)
        return jnp.concatenate([limits, params.gains, state[None], jnp.zeros(int(params.size))])

    def is_truncated(self, state, params):
        return state >= params.max_steps_in_episode

    def action_space(self, params):
        return spaces.Discrete(2)


class Masked(Push):
    """Allows the first action only where the drawn speed is even."""

    def action_mask(self, state, params):
        return jnp.array([params.speed % 2 == 0, True])


def play(env, seed=0, num_steps=T):
    """Return the state and time step of a reset, and those of num_steps steps with action 1."""

    def step(state, _):
        after, timestep = env.step(state, jnp.ones(env.spec.num_envs, jnp.int32))
        return after, (after, timestep)

    def run(key):
        start = env.reset(key)
        return start, jax.lax.scan(step, start[0], length=num_steps)[1]

    return jax.device_get(jax.jit(run)(jax.random.key(seed)))


@pytest.mark.slow
def test_step_matches_gymnax_with_gravity_drawn_at_each_reset():
    env = envs.make("CartPole-v1", N, gravity="8..12", max_steps_in_episode=20)
    (_, first), (states, steps) = play(env)
    assert env.view.info == ("drawn at each reset: gravity from 8 to 12",)
    gravity = states.env.drawn["gravity"]
    assert gravity.min() >= 8 and gravity.max() < 12
    plain, params = gymnax.make("CartPole-v1")
    step = jax.vmap(lambda key, state, g: plain.step_env(key, state, 1, params.replace(gravity=g))[0], (None, 0, 0))
    obs = np.concatenate([first.obs[None], steps.obs])
    for t in range(1, T):
        begins = steps.last[t - 1]
        before = jax.tree.map(lambda x: x[t - 1], states.env.env)  # noqa: B023
        expected = step(jax.random.key(0), before, gravity[t - 1])
        np.testing.assert_allclose(obs[t + 1][~begins], expected[~begins], rtol=1e-5, atol=1e-6)
        changed = gravity[t] != gravity[t - 1]
        np.testing.assert_array_equal(changed, begins)  # drawn anew at each reset and only there


@pytest.mark.slow
def test_drawn_parameters_depend_on_seed_and_differ_between_environments():
    make = functools.partial(envs.make, "CartPole-v1", gravity="8..12", masscart="0.5..1.5")
    of = lambda env, seed: play(env, seed, 3)[0][0].env.drawn
    one, same, other = of(make(N), 0), of(make(2).view.resize(N, HostEnvConfig()), 0), of(make(N), 1)
    for name in ("gravity", "masscart"):
        np.testing.assert_array_equal(one[name], same[name])
        assert len({*one[name].tolist(), *other[name].tolist()}) == 2 * N
    assert not np.allclose((one["gravity"] - 8) / 4, one["masscart"] - 0.5)  # independent of each other


def test_ranges_draw_integers_arrays_and_time_limits():
    env = envs.make(Push, 50, speed="1..3", gains="-1..0.5", max_steps_in_episode="2..4")
    (state, first), (_, steps) = play(env, num_steps=10)
    assert state.env.drawn["speed"].dtype == np.int32 and state.env.drawn["gains"].shape == (50, 3)
    assert {*first.obs[:, 1].tolist()} == {1, 2, 3} == {*steps.reward[0].tolist()}  # both ends included
    gains = first.obs[:, 2:5]
    assert gains.min() >= -1 and gains.max() < 0.5 and len(np.unique(gains)) == 150
    limit = first.obs[:, 0]
    assert {*limit.tolist()} == {2, 3, 4}
    np.testing.assert_array_equal(steps.last.argmax(0) + 1, limit)


def test_drawn_parameters_keep_observation_dtype():
    """MinAtar's observations stay bool."""
    env = envs.make("Breakout-MinAtar", 1, max_steps_in_episode="50..60")
    assert env.spec.obs == envs.make("Breakout-MinAtar", 1).spec.obs


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (Push, {"speed": "3..1"}, "speed: the smaller number of a range comes first, got 3..1; use 1..3"),
        (Push, {"speed": "1.5..2"}, "speed: must be int for .*Push, got '1.5'"),
        (Push, {"speed": "1..3e9"}, "speed: must be -2147483646 to 2147483646 for .*, got 1..3e9"),
        (Push, {"max_steps_in_episode": "0..3"}, "max_steps_in_episode: must be 1 to .*, got 0..3"),
        (Push, {"wide": "0..1"}, "wide: must be one value for .*, got 0..1; only numbers can be drawn"),
        (Push, {"size": "1..3"}, r".*Push cannot be made with size=1..3: .*; a parameter that decides a shape"),
        (Push, {"sped": "1..3"}, "Push has no option 'sped'; did you mean speed?"),
        (Push, {"speed": "1.."}, "speed: must be int for .*, got '1..'"),
        ("gymnasium/CartPole-v1", {"max_episode_steps": "5..9"}, "max_episode_steps: must be one value .* only param"),
        ("envpool/CartPole-v1", {"max_episode_steps": "5..9"}, "max_episode_steps: must be one value .* only param"),
    ],
)
def test_invalid_range_is_rejected_with_one_line_message(env, options, message):
    with pytest.raises(ValueError, match=message) as error:
        envs.make(env, 2, **options)
    assert "\n" not in str(error.value)


def test_string_option_that_looks_like_range_is_accepted():
    assert envs.make(Push, 1, name="1..2").spec.id


@pytest.mark.parametrize(
    ("value", "ends"),
    [("8..12", ("8", "12")), ("-1..0.5", ("-1", "0.5")), ("1e-3..1k", ("1e-3", "1k")), ("a..b", None), ("1..", None)]
    + [("8", None), (8, None), ("..", None), ("1..inf", None), ("1..2..3", None)],
)
def test_as_range_accepts_only_two_finite_numbers(value, ends):
    assert drawn.as_range(value) == ends


def test_sweep_expands_seed_range_but_not_parameter_range():
    """A range of seeds gives several runs. A range of a parameter stays one option of each run."""
    asked = grid.from_command_line(["ppo", "--env", "CartPole-v1", "--env-option", "gravity=8..12", "--seed", "0..1"])
    found = [member.seed for group in asked.groups for member in group.members]
    assert found == [0, 1] and {group.settings.options.env_options["gravity"] for group in asked.groups} == {"8..12"}


def test_run_prints_and_saves_range_for_training_and_evaluation(tmp_path, capsys):
    run = jaxrl_fast.fit(
        algo="ppo", env="CartPole-v1", env_options={"gravity": "8..12"}, total_steps=1024, num_envs=8,
        hidden_sizes=(8,), eval_episodes=8, loggers=(), run_dir=tmp_path / "run",
    )  # fmt: skip
    assert "drawn at each reset: gravity from 8 to 12" in capsys.readouterr().out
    options = resume.of_run(tmp_path / "run").options  # read from config.yaml
    assert options.env_options == {"gravity": "8..12"}
    env = build.evaluation_env(options, envs.make(options.env, 8, **options.env_options))
    assert {*env.reset(jax.random.key(0))[0].env.drawn} == {"gravity"}
    fixed = run.evaluate(env_options={"gravity": 10}, episodes=8)
    assert fixed["differs_from_training"] == {"gravity": 10}


@pytest.mark.slow
def test_players_of_one_game_share_its_drawn_parameters():
    num_games = 16
    env = envs.make("games/Paddles", num_games, ball_speed="0.5..1")
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    assert env.spec.players == ("left", "right") and timestep.obs.shape == (2 * num_games, 9)
    drawn = state.env.drawn["ball_speed"]
    assert drawn.shape == (num_games,) and len(np.unique(drawn)) == num_games
    assert float(drawn.min()) >= 0.5 and float(drawn.max()) <= 1


@pytest.mark.slow
def test_action_mask_follows_drawn_parameters():
    env = envs.make(Masked, N, speed="1..9")
    (state, first), (states, steps) = play(env)
    assert env.spec.has_action_mask
    for drawn_speed, mask in (
        (state.env.drawn["speed"], first.action_mask),
        (states.env.drawn["speed"], steps.action_mask),
    ):
        np.testing.assert_array_equal(mask[..., 0], drawn_speed % 2 == 0)
        assert mask[..., 1].all()
    assert 0 < steps.action_mask[..., 0].mean() < 1
