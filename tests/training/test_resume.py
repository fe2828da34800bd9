"""Test resumed runs: their records and states equal, bit by bit, those of a run that was never stopped."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from gymnax.environments import spaces

import jaxrl_fast
from jaxrl_fast import loop, train
from jaxrl_fast.config import paths
from jaxrl_fast.loggers import jsonl
from jaxrl_fast.metrics import tracker
from jaxrl_fast.parallel import program
from jaxrl_fast.plotting import run_curve
from jaxrl_fast.replay.host import journal
from jaxrl_fast.runs import checkpoint, checkpoint_writer, directory, fingerprint
from jaxrl_fast.runs.files import mark_running, read_summary
from jaxrl_fast.training import checkpoint_manager, dispatcher, evaluator, progress, trainer
from jaxrl_fast.utils import locks
from jaxrl_fast.utils.errors import remedy_of
from tests.helpers import slow
from tests.helpers.runs import records, same, same_numbers, stop_after

OFF_POLICY = dict(learning_starts=64, replay_ratio=0.25, hidden_sizes=(8,), batch_size=16)
PENDULUM = dict(env="Pendulum-v1", env_options=dict(max_steps_in_episode=60))
RUNS = {
    "ppo": dict(algo="ppo", rollout_length=8, hidden_sizes=(8,), normalize_observations=True, rewards="normalized"),
    "dqn": dict(
        algo="dqn",
        noisy=True,
        double=True,
        value=dict(kind="c51", atoms=7),
        replay=dict(kind="prioritized", n_step=3, size=512),
        **OFF_POLICY,
    ),
    "reppo": dict(algo="reppo", rollout_length=8, num_minibatches=4, hidden_sizes=(8,), critic_width=8, **PENDULUM),
    "pqn": dict(algo="pqn", rollout_length=8, hidden_sizes=(8,)),
    "sac": dict(algo="sac", replay=dict(size=512), noise=dict(kind="ou", theta=0.1), **PENDULUM, **OFF_POLICY),
    "discrete_sac": dict(algo="sac", num_seeds=2, replay=dict(kind="prioritized", size=512), **OFF_POLICY),
    "flash": dict(
        algo="sac",
        replay=dict(size=512),
        network="flash",
        value=dict(kind="c51", atoms=11),
        rewards="scaled",
        noise="held",
        schedule="cosine",
        **PENDULUM,
        **OFF_POLICY,
    ),
    "statistics": dict(
        algo="td3",
        replay=dict(size=512),
        target=dict(kind="none", warmup=100),
        normalize_observations=True,
        **PENDULUM,
        **OFF_POLICY,
    ),
    "seeds": dict(algo="dqn", num_seeds=5, replay=dict(kind="prioritized", size=512), **OFF_POLICY),
    "shards": dict(algo="ppo", devices=2, rollout_length=8, hidden_sizes=(8,)),
    "seeds_in_turn": dict(algo="ppo", devices=2, num_seeds=3, rollout_length=64, num_minibatches=1, hidden_sizes=(8,)),
}
SHORT = dict(env="CartPole-v1", num_envs=8, total_steps=1600, eval_every=700, eval_episodes=8, log_every=200)
SHORT |= dict(save_every=300, loggers=(), log_level="quiet")


def fit(folder, name="pqn", **options):
    """Train a short run, or resume a run with `resume`."""
    if "resume" in options:
        return jaxrl_fast.fit(**{"log_level": "quiet", **options})
    return jaxrl_fast.fit(**{**SHORT, **RUNS[name], "run_dir": str(folder), **options})


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Draw no curves, since that takes longer than these runs; test_train.py checks one."""
    monkeypatch.setattr(run_curve, "figure", lambda folder: SimpleNamespace(savefig=Path.touch))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return folders of runs that were never stopped, by name; each is trained once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("unbroken") / name
            fit(made[name], name)
        return made[name]

    return get


mark_slow = lambda names, *which: [slow(name) if name in which else name for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_run_stopped_twice_with_other_chunk_lengths_is_bit_identical(name, tmp_path, monkeypatch, unbroken):
    folder = tmp_path / name
    stop_after(monkeypatch, 200, 900)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)  # one update per chunk
    first = fit(folder, name).summary
    monkeypatch.setattr(dispatcher, "CHUNK_S", 1e-3)
    monkeypatch.setattr(dispatcher, "GROWTH", 2)
    second = fit(folder, resume=str(folder)).summary
    assert first["status"] == second["status"] == "stopped"
    steps, stopped = zip(*((s["env_steps"], s["last_checkpoint"]) for s in (first, second)))
    monkeypatch.setattr(dispatcher, "CHUNK_S", 100.0)
    assert fit(folder, resume=str(folder)).summary["status"] == "done"
    same(folder, unbroken(name))
    assert stopped == tuple(f"step-{at:012d}" for at in steps), "a stopped run saves at the step of its stop"
    assert len(yaml.safe_load((folder / "config.yaml").read_text())["meta"]["resumed"]) == 2


@pytest.mark.slow
def test_checkpoint_does_not_depend_on_chunk_length(tmp_path, monkeypatch):
    """Records have three updates. Only the record that ends at the checkpoint may wait for an evaluation."""
    folders = {chunk_s: tmp_path / str(chunk_s) for chunk_s in (0.0, 100.0)}
    monkeypatch.setattr(dispatcher, "GROWTH", 100)
    for chunk_s, folder in folders.items():
        monkeypatch.setattr(dispatcher, "CHUNK_S", chunk_s)
        fit(folder, log_every=192, eval_every=0, save_every=0, total_steps=768)
    same(*folders.values())
    saved, _ = checkpoint.newest(folders[0.0] / paths.CHECKPOINTS)
    assert saved.arrays["ledger/episodes"].shape == (1, 3)


