"""Sweeps whose groups are Ray tasks: results, tasks and drivers that are killed, and mistakes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_fast.runs import files
from jaxrl_fast.sweep import __main__, directory, grid, ray_tasks
from jaxrl_fast.sweep import table as sweep_table
from tests.helpers.gym_envs import Walk
from tests.helpers.ray_clusters import local_ray
from tests.helpers.sweeps import TINY

ROOT = Path(__file__).parents[2]
TIMES = ("wall_time_s", "train_time_s", "env_steps_per_s")
LONG = TINY.replace("--total-steps 512", "--total-steps 500M")
LONG += " --save-every 1s --num-envs 2 --launcher ray --sweep-dir "


@pytest.fixture(scope="module")
def ray():
    yield from local_ray()


def lines(folder):
    """Return the records of a run without times."""
    return [{k: v for k, v in record.items() if k not in TIMES} for record in files.read_metrics(folder)]


def until(holds, seconds=180):
    """Wait until `holds()` is true."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


@pytest.mark.slow
def test_tasks_train_what_this_process_trains(tmp_path, capfd, ray):
    line = f"{TINY} --num-envs 2,4 --seed 3,5 --gamma 0.9,0.99 --log-level info --sweep-dir "
    with start(*(line + str(tmp_path / "here")).split()) as here:
        said = here.communicate(timeout=300)[0]
    assert here.returncode == 0, said
    assert __main__.main((line + str(tmp_path / "tasks") + " --launcher ray").split()) == 0
    printed = capfd.readouterr().out
    assert "1/2  0" in printed and "2/2  0" in printed
    for name in ("01_num_envs-2", "02_num_envs-4"):
        assert lines(tmp_path / "here" / name) == lines(tmp_path / "tasks" / name) != []
    rows = sweep_table.table_rows(directory.read_plan(tmp_path / "tasks"))
    assert [row["status"] for row in rows] == ["done"] * 8


class Fragile(Walk):
    """Fails after the steps in which a new environment is tried."""

    num_steps = 0

    def step(self, action):
        Fragile.num_steps += 1
        return super().step(action if Fragile.num_steps < 400 else 1 // 0)


@pytest.mark.slow
def test_failure_of_a_group_is_recorded(tmp_path, capfd, ray):
    line = f"ppo --env {__name__}:Fragile --num-envs 2 --total-steps 1k --rollout-length 8 --hidden-sizes 4"
    line += " --num-epochs 1 --num-minibatches 1 --eval-episodes 0 --log-level quiet --host.workers 0 --seed 1"
    line += f" --launcher ray --sweep-dir {tmp_path / 'sweep'}"
    assert __main__.main(line.split()) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert "ZeroDivisionError" in directory.failure(tmp_path / "sweep" / "01")


def start(*words):
    """Return a sweep in a new process."""
    command = [sys.executable, "-m", "jaxrl_fast.sweep", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def process_of(folder):
    """Return the process that holds the lock of a run, from the kernel's table of locks; 0 for none."""
    inode = (folder / ".lock").stat().st_ino if (folder / ".lock").exists() else -1
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if "FLOCK" in words and words[-3].rpartition(":")[2] == str(inode):
            return int(words[4])
    return 0


@pytest.mark.slow
def test_killed_task_and_killed_driver_lose_only_time(tmp_path):
    """Kill the task's process, then the driver; resume, and stop gently. Steps never go back beyond a checkpoint."""
    folder = tmp_path / "sweep" / "01"
    driver = start(*(LONG + str(tmp_path / "sweep")).split())
    try:
        until(lambda: any((folder / "checkpoints").glob("*")) and process_of(folder))
        first = process_of(folder)
        os.kill(first, signal.SIGKILL)
        second = until(lambda: (pid := process_of(folder)) not in (0, first) and pid)
        count = len(files.read_metrics(folder))
        until(lambda: len(files.read_metrics(folder)) > count + 2)
        driver.kill()
        said = driver.communicate(timeout=60)[0]
        assert "01: its task has ended (" in said and "it is started again" in said
        until(lambda: process_of(folder) == 0)
    finally:
        driver.kill()
    assert second != first
    before = files.read_metrics(folder)[-1]["env_steps"]
    driver = start("--resume", str(tmp_path / "sweep"), "--launcher", "ray")
    try:
        until(lambda: files.read_metrics(folder)[-1]["env_steps"] > before)
        driver.terminate()
        said = driver.communicate(timeout=120)[0]
    finally:
        driver.kill()
    assert driver.returncode == 128 + signal.SIGTERM, said
    assert files.read_summary(folder)["status"] == "stopped" and "1 program left" in said
    steps = [record["env_steps"] for record in files.read_metrics(folder)]
    assert steps == sorted(set(steps)), "no record is repeated or missing"


MISTAKES = [
    ("--ray-option num_cpus=1", "error: ray_options: needs launcher ray\n"),
    ("--launcher ray --workers 2", "error: workers: must be 1 with launcher ray, which has a task per group, got 2"),
]
MISTAKES_IN_A_CLUSTER = [
    ("num_cpus=9999", "error: ray_options: num_cpus: a task needs more than any node of the cluster has (2), got 9999"),
    ("num_gpus=1", "of the cluster has (0), got 1; use at most 0"),
    ("num_cpus=few", "error: ray_options: num_cpus: must be a number, got few"),
    ("no_such=1", "error: ray_options: "),
]


def check_mistake(words, says, folder, capsys):
    assert __main__.main([*TINY.split(), *words.split()]) == 2
    found = capsys.readouterr().err
    assert says in found and found.count("\n") == 1
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=["option", "workers"])
def test_mistake_is_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check_mistake(words, says, tmp_path, capsys)


@pytest.mark.slow
def test_options_that_no_node_can_meet_are_one_line(tmp_path, monkeypatch, capsys, ray):
    monkeypatch.chdir(tmp_path)
    for option, says in MISTAKES_IN_A_CLUSTER:
        check_mistake(f"--launcher ray --ray-option {option}", says, tmp_path, capsys)


@pytest.mark.slow
def test_node_that_does_not_see_the_folder_is_named(tmp_path, monkeypatch, ray):
    """Ask the only node twice, as two nodes."""
    monkeypatch.setattr(ray_tasks, "_nodes", lambda ray: 2 * [node for node in ray.nodes() if node["Alive"]])
    with pytest.raises(ValueError, match=r"launcher ray: the node [\d.]+ does not see .*; set sweep_dir to a folder"):
        ray_tasks.check_nodes(tmp_path / "sweep.yaml", "sweep_dir")
    (tmp_path / "sweep.yaml").write_text("")
    ray_tasks.check_nodes(tmp_path / "sweep.yaml", "sweep_dir")
    monkeypatch.setattr(ray_tasks, "__version__", "0.0.1")
    with pytest.raises(ValueError, match=r"has jaxrl_fast \S+, where this process has 0\.0\.1"):
        ray_tasks.check_nodes(tmp_path / "sweep.yaml", "sweep_dir")


@pytest.mark.slow
def test_environment_object_is_refused(ray):
    with pytest.raises(ValueError, match="env: workers and launcher require a name"):
        __main__.prepare.prepare(grid.from_keywords(algo="ppo", env=lambda: Walk(), launcher="ray"))
