"""Options of envpool's families: what would end the process is refused in a sentence, and what is let through plays."""

import functools
import json
import platform
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
from jaxrl_fast.envs import host_pool, spaces
from jaxrl_fast.envs.envpool import pool as adapter
from jaxrl_fast.envs.envpool import probe, qt, tasks
from jaxrl_fast.types import Discrete, EnvSpec, HostEnvConfig
from jaxrl_fast.utils import devices

KILLERS = [  # what envpool does of itself: aborts, faults, raises, or never comes back
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
def test_an_option_that_envpool_does_not_survive_is_refused(name, options, why, capfd):
    given = ", ".join(f"{option}={value}" for option, value in options.items())
    with pytest.raises(ValueError) as refusal:
        envs.make(f"envpool/{name}", 2, **options)
    assert str(refusal.value).startswith(f"envpool/{name} cannot be made with {given}: ")
    assert why in str(refusal.value) and "\n" not in str(refusal.value)
    assert capfd.readouterr() == ("", ""), "what the process that died had to say is nobody's concern"


def test_an_option_of_another_type_does_not_come_to_envpool():
    with pytest.raises(ValueError, match=r"^agent_start_pos: must be tuple for .*, got '1'; for example \(1, 1\)$"):
        envs.make("envpool/MiniGrid-Empty-5x5-v0", 2, agent_start_pos="1")


procgen = pytest.mark.skipif(platform.machine() != "x86_64", reason="there is no package of Qt")
PROCGEN = [
    (dict(env_name="maze"), "env_name: not an option of {}, got maze; use --env"),
    (dict(distribution_mode=1), "distribution_mode: not an option of {}, got 1; use --env"),
    (dict(num_levels=-1), "num_levels: must be 0 to 1000000000 for {}, got -1"),
    (dict(start_level=2**31 - 1), "start_level: must be 0 to 1000000000 for {}, got 2147483647"),
]


@pytest.mark.parametrize(("options", "says"), PROCGEN, ids=[str(options) for options, _ in PROCGEN])
@procgen
def test_what_would_make_another_game_of_procgens_is_refused(options, says):
    with pytest.raises(ValueError) as refusal:
        envs.make("envpool/CoinrunEasy-v0", 2, **options)
    assert str(refusal.value) == says.format("envpool/CoinrunEasy-v0")


@pytest.mark.parametrize(
    ("name", "heeded"),
    [
        *((name, False) for name in ("Highway-v0", "Game2048-v1", "Play2048-v1", "CliffWalking-v1")),
        pytest.param("CoinrunEasy-v0", False, marks=procgen),
        *((name, True) for name in ("Sokoban-v0", "Taxi-v3", "LunarLander-v3", "MetaWorld/Reach-v3")),
    ],
)
def test_a_limit_that_envpool_would_not_heed_is_refused(name, heeded):
    """Of Procgen it would only call ends by another name: each after that many steps would be no death."""
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
        (dict(scenario="merge"), "scenario: not an option of envpool/Roundabout-v0, got merge; use --env"),
        (dict(max_episode_steps=50), "envpool ignores it in .*, got 50; set duration instead"),
    ],
)
def test_a_highway_stays_the_one_of_its_name(options, says):
    with pytest.raises(ValueError, match=says):
        envs.make("envpool/Roundabout-v0", 2, **options)


@pytest.mark.parametrize("error", [ImportError("libQt5Gui.so.5: cannot open"), OSError("libGL.so.1: cannot open")])
def test_procgen_without_qt_says_what_to_install(error, monkeypatch):
    def absent(family):
        raise error

    monkeypatch.setattr(tasks.qt, "load_for", absent)
    with pytest.raises(
        ValueError, match=r'CoinrunEasy-v0 cannot be made: .*pip install "jaxrl_fast\[procgen\]"'
    ) as said:
        envs.make("envpool/CoinrunEasy-v0", 2)
    assert str(error) in str(said.value)


def test_an_option_that_takes_for_ever_is_refused(monkeypatch):
    monkeypatch.setattr(probe, "TRIAL_TIMEOUT_S", 0.5)
    probe.rejection_reason.cache_clear()
    with pytest.raises(ValueError, match=r"size=1000000: the trial did not finish within 0.5 s"):
        envs.make("envpool/MiniGrid-Empty-5x5-v0", 2, size=1_000_000)
    probe.rejection_reason.cache_clear()


