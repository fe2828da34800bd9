"""Validate a search, then create its folder.

searches/NAME/search.yaml     the settings of a trial with default values, the space, and the options of the search
              study.journal   the trials, as Optuna stores them
              programs/       a run's folder for each program (`rounds`)
              workers/0/      the programs of a task of a launcher, if there are several (`tasks`)
              report.md       and trials.csv, best.yaml, figures
"""

import dataclasses
import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_fast.config.parts import choose, known_options, named, read_values, to_plain, with_values
from jaxrl_fast.config.paths import FORMAT, SEARCH_FILE, SEARCHES, check_format
from jaxrl_fast.config.population import real_numbers
from jaxrl_fast.config.resume import nearest_with
from jaxrl_fast.config.settings import Request, Settings, plain, resolve, to_mapping, with_algorithm
from jaxrl_fast.config.sources import SEARCH, from_mapping
from jaxrl_fast.options.declare import options_of
from jaxrl_fast.options.run import Output
from jaxrl_fast.options.search import PBT, Halving, SearchOptions
from jaxrl_fast.runs import directory
from jaxrl_fast.search import spaces, stages, study
from jaxrl_fast.search.request import EXTENDS, LAUNCH, SearchRequest
from jaxrl_fast.search.rounds import Program, Round, programs_of
from jaxrl_fast.search.spaces import Dimension
from jaxrl_fast.sweep import grid, ray_tasks, slurm
from jaxrl_fast.sweep import prepare as sweep
from jaxrl_fast.sweep.values import MAX_VALUES, setting_of
from jaxrl_fast.training import checks, schedule
from jaxrl_fast.utils import files, locks
from jaxrl_fast.utils.files import current_folder, path_of
from jaxrl_fast.utils.importing import name_of

OPTION = "search_dir"
WORKERS = "workers"  # the folder of tasks


