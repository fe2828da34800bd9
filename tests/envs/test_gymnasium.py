"""Gymnasium environments against gymnasium's own SyncVectorEnv and plain loops; errors of broken environments."""

import re
import signal
import socket
import subprocess
import sys
import time
import traceback

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.envs.gymnasium import description, layout, source
from jaxrl_fast.envs.gymnasium import process as worker_process
from jaxrl_fast.envs.gymnasium.pool import WorkerPool
from jaxrl_fast.envs.host import env as host_env
from jaxrl_fast.envs.host import pool as host_pool
from jaxrl_fast.envs.host.config import HostEnvConfig, Shard, Workers
from jaxrl_fast.envs.host.pool import seeds_of
from jaxrl_fast.types import Box, Discrete, MultiDiscrete
from jaxrl_fast.utils.errors import EnvFault, blamed, user_traceback
from tests.helpers import gym_envs
from tests.helpers.host_envs import random_actions, run

SEED = (7, 0, 0)
LOCAL = HostEnvConfig(SEED, workers=Workers(0))
TWO = HostEnvConfig(SEED, workers=Workers(2, 60.0))
CONFIGS = [LOCAL, TWO]
BRIDGED = [*CONFIGS, *(config._replace(bridge="callback") for config in CONFIGS)]
BRIDGE_NAMES = ["local", "workers", "local-callback", "workers-callback"]
MODULE = "tests.helpers.gym_envs"


@pytest.fixture(autouse=True)
def all_pools_are_closed(monkeypatch):
    monkeypatch.setattr(host_pool, "OPEN_POOLS", [])
    yield
    for pool in list(host_pool.OPEN_POOLS):
        pool.close()


def plain_rows(make, actions, to_own):
    """Return the rows of gymnasium's SyncVectorEnv: for each step (obs, reward, terminated, truncated)."""
    num_envs = actions.shape[1]
    vector = gymnasium.vector.SyncVectorEnv([make] * num_envs)
    first, _ = vector.reset(seed=seeds_of(SEED, num_envs))
    first, rows = jax.tree.map(np.copy, first), []
    for action in actions:
        obs, reward, terminated, truncated, _ = vector.step(to_own(action))
        rows.append((jax.tree.map(np.copy, obs), reward, terminated, truncated))
    vector.close()
    return first, rows


def check_rows(env, make, to_own, num_steps=120):
    """Compare rows of an environment whose observations are only cast to float32."""
    actions = random_actions(env.spec, num_steps)
    first, steps = run(env, actions)
    expected_first, expected = plain_rows(make, actions, to_own)
    np.testing.assert_array_equal(first.obs, expected_first.astype(np.float32))
    for t, (obs, reward, terminated, truncated) in enumerate(expected):
        np.testing.assert_array_equal(steps.obs[t], obs.astype(np.float32))
        np.testing.assert_array_equal(steps.reward[t], reward.astype(np.float32))
        np.testing.assert_array_equal(steps.discount[t] == 0, terminated)
        np.testing.assert_array_equal(steps.last[t], terminated | truncated)
    return steps


@pytest.mark.parametrize("config", BRIDGED, ids=BRIDGE_NAMES)
def test_rows_match_gymnasium_sync_vector_env(config):
    env = envs.make(f"{MODULE}:Walk", 5, config)
    assert env.spec.obs == jax.ShapeDtypeStruct((2,), jnp.float32) and env.spec.action == Discrete(2)
    steps = check_rows(env, gym_envs.Walk, lambda action: action + 5)
    both = steps.last & (steps.discount == 1), steps.last & (steps.discount == 0)
    assert all(kind.any() for kind in both), "terminations and truncations occur"
    env.host.close()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_rows_of_registered_environments_match_gymnasium_sync_vector_env(name):
    env = envs.make(f"gymnasium/{name}", 4, LOCAL)
    if isinstance(env.spec.action, Box):
        bound = gymnasium.make(name).action_space.high.astype(np.float32)
        check_rows(env, lambda: gymnasium.make(name), lambda action: (action * bound).astype(np.float32), 220)
    else:
        check_rows(env, lambda: gymnasium.make(name), lambda action: action, 220)
    env.host.close()


@pytest.mark.slow
def test_number_of_workers_does_not_change_trajectories():
    actions = np.random.default_rng(1).integers(2, size=(40, 7)).astype(np.int32)
    results = []
    for workers in (0, 1, 3, 7):
        env = envs.make(f"{MODULE}:Walk", 7, TWO._replace(workers=Workers(workers)))
        results.append(run(env, actions))
        env.host.close()
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


