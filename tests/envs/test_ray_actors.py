"""Environments in Ray actors against the same environments in worker processes; failures of actors."""

import os
import socket
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import envs, train
from jaxrl_fast.envs.gymnasium import description, ray_actor, source
from jaxrl_fast.envs.gymnasium.pool import LocalPool, WorkerPool
from jaxrl_fast.envs.host import env as host_env
from jaxrl_fast.envs.host import pool as host_pool
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers, workers_of
from jaxrl_fast.utils import ray_cluster
from jaxrl_fast.utils.errors import EnvFault, blamed, user_traceback
from tests.helpers import gym_envs
from tests.helpers.host_envs import run
from tests.helpers.ray_clusters import local_ray

MODULE = "tests.helpers.gym_envs"
SEED = (7, 0, 0)
PROCESSES, ACTORS = (HostEnvConfig(SEED, workers=workers) for workers in (Workers(2, 60.0), Workers(2, 60.0, True)))
SHORT: dict = dict(algo="ppo", num_envs=4, total_steps=320, eval_every=96, eval_episodes=4, save_every=0, timeout=60)
SHORT |= dict(loggers=(), log_level="quiet", log_every=32)
SHORT |= dict(rollout_length=8, hidden_sizes=(4,), num_minibatches=1, num_epochs=1)


@pytest.fixture(scope="module")
def ray():
    yield from local_ray()


@pytest.fixture(autouse=True)
def all_pools_are_closed(monkeypatch):
    monkeypatch.setattr(host_pool, "OPEN_POOLS", [])
    yield
    for pool in list(host_pool.OPEN_POOLS):
        pool.close()


def faulty(fault, config, **options):
    """Return an environment that fails in its third step. It bypasses the trial steps of `make`, which would fail."""
    described = description.describe(source.from_object(gym_envs.Walk, {"fault": ""}, f"{MODULE}:Walk"))
    own = described.source._replace(arguments={"fault": fault, **options})
    return description.from_description(described._replace(source=own), 4, config)


def test_rows_are_those_of_worker_processes(ray):
    """Check rewards, ends, resets and observations bit for bit. Five environments split into two and three."""
    actions = np.random.default_rng(1).integers(2, size=(40, 5)).astype(np.int32)
    found = []
    for config in (PROCESSES, ACTORS):
        env = envs.make(f"{MODULE}:Walk", 5, config)
        assert env.host.num_workers == 2
        found.append(run(env, actions))
        env.host.close()
    assert found[0][1].last.any()
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.slow
def test_pool_in_actors_steps_reseeds_saves_and_restores_as_a_local_one(ray):
    """The state of one pool, with a pending step, is restored in the other."""
    made = source.from_object(gym_envs.Walk, {}, "walk")
    described = description.describe(made)
    recipe = description.Recipe("walk", made.maker(render=False), described.layout)
    pool = WorkerPool(recipe, [1, 2, 3], num_workers=2, timeout_s=60, start=ray_actor.Worker)
    alone = LocalPool(recipe, [1, 2, 3])
    equal = partial(jax.tree.map, np.testing.assert_array_equal)
    try:
        equal(pool.reset(), alone.reset())
        for _ in range(15):  # beyond the end of an episode
            for one in (pool, alone):
                one.send(np.full(3, 5))
            equal(pool.recv(), alone.recv())
        for one in (pool, alone):
            one.reseed([9, 7, 8])
        equal(pool.reset(), alone.reset())
        for giver, taker in ((pool, alone), (alone, pool)):
            giver.send(np.array([5, 6, 5]))
            taker.set_state(giver.get_state())
            equal(giver.recv(), taker.row())
            for one in (pool, alone):
                one.send(np.array([6, 5, 5]))
            equal(pool.recv(), alone.recv())
    finally:
        pool.close()
        alone.close()


@pytest.mark.slow
def test_exception_of_an_actor_keeps_type_place_and_traceback(ray):
    env = faulty("raise", ACTORS)
    with pytest.raises(ZeroDivisionError) as raised, host_env.original_errors():
        run(env, np.zeros((9, 4), np.int32))
    assert blamed(raised.value) == f"{MODULE}:Walk: step failed in environment 0, episode 1, step 3, action 5"
    shown = user_traceback(raised.value)
    assert '"raise": lambda *outcome: 1 // 0' in shown and shown.rstrip().endswith("by zero")


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("die", r"ended \(its process has crashed, exited or been killed\)"),
        ("hang", "no answer of a Ray actor within 2 s"),
    ],
)
def test_dead_or_hanging_actor_raises_fault_with_step(fault, says, num):
    """An actor with one environment tells its step; an actor with two, which environments it has."""
    where = "in a step of environments 0 to 1" if num == 2 else "in environment 0, episode 1, step 3, action 5"
    env = faulty(fault, PROCESSES._replace(workers=Workers(num, 2.0, True)))
    with pytest.raises(EnvFault, match=says) as raised, host_env.original_errors():
        run(env, np.zeros((9, 4), np.int32))
    assert where in str(raised.value)
    start = time.monotonic()
    env.host.close()
    assert time.monotonic() - start < 20


class Kill:
    """Kills an actor of the training once."""

    def __init__(self, ray):
        self.ray = ray

    def on_record(self, state, record):
        self.ray.kill(host_pool.OPEN_POOLS[0].workers[0].actor)


