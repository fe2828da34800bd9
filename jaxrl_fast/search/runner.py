"""Run a search: print what is searched, start its tasks, and say how to resume it."""

from shlex import quote

from jaxrl_fast import __version__
from jaxrl_fast.config.sources import SEARCH
from jaxrl_fast.loggers.terminal import Console, make_console
from jaxrl_fast.options.search import PBT, Halving
from jaxrl_fast.search import prepare, rounds, spaces, stages, tasks, winners
from jaxrl_fast.search.prepare import SearchPlan
from jaxrl_fast.training import plan
from jaxrl_fast.utils import devices, formatting, warnings


def execute(search: SearchPlan) -> int:
    """Run the search to its end and write its results. Return the exit status."""
    terminal = make_console(search.log_level)
    try:
        announce(search, terminal)
        if search.settings.options.dry_run:
            return 0
        if search.lock:
            search.lock.release()  # each task has the lock of its folder while it trains
        try:
            found = tasks.RUN[search.own.launcher](search, terminal)
        except rounds.Stopped as stopped:
            for line in stopped.args[1:]:
                warnings.warn(line)
            terminal.print(f"  stopped; resume with  {command(search)}")
            return int(stopped.args[0])
        return 0 if found is None or winners.scored(found.trials) else 1
    finally:
        terminal.close()


def command(search: SearchPlan) -> str:
    """Return the command that resumes the search."""
    launcher = "" if search.own.launcher == "local" else f" --launcher {search.own.launcher}"
    return f"{SEARCH} --resume {quote(str(search.shown(search.folder)))}{launcher}"


def announce(search: SearchPlan, terminal: Console) -> None:
    """Print what is searched and how; for a dry run also the programs, their memory and the steps."""
    own, settings = search.own, search.settings
    number = f"{formatting.counted(search.targets[-1], 'trial')} x {formatting.counted(own.seeds, 'seed')}"
    how = own.sampler if own.scheduler.kind == "none" else f"{own.sampler}, {own.scheduler.kind}"
    parts = [f"search of {settings.algo}", number, how, devices.device()]
    if own.launcher != "local":
        parts.insert(3, f"{formatting.counted(own.workers, 'task')} on {own.launcher.capitalize()}")
    terminal.print(f"jaxrl_fast {__version__}   {' · '.join(parts)}")
    for dimension in search.space:
        terminal.print(f"over  {spaces.text_of(dimension)}")
    if not settings.options.dry_run:
        terminal.print(f"search  {search.shown(search.folder)}")
        return
    programs, _ = prepare.first_programs(search)
    ends = stages.until(own.scheduler, settings.options.total_steps, 0)
    members = formatting.counted(sum(len(p.owners) for p in programs), "member")
    terminal.print(f"first round  {members} in {formatting.counted(len(programs), 'program')}, to steps {_steps(ends)}")
    largest = max(programs, key=lambda program: len(program.owners)).group
    terminal.print(f"memory  {plan.validate_plan(largest.settings, largest.members).needs}")
    count = -(-search.targets[-1] // search.batch)
    sizes = len(programs) * (1 if isinstance(own.scheduler, PBT) else len(ends)) * own.workers
    terminal.print(f"rounds  {count}; {formatting.counted(sizes, 'compilation')}, which later rounds use again")
    of_trials, of_tests = (formatting.short_number(steps) for steps in (_most_steps(search), _test_steps(search)))
    terminal.print(f"steps  at most {of_trials} in trials, {of_tests} in tests")


def _steps(ends: list[int]) -> str:
    return ", ".join(map(formatting.short_number, ends if len(ends) < 6 else [ends[0], ends[1], ends[-1]]))


def _most_steps(search: SearchPlan) -> int:
    """Return the environment steps of all trials, if trials of choices end like others."""
    own, total, left, steps = search.own, search.settings.options.total_steps, search.targets[-1], 0
    number = 0
    while left > 0:
        count = min(stages.size(own.scheduler, search.batch, number), left)
        left, before = left - count, 0
        for end in stages.until(own.scheduler, total, number):
            steps, before = steps + count * (end - before), end
            if isinstance(own.scheduler, Halving):
                count = max(1, count // own.scheduler.factor)
        number += 1
    return steps * own.seeds


def _test_steps(search: SearchPlan) -> int:
    """Return the environment steps of all tests."""
    settings = min(search.own.winners, search.targets[-1]) + 1
    return settings * search.own.test_seeds * search.settings.options.total_steps
