"""Slurm jobs: which are queued again, and how the tasks of a job train one run. Slurm itself is not needed."""

import json
import signal
import sys
import threading
import types

import pytest

from jaxrl_fast.config import presets
from jaxrl_fast.sweep import directory, distributed_job, grid, prepare, slurm, worker
from jaxrl_fast.utils import files
from tests.helpers.sweeps import TINY

TWO_TASKS = "--launcher slurm --slurm-option nodes=2 tasks_per_node=1"


@pytest.fixture
def no_slurm(monkeypatch):
    """Accept the options of Slurm on a machine without it."""
    monkeypatch.setattr(slurm, "check", lambda options: None)


def prepared(line, folder):
    return prepare.prepare(grid.from_command_line(f"{TINY} {line} --sweep-dir {folder}".split()))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 1), ({"nodes": "2"}, 2), ({"tasks_per_node": 4}, 4), ({"nodes": 2, "tasks_per_node": "8"}, 16)],
)
def test_num_tasks_multiplies_nodes_and_tasks_of_each(options, expected):
    assert slurm.num_tasks(options) == expected


@pytest.mark.parametrize(
    ("number", "is_preempted", "again"),
    [
        (None, True, False),
        (signal.SIGUSR2, False, True),  # the time limit, or a job that goes first
        (signal.SIGTERM, True, True),
        (signal.SIGTERM, False, False),  # of a user, by scancel
        (signal.SIGINT, True, False),
    ],
)
def test_job_is_queued_again_only_if_slurm_has_stopped_it(number, is_preempted, again, monkeypatch):
    monkeypatch.setattr(slurm, "is_preempted", lambda: is_preempted)
    queued = []
    before = signal.signal(signal.SIGUSR2, lambda *_: queued.append(True))  # as submitit's handler
    try:
        assert slurm.Job(lambda folder, name: (f"{folder} {name}", number))("folder", "01") == "folder 01"
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert bool(queued) == again


def test_job_that_starts_again_does_the_same():
    train = slurm.trainer_of_groups({"nodes": 2})
    submission = slurm.Job(train).checkpoint("folder", "01")
    assert submission.args == ("folder", "01")
    assert submission.function.train is train is distributed_job.run_group_by_name
    assert slurm.trainer_of_groups({}) is worker.run_group_by_name


@pytest.mark.parametrize(("shown", "expected"), [("None", False), ("2026-11-30T03:42:51", True)])
def test_is_preempted_reads_time_from_scontrol(shown, expected, monkeypatch):
    submitit = pytest.importorskip("submitit")
    said = (
        f"JobId=7 JobState=RUNNING SuspendTime=None PreemptEligibleTime=2026-11-30T03:00:00 PreemptTime={shown} X=1\n"
    )
    asked = []
    monkeypatch.setattr(submitit, "JobEnvironment", lambda: types.SimpleNamespace(job_id="7_0"))
    monkeypatch.setattr(
        slurm.subprocess, "run", lambda words, **_: asked.append(words) or types.SimpleNamespace(stdout=said)
    )
    assert slurm.is_preempted() == expected and asked[0][-1] == "7_0"


def test_job_of_several_tasks_gets_one_run_per_training(tmp_path, no_slurm):
    """Runs that would share a program are separate. Their settings hold their values, and `train` can read them."""
    sweep = prepared(f"--num-envs 2 --seed 3,7 --gamma 0.9,0.99 {TWO_TASKS}", tmp_path / "sweep")
    found = [(g.settings.options.seed, g.settings.agent.gamma) for g in sweep.groups.values()]
    assert found == [(3, 0.9), (7, 0.9), (3, 0.99), (7, 0.99)]
    assert all(len(g.members) == 1 and not g.members[0].values for g in sweep.groups.values())
    assert directory.read_plan(tmp_path / "sweep").groups == sweep.groups


def test_sweep_with_shared_programs_is_refused_for_several_tasks(tmp_path, no_slurm):
    prepared("--num-envs 2 --seed 3,7", tmp_path / "sweep")
    with pytest.raises(ValueError, match=r"a job of several tasks trains one run, .* got 2 tasks; start another sweep"):
        prepare.prepare(grid.from_command_line(["--resume", str(tmp_path / "sweep"), *TWO_TASKS.split()]))


def test_first_task_tells_others_how_to_start(tmp_path, no_slurm, monkeypatch):
    """A task that begins after the first one has made the run's folder still begins the run."""
    sweep = prepared(f"--num-envs 2 --gamma 0.5 {TWO_TASKS}", tmp_path / "sweep")
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    monkeypatch.setattr(distributed_job.signals, "POLL_S", 0.01)
    late = []
    thread = threading.Thread(target=lambda: late.append(distributed_job._arguments(sweep, "01", leads=False)))
    thread.start()
    first = distributed_job._arguments(sweep, "01", leads=True)
    (sweep.folder / "01").mkdir()
    (sweep.folder / "01" / "config.yaml").write_text("")
    late.append(distributed_job._arguments(sweep, "01", leads=False))
    thread.join()
    assert late == [first, first] and first[2:] == ["--run-dir", str(sweep.folder / "01"), "--distributed"]
    assert {s.name: s.values for s in presets.read_preset(first[1])}["gamma"] == [0.5]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert distributed_job._arguments(sweep, "01", leads=True) == ["--resume", first[3], "--distributed"]
    (sweep.folder / "01" / "failed.json").write_text("{}")
    assert distributed_job._arguments(sweep, "01", leads=True) == []


class Process:
    """A process of `train` that ends with a status, after a stop signal if `stopped`."""

    def __init__(self, sweep, status, stopped):
        self.sweep, self.status, self.stopped, self.got = sweep, status, stopped, []

    def __call__(self, words, **options):
        self.words, self.returncode = words, None
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def send_signal(self, number):
        self.got.append(number)

    def poll(self):
        if self.stopped and not self.got:
            signal.raise_signal(self.stopped)
            return None
        self.returncode = self.status
        return self.status


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("status", "stopped", "expected"),
    [(1, 0, None), (128 + 15, signal.SIGUSR2, signal.SIGUSR2)],
    ids=["fails", "stops"],
)
def test_task_passes_signals_on_and_first_one_records_failures(
    status, stopped, expected, rank, tmp_path, no_slurm, monkeypatch, capfd
):
    sweep = prepared(f"--num-envs 2 {TWO_TASKS}", tmp_path / "sweep")
    for name, value in (("SLURM_JOB_ID", "71"), ("SLURM_PROCID", rank)):
        monkeypatch.setenv(name, value)
    told = sweep.folder / "slurm" / "01_71_0.json"
    told.parent.mkdir()
    files.replace(told, json.dumps(["--config", "x", "--distributed"]))
    monkeypatch.setattr(distributed_job.signals, "POLL_S", 0.01)
    process = Process(sweep, status, stopped)
    monkeypatch.setattr(distributed_job.subprocess, "Popen", process)
    message, number = distributed_job.run_group_by_name(str(sweep.folder), "01")
    assert process.words[:3] == [sys.executable, "-m", "jaxrl_fast.train"] and process.words[-1] == "--distributed"
    assert process.got == ([signal.SIGUSR1] if stopped else [])
    assert number == expected and message
    failure = directory.failure(sweep.folder / "01")
    assert ("ended with status 1" in failure) == (rank == "0" and not stopped)
