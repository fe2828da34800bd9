"""Train the winners of a search again, with seeds that no trial has had, and the default settings with the same."""

import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence

from jaxrl_fast.loggers.terminal import Console
from jaxrl_fast.options.search import WholeRuns
from jaxrl_fast.search import rounds
from jaxrl_fast.search.prepare import SearchPlan
from jaxrl_fast.search.trials import DEFAULT, Trial, ranked
from jaxrl_fast.utils import files
from jaxrl_fast.utils.formatting import counted

TESTS = "tests.json"


def scored(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that have trained for all steps with a finite score, the best first."""
    return [trial for trial in ranked(trials) if trial.status == "complete"]


def test(
    search: SearchPlan, trials: Sequence[Trial], terminal: Console, note: Callable[[str], None]
) -> dict[int, tuple[float, ...]]:
    """Return the scores of the winners and of the default settings with each test seed, by trial. Raises Stopped.

    A trial of population-based training is tested with its last values, which its preset has. Trials with the same
    values are one.
    """
    own, best = search.own, scored(trials)
    if not own.test_seeds or not best:
        return {}
    distinct: dict[str, int] = {}
    for trial in best:
        distinct.setdefault(repr(sorted(trial.values.items())), trial.number)
    winners = [*distinct.values()][: own.winners]
    path = search.folder / TESTS
    tested = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    missing = [number for number in (*winners, DEFAULT) if len(tested.get(str(number), ())) != own.test_seeds]
    if missing:
        terminal.print(f"test  {counted(len(missing), 'setting')} x {counted(own.test_seeds, 'seed')}")
        values_of = {trial.number: trial.values for trial in trials}
        values_of[DEFAULT] = {name: search.settings.value(name) for name in search.varied}
        which = zlib.crc32(repr((missing, own.test_seeds)).encode())
        round = search.test([values_of[number] for number in missing])._replace(name=f"test-{which:08x}")
        whole = dataclasses.replace(own, scheduler=WholeRuns(kind="none"))
        found = rounds.run(round, search.folder / rounds.PROGRAMS, whole, search.space, terminal, note)
        for place, number in enumerate(missing):
            if place in found.failures:
                terminal.print(f"     failed: {found.failures[place]}")
            else:
                tested[str(number)] = list(found.scores[place])
        files.replace(path, json.dumps(tested) + "\n")
    return {number: tuple(tested[str(number)]) for number in (*winners, DEFAULT) if str(number) in tested}