def test_async_pools_and_shards_do_not_change_trajectories():
    actions = np.random.default_rng(1).integers(2, size=(30, 4)).astype(np.int32)
    whole = envs.make(f"{MODULE}:Walk", 4, LOCAL)
    expected = run(whole, actions)
    halves = envs.make(f"{MODULE}:Walk", 4, LOCAL._replace(num_async_pools=2))
    jax.tree.map(np.testing.assert_array_equal, expected, run(halves, actions))
    for shard in range(2):
        part = envs.make(f"{MODULE}:Walk", 2, LOCAL._replace(shard=Shard(shard, 2)))
        own = slice(2 * shard, 2 * shard + 2)
        found = run(part, actions[:, own])
        np.testing.assert_array_equal(found[0].obs, expected[0].obs[own])
        np.testing.assert_array_equal(found[1].obs, expected[1].obs[:, own])


def test_environments_differ_and_same_seed_reproduces_trajectories():
    make = lambda seed: run(envs.make(f"{MODULE}:Walk", 64, LOCAL._replace(seed=seed)), np.zeros((3, 64), np.int32))
    first, again, other = make(SEED), make(SEED), make((8, 0, 0))
    assert len(np.unique(first[0].obs[:, 0])) == 64
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.isin(other[0].obs[:, 0], first[0].obs[:, 0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=["local", "workers"])
def test_reseed_matches_environments_made_with_new_seed(config):
    env, actions = envs.make(f"{MODULE}:Walk", 4, config), np.zeros((3, 4), np.int32)
    before = run(env, actions)[0].obs
    env.host.reseed(5)
    after = run(env, actions)[0].obs
    assert not np.isin(before[:, 0], after[:, 0]).any()
    fresh = envs.make(f"{MODULE}:Walk", 4, config._replace(seed=(*SEED[:2], 5)))
    np.testing.assert_array_equal(after, run(fresh, actions)[0].obs)


def test_observations_of_every_space_match_manual_encoding():
    """The oracle is a plain loop over the same environment, with observations encoded by hand."""
    env = envs.make(f"{MODULE}:Mixed", 2, LOCAL)
    assert env.spec.action == MultiDiscrete((2, 3, 4))
    shapes = env.spec.obs
    assert shapes["camera"] == jax.ShapeDtypeStruct((20, 20, 3), jnp.uint8)
    assert shapes["choices"].shape == (5,) and shapes["inner"][0].shape == (4,) and shapes["inner"][1].shape == (2, 2)
    rng = np.random.default_rng(0)
    actions = np.stack([rng.integers(num, size=(25, 2)) for num in (2, 3, 4)], axis=-1).astype(np.int32)
    first, steps = run(env, actions)
    for i, seed in enumerate(seeds_of(SEED, 2)):
        plain = gym_envs.Mixed()
        obs, ended = plain.reset(seed=seed)[0], False
        check_mixed(jax.tree.map(lambda x: x[i], first.obs), obs)  # noqa: B023
        for t in range(25):
            reward, terminated = 0.0, False
            if ended:
                obs = plain.reset()[0]
            else:
                obs, reward, terminated, _, _ = plain.step(actions[t, i].astype(np.int64))
            ended = terminated
            check_mixed(jax.tree.map(lambda x: x[t, i], steps.obs), obs)  # noqa: B023
            assert steps.reward[t, i] == reward and steps.last[t, i] == terminated


def check_mixed(seen, obs):
    one_hot = lambda i, num: np.eye(num, dtype=np.float32)[i]
    np.testing.assert_array_equal(seen["camera"], obs["camera"].transpose(1, 2, 0))
    np.testing.assert_array_equal(seen["joints"], obs["joints"].astype(np.float32))
    np.testing.assert_array_equal(seen["bits"], obs["bits"].astype(np.float32))
    first, second = obs["choices"]
    np.testing.assert_array_equal(seen["choices"], np.concatenate([one_hot(first - 1, 2), one_hot(second + 1, 3)]))
    np.testing.assert_array_equal(seen["inner"][0], one_hot(obs["inner"][0] + 2, 4))
    np.testing.assert_array_equal(seen["inner"][1], obs["inner"][1].astype(np.float32))


@pytest.mark.parametrize("in_obs", [False, True])
def test_action_mask_belongs_to_same_step(in_obs):
    env = envs.make(lambda: gym_envs.Guarded(in_obs=in_obs), 3, LOCAL)
    assert env.spec.has_action_mask and env.spec.obs == jax.ShapeDtypeStruct((4,), jnp.float32)
    actions = random_actions(env.spec, 50)
    first, steps = run(env, actions)
    for i, seed in enumerate(seeds_of(SEED, 3)):
        plain = gym_envs.Guarded()
        mask, last = plain.reset(seed=seed)[1]["action_mask"], False
        np.testing.assert_array_equal(first.action_mask[i], mask == 1)
        for t in range(50):
            if last:
                mask, last = plain.reset()[1]["action_mask"], False
            else:
                _, reward, _, last, info = plain.step(actions[t, i])
                mask = info["action_mask"]
                assert steps.reward[t, i] == reward
            np.testing.assert_array_equal(steps.action_mask[t, i], mask == 1)


def parameter_id(value):
    """Return a pytest id that is the same in every process."""
    return re.sub(r" at 0x\w+", "", str(value))[:60]


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (f"{MODULE}:Walk", 12),
        (f"{MODULE}:make_walk", 12),
        (f"{MODULE}:tests/Walk-v3", 9),
        ("tests/Walk-v3", 9),
        ("gymnasium/tests/Walk-v3", 9),
        (gym_envs.Walk, 12),
        (gym_envs.make_unannotated, 12),
        (lambda: gymnasium.wrappers.TimeLimit(gym_envs.Walk(limit=99), 7), 7),
        (gymnasium.make("tests/Walk-v3"), 9),
    ],
    ids=parameter_id,
)
def test_make_accepts_names_classes_functions_and_instances(make, limit):
    env = envs.make(make, 2, LOCAL, **({"size": 99.0} if make in (f"{MODULE}:Walk", gym_envs.Walk) else {}))
    steps = run(env, np.tile(np.array([[0], [1]], np.int32), (30, 2)))[1]
    ends = np.flatnonzero(steps.last[:, 0])
    assert ends[0] == limit - 1 and (np.diff(ends) == limit + 1).all()
    assert (steps.discount == 1).all(), "episodes end only by time limit"


