"""Hidden parts of an observation. The oracle is the same environment without hiding: all other values are equal."""

import copy
from functools import partial
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import jaxrl_fast
from jaxrl_fast import envs
from jaxrl_fast.agents import ppo
from jaxrl_fast.config import load
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers, Wrappers
from jaxrl_fast.envs.wrappers import hide
from jaxrl_fast.evaluation import inputs, video
from jaxrl_fast.training import build
from jaxrl_fast.types import View
from tests.helpers import probes, slow
from tests.helpers.gym_envs import Mixed
from tests.helpers.host_envs import run

T, N = 14, 4
CHOICE = np.random.default_rng(0).integers(0, 2, (T, N, 3)).astype(np.int32)  # valid actions of Mixed


class Parts(NamedTuple):
    position: jax.Array
    velocity: jax.Array


class Record:
    """A device environment that observes a NamedTuple in a dictionary; episodes have 5 steps."""

    default_params = ()

    def observe(self, t):
        return {"arm": Parts(jnp.full(2, t), 10.0 * t), "step": jnp.float32(t)}

    def reset_env(self, key, params):
        return self.observe(jnp.float32(0)), jnp.float32(0)

    def step_env(self, key, state, action, params):
        return self.observe(state + 1), state + 1, state, state >= 4, {}

    def is_truncated(self, state, params):
        return jnp.bool_(False)

    def action_space(self, params):
        return gymnasium.spaces.Discrete(2)


def play(env, actions):
    """Return the observations [T + 1, N, ...] and the time steps [T, N]."""
    try:
        first, steps = run(env, actions)
    finally:
        if env.host:
            env.host.close()
    return jax.tree.map(lambda a, b: np.concatenate([a[None], b]), first.obs, steps.obs), steps


def config(names, num_pools=0, **others):
    return HostEnvConfig(
        (3, 0, 0), num_async_pools=num_pools, workers=Workers(0), wrappers=Wrappers(hide=names), **others
    )


def assert_same_task(steps, others):
    assert steps.last.any()
    for name in ("reward", "discount", "last"):
        np.testing.assert_array_equal(getattr(steps, name), getattr(others, name))


@pytest.mark.parametrize(
    ("env_id", "num_pools"), [("CartPole-v1", 0), ("envpool/CartPole-v1", 2), ("gymnasium/CartPole-v1", 0)]
)
def test_hide_removes_vector_entries_and_changes_nothing_else(env_id, num_pools):
    make = lambda names: envs.make(env_id, N, config(names, num_pools))
    hidden = make(("1", "3"))
    assert hidden.spec == make(()).spec._replace(obs=jax.ShapeDtypeStruct((2,), jnp.float32))
    assert any("1, 3" in line for line in hidden.view.info)
    actions = np.ones((T, N), np.int32)
    whole, steps = play(make(()), actions)
    found, others = play(hidden, actions)
    np.testing.assert_array_equal(found, whole[..., [0, 2]])
    assert_same_task(steps, others)


def test_hide_removes_parts_of_nested_observation_by_path():
    """Hide an image, an entry of a vector, and the index of a state that is encoded as a one-hot vector."""
    names = ("camera", "inner/0", "joints/1")
    whole, steps = play(envs.make(Mixed, N, config(())), CHOICE)
    hidden = envs.make(Mixed, N, config(names))
    found, others = play(hidden, CHOICE)
    expected = copy.copy(whole)
    del expected["camera"]
    expected |= {"inner": (whole["inner"][1],), "joints": whole["joints"][..., [0, 2]]}
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), found)
    assert shapes == hidden.spec.obs
    assert_same_task(steps, others)
    space = Mixed().observation_space
    space.seed(0)
    raw = jax.tree.map(lambda *x: np.stack(x), space.sample(), space.sample())
    raw["choices"] = np.array([[1, 0], [2, 1]])  # as the environment returns them, with starts 1 and -1
    encoded = hidden.view.encode_obs(raw)
    np.testing.assert_array_equal(encoded.pop("choices"), [[1, 0, 0, 1, 0], [0, 1, 0, 0, 1]])
    wanted = {"bits": raw["bits"], "inner": (raw["inner"][1],), "joints": raw["joints"][:, [0, 2]].astype(np.float32)}
    jax.tree.map(np.testing.assert_array_equal, encoded, wanted)


