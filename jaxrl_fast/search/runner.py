"""Run a search: draw trials, train them, record their scores; then train the winners with other seeds and report."""

import json
import math
import shutil
import time
from collections.abc import Callable
from shlex import quote

from jaxrl_fast import __version__
from jaxrl_fast.config.paths import CHECKPOINTS
from jaxrl_fast.config.sources import SEARCH
from jaxrl_fast.loggers.terminal import Console, make_console
from jaxrl_fast.options.search import PBT, Halving
from jaxrl_fast.search import prepare, report, rounds, spaces, stages, winners
from jaxrl_fast.search.prepare import SearchPlan
from jaxrl_fast.search.study import Study
from jaxrl_fast.search.trials import Result, Status, Trial, score_of
from jaxrl_fast.training import plan
from jaxrl_fast.utils import devices, files, formatting


def execute(search: SearchPlan) -> int:
    """Run the search to its end and write its results. Return the exit status."""
    terminal = make_console(search.log_level)
    try:
        announce(search, terminal)
        if search.settings.options.dry_run:
            return 0
        try:
            found = run(search, terminal)
        except rounds.Stopped as stopped:
            terminal.print(f"  stopped; resume with  {command(search)}")
            return int(stopped.args[0])
        return 0 if winners.scored(found.trials) else 1
    finally:
        terminal.close()
        if search.lock:
            search.lock.release()


def command(search: SearchPlan) -> str:
    """Return the command that resumes the search."""
    return f"{SEARCH} --resume {quote(str(search.shown(search.folder)))}"


def announce(search: SearchPlan, terminal: Console) -> None:
    """Print what is searched and how; for a dry run also the programs, their memory and the steps."""
    own, settings = search.own, search.settings
    number = f"{formatting.counted(search.targets[-1], 'trial')} x {formatting.counted(own.seeds, 'seed')}"
    how = own.sampler if own.scheduler.kind == "none" else f"{own.sampler}, {own.scheduler.kind}"
    parts = [f"search of {settings.algo}", number, how, devices.device()]
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
    sizes = len(programs) * (1 if isinstance(own.scheduler, PBT) else len(ends))
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


def run(search: SearchPlan, terminal: Console) -> Result:
    """Run the rounds that are left, test the winners, and write the results. Raises Stopped."""
    began = time.perf_counter()
    own, study = search.own, _study(search)
    folder = search.folder / rounds.PROGRAMS
    folder.mkdir(exist_ok=True)
    note = lambda line: terminal.print(f"     {line}")
    number = 0
    while (asked := study.mine(number)) or study.count() < search.targets[-1]:
        first = asked[0].number if asked else study.count()  # an extension begins a round: it is not added to the last
        target = next((target for target in search.targets if target > first), search.targets[-1])
        count = min(stages.size(own.scheduler, search.batch, number), target - study.count() + len(asked))
        if not (asked and all(trial.state.is_finished() for trial in asked)):
            _round(search, study, number, count, terminal, note)
        for path in folder.glob(f"r{number:02d}-*/{CHECKPOINTS}"):  # the states of its trials are not needed any more
            shutil.rmtree(path, ignore_errors=True)
        number += 1
    tested = winners.test(search, study.trials(), terminal, note)
    result = Result(
        search.settings,
        search.space,
        study.trials(),
        tested,
        own.sampler,
        own.scheduler.kind,
        own.score,
        tuple(search.round(0, [{}]).seeds),
        tuple(search.test([{}]).seeds),
        _seconds(search, time.perf_counter() - began),
    )
    for line in report.write(search.folder, result):
        terminal.print(line.replace(str(search.folder), str(search.shown(search.folder))))
    return result


def trials_of(search: SearchPlan) -> tuple[Trial, ...]:
    """Return all trials of a search's study."""
    return _study(search, writes=False).trials()


def _study(search: SearchPlan, writes: bool = True) -> Study:
    """Open the study of a search. Raise ValueError as `Study`."""
    own, options = search.own, prepare.shared_options(search)
    named, drawn = (search.id, own.storage, own.study), (search.space, own.sampler, search.settings.options.seed)
    return Study(search.folder, *named, *drawn, options, search.targets[-1], writes)


def _seconds(search: SearchPlan, now: float) -> float:
    """Return the seconds of the search, in all of its processes."""
    path = search.folder / "seconds.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else 0.0
    files.replace(path, json.dumps(before + now) + "\n")
    return float(before + now)


def _round(
    search: SearchPlan, study: Study, number: int, count: int, terminal: Console, note: Callable[[str], None]
) -> None:
    """Draw the trials of a round, train them, and record their results."""
    asked = study.ask(number, count)
    values = [trial.user_attrs["values"] for trial in asked]
    terminal.print(f"round {number + 1}  {formatting.counted(len(values), 'trial')}")
    round = search.round(number, values)
    with study.alive(number):
        found = rounds.run(round, search.folder / rounds.PROGRAMS, search.own, search.space, terminal, note)
    last = len(stages.until(search.own.scheduler, search.settings.options.total_steps, number)) - 1
    so_far = sum(trial.steps for trial in study.trials() if trial.status != "running") * search.own.seeds
    for place, kept in enumerate(asked):
        if kept.state.is_finished():
            continue
        so_far += found.steps[place] * search.own.seeds
        scores = found.scores[place]
        diverged = any(map(math.isnan, scores))
        ended: Status = "stopped" if found.stage[place] < last else "complete"
        status: Status = "failed" if place in found.failures else "diverged" if diverged else ended
        parent = found.parents[place]
        study.tell(
            Trial(
                kept.number,
                found.values[place],
                scores,
                None if status == "failed" else score_of(scores),
                found.steps[place],
                found.stage[place],
                status,
                None if parent is None else asked[parent].number,
                so_far,
            )
        )
    if found.history:
        lines = json.dumps({"trials": [trial.number for trial in asked], "first": values, "stages": found.history})
        files.replace(search.folder / winners.HISTORY, lines + "\n")
    for failure in dict.fromkeys(found.failures.values()):
        terminal.print(f"     failed: {failure}")
    for best in winners.scored(study.trials())[:1]:
        chosen = ", ".join(f"{name} {report.cell(value)}" for name, value in best.values.items())
        terminal.print(f"     best so far {best.score:.1f}, trial {best.number}: {chosen}")
