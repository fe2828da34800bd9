"""Submit the groups of a sweep, or the tasks of a search, as a job array, with submitit.

A job trains one of them. If Slurm is about to end it, because of its time limit or of a job that goes first, it saves
the training and is queued again. A job of several tasks trains one run of a sweep on all of them: each task is a
process of `train --distributed`.
"""

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

from jaxrl_fast.sweep import distributed_job, worker
from jaxrl_fast.sweep.distributed_job import FOLDER
from jaxrl_fast.utils.importing import install

Train = Callable[[str, str], tuple[str, int | None]]  # of folder and name: a line, and the signal that stopped it
TIMEOUT_MIN = 24 * 60  # default time limit of a job


def check(options: Mapping[str, Any]) -> None:
    """Raise ValueError if submitit or sbatch is missing, or submitit rejects the options."""
    if util.find_spec("submitit") is None:
        raise ValueError(f"launcher slurm: submitit is not installed; {install('slurm')}")
    if shutil.which("sbatch") is None:
        raise ValueError("launcher slurm: sbatch was not found; run it on a machine that can submit jobs")
    with tempfile.TemporaryDirectory() as folder:
        _executor(Path(folder), options, "slurm")


def submit(
    folder: Path, names: Sequence[str], options: Mapping[str, Any], train: Train, cluster: str = "slurm"
) -> list[Any]:
    """Submit one job for each name, a group or a task that `train` trains in `folder`; return the submitit jobs."""
    executor = _executor(folder / FOLDER, options, cluster)
    return executor.map_array(Job(train), [str(folder.resolve())] * len(names), names) if names else []


def trainer_of_groups(options: Mapping[str, Any]) -> Train:
    """Return the function that trains a group of a sweep in each task of a job."""
    return worker.run_group_by_name if num_tasks(options) == 1 else distributed_job.run_group_by_name


def num_tasks(options: Mapping[str, Any]) -> int:
    """Return the tasks of a job: those of all of its nodes."""
    given = _given(options)
    return given.get("nodes", 1) * given.get("tasks_per_node", 1)


class Job:
    """The function that a job calls in each of its tasks. submitit pickles it."""

    def __init__(self, train: Train):
        self.train = train

    def __call__(self, folder: str, name: str) -> str:
        """Train one group or task in `folder`. Return a line about it."""
        message, number = self.train(folder, name)
        if number == signal.SIGUSR2 or number == signal.SIGTERM and is_preempted():
            signal.raise_signal(signal.SIGUSR2)  # submitit's handler queues the job again, and ends this process
        return message

    def checkpoint(self, folder: str, name: str) -> Any:
        """Return what submitit runs when the job starts again: the same, which resumes from the last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, folder, name)


def is_preempted() -> bool:
    """Return whether Slurm ends this job for another one, and not because a user has cancelled it."""
    import submitit

    job = submitit.JobEnvironment().job_id
    shown = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True)
    times = [word.partition("=")[2] for word in shown.stdout.split() if word.startswith("PreemptTime=")]
    return any(time != "None" for time in times)


def _executor(folder: Path, options: Mapping[str, Any], cluster: str) -> Any:
    """Return a submitit executor. Raise ValueError if it rejects the options."""
    import submitit

    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    try:
        executor.update_parameters(**{"name": "jaxrl_fast", "timeout_min": TIMEOUT_MIN} | _given(options))
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"slurm_options: {str(error).splitlines()[0]}") from error
    return executor


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return submitit's parameters with their types."""
    import yaml

    return {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in options.items()}
