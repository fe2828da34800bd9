"""Test the host loop: what it writes, when it stops, and that timing affects only the recorded times."""

import errno
import json
import math
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from gymnax.environments import spaces
from jax.experimental.compilation_cache import compilation_cache

import jaxrl_fast
from jaxrl_fast import __main__ as commands
from jaxrl_fast import evaluate, train, video
from jaxrl_fast.config import load
from jaxrl_fast.envs import __main__ as envs_command
from jaxrl_fast.kernels import build
from jaxrl_fast.loggers import jsonl, terminal
from jaxrl_fast.parallel import program
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.plotting import run_curve
from jaxrl_fast.runs import directory, files
from jaxrl_fast.training import console, dispatcher, evaluator, trainer
from jaxrl_fast.training import memory as training_memory
from jaxrl_fast.training import plan as planning
from jaxrl_fast.types import Agent, Decision
from jaxrl_fast.types.host import HostEnv
from jaxrl_fast.utils import compile_cache, devices, locks, signals
from tests.helpers import probes, run_chunks_by, slow

ROOT = Path(__file__).parents[2]
TIMES = ("wall_time_s", "train_time_s", "env_steps_per_s")
LENGTH = 11  # of a rollout: an episode of the probe, 10 steps, and the reset row of the next one


def toy_agent(num_envs):
    """Return an agent without learning, whose state depends on keys, observations, rewards and their order."""

    def update(state, rollout, key):
        drift = jax.random.normal(key, state.shape) * rollout.steps.reward.sum() + rollout.next_obs.mean()
        state = jnp.sin(1.1 * state + drift)
        return state, {"toy_loss": state.sum(), "undefined": jnp.float32(jnp.nan)}

    act = lambda state, inputs, carry, noise: Decision(jnp.int32(noise > state[0]))
    return Agent(
        init=lambda key: jax.random.normal(key, (3,)),
        explore=act,
        exploit=act,
        update=update,
        sample_noise=lambda key, num_steps, num_envs: jax.random.normal(key, (num_steps, num_envs)),
        rollout_length=LENGTH,
    )


def plan(folder, line="", num_envs=4, num_updates=6, env=probes.constant_reward):
    """Return the plan of a short run: every episode has 10 steps and return 10."""
    line = f"ppo --num-envs {num_envs} --eval-episodes 4 --loggers none {line}"
    folder.mkdir()
    settings = load.from_command_line(line.split())
    return planning.Plan(
        settings=settings,
        env=env(num_envs),
        agent=toy_agent(num_envs),
        placement=Placement(settings.options.num_seeds),
        eval_env=env(4),
        num_updates=num_updates,
        steps_per_update=num_envs * LENGTH,
        folder=folder,
        lock=locks.Lock(folder),
    )


def read(folder):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((folder / "summary.json").read_text(), parse_constant=refuse)
    return [json.loads(text, parse_constant=refuse) for text in lines], summary


def without_times(records):
    return [{k: v for k, v in r.items() if k not in TIMES} for r in records]


@pytest.fixture(scope="module")
def built():
    return program.build(probes.chain(4), toy_agent(4), num_updates=6)


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1, 1, 1], [2, 4], [5, 1]])
def test_results_do_not_depend_on_chunk_length(built, lengths):
    def run(lengths):
        state, parts = built.init(np.asarray(3, np.int32)), []
        for length in lengths:
            state, rows = built.chunk(state, np.asarray(length, np.int32))
            parts.append({k: np.asarray(x)[:length] for k, x in rows.items()})
        state = jax.device_get(state._replace(key=jax.random.key_data(state.key), actors=()))
        return state, {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}

    jax.tree.map(np.testing.assert_array_equal, run(lengths), run([6]))


def test_chunk_equals_loop_train(built):
    """A chunk counts its updates itself, and otherwise computes what `loop.train` computes."""
    from jaxrl_fast import loop

    env, agent = probes.chain(4), toy_agent(4)
    state, rows = built.chunk(built.init(np.asarray(3, np.int32)), np.asarray(6, np.int32))
    plain = jax.jit(partial(loop.train, env, agent, num_updates=6))
    their_state, their_rows = plain(loop.init(env, agent, jax.random.key(3)))
    np.testing.assert_array_equal(state.agent, their_state.agent)
    rows = dict(rows)
    assert not rows.pop(program.NONFINITE_KEY).any()
    jax.tree.map(np.testing.assert_array_equal, rows, dict(their_rows))


@pytest.mark.parametrize(("keeps_state", "expected"), [(True, 3), (False, 1)])
def test_chunks_are_longer_if_each_copies_large_state(keeps_state, expected):
    state = {"replay": np.zeros(2 * dispatcher.COPIED_BYTES, np.uint8)}
    copying = types.SimpleNamespace(keeps_state=keeps_state)
    assert dispatcher.Dispatcher(copying, state, num_seeds=1).chunk_s == expected * dispatcher.CHUNK_S