def test_a_command_that_would_abort_says_so_in_one_line_and_leaves_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert train.main(["ppo", "--env", "envpool/MiniGrid-Empty-5x5-v0", "--env-option", "size=0"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "size=0" in err
    assert not list(tmp_path.iterdir())


def instead(monkeypatch, code):
    """Whatever would be tried, this is run."""
    start = functools.partial(subprocess.Popen, [sys.executable, "-c", code], start_new_session=True)
    monkeypatch.setattr(probe.subprocess, "Popen", lambda *_, **__: start())
    return start


@pytest.mark.parametrize(
    ("goes_on", "limit", "says"), [(0, 60.0, "it leaves processes running"), (100, 3.0, "the trial did not finish")]
)
def test_nothing_of_a_trial_is_left(goes_on, limit, says, monkeypatch):
    """Not what it has started itself, as VizDoom does, which holds what it was given to write to."""
    groups, end_all = [], probe._end_all
    monkeypatch.setattr(probe, "_end_all", lambda child: groups.append(child.pid) or end_all(child))
    monkeypatch.setattr(probe, "CLEANUP_TIMEOUT_S", 0.1)
    child = "import time; time.sleep(100)"
    instead(monkeypatch, f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])"
            f"; time.sleep({goes_on})")  # fmt: skip
    assert probe._run_child([], limit, {}).startswith(says)
    until = time.monotonic() + 30
    while probe._alive(groups[0]) and time.monotonic() < until:  # a signal takes its time
        time.sleep(0.05)
    assert not probe._alive(groups[0])


def test_what_ends_a_little_after_the_trial_does_no_harm(monkeypatch):
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.2)'])"
    instead(monkeypatch, code)
    monkeypatch.setattr(probe, "CLEANUP_TIMEOUT_S", 60)
    assert probe._run_child([], 60.0, {}) == ""


def test_what_is_run_child_is_run_child_once_and_what_is_sure_never(monkeypatch):
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
def test_procgens_options_are_run_child_with_the_libraries_that_it_wants():
    """The process that tries them has not loaded them."""
    config = json.dumps({"num_levels": 1, "start_level": 7, "num_threads": 1})
    assert probe.rejection_reason.__wrapped__("CoinrunEasy-v0", config) == ""


def test_the_limit_of_the_trial_is_for_the_option_and_not_for_the_cores(monkeypatch):
    """Libraries that keep memory for each core would pass it by themselves on a machine with many."""
    seen = []
    start = instead(monkeypatch, "")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "64")
    monkeypatch.setenv("ELSE", "kept")
    monkeypatch.setattr(probe.subprocess, "Popen", lambda *_, env, **__: seen.append(env) or start())
    assert probe.rejection_reason.__wrapped__("CartPole-v1", "{}") == ""
    wanted = {"OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "ELSE": "kept"}
    assert wanted.items() <= seen[0].items() and "PYTHONPATH" in seen[0]


SWEPT = ("Catch-v0", "FrozenLake-v1")  # of MiniGrid, which has most, it takes three minutes


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEPT)
def test_no_whole_number_ends_the_process(name):
    """Every option that is one, at -1, 0 and 1: refused, or three environments play on."""
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


def test_no_threads_means_as_many_as_there_are_cores():
    """envpool's own reading of 0; said in numbers, for pools that are bound to cores count on it."""
    task = tasks.describe("CartPole-v1", 64, {"num_threads": 0}, HostEnvConfig())
    assert task.config["num_threads"] == min(64, tasks.num_cores()) > 0


