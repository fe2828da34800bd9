"""A sweep under way: groups that processes claim one by one.

A group belongs to the process that has the lock on its folder, as any run does; so any number of processes may work on
one sweep, and what a killed one leaves is taken up by the next.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast import __version__, config, host, naming, plan, report, slurm, terminals, wording
from jaxrl_fast.grid import Group, offer_devices
from jaxrl_fast.layout import FAILED, Sweep, read
from jaxrl_fast.spelling import why

# In another process:
ALONE = "import sys; from jaxrl_fast import command, sweeper; command.start(lambda: sweeper.work_alone(*sys.argv[1:]))"


class Progress:
    """A terminal that shows of a run only how far it is."""

    def __init__(self, terminal: terminals.Terminal):
        self.terminal, self.progress, self.lines_stay = terminal, terminal.progress, terminal.lines_stay

    @property
    def width(self) -> int | None:
        return self.terminal.width

    def say(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


def execute(sweep: Sweep) -> int:
    """Goes through it, or has it gone through, and writes the results. The exit status of the command."""
    from jaxrl_fast import results

    terminal = terminals.suitable(sweep.log_level)
    try:
        announce(sweep, terminal)
        if sweep.own.launcher == "slurm":
            jobs = slurm.submit(sweep.folder, unfinished(sweep), sweep.own.slurm_options)
            terminal.say(f"{len(jobs)} jobs submitted; each writes {sweep.folder / results.TABLE} anew at its end")
            return 0
        signal, lost = (share if sweep.own.workers > 1 else work)(sweep, terminal)
        written = if_there_is_room(results.write, sweep)
        for line in written or ():
            terminal.say(line)
        again = f"{naming.SWEEP} --resume {quote(str(sweep.folder))}"
        left = unfinished(sweep)
        if left:
            terminal.say(f"  {len(left)} programs are left; go on  {again}")
        wrong = {name: why for name in sweep.groups if (why := failure(sweep.folder / name))}
        for name, why in wrong.items():
            host.tell(f"error: {name}: {why}")
        if any((sweep.folder / name / FAILED).is_file() for name in wrong):
            terminal.say(f"  try what failed once more  {again} --retry")
        if signal and not lost and written is not None:
            return 128 + signal
        return 1 if wrong or lost or written is None else 0
    finally:
        terminal.close()


def announce(sweep: Sweep, terminal: terminals.Terminal) -> None:
    """What there is to do, before it starts."""
    settings = next(iter(sweep.groups.values())).settings
    count = sum(len(group.members) for group in sweep.groups.values())
    parts = [
        f"sweep of {settings.algo}",
        f"{wording.counted(count, 'training')} in {wording.counted(len(sweep.groups), 'program')}",
        host.device(),
    ]
    if len(unfinished(sweep)) < len(sweep.groups):
        parts.append(f"{wording.counted(len(unfinished(sweep)), 'program')} to go")
    terminal.say(f"jaxrl_fast {__version__}   {' · '.join(parts)}")
    if sweep.scale != "none":
        terminal.say(f"scale  {sweep.scale}, from {sweep.base_num_envs} environments")
    terminal.say(f"sweep  {sweep.folder}")


def work(sweep: Sweep, terminal: terminals.Terminal) -> tuple[int | None, int]:
    """Runs what nobody else has run or is running, a group after the other.

    The signal that stopped it, and how many are not on the disk.
    """
    from jaxrl_fast import results

    lost = 0
    for i, (name, group) in enumerate(sweep.groups.items()):
        members = wording.counted(len(group.members), "member")
        begin = lambda name=name, i=i, members=members: terminal.say(f"{i + 1}/{len(sweep.groups)}  {name} · {members}")
        outcome = attempt(sweep.folder / name, group, terminal, begin)
        if outcome is None:
            continue
        if_there_is_room(results.write_table, sweep)
        lost += outcome["lost"]
        if outcome["signal"]:
            return outcome["signal"], lost
        terminal.say(f"     {outcome['words']}")
    return None, lost


def if_there_is_room(write: Callable[[Sweep], Any], sweep: Sweep) -> Any:
    """A full disk ends no sweep: its results can be written from what its runs hold at any time."""
    try:
        return write(sweep)
    except OSError as error:
        host.warn(f"the results in {sweep.folder} could not be written ({error.strerror or error}); --resume does it")


def attempt(folder: Path, group: Group, terminal: terminals.Terminal, begin: Any) -> dict[str, Any] | None:
    """Runs one group, or goes on with it. None where it is done, or another process has it. What fails is written."""
    from jaxrl_fast import trainer

    if finished(folder):
        return None
    try:
        folder.mkdir(exist_ok=True)
        lock = host.Lock(folder)
    except BlockingIOError:
        return None
    except OSError as error:  # no room, or no right to: it is tried again when the sweep goes on
        host.warn(f"{folder} cannot be written to ({error.strerror}); --resume tries it again")
        return {"signal": None, "lost": True, "words": "not begun"}
    ended: list[Any] = []  # environments whose programs have run to their end
    try:
        if finished(folder):  # since we looked
            return None
        begin()
        settings = group.settings
        if (folder / config.CONFIG).is_file():
            resumed = dataclasses.replace(settings.options, resume=str(folder))
            settings = settings._replace(options=resumed)
        ready = plan.check(settings, group.members)._replace(folder=folder, lock=lock)
        outcome = trainer.Trainer(ready, Progress(terminal)).run()
        ended += [ready.env, ready.eval_env]
        said = outcome.summary
        speed = f"{wording.short(said['env_steps_per_s'])} steps/s" if said["env_steps_per_s"] else ""
        score = [] if said["final_return_iqm"] is None else [f"return {said['final_return_iqm']:.1f}"]
        unwritten = [f"{outcome.unwritten} could not be written"] if outcome.unwritten else []
        words = " · ".join([said["status"], wording.seconds(said["train_time_s"]), speed, *score, *unwritten])
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
        host.forget(ended)  # where a run failed a program may still be under way, so its pools stay


def attempt_by_name(folder: str, name: str) -> str:
    """A job of its own: one group of the sweep in this folder, then the results so far."""
    from jaxrl_fast import results

    sweep = read(Path(folder))
    offer_devices(group.settings for group in sweep.groups.values())
    outcome = attempt(sweep.folder / name, sweep.groups[name], terminals.Quiet(), lambda: None)
    results.write(sweep)
    return outcome["words"] if outcome else "nothing to do"


def share(sweep: Sweep, terminal: terminals.Terminal) -> tuple[int | None, int]:
    """Several processes of this sweep at once, until all have ended. The signal that stopped them; how many died."""
    told = set(sweep.groups) - set(unfinished(sweep))

    def tell() -> None:
        for name in (n for n in sweep.groups if n not in told and finished(sweep.folder / n)):
            told.add(name)
            folder = sweep.folder / name
            how = "failed" if (folder / FAILED).is_file() else report.read_summary(folder)["status"]
            terminal.say(f"{len(told)}/{len(sweep.groups)}  {name} · {how}")

    command = [sys.executable, "-c", ALONE, str(sweep.folder), str(os.getpid())]
    processes: list[subprocess.Popen] = []
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        for process in processes:
            process.send_signal(number)

    with host.stop_signals(stop):
        while len(processes) < sweep.own.workers and not stopped:
            processes.append(subprocess.Popen(command, start_new_session=True))
        while any(process.poll() is None for process in processes):
            tell()
            time.sleep(host.WATCH_S)
    tell()
    lost = 0 if stopped else sum(process.returncode != 0 for process in processes)
    if lost:
        host.warn(f"{lost} of {len(processes)} workers died, or could not write all that they should")
    return stopped[0] if stopped else None, lost


def work_alone(folder: str, parent: str) -> int:
    """What one of several processes does, until `parent`, which started them, is no more. Its exit status."""
    from jaxrl_fast import cores

    host.stop_without(int(parent))
    sweep = read(Path(folder))
    cores.share(sweep.own.workers)
    offer_devices(group.settings for group in sweep.groups.values())
    signal, lost = work(sweep, terminals.Quiet())
    return 1 if lost else 128 + signal if signal else 0


def unfinished(sweep: Sweep) -> list[str]:
    """Names of the groups that are neither done nor failed."""
    return [name for name in sweep.groups if not finished(sweep.folder / name)]


def finished(folder: Path) -> bool:
    """Done, diverged or failed: not to be run again."""
    return (folder / FAILED).is_file() or report.summary_if_any(folder).get("status") in ("done", "diverged")


def failure(folder: Path) -> str:
    """Why a group could not be run, or not to its end with any of its members, in a line; empty where it could."""
    try:
        return json.loads((folder / FAILED).read_text(encoding="utf-8"))["failure"]
    except FileNotFoundError:
        return report.summary_if_any(folder).get("failure") or ""
    except (OSError, ValueError, KeyError):
        return f"{FAILED} cannot be read"