@pytest.mark.slow
def test_killed_actor_ends_run_that_resumes(tmp_path, ray):
    options = SHORT | dict(env=f"{MODULE}:Walk", run_dir=str(tmp_path / "run"), eval_every=0)
    with pytest.raises(EnvFault, match=r"the Ray actor \w+ ended \(.*killed"):
        jaxrl_fast.fit(**options, workers="ray:2", callbacks=[Kill(ray)])
    resumed = jaxrl_fast.fit(resume=str(tmp_path / "run"), log_level="quiet")
    assert resumed.summary["status"] == "done"


@pytest.mark.slow
def test_run_in_actors_resumes_in_processes_within_episodes(tmp_path, ray):
    """The result has the bits of a run in processes that was never stopped."""
    options = SHORT | dict(env=f"{MODULE}:Walk", schedule="constant")
    whole = jaxrl_fast.fit(**options, workers=2, run_dir=str(tmp_path / "whole"))
    jaxrl_fast.fit(**(options | dict(total_steps=160)), workers="ray:2", run_dir=str(tmp_path / "parts"))
    parts = jaxrl_fast.fit(resume=str(tmp_path / "parts"), total_steps=320, log_level="quiet", workers=2)
    jax.tree.map(np.testing.assert_array_equal, whole.agent_state, parts.agent_state)


@pytest.mark.slow
def test_class_of_a_script_runs_in_actors_and_no_process_remains(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import jaxrl_fast, os\nfrom tests.helpers.gym_envs import Walk\nclass Mine(Walk): pass\n"
        f"run = jaxrl_fast.fit(algo='ppo', env=Mine, workers='ray:2', num_envs=2, total_steps=512, eval_episodes=0,"
        f" run_dir={str(tmp_path / 'run')!r}, loggers=())\nimport ray\n"
        "print('session', ray.get_runtime_context().gcs_address)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    port = done.stdout.rpartition(":")[2].strip()
    until = time.monotonic() + 20
    while (left := subprocess.run(["pgrep", "-f", f":{port} "], capture_output=True, text=True).stdout) and (
        time.monotonic() < until
    ):
        time.sleep(0.2)
    assert not left


@pytest.mark.slow
def test_connection_without_the_token_is_refused(ray):
    """A stranger that connects first is not served, and the pool still gets its actor."""
    actor, channels = ray_actor.Actor(), []
    address = actor.listen(b"x" * ray_actor.TOKEN_BYTES, [], {})
    for first in (b"y" * ray_actor.TOKEN_BYTES, b"x", b"x" * ray_actor.TOKEN_BYTES):
        channels.append(socket.create_connection(address))
        channels[-1].sendall(first)
    channels[1].close()  # before it has sent all of a token
    with actor.server, actor._accept() as own:
        assert own.getpeername() == channels[-1].getsockname()
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("text", ["ray", "ray:", "ray:0", "ray:1025", "ray:two", "Ray:2"])
def test_wrong_number_of_actors_is_rejected(text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["ppo", "--env", "gymnasium/CartPole-v1", "--host.workers", text]) == 2
    assert "Ray actors (ray:64, at most ray:1024)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_actors_are_rejected_for_environments_on_the_device():
    with pytest.raises(ValueError, match=r"host\.workers: gymnax/CartPole-v1 has no worker processes, got ray:2"):
        envs.make("gymnax/CartPole-v1", 2, ACTORS)


def test_option_value_names_actors():
    assert workers_of("ray:8", 3.0) == Workers(8, 3.0, True) and str(Workers(8, 3.0, True)) == "ray:8"
    assert workers_of("auto", 0.0) == Workers("auto") and workers_of(3, 0.0) == Workers(3)


def test_silent_connection_is_late_and_broken_one_is_an_end(monkeypatch):
    """A machine that is off breaks the connection with the errno of a time-out, which is not one of the environment."""
    actor = object.__new__(ray_actor.Worker)
    ours, theirs = socket.socketpair()
    actor.channel = ours
    with ours, theirs:
        with pytest.raises(TimeoutError):
            actor.receive(0.01)
        monkeypatch.setattr(ray_actor.worker, "receive", lambda channel: os.read(-1, 1))
        assert actor.receive(None) == (b"", None)

        def unreachable(channel):
            raise TimeoutError(110, "Connection timed out")

        monkeypatch.setattr(ray_actor.worker, "receive", unreachable)
        assert actor.receive(None) == (b"", None)


def test_missing_ray_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_cluster, "util", SimpleNamespace(find_spec=lambda name: None))
    assert train.main(["ppo", "--env", "gymnasium/CartPole-v1", "--host.workers", "ray:2"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("error: host.workers: ray is not installed, got ray:2; pip install") and said.count("\n") == 1
    )
    assert not list(tmp_path.iterdir())


def test_address_that_a_killed_cluster_has_left_is_not_used(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_cluster._address("x", "y") is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
    assert ray_cluster._address("x", "y") == "local"
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert ray_cluster._address("x", "y") is None


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9 (Connection refused), got ray:2; set RAY_ADDRESS"),
        ("ray://head:10001", "RAY_ADDRESS must be HOST:PORT, of a cluster that has this machine as a node, got ray://"),
        ("head", "RAY_ADDRESS must be HOST:PORT"),
    ],
)
def test_unreachable_cluster_is_one_line(address, says, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError) as raised:
        ray_cluster.connect("host.workers", "ray:2")
    assert says in str(raised.value) and "\n" not in str(raised.value)
