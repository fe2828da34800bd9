"""Validate a search, then create its folder.

searches/NAME/search.yaml     the settings of a trial with default values, the space, and the options of the search
              study.journal   the trials, as Optuna stores them
              programs/       a run's folder for each program (`rounds`)
              report.md       and trials.csv, best.yaml, figures
"""

import dataclasses
import json
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
from jaxrl_fast.options.search import PBT, Halving, SearchOptions
from jaxrl_fast.runs import directory
from jaxrl_fast.search import spaces, stages, study
from jaxrl_fast.search.request import EXTENDS, SearchRequest
from jaxrl_fast.search.rounds import Program, Round, programs_of
from jaxrl_fast.search.spaces import Dimension
from jaxrl_fast.sweep import grid
from jaxrl_fast.sweep.values import MAX_VALUES, setting_of
from jaxrl_fast.training import checks
from jaxrl_fast.utils import files, locks
from jaxrl_fast.utils.files import current_folder, path_of
from jaxrl_fast.utils.importing import name_of

OPTION = "search_dir"


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

    @property
    def varied(self) -> tuple[str, ...]:
        """Return the names of the hyperparameters."""
        return tuple(dimension.name for dimension in self.space)

    @property
    def batch(self) -> int:
        """Return the number of trials in a round."""
        if self.own.batch != "auto":
            return int(self.own.batch)
        scheduler, trials = self.own.scheduler, self.own.trials
        if self.own.sampler in ("random", "grid") or isinstance(scheduler, PBT):
            return trials
        least = scheduler.factor ** (scheduler.rungs - 1) if isinstance(scheduler, Halving) else 1
        return min(max(-(-trials // 4), least), trials)

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

    def test(self, values: Sequence[Mapping[str, Any]], schedule: Sequence[Any] = ()) -> Round:
        """Return the trainings of winners with the test seeds, which no trial has had."""
        first = self.settings.options.seed + self.own.seeds
        return self.round(0, values)._replace(seeds=range(first, first + self.own.test_seeds), schedule=schedule)

    def shown(self, path: Path) -> Path:
        """Return a path in the search's folder for a message: relative if the folder was given so."""
        return (self.place or self.folder) / path.relative_to(self.folder)


def prepare(request: SearchRequest) -> SearchPlan:
    """Validate a search, then create its folder or read that of the search to resume.

    Raises:
        ValueError: If an option is not valid; nothing has been written then.
    """
    study.load_optuna()
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
    ready = draft._replace(folder=start / place, lock=lock, place=place)
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
    programs, failures = first_programs(draft)
    if not programs:
        raise ValueError(next(iter(failures.values())))
    if isinstance(own.scheduler, PBT) and len(programs) > 1:
        fits = len(programs[0].owners) // own.seeds
        if not fits or len(programs) == len(programs[0].owners) * own.trials * own.seeds:
            problem = "pbt needs environments and a replay on the device, where trials share a program"
            raise ValueError(f"scheduler: {problem}, got {settings.options.env}; use another scheduler")
        raise ValueError(f"trials: all must fit into memory together with pbt, got {own.trials}; use {fits}")


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
    same = lambda plan: json.dumps([_mapping(plan)[key] for key in ("config", "search", "space")], default=str)
    if same(saved) != same(draft):
        raise ValueError(f"{OPTION}: {folder} holds a different search; choose another")
    lock = directory.claim(folder)
    return saved._replace(lock=lock, settings=draft.settings, log_level=draft.log_level)


def _resumed(request: SearchRequest, folder: Path) -> SearchPlan:
    """Return the search to resume, perhaps with more trials."""
    saved = read(folder)
    grid.offer_devices([saved.settings])
    changes = {name: getattr(request.own, name) for name in EXTENDS if name in request.given}
    if changes.get("trials", saved.own.trials) < saved.targets[-1]:
        got = f"got {changes['trials']}"
        raise ValueError(f"trials: must be at least the {saved.targets[-1]} of the search, {got}; use more")
    if changes.get("trials", saved.targets[-1]) > saved.targets[-1]:
        if isinstance(saved.own.scheduler, PBT):
            raise ValueError("trials: a population cannot be extended, got more; start another search")
        saved = saved._replace(targets=(*saved.targets, changes.pop("trials")))
    changes.pop("trials", None)
    own, lock = dataclasses.replace(saved.own, **changes), directory.claim(folder)
    longer = saved._replace(own=own, lock=lock, log_level=request.log_level)
    _write(longer)
    return longer


def read(folder: Path) -> SearchPlan:
    """Return the plan that search.yaml in `folder` holds. Raise ValueError if there is none."""
    import yaml

    path = folder / SEARCH_FILE
    if not path.is_file():
        raise ValueError(f"resume {folder}: the folder has no {SEARCH_FILE}{nearest_with(SEARCH_FILE, folder)}")
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
        return SearchPlan(folder.absolute(), settings, own, space, tuple(content["trials"]), place=folder)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a valid search file ({type(error).__name__})") from error


def _mapping(ready: SearchPlan) -> dict[str, Any]:
    """Return the contents of search.yaml."""
    own = {name: value for name, value in to_plain(ready.own).items() if name != OPTION}
    return {
        "format": FORMAT,
        "trials": list(ready.targets),
        "config": to_mapping(ready.settings),
        "search": json.loads(json.dumps(own)),
        "space": json.loads(json.dumps([dimension._asdict() for dimension in ready.space])),
    }


def _write(ready: SearchPlan) -> None:
    """Write search.yaml."""
    import yaml

    files.replace(ready.folder / SEARCH_FILE, yaml.safe_dump(_mapping(ready), sort_keys=False))


def shared_options(ready: SearchPlan) -> dict[str, Any]:
    """Return what all searches of one study have in common."""
    content = _mapping(ready)
    same = ("seeds", "score", "scheduler")
    own = {name: content["search"][name] for name in same}
    config = {name: plain(value) for name, value in content["config"].items() if name != "seed"}
    return {"space": content["space"], **own, **config}