class SearchPlan(NamedTuple):
    """A search that has been validated, and its folder."""

    folder: Path  # absolute
    settings: Settings  # of a trial with the default values
    own: SearchOptions
    space: tuple[Dimension, ...]
    targets: tuple[int, ...]  # numbers of trials: of the search as it began, and of each extension
    lock: locks.Lock | None = None
    place: Path | None = None  # the folder as it was given
    log_level: str = "info"
    id: str = ""  # of the search in a study
    home: Path | None = None  # of a task: the folder of its search

    @property
    def varied(self) -> tuple[str, ...]:
        """Return the names of the hyperparameters."""
        return tuple(dimension.name for dimension in self.space)

    @property
    def tasks(self) -> dict[str, "SearchPlan"]:
        """Return the searches that together are this one, by name. A single one is the search itself."""
        if self.own.workers == 1:
            return {"0": self}
        task = lambda path, name: self._replace(
            folder=self.folder / path, place=self.place and self.place / path, id=f"{self.id}-{name}", home=self.folder
        )
        return {str(i): task(Path(WORKERS, str(i)), str(i)) for i in range(self.own.workers)}

    @property
    def batch(self) -> int:
        """Return the number of trials in a round of a task."""
        if self.own.batch != "auto":
            return int(self.own.batch)
        scheduler, trials = self.own.scheduler, self.own.trials
        parts = 1 if self.own.sampler in ("random", "grid") or isinstance(scheduler, PBT) else 4
        least = scheduler.factor ** (scheduler.rungs - 1) if isinstance(scheduler, Halving) else 1
        return min(max(-(-trials // (parts * self.own.workers)), least), trials)

    def settings_of(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings of a trial. Raise ValueError if they are not valid."""
        asked = Request(self.settings.algo, "", from_mapping(to_mapping(self.settings)), [])
        given = [setting_of(name, value) for name, value in values.items()]
        found = resolve(with_algorithm(asked._replace(given=given), SEARCH_FILE))
        return found._replace(options=dataclasses.replace(found.options, env=self.settings.options.env))

    def round(self, number: int, values: Sequence[Mapping[str, Any]]) -> Round:
        """Return the round of this number, whose trials have these values."""
        first, total = self.settings.options.seed, self.settings.options.total_steps
        seeds = range(first, first + self.own.seeds)
        return Round(f"r{number:02d}", number, total, self.settings_of, values, seeds, self.varied)

    def test(self, values: Sequence[Mapping[str, Any]]) -> Round:
        """Return the trainings of winners with the test seeds, which no trial has had."""
        first = self.settings.options.seed + self.own.seeds
        return self.round(0, values)._replace(seeds=range(first, first + self.own.test_seeds))

    def shown(self, path: Path) -> Path:
        """Return a path in the search's folder for a message: relative if the folder was given so."""
        return (self.place or self.folder) / path.relative_to(self.folder)


def prepare(request: SearchRequest) -> SearchPlan:
    """Validate a search, then create its folder or read that of the search to resume.

    Raises:
        ValueError: If an option is not valid; nothing has been written then.
    """
    study.load_optuna()
    sweep.check_launcher(request.own)
    if (number := slurm.num_tasks(request.own.slurm_options)) > 1:
        problem = "a job of a search has one task"
        raise ValueError(f"slurm_options: {problem}, got {number}; use workers for several jobs")
    if request.own.launcher != "local" and request.settings:
        sweep.check_no_env_objects([request.settings])
    ready = _ready(request)
    if request.own.launcher == "ray" and not ready.settings.options.dry_run:
        ray_tasks.check_nodes(ready.folder / SEARCH_FILE, OPTION)
    return ready


def _ready(request: SearchRequest) -> SearchPlan:
    """Return the search, new or as its folder holds it. Raise ValueError for one that cannot be run."""
    start = current_folder()
    if request.resume:
        return _resumed(request, path_of(request.resume, "resume"))
    assert request.settings is not None
    settings, own = request.settings, request.own
    space = spaces.parse(request.over, settings.known, settings.algo)
    folder = path_of(own.search_dir, OPTION) if own.search_dir else None
    draft = SearchPlan(start, settings, own, space, (own.trials,), None, None, settings.options.log_level)
    grid.offer_devices([settings])
    _check(draft)
    if settings.options.dry_run:
        return draft
    if folder is not None and directory.is_taken(folder):
        return _continued(draft, folder)
    env_name = directory.name_of_env(name_of(settings.options.env))
    default = SEARCHES / f"{settings.algo_name}_{env_name}_{datetime.now():%Y%m%d-%H%M%S}"
    place = directory.make(folder, default, start, OPTION)
    lock = directory.claim_new(start / place, OPTION)
    ready = draft._replace(folder=start / place, lock=lock, place=place, id=secrets.token_hex(4))
    _write(ready)
    return ready


def _check(draft: SearchPlan) -> None:
    """Raise ValueError for a search that cannot be run."""
    own, settings = draft.own, draft.settings
    checks.check_services(settings.options)
    if (members := draft.batch * own.seeds) > MAX_VALUES:
        raise ValueError(f"trials: a round trains at most {MAX_VALUES} trials x seeds, got {members}; set batch")
    if bool(own.storage) != bool(own.study):
        missing, given = ("study", "storage") if own.storage else ("storage", "study")
        raise ValueError(f"{given}: several searches share a study by its storage and its name; give {missing} too")
    study.check(own.storage, own.study, shared_options(draft), own.sampler, draft.space, own.trials)
    if isinstance(own.scheduler, PBT):
        real = real_numbers(settings.agent)
        for dimension in draft.space:
            if dimension.kind != "real" or dimension.name not in real:
                problem = "pbt changes numbers while their program runs, and this needs another program"
                raise ValueError(f"over: {problem}, got {dimension.name}; search it with another scheduler")
        fewest = 2 * len(own.scheduler.frequencies)
        if own.trials < fewest or own.batch != "auto" and own.batch != own.trials:
            problem = f"pbt trains all trials together, {fewest} or more"
            got = f"got {own.trials} trials and batch {own.batch}"
            raise ValueError(f"scheduler: {problem}, {got}; use more trials and no batch")
    _check_stages(own, settings)
    programs, failures = first_programs(draft)
    if not programs:
        raise ValueError(next(iter(failures.values())))
    if isinstance(own.scheduler, PBT) and len(programs) > 1:
        fits = len(programs[0].owners) // own.seeds
        if not fits or len(programs) == len(programs[0].owners) * own.trials * own.seeds:
            problem = "pbt needs environments and a replay on the device, where trials share a program"
            raise ValueError(f"scheduler: {problem}, got {settings.options.env}; use another scheduler")
        raise ValueError(f"trials: all must fit into memory together with pbt, got {own.trials}; use {fits}")


def _check_stages(own: SearchOptions, settings: Settings) -> None:
    """Raise ValueError if two stages would end at the same update."""
    options = settings.options
    steps = settings.agent.length(options.num_envs) * options.num_envs
    ends = [0, *(schedule.to_updates(end, steps) for end in stages.until(own.scheduler, options.total_steps, 0))]
    if any(a == b for a, b in itertools.pairwise(ends)):
        name = "scheduler.intervals" if isinstance(own.scheduler, PBT) else "scheduler.rungs"
        got = f"got {len(ends) - 1} stages of {options.total_steps} steps"
        raise ValueError(f"{name}: each stage needs an update of {steps} steps, {got}; use fewer, or more total_steps")


def first_programs(draft: SearchPlan) -> tuple[list[Program], dict[int, str]]:
    """Return the programs of a first round, as they are for random values, and why some trials cannot be trained."""
    count = min(stages.size(draft.own.scheduler, draft.batch, 0), draft.own.trials)
    random = np.random.default_rng(draft.settings.options.seed)
    values = [{each.name: spaces.resample(each, random) for each in draft.space} for _ in range(count)]
    return programs_of(draft.round(0, values), None)


def _continued(draft: SearchPlan, folder: Path) -> SearchPlan:
    """Return the search in a folder that exists. Raise ValueError if it is another one."""
    if not (folder / SEARCH_FILE).is_file():
        raise ValueError(f"{OPTION}: the folder {folder} exists and is not a search; choose another")
    saved = read(folder)
    old, new = ({**_config(plan), **_mapping(plan)["search"], "space": plan.space} for plan in (saved, draft))
    if different := [name for name in new if str(new[name]) != str(old.get(name))]:
        names = ", ".join(different[:3])
        raise ValueError(f"{OPTION}: {folder} holds a different search ({names} differ); choose another")
    own, lock = dataclasses.replace(saved.own, **_launch(draft.own)), directory.claim(folder)
    return saved._replace(own=own, lock=lock, settings=draft.settings, log_level=draft.log_level)


def _resumed(request: SearchRequest, folder: Path) -> SearchPlan:
    """Return the search to resume, perhaps with more trials."""
    saved = read(folder)
    grid.offer_devices([saved.settings])
    changes = {name: getattr(request.own, name) for name in EXTENDS if name in request.given}
    if changes.get("trials", saved.own.trials) < saved.targets[-1]:
        got = f"got {changes['trials']}"
        raise ValueError(f"trials: must be at least the {saved.targets[-1]} of the search, {got}; use more")
    if changes.get("trials", saved.targets[-1]) > saved.targets[-1]:
        if isinstance(saved.own.scheduler, PBT) or saved.own.sampler == "grid":
            what = "a grid" if saved.own.sampler == "grid" else "a population"
            raise ValueError(f"trials: {what} cannot be extended, got {changes['trials']}; start another search")
        saved = saved._replace(targets=(*saved.targets, changes.pop("trials")))
    changes.pop("trials", None)
    own, lock = dataclasses.replace(saved.own, **changes, **_launch(request.own)), directory.claim(folder)
    longer = saved._replace(own=own, lock=lock, log_level=request.log_level)
    _write(longer)
    return longer


def read(folder: Path) -> SearchPlan:
    """Return the plan that search.yaml in `folder` holds. Raise ValueError if there is none."""
    import yaml

    path = folder / SEARCH_FILE
    if not path.is_file():
        by_name = SEARCHES / folder.name
        hint = f"; did you mean {by_name}?" if (by_name / SEARCH_FILE).is_file() else nearest_with(SEARCH_FILE, folder)
        raise ValueError(f"resume {folder}: the folder has no {SEARCH_FILE}{hint}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_format(content["format"], f"resume {folder}")
        of_run = from_mapping({k: v for k, v in content["config"].items() if k != "algo"})
        settings = resolve(with_algorithm(Request(content["config"]["algo"], "", of_run, []), SEARCH_FILE))
        written = from_mapping({k: v for k, v in content["search"].items() if k != "over"})
        records = choose([SearchOptions()], written)
        known = known_options(records)
        own = with_values(records[0], read_values(named(written, known, records, program=SEARCH), known))
        own = dataclasses.replace(own, over=tuple(content["search"]["over"]))
        space = tuple(Dimension(**{**each, "values": tuple(each["values"])}) for each in content["space"])
        return SearchPlan(
            folder.absolute(), settings, own, space, tuple(content["trials"]), place=folder, id=content["id"]
        )
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a valid search file ({type(error).__name__})") from error


def _mapping(ready: SearchPlan) -> dict[str, Any]:
    """Return the contents of search.yaml."""
    own = {name: value for name, value in to_plain(ready.own).items() if name not in (OPTION, *LAUNCH)}
    return {
        "format": FORMAT,
        "id": ready.id,
        "trials": list(ready.targets),
        "config": to_mapping(ready.settings),
        "search": json.loads(json.dumps(own)),
        "space": json.loads(json.dumps([dimension._asdict() for dimension in ready.space])),
    }


def _write(ready: SearchPlan) -> None:
    """Write search.yaml."""
    import yaml

    files.replace(ready.folder / SEARCH_FILE, yaml.safe_dump(_mapping(ready), sort_keys=False))


def _launch(own: SearchOptions) -> dict[str, Any]:
    """Return the options of the launcher, which are not kept: each command chooses them."""
    return {name: getattr(own, name) for name in LAUNCH}


def shared_options(ready: SearchPlan) -> dict[str, Any]:
    """Return what all searches of one study have in common."""
    content = _mapping(ready)
    own = {name: content["search"][name] for name in ("seeds", "score", "scheduler")}
    return {"space": content["space"], **own, **_config(ready)}


def _config(ready: SearchPlan) -> dict[str, str]:
    """Return the settings of a trial as text, but for names, logs and the terminal."""
    output = options_of(Output)
    return {name: plain(value) for name, value in to_mapping(ready.settings).items() if name not in output}