def cartpole(**changes):
    env = gymnasium.make("CartPole-v1", max_episode_steps=77)
    for name, value in changes.items():
        setattr(env.unwrapped, name, value)
    return env


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        (cartpole(force_mag=0.0), "has force_mag 0.0, where a new one has 10.0"),
        (cartpole(extra=[3]), r"has extra \[3\], where a new one has nothing"),
        (
            cartpole(action_space=gymnasium.spaces.Discrete(2, start=1)),
            r"has action_space Discrete\(2, start=1\), where a new one has Discrete\(2\)",
        ),
    ],
)
def test_instance_with_changed_attribute_is_refused(env, problem):
    """Training and evaluation make the environment again from its spec, which does not hold the change."""
    with pytest.raises(ValueError, match=f"^env: the given CartPole-v1 {problem}; set it in a function that makes"):
        envs.make(env, 1, LOCAL)


def test_instance_in_the_middle_of_an_episode_is_accepted():
    env = gymnasium.wrappers.RecordEpisodeStatistics(cartpole())
    env.reset()
    while not env.step(0)[2]:
        pass
    env.reset()
    env.step(1)
    assert envs.make(env, 2, LOCAL).spec.id == "gymnasium/CartPole-v1"


class Counted(gymnasium.Env):
    """An environment of which one instance can exist. Each has a number, and a random name."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)
    num_open = num_made = 0

    def __init__(self, gravity=9.8):
        if Counted.num_open:
            raise ConnectionError("there is a client already")
        Counted.num_open, Counted.num_made = 1, Counted.num_made + 1
        self.number, self.gravity, self.history = Counted.num_made, gravity, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.history.append(0)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, False, self.t >= 20, {}

    def close(self):
        Counted.num_open = 0


@pytest.mark.parametrize("gravity", [9.8, 0.0])
def test_instance_of_which_only_one_can_exist_is_compared_and_made_again(gravity, monkeypatch, capsys):
    monkeypatch.setattr(Counted, "num_open", 0)
    monkeypatch.setitem(gymnasium.registry, "Counted-v0", gymnasium.envs.registration.EnvSpec("Counted-v0", Counted))
    given = gymnasium.make("Counted-v0")
    given.reset()
    given.unwrapped.gravity = gravity
    if gravity == 0.0:
        with pytest.raises(ValueError, match=r"^env: the given Counted-v0 has gravity 0.0, where a new one has 9.8; "):
            envs.make(given, 1, LOCAL)
        return
    env = envs.make(given, 1, LOCAL)
    assert run(env, np.zeros((25, 1), np.int32))[1].last.sum() == 1
    env.host.close()
    closed = "the given Counted-v0 was closed, because another one could not be made before"
    assert capsys.readouterr().err.count(closed) == 1


def test_spec_id_is_importable_name_of_environment():
    names = {
        "gymnasium/tests/Walk-v3": ("tests/Walk-v3", lambda: gymnasium.make("tests/Walk-v3")),
        f"{MODULE}:make_walk": (f"{MODULE}:make_walk",),
        f"{MODULE}:Walk": (f"{MODULE}:Walk", gym_envs.Walk),
        f"{MODULE}:make_unannotated": (gym_envs.make_unannotated,),
    }
    for name, given in names.items():
        for one in given:
            assert envs.make(one, 1, LOCAL).spec.id == name


class Grid(gymnasium.Env):
    """An environment whose action and observation have two axes."""

    observation_space = gymnasium.spaces.MultiDiscrete([[2, 3], [4, 5]])
    action_space = gymnasium.spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((2, 2), np.int64), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return action - self.action_space.start, float(action.sum()), False, False, {}


def test_multi_discrete_spaces_with_several_axes_are_flattened():
    env = envs.make(Grid, 3, LOCAL)
    assert env.spec.action == MultiDiscrete((2, 3, 4, 5)) and env.spec.obs.shape == (14,)
    actions = np.tile(np.array([1, 2, 3, 4], np.int32), (2, 3, 1))
    steps = run(env, actions)[1]
    np.testing.assert_array_equal(np.flatnonzero(steps.obs[0, 0]), [1, 4, 8, 13])
    assert (steps.reward == 10 + 6).all()


def test_class_defined_in_main_runs_in_workers():
    source_text = "import gymnasium\nfrom tests.helpers.gym_envs import Walk\nclass Cell(Walk):\n    pass\n"
    namespace = {"__name__": "__main__"}
    exec(source_text, namespace)
    namespace["Cell"].__module__ = "__main__"
    env = envs.make(namespace["Cell"], 2, TWO)
    assert run(env, np.zeros((3, 2), np.int32))[0].obs.shape == (2, 2)


def test_options_set_constructor_arguments_and_time_limit():
    for given in (f"{MODULE}:Walk", "tests/Walk-v3"):
        env = envs.make(given, 1, LOCAL, max_episode_steps="4", size="99")
        steps = run(env, np.zeros((9, 1), np.int32))[1]
        assert np.flatnonzero(steps.last).tolist() == [3, 8]


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (f"{MODULE}:Walk", dict(sise=3), "tests.helpers.gym_envs:Walk has no option 'sise'; did you mean size"),
        (f"{MODULE}:Walk", dict(limit="x"), "limit: must be a number for tests.helpers.gym_envs:Walk, got 'x'"),
        (f"{MODULE}:Walk", dict(render_mode="human"), "render_mode: cannot be set here, got human"),
        (f"{MODULE}:Walk", dict(max_episode_steps=0), "max_episode_steps: must be at least 1"),
        (f"{MODULE}:Nope-v0", {}, f"unknown environment '{MODULE}:Nope-v0': module '{MODULE}' does not register"),
        (f"{MODULE}:make_unannotated", {}, "must be annotated to return a gymnasium.Env, got none; write def"),
        ("gymnasium/LunarLnder-v3", {}, "did you mean gymnasium/LunarLander-v3 or"),
        (gym_envs.Walk(), {}, "env: one environment cannot be made again"),
        (lambda: WALK, {}, "must make a new environment in each call"),
    ],
    ids=parameter_id,
)
def test_make_rejects_wrong_name_or_option_with_one_line_message(make, options, says):
    with pytest.raises(ValueError) as raised:
        envs.make(make, 2, LOCAL, **options).host.open()
    assert says in str(raised.value) and "\n" not in str(raised.value)


WALK = gym_envs.Walk()


class Spaces(gymnasium.Env):
    """An environment with the given spaces, which are rejected before any step."""

    def __init__(self, obs, action):
        self.observation_space, self.action_space = obs, action


TEXT = gymnasium.spaces.Text(5)
ONE = gymnasium.spaces.Box(0, 1, (1,))
TWO_CHOICES = gymnasium.spaces.Discrete(2)
ROWS = np.arange(4).reshape(2, 2)  # bounds that numpy prints in two lines


@pytest.mark.parametrize(
    ("obs", "action", "says"),
    [
        (None, TWO_CHOICES, "observation_space must be a space, got None; set it in __init__"),
        (ONE, 3, "action_space must be a space, got 3; set it in __init__"),
        (TEXT, TWO_CHOICES, "unsupported observation space, got Text"),
        (gymnasium.spaces.Sequence(ONE), TWO_CHOICES, "unsupported observation space, got Sequence"),
        (
            gymnasium.spaces.Dict({"a": TEXT}),
            TWO_CHOICES,
            "unsupported observation space, got Dict",
        ),
        (gymnasium.spaces.Box(0, 1, (0,)), TWO_CHOICES, "none of its parts may be empty"),
        (gymnasium.spaces.Dict({}), TWO_CHOICES, "none of its parts may be empty"),
        (gymnasium.spaces.Dict({"a/b": ONE, "a": gymnasium.spaces.Dict(b=ONE)}), TWO_CHOICES, "the name a/b, rename"),
        (gymnasium.spaces.Dict({1: ONE, "a": ONE}), TWO_CHOICES, "the keys of a Dict must be of one type"),
        (ONE, gymnasium.spaces.Box(np.float32([0, -np.inf]), 1, (2,)), "got -inf to 1 for number 1 of an action; "),
        (ONE, gymnasium.spaces.Box(0, 9999, (2,), np.int32), "unsupported action space"),
        (ONE, gymnasium.spaces.Dict({"a": TEXT}), "in Dict and Tuple, got Text"),
        (ONE, gymnasium.spaces.Box(ROWS, 9999, dtype=np.int32), "unsupported action space, got Box([[0 1] [2 3]], 99"),
        (gymnasium.spaces.Dict({"a": TEXT, "b": ONE}), TWO_CHOICES, "got a Text; use --wrap hide=a"),
    ],
    ids=parameter_id,
)
def test_make_rejects_unsupported_space_with_one_line_message(obs, action, says):
    with pytest.raises(ValueError) as raised:
        envs.make(lambda: Spaces(obs, action), 2, LOCAL)
    assert says in str(raised.value) and "\n" not in str(raised.value)


WHERE = "environment 0, episode 1, step 3, action 5"
OBS = "observation must be float32[2] as its space declares"
FAULTS = {
    "nothing": "step must return (obs, reward, terminated, truncated, info), got None",
    "four": "step must return (obs, reward, terminated, truncated, info), got a tuple of 4",
    "shape": f"{OBS}, got float32[1]",
    "dtype": f"{OBS}, got complex128[2]",
    "none": f"{OBS}, got None",
    "text": f"{OBS}, got <U4[]",
    "nan": "observation must be finite, got [nan, nan]",
    "reward none": "reward must be one number, got None",
    "reward nan": "reward must be finite in float32, got nan",
    "reward huge": "reward must be finite in float32, got 1e+39",
    "reward two": "reward must be one number, got ndarray of shape (2,)",
    "reward text": "reward must be one number, got '1.0'",
    "flag": "terminated must be True or False, got None",
    "flag two": "truncated must be True or False, got 2",
    "leave": "step must not end the program, got SystemExit(4)",
}


def faulty(fault, config):
    """Return an environment that fails in its third step. It bypasses the trial steps of `make`, which would fail."""
    described = description.describe(source.from_object(gym_envs.Walk, {"fault": ""}, f"{MODULE}:Walk"))
    own = described.source._replace(arguments={"fault": fault})
    return description.from_description(described._replace(source=own), 4, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "config"), [*((fault, LOCAL) for fault in FAULTS), ("shape", TWO), ("leave", TWO)], ids=parameter_id
)
def test_invalid_step_value_raises_fault_with_episode_step_and_action(fault, config):
    env = faulty(fault, config)
    with pytest.raises(EnvFault) as raised, host_env.original_errors():
        run(env, np.zeros((9, 4), np.int32))
    remedy = "; wrap quarantine resets the environment instead" if "finite" in FAULTS[fault] else ""
    if fault == "reward two":
        remedy = "; add them up: gymnasium.wrappers.TransformReward(env, lambda rewards: rewards @ weights)"
    assert str(raised.value) == f"{MODULE}:Walk: {FAULTS[fault]} in {WHERE}{remedy}"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("reset raise", "IndexError"),
        ("reset bare", "reset must return (obs, info)"),
        ("reset shape", "got float32[1, 2] in environment 0, episode 1, reset"),
    ],
)
def test_faulty_reset_raises_in_make(fault, says):
    with pytest.raises((EnvFault, IndexError)) as raised:
        envs.make(f"{MODULE}:Walk", 4, LOCAL, fault=fault)
    if isinstance(raised.value, IndexError):
        assert blamed(raised.value) == f"{MODULE}:Walk: reset failed in environment 0, episode 1, reset"
    else:
        assert says in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("config", BRIDGED, ids=BRIDGE_NAMES)
def test_environment_exception_keeps_type_and_traceback(config):
    env = faulty("raise", config)
    with pytest.raises(ZeroDivisionError) as raised, host_env.original_errors():
        run(env, np.zeros((9, 4), np.int32))
    assert blamed(raised.value) == f"{MODULE}:Walk: step failed in {WHERE}"
    shown = user_traceback(raised.value)
    assert shown.count("Traceback") == 1 and "site-packages" not in shown
    assert '"raise": lambda *outcome: 1 // 0' in shown and shown.rstrip().endswith("by zero")
    if not config.workers.num:
        assert any(frame.name == "step" for frame in traceback.extract_tb(raised.value.__traceback__))


def test_unpicklable_worker_exception_is_raised_as_runtime_error():
    env = faulty("odd", TWO)
    with pytest.raises(RuntimeError, match="OddError: 7 a wheel came off") as raised, host_env.original_errors():
        run(env, np.zeros((9, 4), np.int32))
    assert blamed(raised.value) == f"{MODULE}:Walk: step failed in {WHERE}"
    assert "raise OddError" in user_traceback(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [("die", "ended with exit status 3"), ("abort", "ended by signal 6 (SIGABRT)"), ("hang", "within 2 s")],
)
def test_dead_or_hanging_worker_raises_fault_with_step(fault, says):
    env = faulty(fault, TWO._replace(workers=Workers(2, 2.0)))
    with pytest.raises(EnvFault) as raised, host_env.original_errors():
        run(env, np.zeros((9, 4), np.int32))
    assert says in str(raised.value) and f"in {WHERE}" in str(raised.value)
    processes = [one.process for pool in host_pool.OPEN_POOLS for one in pool.workers]
    if fault == "hang":
        assert processes[0].wait(10) == -signal.SIGKILL, "a hanging worker is killed"
    start = time.perf_counter()
    env.host.close()
    assert time.perf_counter() - start < 20 and all(process.poll() is not None for process in processes)


def test_close_waits_for_all_stuck_workers_at_once(monkeypatch):
    monkeypatch.setattr(worker_process, "CLOSE_S", 0.6)
    closing = object.__new__(WorkerPool)
    closing.workers, closing.memory = [object.__new__(worker_process.Worker) for _ in range(4)], layout.SharedMemory(64)
    for one in closing.workers:
        one.process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, start_new_session=True)
        one.channel, theirs = socket.socketpair()
        theirs.close()
    stuck, start = [one.process for one in closing.workers], time.perf_counter()
    closing.close()
    assert 0.6 < time.perf_counter() - start < 1.8 and [one.poll() for one in stuck] == [-signal.SIGKILL] * 4


class Simulated(gym_envs.Walk):
    """Starts a process, as an adapter of a simulator does, and ends it when it is closed."""

    def __init__(self, pids, **options):
        super().__init__(**options)
        self.child = subprocess.Popen(["sleep", "60"])
        with open(pids, "a") as file:
            print(self.child.pid, file=file)

    def close(self):
        self.child.kill()
        self.child.wait()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "hang"])
def test_no_process_of_environment_remains(fault, tmp_path):
    pids = tmp_path / "pids"
    config = TWO._replace(workers=Workers(2, 2.0))
    described = description.describe(source.from_object(Simulated, {"pids": str(pids)}, "simulated"))
    own = described.source._replace(arguments={"pids": str(pids), "fault": fault})
    env = description.from_description(described._replace(source=own), 4, config)
    if fault:
        with pytest.raises(EnvFault), host_env.original_errors():
            run(env, np.zeros((9, 4), np.int32))
    else:
        run(env, np.zeros((9, 4), np.int32))
    env.host.close()
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 5  # one environment was tried
    until = time.monotonic() + 5
    while any(map(is_running, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, started))


def test_environment_in_use_cannot_be_used_again():
    """Also not by another pool, such as that of evaluation."""
    shared, says = gym_envs.Walk(), "must make a new environment in each call, got the same one twice"
    with pytest.raises(EnvFault, match=says):
        envs.make(lambda: shared, 2, LOCAL).host.open()
    wrapped = lambda: gymnasium.wrappers.TimeLimit(shared, 9)
    one, other = (envs.make(make, 1, LOCAL) for make in (lambda: shared, wrapped))
    one.host.open()
    with pytest.raises(EnvFault, match=says):
        other.host.open()
    one.host.close()
    other.host.open()
    other.host.close()


class Brief(gym_envs.Walk):
    """An environment whose `reset` takes no options."""

    def reset(self, seed=None):
        return super().reset(seed=seed)


@pytest.mark.parametrize("option", [{}, {"max_episode_steps": 3}, {"frame_skip": 2}])
def test_reset_needs_no_options_argument(option):
    actions = np.zeros((8, 2), np.int32)
    brief, walk = (run(envs.make(env, 2, LOCAL, **option), actions) for env in (Brief, gym_envs.Walk))
    jax.tree.map(np.testing.assert_array_equal, brief, walk)


def test_new_pool_works_after_fault_in_another_pool():
    env = faulty("raise", LOCAL)
    with pytest.raises(ZeroDivisionError), host_env.original_errors():
        run(env, np.zeros((9, 4), np.int32))
    other = envs.make(f"{MODULE}:Walk", 5, LOCAL)
    check_rows(other, gym_envs.Walk, lambda action: action + 5, 40)


class Leaning(gym_envs.Walk):
    """An environment whose observation lies outside its space."""

    def __init__(self):
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(-1, np.array([1, 5], np.float32), (2,), np.float32)
        self.size = 99


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=["local", "workers"])
def test_observation_outside_its_space_warns_once_in_all_pools(config, capsys):
    described = description.describe(source.from_object(gym_envs.Walk, {}, "leaning"))
    own = described.source._replace(construct=Leaning)
    layout = description.describe(source.from_object(Leaning, {}, "leaning")).layout
    env = description.from_description(described._replace(source=own, layout=layout), 2, config)
    capsys.readouterr()
    for each in (env, env.view.resize(3, config)):  # as for training and evaluation
        run(each, np.ones((40, each.spec.num_envs), np.int32))
    found = [line for line in capsys.readouterr().err.splitlines() if "leaning" in line]
    assert len(found) == 1
    assert "leaning: observation[0] is not between -1 and 1 as its space declares, got 1." in found[0]


class Terminal(gym_envs.Walk):
    """An environment whose terminal observation is NaN."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return (obs * np.nan if terminated else obs), reward, terminated, truncated, info


