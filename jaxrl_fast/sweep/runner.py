"""Run a sweep: processes claim its groups one by one.

As with any run, a group belongs to the process that holds the lock on its folder. Any number of processes may
therefore work on one sweep, and a group whose process was killed is resumed by the next.
"""

import os
import subprocess
import sys
import time
from shlex import quote

from jaxrl_fast import __version__
from jaxrl_fast.config import sources
from jaxrl_fast.loggers.terminal import Console, make_console
from jaxrl_fast.sweep import grid, ray_tasks, slurm
from jaxrl_fast.sweep.directory import FAILED, SweepPlan, failure, unfinished
from jaxrl_fast.sweep.worker import Finished, work_loop, write_results
from jaxrl_fast.utils import devices, formatting, signals, warnings

WORKER_CODE = (  # of a worker process
    "import sys; from jaxrl_fast.config import cli; from jaxrl_fast.sweep import worker; "
    "cli.start(lambda: worker.worker_main(*sys.argv[1:]))"
)


def execute(sweep: SweepPlan) -> int:
    """Run the sweep as its launcher says, and write the results. Return the exit status."""
    from jaxrl_fast.config import paths
    from jaxrl_fast.sweep import report

    terminal = make_console(sweep.log_level)
    try:
        announce(sweep, terminal)
        if sweep.sweep_options.launcher == "slurm":
            given = sweep.sweep_options.slurm_options
            jobs = slurm.submit(sweep.folder, unfinished(sweep), given, slurm.trainer_of_groups(given))
            table = sweep.shown(sweep.folder / paths.SWEEP_TABLE)
            terminal.print(
                f"{formatting.counted(len(jobs), 'job')} submitted, each of which rewrites {table} at its end"
            )
            return 0
        run = run_workers if sweep.sweep_options.workers > 1 else work_loop
        if sweep.sweep_options.launcher == "ray":
            run = ray_tasks.run
        signal, num_unsaved = run(sweep, terminal)
        written = write_results(report.write_report, sweep)
        for line in written or ():
            terminal.print(line)
        command = f"{sources.SWEEP} --resume {quote(str(sweep.shown(sweep.folder)))}"
        left = unfinished(sweep)
        if left:
            terminal.print(f"  {formatting.counted(len(left), 'program')} left; resume with  {command}")
        failures = {name: why for name in sweep.groups if (why := failure(sweep.folder / name))}
        for name, why in failures.items():
            warnings.print_stderr(f"error: {name}: {why}")
        if any((sweep.folder / name / FAILED).is_file() for name in failures):
            terminal.print(f"  retry failed programs with  {command} --retry")
        if signal and not num_unsaved and written is not None:
            return 128 + signal
        return 1 if failures or num_unsaved or written is None else 0
    finally:
        terminal.close()


def announce(sweep: SweepPlan, terminal: Console) -> None:
    """Print the trainings of the sweep, the device and the folder."""
    settings = next(iter(sweep.groups.values())).settings
    count = sum(len(group.members) for group in sweep.groups.values())
    parts = [
        f"sweep of {settings.algo}",
        f"{formatting.counted(count, 'training')} in {formatting.counted(len(sweep.groups), 'program')}",
        devices.device(),
    ]
    if len(unfinished(sweep)) < len(sweep.groups):
        parts.append(f"{formatting.counted(len(unfinished(sweep)), 'program')} left")
    terminal.print(f"jaxrl_fast {__version__}   {' · '.join(parts)}")
    if sweep.scale != "none":
        terminal.print(f"scale  {sweep.scale}, from {formatting.counted(sweep.base_num_envs, 'environment')}")
    for line in unused(sweep):
        warnings.warn(line)
    for note in single_numbers(sweep):
        terminal.print(note)
    terminal.print(f"sweep  {sweep.shown(sweep.folder)}")


def unused(sweep: SweepPlan) -> list[str]:
    """Return a warning for each option of the sweep that has no effect, or a smaller one than requested."""
    lines, num_left, workers = [], len(unfinished(sweep)), sweep.sweep_options.workers
    if sweep.scale != "none" and all(g.settings.options.num_envs == sweep.base_num_envs for g in sweep.groups.values()):
        lines += [f"scale: has no effect; every training has {formatting.counted(sweep.base_num_envs, 'environment')}"]
    if workers > max(num_left, 1):
        left = formatting.counted(num_left, "program")
        lines += [
            f"workers: has no effect beyond the {left} that {'is' if num_left == 1 else 'are'} left, got {workers}"
        ]
    return lines


def single_numbers(sweep: SweepPlan) -> list[str]:
    """Return a note for each option that takes several numbers, but has a single one in every run of the sweep.

    `--hidden-sizes 128,256` may have been meant as one network of two layers.
    """
    notes = []
    for column in sweep.columns:
        found = [grid.values_of(group, group.members[0], [column])[column] for group in sweep.groups.values()]
        if all(isinstance(value, tuple) and len(value) == 1 for value in found):
            texts = list(dict.fromkeys(str(value[0]) for value in found))
            example = f"--{column.replace('_', '-')} {' '.join(texts[:2])}"
            notes.append(f"{column}  {' | '.join(texts)}, a single number per run; {example} is one run with both")
    return notes


def run_workers(sweep: SweepPlan, terminal: Console) -> tuple[int | None, int]:
    """Run the sweep in several worker processes until all have ended.

    Returns:
        The signal that stopped them, or None; and the number of workers that failed.
    """
    finished = Finished(sweep, terminal)
    own = str(sweep.folder), str(os.getpid()), str(sweep.sweep_options.workers)
    command = [sys.executable, "-c", WORKER_CODE, *own]
    processes: list[subprocess.Popen] = []
    stopped: list[int] = []

    def stop(number: int) -> None:
        """Pass a stop signal on to the workers."""
        stopped.append(number)
        for process in processes:
            process.send_signal(number)

    with signals.stop_signals(stop):
        while len(processes) < sweep.sweep_options.workers and not stopped:
            processes.append(subprocess.Popen(command, start_new_session=True))
        while any(process.poll() is None for process in processes):
            finished.report()
            time.sleep(signals.POLL_S)
    finished.report()
    num_failed = 0 if stopped else sum(process.returncode != 0 for process in processes)
    if num_failed:
        warnings.warn(f"{num_failed} of {len(processes)} workers failed or could not write all results")
    return stopped[0] if stopped else None, num_failed
