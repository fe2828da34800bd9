"""A sweep under way: groups that processes claim one by one.

A group belongs to the process that has the lock on its folder, as any run does; so any number of processes may work on
one sweep, and what a killed one leaves is taken up by the next.
"""

import os
import subprocess
import sys
import time
from shlex import quote

from jaxrl_fast import __version__
from jaxrl_fast.config import names
from jaxrl_fast.loggers.terminal import Console, make_console
from jaxrl_fast.runs import files
from jaxrl_fast.sweep import slurm
from jaxrl_fast.sweep.directory import FAILED, SweepPlan, failure, finished, unfinished
from jaxrl_fast.sweep.worker import if_there_is_room, work_loop
from jaxrl_fast.utils import devices, formatting, signals, warnings

# In another process:
WORKER_CODE = (
    "import sys; from jaxrl_fast import cli; from jaxrl_fast.sweep import worker; "
    "cli.start(lambda: worker.worker_main(*sys.argv[1:]))"
)


def execute(sweep: SweepPlan) -> int:
    """Goes through it, or has it gone through, and writes the results. The exit status of the command."""
    from jaxrl_fast.config import paths
    from jaxrl_fast.sweep import report

    terminal = make_console(sweep.log_level)
    try:
        announce(sweep, terminal)
        if sweep.own.launcher == "slurm":
            jobs = slurm.submit(sweep.folder, unfinished(sweep), sweep.own.slurm_options)
            terminal.say(f"{len(jobs)} jobs submitted; each writes {sweep.folder / paths.SWEEP_TABLE} anew at its end")
            return 0
        signal, lost = (run_workers if sweep.own.workers > 1 else work_loop)(sweep, terminal)
        written = if_there_is_room(report.write, sweep)
        for line in written or ():
            terminal.say(line)
        again = f"{names.SWEEP} --resume {quote(str(sweep.folder))}"
        left = unfinished(sweep)
        if left:
            terminal.say(f"  {len(left)} programs are left; go on  {again}")
        wrong = {name: why for name in sweep.groups if (why := failure(sweep.folder / name))}
        for name, why in wrong.items():
            warnings.print_stderr(f"error: {name}: {why}")
        if any((sweep.folder / name / FAILED).is_file() for name in wrong):
            terminal.say(f"  try what failed once more  {again} --retry")
        if signal and not lost and written is not None:
            return 128 + signal
        return 1 if wrong or lost or written is None else 0
    finally:
        terminal.close()


def announce(sweep: SweepPlan, terminal: Console) -> None:
    """What there is to do, before it starts."""
    settings = next(iter(sweep.groups.values())).settings
    count = sum(len(group.members) for group in sweep.groups.values())
    parts = [
        f"sweep of {settings.algo}",
        f"{formatting.counted(count, 'training')} in {formatting.counted(len(sweep.groups), 'program')}",
        devices.device(),
    ]
    if len(unfinished(sweep)) < len(sweep.groups):
        parts.append(f"{formatting.counted(len(unfinished(sweep)), 'program')} to go")
    terminal.say(f"jaxrl_fast {__version__}   {' · '.join(parts)}")
    if sweep.scale != "none":
        terminal.say(f"scale  {sweep.scale}, from {sweep.base_num_envs} environments")
    terminal.say(f"sweep  {sweep.folder}")


def run_workers(sweep: SweepPlan, terminal: Console) -> tuple[int | None, int]:
    """Several processes of this sweep at once, until all have ended. The signal that stopped them; how many died."""
    told = set(sweep.groups) - set(unfinished(sweep))

    def tell() -> None:
        for name in (n for n in sweep.groups if n not in told and finished(sweep.folder / n)):
            told.add(name)
            folder = sweep.folder / name
            how = "failed" if (folder / FAILED).is_file() else files.read_summary(folder)["status"]
            terminal.say(f"{len(told)}/{len(sweep.groups)}  {name} · {how}")

    command = [sys.executable, "-c", WORKER_CODE, str(sweep.folder), str(os.getpid())]
    processes: list[subprocess.Popen] = []
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        for process in processes:
            process.send_signal(number)

    with signals.stop_signals(stop):
        while len(processes) < sweep.own.workers and not stopped:
            processes.append(subprocess.Popen(command, start_new_session=True))
        while any(process.poll() is None for process in processes):
            tell()
            time.sleep(signals.POLL_S)
    tell()
    lost = 0 if stopped else sum(process.returncode != 0 for process in processes)
    if lost:
        warnings.warn(f"{lost} of {len(processes)} workers died, or could not write all that they should")
    return stopped[0] if stopped else None, lost