def test_nan_observation_of_terminal_state_is_made_finite():
    env = envs.make(lambda: Terminal(size=1.2), 3, LOCAL)
    steps = run(env, np.ones((40, 3), np.int32))[1]
    assert (steps.discount == 0).any() and np.isfinite(steps.obs).all()


def test_render_returns_image_of_environment():
    for config in CONFIGS:
        env = envs.make(f"{MODULE}:Walk", 2, config._replace(render=True))
        run(env, np.zeros((1, 2), np.int32))
        image = env.host.render()
        assert image.shape == (48, 64, 3) and image.dtype == np.uint8 and (image == 255).any()


def description_with_times(step_s, compute_s):
    return description.describe(source.from_object(gym_envs.Walk, {}, "walk"))._replace(
        step_s=step_s, compute_s=compute_s
    )


class Interrupted(gym_envs.Walk):
    """An environment with one slow step (50 ms)."""

    def step(self, action):
        if self.t == 3:
            time.sleep(0.05)
        return super().step(action)


def test_step_time_estimate_ignores_single_slow_step():
    described = description.describe(source.from_object(Interrupted, {}, "interrupted"))
    assert 0 < described.compute_s <= described.step_s * 1.1 < 5e-3


def test_step_time_estimate_is_that_of_the_environment_alone(monkeypatch):
    """A call of the stepper takes as long as a step of a simple environment, but is shared by all environments."""
    step = description.Stepper.step
    monkeypatch.setattr(description.Stepper, "step", lambda stepper: (time.sleep(0.01), step(stepper)))
    described = description.describe(source.from_object(gym_envs.Walk, {}, "walk"))
    assert 0 < described.step_s < 5e-3


