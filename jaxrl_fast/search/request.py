"""Read a search from a command line or from Python keywords. Only modules that read options are imported."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from jaxrl_fast.config import load
from jaxrl_fast.config.convert import convert
from jaxrl_fast.config.help import RunCommand, print_run_help
from jaxrl_fast.config.names import positive
from jaxrl_fast.config.parts import choose, known_options, named, read_values, with_values
from jaxrl_fast.config.paths import SEARCHES, in_folder
from jaxrl_fast.config.settings import Settings, directory_of, request, resolve
from jaxrl_fast.config.sources import SEARCH, Setting, from_mapping
from jaxrl_fast.options.declare import fields_of
from jaxrl_fast.options.run import OF_RUN, Launch, Options
from jaxrl_fast.options.search import PBT, SearchOptions
from jaxrl_fast.sweep.grid import DEFAULTS, check_launch

OWN = fields_of(SearchOptions)
NUM_EVALUATIONS = 10  # of a run, where the score needs several
LAUNCH = fields_of(Launch)
EXTENDS = ("trials", "test_seeds", "winners")  # what a resumed search may change
NOT_OF_A_SEARCH = {"num_seeds": "seeds", "run_dir": "search_dir", "name": "search_dir"}


class SearchRequest(NamedTuple):
    """A search as requested."""

    settings: Settings | None  # of a trial with the default values; None: of the search to resume
    own: SearchOptions
    over: Any  # texts, or a mapping from Python
    resume: str = ""
    given: tuple[str, ...] = ()  # the names of the search's options that were given
    log_level: str = "info"  # with `resume`


def from_command_line(argv: Sequence[str]) -> SearchRequest:
    """Return a search from a command line. Print the help and exit if `--help` is given."""
    algo, written = load.split(argv)
    topic, written = load.help_of(written)
    if topic is not None:
        says = "Find hyperparameters of {}: --over learning-rate=1e-5..1e-2 gamma=0.9..0.9999 --trials 64 --seeds 4. "
        says += "--resume refers to the whole search; a larger --trials extends it."
        default = resolve(request(algo, [s for s in written if s.name == "config"]))
        print_run_help(topic, default, RunCommand(SEARCH, says, [SearchOptions()], ["run_dir", "num_seeds"]))
        raise SystemExit(0)
    return read(algo, written)


def from_keywords(
    preset: str | None = None, algo: str | ModuleType = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> SearchRequest:
    """Return a search from Python keywords: options of `fit` and of the search."""
    written = [] if preset is None else [Setting("config", [preset], "config")]
    over = options.pop("over", None)
    if not options.get("resume", True):  # the default
        del options["resume"]
    written += from_mapping(options | ({"agent": agent} if agent else {}))
    if over is not None:
        written.append(Setting("over", [over] if isinstance(over, str | Mapping) else [*over], "over"))
    return read(load.name_of(algo), written)


def read(algo: str, written: Sequence[Setting]) -> SearchRequest:
    """Return the search that settings describe. Raise ValueError for a mistake."""
    is_own = lambda s: positive(s.name).partition(".")[0] in OWN
    mine = [s for s in written if is_own(s) and s.name != "over"]
    over: Any = [value for s in written if s.name == "over" for value in s.values]
    over = over[0] if len(over) == 1 and isinstance(over[0], Mapping) else over
    records = choose([SearchOptions()], mine)
    known = known_options(records)
    found = named(mine, known, records, program=SEARCH)
    own = with_values(records[0], read_values(found, known))
    texts = [f"{n}={v}" for n, v in over.items()] if isinstance(over, Mapping) else map(str, over)
    own = with_values(own, {"search_dir": in_folder(SEARCHES, own.search_dir), "over": tuple(texts)})
    others = [s for s in written if not is_own(s)]
    given = tuple(s.name for s in found) + ("over",) * bool(over)
    check_launch(own)
    for setting in others:
        if setting.name == "resume":
            folder, level = directory_of(setting, "a search directory"), [s for s in others if s.name == "log_level"]
            others = [s for s in others if s.name not in ("resume", "log_level")]
            wrong = [*[name for name in given if name not in (*EXTENDS, *LAUNCH)], *[s.origin for s in others], algo]
            if any(wrong):
                raise ValueError(f"{wrong[0]}: cannot be combined with resume, which continues the search as it is")
            log_level = convert(OF_RUN["log_level"], level[-1]) if level else Options.log_level
            return SearchRequest(None, own, (), folder, given, log_level)
    for setting in others:
        if remedy := NOT_OF_A_SEARCH.get(setting.name):
            raise ValueError(f"{setting.origin}: cannot be combined with a search; use {remedy}")
    _check_workers(own)
    if not over:
        raise ValueError("over: needs hyperparameters and their ranges, such as learning-rate=1e-5..1e-2, or default")
    asked = request(algo, others)
    settings = resolve(asked._replace(from_preset=[*from_mapping(DEFAULTS), *asked.from_preset]))
    return SearchRequest(_evaluated(settings, own), own, over, given=given)


def _check_workers(own: SearchOptions) -> None:
    """Raise ValueError if several tasks cannot be started, or cannot share the search."""
    if own.workers == 1:
        return
    if own.launcher == "local":
        remedy = "add one, or start searches by hand with the same storage and study"
        raise ValueError(f"workers: several need launcher slurm or ray, got {own.workers}; {remedy}")
    if isinstance(own.scheduler, PBT):
        problem = "a population of pbt is trained in one task, since its trials copy each other"
        raise ValueError(f"workers: {problem}, got {own.workers}; use 1")
    if own.sampler == "grid":
        problem = "tasks that draw at the same time would miss points of a grid"
        raise ValueError(f"workers: {problem}, got {own.workers}; use 1, or another sampler")


def _evaluated(settings: Settings, own: SearchOptions) -> Settings:
    """Return the settings with the evaluations that the score needs. Raise ValueError if there are none."""
    options = settings.options
    if not options.max_eval_episodes:
        raise ValueError("eval_episodes: must be at least 1, since evaluations are the scores, got 0; leave it out")
    if settings.auto_num_envs:
        raise ValueError("num_envs: must be the same in all trials, got auto; give a number")
    if own.score != "final" and not options.eval_every:
        return settings.replace(eval_every=max(options.total_steps // NUM_EVALUATIONS, 1))
    return settings
