"""Train the winners of a search again, with seeds that no trial has had, and the default settings with the same."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_fast.loggers.terminal import Console
from jaxrl_fast.options.search import PBT, WholeRuns
from jaxrl_fast.search import rounds
from jaxrl_fast.search.prepare import SearchPlan
from jaxrl_fast.search.trials import DEFAULT, Trial, ranked
from jaxrl_fast.utils import files
from jaxrl_fast.utils.formatting import counted

TESTS, HISTORY = "tests.json", "history.json"
Values = Mapping[str, Any]  # by the option's path


def scored(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that have trained for all steps with a finite score, the best first."""
    return [trial for trial in ranked(trials) if trial.status == "complete"]


def test(
    search: SearchPlan, trials: Sequence[Trial], terminal: Console, note: Callable[[str], None]
) -> dict[int, tuple[float, ...]]:
    """Return the scores of the winners and of the default settings with each test seed, by trial. Raises Stopped.

    Trials that have had the same values all the time are one.
    """
    own, best = search.own, scored(trials)
    if not own.test_seeds or not best:
        return {}
    distinct: dict[str, int] = {}
    for trial, history in zip(best, histories(search, best), strict=True):
        distinct.setdefault(repr(history), trial.number)
    winners = [*distinct.values()][: own.winners]
    path = search.folder / TESTS
    tested = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    missing = [number for number in (*winners, DEFAULT) if len(tested.get(str(number), ())) != own.test_seeds]
    if missing:
        terminal.print(f"test  {counted(len(missing), 'setting')} x {counted(own.test_seeds, 'seed')}")
        of_number = {trial.number: trial for trial in trials}
        schedules = histories(search, [of_number.get(number) for number in missing])
        by_stage = [list(values) for values in zip(*schedules, strict=True)]
        names = ["default" if number == DEFAULT else str(number) for number in missing]
        round = search.test(by_stage[0], by_stage)._replace(name=f"test-{'-'.join(names)}-{own.test_seeds}")
        whole = dataclasses.replace(own, scheduler=WholeRuns(kind="none"))
        found = rounds.run(round, search.folder / rounds.PROGRAMS, whole, search.space, terminal, note)
        tested |= {str(number): list(scores) for number, scores in zip(missing, found.scores, strict=True)}
        files.replace(path, json.dumps(tested) + "\n")
    return {number: tuple(tested[str(number)]) for number in (*winners, DEFAULT)}


def histories(search: SearchPlan, trials: Sequence[Trial | None]) -> list[list[Values]]:
    """Return the values of trials in each of their stages; None means the default settings.

    A trial of population-based training has had those of the states that it has taken. Others have one stage.
    """
    default: Values = {name: search.settings.value(name) for name in search.varied}
    path = search.folder / HISTORY
    if not isinstance(search.own.scheduler, PBT) or not path.is_file():
        return [[trial.values if trial else default] for trial in trials]
    history = json.loads(path.read_text(encoding="utf-8"))
    values = [history["first"], *([each["values"] for each in stage] for stage in history["stages"])]
    found: list[list[Values]] = []
    for trial in trials:
        if trial is None:
            found.append([default] * len(values))
            continue
        place, own = history["trials"].index(trial.number), []
        for stage in reversed(range(len(values))):
            own.append(values[stage][place])
            place = history["stages"][stage - 1][place]["parent"] if stage else place
        found.append(own[::-1])
    return found
