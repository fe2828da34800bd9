"""Do the work of a search: draw trials, train them, record their scores; then train the winners with other seeds."""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxrl_fast.config.paths import CHECKPOINTS
from jaxrl_fast.loggers.terminal import Console
from jaxrl_fast.search import prepare, report, rounds, stages, winners
from jaxrl_fast.search.prepare import SearchPlan
from jaxrl_fast.search.study import Study
from jaxrl_fast.search.trials import Result, Status, Trial, score_of
from jaxrl_fast.utils import files, formatting

SECONDS, HISTORY = "seconds.json", "history.json"


def train(search: SearchPlan, terminal: Console) -> None:
    """Draw and train rounds until the study has all trials. Raises Stopped."""
    own, study = search.own, study_of(search)
    folder = search.folder / rounds.PROGRAMS
    folder.mkdir(exist_ok=True)
    note = lambda line: terminal.print(f"     {line}")
    number = 0
    with _timed(search.folder):
        while (asked := study.mine(number)) or study.count() < search.targets[-1]:
            # an extension begins a round: it is not added to the last
            drawn = study.count()
            first = asked[0].number if asked else drawn
            target = next((target for target in search.targets if target > first), search.targets[-1])
            count = min(stages.size(own.scheduler, search.batch, number), max(target - drawn, 0) + len(asked))
            if not (asked and all(trial.state.is_finished() for trial in asked)):
                _round(search, study, number, count, terminal, note)
            for path in folder.glob(f"r{number:02d}-*/{CHECKPOINTS}"):  # states that are not needed any more
                shutil.rmtree(path, ignore_errors=True)
            number += 1


def test(search: SearchPlan, terminal: Console) -> dict[int, tuple[float, ...]]:
    """Return the scores of the winners and of the default settings with each test seed, by trial. Raises Stopped."""
    (search.folder / rounds.PROGRAMS).mkdir(exist_ok=True)
    with _timed(search.folder):
        return winners.test(search, trials_of(search), terminal, lambda line: terminal.print(f"     {line}"))


def finish(search: SearchPlan, terminal: Console) -> Result:
    """Test the winners, and write the results. Raises Stopped."""
    tested, own = test(search, terminal), search.own
    result = Result(
        search.settings,
        search.space,
        trials_of(search),
        tested,
        own.sampler,
        own.scheduler.kind,
        own.score,
        tuple(search.round(0, [{}]).seeds),
        tuple(search.test([{}]).seeds),
        _seconds(search),
    )
    for line in report.write(search.folder, result):
        terminal.print(line.replace(str(search.folder), str(search.shown(search.folder))))
    return result


def trials_of(search: SearchPlan) -> tuple[Trial, ...]:
    """Return all trials of a search's study."""
    return study_of(search, writes=False).trials()


def study_of(search: SearchPlan, writes: bool = True) -> Study:
    """Open the study of a search. Raise ValueError as `Study`."""
    own, options = search.own, prepare.shared_options(search)
    named, drawn = (search.id, own.storage, own.study), (search.space, own.sampler, search.settings.options.seed)
    alone = not own.storage and own.workers == 1
    return Study(search.home or search.folder, *named, *drawn, options, search.targets[-1], alone, writes)


@contextlib.contextmanager
def _timed(folder: Path) -> Iterator[None]:
    """Add the seconds of a block to those of earlier processes in this folder."""
    began = time.perf_counter()
    try:
        yield
    finally:
        files.replace(folder / SECONDS, json.dumps(_kept(folder) + time.perf_counter() - began) + "\n")


def _kept(folder: Path) -> float:
    """Return the seconds that a folder holds."""
    path = folder / SECONDS
    return float(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else 0.0


def _seconds(search: SearchPlan) -> float:
    """Return the seconds of the search, in all of its processes."""
    return sum(map(_kept, {search.folder, *(task.folder for task in search.tasks.values())}))


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
                found.failures.get(place, ""),
            )
        )
    if found.history:
        lines = json.dumps({"trials": [trial.number for trial in asked], "first": values, "stages": found.history})
        files.replace(search.folder / HISTORY, lines + "\n")
    for failure in dict.fromkeys(found.failures.values()):
        terminal.print(f"     failed: {failure}")
    for best in winners.scored(study.trials())[:1]:
        chosen = ", ".join(f"{name} {report.cell(value)}" for name, value in best.values.items())
        terminal.print(f"     best so far {best.score:.1f}, trial {best.number}: {chosen}")