@pytest.mark.slow
def test_chunk_duration_affects_only_recorded_times(tmp_path, monkeypatch):
    line = "--log-every 88 --eval-every 132"
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    trainer.execute(plan(tmp_path / "short", line, num_updates=7, env=probes.chain))
    monkeypatch.setattr(dispatcher, "CHUNK_S", 100.0)
    monkeypatch.setattr(dispatcher, "GROWTH", 100)
    trainer.execute(plan(tmp_path / "long", line, num_updates=7, env=probes.chain))
    short, long = read(tmp_path / "short")[0], read(tmp_path / "long")[0]
    assert without_times(short) == without_times(long)
    # Records have 2 updates or end at an evaluation: after 3 and 6 updates, and after 7 at the end.
    assert [r["num_updates"] for r in short] == [2, 3, 5, 6, 7]
    assert ["eval_return_mean" in r for r in short] == [False, True, False, True, True]


def test_records_and_summary_match_hand_calculation(tmp_path, capsys):
    """6 updates of 11 rows in 4 environments: each environment has 6 episodes of 10 steps and 6 reset rows."""
    outcome = trainer.execute(plan(tmp_path / "run", "--solved-threshold 11"))
    records, summary = read(tmp_path / "run")
    assert [r["env_steps"] for r in records] == [44, 88, 132, 176, 220, 264]
    assert sum(r["episodes"] for r in records) == 24
    assert all(r["return_mean"] == r["return_max"] == r["episode_length_mean"] == 10 for r in records)
    assert all(r["undefined"] is None and math.isfinite(r["toy_loss"]) for r in records)
    assert summary == json.loads(json.dumps(outcome.summary))
    assert summary["status"] == "done" and summary["env_steps"] == 264 and summary["num_updates"] == 6
    assert summary["valid_steps"] == [264 - 6 * 4]
    assert summary["final_return_mean"] == summary["eval_return_mean"] == 10
    assert summary["final_return_std"] is None and summary["eval_return_std"] == 0
    assert summary["solved"] is False and summary["steps_to_solve"] is None
    assert summary["env_steps_per_s"] == pytest.approx(264 / summary["train_time_s"], rel=0.05)
    assert 0 <= summary["device_idle_fraction"] <= 1
    assert records[-1]["train_time_s"] == pytest.approx(summary["train_time_s"], abs=1e-3)
    times = [r["wall_time_s"] for r in records]
    assert times == sorted(times)
    said = capsys.readouterr().out
    assert "seed 0" in said and "compiling" in said and "not solved" in said and str(tmp_path / "run") in said


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_run_continues_when_tracking_service_fails(fails, tmp_path, monkeypatch, capsys):
    """Let login, logging or the end fail: there is one warning, and records and summary are written."""

    def fail(*args, **kwargs):
        raise RuntimeError("api_key not configured\nand more")

    calls = {name: (fail if name == fails else lambda *_, **__: None) for name in ("init", "log", "finish")}
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(**calls))
    trainer.execute(plan(tmp_path / "run", "--loggers wandb"))
    records, summary = read(tmp_path / "run")
    assert summary["status"] == "done" and len(records) == 6
    err = capsys.readouterr().err
    assert "api_key not configured" in err and "and more" not in err and err.count("warning") == 1


def test_run_end_prints_resume_command(tmp_path, capsys):
    trainer.execute(plan(tmp_path / "run", "--total-steps 264"))
    assert f"--resume {tmp_path / 'run'} --total-steps 528\n" in capsys.readouterr().out


@pytest.mark.slow
def test_run_stops_one_record_after_it_is_solved(tmp_path):
    """4 episodes per update are 100 after 25 updates; by then the next chunk runs. Repeat it, since timing varies."""
    for name in ("a", "b"):
        trainer.execute(plan(tmp_path / name, "--solved-threshold 10 --stop-when-solved", num_updates=60))
        records, summary = read(tmp_path / name)
        assert summary["solved"] and summary["status"] == "done"
        assert summary["steps_to_solve"] == 25 * 44
        assert 0 < summary["time_to_solve_s"] <= summary["train_time_s"]
        assert summary["num_updates"] == len(records) == 26
        assert summary["eval_return_mean"] == 10


