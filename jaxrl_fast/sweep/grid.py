"""Expand options with several values into the groups of runs of a sweep; each group is one program.

Only modules that read options are imported, so that error messages appear at once.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from jaxrl_fast.config import load
from jaxrl_fast.config.convert import convert
from jaxrl_fast.config.help import RunCommand, print_run_help
from jaxrl_fast.config.names import positive
from jaxrl_fast.config.parts import choose, find, known_options, named, read_values
from jaxrl_fast.config.paths import SWEEPS, in_folder
from jaxrl_fast.config.population import Member, real_numbers
from jaxrl_fast.config.settings import (
    Request,
    Settings,
    directory_of,
    plain,
    request,
    resolve,
    values_of_preset,
)
from jaxrl_fast.config.sources import SWEEP, Setting, from_mapping
from jaxrl_fast.options.declare import Option, complete, options_of
from jaxrl_fast.options.run import OF_RUN, Launch, Options, SweepOptions
from jaxrl_fast.sweep import scaling
from jaxrl_fast.sweep.values import MAX_VALUES, refuse_repeated, split_values, split_words
from jaxrl_fast.utils.importing import describe

OWN = options_of(SweepOptions) | {"resume": OF_RUN["resume"]}
DEFAULTS = {"loggers": [], "on_nonfinite": "continue", "console_every": 10.0}  # below the preset's


class Group(NamedTuple):
    """Runs that share a program."""

    settings: Settings  # of the first run
    members: tuple[Member, ...]


class SweepRequest(NamedTuple):
    """A sweep as requested: its runs and its own options."""

    groups: tuple[Group, ...]
    columns: tuple[str, ...]  # options that differ between runs, without the seed: "num_envs", "clip_coef"
    own: SweepOptions
    resume: str = ""
    base_num_envs: int = 0  # the number of environments from which the scaling rule starts
    log_level: str = "info"
    added: tuple[Setting, ...] = ()  # with `resume`: the options that extend the sweep
    split: Any = None  # with `resume`: returns the values of such an option


def from_command_line(argv: Sequence[str]) -> SweepRequest:
    """Return a sweep from a command line. Print the help and exit if `--help` is given."""
    algo, written = load.split(argv)
    topic, written = load.help_of(written)
    if topic is not None:
        says = "Train {} with every combination of the given values: --num-envs 1,8,64 --seed 0..4. --resume "
        says += "refers to the whole sweep: given values are added to the sweep (--seed 3,4), "
        says += "and a larger --total-steps extends every run."
        default = resolve(_with_defaults(request(algo, [s for s in written if s.name == "config"])))
        print_run_help(topic, default, RunCommand(SWEEP, says, [SweepOptions()], ["run_dir"]))
        raise SystemExit(0)
    return expand(algo, written, split_words)


def from_keywords(
    preset: str | None = None, algo: str | ModuleType = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> SweepRequest:
    """Return a sweep from Python keywords: options of `fit` with a value or a list, and options of the sweep."""
    written = [] if preset is None else [Setting("config", [preset], "config")]
    if not isinstance(agent or {}, Mapping):
        raise ValueError(f"agent: must map the algorithm's options to values, got {describe(agent)}")
    given = options | dict(agent or {})
    if not given.get("resume", True):  # the default
        del given["resume"]
    written += [Setting(name, [value], name) for name, value in given.items()]
    return expand(load.name_of(algo), written, split_values)


def expand(algo: str, written: list[Setting], split: Any) -> SweepRequest:
    """Return every combination, resolved; combinations that can share a program are in one group."""
    own, resume = _own([s for s in written if positive(s.name) in OWN])
    written = [s for s in written if positive(s.name) not in OWN]
    level = [s for s in written if s.name == "log_level"]
    log_level = convert(OF_RUN["log_level"], level[-1]) if level else Options.log_level
    if resume:
        other = [*(s.origin for s in written if s.name == "config"), algo]
        if any(other):
            raise ValueError(f"{other[0]}: cannot be combined with resume, which continues the sweep as it is")
        added = tuple(s for s in written if s not in level)
        return SweepRequest((), (), own, resume, log_level=log_level, added=added, split=split)
    asked = request(algo, written)
    fixed, axes = sort_out(asked, split)
    number = math.prod(map(len, axes.values()))
    if number > MAX_VALUES:
        raise ValueError(f"a sweep has at most {MAX_VALUES} trainings, got {number} combinations; give fewer values")
    asked = _with_defaults(asked)
    combinations = list(resolve_all(asked, fixed, axes))
    first = fixed + [values[0] for values in axes.values()]
    base = resolve(asked._replace(given=[s for s in first if s.name != "num_envs"]))
    rule = scaling.rule(own.scale, base)
    groups = groups_of(_single(combinations, axes, rule), axes)
    scaled = [scaling.SCALED[own.scale]] if own.scale != "none" else []
    columns = dict.fromkeys([n for n in axes if n != "seed"] + scaled)
    return SweepRequest(tuple(groups), tuple(columns), own, "", rule.base, log_level)


def resolve_all(asked: Request, fixed: list[Setting], axes: Mapping[str, list[Setting]]) -> Iterator[Settings]:
    """Yield the settings of every combination; the seeds of a combination are consecutive, and resolved at once."""
    seeds = [convert(OF_RUN["seed"], setting) for setting in axes.get("seed", [])]
    for values in itertools.product(*(axes[name] for name in axes if name != "seed")):
        settings = resolve(asked._replace(given=fixed + list(values)))
        for seed in seeds or [settings.options.seed]:
            yield settings._replace(options=dataclasses.replace(settings.options, seed=seed))


def sort_out(asked: Request, split: Any) -> tuple[list[Setting], dict[str, list[Setting]]]:
    """Return the settings that all combinations share, and by name those with several values.

    If an option is set twice, the last setting applies.
    """
    known, records = _options_of_any(asked, split)
    axes: dict[str, list[Setting]] = {}
    fixed: list[Setting] = []
    for written in _apart(asked.given, known):
        if written.name in ("name", "run_dir"):
            raise ValueError(f"{written.origin}: cannot be combined with a sweep; use sweep_dir")
        setting = find(written, known | OWN, records, asked.algo, SWEEP)
        if setting.name in ("dry_run", "replay_dir"):
            raise ValueError(f"{setting.origin}: cannot be combined with a sweep; use it with train")
        several = split(known[setting.name], setting)
        axes.pop(setting.name, None)
        if len(several) == 1:
            fixed += several
        else:
            refuse_repeated(known[setting.name], several)
            axes[setting.name] = several
    return fixed, axes


def _options_of_any(asked: Request, split: Any) -> tuple[dict[str, Option], list[Any]]:
    """Return the options of all parts that the values of a sweep choose, and the records with the first of them."""
    _, records = values_of_preset(asked)
    of_parts = {name: option for name, option in known_options(records).items() if option.parts}
    several = []
    for setting in _apart(asked.given, of_parts):
        for name in complete(setting.name, of_parts)[:1]:
            several.append(split(of_parts[name], setting._replace(name=name)))
    records = choose(records, [values[0] for values in several])
    known = known_options(records)
    for value in itertools.chain(*several):
        known = known_options(choose(records, [value])) | known
    return known, records


def _apart(settings: Sequence[Setting], known: Mapping[str, Option]) -> list[Setting]:
    """Return settings with each option of a part apart, whose value may be a list: memory.size [64, 128]."""
    found = []
    for setting in settings:
        paths = complete(setting.name, known)
        value = setting.values[0] if len(setting.values) == 1 else None
        if isinstance(value, Mapping) and len(paths) == 1 and known[paths[0]].parts:
            for inner, x in value.items():
                name = setting.name if inner == "kind" else f"{paths[0]}.{inner}"
                found.append(Setting(name, [x], name))
        else:
            found.append(setting)
    return found


def offer_devices(several: Iterable[Settings]) -> None:
    """Configure the most CPU devices of any settings, and the memory of GPUs, before JAX reads them once."""
    from jaxrl_fast.utils import devices

    options = [settings.options for settings in several]
    wanted = [each.devices for each in options]
    devices.configure_cpu_devices("auto" if "auto" in wanted else max(map(int, wanted)))
    devices.reserve_gpu_memory(options[0].gpu_memory)


def values_of(group: Group, member: Member, columns: Sequence[str]) -> dict[str, Any]:
    """Return the value of a run in each column."""
    return {column: member.values.get(column, group.settings.value(column)) for column in columns}


def words(values: Mapping[str, Any]) -> str:
    """Return "num_envs 64, clip_coef 0.1"."""
    return ", ".join(f"{name} {plain(value)}" for name, value in values.items())


def part(group: Group, members: Sequence[Member]) -> Group:
    """Return a group of some members, with the settings of the first of them."""
    settings, first = group.settings, members[0]
    options = dataclasses.replace(settings.options, seed=first.seed, num_seeds=len(members))
    return Group(settings._replace(options=options).replace(**first.values), tuple(members))


def _single(combinations: list[Settings], axes: Mapping[str, Any], rule: scaling.Rule) -> Iterator[Settings]:
    """Yield the settings of every run of every combination."""
    found: dict[str, int] = {}  # num_envs for auto
    for settings in combinations:
        if settings.auto_num_envs:
            offer_devices(combinations)
            settings = _calibrated(settings, found)
        settings = rule.apply(settings)
        if settings.options.num_seeds > 1 and "seed" in axes:
            raise ValueError(f"num_seeds {settings.options.num_seeds}: cannot be combined with several seed values")
        for i in range(settings.options.num_seeds):
            options = dataclasses.replace(settings.options, seed=settings.options.seed + i, num_seeds=1)
            yield settings._replace(options=options)


def _calibrated(settings: Settings, found: dict[str, int]) -> Settings:
    """Return the settings with the best number of environments, measured once for all seeds."""
    from jaxrl_fast.training import calibrate

    key = repr(settings._replace(options=dataclasses.replace(settings.options, seed=0, num_seeds=1)))
    if key not in found:
        with contextlib.chdir("."):  # environments may change the current directory
            found[key] = calibrate.choose(settings).options.num_envs
    return calibrate.with_count(settings, found[key])


def groups_of(trainings: Iterator[Settings], varied: Collection[str]) -> list[Group]:
    """Return the groups in the order of their first members."""
    return [group for group, _ in with_places(trainings, varied)]


def with_places(trainings: Iterable[Settings], varied: Collection[str]) -> list[tuple[Group, list[int]]]:
    """Return groups in the order of their first members, each with the places of its members among the trainings."""
    found: list[tuple[Any, Group, list[int]]] = []
    for place, settings in enumerate(trainings):
        real = [name for name in real_numbers(settings.agent) if name in varied]
        values = {name: settings.value(name) for name in real}
        blank = settings.replace(**dict.fromkeys(real, 0.0)).agent
        key = real, blank, dataclasses.replace(settings.options, seed=0)
        member = Member(settings.options.seed, values)
        for i, (other, group, places) in enumerate(found):
            if other == key:
                found[i] = key, group._replace(members=(*group.members, member)), [*places, place]
                break
        else:
            found.append((key, Group(settings, (member,)), [place]))
    return [(part(group, group.members), places) for _, group, places in found]


def _own(written: list[Setting]) -> tuple[SweepOptions, str]:
    """Return the sweep's own options and the directory to resume."""
    pairs = lambda s: list(s.values[0].items()) if s.values and isinstance(s.values[0], Mapping) else s.values
    written = [s._replace(values=pairs(s)) for s in written]
    for setting in written:
        if setting.name == "resume":
            directory_of(setting, "a sweep directory")
    values = read_values(named(written, OWN), OWN)
    resume = values.pop("resume", "")
    own = SweepOptions(**values)
    own = dataclasses.replace(own, sweep_dir=in_folder(SWEEPS, own.sweep_dir))
    if resume and (own.scale != "none" or own.sweep_dir):
        origin = next(s.origin for s in written if s.name in ("scale", "sweep_dir"))
        raise ValueError(f"{origin}: cannot be combined with resume, which continues the sweep as it is")
    if own.retry and not (resume or own.sweep_dir):
        raise ValueError("retry: needs the sweep to retry; add resume or sweep_dir")
    check_launch(own)
    if own.launcher != "local" and own.workers > 1:
        what = {"slurm": "job", "ray": "task"}[own.launcher]
        problem = f"must be 1 with launcher {own.launcher}, which has a {what} per group"
        raise ValueError(f"workers: {problem}, got {own.workers}")
    return own, resume


def check_launch(own: Launch) -> None:
    """Raise ValueError for options of another launcher than the chosen one."""
    for launcher, given in (("slurm", own.slurm_options), ("ray", own.ray_options)):
        if given and own.launcher != launcher:
            raise ValueError(f"{launcher}_options: needs launcher {launcher}")


def _with_defaults(asked: Request) -> Request:
    """Return a request with a sweep's defaults below the preset's."""
    return asked._replace(from_preset=[*from_mapping(DEFAULTS), *asked.from_preset])
