"""Options of envpool's families: options that would crash the process are rejected, and accepted options run."""

import functools
import json
import platform
import re
import subprocess
import sys
import textwrap
import time

import envpool
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs, train
from jaxrl_fast.envs import spaces
from jaxrl_fast.envs.envpool import pool as adapter
from jaxrl_fast.envs.envpool import probe, qt, tasks
from jaxrl_fast.envs.host import pool as host_pool
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.types import Discrete, EnvSpec
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.importing import install

KILLERS = [  # envpool itself aborts, faults, raises, or never returns
    ("MiniGrid-Empty-5x5-v0", dict(size=0), "SIGABRT"),
    ("MiniGrid-Empty-5x5-v0", dict(mission_bytes=0), "envpool aborted the trial process (signal"),
    ("MiniGrid-Empty-5x5-v0", dict(agent_view_size=0), "envpool aborted the trial process (signal"),
    ("MiniGrid-Empty-5x5-v0", dict(agent_start_pos=("1", "2")), "TypeError"),
    ("Highway-v0", dict(observation_vehicles_count=-1), "SIGABRT"),
    ("Catch-v0", dict(width=0), "envpool aborted the trial process (signal"),
    ("FrozenLake-v1", dict(size=0), "have to be positive"),
    ("Ant-v4", dict(xml_file="nope.xml"), "nope.xml"),
    ("Pong-v5", dict(mode=77), "Invalid game mode"),
    ("Pong-v5", dict(difficulty=9), "Invalid difficulty"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "why"), KILLERS, ids=[f"{n} {o}" for n, o, _ in KILLERS])
def test_option_that_crashes_envpool_is_rejected(name, options, why, capfd):
    given = ", ".join(f"{option}={value}" for option, value in options.items())
    with pytest.raises(ValueError) as refusal:
        envs.make(f"envpool/{name}", 2, **options)
    assert str(refusal.value).startswith(f"envpool/{name} cannot be made with {given}: ")
    assert why in str(refusal.value) and "\n" not in str(refusal.value)
    assert capfd.readouterr() == ("", ""), "output of the crashed trial process is suppressed"


def test_option_of_wrong_type_is_rejected():
    with pytest.raises(ValueError, match=r"^agent_start_pos: must be tuple for .*, got '1'; for example \(1, 1\)$"):
        envs.make("envpool/MiniGrid-Empty-5x5-v0", 2, agent_start_pos="1")


procgen = pytest.mark.skipif(platform.machine() != "x86_64", reason="Qt has no package for this architecture")
PROCGEN = [
    (dict(env_name="maze"), "env_name: not an option of {}, got maze; use env"),
    (dict(distribution_mode=1), "distribution_mode: not an option of {}, got 1; use env"),
    (dict(num_levels=-1), "num_levels: must be 0 to 1000000000 for {}, got -1"),
    (dict(start_level=2**31 - 1), "start_level: must be 0 to 1000000000 for {}, got 2147483647"),
]


@pytest.mark.parametrize(("options", "says"), PROCGEN, ids=[str(options) for options, _ in PROCGEN])
@procgen
def test_procgen_option_that_changes_task_or_is_out_of_range_is_rejected(options, says):
    with pytest.raises(ValueError) as refusal:
        envs.make("envpool/CoinrunEasy-v0", 2, **options)
    assert str(refusal.value) == says.format("envpool/CoinrunEasy-v0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "heeded"),
    [
        *((name, False) for name in ("Highway-v0", "Game2048-v1", "Play2048-v1", "CliffWalking-v1")),
        pytest.param("CoinrunEasy-v0", False, marks=procgen),
        *((name, True) for name in ("Sokoban-v0", "Taxi-v3", "LunarLander-v3", "MetaWorld/Reach-v3")),
    ],
)
def test_max_episode_steps_is_rejected_for_tasks_that_ignore_it(name, heeded):
    """In Procgen, the option would only relabel ends: each termination after that many steps would be a truncation."""
    make = functools.partial(envs.make, f"envpool/{name}", 2, max_episode_steps=3)
    if not heeded:
        with pytest.raises(ValueError, match=f"max_episode_steps: envpool ignores it in envpool/{name}, got 3"):
            make()
        qt.load_for(tasks.family(name))
    pool = envpool.make_gymnasium(name, num_envs=2, seed=[1, 2], num_threads=1, max_episode_steps=3)
    pool.reset()
    space, longest = pool.action_space, 0
    space.seed(0)
    for _ in range(30):
        info = pool.step(np.asarray([space.sample(), space.sample()], space.dtype))[4]
        longest = max(longest, info["elapsed_step"].max())
    assert longest == 3 if heeded else longest > 3
    assert not heeded or make().spec.num_envs == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(scenario="merge"), "scenario: not an option of envpool/Roundabout-v0, got merge; use env"),
        (dict(max_episode_steps=50), "envpool ignores it in .*, got 50; set duration instead"),
    ],
)
def test_highway_rejects_scenario_and_max_episode_steps(options, says):
    with pytest.raises(ValueError, match=says):
        envs.make("envpool/Roundabout-v0", 2, **options)


