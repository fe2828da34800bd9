"""Train the trials of a round as members of few programs, stage after stage.

    SEARCH/programs/r00-1            a run's folder: the members of the first program of round 0
                    r00-1-s1         the same after the first selection, with the members that are left
                         scores-1.json   the evaluations of its members up to stage 1, which is done

Which trials continue follows from the scores alone, so a search that is killed makes the same decisions again.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_fast.config.population import Member
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.loggers.terminal import Console
from jaxrl_fast.options.search import PBT, Halving, SearchOptions
from jaxrl_fast.runs import files
from jaxrl_fast.search import selection, stages
from jaxrl_fast.search.spaces import Dimension
from jaxrl_fast.sweep import directory, grid, prepare
from jaxrl_fast.sweep.grid import Group
from jaxrl_fast.sweep.worker import run_group
from jaxrl_fast.training.kept import Kept
from jaxrl_fast.utils import warnings
from jaxrl_fast.utils.files import replace
from jaxrl_fast.utils.formatting import counted, short_number

PROGRAMS = "programs"  # the folder of all programs
SCORES = "scores-{}.json"  # of a stage, by its number
Owner = tuple[int, int]  # the place of a trial in the round, and of the seed
Evaluation = tuple[int, float]  # environment steps of the seed, and the mean return


class Program(NamedTuple):
    """Members of a round that train together."""

    folder: Path
    group: Group
    owners: tuple[Owner, ...]


class Result(NamedTuple):
    """What became of the trials of a round, by place."""

    scores: list[tuple[float, ...]]  # of each seed, when the trial was last judged; NaN: diverged
    steps: list[int]  # environment steps of each seed until then
    stage: list[int]  # the last stage of the trial
    values: list[Mapping[str, Any]]  # the last ones
    parents: list[int | None]  # the place whose state the trial took last
    failures: dict[int, str]  # why the program of a trial failed
    history: list[list[dict[str, Any]]]  # with pbt, of each selection: for each trial the parent's place and the values


class Stopped(Exception):
    """A signal has stopped the search, or results could not be written; its arguments are the exit status, and why."""


class Round(NamedTuple):
    """The trials of a round, and how they are trained."""

    name: str  # begins the names of its folders
    number: int
    total_steps: int  # of each seed
    settings: Callable[[Mapping[str, Any]], Settings]  # of a trial, from its values
    values: Sequence[Mapping[str, Any]]  # of each trial, by the names of options
    seeds: Sequence[int]
    varied: Sequence[str]  # the names of all hyperparameters


def programs_of(round: Round, folder: Path | None) -> tuple[list[Program], dict[int, str]]:
    """Return the programs of a round, and why some trials cannot be trained, by place.

    A program has as many members as fit into memory; how many is kept in `folder`, for a resume may find other memory.
    """
    trainings, owners, failures = [], [], dict[int, str]()
    for place, values in enumerate(round.values):
        try:
            settings = round.settings(values)
        except ValueError as error:
            failures[place] = str(error)
            continue
        for i, seed in enumerate(round.seeds):
            trainings.append(settings.replace(seed=seed, num_seeds=1))
            owners.append((place, i))
    path = folder / f"{round.name}.json" if folder else None
    kept = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else None
    found: list[Program] = []
    sizes: list[list[int]] = []
    for number, (group, places) in enumerate(grid.with_places(trainings, round.varied)):
        try:
            sizes.append(kept[number] if kept else _sizes(group, round.varied))
        except ValueError as error:
            failures |= {owners[place][0]: str(error) for place in places}
            sizes.append([])
        start = 0
        for size in sizes[-1]:
            mine, members = places[start : start + size], group.members[start : start + size]
            name = f"{round.name}-{len(found) + 1}"
            of_trials = tuple(owners[place] for place in mine)
            found.append(Program((folder or Path()) / name, grid.part(group, members), of_trials))
            start += size
    if path and kept is None:
        replace(path, json.dumps(sizes) + "\n")
    return found, failures


def _sizes(group: Group, varied: Sequence[str]) -> list[int]:
    """Return the numbers of members in the programs of a group. Raise ValueError if it cannot be trained."""
    return [len(part.members) for part in prepare.split_to_fit(group, varied)]


def run(
    round: Round,
    folder: Path,
    options: SearchOptions,
    space: Sequence[Dimension],
    terminal: Console,
    note: Callable[[str], None],
) -> Result:
    """Train a round to its end and return what became of its trials. Raises Stopped."""
    scheduler = options.scheduler
    ends = stages.until(scheduler, round.total_steps, round.number)
    count = len(round.values)
    nothing = tuple(math.nan for _ in round.seeds)
    found = Result([nothing] * count, [0] * count, [0] * count, [*round.values], [None] * count, {}, [])
    programs, failures = programs_of(round, folder)
    found.failures.update(failures)
    kept: dict[tuple[str, int], Kept] = {}  # by the name of a program and its number of members
    for stage, end in enumerate(ends):
        alive = sorted({place for program in programs for place, _ in program.owners})
        scores = {place: [math.nan] * len(round.seeds) for place in alive}
        left = []
        for program in programs:
            part = f" · stage {stage + 1} of {len(ends)}" if len(ends) > 1 else ""
            note(f"{program.folder.name}{part} · {counted(len(program.owners), 'member')} to step {short_number(end)}")
            compiled = kept.setdefault((_base(program), len(program.owners)), Kept())
            evaluations, failure, over = trained(program, stage, end, terminal, compiled)
            left += [] if over else [program]
            for (place, i), own in zip(program.owners, evaluations, strict=True):
                scores[place][i] = score_of(own, options.score)
                if failure:
                    found.failures[place] = failure
                found.steps[place] = own[-1][0] if own else end
        for place in alive:
            found.scores[place], found.stage[place] = tuple(scores[place]), stage
        if stage + 1 == len(ends) or not left:
            break
        programs = left
        if isinstance(scheduler, PBT):
            table = np.array([found.scores[place] for place in range(count)])
            seed = [programs[0].group.settings.options.seed, round.number]
            copies = stages.evolve(scheduler, space, found.values, table, options.judge, stage, seed)
            programs = [changed(program, copies, stage + 1) for program in programs]
            for place, copy in enumerate(copies):
                found.values[place] = copy.values
                found.parents[place] = copy.state_of if copy.state_of != place else found.parents[place]
            found.history.append([{"parent": c.state_of, "values": dict(c.values)} for c in copies])
        elif isinstance(scheduler, Halving):
            table = np.array([found.scores[place] for place in alive])
            remaining = {alive[i] for i in stages.kept(scheduler, stages.order(table, options.judge))}
            programs = [p for program in programs if (p := reduced(program, remaining, stage + 1))]
    return found


def trained(
    program: Program, stage: int, end: int, terminal: Console, kept: Kept
) -> tuple[list[list[Evaluation]], str, bool]:
    """Train a program's members to step `end`. Return the evaluations of each, why it failed or "", and if it is over.

    A program whose stage has ended is not trained again. `kept` has what earlier stages have compiled.
    """
    folder, path = program.folder, program.folder / SCORES.format(stage)
    if not path.is_file():
        result = run_group(folder, program.group, terminal, lambda: None, end, kept)
        if result and result["signal"]:
            raise Stopped(128 + result["signal"])
        if result is None and not (folder / directory.FAILED).is_file() and not _is_over(folder):
            warnings.warn(f"another process trains {folder}; wait for its end")
            raise Stopped(1)
        if result and result["unsaved"]:
            raise Stopped(1)
        failure = directory.failure(folder) if (folder / directory.FAILED).is_file() else ""
        found = [] if failure else _evaluations(program)
        found = found or [[] for _ in program.owners]
        over = bool(failure) or _is_over(folder)
        replace(path, json.dumps({"evaluations": found, "failure": failure, "over": over}, allow_nan=False) + "\n")
    content = json.loads(path.read_text(encoding="utf-8"))
    evaluations = [[(steps, value) for steps, value in own] for own in content["evaluations"]]
    return evaluations, content["failure"], content["over"]


def _is_over(folder: Path) -> bool:
    """Return whether a program has ended, since it reached its last step or all of its members have diverged."""
    return files.summary_if_any(folder).get("status") in ("done", "diverged")


def _evaluations(program: Program) -> list[list[Evaluation]]:
    """Return the evaluations of each member, also those of earlier stages. A diverged member has none."""
    count = len(program.owners)
    records = files.read_metrics(program.folder)
    found = [dict(own) for own in _newest(program.folder) or [[]] * count]
    for start in range(0, len(records) - count + 1, count):
        for i, record in enumerate(records[start : start + count]):
            if record.get("eval_return_mean") is not None:
                found[i][record["env_steps"]] = record["eval_return_mean"]
    diverged = files.read_summary(program.folder)["diverged_at_per_seed"]
    return [[] if wrong else sorted(own.items()) for wrong, own in zip(diverged, found, strict=True)]


def _newest(folder: Path) -> list[list[Evaluation]]:
    """Return the evaluations of the last stage that a program has ended; [] before the first."""
    paths = sorted(folder.glob("scores-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    return json.loads(paths[-1].read_text(encoding="utf-8"))["evaluations"] if paths else []


def score_of(evaluations: Sequence[Evaluation], kind: str) -> float:
    """Return the score of a seed: its last evaluation, its best, or the mean of all. NaN without any."""
    returns = [value for _, value in evaluations]
    if not returns:
        return math.nan
    return {"final": returns[-1], "best": max(returns), "area": sum(returns) / len(returns)}[kind]


def reduced(program: Program, remaining: set[int], stage: int) -> Program | None:
    """Return the program with the members of the remaining trials only; None without any."""
    places = [i for i, (trial, _) in enumerate(program.owners) if trial in remaining]
    if not places or len(places) == len(program.owners):
        return program if places else None
    return _moved(program, places, [program.group.members[i] for i in places], stage)


def changed(program: Program, copies: Sequence[stages.Copy], stage: int) -> Program:
    """Return the program in which members continue from the states and with the hyperparameters of others.

    Every trial of the copies has its members in this program.
    """
    where = {owner: i for i, owner in enumerate(program.owners)}
    places = [where[copies[trial].state_of, i] for trial, i in program.owners]
    members = [
        member._replace(values={name: float(copies[trial].values[name]) for name in member.values})
        for member, (trial, _) in zip(program.group.members, program.owners, strict=True)
    ]
    same = places == [*range(len(places))] and members == [*program.group.members]
    return program if same else _moved(program, places, members, stage)


def _moved(program: Program, places: Sequence[int], members: Sequence[Member], stage: int) -> Program:
    """Return a program with these members, whose folder is made from the old one's unless it exists."""
    folder = program.folder.with_name(f"{_base(program)}-s{stage}")
    owners = tuple(program.owners[i] for i in places) if len(places) < len(program.owners) else program.owners
    group = grid.part(program.group, members)
    if not folder.is_dir():
        before = _newest(program.folder)
        text = json.dumps({"evaluations": [before[i] for i in places], "failure": "", "over": False}) + "\n"
        selection.start_from(program.folder, folder, group, places, {SCORES.format(stage - 1): text})
    return Program(folder, group, owners)


def _base(program: Program) -> str:
    """Return the name of a program's first folder: "r00-1" for "r00-1-s3"."""
    return re.sub(r"-s\d+$", "", program.folder.name)
