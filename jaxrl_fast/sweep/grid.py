"""A sweep laid out: from options with several values to groups of trainings, each group one program.

Nothing is imported but what reads options, so that mistakes are answered at once.
"""

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from jaxrl_fast import agents
from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.config import load
from jaxrl_fast.config.convert import check_range, convert, is_integer, merge_values
from jaxrl_fast.config.help import print_help
from jaxrl_fast.config.names import SWEEP, known_options, positive, refuse_unknown, without_no
from jaxrl_fast.config.options import DEFAULT, SINGLE, SWITCHES, Options, SweepOptions, types_of
from jaxrl_fast.config.population import Member, real_numbers
from jaxrl_fast.config.presets import read_preset
from jaxrl_fast.config.resume import plain
from jaxrl_fast.config.settings import Settings, check_unused, folder_of, nothing_requested, preset_of, resolve
from jaxrl_fast.config.sources import Setting, from_mapping, tokenize
from jaxrl_fast.utils.parsing import parse_int

MAX_VALUES = 100_000  # trainings in a sweep
OWN = types_of(SweepOptions) | {"name": str, "resume": str}
DEFAULTS = {"tensorboard": False, "on_nonfinite": "continue", "console_every": 10.0}  # where nobody says otherwise
SCALED = {
    **dict.fromkeys(("learning-rate-linear", "learning-rate-sqrt"), "learning_rate"),
    "minibatches": "num_minibatches",
}


class Group(NamedTuple):
    """Trainings that share a program."""

    settings: Settings  # of the first of them
    members: tuple[Member, ...]


class SweepRequest(NamedTuple):
    """A sweep as it was asked for."""

    groups: tuple[Group, ...]
    columns: tuple[str, ...]  # options in which its trainings differ, beside the seed: "num_envs", "agent.clip_coef"
    own: SweepOptions
    name: str = ""
    resume: str = ""
    base_num_envs: int = 0  # which the scaling rule starts from
    log_level: str = "info"


def from_command_line(argv: Sequence[str]) -> SweepRequest:
    """Prints the help and exits where it is asked for."""
    positional, written = tokenize(argv)
    if len(positional) > 1:
        raise ValueError(f"{positional[1]!r} is one word too many: only an algorithm stands without an option's name")
    aliases = {"slurm_option": "slurm_options", "h": "help"}
    written = [s._replace(name=aliases.get(s.name, s.name)) for s in written]
    algo = positional[0] if positional else ""
    if any(s.name == "help" for s in written):
        said = "Trains {} with every combination of the values given: --num-envs 1,8,64 --seed 0..4. --name and "
        said += "--resume are the sweep's."
        chosen = _or_default(algo, [s for s in written if s.name == "config"])
        default = resolve(algo, _defaults(chosen) + chosen)
        print_help(default.algo, default.options, default.agent, SWEEP, said, SweepOptions(), without=["run_dir"])
        raise SystemExit(0)
    return expand(algo, written, from_words)


