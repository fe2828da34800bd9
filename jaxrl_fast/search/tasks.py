"""Run the tasks of a search: here one after another, or at the same time as Slurm jobs or Ray tasks.

Each task is a search of the same study, and draws and trains rounds until the study has all trials. One that has been
killed trains the trials that it has drawn, when it is started again. When no trial is left, the winners are tested.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_fast.loggers.terminal import Console, QuietConsole
from jaxrl_fast.search import prepare, work
from jaxrl_fast.search.prepare import SearchPlan
from jaxrl_fast.search.report import REPORT
from jaxrl_fast.search.rounds import Stopped
from jaxrl_fast.search.trials import Result
from jaxrl_fast.sweep import grid, ray_tasks, slurm
from jaxrl_fast.utils import locks
from jaxrl_fast.utils.formatting import counted

TEST = "test"  # the name of the Ray task that tests the winners


def left(search: SearchPlan) -> list[str]:
    """Return the names of the tasks that have trials to draw or to train."""
    study = work.study_of(search, writes=False)
    unfinished, is_short = study.unfinished(), study.count() < search.targets[-1]
    return [name for name, task in search.tasks.items() if is_short or task.id in unfinished]


def run_here(search: SearchPlan, terminal: Console) -> Result:
    """Run the tasks one after another in this process, then test the winners. Raises Stopped."""
    for task in search.tasks.values():
        _locked(work.train, task, terminal)
    return _locked(work.finish, search, terminal)


def run_slurm(search: SearchPlan, terminal: Console) -> None:
    """Submit a job for each task that is left. The last one to end tests the winners and writes the results."""
    names = left(search) or [*search.tasks][:1]
    jobs = slurm.submit(search.folder, names, search.own.slurm_options, train_as_job)
    last = f"the last one to end tests the winners and writes {search.shown(search.folder / REPORT)}"
    terminal.print(f"{counted(len(jobs), 'job')} submitted; {last}")


def run_ray(search: SearchPlan, terminal: Console) -> Result:
    """Run the tasks that are left, then one that tests the winners, and write the results. Raises Stopped."""
    study, shown = work.study_of(search, writes=False), [0]

    def watch() -> None:
        """Print the number of trials that have ended, if it has changed."""
        ended = [trial for trial in study.trials() if trial.status != "running"]
        if len(ended) != shown[0]:
            best = max((trial.score for trial in ended if trial.score is not None), default=None)
            text = "" if best is None else f" · best so far {best:.1f}"
            terminal.print(f"{len(ended)}/{search.targets[-1]} trials{text}")
        shown[0] = len(ended)

    for names in (left(search), [TEST]):
        number, unsaved = ray_tasks.run_all(search.folder, names, search.own.ray_options, train_as_ray_task, watch)
        if number or unsaved or left(search):
            raise Stopped(128 + number if number and not unsaved else 1)
    return _locked(work.finish, search, terminal)


RUN: dict[str, Callable[[SearchPlan, Console], Result | None]] = {
    "local": run_here,
    "slurm": run_slurm,
    "ray": run_ray,
}


def train_as_job(folder: str, name: str) -> tuple[str, int | None]:
    """Run a task of the search in `folder` as a Slurm job, and test the winners if it is the last one to end.

    Returns:
        A line about it; and the signal that stopped it, or None.
    """
    search = _read(folder)
    try:
        _locked(work.train, search.tasks[name], QuietConsole())
        if running := left(search):
            return f"its trials are done; left are the tasks {', '.join(running)}", None
        _locked(work.finish, search, QuietConsole())
    except Stopped as stopped:
        return "; ".join(("stopped", *stopped.args[1:])), stopped.args[0] - 128 if stopped.args[0] > 128 else None
    return "the search is done", None


def train_as_ray_task(folder: str, name: str) -> dict[str, Any] | None:
    """Run a task of the search in `folder`, or test its winners. Return None if another process does that."""
    search = _read(folder)
    try:
        if name == TEST:
            _locked(work.test, search, QuietConsole())
        else:
            _locked(work.train, search.tasks[name], QuietConsole())
    except Busy:
        return None
    except Stopped as stopped:
        return {"unsaved": stopped.args[0] < 128}
    return {"unsaved": False}


class Busy(Stopped):
    """Another process has the lock of a folder."""


def _locked(act: Callable[[SearchPlan, Console], Any], search: SearchPlan, terminal: Console) -> Any:
    """Return `act(search, terminal)` with the lock of the search's folder. Raises Busy, or Stopped."""
    search.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = locks.Lock(search.folder)
    except BlockingIOError:
        raise Busy(1, f"another process trains {search.folder}; wait for its end") from None
    try:
        return act(search, terminal)
    finally:
        lock.release()


def _read(folder: str) -> SearchPlan:
    """Return the search in a folder, and offer its devices to JAX."""
    search = prepare.read(Path(folder))
    grid.offer_devices([search.settings])
    return search