@pytest.mark.parametrize("at", mark_slow([1, 64, 320, 704, 1280, 1599], 64, 1280, 1599))
@pytest.mark.slow
def test_resumed_run_is_bit_identical_when_stopped_at_any_step(at, tmp_path, monkeypatch, unbroken):
    """The steps include those of an evaluation (704) and of a checkpoint (320)."""
    folder = tmp_path / "run"
    stop_after(monkeypatch, at)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    fit(folder)
    fit(folder, resume=str(folder))
    same(folder, unbroken("pqn"))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_padded_seeds_resume_on_other_number_of_devices(before, after, tmp_path, monkeypatch):
    """Five seeds are padded to six on four devices, and not padded on one."""
    folder = tmp_path / "run"
    stop_after(monkeypatch, 700)
    monkeypatch.setattr(jax, "local_device_count", lambda: before)
    assert fit(folder, "seeds").summary["status"] == "stopped"
    saved, _ = checkpoint.newest(folder / paths.CHECKPOINTS)
    assert [x.shape for name, x in saved.arrays.items() if re.fullmatch(r"agent/replay/.*head", name)] == [(5,)]
    monkeypatch.setattr(jax, "local_device_count", lambda: after)
    summary = fit(folder, resume=str(folder)).summary
    assert summary["status"] == "done" and summary["env_steps"] == 1600
    saved, _ = checkpoint.newest(folder / paths.CHECKPOINTS)
    kernels = [x.reshape(5, -1) for name, x in saved.arrays.items() if "params" in name and "kernel" in name]
    assert kernels and all(len(np.unique(x, axis=0)) == 5 for x in kernels)


@pytest.mark.slow
def test_finished_run_continues_only_with_more_total_steps(tmp_path, unbroken, capsys):
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    again = fit(folder, resume=str(folder), log_level="info")
    assert again.summary["status"] == "done"
    assert "resume  at its end, step 1.6k; more total_steps extend it" in capsys.readouterr().out
    same(folder, unbroken("pqn"))
    longer = fit(folder, resume=str(folder), total_steps=2400)
    assert longer.summary["env_steps"] == 2432 and records(folder)[-1]["env_steps"] == 2432
    steps = [r["env_steps"] for r in records(folder)]
    assert steps == sorted(set(steps))
    with pytest.raises(
        ValueError, match="total_steps: must be at least the 2432 steps that this run has made, got 1600"
    ):
        fit(folder, resume=str(folder), total_steps=1600)


@pytest.mark.slow
def test_summary_status_is_running_while_resumed_run_trains(tmp_path, unbroken, monkeypatch):
    folder, train_on, seen = tmp_path / "run", trainer.Trainer.train, []
    shutil.copytree(unbroken("pqn"), folder)
    before = read_summary(folder)

    def look_and_train(self):
        seen.append(read_summary(folder))
        train_on(self)

    monkeypatch.setattr(trainer.Trainer, "train", look_and_train)
    assert before["status"] == "done"
    fit(folder, resume=str(folder), total_steps=2400)
    assert seen == [before | {"status": "running"}]
    assert read_summary(folder)["status"] == "done"