@pytest.mark.parametrize("error", [ImportError("libQt5Gui.so.5: cannot open"), OSError("libGL.so.1: cannot open")])
def test_procgen_without_qt_error_names_pip_extra(error, monkeypatch):
    def absent(family):
        raise error

    monkeypatch.setattr(tasks.qt, "load_for", absent)
    with pytest.raises(ValueError, match=f"CoinrunEasy-v0 cannot be made: .*{re.escape(install('procgen'))}") as said:
        envs.make("envpool/CoinrunEasy-v0", 2)
    assert str(error) in str(said.value)


def test_option_is_rejected_when_trial_times_out(monkeypatch):
    monkeypatch.setattr(probe, "TRIAL_TIMEOUT_S", 0.5)
    probe.rejection_reason.cache_clear()
    with pytest.raises(ValueError, match=r"size=1000000: the trial did not finish within 0.5 s"):
        envs.make("envpool/MiniGrid-Empty-5x5-v0", 2, size=1_000_000)
    probe.rejection_reason.cache_clear()


@pytest.mark.slow
def test_train_command_rejects_crashing_option_in_one_line_without_files(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert train.main(["ppo", "--env", "envpool/MiniGrid-Empty-5x5-v0", "--env-option", "size=0"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "size=0" in err
    assert not list(tmp_path.iterdir())


def fake_child(monkeypatch, code):
    """Run `code` in place of the child process of every trial."""
    start = functools.partial(subprocess.Popen, [sys.executable, "-c", code], start_new_session=True)
    monkeypatch.setattr(probe.subprocess, "Popen", lambda *_, **__: start())
    return start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("goes_on", "limit", "says"), [(0, 60.0, "it leaves processes running"), (100, 3.0, "the trial did not finish")]
)
def test_trial_kills_all_its_processes(goes_on, limit, says, monkeypatch):
    """A trial may start processes itself, as VizDoom does. They keep its output pipes open and are killed too."""
    groups, end_all = [], probe._end_all
    monkeypatch.setattr(probe, "_end_all", lambda child: groups.append(child.pid) or end_all(child))
    monkeypatch.setattr(probe, "CLEANUP_TIMEOUT_S", 0.1)
    child = "import time; time.sleep(100)"
    fake_child(monkeypatch, f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])"
            f"; time.sleep({goes_on})")  # fmt: skip
    assert probe._run_child([], limit, {}).startswith(says)
    until = time.monotonic() + 30
    while probe._alive(groups[0]) and time.monotonic() < until:  # a signal takes a moment
        time.sleep(0.05)
    assert not probe._alive(groups[0])


def test_trial_accepts_child_process_that_ends_shortly_after_it(monkeypatch):
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.2)'])"
    fake_child(monkeypatch, code)
    monkeypatch.setattr(probe, "CLEANUP_TIMEOUT_S", 60)
    assert probe._run_child([], 60.0, {}) == ""


