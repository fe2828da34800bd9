"""Train a group of a sweep on all tasks of a Slurm job: each task runs the same `train --distributed`.

The first task decides how the run starts, and tells the others through a file. So a task that begins late does not take
the folder of the run, which the first one has just made, for one to resume.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxrl_fast.config.paths import CONFIG
from jaxrl_fast.config.settings import to_mapping
from jaxrl_fast.sweep.directory import FAILED, SweepPlan, is_finished, read_plan
from jaxrl_fast.utils import files, signals

FOLDER = "slurm"  # files of jobs, in the sweep's folder
WAIT_S = 300.0  # for the first task's file, on a file system of several machines
STOP = signal.SIGUSR1  # Slurm sends others to all processes of a task, and a repeated one ends a training at once


def run_group_by_name(folder: str, name: str) -> tuple[str, int | None]:
    """Run one group of the sweep in `folder` in this task; the first task writes the results.

    Returns:
        A line about the group; and the signal that stopped it before its end, or None.

    Raises:
        TimeoutError: If the first task does not tell how to start.
    """
    from jaxrl_fast.sweep import report

    sweep, leads = read_plan(Path(folder)), os.environ["SLURM_PROCID"] == "0"
    words = _arguments(sweep, name, leads)
    if not words:
        return "nothing to do", None
    stopped: list[int] = []
    with subprocess.Popen([sys.executable, "-m", "jaxrl_fast.train", *words], start_new_session=True) as process:

        def stop(number: int) -> None:
            """Stop the training; it saves itself."""
            stopped.append(number)
            process.send_signal(STOP)

        with signals.stop_signals(stop):
            while process.poll() is None:
                time.sleep(signals.POLL_S)
    place, group = sweep.folder / name, sweep.groups[name]
    message, ends = f"train --distributed ended with status {process.returncode}", is_finished(place, group)
    if leads and not ends and not stopped:
        place.mkdir(exist_ok=True)
        files.replace(place / FAILED, json.dumps({"failure": f"{message}; the job's log has the reason"}) + "\n")
    if leads:
        report.write_report(sweep)
    return message, stopped[0] if stopped and not ends else None


def _arguments(sweep: SweepPlan, name: str, leads: bool) -> list[str]:
    """Return the arguments of `train`; none if the group has finished."""
    start = f"{os.environ['SLURM_JOB_ID']}_{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    told = sweep.folder / FOLDER / f"{name}_{start}.json"
    if leads:
        told.parent.mkdir(exist_ok=True)
        files.replace(told, json.dumps(_chosen(sweep, name)))
    until = time.monotonic() + WAIT_S
    while not told.is_file():
        if time.monotonic() > until:
            raise TimeoutError(f"{told} was not written by the first task of the job within {WAIT_S:g} s")
        time.sleep(signals.POLL_S)
    words: list[str] = json.loads(told.read_text(encoding="utf-8"))
    return words


def _chosen(sweep: SweepPlan, name: str) -> list[str]:
    """Return the arguments that begin or resume a group; none if it has finished."""
    import yaml

    place, group = sweep.folder / name, sweep.groups[name]
    if is_finished(place, group):
        return []
    if (place / CONFIG).is_file():
        return ["--resume", str(place), "--distributed"]
    preset = sweep.folder / FOLDER / f"{name}.yaml"
    files.replace(preset, yaml.safe_dump(to_mapping(group.settings), sort_keys=False))
    return ["--config", str(preset), "--run-dir", str(place), "--distributed"]
