"""Test signals that arrive while the main thread waits for the device."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxrl_fast.utils.signals import interruptible

MODULE = """
import time

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces


class Sleepy:  # each step takes 0.04 s
    default_params = ()

    def reset_env(self, key, params):
        return jnp.zeros(2), jnp.int32(0)

    def step_env(self, key, state, action, params):
        reward = jax.pure_callback(self.wait, jax.ShapeDtypeStruct((), jnp.float32), state, vmap_method="sequential")
        return jnp.zeros(2), state + 1, reward, False, {}

    def wait(self, state):
        time.sleep(0.04)
        return np.float32(1)

    def is_truncated(self, state, params):
        return state >= 10

    def action_space(self, params):
        return spaces.Discrete(2)


class Endless(Sleepy):  # a step never ends
    def step_env(self, key, state, action, params):
        spun = jax.lax.while_loop(lambda x: x >= 0, lambda x: (x * 3 + 1) % 1000, state)
        return jnp.zeros(2), state + 1, spun.astype(jnp.float32), False, {}
"""
PROMPT_S = 5.0  # longer than a busy machine needs to respond, and shorter than an update


class Training:
    """A training in a subprocess, and its output."""

    def __init__(self, env, folder, rollout_length, script=""):
        (folder / "slow_envs.py").write_text(MODULE, encoding="utf-8")
        self.run_dir = folder / "run"
        options = f"ppo --env slow_envs:{env} --num-envs 1 --total-steps 100k --run-dir {self.run_dir}"
        options += f" --rollout-length {rollout_length} --hidden-sizes 8 --loggers none"
        command = [sys.executable, "-u", *(["-c", script] if script else ["-m", "jaxrl_fast.train", *options.split()])]
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environ = os.environ | {"PYTHONPATH": path}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environ
        )
        self.text = ""
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.text += line

    def seconds_until(self, words, limit):
        """Wait until it has printed these words, and return the seconds."""
        start = time.monotonic()
        while words not in self.text:
            assert time.monotonic() - start < limit and self.process.poll() is None, self.text
            time.sleep(0.02)
        return time.monotonic() - start


@pytest.fixture
def training(tmp_path):
    started = []

    def start(env, rollout_length, script=""):
        started.append(Training(env, tmp_path, rollout_length, script))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        one.process.stdout.close()


@pytest.mark.slow
def test_sigint_during_long_update_is_acknowledged_and_saves_run(training):
    run = training("Sleepy", 256)
    run.seconds_until("compiled in", 120)
    time.sleep(1)  # the first update has begun
    run.process.send_signal(signal.SIGINT)
    assert run.seconds_until("stopping after this chunk", 120) < PROMPT_S
    assert run.process.wait(timeout=120) == 130
    summary = json.loads((run.run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "stopped" and summary["env_steps"] >= 256
    assert list((run.run_dir / "checkpoints").iterdir())


@pytest.mark.slow
def test_second_sigint_ends_process_during_endless_update(training):
    run = training("Endless", 8)
    run.seconds_until("compiled in", 120)
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    assert run.seconds_until("stopping after this chunk", 120) < PROMPT_S
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=PROMPT_S) == -signal.SIGINT


SCRIPT = """
import jaxrl_fast
options = dict(num_envs=1, total_steps=100_000, loggers=(), run_dir="./run")
jaxrl_fast.fit(algo="ppo", env="slow_envs:Endless", rollout_length=8, hidden_sizes=(8,), **options)
"""


@pytest.mark.slow
def test_second_sigint_ends_script_with_keyboard_interrupt(training):
    """The endless call runs in a thread; a normal exit of Python would abort when it releases the device."""
    run = training("Endless", 8, SCRIPT)
    run.seconds_until("compiled in", 120)
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    run.seconds_until("stopping after this chunk", 120)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=60) == -signal.SIGINT
    time.sleep(0.5)
    assert "\nKeyboardInterrupt" in run.text and "FATAL" not in run.text and "terminate" not in run.text


def test_signal_handler_runs_during_blocking_call():
    """Compute a hash of many rounds outside Python. In the main thread, it would delay the handler to its end."""
    heard = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        interruptible(hashlib.pbkdf2_hmac, "sha256", b"password", b"salt", 2_000_000)
        end = time.monotonic()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(heard) == 1 and heard[0] - start < 0.5 * (end - start)


def test_interruptible_passes_on_return_value_and_exception():
    def divide(a, b):
        return a / b

    assert interruptible(divide, 6, 3) == 2
    with pytest.raises(ZeroDivisionError) as error:
        interruptible(divide, 1, 0)
    assert error.traceback[-1].name == "divide"


def test_interruptible_calls_function_directly_in_other_threads():
    names = []
    thread = threading.Thread(target=lambda: interruptible(lambda: names.append(threading.current_thread().name)))
    thread.start()
    thread.join()
    assert names == [thread.name]
