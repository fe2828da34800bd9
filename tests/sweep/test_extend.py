"""Test extended sweeps: existing runs are kept, new ones are trained once, and sweep.yaml has the whole grid."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import jaxrl_fast
from jaxrl_fast.runs import files
from jaxrl_fast.sweep import __main__, directory, extend, grid, prepare, slurm, worker
from jaxrl_fast.sweep import report as sweep_report
from jaxrl_fast.sweep import table as sweep_table
from jaxrl_fast.training import trainer
from jaxrl_fast.utils import locks
from tests.helpers.sweeps import TINY, Pretence

ROOT = Path(__file__).parents[2]
TIMES = ("wall_time_s", "train_time_s", "env_steps_per_s")


def planned(line):
    """Return the sweep of a command line, read from its folder."""
    asked = grid.from_command_line(line.split())
    groups = dict(prepare._with_names(asked.columns, list(asked.groups)))
    with tempfile.TemporaryDirectory() as folder:
        prepare._write(directory.SweepPlan(Path(folder), groups, asked.columns, asked.own.scale, asked.base_num_envs))
        return directory.read_plan(Path(folder))


def extended(sweep, line):
    """Return the sweep and its new groups after `--resume` with these options."""
    asked = grid.from_command_line(["--resume", "x", *line.split()])
    return extend.extend(sweep, asked.added, asked.split)


def trainings(groups):
    """Return (num_envs, learning_rate, seed) of each training."""
    singles = (grid.part(group, [member]).settings for group in groups for member in group.members)
    return [(s.options.num_envs, s.agent.learning_rate, s.options.seed) for s in singles]


def content(folder):
    """Return the content of every file of the runs of a sweep."""
    return {p: p.read_bytes() for p in sorted(folder.glob("0*/**/*")) if p.is_file()}


# New trainings of an extension


def test_new_seeds_form_one_group_per_program():
    sweep = planned("ppo --num-envs 2,4 --learning-rate 1e-3,1e-2 --seed 0,1")
    longer, new = extended(sweep, "--seed 2,3")
    assert longer == sweep
    assert [len(group.members) for group in new] == [4, 4]
    assert trainings(new) == [(n, rate, seed) for n in (2, 4) for rate in (1e-3, 1e-2) for seed in (2, 3)]


def test_several_options_add_every_missing_combination():
    sweep = planned("ppo --num-envs 2,4 --seed 0")
    longer, new = extended(sweep, "--learning-rate 1e-3 --seed 1")
    assert longer.columns == ("num_envs", "learning_rate")
    whole = {(n, rate, seed) for n in (2, 4) for rate in (2.5e-4, 1e-3) for seed in (0, 1)}
    assert {*trainings(sweep.groups.values()), *trainings(new)} == whole
    assert len(trainings(new)) == 6


def test_new_value_of_program_option_is_trained_with_all_seeds():
    _, new = extended(planned("ppo --num-envs 2,4 --seed 0..2"), "--num-envs 8")
    assert [(group.settings.options.num_envs, len(group.members)) for group in new] == [(8, 3)]


@pytest.mark.parametrize("line", ["--seed 1", "--num-envs 4,2 --seed 0..1", "--env CartPole-v1", "--total-steps 500k"])
def test_existing_values_add_no_group(line):
    sweep = planned("ppo --env gymnax/CartPole-v1 --num-envs 2,4 --seed 0,1")
    assert extended(sweep, line) == (sweep, [])


def test_repeated_extensions_keep_grid_complete():
    sweep = planned("ppo --seed 0,1")
    for i, line in enumerate(("--seed 2", "--gamma 0.9", "--seed 3 --num-envs 8")):
        longer, new = extended(sweep, line)
        sweep = longer._replace(groups={**longer.groups, **{f"{i}{j}": group for j, group in enumerate(new)}})
    assert sum(len(group.members) for group in sweep.groups.values()) == 4 * 2 * 2


def test_new_seeds_of_scaled_sweep_have_scaled_values():
    sweep = planned("--config ppo_cartpole --num-envs 4,64 --seed 0 --scale learning-rate-sqrt")
    _, new = extended(sweep, "--seed 1")
    rates = lambda groups: [rate for _, rate, _ in trainings(groups)]
    assert rates(new) == rates(sweep.groups.values()) and len(set(rates(new))) == 2
    assert not any(member.values for group in new for member in group.members)  # as in the old groups


def test_new_environment_has_no_solved_threshold():
    _, (new,) = extended(planned("--config ppo_cartpole --seed 0,1"), "--env Acrobot-v1")
    assert new.settings.options.solved_threshold is None and len(new.members) == 2


@pytest.mark.parametrize("threshold", ["", "--solved-threshold 100", "--solved-threshold 100,200"])
def test_new_environment_is_trained_once_when_thresholds_differ(threshold):
    sweep = planned(f"--config ppo_cartpole --env CartPole-v1,Acrobot-v1 --seed 0 {threshold}")
    of = lambda groups: [(g.settings.options.env, g.settings.options.solved_threshold) for g in groups]
    old = of(sweep.groups.values())
    thresholds = [100.0, 200.0] if "," in threshold else [None]
    assert of(extended(sweep, "--env MountainCar-v0")[1]) == [("MountainCar-v0", value) for value in thresholds]
    _, both = extended(sweep, "--env MountainCar-v0 --seed 1")
    expected = [*old, *(("MountainCar-v0", value) for value in thresholds for _ in range(2))]
    assert sorted(of([grid.part(g, [m]) for g in both for m in g.members]), key=str) == sorted(expected, key=str)
    assert not extended(sweep, "--env CartPole-v1,Acrobot-v1")[1]


def test_new_part_is_trained_with_the_options_that_parts_share():
    longer, new = extended(planned("ppo --memory gru --memory.size 64 --seed 0,1"), "--memory lstm --seed 2")
    assert longer.columns == ("memory",)
    found = [(g.settings.value("memory"), g.settings.value("memory.size"), len(g.members)) for g in new]
    assert found == [("gru", 64, 1), ("lstm", 64, 3)]
    _, (none,) = extended(planned("ppo --memory gru,lstm --memory.size 64 --seed 0"), "--memory none")
    assert none.settings.value("memory") == "none" and none.settings.value("memory.size") is None


def test_more_total_steps_apply_to_old_and_new_trainings():
    longer, new = extended(planned("ppo --total-steps 1k --seed 0,1"), "--total-steps 2k --seed 2")
    assert {group.settings.options.total_steps for group in (*longer.groups.values(), *new)} == {2000}
    assert "total_steps" not in longer.columns


@pytest.mark.parametrize("status", ["done", "diverged"])
def test_group_is_unfinished_when_lengthened_or_diverged(status):
    group = next(iter(planned("ppo --total-steps 512 --seed 0").groups.values()))
    summary = {"status": status, "env_steps": 512, "steps_to_solve_per_seed": [None], "diverged_at_per_seed": [None]}
    assert directory.is_done(summary, group) == (status == "done")
    assert not directory.is_done(summary, extend._with_length(group, 513))


def test_group_stopping_when_solved_is_done_if_all_seeds_solved_or_diverged():
    line = "ppo --total-steps 512 --seed 0,1 --solved-threshold 1 --stop-when-solved"
    group = next(iter(planned(line).groups.values()))
    summary = {"status": "done", "env_steps": 64, "steps_to_solve_per_seed": [64, None]}
    assert directory.is_done(summary | {"diverged_at_per_seed": [None, 32]}, group)
    assert not directory.is_done(summary | {"diverged_at_per_seed": [None, None]}, group)


# Rejected extensions

CANNOT = "would change the existing runs of the sweep"
REFUSED = [
    ("--eval-every 100", [f"eval_every: {CANNOT}, got 100; start another sweep for it"]),
    ("--solved-threshold 100", [f"solved_threshold: {CANNOT}, got 100.0"]),
    ("--loggers tensorboard", [f"loggers: {CANNOT}, got tensorboard"]),
    ("--num-seeds 4", [f"num_seeds: {CANNOT}, got 4; give seed 3,4 for more seeds"]),
    (
        "--env-option max_steps_in_episode=3",
        [f"env_options: {CANNOT}, got {{'max_steps_in_episode': '3'}}; start another sweep for it\n"],
    ),
    ("--total-steps 1k,2k", ["total_steps: takes one value, got 1000, 2000"]),
    ("--total-steps 100", ["total_steps: must be at least the 512 steps of the sweep, got 100"]),
    ("--total-steps 1e12", ["num_envs 2: total_steps: must be at most 2147483647 updates"]),
    ("--num-envs auto", ["num_envs: must be a number to extend a sweep, got auto; give the number"]),
    ("--seed 0..20k", ["seed: has at most 10000 values"]),
    ("--seed 0..5k --gamma 0.9", ["a sweep has at most 10000 trainings, got 30006; give fewer values"]),
    ("--num-minibatches 3", ["num_minibatches 3: num_minibatches: must divide"]),
    (
        "--memory.size 8",
        ["memory.size: memory none has no such option, got 8; use memory gru, lstm, lru or MODULE:CLASS\n"],
    ),
    (
        "--memory gru --memory.size 8",
        ["memory.size: not every run of the sweep has this option, got 8; start another sweep for it\n"],
    ),
    ("--scale minibatches", ["scale: cannot be combined with resume"]),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with two untrained sweeps, one of them with --scale."""
    folder = tmp_path_factory.mktemp("place")
    for name, more in (("a", "--num-envs 2,4,8"), ("scaled", "--num-envs 2,4 --scale learning-rate-sqrt")):
        prepare.prepare(grid.from_command_line(f"{TINY} {more} --seed 0 --sweep-dir {folder / name}".split()))
    return folder


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[line for line, _ in REFUSED])
def test_invalid_extension_prints_one_line_and_writes_nothing(line, words, place, capsys):
    before = {p: p.is_file() and p.read_bytes() for p in place.rglob("*")}
    assert __main__.main(["--resume", str(place / "a"), *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert {p: p.is_file() and p.read_bytes() for p in place.rglob("*")} == before


@pytest.mark.parametrize("line", ["--num-envs 16", "--learning-rate 0.1"])
def test_extension_rejects_scaled_options(line, place, capsys):
    assert __main__.main(["--resume", str(place / "scaled"), *line.split()]) == 2
    assert "cannot extend a sweep with scale learning-rate-sqrt, got " in capsys.readouterr().err


def test_extension_rejects_total_steps_when_runs_differ_in_length():
    with pytest.raises(ValueError, match=r"^total_steps: differs between the runs of this sweep, got 3000"):
        extended(planned("ppo --total-steps 1k,2k --seed 0"), "--total-steps 3k")


def test_python_extension_rejects_with_same_message(place):
    with pytest.raises(ValueError, match=r"^eval_every: would change the existing runs of the sweep, got 100"):
        jaxrl_fast.sweep(resume=place / "a", eval_every=100)


# The folder


@pytest.fixture
def finished_sweep(monkeypatch, tmp_path):
    """Return the folder of a sweep with two finished groups. Training is replaced by `Pretence`."""
    monkeypatch.setattr(trainer, "execute", Pretence.execute)
    monkeypatch.setattr(sweep_report, "figures_of", lambda *_: {})
    monkeypatch.setattr(Pretence, "ran", [])
    folder = tmp_path / "sweep"
    assert __main__.main(f"{TINY} --num-envs 2,4 --seed 0,1 --sweep-dir {folder}".split()) == 0
    Pretence.ran.clear()
    return folder


def resume(folder, line=""):
    return __main__.main(["--resume", str(folder), "--log-level", "quiet", *line.split()])


@pytest.mark.slow
def test_extension_runs_new_groups_only_and_table_has_all(finished_sweep):
    before = content(finished_sweep)
    assert resume(finished_sweep, "--seed 2") == 0
    assert Pretence.ran == ["03_num_envs-2", "04_num_envs-4"]
    after = content(finished_sweep)
    assert {path: after[path] for path in before} == before
    rows = sweep_table.table_rows(directory.read_plan(finished_sweep))
    assert [(row["num_envs"], row["seed"]) for row in rows] == [(2, 0), (2, 1), (4, 0), (4, 1), (2, 2), (4, 2)]
    assert len((finished_sweep / "results.csv").read_text().splitlines()) == 7
    assert resume(finished_sweep) == resume(finished_sweep, "--seed 2") == 0 and len(Pretence.ran) == 2


@pytest.mark.slow
def test_python_sweep_extends_existing_sweep(finished_sweep):
    swept = jaxrl_fast.sweep(resume=finished_sweep, seed=[0, 5], learning_rate=[1e-2], log_level="quiet")
    assert len(swept.results) == 2 * 2 * 3 and {row["learning_rate"] for row in swept.results} == {2.5e-4, 1e-2}


@pytest.mark.slow
def test_command_of_whole_grid_resumes_extended_sweep(finished_sweep, capsys):
    assert resume(finished_sweep, "--seed 2 --learning-rate 1e-2") == 0
    line = f"{TINY} --num-envs 2,4 --sweep-dir {finished_sweep} --learning-rate 2.5e-4,1e-2 --seed".split()
    num_ran = len(Pretence.ran)
    assert __main__.main([*line, "0..2"]) == 0 and len(Pretence.ran) == num_ran
    assert __main__.main([*line, "0..1"]) == 2
    assert "holds a different sweep" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupted_extension_resumes(finished_sweep, monkeypatch):
    """Stop the first new group; the same command then trains both new groups."""
    with monkeypatch.context() as patched:
        patched.setattr(Pretence, "behave", staticmethod(lambda plan: "stopped"))
        assert resume(finished_sweep, "--seed 2,3") == 128 + signal.SIGTERM
    plan = directory.read_plan(finished_sweep)
    assert directory.unfinished(plan) == ["03_num_envs-2", "04_num_envs-4"]
    assert resume(finished_sweep, "--seed 2,3") == 0
    assert Pretence.ran == ["03_num_envs-2", "03_num_envs-2", "04_num_envs-4"]
    assert directory.read_plan(finished_sweep) == plan


@pytest.mark.slow
def test_extension_changes_nothing_when_disk_is_full(finished_sweep, monkeypatch):
    before = (finished_sweep / "sweep.yaml").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            prepare.prepare(grid.from_command_line(["--resume", str(finished_sweep), "--seed", "2"]))
    assert (finished_sweep / "sweep.yaml").read_bytes() == before


@pytest.mark.slow
def test_extension_rejects_running_sweep(finished_sweep, capsys):
    other = locks.Lock(finished_sweep / "01_num_envs-2")
    before = (finished_sweep / "sweep.yaml").read_bytes()
    assert resume(finished_sweep, "--seed 2") == 2
    other.release()
    said = f"resume: another process is writing to the run, got {finished_sweep / '01_num_envs-2'}; wait for its end\n"
    assert capsys.readouterr().err.endswith(said)
    assert (finished_sweep / "sweep.yaml").read_bytes() == before


@pytest.mark.slow
def test_concurrent_extension_is_rejected_without_losing_groups(finished_sweep, monkeypatch, capsys):
    """While the first command validates, another one adds a seed."""
    fitting = prepare._fitting

    def meanwhile(*given):
        monkeypatch.setattr(prepare, "_fitting", fitting)
        prepare.prepare(grid.from_command_line(["--resume", str(finished_sweep), "--seed", "7"]))
        return fitting(*given)

    monkeypatch.setattr(prepare, "_fitting", meanwhile)
    assert resume(finished_sweep, "--seed 2") == 2
    assert "another process has extended the sweep; repeat the command" in capsys.readouterr().err
    assert len(directory.read_plan(finished_sweep).groups) == 4


@pytest.mark.slow
def test_slurm_submits_new_groups_only(finished_sweep, monkeypatch):
    submitted = []
    monkeypatch.setattr(slurm, "check", lambda options: None)
    monkeypatch.setattr(slurm, "submit", lambda folder, names, *_: submitted.append(names) or names)
    assert resume(finished_sweep, "--num-envs 8 --launcher slurm") == 0
    assert submitted == [["03_num_envs-8"]]
    assert worker.run_group_by_name(str(finished_sweep), "03_num_envs-8")[0].startswith("done")


@pytest.mark.slow
def test_extension_rejects_more_steps_without_checkpoint(finished_sweep, capsys):
    """A run whose checkpoints were removed would start again and overwrite its metrics."""
    for name in directory.read_plan(finished_sweep).groups:
        files.write_summary(finished_sweep / name, files.read_summary(finished_sweep / name) | {"num_checkpoints": 0})
    (finished_sweep / "02_num_envs-4" / "metrics.jsonl").write_text("{}\n")
    before = {p: p.read_bytes() for p in finished_sweep.rglob("*") if p.is_file()}
    assert resume(finished_sweep, "--total-steps 1k") == 2
    assert "02_num_envs-4: the run has no checkpoint" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in finished_sweep.rglob("*") if p.is_file()} == before


# Real trainings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a sweep of two members."""
    folder = tmp_path_factory.mktemp("trained") / "a"
    line = f"{TINY} --num-envs 2 --seed 0,1 --learning-rate 1e-3 --sweep-dir {folder}"
    assert __main__.main(line.split()) == 0
    return folder


def without_times(folder):
    return [{k: v for k, v in record.items() if k not in TIMES} for record in files.read_metrics(folder)]


def without_evaluations(folder):
    return [{k: v for k, v in r.items() if not k.startswith("eval_")} for r in files.read_metrics(folder)]


@pytest.mark.slow
def test_new_seeds_equal_separate_sweep_of_these_seeds(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "a")
    before = content(folder)
    assert resume(folder, "--seed 4,5 --workers 2") == 0
    after = content(folder)
    assert {path: after[path] for path in before} == before
    line = f"{TINY} --num-envs 2 --seed 4,5 --learning-rate 1e-3 --sweep-dir {tmp_path / 'alone'}"
    assert __main__.main(line.split()) == 0
    assert without_times(folder / "02") == without_times(tmp_path / "alone" / "01")
    assert (folder / "curves.png").is_file()


@pytest.mark.slow
def test_lengthened_runs_continue_and_interruption_changes_no_record(trained, tmp_path, monkeypatch):
    """Old records stay, except for the evaluation at the old end, and the old table is kept.

    A run that is stopped and resumed has the same records.
    """
    whole, broken = (shutil.copytree(trained, tmp_path / name) for name in ("whole", "broken"))
    before, table = without_evaluations(whole / "01"), (whole / "results.csv").read_bytes()
    assert resume(whole, "--total-steps 1k --seed 2") == 0
    assert without_evaluations(whole / "01")[: len(before)] == before
    assert (whole / "results_512.csv").read_bytes() == table
    assert [r["env_steps"] for r in sweep_table.table_rows(directory.read_plan(whole))] == [1024] * 3
    process_chunk = trainer.Trainer.process_chunk

    def stop(self, done):
        process_chunk(self, done)
        if self.finished >= 20:
            self.stop(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "process_chunk", stop)
        assert resume(broken, "--total-steps 1k --seed 2") == 128 + signal.SIGTERM
    rows = sweep_table.table_rows(directory.read_plan(broken))
    assert [row["status"] for row in rows] == ["stopped", "stopped", "unfinished"]
    assert resume(broken) == 0
    for name in ("01", "02"):
        assert without_times(whole / name) == without_times(broken / name)


@pytest.mark.slow
def test_killed_extension_resumes(trained, tmp_path):
    """The process is killed once sweep.yaml has the new grid, before anything new has been trained."""
    folder = shutil.copytree(trained, tmp_path / "a")
    before = content(folder)
    code = "import os, sys; from jaxrl_fast.sweep import __main__, runner; "
    code += "runner.execute = lambda sweep: os.kill(os.getpid(), 9); __main__.main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "--resume", str(folder), "--total-steps", "1k"]
    killed = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL and content(folder) == before
    rows = sweep_table.table_rows(directory.read_plan(folder))
    assert [(row["status"], row["env_steps"]) for row in rows] == [("unfinished", 512)] * 2
    assert resume(folder) == 0
    assert json.loads((folder / "01" / "summary.json").read_text())["env_steps"] == 1024
