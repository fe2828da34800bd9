"""Run the groups of a sweep one by one; several processes may work on one sweep."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_fast.config import paths
from jaxrl_fast.loggers.terminal import Console, QuietConsole
from jaxrl_fast.sweep.directory import FAILED, SweepPlan, finished, read
from jaxrl_fast.sweep.grid import Group, offer_devices
from jaxrl_fast.training import plan
from jaxrl_fast.utils import devices, formatting, locks, signals, warnings
from jaxrl_fast.utils.errors import why


class Progress:
    """A terminal that shows of a run only how far it is."""

    def __init__(self, terminal: Console):
        self.terminal, self.progress, self.lines_stay = terminal, terminal.progress, terminal.lines_stay

    @property
    def width(self) -> int | None:
        return self.terminal.width

    def say(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


def work_loop(sweep: SweepPlan, terminal: Console) -> tuple[int | None, int]:
    """Runs what nobody else has run or is running, a group after the other.

    The signal that stopped it, and how many are not on the disk.
    """
    from jaxrl_fast.sweep import table

    lost = 0
    for i, (name, group) in enumerate(sweep.groups.items()):
        members = formatting.counted(len(group.members), "member")
        begin = lambda name=name, i=i, members=members: terminal.say(f"{i + 1}/{len(sweep.groups)}  {name} · {members}")
        outcome = run_group(sweep.folder / name, group, terminal, begin)
        if outcome is None:
            continue
        if_there_is_room(table.write_table, sweep)
        lost += outcome["lost"]
        if outcome["signal"]:
            return outcome["signal"], lost
        terminal.say(f"     {outcome['words']}")
    return None, lost


def if_there_is_room(write: Callable[[SweepPlan], Any], sweep: SweepPlan) -> Any:
    """A full disk ends no sweep: its results can be written from what its runs hold at any time."""
    try:
        return write(sweep)
    except OSError as error:
        warnings.warn(
            f"the results in {sweep.folder} could not be written ({error.strerror or error}); --resume does it"
        )


def run_group(folder: Path, group: Group, terminal: Console, begin: Any) -> dict[str, Any] | None:
    """Runs one group, or goes on with it. None where it is done, or another process has it. What fails is written."""
    from jaxrl_fast.training import trainer

    if finished(folder):
        return None
    try:
        folder.mkdir(exist_ok=True)
        lock = locks.Lock(folder)
    except BlockingIOError:
        return None
    except OSError as error:  # no room, or no right to: it is tried again when the sweep goes on
        warnings.warn(f"{folder} cannot be written to ({error.strerror}); --resume tries it again")
        return {"signal": None, "lost": True, "words": "not begun"}
    ended: list[Any] = []  # environments whose programs have run to their end
    try:
        if finished(folder):  # since we looked
            return None
        begin()
        settings = group.settings
        if (folder / paths.CONFIG).is_file():
            resumed = dataclasses.replace(settings.options, resume=str(folder))
            settings = settings._replace(options=resumed)
        ready = plan.validate_plan(settings, group.members)._replace(folder=folder, lock=lock)
        outcome = trainer.Trainer(ready, Progress(terminal)).run()
        ended += [ready.env, ready.eval_env]
        said = outcome.summary
        speed = f"{formatting.short_number(said['env_steps_per_s'])} steps/s" if said["env_steps_per_s"] else ""
        score = [] if said["final_return_iqm"] is None else [f"return {said['final_return_iqm']:.1f}"]
        unwritten = [f"{outcome.unwritten} could not be written"] if outcome.unwritten else []
        words = " · ".join([said["status"], formatting.seconds(said["train_time_s"]), speed, *score, *unwritten])
        return {"signal": outcome.signal or outcome.asked, "lost": bool(unwritten), "words": words}
    except Exception as error:
        if type(error).__name__ == "UncompletedJobError":  # submitit: the job's time is over, not the program's
            raise
        text = why(error)[:300]
        with contextlib.suppress(OSError):  # no room: it is tried again when the sweep goes on
            (folder / FAILED).write_text(json.dumps({"failure": text}) + "\n", encoding="utf-8")
        return {"signal": None, "lost": False, "words": f"failed: {text}"}
    finally:
        lock.release()
        devices.release_envs(ended)  # where a run failed a program may still be under way, so its pools stay


def run_group_by_name(folder: str, name: str) -> str:
    """A job of its own: one group of the sweep in this folder, then the results so far."""
    from jaxrl_fast.sweep import report

    sweep = read(Path(folder))
    offer_devices(group.settings for group in sweep.groups.values())
    outcome = run_group(sweep.folder / name, sweep.groups[name], QuietConsole(), lambda: None)
    report.write(sweep)
    return outcome["words"] if outcome else "nothing to do"


def worker_main(folder: str, parent: str) -> int:
    """What one of several processes does, until `parent`, which started them, is no more. Its exit status."""
    from jaxrl_fast.parallel import placement

    signals.stop_with_parent(int(parent))
    sweep = read(Path(folder))
    placement.share_cores(sweep.own.workers)
    offer_devices(group.settings for group in sweep.groups.values())
    signal, lost = work_loop(sweep, QuietConsole())
    return 1 if lost else 128 + signal if signal else 0