@pytest.mark.parametrize(
    ("step_s", "compute_s", "num_envs", "config", "expected"),
    [
        (10e-6, 10e-6, 64, {}, 0),
        (200e-6, 200e-6, 64, {}, 4),
        (2e-3, 2e-3, 3, {}, 3),
        (1e-3, 1e-5, 64, {}, 32),
        (1e-3, 1e-5, 64, dict(shard=Shard(num=2), num_async_pools=2), 8),
        (10e-6, 10e-6, 64, dict(num_async_pools=2), 1),
        (200e-6, 200e-6, 64, dict(num_async_pools=2), 2),
        (10e-6, 10e-6, 16, dict(shard=Shard(num=4)), 0),
        (40e-6, 40e-6, 16, dict(shard=Shard(num=4)), 1),  # shards would take turns in this process
        (10e-6, 10e-6, 3, dict(workers=Workers(5)), 3),
        (1.0, 1.0, 64, dict(workers=Workers(0)), 0),
    ],
)
def test_choose_num_workers_follows_step_time_and_cores(step_s, compute_s, num_envs, config, expected, monkeypatch):
    monkeypatch.setattr(description, "num_cores", lambda: 4)
    config = HostEnvConfig(**config)
    assert description.choose_num_workers(description_with_times(step_s, compute_s), num_envs, config) == expected


