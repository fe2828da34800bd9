"""Run a search: draw trials, train them, record their scores; then train the winners with other seeds and report."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from shlex import quote
from typing import Any

from jaxrl_fast import __version__
from jaxrl_fast.config.sources import SEARCH
from jaxrl_fast.loggers.terminal import Console, make_console
from jaxrl_fast.options.search import PBT, Halving, WholeRuns
from jaxrl_fast.search import prepare, report, rounds, spaces, stages
from jaxrl_fast.search.prepare import SearchPlan
from jaxrl_fast.search.study import Study
from jaxrl_fast.search.trials import DEFAULT, Result, Trial, score_of
from jaxrl_fast.utils import devices, files, formatting

PROGRAMS, TESTS, HISTORY = "programs", "tests.json", "history.json"


def execute(search: SearchPlan) -> int:
    """Run the search to its end and write its results. Return the exit status."""
    terminal = make_console(search.log_level)
    try:
        announce(search, terminal)
        if search.settings.options.dry_run:
            return 0
        try:
            run(search, terminal)
        except rounds.Stopped as stopped:
            terminal.print(f"  stopped; resume with  {command(search)}")
            return 128 + stopped.number
        return 0
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
    programs = prepare.first_programs(search)
    ends = stages.until(own.scheduler, settings.options.total_steps, 0)
    members = formatting.counted(sum(len(p.owners) for p in programs), "member")
    terminal.print(f"first round  {members} in {formatting.counted(len(programs), 'program')}, to steps {_steps(ends)}")
    count = -(-search.targets[-1] // search.batch)
    sizes = len(programs) * (1 if isinstance(own.scheduler, PBT) else len(ends))
    terminal.print(f"rounds  {count}; {formatting.counted(sizes, 'compilation')}, which later rounds use again")
    terminal.print(f"steps  at most {formatting.short_number(_most_steps(search))} in trials, {_of_tests(search)} in tests")


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


def _of_tests(search: SearchPlan) -> str:
    return formatting.short_number(
        (min(search.own.winners, search.targets[-1]) + 1) * search.own.test_seeds * search.settings.options.total_steps
    )


def run(search: SearchPlan, terminal: Console) -> Result:
    """Run the rounds that are left, test the winners, and write the results. Raises Stopped."""
    began = time.perf_counter()
    own, study = search.own, _study(search)
    folder = search.folder / PROGRAMS
    folder.mkdir(exist_ok=True)
    note = lambda line: terminal.print(f"     {line}")
    number = 0
    for target in search.targets:
        while (asked := study.mine(number)) or study.count() < target:
            count = min(stages.size(own.scheduler, search.batch, number), target - study.count() + len(asked))
            if not (asked and all(trial.state.is_finished() for trial in asked)):
                _round(search, study, number, count, terminal, note)
            number += 1
    tested = _tests(search, study, terminal, note)
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
        terminal.print(line)
    return result


def trials_of(search: SearchPlan) -> tuple[Trial, ...]:
    """Return all trials of a search's study."""
    return _study(search).trials()


def _study(search: SearchPlan) -> Study:
    """Open the study of a search. Raise ValueError as `Study`."""
    own, options = search.own, prepare.shared_options(search)
    named = own.storage, own.study or search.folder.name
    drawn = search.space, own.sampler, search.settings.options.seed
    return Study(search.folder, *named, *drawn, options, search.targets[-1])


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
        found = rounds.run(round, search.folder / PROGRAMS, search.own, search.space, terminal, note)
    last = len(stages.until(search.own.scheduler, search.settings.options.total_steps, number)) - 1
    so_far = sum(trial.steps for trial in study.trials()) * search.own.seeds
    for place, kept in enumerate(asked):
        if kept.state.is_finished():
            continue
        so_far += found.steps[place] * search.own.seeds
        scores = found.scores[place]
        diverged = any(map(math.isnan, scores))
        status = "failed" if place in found.failures else "diverged" if diverged else "complete"
        status = "stopped" if status == "complete" and found.stage[place] < last else status
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
        files.replace(search.folder / HISTORY, lines + "\n")
    for failure in dict.fromkeys(found.failures.values()):
        terminal.print(f"     failed: {failure}")
    best = max(_scored(study), key=lambda trial: trial.score, default=None)
    if best is not None:
        chosen = ", ".join(f"{name} {spaces.word(value)}" for name, value in best.values.items())
        terminal.print(f"     best so far {best.score:.1f}, trial {best.number}: {chosen}")


def _scored(study: Study) -> list[Trial]:
    """Return the trials that have trained for all steps and have a finite score."""
    return [t for t in study.trials() if t.status == "complete" and t.score is not None and math.isfinite(t.score)]


def _tests(
    search: SearchPlan, study: Study, terminal: Console, note: Callable[[str], None]
) -> dict[int, tuple[float, ...]]:
    """Train the winners and the default settings with the test seeds. Return the scores by trial."""
    own = search.own
    best = sorted(_scored(study), key=lambda trial: (-float(trial.score or 0), trial.number))
    histories = _schedule(search, [trial.number for trial in best], {}) or [[trial.values for trial in best]]
    distinct: dict[str, Trial] = {}
    for trial, history in zip(best, zip(*histories)):
        distinct.setdefault(repr(history), trial)
    winners = [*distinct.values()][: own.winners]
    if not own.test_seeds or not winners:
        return {}
    path = search.folder / TESTS
    tested = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    default = {name: search.settings.value(name) for name in search.varied}
    wanted: dict[int, Mapping[str, Any]] = {trial.number: trial.values for trial in winners} | {DEFAULT: default}
    seeds = [*search.test([{}]).seeds]
    missing = {n: v for n, v in wanted.items() if len(tested.get(str(n), ())) != len(seeds)}
    if missing:
        terminal.print(f"test  {formatting.counted(len(missing), 'setting')} x {formatting.counted(len(seeds), 'seed')}")
        name = "test-" + "-".join("default" if n == DEFAULT else str(n) for n in missing)
        schedule = _schedule(search, list(missing), default)
        round = search.test(schedule[0] if schedule else [*missing.values()], schedule)._replace(name=f"{name}-{len(seeds)}")
        whole = dataclasses.replace(own, scheduler=WholeRuns(kind="none"))
        found = rounds.run(round, search.folder / PROGRAMS, whole, search.space, terminal, note)
        tested |= {str(n): list(scores) for n, scores in zip(missing, found.scores, strict=True)}
        files.replace(path, json.dumps(tested) + "\n")
    return {n: tuple(tested[str(n)]) for n in wanted}


def _schedule(
    search: SearchPlan, numbers: list[int], default: Mapping[str, Any]
) -> list[list[Mapping[str, Any]]]:
    """Return the values of trials in each stage of population-based training: those of the states that they have."""
    path = search.folder / HISTORY
    if not isinstance(search.own.scheduler, PBT) or not path.is_file():
        return []
    history = json.loads(path.read_text(encoding="utf-8"))
    stages_of = [history["first"], *([each["values"] for each in stage] for stage in history["stages"])]
    parents = [[each["parent"] for each in stage] for stage in history["stages"]]
    found = []
    for number in numbers:
        if number == DEFAULT:
            found.append([default] * len(stages_of))
            continue
        place, own = history["trials"].index(number), []
        for i in reversed(range(len(stages_of))):
            own.append(stages_of[i][place])
            place = parents[i - 1][place] if i else place
        found.append(own[::-1])
    return [list(values) for values in zip(*found, strict=True)]