def test_trial_runs_once_per_option_value_and_never_for_safe_options(monkeypatch):
    tried = []
    monkeypatch.setattr(probe, "_run_child", lambda words, *_: tried.append(words) or "")
    probe.rejection_reason.cache_clear()
    envs.make("envpool/Pong-v5", 2, img_height=42, img_width=42, stack_num=2, num_threads=1, gray_scale=False)
    envs.make("envpool/Ant-v4", 2, max_episode_steps=30, num_threads=2)
    envs.make("envpool/Ant-v4", 2, **dict.fromkeys(tasks.SAFE_OPTIONS, 1))
    assert not tried
    for num_envs in (2, 3):
        envs.make("envpool/Ant-v4", num_envs, frame_skip=3)
    assert len(tried) == 1
    probe.rejection_reason.cache_clear()


@procgen
@pytest.mark.slow
def test_trial_process_loads_qt_for_procgen():
    """The trial process starts without Qt's libraries."""
    config = json.dumps({"num_levels": 1, "start_level": 7, "num_threads": 1})
    assert probe.rejection_reason.__wrapped__("CoinrunEasy-v0", config) == ""


def test_trial_process_uses_one_blas_thread_and_cpu_backend(monkeypatch):
    """Libraries that allocate memory per core could exceed the trial's memory limit on a machine with many cores."""
    seen = []
    start = fake_child(monkeypatch, "")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "64")
    monkeypatch.setenv("ELSE", "kept")
    monkeypatch.setattr(probe.subprocess, "Popen", lambda *_, env, **__: seen.append(env) or start())
    assert probe.rejection_reason.__wrapped__("CartPole-v1", "{}") == ""
    wanted = {"OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "ELSE": "kept"}
    assert wanted.items() <= seen[0].items() and "PYTHONPATH" in seen[0]


SWEPT = ("Catch-v0", "FrozenLake-v1")  # MiniGrid has the most options and would take three minutes


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEPT)
def test_integer_options_are_rejected_or_run_without_crash(name):
    """Set every integer option to -1, 0 and 1. Each value is rejected, or three environments take 200 steps."""
    code = """
    import sys, envpool, numpy as np
    from jaxrl_fast import envs
    from jaxrl_fast.envs.envpool import tasks
    name, outcome = sys.argv[1], {"refused": 0, "played": 0}
    for option, default in envpool.make_spec(name).config._asdict().items():
        if type(default) is not int or option in tasks.RESERVED_OPTIONS or option in tasks.HIDDEN_OPTIONS:
            continue
        for value in (-1, 0, 1):
            try:
                env = envs.make(f"envpool/{name}", 3, **{option: value})
            except ValueError as error:
                assert option in str(error), error
                outcome["refused"] += 1
                continue
            print(option, value, file=sys.stderr, flush=True)
            pool = env.reset.args[0].pools[0].pool.envs
            pool.reset()
            for _ in range(200):
                pool.step(np.asarray([pool.action_space.sample() for _ in range(3)], pool.action_space.dtype))
            outcome["played"] += 1
    print(outcome["refused"], outcome["played"])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, played = map(int, done.stdout.split())
    assert refused > 0 and played > 0


def test_num_threads_0_means_number_of_cores():
    """envpool also reads 0 this way. The number is made explicit because thread affinity depends on it."""
    task = tasks.describe("CartPole-v1", 64, {"num_threads": 0}, HostEnvConfig())
    assert task.config["num_threads"] == min(64, tasks.num_cores()) > 0


@pytest.mark.parametrize(
    ("num_cores", "async_pools", "num_threads"),
    [(4, 0, 4), (4, 1, 4), (4, 2, 4), (4, 3, 2), (4, 4, 2), (4, 8, 1), (4, 16, 1), (16, 3, 10), (16, 32, 1)],
)
def test_async_pools_share_cores(num_cores, async_pools, num_threads, monkeypatch):
    """All pools together have at most twice as many threads as cores, but each has at least one."""
    monkeypatch.setattr(tasks, "num_cores", lambda: num_cores)
    env = envs.make("envpool/CartPole-v1", 32 * max(async_pools, 1), HostEnvConfig(num_async_pools=async_pools))
    assert env.step.args[0].pools[0].open_pool.args[0].config["num_threads"] == num_threads
    assert bool(env.view.warnings) == (async_pools == 16), "16 threads are more than twice 4 cores"


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_actions_of_any_integer_width_are_clipped_without_overflow(dtype):
    """The bound 199 of 200 actions would wrap to -57 in int8."""
    spec = EnvSpec("many", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(200), 3)
    most = min(np.iinfo(dtype).max, 250)
    given = jnp.asarray([0, 100, most], dtype)
    np.testing.assert_array_equal(spaces.to_env_action(spec, (), given), [0, 100, min(most, 199)])


@pytest.mark.slow
def test_ffi_calls_are_tried_in_child_process_when_backend_is_gpu(monkeypatch):
    """In the same process, an abort would end the training."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    adapter.ffi_unavailable_reason.cache_clear()
    probe.ffi_failure.cache_clear()
    held = len(host_pool.OPEN_POOLS)
    assert adapter.ffi_unavailable_reason() == "" and len(host_pool.OPEN_POOLS) == held
    fake_child(monkeypatch, "import os; os.abort()")
    adapter.ffi_unavailable_reason.cache_clear()
    probe.ffi_failure.cache_clear()
    assert "signal 6, SIGABRT" in adapter.ffi_unavailable_reason()
    warnings = envs.make("envpool/CartPole-v1", 2, HostEnvConfig()).view.warnings
    assert any("SIGABRT" in line for line in warnings)
    adapter.ffi_unavailable_reason.cache_clear()
    probe.ffi_failure.cache_clear()


