"""Run the groups of a sweep one by one; several processes may work on one sweep."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_fast.config import paths
from jaxrl_fast.loggers.terminal import Console, QuietConsole
from jaxrl_fast.runs import files
from jaxrl_fast.sweep.directory import FAILED, SweepPlan, is_finished, read_plan, unfinished
from jaxrl_fast.sweep.grid import Group, offer_devices
from jaxrl_fast.training import plan, schedule
from jaxrl_fast.training.kept import Kept
from jaxrl_fast.utils import devices, formatting, locks, signals, warnings
from jaxrl_fast.utils.errors import why


class ProgressConsole:
    """A console that shows only the progress of a run."""

    def __init__(self, terminal: Console):
        self.terminal, self.progress, self.lines_stay = terminal, terminal.progress, terminal.lines_stay

    @property
    def width(self) -> int | None:
        """Return the width of the terminal in characters, or None if it is unknown."""
        return self.terminal.width

    def print(self, line: str) -> None:
        """Ignore the line."""

    def close(self) -> None:
        """Leave the terminal open for the next run."""


class Finished:
    """Prints a line for each group of a sweep that other processes have finished."""

    def __init__(self, sweep: SweepPlan, terminal: Console):
        self.sweep, self.terminal = sweep, terminal
        self.reported = set(sweep.groups) - set(unfinished(sweep))

    def report(self) -> bool:
        """Print the groups that have finished since the last call. Return whether there were any."""
        groups, folder = self.sweep.groups, self.sweep.folder
        new = [n for n, g in groups.items() if n not in self.reported and is_finished(folder / n, g)]
        for name in new:
            self.reported.add(name)
            status = "failed" if (folder / name / FAILED).is_file() else files.read_summary(folder / name)["status"]
            self.terminal.print(f"{len(self.reported)}/{len(groups)}  {name} · {status}")
        return bool(new)


def work_loop(sweep: SweepPlan, terminal: Console) -> tuple[int | None, int]:
    """Run every group that no other process has run or is running.

    Returns:
        The signal that stopped the loop, or None; and the number of groups whose results could not be saved.
    """
    from jaxrl_fast.sweep import table

    num_unsaved = 0
    for i, (name, group) in enumerate(sweep.groups.items()):
        members = formatting.counted(len(group.members), "member")
        announce = lambda name=name, i=i, members=members: terminal.print(
            f"{i + 1}/{len(sweep.groups)}  {name} · {members}"
        )
        result = run_group(sweep.folder / name, group, terminal, announce)
        if result is None:
            continue
        write_results(table.write_table, sweep)
        num_unsaved += result["unsaved"]
        if result["signal"]:
            return result["signal"], num_unsaved
        terminal.print(f"     {result['message']}")
    return None, num_unsaved


def write_results(write: Callable[[SweepPlan], Any], sweep: SweepPlan) -> Any:
    """Return `write(sweep)`, or warn and return None if the disk is full or not writable.

    The results can be written again at any time from the runs' own files.
    """
    try:
        return write(sweep)
    except OSError as error:
        reason = error.strerror or error
        where = sweep.shown(sweep.folder)
        warnings.warn(f"the results in {where} could not be written ({reason}); resume writes them")


def run_group(
    folder: Path,
    group: Group,
    terminal: Console,
    announce: Callable[[], Any],
    until: int = 0,
    kept: Kept | None = None,
) -> dict[str, Any] | None:
    """Run or resume one group; record a failure in its folder.

    Args:
        folder: The group's folder.
        group: The members to train together.
        terminal: Shows the progress.
        announce: Called without arguments once this process has the group.
        until: The environment steps of each member after which the group is stopped, to be resumed later; 0: none.
        kept: What earlier parts of the group have compiled, with as many members.

    Returns:
        None if the group has finished or another process has it. Else a dictionary: `signal` that stopped it or None,
        `unsaved` (bool), and `message`, one line for the terminal.
    """
    from jaxrl_fast.training import trainer

    if is_finished(folder, group):
        return None
    try:
        folder.mkdir(exist_ok=True)
        lock = locks.Lock(folder)
    except BlockingIOError:
        return None
    except OSError as error:  # full disk or no permission: not recorded, so that --resume tries it again
        warnings.warn(f"{folder} cannot be written ({error.strerror}); resume tries it again")
        return {"signal": None, "unsaved": True, "message": "not started"}
    finished_envs: list[Any] = []  # environments whose programs have ended
    try:
        if is_finished(folder, group):  # another process may have finished it before the lock was taken
            return None
        announce()
        settings = group.settings
        if (folder / paths.CONFIG).is_file():
            resumed = dataclasses.replace(settings.options, resume=str(folder))
            settings = settings._replace(options=resumed)
        ready = plan.validate_plan(settings, group.members)._replace(folder=folder, lock=lock)
        last = schedule.to_updates(until, ready.steps_per_update) or None
        outcome = trainer.execute(ready, ProgressConsole(terminal), until=last, kept=kept)
        finished_envs += [ready.env, ready.eval_env]
        unsaved = bool(outcome.failed_outputs)
        return {"signal": outcome.signal or outcome.late_signal, "unsaved": unsaved, "message": _message(outcome)}
    except Exception as error:
        if type(error).__name__ == "UncompletedJobError":  # submitit: the job's time limit, not a failure of the run
            raise
        text = why(error)[:300]
        with contextlib.suppress(OSError):  # full disk: not recorded, so that --resume tries it again
            (folder / FAILED).write_text(json.dumps({"failure": text}) + "\n", encoding="utf-8")
        return {"signal": None, "unsaved": False, "message": f"failed: {text}"}
    finally:
        lock.release()
        devices.release_envs(finished_envs)  # after a failure a program may still use its pools, so they stay open


def _message(outcome: Any) -> str:
    """Return the line of a finished group: status, time, speed and score."""
    summary = outcome.summary
    speed = f"{formatting.short_number(summary['env_steps_per_s'])} steps/s" if summary["env_steps_per_s"] else ""
    score = [] if summary["final_return_iqm"] is None else [f"return {summary['final_return_iqm']:.1f}"]
    failed = [f"{outcome.failed_outputs} could not be written"] if outcome.failed_outputs else []
    return " · ".join([summary["status"], formatting.seconds(summary["train_time_s"]), speed, *score, *failed])


def run_group_by_name(folder: str, name: str) -> tuple[str, int | None]:
    """Run one group of the sweep in `folder` as a job, and write the results so far.

    Returns:
        A line about the group; and the signal that stopped it before its end, or None.
    """
    from jaxrl_fast.sweep import report

    sweep = read_plan(Path(folder))
    offer_devices(group.settings for group in sweep.groups.values())
    place, group = sweep.folder / name, sweep.groups[name]
    result = run_group(place, group, QuietConsole(), lambda: None)
    report.write_report(sweep)
    signal = result["signal"] if result and not is_finished(place, group) else None
    return (result["message"] if result else "nothing to do"), signal


def worker_main(folder: str, parent: str, workers: str) -> int:
    """Run groups of the sweep in `folder` until the process with id `parent` has ended. Return the exit status.

    The cores are shared with all `workers` processes.
    """
    from jaxrl_fast.parallel import placement

    signals.stop_with_parent(int(parent))
    sweep = read_plan(Path(folder))
    placement.share_cores(int(workers))
    offer_devices(group.settings for group in sweep.groups.values())
    signal, num_unsaved = work_loop(sweep, QuietConsole())
    return 1 if num_unsaved else 128 + signal if signal else 0