def test_env_workers_is_rejected_for_gymnax():
    with pytest.raises(ValueError, match=r"host\.workers: gymnax/CartPole-v1 has no worker processes, got 2"):
        envs.make("gymnax/CartPole-v1", 2, TWO)


def test_callback_steps_environments_when_c_kernels_are_disabled(monkeypatch):
    actions = np.zeros((6, 2), np.int32)
    expected = run(envs.make(f"{MODULE}:Walk", 2, LOCAL._replace(bridge="ffi")), actions)
    monkeypatch.setenv("JAXRL_FAST_KERNELS", "xla")
    jax.tree.map(np.testing.assert_array_equal, expected, run(envs.make(f"{MODULE}:Walk", 2, LOCAL), actions))
    says = r"host.bridge: .* cannot be called from C \(JAXRL_FAST_KERNELS is xla\), got ffi; use callback"
    with pytest.raises(ValueError, match=says):
        envs.make(f"{MODULE}:Walk", 2, LOCAL._replace(bridge="ffi"))


class Echo(gymnasium.Env):
    """An environment whose observation is the action."""

    def __init__(self, space):
        self.action_space = space
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2), {}

    def step(self, action):
        assert self.action_space.contains(action) and np.asarray(action).dtype == self.action_space.dtype
        return np.broadcast_to(np.asarray(action, np.float64).reshape(-1), 2), 0.0, False, False, {}