def from_keywords(
    preset: str | None = None, algo: str | ModuleType = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> SweepRequest:
    """The names of `config.from_keywords`, any of them with a list of values; and those of `options.Sweep`."""
    written = [] if preset is None else [Setting("config", [preset], "config")]
    if not isinstance(agent or {}, Mapping):
        raise ValueError(f"agent: the algorithm's options by name are wanted, not {agent!r}")
    given = options | {f"agent.{name}": value for name, value in (agent or {}).items()}
    if not given.get("resume", True):  # as by default
        del given["resume"]
    written += [Setting(name, [value], name) for name, value in given.items()]
    return expand(load.name_of(algo), written, from_values)


def expand(algo: str, written: list[Setting], separate: Any) -> SweepRequest:
    """Every combination resolved, and those that can share a program put together."""
    own, name, resume = _own([s for s in written if s.name in OWN])
    written = [s for s in written if s.name not in OWN]
    level = [s for s in written if s.name == "log_level"]
    if resume:
        other = [s.said for s in written if s not in level]
        if other or algo:
            raise ValueError(f"{[*other, algo][0]} does not go with --resume, which goes on with the sweep as it is")
        return SweepRequest((), (), own, name, resume, log_level=_value("log_level", level))
    written = _or_default(algo, written)
    algo = resolve(algo, [s for s in written if s.name == "config"]).algo
    known = known_options(agents.options(algo)) | {"config": str}
    fixed, axes = _sort_out(algo, written, known, separate)
    number = math.prod(map(len, axes.values()))
    if number > MAX_VALUES:
        raise ValueError(f"{number} combinations are more than a sweep can have, which is {MAX_VALUES}")
    fixed = _defaults(fixed) + fixed
    names = sorted(axes, key=lambda name: name == "seed")  # the seeds in a row
    chosen = [fixed + list(values) for values in itertools.product(*(axes[name] for name in names))]
    combinations = [resolve(algo, settings) for settings in chosen]
    check_unused(written, [settings.agent for settings in combinations])
    rule = _scale(own.scale, algo, resolve(algo, [s for s in chosen[0] if s.name != "num_envs"]))
    groups = _groups(_single(combinations, axes, rule), [n[6:] for n in axes if n.startswith("agent.")])
    scaled = [f"agent.{SCALED[own.scale]}"] if own.scale != "none" else []
    columns = dict.fromkeys([n for n in axes if n != "seed"] + scaled)
    return SweepRequest(tuple(groups), tuple(columns), own, name, "", rule.base, _value("log_level", level))


def _sort_out(
    algo: str, written: list[Setting], known: Mapping[str, Any], separate: Any
) -> tuple[list[Setting], dict[str, list[Setting]]]:
    """What all combinations have, and the values of what differs by name. The last word on an option holds."""
    axes: dict[str, list[Setting]] = {}
    fixed: list[Setting] = []
    for setting in (without_no(s, known) for s in written):
        if setting.name not in known:
            _refuse_name(setting, known, algo)
        if setting.name == "run_dir":
            raise ValueError(f"{setting.said} does not go with a sweep; --sweep-dir chooses its folder")
        several = separate(known[setting.name], setting)
        if len(several) == 1:
            fixed += several
            axes.pop(setting.name, None)
        else:
            _refuse_what_repeats(known[setting.name], several)
            axes[setting.name] = several
    return fixed, axes


def _refuse_name(setting: Setting, known: Mapping[str, Any], algo: str) -> NoReturn:
    """No option has this name; --no-x, which means x false, has no values."""
    name = positive(setting.name)
    if known.get(name) in SWITCHES and setting.values:
        raise ValueError(f"{setting.said} takes no value; --{name.replace('_', '-')} true,false has both")
    refuse_unknown(setting, {**known, **OWN}, algo, SWEEP)


def from_words(kind: Any, setting: Setting) -> list[Setting]:
    """One setting for each value of a comma list or a range: 1,8,64 or 0..4, both ends included."""
    if setting.name in SINGLE or kind in SWITCHES and not setting.values or typing.get_origin(kind) is dict:
        return [setting]
    text = " ".join(map(str, setting.values))
    parts = text.split(",")
    if setting.values and not all(part.strip() for part in parts):
        raise ValueError(f"{setting.said}: there is an empty value in {text!r}")
    if len(setting.values) > 1 and "," not in text and typing.get_origin(kind) is not tuple:
        raise ValueError(f"{setting.said}: several values are one word, {','.join(map(str, setting.values))}")
    several = [value for part in parts for value in _range(kind, setting, part.strip())]
    return [setting._replace(values=value.split()) for value in several] if len(several) > 1 else [setting]


def from_values(kind: Any, setting: Setting) -> list[Setting]:
    """One setting for each element of a list, a tuple, a range or an array; a tuple alone may be one value."""
    (value,) = setting.values
    value = value.tolist() if hasattr(value, "tolist") else value
    pair = setting.name == "env" and isinstance(value, tuple) and not isinstance((*value, "")[0], (str, type))
    one = setting.name in SINGLE or pair  # of an environment and its parameters
    several = list(value) if isinstance(value, (list, tuple, range)) and not one else [value]
    if typing.get_origin(kind) is tuple and not any(isinstance(v, (list, tuple)) for v in several):
        several = [value]
    if not several:
        raise ValueError(f"{setting.said}: there is no value in {value!r}")
    place, _, name = setting.name.rpartition(".")
    nested = lambda v: {"agent": {name: v}} if place else {name: v}
    return [from_mapping(nested(v), lambda name: name)[0] for v in several]


def offer_devices(several: Iterable[Settings]) -> None:
    """Offers as many devices as any of them wants, before JAX looks for them, which it does once."""
    from jaxrl_fast.utils import devices

    wanted = [settings.options.devices for settings in several]
    devices.configure_cpu_devices("auto" if "auto" in wanted else max(map(int, wanted)))


def values_of(group: Group, member: Member, columns: Sequence[str]) -> dict[str, Any]:
    """What a training has of each column."""
    found = {}
    for column in columns:
        name = column.removeprefix("agent.")
        place = group.settings.options if name == column else group.settings.agent
        found[column] = member.values.get(name, getattr(place, name))
    return found


def words(values: Mapping[str, Any]) -> str:
    """num_envs 64, agent.clip_coef 0.1"""
    return ", ".join(f"{name} {plain(value)}" for name, value in values.items())


def part(group: Group, members: Sequence[Member]) -> Group:
    """Some of its members, with the settings that the first of them has alone."""
    settings, first = group.settings, members[0]
    options = dataclasses.replace(settings.options, seed=first.seed, num_seeds=len(members))
    agent = dataclasses.replace(settings.agent, **first.values)
    return Group(settings._replace(options=options, agent=agent), tuple(members))


class Rule(NamedTuple):
    """How a hyperparameter follows the number of environments."""

    name: str  # "" for none
    power: float
    base: int

    def apply(self, settings: Settings) -> Settings:
        if not self.name:
            return settings
        num_envs, now = int(settings.options.num_envs), getattr(settings.agent, self.name)
        value = now * (num_envs / self.base) ** self.power
        if self.name == "learning_rate":
            value = float(f"{value:.6g}")
        else:
            value = max(value, 1)  # fewer rows than a minibatch has are all of it
            if value != int(value):
                raise ValueError(
                    f"--scale minibatches: {num_envs} environments would have {value:g} minibatches of the size that "
                    f"{self.base} have with {now}; take a multiple of {self.base}, or fewer by a factor"
                )
            value = int(value)
        return settings._replace(agent=dataclasses.replace(settings.agent, **{self.name: value}))


def _scale(rule: str, algo: str, base: Settings) -> Rule:
    num_envs = Options.num_envs if base.options.num_envs == "auto" else base.options.num_envs
    if rule == "none":
        return Rule("", 0, int(num_envs))
    name = SCALED[rule]
    if name not in types_of(agents.options(algo)):
        able = [a for a, kind in CONFIGS.items() if name in types_of(kind)]
        raise ValueError(f"--scale {rule}: {algo} has no option agent.{name}; {' and '.join(able)} have it")
    return Rule(name, 0.5 if rule.endswith("sqrt") else 1.0, int(num_envs))


def _single(combinations: list[Settings], axes: Mapping[str, Any], rule: Rule) -> Iterator[Settings]:
    """Every training of every combination."""
    found: dict[str, int] = {}  # counts for --num-envs auto
    for settings in combinations:
        if settings.options.num_envs == "auto":
            offer_devices(combinations)
            settings = _calibrated(settings, found)
        settings = rule.apply(settings)
        if settings.options.num_seeds > 1 and "seed" in axes:
            raise ValueError(f"--num-seeds {settings.options.num_seeds} does not go with several values of --seed")
        for i in range(settings.options.num_seeds):
            options = dataclasses.replace(settings.options, seed=settings.options.seed + i, num_seeds=1)
            yield settings._replace(options=options)


def _calibrated(settings: Settings, found: dict[str, int]) -> Settings:
    """With the count that pays off, which is tried out once for all seeds."""
    from jaxrl_fast.training import calibrate

    key = repr(settings._replace(options=dataclasses.replace(settings.options, seed=0, num_seeds=1)))
    if key not in found:
        found[key] = int(calibrate.choose(settings).options.num_envs)
    return calibrate.with_count(settings, found[key])


def _groups(trainings: Iterator[Settings], varied: Sequence[str]) -> list[Group]:
    """In the order in which their first members come."""
    found: list[tuple[Any, Group]] = []
    for settings in trainings:
        real = [name for name in real_numbers(settings.agent) if name in varied]
        values = {name: getattr(settings.agent, name) for name in real}
        blank = dataclasses.replace(settings.agent, **dict.fromkeys(real, 0.0))
        key = real, blank, dataclasses.replace(settings.options, seed=0)
        member = Member(settings.options.seed, values)
        for i, (other, group) in enumerate(found):
            if other == key:
                found[i] = key, group._replace(members=(*group.members, member))
                break
        else:
            found.append((key, Group(settings, (member,))))
    return [part(group, group.members) for _, group in found]


def _own(written: list[Setting]) -> tuple[SweepOptions, str, str]:
    """The sweep's own options, its name and the folder to go on with."""
    values: dict[str, Any] = {}
    for setting in written:
        kind = OWN[setting.name]
        mapping = setting.values and isinstance(setting.values[0], Mapping)
        setting = setting._replace(values=list(setting.values[0].items())) if mapping else setting
        value = folder_of(setting, "a sweep's folder") if setting.name == "resume" else convert(kind, setting)
        check_range(setting, value)
        values[setting.name] = merge_values(kind, values.get(setting.name), value)
    name, resume = values.pop("name", ""), values.pop("resume", "")
    own = SweepOptions(**values)
    if resume and (own.scale != "none" or own.sweep_dir or name):
        said = next(s.said for s in written if s.name in ("scale", "sweep_dir", "name"))
        raise ValueError(f"{said} does not go with --resume, which goes on with the sweep as it is")
    if own.retry and not (resume or name or own.sweep_dir):
        raise ValueError("--retry goes with --resume, or a sweep's --name or --sweep-dir: it tries what has failed")
    if own.slurm_options and own.launcher != "slurm":
        raise ValueError("--slurm-options go with --launcher slurm")
    if own.launcher == "slurm" and own.workers > 1:
        raise ValueError(f"--workers {own.workers} does not go with --launcher slurm, which has a job for each group")
    return own, name, resume


def _value(name: str, written: list[Setting]) -> Any:
    """The value of an option that the sweep needs before any run is laid out."""
    return convert(types_of(Options)[name], written[-1]) if written else getattr(Options, name)


def _or_default(algo: str, written: list[Setting]) -> list[Setting]:
    """With what is trained where nothing says what to train."""
    return (from_mapping(DEFAULT, lambda name: name) if nothing_requested(algo, written) else []) + written


def _defaults(fixed: list[Setting]) -> list[Setting]:
    """A sweep's own, below what a preset or the user says."""
    preset = preset_of(fixed)
    said = {s.name for s in fixed + ([] if preset is None else read_preset(preset))}
    return [Setting(name, [value], name) for name, value in DEFAULTS.items() if name not in said]


def _range(kind: Any, setting: Setting, text: str) -> list[str]:
    """0..4 as 0 1 2 3 4 where whole numbers are wanted."""
    first, dots, last = text.partition("..")
    if not dots or not is_integer(kind):
        return [text]
    try:
        low, high = parse_int(first), parse_int(last)
    except ValueError:
        raise ValueError(f"{setting.said}: {text!r} is no range; a range is two whole numbers, 0..4") from None
    if high < low:
        raise ValueError(f"{setting.said}: the range {text} is empty; the smaller number comes first")
    if high - low >= MAX_VALUES:
        raise ValueError(f"{setting.said}: the range {text} has more than {MAX_VALUES} values")
    return [str(number) for number in range(low, high + 1)]


def _refuse_what_repeats(kind: Any, several: list[Setting]) -> None:
    values = [convert(kind, setting) for setting in several]
    for i, value in enumerate(values):
        check_range(several[i], value)
        if value in values[:i]:
            raise ValueError(f"{several[i].said}: {plain(value)} is there twice")