def test_listed_name_with_slash_resolves_without_backend_prefix():
    """`python -m jaxrl_fast.envs` lists names without their backend, for example MetaWorld/Reach-v3."""
    assert envs.make("MetaWorld/Reach-v3", 1).spec.id == "envpool/MetaWorld/Reach-v3"
    with pytest.raises(ValueError, match="unknown backend 'MetaWorlds' in environment 'MetaWorlds/Reach-v3'"):
        envs.make("MetaWorlds/Reach-v3", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MiniGrid-Empty-5x5-v0", "LunarLander-v3", "Highway-v0", "CartPole-v1"])
def test_render_returns_image_for_families_that_envpool_renders(name):
    env = envs.make(f"envpool/{name}", 2)
    if name == "CartPole-v1":  # jaxrl_fast draws it from its observation
        assert env.host.render is None
        return
    env.host.open()
    jax.block_until_ready(jax.jit(env.reset)(jax.random.key(0)))
    image = env.host.render()
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] == 3 and image.std() > 0
    devices.release_envs([env])


@pytest.mark.parametrize(
    ("protocol", "config"),
    [
        # Mnih et al. 2015: no sticky actions, a lost life ends an episode, up to 30 no-ops
        ("dqn2015", dict(episodic_life=True, repeat_action_probability=0, use_fire_reset=True, noop_max=30)),
        # Machado et al. 2018: an action repeats with probability 1/4, episodes are whole games, start at once
        ("machado2018", dict(episodic_life=False, repeat_action_probability=0.25, use_fire_reset=False, noop_max=1)),
    ],
)
def test_protocol_options_match_its_paper(protocol, config):
    task = tasks.describe("Pong-v5", 2, {}, HostEnvConfig(protocol=protocol))
    assert {name: task.config[name] for name in config} == config
    assert task.pool.ends_at_life_loss == config["episodic_life"] and task.pool.protocol == protocol


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("an_int32", -(2**31), 2**31 - 1),  # any integer of envpool
        ("max_episode_steps", 1, 2**31 - 1),
        ("thread_affinity_offset", -1, 1023),  # a CPU set has 1024 places; -1 means no affinity
        ("img_height", 36, 1024),  # nature's convolutions need 36 pixels
        ("frame_skip", 1, 1000),
        ("noop_max", 1, 10_000),
        ("num_levels", 0, 10**9),
    ],
)
def test_integer_option_is_accepted_only_within_bounds(name, least, most):
    check = lambda value: tasks._checked("envpool/a_task", {name: 5}, {name: value})
    assert check(least) == {name: least} and check(most) == {name: most}
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError, match=f"{name}: must be {least} to {most} for envpool/a_task, got {value}"):
            check(value)