@pytest.mark.parametrize(
    ("num_cores", "async_pools", "num_threads"),
    [(4, 0, 4), (4, 1, 4), (4, 2, 4), (4, 3, 2), (4, 4, 2), (4, 8, 1), (4, 16, 1), (16, 3, 10), (16, 32, 1)],
)
def test_pools_in_flight_share_the_cores(num_cores, async_pools, num_threads, monkeypatch):
    """Twice as many threads as cores at most, as long as each pool needs no more than one."""
    monkeypatch.setattr(tasks, "num_cores", lambda: num_cores)
    env = envs.make("envpool/CartPole-v1", 32 * max(async_pools, 1), HostEnvConfig(num_async_pools=async_pools))
    assert env.step.args[0].pools[0].open_pool.args[0].config["num_threads"] == num_threads
    assert bool(env.warnings) == (async_pools == 16), "there 16 threads are more than twice 4"


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_an_action_of_any_width_stays_what_it_is(dtype):
    """The bound of 200 actions, 199, would wrap to -57 in int8."""
    spec = EnvSpec("many", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(200), 3)
    most = min(np.iinfo(dtype).max, 250)
    given = jnp.asarray([0, 100, most], dtype)
    np.testing.assert_array_equal(spaces.to_env_action(spec, (), given), [0, 100, min(most, 199)])


def test_on_another_device_envpools_calls_are_run_child_in_another_process(monkeypatch):
    """There an abort would take the training with it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    adapter.ffi_unavailable_reason.cache_clear()
    probe.ffi_failure.cache_clear()
    held = len(host_pool.OPEN_POOLS)
    assert adapter.ffi_unavailable_reason() == "" and len(host_pool.OPEN_POOLS) == held
    instead(monkeypatch, "import os; os.abort()")
    adapter.ffi_unavailable_reason.cache_clear()
    probe.ffi_failure.cache_clear()
    assert "signal 6, SIGABRT" in adapter.ffi_unavailable_reason()
    warnings = envs.make("envpool/CartPole-v1", 2, HostEnvConfig()).warnings
    assert any("SIGABRT" in line for line in warnings)
    adapter.ffi_unavailable_reason.cache_clear()
    probe.ffi_failure.cache_clear()


def test_a_listed_name_with_a_slash_needs_no_backend():
    """`envs` lists names within their backend: MetaWorld/Reach-v3."""
    assert envs.make("MetaWorld/Reach-v3", 1).spec.id == "envpool/MetaWorld/Reach-v3"
    with pytest.raises(ValueError, match="unknown backend 'MetaWorlds' in environment 'MetaWorlds/Reach-v3'"):
        envs.make("MetaWorlds/Reach-v3", 1)


@pytest.mark.parametrize("name", ["MiniGrid-Empty-5x5-v0", "LunarLander-v3", "Highway-v0", "CartPole-v1"])
def test_families_that_draw_themselves_have_an_image(name):
    env = envs.make(f"envpool/{name}", 2)
    if name == "CartPole-v1":  # drawn from its observation
        assert env.render is None
        return
    env.open()
    jax.block_until_ready(jax.jit(env.reset)(jax.random.key(0)))
    image = env.render()
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] == 3 and image.std() > 0
    devices.release_envs([env])


@pytest.mark.parametrize(
    ("protocol", "config"),
    [
        # Mnih et al. 2015: every action is done, a lost life ends an episode, up to 30 no-ops
        ("dqn2015", dict(episodic_life=True, repeat_action_probability=0, use_fire_reset=True, noop_max=30)),
        # Machado et al. 2018: an action is repeated with probability 1/4, games are whole and start at once
        ("machado2018", dict(episodic_life=False, repeat_action_probability=0.25, use_fire_reset=False, noop_max=1)),
    ],
)
def test_a_protocol_is_that_of_its_paper(protocol, config):
    task = tasks.describe("Pong-v5", 2, {}, HostEnvConfig(protocol=protocol))
    assert {name: task.config[name] for name in config} == config
    assert task.pool.ends_at_life_loss == config["episodic_life"] and task.pool.protocol == protocol


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("an_int32", -(2**31), 2**31 - 1),  # any number of envpool's
        ("max_episode_steps", 1, 2**31 - 1),
        ("thread_affinity_offset", -1, 1023),  # a set of cores has 1024 places; -1 is no core
        ("img_height", 36, 1024),  # a smaller frame would be a board, for nature's convolutions need 36
        ("frame_skip", 1, 1000),
        ("noop_max", 1, 10_000),
        ("num_levels", 0, 10**9),
    ],
)
def test_a_number_is_let_through_within_its_bounds_only(name, least, most):
    check = lambda value: tasks._checked("envpool/a_task", {name: 5}, {name: value})
    assert check(least) == {name: least} and check(most) == {name: most}
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError, match=f"{name}: must be {least} to {most} for envpool/a_task, got {value}"):
            check(value)
