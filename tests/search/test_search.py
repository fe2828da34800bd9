"""Check whole searches: killed and resumed, extended, by halving and by population-based training."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl_fast.search import prepare, runner

pytestmark = pytest.mark.slow

BASE = {
    "env": "gymnax/CartPole-v1",
    "num_envs": 4,
    "total_steps": 1_600,
    "rollout_length": 20,
    "num_minibatches": 2,
    "num_epochs": 1,
    "network": {"hidden_sizes": [8]},
    "eval_episodes": 4,
    "eval_envs": 4,
    "log_level": "quiet",
}
OVER = {"learning_rate": (1e-4, 1e-2), "gamma": (0.9, 0.999)}
SEARCHES = {
    "halving": {"trials": 8, "batch": 4, "scheduler": "halving", "sampler": "tpe"},
    "pbt": {"trials": 6, "scheduler": {"kind": "pbt", "intervals": 4, "frequencies": [1, 2]}},
    "choices": {"trials": 6, "sampler": "random", "over": OVER | {"activation": ["tanh", "relu"]}},
}


def outcome(folder: Path) -> dict:
    """Return what a search has found: its trials, its tests, and the newest parameters of each program."""
    trials = [trial._asdict() for trial in runner.trials_of(prepare.read(folder))]
    arrays = {}
    for path in sorted(folder.glob("programs/*/checkpoints/*/state.safetensors")):
        from safetensors.numpy import load_file

        arrays[f"{path.parents[2].name}"] = load_file(path)
    return {"trials": trials, "tests": json.loads((folder / "tests.json").read_text()), "arrays": arrays}


def same(one: dict, other: dict) -> None:
    assert repr(one["trials"]) == repr(other["trials"])
    assert one["tests"] == other["tests"]
    assert one["arrays"].keys() == other["arrays"].keys()
    for name, arrays in one["arrays"].items():
        for key, array in arrays.items():
            if not key.startswith("ledger/"):  # clocks are in it
                np.testing.assert_array_equal(array, other["arrays"][name][key], err_msg=f"{name} {key}")


@pytest.mark.parametrize("kind", SEARCHES)
def test_killed_search_resumes_to_same_trials_and_bits(kind, tmp_path):
    options = {"over": OVER} | BASE | SEARCHES[kind] | {"seeds": 2, "test_seeds": 2, "winners": 2}
    whole, killed = tmp_path / "whole" / "one", tmp_path / "killed" / "one"  # trials hold the name
    assert start(whole, options).wait() == 0
    for seconds in (0.1, 0.5, 1.0, 1.7):  # after the next folder of a program appears
        before = len([*killed.glob("programs/*")])
        process = start(killed, options)
        while process.poll() is None and len([*killed.glob("programs/*")]) <= before:
            time.sleep(0.02)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(killed, options).wait() == 0
    same(outcome(whole), outcome(killed))


def start(folder: Path, options: dict) -> subprocess.Popen:
    """Begin or resume a search in another process."""
    code = f"import jaxrl_fast; jaxrl_fast.search('ppo_cartpole', search_dir={str(folder)!r}, **{options!r})"
    return subprocess.Popen([sys.executable, "-c", code])