@pytest.mark.slow
def test_vectorized_seeds_match_single_run(tmp_path):
    """Seed 6 of three has, up to rounding, the first record and the final state of its single run."""
    together = trainer.execute(plan(tmp_path / "all", "--seed 5 --num-seeds 3", env=probes.chain))
    records, summary = read(tmp_path / "all")
    assert [r["seed"] for r in records[:4]] == [5, 6, 7, 5]
    assert together.agent_state.shape == (3, 3)
    alone = trainer.execute(plan(tmp_path / "one", "--seed 6", env=probes.chain))
    first = next(r for r in records if r["seed"] == 6)
    expected = read(tmp_path / "one")[0][0]
    for name in ("env_steps", "episodes", "return_mean", "toy_loss"):
        assert first[name] == pytest.approx(expected[name], rel=1e-5), name
    np.testing.assert_allclose(together.agent_state[1], alone.agent_state, rtol=1e-3)
    assert len({r["toy_loss"] for r in records[:3]}) == 3
    assert len(summary["final_return_per_seed"]) == 3
    assert summary["final_return_mean"] == pytest.approx(np.mean(summary["final_return_per_seed"]))
    assert summary["final_return_std"] == pytest.approx(np.std(summary["final_return_per_seed"], ddof=1))


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_signal_stops_run_after_chunk(name, status, tmp_path, monkeypatch, capsys):
    number = getattr(signal, name)
    write = jsonl.JsonLines.write

    def write_and_signal(self, records):
        write(self, records)
        if records[0]["num_updates"] == 4:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    monkeypatch.setattr(jsonl.JsonLines, "write", write_and_signal)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    monkeypatch.setattr(planning, "make_plan", lambda settings: plan(tmp_path / "run", num_updates=1000))
    assert train.main(["ppo"]) == status
    assert signal.getsignal(number) == before
    records, summary = read(tmp_path / "run")
    assert summary["status"] == "stopped"
    assert summary["num_updates"] == records[-1]["num_updates"] < 20
    assert (tmp_path / "run" / "curve.png").exists()
    assert "stopped" in capsys.readouterr().out


def test_stop_signal_is_handled_when_stderr_is_closed(monkeypatch):
    """Ctrl-C also ends a `tee` that reads the output."""

    class Gone:
        def write(self, text):
            raise BrokenPipeError

    heard = []
    monkeypatch.setattr(sys, "stderr", Gone())
    with signals.stop_signals(heard.append):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_second_sigint_raises_keyboard_interrupt(capsys):
    heard, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt), signals.stop_signals(heard.append):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] and "send the signal again to quit at once" in capsys.readouterr().err


def test_sighup_stays_ignored_under_nohup():
    heard, before = [], signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.stop_signals(heard.append):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == []


def test_repeated_sighup_is_handled_once():
    """When a terminal closes, the shell and the kernel each send SIGHUP within a millisecond."""
    heard, before = [], signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        with signals.stop_signals(heard.append):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == [signal.SIGHUP]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_stop_signals_supports_handlers_of_c_libraries(number, monkeypatch):
    """For such a handler, `getsignal` returns None, which can be neither called nor passed to `signal.signal`."""
    heard, known, before = [], signal.getsignal, signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR1 else known(number))
    try:
        with signals.stop_signals(heard.append):
            signal.raise_signal(number)
        assert heard == [number]
        assert known(signal.SIGUSR1) is signal.SIG_DFL  # our handler is removed after the training
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_closed_terminal_stops_and_saves_run(tmp_path):
    ours, theirs = pty.openpty()
    line = ["--config", "ppo_cartpole", "--total-steps", "1B", "--console-every", "0.1", "--run-dir", "./run"]
    opened = f"import os; os.open({os.ttyname(theirs)!r}, os.O_RDWR)"  # becomes the controlling terminal
    heard = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # as without nohup
    imported = "from jaxrl_fast import train; from jaxrl_fast.config import cli"
    program = f"{opened}; {heard}; {imported}; cli.start(lambda: train.main({line}))"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
        start_new_session=True,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    try:
        while b"return" not in said:
            said += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(timeout=100) == 128 + signal.SIGHUP
    finally:
        process.kill()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_summary_is_written_when_run_fails(tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("the evaluation broke")

    monkeypatch.setattr(trainer.Trainer, "evaluate", fail)
    with pytest.raises(RuntimeError, match="the evaluation broke"):
        trainer.execute(plan(tmp_path / "run", "--log-every 1"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_run_continues_when_curve_cannot_be_drawn(tmp_path, monkeypatch, capsys):
    def fail(folder):
        raise KeyError("no\nfont")

    monkeypatch.setattr(run_curve, "figure", fail)
    assert trainer.execute(plan(tmp_path / "run")).summary["status"] == "done"
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and r"could not be written (KeyError: 'no\nfont')" in err


def test_curve_is_not_drawn_without_summary(tmp_path, monkeypatch, capsys):
    """The disk is full at the end of the run: one line has the reason."""

    def no_room(folder, summary):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_summary", no_room)
    assert trainer.execute(plan(tmp_path / "run")).failed_outputs == "summary.json"
    err = capsys.readouterr().err
    assert err == "warning: the end of summary.json and curve.png could not be written (No space left on device)\n"
    assert not (tmp_path / "run" / "curve.png").exists()


def test_lock_is_released_when_run_is_interrupted_at_end(tmp_path, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_curve, "figure", interrupt)
    ready = plan(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        trainer.execute(ready)
    locks.Lock(tmp_path / "run").release()


def test_evaluation_without_ended_episode_does_not_fail_run(tmp_path, monkeypatch, capsys):
    env = probes.constant_reward(7)  # a number of environments that no other test has, since JAX caches traces

    def endless(state, action):
        state, timestep = env.step(state, action)
        return state, timestep._replace(last=jnp.zeros_like(timestep.last))

    monkeypatch.setattr(evaluator, "MAX_STEPS", 20)
    trainer.execute(plan(tmp_path / "run")._replace(eval_env=env._replace(step=endless)))
    summary = read(tmp_path / "run")[1]
    assert (summary["status"], summary["eval_truncated"]) == ("done", 0)
    assert summary["eval_return_mean"] == 19  # 20 steps, of which the one that restarts the cycle has reward 0
    assert (tmp_path / "run" / "curve.png").exists() and not capsys.readouterr().err


def test_json_files_stay_valid_when_rewards_are_nan(tmp_path):
    """NaN and infinity are written as null, and the summary is complete."""

    def poisoned(num_envs):
        env = probes.chain(num_envs)

        def step(state, action):
            state, timestep = env.step(state, action)
            return state, timestep._replace(reward=timestep.reward * jnp.nan)

        return env._replace(step=step)

    trainer.execute(plan(tmp_path / "run", env=poisoned))
    records, summary = read(tmp_path / "run")
    assert records[-1]["return_mean"] is None
    assert summary["status"] == "diverged" and summary["final_return_mean"] is None


def test_chunk_is_compiled_once_for_any_number_of_chunks(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    listen = lambda event, duration, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    jax.monitoring.register_event_duration_secs_listener(listen)  # stays: the oldest JAX cannot remove it
    trainer.execute(plan(tmp_path / "run", "--eval-every 88", num_updates=12))
    assert len(compiled) == 3  # init, the chunk, the evaluation


class Watched:
    """A metric of a chunk that reports when its value is read. A call of `is_ready` is not reported."""

    def __init__(self, metric, tell):
        self.metric, self.tell, self.is_ready = metric, tell, metric.is_ready

    def __array__(self, *_, **__):
        self.tell()
        return np.asarray(self.metric)


def test_chunk_is_submitted_before_previous_metrics_are_read(tmp_path, monkeypatch):
    events = []

    def run(chunk, state, length):
        events.append("give")
        state, rows = chunk(state, length)
        return state, rows | {"toy_loss": Watched(rows["toy_loss"], lambda: events.append("read"))}

    run_chunks_by(run, monkeypatch)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)  # chunks of one update
    trainer.execute(plan(tmp_path / "run", num_updates=5))
    assert events == ["give", *4 * ["give", "read"], "read"]


@pytest.mark.slow
def test_device_arrays_do_not_accumulate_over_chunks(tmp_path, monkeypatch):
    """The number of live arrays must not grow with the number of chunks and saves."""
    alive, process_chunk = [], trainer.Trainer.process_chunk

    def count(self, done):
        process_chunk(self, done)
        alive.append(len(jax.live_arrays()))

    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    monkeypatch.setattr(trainer.Trainer, "process_chunk", count)
    trainer.execute(plan(tmp_path / "run", "--save-every 88", num_updates=30))
    assert len(alive) == 30 and alive[-2] <= alive[4]


@pytest.mark.parametrize("seeds", ["", slow("--num-seeds 5")])
def test_training_makes_no_implicit_host_device_transfers(seeds, tmp_path, monkeypatch):
    """A transfer of a number to the device or back in every chunk would make the device wait."""
    train_, moved = trainer.Trainer.train, []

    def guarded(self):
        jax.config.update("jax_transfer_guard", "disallow")  # in all threads: one submits the chunks
        try:
            train_(self)
        finally:
            jax.config.update("jax_transfer_guard", None)
        moved.append(self.finished)

    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    monkeypatch.setattr(trainer.Trainer, "train", guarded)
    trainer.execute(plan(tmp_path / "run", f"--eval-every 88 --save-every 88 {seeds}", num_updates=12))
    assert moved == [12]


def test_host_environment_rejects_several_seeds(monkeypatch, capsys, tmp_path):
    from jaxrl_fast import envs

    monkeypatch.chdir(tmp_path)
    make = envs.make
    monkeypatch.setattr(envs, "make", lambda *a, **k: make(*a, **k)._replace(host=HostEnv()))
    assert train.main(["ppo", "--num-seeds", "2"]) == 2
    assert "num_seeds: must be 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "envs", "plot"])
def test_command_reports_removed_current_directory(command, tmp_path):
    start = f"runpy.run_module('jaxrl_fast.{command}', run_name='__main__')"
    code = f"import os, runpy; os.rmdir({str(tmp_path)!r}); {start}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code, "nonsense"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert ended.returncode == 2
    assert ended.stderr == "error: the current directory was removed; change to another\n"


def test_train_rejects_jax_enable_x64(monkeypatch, capsys, tmp_path):
    """Sums and counts would change their dtype in an update."""
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_enable_x64", True)
    try:
        assert train.main(["dqn"]) == 2
    finally:
        jax.config.update("jax_enable_x64", False)
    assert "jax_enable_x64" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_train_rejects_disabled_jit(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with jax.disable_jit():
        assert train.main(["ppo"]) == 2
    assert "jax_disable_jit" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_compile_cache_is_disabled_without_home_directory(monkeypatch):
    def nobody(self):
        raise RuntimeError("Could not determine home directory.")

    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.setattr(Path, "expanduser", nobody)
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with compile_cache.compile_cache(True) as folder:
            assert folder is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("module, broken", [(console, "announce"), (trainer, "write_config")])
def test_lock_is_released_when_run_fails_before_training(module, broken, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    ready = plan(tmp_path / "run")
    monkeypatch.setattr(module, broken, fail)
    with pytest.raises(OSError, match="No space"):
        trainer.execute(ready, terminal.QuietConsole())
    locks.Lock(tmp_path / "run").release()


ODD_PLACES = {
    "no standard output": ("-m jaxrl_fast.train ppo --seed x >&-", 2, "error: seed: must be a whole number"),
    "no words but ASCII": ("-c 'from jaxrl_fast.config import cli; cli.start(lambda: print(chr(183)))'", 0, "?\n"),
    "no command": ("-m jaxrl_fast", 0, "python -m jaxrl_fast.train     train an agent\n"),
    "a version": ("-m jaxrl_fast --version", 0, f"jaxrl_fast {jaxrl_fast.__version__}, jax {jax.__version__}\n"),
    "a blank for a dot": ("-m jaxrl_fast train --seed x", 2, "error: seed: must be a whole number"),
    "a blank for the dot of a package": (
        "-m jaxrl_fast sweep --sede 1",
        2,
        "error: sede: unknown option; did you mean actor.sees or seed?",
    ),
    "a typo": ("-m jaxrl_fast evalute", 2, "did you mean python -m jaxrl_fast.evaluate?"),
}


@pytest.mark.parametrize(("words", "status", "said"), ODD_PLACES.values(), ids=ODD_PLACES)
def test_unusual_invocations_print_expected_line(words, status, said):
    ended = subprocess.run(
        f"{shlex.quote(sys.executable)} {words}",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert ended.returncode == status and said in (ended.stderr if status else ended.stdout)
    assert ended.stderr.count("\n") == (status != 0)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_runs_after_a_blank(name, capsys):
    """The help is that of the command itself."""
    with pytest.raises(SystemExit) as ended:
        commands.main([name, "--help"])
    assert not ended.value.code and f"python -m jaxrl_fast.{name} " in capsys.readouterr().out


def test_interrupted_command_prints_nothing_and_ends_by_the_signal():
    code = "from jaxrl_fast.config import cli; import signal; "
    code += "cli.start(lambda: signal.default_int_handler(signal.SIGINT, None))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


@pytest.mark.skipif(sys.platform != "linux" or devices.num_cores() < 2, reason="needs /proc and more than one core")
@pytest.mark.parametrize(("wanted", "threads"), [({}, False), ({"OPENBLAS_NUM_THREADS": "2"}, True)])
def test_cli_starts_no_openblas_threads_unless_configured(wanted, threads):
    """Count the threads that the import of scipy.linalg starts."""
    lines = "import os; n = len(os.listdir('/proc/self/task')); import scipy.linalg; "
    lines += "print(len(os.listdir('/proc/self/task')) - n)"
    code = f"from jaxrl_fast.config import cli; cli.start(lambda: exec({lines!r}))"
    environment = {k: x for k, x in os.environ.items() if "OPENBLAS" not in k} | wanted
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert (int(said.stdout) > 0) == threads, said.stderr


def test_gpu_unused_detects_unused_gpu(monkeypatch):
    monkeypatch.setattr(console.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.delenv("JAX_PLATFORMS")
    assert console.gpu_unused() == (jax.default_backend() == "cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the user's choice
    assert not console.gpu_unused()


@pytest.mark.parametrize("unused", [True, False])
def test_announce_warns_of_unused_gpu(unused, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(console, "gpu_unused", lambda: unused)
    console.announce(plan(tmp_path / "run"), terminal.QuietConsole())
    warning = 'warning: there is a GPU, but JAX uses the CPU; pip install "jax[cuda12]"\n'
    assert capsys.readouterr().err == (warning if unused else "")


@pytest.mark.parametrize("why", ["there is no gcc or clang", ""])
def test_announce_prints_why_c_kernels_are_unavailable(why, tmp_path, monkeypatch, capsys):
    """It is printed as information, not as a warning."""
    monkeypatch.setattr(build, "unavailable_reason", lambda: why)
    console.announce(plan(tmp_path / "run"), terminal.PlainConsole())
    said = capsys.readouterr()
    told = why and devices.device() == "cpu"
    assert (f"C kernels are unavailable ({why})" if told else "") in said.out
    assert told or "C kernels" not in said.out
    assert not said.err


def test_dqn_prints_gradient_steps_and_memory_before_compiling(tmp_path, monkeypatch, capsys):
    """A transition of CartPole has 30 bytes: observation 16, action, reward and discount 4 each, and 2 flags.

    The 5 * 64 + 65 * 64 + 65 * 2 = 4610 parameters of 4 bytes are stored four times: two networks and two moments of
    Adam. Each of two devices stores all of them.
    """

    def fail(*_):
        raise RuntimeError("enough")

    monkeypatch.setattr(program, "build", fail)
    monkeypatch.setattr(training_memory, "free_bytes", lambda *_: 24 * 10**9)
    options = "--replay-ratio 0.25 --batch-size 1024 --learning-starts 5k --replay.size 100k"
    with pytest.raises(RuntimeError, match="enough"):
        train.main(f"dqn --num-envs 8 {options} --run-dir {tmp_path / 'run'}".split())
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "compiling ..."
    assert "0.25 gradient steps per environment step, 1,024 transitions each, from step 5,000 on" in said
    [sizes] = [line for line in said if line.startswith("memory")]
    assert "parameters 147.6 kB" in sizes and "replay 3.0 MB" in sizes and "24.0 GB free" in sizes


@pytest.mark.parametrize(("line", "kept"), [("", True), slow("--no-compile-cache", False)])
def test_train_caches_compiled_programs_by_default(line, kept, tmp_path, monkeypatch, capsys):
    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)  # for any compile time
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(planning, "make_plan", lambda settings: plan(tmp_path / "run")._replace(settings=settings))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        assert train.main(f"ppo --num-envs 4 --eval-episodes 4 --loggers none {line}".split()) == 0
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    programs = [*(tmp_path / ".cache" / "jaxrl_fast").glob("*")]
    assert bool(programs) == ("cached for next time" in capsys.readouterr().out) == kept


def test_user_compile_cache_takes_precedence():
    with compile_cache.compile_cache(True) as folder:
        assert str(folder) == os.environ["JAX_COMPILATION_CACHE_DIR"]
    with compile_cache.compile_cache(False), compile_cache.compile_cache(True) as folder:
        assert folder is None and not jax.config.values["jax_enable_compilation_cache"]


@pytest.mark.parametrize("wanted", [True, False])
def test_compile_cache_stores_programs_and_restores_jax_settings(wanted, tmp_path, monkeypatch):
    """After the context, JAX's settings are restored and no program is added."""
    monkeypatch.setattr(compile_cache, "CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    names = "jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    given = {name: jax.config.values[name] for name in names}
    settings = lambda: {name: jax.config.values[name] for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        without = settings()
        with compile_cache.compile_cache(wanted) as folder:
            jax.jit(lambda x: x + 1234)(0)
            (tmp_path / "cache" / "native").mkdir(parents=True, exist_ok=True)  # not a program
            kept = compile_cache.num_cache_entries(tmp_path / "cache")
            assert bool(kept) == wanted and folder == (tmp_path / "cache" if wanted else None)
        assert settings() == without
        jax.jit(lambda x: x + 4321)(0)
        assert compile_cache.num_cache_entries(tmp_path / "cache") == kept
    finally:
        for name, value in given.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    return jaxrl_fast.fit(
        "ppo_cartpole",
        env_options={"max_steps_in_episode": 20},
        num_envs=8,
        total_steps=1000,
        eval_every=512,
        eval_episodes=8,
        run_dir=str(tmp_path_factory.mktemp("fit") / "run"),
        log_level="quiet",
        rollout_length=16,
        hidden_sizes=(8,),
    )


def test_fit_returns_run_with_metrics_and_summary(fitted):
    assert fitted.summary["env_steps"] == 1024  # 1000 in whole updates of 128
    assert fitted.metrics == read(fitted.folder)[0]
    assert fitted.metrics[-1]["env_steps"] == 1024
    assert fitted.plot().axes
    assert "ppo on gymnax/CartPole-v1" in repr(fitted)
    assert "data:image/png;base64," in fitted._repr_html_()
    assert fitted.agent_state.params
    assert fitted.folder.is_absolute()


def test_run_open_reads_run_folder_and_rejects_others(fitted, tmp_path):
    again = jaxrl_fast.Run.open(str(fitted.folder))
    assert (again.folder, again.summary, again.metrics) == (fitted.folder, fitted.summary, fitted.metrics)
    assert again.plot().axes and repr(again) == repr(fitted)
    copy = jaxrl_fast.Run.open(shutil.copytree(fitted.folder, tmp_path / "copy"))
    assert len(copy.evaluate(episodes=3)["seeds"][0]["returns"]) == 3
    with pytest.raises(ValueError, match=f"^{tmp_path}: is not a run directory"):
        jaxrl_fast.Run.open(tmp_path)
    (tmp_path / "config.yaml").write_text((fitted.folder / "config.yaml").read_text())
    with pytest.raises(ValueError, match=f"has no summary.json.*--resume {tmp_path} "):
        jaxrl_fast.Run.open(tmp_path)


def test_run_folder_has_expected_files_and_metadata(fitted):
    names = {path.name.split(".1")[0] for path in fitted.folder.iterdir()}
    assert names == {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "curve.png",
        "checkpoints",
        "events.out.tfevents",
        ".lock",
        ".saved",
    }
    assert (fitted.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    written = yaml.safe_load((fitted.folder / "config.yaml").read_text())
    assert written["rollout_length"] == 16 and written["num_envs"] == 8 and written["algo"] == "ppo"
    assert written["meta"]["versions"]["jax"] == jax.__version__ and written["meta"]["device"] == devices.device()
    summary = fitted.summary
    wanted = """algo env_id num_envs num_seeds env_steps train_time_s compile_time_s env_steps_per_s final_return_mean
        final_return_std eval_return_mean solved steps_to_solve time_to_solve_s device versions status
        device_idle_fraction"""
    assert set(wanted.split()) <= set(summary)
    # Episodes are truncated after 20 steps, so no return is higher.
    assert 0 < summary["final_return_mean"] <= 20 and 0 < summary["eval_return_mean"] <= 20
    for name in (
        "policy_loss",
        "value_loss",
        "entropy",
        "approx_kl",
        "clip_fraction",
        "explained_variance",
        "learning_rate",
    ):
        assert name in fitted.metrics[0]


def test_config_of_run_is_valid_preset(fitted):
    again = load.from_command_line(["--config", str(fitted.folder / "config.yaml")])
    assert again.options.total_steps == 1000 and again.agent.network.hidden_sizes == (8,)
    assert again.options.env_options == {"max_steps_in_episode": 20}


def test_fit_raises_error_messages_of_command_line(fitted):
    with pytest.raises(ValueError, match=r"^num_env: unknown option; did you mean num_envs"):
        jaxrl_fast.fit("ppo_cartpole", num_env=3)
    with pytest.raises(ValueError, match=r"^run_dir: must be a new or empty folder, got .*; choose another"):
        jaxrl_fast.fit("ppo_cartpole", run_dir=str(fitted.folder))
    with pytest.raises(ValueError, match=r"^gamma: must be at least 0 and at most 1, got 2\.0"):
        jaxrl_fast.fit("ppo_cartpole", gamma=2)


def test_run_dir_may_be_empty_folder_but_not_hold_files(tmp_path):
    """A job script may have created it, or a run that could not write config.yaml. Folders with files are rejected."""
    options = load.from_keywords("ppo_cartpole", run_dir=str(tmp_path)).options
    assert directory.chosen(options) == tmp_path
    (tmp_path / locks.LOCK).touch()
    assert directory.chosen(options) == tmp_path
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"^run_dir: must be a new or empty folder, got .*; choose another"):
        directory.chosen(options)


def test_make_plan_rejects_folder_taken_by_concurrent_run(tmp_path, monkeypatch):
    """The other run takes the folder after the check that it is free."""
    make = directory.make

    def make_and_lose(*given):
        folder = make(*given)
        (folder / "config.yaml").touch()
        return folder

    monkeypatch.setattr(directory, "make", make_and_lose)
    with pytest.raises(ValueError, match=r"^run_dir: must be a new or empty folder, got .*; choose another"):
        planning.make_plan(load.from_keywords("ppo_cartpole", run_dir=str(tmp_path)))
    locks.Lock(tmp_path).release()  # the lock is free


def test_out_of_memory_is_reported_in_one_line(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 378880044496 bytes.")

    monkeypatch.setattr(dispatcher, "Dispatcher", full)
    ready = plan(tmp_path / "run")
    assert train.execute(ready) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"error: out of memory: the program needs .* and .* are free; fewer environments .*", said)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and f"error: {summary['failure']}" == said


def test_program_larger_than_free_memory_is_not_started(tmp_path, capsys, monkeypatch):
    """The compiled program states its memory, which exceeds the free memory."""
    monkeypatch.setattr(console.memory, "free_bytes", lambda *_: 100)
    monkeypatch.setattr(dispatcher, "Dispatcher", lambda *_: pytest.fail("it began"))
    ready = plan(tmp_path / "run")
    assert train.execute(ready) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    found = re.fullmatch(
        r"error: out of memory: the program needs .* of memory, and 100 B are free, enough for about (\d+) of the "
        r"(\d+) environments; fewer environments or seeds need less",
        said,
    )
    assert found and int(found[1]) < int(found[2]) == ready.settings.options.num_envs


@pytest.mark.slow
def test_dry_run_prints_plan_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "ppo --env CartPole-v1 --num-envs 8 --total-steps 10k --rollout-length 16 --seed 3 --dry-run"
    assert train.main(line.split()) == 0
    said = capsys.readouterr().out
    for words in (
        "seed 3",
        "memory  parameters",
        "run  runs/ppo_CartPole-v1_s3_",
        "compiled in",
        "shapes  observation float32[4]   action Discrete(num=2)   rollout 16 steps",
        "dry run: 79 updates of 16 steps in each of 8 environments (10.1k steps); nothing was trained or written",
    ):
        assert words in said, words
    assert not list(tmp_path.iterdir())
    assert train.main([*line.split(), "--num-minibatches", "7"]) == 2
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").touch()
    assert train.main([*line.split(), "--run-dir", "./taken"]) == 2
    with pytest.raises(ValueError, match=r"^dry_run: returns no run"):
        jaxrl_fast.fit("ppo_cartpole", dry_run=True)


@pytest.mark.slow
def test_summary_failure_is_error_raised_by_environment(tmp_path):
    """JAX reports the traceback of a callback, with the error in its last line."""

    def check(state):
        raise RuntimeError("boom")

    class Breaks:
        default_params = ()
        reset_env = lambda self, key, params: (jnp.zeros(1), jnp.zeros(1))
        is_truncated = lambda self, state, params: jnp.bool_(False)
        action_space = lambda self, params: spaces.Discrete(2)

        def step_env(self, key, state, action, params):
            state = jax.pure_callback(check, jax.ShapeDtypeStruct((1,), jnp.float32), state, vmap_method="sequential")
            return state, state, state[0], jnp.bool_(False), {}

    with pytest.raises(Exception, match="boom"):
        jaxrl_fast.fit("ppo_cartpole", env=Breaks, num_envs=4, total_steps=2048, run_dir=str(tmp_path), devices=1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["failure"].endswith(": RuntimeError: boom")


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (lambda: jax.numpy_dtype_promotion("strict"), "jax_numpy_dtype_promotion is strict, .*; unset "),
        (lambda: jax.debug_infs(True), "jax_debug_infs is on, .*; unset JAX_DEBUG_INFS"),
        (lambda: jax.set_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])), "outside of jax.set_mesh"),
    ],
    ids=["promotion", "infs", "mesh"],
)
def test_fit_rejects_unsupported_jax_setting_in_one_line(context, words, tmp_path):
    with context(), pytest.raises(ValueError, match=words) as refusal:
        jaxrl_fast.fit("ppo_cartpole", run_dir=str(tmp_path / "run"))
    assert "\n" not in str(refusal.value) and not (tmp_path / "run").exists()


def test_missing_device_is_reported_in_one_line(monkeypatch, tmp_path, capsys):
    def absent():
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", absent)
    message = r"^JAX_PLATFORMS=cpu: JAX finds no device \(the platform is not supported\); unset JAX_PLATFORMS$"
    with pytest.raises(ValueError, match=message):
        planning.validate_plan(load.from_keywords("ppo_cartpole"))
    (tmp_path / "config.yaml").write_text("algo: ppo\nenv: CartPole-v1\nmeta: {format: 3}\n")
    with pytest.raises(ValueError, match=message):
        jaxrl_fast.load(tmp_path)
    for command in (evaluate.main, video.main):
        assert command([str(tmp_path)]) == 2
    assert envs_command.main(["CartPole"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(re.search(message[1:], line) for line in lines)


def test_peak_memory_excludes_parent_process():
    """The parent has 300 MB, and its count is inherited by a new process."""
    child = "from jaxrl_fast.utils import memory; print(memory._peak_resident_kib())"
    parent = f"import subprocess, sys; big = bytearray(300_000_000); subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 5_000 < int(done.stdout) < 100_000


@pytest.mark.slow
@pytest.mark.parametrize(("variable", "number"), [("", None), ("3", 3)])
def test_jax_num_cpu_devices_variable_sets_number_of_devices(variable, number):
    """Use a subprocess, since JAX reads the variable once."""
    script = "import jax; from jaxrl_fast.utils import devices; devices.configure_cpu_devices(); "
    script += "print(jax.local_device_count(), devices.num_cores())"
    environ = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environ |= {"JAX_NUM_CPU_DEVICES": variable} if variable else {}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=True)
    found, cores = map(int, done.stdout.split())
    assert found == (number if variable else cores)