class Paid(Echo):
    """An environment with a reward for each of two goals."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, np.array([1.0, -3.0]), *rest


def test_wrapper_of_message_adds_several_rewards_up():
    make = lambda: Paid(gymnasium.spaces.Discrete(2))
    with pytest.raises(ValueError, match=r"; add them up: gymnasium.wrappers.TransformReward\(env, lambda"):
        envs.make(make, 1, LOCAL)
    env = envs.make(lambda: gymnasium.wrappers.TransformReward(make(), lambda rewards: rewards @ [2, 1]), 1, LOCAL)
    assert run(env, np.zeros((3, 1), np.int32))[1].reward.tolist() == [[-1], [-1], [-1]]


@pytest.mark.parametrize("bridge", ["ffi", "callback"])
@pytest.mark.parametrize(
    ("space", "actions", "expected"),
    [
        (gymnasium.spaces.Discrete(3, start=-9), [0, 2], [[-9, -9], [-7, -7]]),
        (gymnasium.spaces.MultiDiscrete([2, 200], dtype=np.uint8), [[1, 199], [0, 3]], [[1, 199], [0, 3]]),
        (gymnasium.spaces.MultiDiscrete([2, 2], start=[-5, 5]), [[1, 0], [0, 1]], [[-4, 5], [-5, 6]]),
        (gymnasium.spaces.MultiBinary(2), [[1, 0], [0, 1]], [[1, 0], [0, 1]]),
        (gymnasium.spaces.Box(-1, 3, (2,), np.float64), [[-1.0, 0.5], [1.0, 0.0]], [[-1, 2], [3, 1]]),
        (gymnasium.spaces.Box(-1, 3, (), np.float32), [[0.5], [1.0]], [[2, 2], [3, 3]]),
        (gymnasium.spaces.Box(-1, 3, (1, 2)), [[-1.0, 0.5], [1.0, 0.0]], [[-1, 2], [3, 1]]),
    ],
    ids=parameter_id,
)
def test_actions_reach_environment_with_dtype_of_its_action_space(space, actions, expected, bridge):
    env = envs.make(lambda: Echo(space), 2, LOCAL._replace(bridge=bridge))
    given = jnp.asarray(actions, jnp.float32 if isinstance(space, gymnasium.spaces.Box) else jnp.int32)
    np.testing.assert_array_equal(run(env, given[None])[1].obs[0], expected)


ORPHANS = """
import time
from jaxrl_fast import envs
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers
config = HostEnvConfig((0, 0, 0), workers=Workers(2))
env = envs.make("tests.helpers.gym_envs:Walk", 4, config, sleep=3.0)
env.host.open()
from jaxrl_fast.envs.host import pool as host_pool
print(*(one.process.pid for one in host_pool.OPEN_POOLS[0].workers), flush=True)
pool = host_pool.OPEN_POOLS[0]
pool.reset()
pool.send(__import__("numpy").full(4, 5))
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_exit_when_parent_process_is_killed():
    process = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for _ in range(100):
        running = [pid for pid in pids if is_running(pid)]
        if not running:
            return
        time.sleep(0.1)
    raise AssertionError(f"still running: {running}")


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("low, high", [((-1, -np.inf), (1, np.inf)), (None, None)])
def test_nonfinite_observations_are_checked(low, high):
    """Also where the bounds of a space are infinite."""
    bounds = [bound and np.array(bound, np.float32) for bound in (low, high)]
    least, most = layout.Leaf((), (2,), np.dtype(np.float32), np.dtype(np.float32), *bounds).accepted()
    rows = np.array([[0, 1e38], [0, np.inf], [0, -np.inf], [np.nan, 0], [0, np.nan]], np.float32)
    assert ((least <= rows) & (rows <= most)).all(1).tolist() == [True, False, False, False, False]