@pytest.mark.slow
def test_failed_restore_leaves_summary_and_config_unchanged(tmp_path, unbroken, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    read = lambda: [(folder / name).read_bytes() for name in (paths.SUMMARY, paths.CONFIG)]
    before = read()

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(checkpoint_manager.CheckpointManager, "restore", fail)
    with pytest.raises(MemoryError):
        fit(folder, resume=str(folder), total_steps=2400)
    assert read() == before


def test_mark_running_ignores_missing_summary_and_warns_of_invalid_one(tmp_path, capsys):
    mark_running(tmp_path)
    assert not list(tmp_path.iterdir()) and capsys.readouterr().err == ""
    (tmp_path / "summary.json").write_text("{")
    mark_running(tmp_path)  # a warning, not an exception
    assert capsys.readouterr().err.startswith("warning: summary.json could not be written")


@pytest.mark.slow
def test_resume_without_checkpoint_restarts_run(tmp_path, unbroken):
    """Lines of metrics that exist already are written again."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    shutil.rmtree(folder / paths.CHECKPOINTS)
    (folder / checkpoint.SAVED).unlink()
    (folder / "summary.json").unlink()
    fit(folder, resume=str(folder))
    same(folder, unbroken("pqn"))


@pytest.mark.slow
def test_dry_run_of_resume_changes_no_file(tmp_path, unbroken, capsys):
    """Another process may be writing a checkpoint; a resume itself removes what is half written."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    half = folder / paths.CHECKPOINTS / ".writing-step-000000009999"
    half.mkdir()
    (half / checkpoint.ARRAYS).write_text("half")
    files = lambda: {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    before = files()
    assert train.main(["--resume", str(folder), "--dry-run"]) == 0, capsys.readouterr().err
    assert files() == before
    fit(folder, resume=str(folder))
    assert not half.exists()


@pytest.mark.slow
def test_resume_that_fails_to_compile_leaves_files_unchanged(tmp_path, unbroken, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    files = lambda: {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    before = files()
    with monkeypatch.context() as patched:
        patched.setattr(program, "build", lambda *_: (_ for _ in ()).throw(RuntimeError("no room")))
        with pytest.raises(RuntimeError, match="no room"):
            fit(folder, resume=str(folder), total_steps=3200)
    assert files() == before
    assert fit(folder, resume=str(folder), total_steps=3200).summary["status"] == "done"


def test_resume_rejects_truncated_metrics(tmp_path, unbroken, capsys):
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    path = folder / "metrics.jsonl"
    size = path.stat().st_size
    path.write_text(path.read_text()[: size // 2])
    before = path.read_bytes()
    assert train.main(["--resume", str(folder), "--total-steps", "3200"]) == 2
    assert re.search(rf"metrics.jsonl has {size // 2} bytes, but had \d+ when", capsys.readouterr().err)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_resume_from_before_the_first_record_needs_no_metrics(tmp_path):
    folder = tmp_path / "run"
    fit(folder, log_every=1600, keep_checkpoints=9)
    others = checkpoint.folders(folder / paths.CHECKPOINTS)[1:]
    before = records(folder)
    for newer in others:
        shutil.rmtree(newer)
    (folder / paths.METRICS).unlink()
    fit(folder, resume=str(folder))
    assert records(folder) == before


@pytest.mark.slow
def test_resume_rejects_metrics_with_converted_line_endings(tmp_path, unbroken, capsys):
    """An editor wrote CRLF, so the size stored with the checkpoint would end within a line."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = path.read_bytes()
    assert train.main(["--resume", str(folder), "--total-steps", "3200"]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith(f"error: resume {folder}: metrics.jsonl was changed after step-")
    assert path.read_bytes() == before
    command = refusal.partition("convert its line ends: ")[2].strip()
    subprocess.run(command, shell=True, check=True)
    assert train.main(["--resume", str(folder), "--total-steps", "3200"]) == 0
    assert [json.loads(line)["env_steps"] for line in path.read_text().splitlines()][-1] == 3200


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rollout_length: 8", "rollout_length: 4", "config.yaml: rollout_length was 8"),
        ("seed: 0", "seed: 3", "seed was 0"),
        ("gamma: 0.99", "gamma: 0.9", "config.yaml: gamma was 0.99"),
        ("num_envs: 8", "num_envs: 16", "num_envs was 8"),
        ("env: gymnax/CartPole-v1", "env: Acrobot-v1", "env was CartPole-v1"),
        ("algo: pqn", "algo: ppo", ""),
    ],
)
def test_resume_rejects_edited_config(old, new, words, tmp_path, unbroken, capsys):
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    path = folder / "config.yaml"
    text = path.read_text()
    assert text.count(f"{old}\n") == 1
    path.write_text(text.replace(f"{old}\n", f"{new}\n"))
    assert train.main(["--resume", str(folder), "--total-steps", "3200"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_resume_accepts_edited_config_that_does_not_affect_results(tmp_path, unbroken):
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("log_every: 200", "log_every: 400"))
    assert train.main(["--resume", str(folder), "--total-steps", "3200"]) == 0


@pytest.mark.slow
def test_config_of_environment_instance_run_requires_instance_as_preset(tmp_path):
    folder = tmp_path / "run"
    fit(folder, env=RewardEnv(10.0), eval_every=0, save_every=0, total_steps=640)
    preset = str(folder / "config.yaml")
    with pytest.raises(ValueError, match=r"^config: .* was trained on an environment instance .*env=\.\.\.$"):
        jaxrl_fast.fit(preset, run_dir=str(tmp_path / "again"))
    again = jaxrl_fast.fit(preset, env=RewardEnv(10.0), run_dir=str(tmp_path / "again"))
    assert again.metrics[-1]["return_mean"] == 80


@pytest.mark.slow
def test_best_checkpoint_is_kept_when_run_is_extended(tmp_path, monkeypatch):
    """The final evaluation, after the last checkpoint, is the best; a longer run without a stop would not have it."""
    scripted, call = [1.0, 2.0, 60.0, 40.0, 3.0, 4.0], evaluator.Evaluator.__call__

    def evaluate(self, *args):
        each, total = call(self, *args)
        return each, total | {"eval_return_mean": scripted.pop(0)}

    monkeypatch.setattr(evaluator.Evaluator, "__call__", evaluate)
    folder = tmp_path / "run"
    fit(folder, keep_checkpoints=1)
    best = checkpoint.best(folder / paths.CHECKPOINTS)
    assert best.name == "step-000000001600"
    longer = fit(folder, resume=str(folder), total_steps=3200).summary
    assert not scripted and checkpoint.best(folder / paths.CHECKPOINTS) == best and checkpoint.read(best)
    assert (longer["best_eval_return_mean"], longer["best_eval_env_steps"]) == (60.0, 1600)


@pytest.mark.slow
def test_stop_when_solved_step_does_not_depend_on_interruption(tmp_path, monkeypatch):
    """Interrupt at each update around the record that solves the environment."""
    options = dict(
        total_steps=6400, solved_threshold=5.0, stop_when_solved=True, eval_every=0, save_every=0, log_every=256
    )
    solved = fit(tmp_path / "whole", **options).summary
    assert solved["status"] == "done" and solved["env_steps"] == solved["steps_to_solve"] + 256 < 6400
    for at in range(solved["steps_to_solve"] - 256, solved["env_steps"] + 1, 64):
        folder = tmp_path / str(at)
        with monkeypatch.context() as patched:
            stop_after(patched, at)
            fit(folder, **options | {"save_every": at})
        fit(folder, resume=str(folder))
        assert records(folder) == records(tmp_path / "whole"), at


@pytest.mark.slow
def test_resume_of_solved_run_requires_stop_when_solved_false(tmp_path):
    folder = tmp_path / "run"
    options = dict(
        total_steps=6400, solved_threshold=5.0, stop_when_solved=True, eval_every=0, save_every=0, log_every=256
    )
    solved = fit(folder, **options).summary["env_steps"]
    assert fit(folder, resume=str(folder)).summary["env_steps"] == solved < 3200
    with pytest.raises(
        ValueError, match=r"^total_steps: cannot extend .* solved, got 12800; use stop_when_solved false$"
    ):
        fit(folder, resume=str(folder), total_steps=12800)
    on = fit(folder, resume=str(folder), total_steps=3200, stop_when_solved=False)
    assert on.summary["env_steps"] == 3200


@pytest.mark.slow
def test_changed_solved_threshold_applies_from_resume_step(tmp_path, capsys):
    """The window of the last episodes at the resume counts; which record first reached the threshold is unknown."""
    folder = tmp_path / "run"
    options = dict(total_steps=3200, solved_threshold=5.0, eval_every=0, save_every=0, log_every=256)
    first = fit(folder, **options).summary
    assert first["solved"] and first["steps_to_solve"] < 3200
    higher = fit(folder, resume=str(folder), total_steps=4096, solved_threshold=1e4, log_level="info").summary
    assert "judged from there on" in capsys.readouterr().out
    assert (higher["solved_threshold"], higher["solved"], higher["steps_to_solve"]) == (1e4, False, None)
    again = dict(resume=str(folder), total_steps=6400, solved_threshold=5.0, stop_when_solved=True)
    lower = fit(folder, **again).summary
    assert lower["solved"] and lower["env_steps"] == 4096, "solved at once, so the run does not continue"
    assert 4096 - 256 <= lower["steps_to_solve"] <= 4096, "the last complete record of the checkpoint"
    assert [e["env_steps"] for e in lower["evaluations"]] == [4096]


@pytest.mark.slow
def test_failed_run_with_timed_checkpoints_resumes_bit_identically(tmp_path, monkeypatch, unbroken):
    """Save by time, as by default. The number of saves depends on the machine; the results do not."""
    folder = tmp_path / "run"
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(progress.RunProgress, "close", lambda self: (self.join_checkpoint(), self.logger.lines.close()))
        patched.setattr(trainer.Trainer, "stopping", lambda self: 1 // (self.finished < 15) > 1)  # fails in the middle
        with pytest.raises(ZeroDivisionError):
            fit(folder, save_every="0.001s")
    assert len(checkpoint.folders(folder / paths.CHECKPOINTS)) == 2
    fit(folder, resume=str(folder))
    same_numbers(folder, unbroken("pqn"))


@pytest.mark.parametrize("left", [checkpoint.SAVED, "summary.json"])
def test_resume_rejects_run_with_deleted_checkpoints(left, tmp_path, unbroken, capsys):
    """Check a run that was saved and killed, and a run that ended."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    shutil.rmtree(folder / paths.CHECKPOINTS)
    (folder / ({checkpoint.SAVED, "summary.json"} - {left}).pop()).unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert train.main(["--resume", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert (
        f"error: resume {folder}: the run has no checkpoint" in err and f"with config {folder / 'config.yaml'}" in err
    )
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "metrics.jsonl").write_bytes(b"")  # no metrics could be lost
    assert directory.check_restart(folder) is None


def test_resume_rejects_restart_when_summary_has_no_status(tmp_path):
    """The file was edited, so that it is unknown how the run ended."""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "summary.json").write_text('{"algo": "ppo"}')
    with pytest.raises(ValueError, match="the run has no checkpoint, and starting again would overwrite"):
        directory.check_restart(tmp_path)


def test_resume_uses_previous_checkpoint_when_newest_is_damaged(tmp_path, unbroken, capsys):
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    before, newest = checkpoint.folders(folder / paths.CHECKPOINTS)[-2:]
    (newest / checkpoint.ARRAYS).write_bytes((newest / checkpoint.ARRAYS).read_bytes()[:-1])
    fit(folder, resume=str(folder), log_level="info")
    said = capsys.readouterr()
    assert f"{newest}: {checkpoint.ARRAYS} does not match its checksum; using the previous one" in said.err
    assert str(before) in said.out
    same(folder, unbroken("pqn"))


@pytest.mark.slow
def test_resume_warns_when_versions_differ(tmp_path, unbroken, monkeypatch, capsys):
    """Check a changed version, and an entry that the saved fingerprint does not have."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    now = fingerprint.fingerprint()
    other = now | {"versions": now["versions"] | {"jax": "99.0"}, "something_new": "here"}
    monkeypatch.setattr(fingerprint, "fingerprint", lambda: other)
    fit(folder, resume=str(folder), log_level="info")
    told = "the resumed run may not be bit-exact: "
    assert f"{told}jax {jax.__version__} is now 99.0, something_new unknown is now here\n" in capsys.readouterr().err


def test_resume_rejects_run_without_intact_checkpoint(tmp_path, unbroken):
    """A restart would overwrite its metrics."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    for saved in checkpoint.folders(folder / paths.CHECKPOINTS):
        (saved / checkpoint.SUM).write_text("no sum\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    got = r"got \d damaged checkpoints? \(.*manifest.json does not match its checksum\)"
    remedy = f"start a new run with config {folder / 'config.yaml'}"
    with pytest.raises(ValueError, match=f"^resume {folder}: needs an intact checkpoint, {got}; {remedy}$"):
        fit(folder, resume=str(folder))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OTHER_STATES = {  # states of another version, and the error messages
    "a name": (lambda arrays, kinds: [tree.pop("num_updates") for tree in (arrays, kinds)], "has no array num_updates"),
    "one more": (lambda arrays, kinds: kinds.update(momentum=kinds["num_updates"]), "has an unknown array momentum"),
    "a shape": (
        lambda arrays, kinds: arrays.update({"actors/score": np.zeros(9, np.float32)}),
        r"actors/score must be float32\[8\], got float32\[9\]",
    ),
    "a dtype": (
        lambda arrays, kinds: (
            arrays.update({"actors/length": np.zeros(8, np.int16)}),
            kinds["actors/length"].update(dtype="int16"),
        ),
        r"actors/length must be int32\[8\], got int16\[8\]",
    ),
}


@pytest.mark.parametrize("other", OTHER_STATES)
def test_resume_rejects_state_of_other_version_before_compiling(other, tmp_path, unbroken, monkeypatch, capsys):
    folder, (change, words) = tmp_path / "run", OTHER_STATES[other]
    shutil.copytree(unbroken("pqn"), folder)
    saved, _ = checkpoint.newest(folder / paths.CHECKPOINTS)
    change(saved.arrays, saved.manifest["arrays"])
    saved.manifest["meta"]["versions"]["jaxrl_fast"] = "0.0.7"
    checkpoint.write(saved.folder, saved.arrays, saved.manifest)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(trainer, "execute", lambda plan: pytest.fail("it began"))
    assert train.main(["--resume", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert re.search(f"error: {re.escape(str(saved.folder))}:? {words}; jaxrl_fast 0.0.7 wrote it", err), err
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(num_envs=16), "num_envs: a resume cannot change it from 8, got 16"),
        (dict(seed=1), "^seed: a resume cannot change it from 0, got 1"),
        (dict(num_seeds=2), "num_seeds: a resume cannot change it from 1, got 2"),
        (dict(devices=2), "devices: a resume cannot change it from auto, got 2"),
        (dict(env="Acrobot-v1"), "env: a resume cannot change it from gymnax/CartPole-v1, got Acrobot-v1"),
        (dict(env_options={"max_steps_in_episode": 3}), "env_options"),
        (dict(gamma=0.5), "^gamma: a resume cannot change it from 0.99, got 0.5"),
        (dict(hidden_sizes=(8, 8)), "^hidden_sizes: a resume cannot change it from 8, got 8 8"),
        (dict(algo="ppo"), "uses algorithm pqn, got ppo"),
        (dict(preset="ppo_cartpole"), "config: cannot be combined with resume"),
        (dict(run_dir="elsewhere"), "run_dir: cannot be combined with resume"),
        (dict(total_steps=64), "the 1600 steps that this run has made"),
    ],
)
def test_resume_rejects_changes_of_options_that_affect_results(options, words, unbroken):
    folder = unbroken("pqn")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != locks.LOCK}
    with pytest.raises(ValueError, match=words):
        fit(folder, resume=str(folder), **options)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != locks.LOCK}


@pytest.mark.slow
def test_resume_accepts_changed_logging_and_checkpoint_options(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    stop_after(monkeypatch, 700)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    fit(folder)
    fit(
        folder,
        resume=str(folder),
        env="CartPole-v1",
        eval_every=0,
        log_every=64,
        save_every="1h",
        keep_checkpoints=1,
        solved_threshold=490,
    )
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert (settings["keep_checkpoints"], settings["save_every"], settings["total_steps"]) == (1, "1h", 1600)
    assert len(checkpoint.folders(folder / paths.CHECKPOINTS)) <= 2  # the last one, and the best


class RewardEnv:
    """Episodes of eight steps with a constant reward."""

    default_params = ()

    def __init__(self, wage: float = 1.0):
        self.wage = wage

    def reset_env(self, key, params):
        return jnp.zeros(1), jnp.int32(0)

    def step_env(self, key, state, action, params):
        return jnp.zeros(1), state + 1, self.wage, False, {}

    def is_truncated(self, state, params):
        return state >= 8

    def action_space(self, params):
        return spaces.Discrete(2)


@pytest.mark.slow
def test_run_of_environment_instance_resumes_and_evaluates_with_instance(tmp_path):
    """The return is 8 x 10 with this instance, and would be 8 with the default arguments of its class."""
    folder = tmp_path / "run"
    run = fit(folder, env=RewardEnv(10.0), eval_every=0, total_steps=640)
    uses = {
        "go on": lambda **env: fit(folder, resume=str(folder), total_steps=1280, **env),
        "load": lambda **env: jaxrl_fast.load(folder, **env),
        "play": lambda **env: jaxrl_fast.Run.open(folder, **env).evaluate(episodes=8),
    }
    for use in uses.values():
        with pytest.raises(
            ValueError, match=rf"^{re.escape(str(folder))}: was trained on an environment instance "
        ) as caught:
            use()
        assert "\n" not in str(caught.value) and "RewardEnv" in str(caught.value)
    assert uses["load"](env=RewardEnv(10.0)).policy([0.0]) in (0, 1)
    assert uses["play"](env=RewardEnv(10.0))["eval_return_mean"] == run.evaluate(episodes=8)["eval_return_mean"] == 80
    for total_steps, given in ((1280, {"resume": str(folder), "env": RewardEnv(10.0)}), (1920, {"resume": run})):
        longer = fit(folder, total_steps=total_steps, **given)
        assert longer.summary["env_steps"] == total_steps
    assert {r["return_mean"] for r in run.metrics} == {80.0} and run.metrics[-1]["env_steps"] == 1920
    with pytest.raises(ValueError, match="was trained on an environment instance "):
        uses["load"]()


def test_resume_rejects_folder_that_is_not_a_run(tmp_path, capsys):
    assert train.main(["--resume", str(tmp_path)]) == 2
    assert f"error: resume {tmp_path}: is not a run directory (no config.yaml)" in capsys.readouterr().err
    (tmp_path / "first_run").mkdir()
    (tmp_path / "first_run" / "config.yaml").write_text("algo: ppo\n")
    assert train.main(["--resume", str(tmp_path / "frist_run")]) == 2
    assert f"did you mean {tmp_path / 'first_run'}?" in capsys.readouterr().err


def test_rejected_resume_releases_lock(tmp_path, unbroken):
    """A notebook keeps the exception, and with its traceback all local variables."""
    folder = shutil.copytree(unbroken("pqn"), tmp_path / "run")
    with pytest.raises(ValueError, match="the 1600 steps that this run has made") as refusal:
        fit(folder, resume=str(folder), total_steps=64)
    locks.Lock(folder).release()
    assert refusal.value.__traceback__ is not None


@pytest.mark.slow
def test_resume_rejects_run_that_is_locked_by_other_process(tmp_path, unbroken, capsys):
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), folder)
    code = f"""
from pathlib import Path
from jaxrl_fast.utils import locks
ours = locks.Lock(Path({str(folder)!r}))
print("mine", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as other:
        other.stdout.readline()
        assert train.main(["--resume", str(folder)]) == 2
        said = f"error: resume: another process is writing to the run, got {folder}; wait for its end\n"
        assert capsys.readouterr().err == said
        other.kill()  # which releases its lock
    fit(folder, resume=str(folder))
    fit(folder, resume=str(folder))  # this process has released the lock, too


def test_lock_warns_on_file_system_without_locks(tmp_path, monkeypatch, capsys):
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        locks.Lock(tmp_path).release()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"the file system of {tmp_path} has no locks" in said
    ours = locks.Lock(tmp_path)
    with pytest.raises(BlockingIOError):
        locks.Lock(tmp_path)
    ours.release()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_run_continues_when_checkpoints_cannot_be_written(tmp_path, monkeypatch, capsys):
    """Every checkpoint but the first fails. The first is kept, and the run resumes from it."""
    folder, write, seen = tmp_path / "run", checkpoint.finish, []

    def no_room(path, arrays, manifest):
        seen.append(path)
        if len(seen) > 1:
            raise OSError(28, "No space left on device")
        write(path, arrays, manifest)

    monkeypatch.setattr(checkpoint_writer, "finish", no_room)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    run = fit(folder)
    err = capsys.readouterr().err
    assert run.summary["status"] == "done" and len(seen) > 2 and run.summary["num_checkpoints"] == 1
    assert f"a checkpoint could not be written (No space left on device); the last one is {seen[0]}" in err
    assert checkpoint.folders(folder / paths.CHECKPOINTS) == seen[:1]
    monkeypatch.setattr(checkpoint_writer, "finish", write)
    complete = records(folder)
    again = fit(folder, resume=str(folder))  # from the first checkpoint
    assert records(folder) == complete and again.summary["final_return_mean"] == run.summary["final_return_mean"]


def test_new_run_prints_one_line_when_config_cannot_be_written(tmp_path, monkeypatch, capsys):
    """The disk is full before the first file is written."""

    def no_room(path, text, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_room)
    assert train.main(line_of("pqn", tmp_path / "run")) == 1
    err = capsys.readouterr().err
    assert err == f"error: {tmp_path / 'run' / 'config.yaml'}: cannot be written (No space left on device)\n"


def line_of(algo, folder):
    """Return the command line of the same run."""
    line = f"{algo} --run-dir {folder} --rollout-length 8 --hidden-sizes 8 --loggers none"
    values = {name: value for name, value in SHORT.items() if name != "loggers"}
    return [
        *line.split(),
        *(part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", f"{value}")),
    ]


class At700:
    """A callback that calls a function of the run's folder once, at step 700."""

    def __init__(self, act):
        self.act = act

    def on_record(self, records, state):
        if records[0]["env_steps"] >= 700 and self.act:
            act, self.act = self.act, None
            act(state.folder)


def move(folder):
    folder.rename(folder.with_name("moved"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lose", "which"),
    [
        (shutil.rmtree, "run: the folder was deleted or moved; it is written again, without older checkpoints"),
        (move, "run: the folder was deleted or moved; it is written again, without older checkpoints"),
        (lambda folder: (folder / "config.yaml").unlink(), "run/config.yaml: was deleted or moved; written again"),
        (lambda folder: move(folder / "metrics.jsonl"), "run/metrics.jsonl: was deleted or moved; written again"),
    ],
)
def test_lost_files_are_written_again_at_next_save(lose, which, tmp_path, unbroken, capsys):
    """All records and the configuration are there, so the run resumes. So does a folder that was moved."""
    folder, moved = tmp_path / "run", tmp_path / "moved"
    fit(folder, callbacks=[At700(lose)], loggers=["tensorboard"])
    assert capsys.readouterr().err == f"warning: {tmp_path}/{which}\n"
    same(folder, unbroken("pqn"))
    assert [*folder.glob("events*")]
    assert fit(folder, resume=str(folder), total_steps=1800).summary["status"] == "done"
    if moved.exists():
        fit(folder, resume=str(moved))
        same(moved, unbroken("pqn"))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["host", "disk"])
def test_run_ends_if_files_of_replay_are_moved(storage, tmp_path):
    """Moved back, it resumes."""
    folder, replay = tmp_path / "run", dict(size=512, storage=storage)
    with pytest.raises(FileNotFoundError) as ended:
        fit(folder, "dqn", replay=replay, eval_every=0, callbacks=[At700(move)])
    assert not folder.exists()
    first = "; the run's folder was deleted or moved: move it back, then continue from the last checkpoint with"
    assert remedy_of(ended.value) == f"{first} python -m jaxrl_fast.train --resume {folder}"
    (tmp_path / "moved").rename(folder)
    assert fit(folder, resume=str(folder)).summary["status"] == "done"


FULL_DISK = """
import resource, signal, sys
from jaxrl_fast import train
from jaxrl_fast.config import cli
from jaxrl_fast.config import paths
from jaxrl_fast.runs import checkpoint, checkpoint_writer
write, left = checkpoint.finish, [2]

def write_then_no_room(*args):  # after the second checkpoint no file may grow beyond what metrics.jsonl has by then
    write(*args)
    left[0] -= 1
    if left[0] == 0:
        size = (args[0].parents[1] / paths.METRICS).stat().st_size + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

checkpoint_writer.finish = write_then_no_room
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.stdout = sys.stderr = open("/dev/full", "w")
cli.start(lambda: train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full exists on Linux only")
def test_run_on_full_disk_resumes_bit_identically(tmp_path, unbroken):
    """Checkpoints, metrics, curve, summary and output cannot be written. The run resumes from the existing files."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), tmp_path / "whole")
    command = [sys.executable, "-c", FULL_DISK, *line_of("pqn", folder)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert len(checkpoint.folders(folder / paths.CHECKPOINTS)) == 2
    assert all(json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines())
    assert fit(folder, resume=str(folder)).summary["status"] == "done"
    same(folder, tmp_path / "whole")


@pytest.mark.slow
def test_replay_on_full_disk_ends_run_with_its_file_and_how_to_resume(tmp_path, monkeypatch):
    """A row that the disk has no room for cannot be learned from. The last checkpoint and its files stay intact."""
    folder, whole, append, left = tmp_path / "run", tmp_path / "whole", journal.Segment.append, [8]
    options = dict(replay=dict(size=512, storage="disk"), eval_every=0, devices=1)
    fit(whole, "dqn", **options)

    def no_room(segment, record):
        left[0] -= 1
        monkeypatch.setattr(journal, "_write", write if left[0] > 0 else fail)
        append(segment, record)

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    write = journal._write
    monkeypatch.setattr(journal.Segment, "append", no_room)
    with pytest.raises(OSError, match=rf"No space left on device: '{folder}/replay/\d+.bin'") as ended:
        fit(folder, "dqn", **options)
    command = f"python -m jaxrl_fast.train --resume {folder}"
    assert remedy_of(ended.value) == f"; make space, then continue from the last checkpoint with {command}"
    assert read_summary(folder)["status"] == "failed" and checkpoint.folders(folder / paths.CHECKPOINTS)
    monkeypatch.undo()
    assert fit(folder, resume=str(folder)).summary["status"] == "done"
    same(folder, whole)


NO_RIGHT = """
import sys
from jaxrl_fast import train
from jaxrl_fast.config import cli
from jaxrl_fast.runs import checkpoint, checkpoint_writer
write, left = checkpoint.finish, [2]

def write_then_lose_the_right(*args):  # after the second checkpoint, to both folders
    write(*args)
    left[0] -= 1
    if left[0] == 0:
        for folder in (args[0].parent, args[0].parents[1]):
            folder.chmod(0o500)

checkpoint_writer.finish = write_then_lose_the_right
cli.start(lambda: train.main(sys.argv[1:]))
"""
DROP_RIGHT = """
import ctypes, os, sys
failed = ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE of linux/prctl.h, capability.h
if failed and os.geteuid() == 0:
    sys.exit(77)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="dropping the capability of root needs Linux")
def test_run_that_loses_write_permission_resumes_bit_identically(tmp_path, unbroken):
    """If root runs the test, it drops the capability to override file permissions."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken("pqn"), tmp_path / "whole")
    command = [sys.executable, "-c", DROP_RIGHT, "-c", NO_RIGHT, *line_of("pqn", folder)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    if ended.returncode == 77:
        pytest.skip("root cannot drop CAP_DAC_OVERRIDE here")
    for locked in (folder, folder / paths.CHECKPOINTS):
        assert locked.stat().st_mode & 0o777 == 0o500
        locked.chmod(0o700)
    saved = checkpoint.folders(folder / paths.CHECKPOINTS)
    assert ended.returncode == 1 and len(saved) == 2, ended.stderr
    assert ended.stderr.endswith(f"error: {folder}: its last checkpoint and summary.json could not be written\n")
    assert f"a checkpoint could not be written (Permission denied); the last one is {saved[-1]}" in ended.stderr
    assert fit(folder, resume=str(folder)).summary["status"] == "done"
    same(folder, tmp_path / "whole")


def test_json_lines_writes_pending_lines_after_full_disk(tmp_path, monkeypatch):
    lines = jsonl.JsonLines(tmp_path / "metrics.jsonl")
    lines.write([{"a": 1}])

    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            return self.file.write(content[:3])  # the disk accepts only a part

    real, lines.file = lines.file, Full(lines.file)
    with pytest.raises(OSError, match="No space left"):
        lines.write([{"a": 2}])
    assert (tmp_path / "metrics.jsonl").read_text() == '{"a": 1}\n'
    lines.file = real
    lines.write([{"a": 3}])
    lines.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n'


@pytest.mark.parametrize("name", mark_slow(["ppo", "dqn", "pqn"], "ppo", "dqn"))
def test_env_steps_are_counted_beyond_2_to_the_31(name, tmp_path, monkeypatch):
    """Edit the checkpoint of the first update, so that it claims to be the last one before 2^31 steps."""
    folder = tmp_path / "run"
    stop_after(monkeypatch, 1)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    few = dict(eval_every=0, save_every=0, log_every=1, total_steps=2**31 + 640)
    first = fit(folder, name, **few)
    each = first.summary["env_steps"] // first.summary["num_updates"]
    saved, _ = checkpoint.newest(folder / paths.CHECKPOINTS)
    late = 2**31 // each
    for counter in ("num_updates", "agent/num_updates"):
        if counter in saved.arrays:
            saved.arrays[counter] = np.array(late, np.int32)
    numbers = saved.manifest["host"]["scores"]
    recorded = late - saved.arrays["ledger/train_time_s"].shape[1]  # without updates whose records are not written yet
    numbers |= {"updates": late, "recorded": recorded, "valid_steps": [recorded * each]}
    saved.manifest["env_steps"] = late * each
    checkpoint.write(saved.folder.with_name(f"step-{late * each:012d}"), saved.arrays, saved.manifest)
    fit(folder, resume=str(folder))
    written = [r for r in records(folder) if r["env_steps"] > 2**31]
    assert [r["env_steps"] for r in written] == [each * (late + i + 1) for i in range(-(-640 // each))]
    assert all(r["valid_steps"] > 2**31 - each for r in written)
    if name == "dqn":
        assert written[-1]["gradient_steps"] == each * 0.25  # unchanged per update
    assert json.loads((folder / "summary.json").read_text())["env_steps"] == written[-1]["env_steps"]


# Numbers that are not finite


@pytest.mark.slow
def test_divergence_stops_run_with_one_line_error(tmp_path, capsys):
    """Adam's step size equals the learning rate, so parameters of 1e30 overflow at once."""
    folder = tmp_path / "run"
    command = "pqn --num-envs 8 --total-steps 20k --rollout-length 8 --hidden-sizes 8 --loggers none"
    assert train.main([*command.split(), "--learning-rate", "1e30", "--run-dir", str(folder)]) == 1
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("error: seed 0: ") and "is not finite at step" in err and "checkpoint" in err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "diverged" and summary["diverged_at_per_seed"][0] > 0
    assert summary["final_return_mean"] is None and summary["failure"] in err
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))
    with pytest.raises(FloatingPointError, match="is not finite"):
        jaxrl_fast.fit(algo="pqn", learning_rate=1e30, run_dir=str(tmp_path / "python"), log_level="quiet")


class NanRewardEnv(RewardEnv):
    """The reward is NaN after some steps."""

    def step_env(self, key, state, action, params):
        obs, state, wage, *rest = super().step_env(key, state, action, params)
        return obs, state, jnp.where(state == 5, jnp.nan, wage), *rest


class NanObsEnv(RewardEnv):
    """Observations are NaN after the reset."""

    def step_env(self, key, state, action, params):
        obs, *rest = super().step_env(key, state, action, params)
        return obs / 0, *rest


@pytest.mark.slow
@pytest.mark.parametrize(("env", "num_seeds"), [(NanRewardEnv, 1), (NanObsEnv, 2)])
def test_nonfinite_environment_output_is_distinguished_from_divergence(env, num_seeds, tmp_path):
    """The message names the environment as the cause, and does not advise a resume without a checkpoint."""
    given = dict(algo="ppo", env=env, num_envs=4, num_seeds=num_seeds, total_steps=640, log_level="quiet")
    with pytest.raises(FloatingPointError, match=r"there is no checkpoint; .* returns NaN or infinite observations"):
        jaxrl_fast.fit(**given, run_dir=str(tmp_path / "run"), rollout_length=16, hidden_sizes=(8,))
    with pytest.raises(ValueError, match=r"has no checkpoint; it diverged before the first checkpoint"):
        jaxrl_fast.load(str(tmp_path / "run"))


@pytest.mark.slow
def test_other_seeds_continue_when_one_diverges(tmp_path, monkeypatch, capsys):
    """Seed 1 of five has a NaN loss; the other seeds end with the same returns as without it."""
    add = tracker.MetricsTracker.add

    def poison(self, rows):
        rows = {k: np.array(x) for k, x in rows.items()}
        if self.updates >= 10 and len(self.labels) == 5:
            rows["td_loss_sum" if "td_loss_sum" in rows else "td_loss"][1] = np.nan
        return add(self, rows)

    well = fit(tmp_path / "well", "seeds")
    monkeypatch.setattr(tracker.MetricsTracker, "add", poison)
    run = fit(tmp_path / "run", "seeds", on_nonfinite="continue")
    assert "seed 1: td_loss is not finite at step" in capsys.readouterr().err
    assert [d is None for d in run.summary["diverged_at_per_seed"]] == [True, False, True, True, True]
    final_returns, expected = run.summary["final_return_per_seed"], well.summary["final_return_per_seed"]
    assert final_returns == [expected[0], None, *expected[2:]]
    assert run.summary["final_return_mean"] == pytest.approx(np.mean([final_returns[0], *final_returns[2:]]))


@pytest.mark.slow
def test_diverged_seeds_do_not_block_stop_when_solved(tmp_path, monkeypatch, capsys):
    """Two of five seeds have a NaN loss in one chunk. Each is reported, and the run waits for the other seeds."""
    add = tracker.MetricsTracker.add

    def poison(self, rows):
        rows = {k: np.array(x) for k, x in rows.items()}
        if self.updates >= 10 and len(self.labels) == 5:
            rows["td_loss_sum"][[1, 3], -1] = np.nan
            rows["return_sum"][[1, 3]] = 0
        return add(self, rows)

    monkeypatch.setattr(tracker.MetricsTracker, "add", poison)
    options = dict(total_steps=6400, solved_threshold=5.0, stop_when_solved=True, log_every=256, eval_every=0)
    summary = fit(tmp_path / "run", "seeds", on_nonfinite="continue", **options).summary
    err = capsys.readouterr().err
    assert all(f"seed {i}: td_loss is not finite at step" in err for i in (1, 3))
    last = max(
        solved or lost for solved, lost in zip(summary["steps_to_solve_per_seed"], summary["diverged_at_per_seed"])
    )
    assert summary["env_steps"] == -(-last // 256) * 256 + 256 < 6400


def test_nonfinite_return_does_not_prevent_checkpoint():
    """Two of three seeds have returns that JSON cannot store; all seeds share one manifest."""
    made = lambda: tracker.MetricsTracker([{"seed": 0}, {"seed": 1}, {"seed": 2}], 1, 10, 10, None)
    given, again = made(), made()
    for window, total in zip(given.windows, (7.0, float("nan"), float("-inf"))):
        window.add(2, total, 10, 5)
    host_part, arrays = given.state_dict()
    again.restore(json.loads(json.dumps(host_part, allow_nan=False)), arrays)
    np.testing.assert_array_equal([w.mean for w in again.windows], [3.5, float("nan"), float("-inf")])


def test_nonfinite_parameters_are_never_saved(tmp_path, monkeypatch):
    """The loss stays finite."""
    flatten = checkpoint.flatten

    def poisoned(*given):
        arrays, kinds = flatten(*given)
        name = next(k for k in arrays if k.startswith("agent/") and "params" in k)
        if int(arrays["num_updates"]) >= 10:
            arrays[name].flat[0] = np.inf
        return arrays, kinds

    monkeypatch.setattr(checkpoint, "flatten", poisoned)
    with pytest.raises(
        FloatingPointError,
        match=r"seed 0: agent/params/\S+ of its state is not finite at step 640; the last good .*320",
    ):
        fit(tmp_path / "run")
    assert [f.name[-4:] for f in checkpoint.folders(tmp_path / "run" / paths.CHECKPOINTS)] == ["0320"]


@pytest.mark.slow
def test_nonfinite_replay_content_does_not_prevent_checkpoint(tmp_path, monkeypatch):
    """The replay buffer holds a NaN observation that has not been sampled."""
    flatten = checkpoint.flatten

    def poisoned(*given):
        arrays, kinds = flatten(*given)
        arrays[next(k for k in arrays if k.startswith("agent/replay") and arrays[k].dtype.kind == "f")].flat[0] = np.nan
        return arrays, kinds

    monkeypatch.setattr(checkpoint, "flatten", poisoned)
    fit(tmp_path / "run", "dqn", total_steps=320, eval_every=0)
    assert checkpoint.folders(tmp_path / "run" / paths.CHECKPOINTS)


@pytest.mark.slow
def test_nonfinite_parameters_stop_run_after_chunk(tmp_path, monkeypatch):
    """The parameters are checked before a loss or a checkpoint is affected."""
    train_step = loop.train_step

    def poisoned(env, agent, state):
        state, metrics = train_step(env, agent, state)
        spoil = lambda x: jnp.where(state.num_updates == 4, jnp.inf, x)
        return state._replace(agent=state.agent._replace(params=jax.tree.map(spoil, state.agent.params))), metrics

    monkeypatch.setattr(loop, "train_step", poisoned)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    with pytest.raises(FloatingPointError, match=r"^seed 0: a parameter is not finite at step 256; there is no"):
        fit(tmp_path / "run")


def test_saved_metrics_state_does_not_change_while_training_continues(tmp_path):
    """The writer thread reads the state while training continues."""
    results = tracker.MetricsTracker([{"seed": 0}], 2, 10, 10, None)
    rows = {k: np.ones((1, 3)) for k in ("episodes", "valid_steps", "return_sum", "return_min", "return_max")}
    rows |= {k: np.ones((1, 3)) for k in ("length_sum", "longest_episode", *tracker.CLOCKS)}
    results.add(rows)
    list(results.records())
    host_numbers, arrays = results.state_dict()
    before = json.dumps(host_numbers), {k: x.copy() for k, x in arrays.items()}
    results.evaluations.append({"env_steps": 1, "eval_return_mean": 1.0})
    results.add(rows)
    list(results.records(everything=True))
    assert json.dumps(host_numbers) == before[0]
    assert all(np.array_equal(x, before[1][k]) for k, x in arrays.items())


# Reproducibility


@pytest.mark.parametrize("name", mark_slow(["ppo", "dqn", "shards"], "ppo", "dqn", "shards"))
def test_the_same_seed_gives_the_same_bits_in_another_process(name, tmp_path, unbroken):
    given = {**SHORT, **RUNS[name], "run_dir": str(tmp_path / name)}
    code = f"import jaxrl_fast; jaxrl_fast.fit(**{given!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    same(tmp_path / name, unbroken(name))


# SIGKILL


SLOWLY = """
import sys, time
import jaxrl_fast
from jaxrl_fast.training import dispatcher, trainer

process_chunk, dispatcher.CHUNK_S = trainer.Trainer.process_chunk, 0.0

def process_slowly(self, done):
    process_chunk(self, done)
    print("update", self.finished, flush=True)
    time.sleep(0.03)

trainer.Trainer.process_chunk = process_slowly
jaxrl_fast.fit(**{"log_level": "quiet"} | eval(sys.argv[1]))
"""


@pytest.mark.slow
def test_killed_run_resumes_bit_identically(tmp_path, unbroken):
    """Kill a subprocess three times with SIGKILL, at random moments of updates, evaluations and saves."""
    folder, chance, seen = tmp_path / "run", np.random.default_rng(0), []
    options = RUNS["pqn"] | SHORT | dict(run_dir=str(folder))
    for _ in range(3):
        given = dict(resume=str(folder)) if folder.exists() else options
        command = [sys.executable, "-c", SLOWLY, repr(given)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True) as process:
            for _ in range(chance.integers(6, 9)):
                line = process.stdout.readline()
            time.sleep(chance.uniform(0, 0.03))
            os.kill(process.pid, signal.SIGKILL)
        seen.append(int(line.removeprefix("update")))
    assert 25 > seen[2] > seen[1] > seen[0] > 0
    fit(folder, resume=str(folder))
    same(folder, unbroken("pqn"))