class Told(gymnasium.Env):
    """Tells its step in numbers, in text, and in a list of any length."""

    observation_space = gymnasium.spaces.Dict(
        mission=gymnasium.spaces.Text(9),
        x=gymnasium.spaces.Box(0, 99, (2,)),
        inner=gymnasium.spaces.Tuple(
            [gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2)), gymnasium.spaces.Box(0, 99, (2,), np.uint8)]
        ),
    )
    action_space = gymnasium.spaces.Discrete(2)

    def show(self):
        numbers = np.array([self.t, 2 * self.t])
        return {"mission": "walk", "x": numbers.astype(np.float32), "inner": ([1] * self.t, numbers.astype(np.uint8))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.show(), {}

    def step(self, action):
        self.t += 1
        return self.show(), float(self.t), self.t >= 4, False, {}


@pytest.mark.parametrize("num_workers", [0, slow(2)])
def test_hidden_part_may_be_of_any_space(num_workers):
    """Text and lists leave the observation. Paths are those of the whole observation, whose parts a policy takes."""
    made = envs.make(Told, N, config(("mission", "inner/0", "inner/1/0"))._replace(workers=Workers(num_workers)))
    found, _ = play(made, np.zeros((5, N), np.int32))
    t = np.array([0, 1, 2, 3, 4, 0])[:, None]  # the last row is a reset
    assert set(found) == {"x", "inner"} and len(found["inner"]) == 1
    np.testing.assert_array_equal(found["x"][:, 1], np.concatenate([t, 2 * t], axis=1))
    np.testing.assert_array_equal(found["inner"][0][:, 1], 2 * t)
    assert jax.tree.map(lambda x: x.shape, made.spec.obs) == {"x": (2,), "inner": ((1,),)}
    env = Told()
    whole = env.reset()[0]
    for obs in (whole, {name: part for name, part in whole.items() if name != "mission"}):
        batch, is_one = inputs.as_batch(made, obs)
        seen = inputs.seen(made, batch).obs
        assert is_one and jax.tree.map(lambda x: x.tolist(), seen) == {"x": [[0, 0]], "inner": ([[0]],)}


def test_name_of_a_part_is_not_the_beginning_of_another():
    """The path "" is that of an observation without parts."""
    found = [hide.is_within(path, ("arm", "b/1")) for path in ("arm", "arm/x", "army", "b/1", "b/10", "b", "")]
    assert found == [True, True, False, True, False, False, False]


def test_part_of_unsupported_space_names_the_option_that_hides_it():
    says = "unsupported parts of the observation, got inner/0 Sequence, mission Text; use --wrap hide=inner/0,hide=miss"
    with pytest.raises(ValueError, match=says):
        envs.make(Told, 1)
    with pytest.raises(ValueError, match=r"got inner/0 Sequence; use --wrap hide=inner/0$"):
        envs.make(Told, 1, config(("mission",)))
    with pytest.raises(
        ValueError, match=r"must name parts of the observation of .*, got text; it has inner, inner/1, x"
    ):
        envs.make(Told, 1, config(("mission", "inner/0", "text")))


def test_hide_removes_dict_entry_and_namedtuple_field_on_device():
    without = lambda *names: HostEnvConfig(wrappers=Wrappers(hide=names))
    env = envs.make(Record, 2, without("arm/velocity", "step")).view.resize(N, HostEnvConfig())
    found, _ = play(env, np.zeros((3, N), np.int32))
    assert set(found) == {"arm"} and found["arm"].velocity is None
    np.testing.assert_array_equal(found["arm"].position[:, 0], [[0, 0], [1, 1], [2, 2], [3, 3]])
    assert envs.make(Record, N, without("arm")).spec.obs.keys() == {"step"}


def test_hide_applies_to_async_pools_and_shards():
    bare = probes.pooled(probes.constant_reward(N))
    one = bare._replace(spec=bare.spec._replace(obs=jax.ShapeDtypeStruct((2,), jnp.float32)), view=View())
    double = lambda timestep: timestep._replace(obs=jnp.stack([timestep.obs[:, 0], timestep.obs[:, 0] + 7], 1))
    env = hide.hide(hide.mapped(one, double), ["0"])
    state, first = env.reset(jax.random.key(0))
    _, timestep = env.pools.receive(0, env.pools.send(0, state, jnp.zeros(N, jnp.int32)))
    for x in (first.obs, timestep.obs):
        assert x.shape == (N, 1) and (x >= 7).all()
    line = "ppo --env CartPole-v1 --num-envs 8 --devices 2 --wrap hide=1 --wrap hide=0,hide=2"
    settings = load.from_command_line(line.split())
    assert settings.options.wrap == ("hide=0", "hide=2")
    _, env, _, placement = build.build(settings, ppo, 10)
    assert placement.num_shards == 2 and env.spec.obs.shape == (2,)


@pytest.mark.slow
def test_hide_is_saved_with_run_and_applies_to_policy_and_evaluation(tmp_path):
    """The run also observes the previous action and reward. A video still draws the whole observation."""
    given: dict = dict(env="CartPole-v1", num_envs=2, total_steps=64, loggers=(), log_level="quiet")
    given |= dict(wrap=["hide=1", "hide=3", "previous"])
    given |= dict(rollout_length=16, hidden_sizes=(4,), num_minibatches=1, num_epochs=1)
    fit = partial(jaxrl_fast.fit, eval_episodes=2, eval_envs=2, run_dir=str(tmp_path / "run"))
    run = fit(algo="ppo", **given)
    written = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert written["wrap"] == ["hide=1", "hide=3", "previous"]
    trained = jaxrl_fast.load(run.folder)
    parts = np.zeros(4), np.array([1.0, 0.0]), np.ones(1)
    assert trained.env.spec.obs.shape == (5,) and int(trained.policy(parts)) in (0, 1)
    with pytest.raises(ValueError, match=r"observes \('float32\[4\]', 'float32\[2\]', 'float32\[1\]'\), got"):
        trained.policy(np.zeros(5))
    assert run.evaluate(episodes=2)["eval_return_mean"] > 0
    saved, renderer, options = video.open_run(run.folder, video.Options(max_steps=3))
    shown = []
    drawing = renderer._replace(draw=lambda obs: shown.append(obs) or renderer.draw(obs))
    assert len(list(video.frames(saved, drawing, options, 50, []))) == 4
    assert all(obs.shape == (4,) for obs in shown) and len({obs[1] for obs in shown}) > 1
    resume = partial(jaxrl_fast.fit, resume=str(run.folder), total_steps=96)
    with pytest.raises(ValueError, match="wrap: a resume cannot change it from hide=1 hide=3 previous, got hide=1"):
        resume(wrap="hide=1")
    assert resume(wrap=["previous", "hide=3", "hide=1"]).summary["env_steps"] == 96


@pytest.mark.parametrize(
    ("env", "names", "message"),
    [
        (
            "CartPole-v1",
            "4",
            "wrap hide: must be entries 0 to 3 of the vector that gymnax/CartPole-v1 observes, got 4; use",
        ),
        ("CartPole-v1", "-1", "wrap hide: must be entries 0 to 3 .*, got -1; use"),
        (
            "CartPole-v1",
            "0,1,2,3",
            "wrap hide: must leave a part of the observation of gymnax/CartPole-v1, got 0,1,2,3; ",
        ),
        ("Breakout-MinAtar", "1", r"wrap hide: .* an array of shape \[10, 10, 4\], which has no parts, got 1; leave"),
        (
            "gymnasium/FrozenLake-v1",
            "1",
            "wrap hide: .* observes the index of a state, which has no parts, got 1; leave",
        ),
        (Mixed, "camara", "wrap hide: must name parts of the observation of .*, got camara; did you mean camera"),
        (Mixed, "inner/7", "wrap hide: must name parts .*, got inner/7; did you mean inner/1 or inner/0"),
        (Mixed, "camera/0", "wrap hide: must name parts .*, got camera/0; did you mean camera"),
        (Record, "x", "wrap hide: must name parts .*, got x; it has arm, arm/position, arm/velocity, step"),
    ],
)
def test_hide_rejects_invalid_names_with_one_line_message(env, names, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        envs.make(env, 1, config(tuple(names.split(","))))
    assert "\n" not in str(error.value)


def test_environments_that_keep_whole_observations_draw_them():
    """A video shows the hidden part too; agents do not see it."""
    env = envs.make(Record, 2)
    kept, alone = hide.hide(env, ["step"], keep_whole=True), hide.hide(env, ["step"])
    state, first = kept.reset(jax.random.key(0))
    assert set(first.obs) == {"arm"} == set(kept.spec.obs) == set(alone.spec.obs)
    assert kept.view.whole_spec == env.spec and alone.view.whole_spec is None
    whole = kept.view.whole_obs(state, first.obs)
    assert set(whole) == {"arm", "step"}
    np.testing.assert_array_equal(whole["step"], first.obs["arm"].position[:, :1])
