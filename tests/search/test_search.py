"""Check whole searches: killed and resumed, extended, by halving and by population-based training."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast.parallel import program
from jaxrl_fast.search import prepare, work
from jaxrl_fast.search.trials import DEFAULT

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
    trials = [trial._asdict() for trial in work.trials_of(prepare.read(folder))]
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
    for seconds in (0.1, 1.2):  # after the next folder of a program appears
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


def test_extended_search_equals_one_that_was_longer_from_the_start(tmp_path):
    options = {"over": OVER} | BASE | {"batch": 2, "seeds": 1, "test_seeds": 1, "winners": 1, "sampler": "tpe"}
    longer = jaxrl_fast.search("ppo_cartpole", search_dir=tmp_path / "longer" / "one", trials=6, **options)
    short = jaxrl_fast.search("ppo_cartpole", search_dir=tmp_path / "short" / "one", trials=2, **options)
    extended = jaxrl_fast.search(resume=short, trials=6, log_level="quiet")
    assert repr(extended.trials) == repr(longer.trials) and len(longer.trials) == 6
    assert (extended.folder / "best.yaml").read_text() == (longer.folder / "best.yaml").read_text()
    with pytest.raises(ValueError, match="trials: must be at least the 6"):
        jaxrl_fast.search(resume=extended, trials=5)


def test_searches_share_a_study_and_refuse_another_one(tmp_path):
    shared = {"storage": f"sqlite:///{tmp_path}/study.db", "study": "one", "sampler": "random", "batch": 2}
    options = {"over": OVER} | BASE | {"trials": 8, "seeds": 1, "test_seeds": 0} | shared
    processes = [start(tmp_path / name, options) for name in ("first", "second")]
    assert [process.wait() for process in processes] == [0, 0]
    found = work.trials_of(prepare.read(tmp_path / "first"))
    assert len(found) in (8, 9, 10), "each searches until there are enough, a round at a time"
    assert {trial.status for trial in found} <= {"complete", "running"}
    assert len({trial.values["gamma"] for trial in found}) == len(found), "no two draws are the same"
    with pytest.raises(ValueError, match=r"study: has other options \(seeds\), got one"):
        jaxrl_fast.search("ppo_cartpole", search_dir=tmp_path / "third", **options | {"seeds": 3})
    assert not (tmp_path / "third").exists()


def test_signal_stops_search_with_command_to_resume(tmp_path):
    command = ["-m", "jaxrl_fast.search", "--config", "ppo_cartpole", "--over", "learning-rate=1e-4..1e-2"]
    command += ["--total-steps", "100M", "--trials", "2", "--seeds", "1", "--search-dir", str(tmp_path / "one")]
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    while not [*tmp_path.glob("one/programs/*/metrics.jsonl")]:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate()
    assert process.returncode == 130
    assert f"resume with  python -m jaxrl_fast.search --resume {tmp_path / 'one'}" in printed
    assert [*tmp_path.glob("one/programs/*/checkpoints/step-*")]


def test_population_is_compiled_once_and_its_preset_trains_to_the_tested_scores(tmp_path, monkeypatch):
    """Later stages have other values and states, but the same functions. The test has the last values throughout."""
    compiled, original = [], program._compile
    monkeypatch.setattr(program, "_compile", lambda *args: compiled.append(args[0]) or original(*args))
    options = {"over": OVER} | BASE | SEARCHES["pbt"] | {"seeds": 1, "test_seeds": 2, "winners": 1}
    found = jaxrl_fast.search("ppo_cartpole", search_dir=tmp_path / "one", **options)
    stages = {path.name for path in found.folder.glob("programs/*-1*") if path.name.startswith("r00")} - {"r00-1"}
    assert len(stages) == 3 and len(compiled) == 2, "one program of the population, and one of the test"
    tests = json.loads((found.folder / "tests.json").read_text())
    [best] = map(int, tests.keys() - {str(DEFAULT)})
    history = json.loads((found.folder / "history.json").read_text())
    assert history["stages"][-1][best]["values"] == found.trials[best].values != history["first"][best]
    same = {name: BASE[name] for name in ("eval_episodes", "eval_envs", "log_level")}
    jaxrl_fast.fit(found.best, seed=1, num_seeds=2, run_dir=tmp_path / "run", **same)
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2:]]
    assert [record["eval_return_mean"] for record in last] == pytest.approx(tests[str(best)])


@pytest.mark.parametrize("scheduler", ["halving", {"kind": "pbt", "intervals": 2}])
def test_search_ends_if_all_trials_diverge_before_their_last_stage(scheduler, tmp_path):
    options = {"over": {"learning_rate": (1e30, 1e35)}} | BASE | {"seeds": 1, "trials": 4, "batch": 4}
    found = jaxrl_fast.search("ppo_cartpole", search_dir=tmp_path / "one", scheduler=scheduler, **options)
    assert {trial.status for trial in found.trials} == {"diverged"}
