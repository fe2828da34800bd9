"""Resolve the settings of a run from a command line, a preset file or Python keywords.

All three are read as pairs of an option's name and a value ("num_envs", "memory.size"; `sources`) into one
`Request`, which reads a preset file once. `resolve` converts the values (`convert`): given options over the preset's,
and the preset's over the defaults. Every mistake is a ValueError of one line. Neither jax nor numpy is imported, so
that `--help` and error messages appear at once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_fast import agents
from jaxrl_fast.config.convert import convert
from jaxrl_fast.config.parts import choose, known_options, named, read_values, to_plain, with_values
from jaxrl_fast.config.paths import CONFIG, RUNS, in_folder
from jaxrl_fast.config.presets import read_preset, shipped
from jaxrl_fast.config.sources import PROGRAM, Setting, from_mapping, join_names, one
from jaxrl_fast.options import ALGORITHMS, wrap
from jaxrl_fast.options.declare import Option, options_of, value_of
from jaxrl_fast.options.run import DEFAULT, LAST_SEED, NOT_SAVED, OF_RUN, Options, same_env, written_env
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.importing import name_of
from jaxrl_fast.utils.parsing import nearest
from jaxrl_fast.utils.plain import as_lists, fits_a_file

PRESET = Option("config", str)
ALGO = Option("algo", str)
REMEDIES = {  # for arguments that a file cannot hold
    "env_options": "make the environment with it, env=MyEnv({}=...)",
    "network.options": "make {} the default of a subclass",
}


class UnknownAlgorithm(ValueError):
    """The error for an algorithm that does not exist, or that cannot be imported from the current directory."""


class Request(NamedTuple):
    """The requested options, with values not yet converted."""

    algo: str
    preset: str  # the preset's name or file, "" for none
    from_preset: Sequence[Setting]
    given: Sequence[Setting]  # over the preset
    by_default: bool = False  # neither an algorithm, a preset nor an environment was given
    resumed: bool = False  # the preset is the config.yaml of a run


class Settings(NamedTuple):
    """The settings of one run, resolved."""

    algo: str
    preset: str  # the preset's name or file, "" for none
    options: Options
    agent: Any  # the algorithm's dataclass
    by_default: bool = False  # neither an algorithm, a preset nor an environment was given
    auto_num_envs: bool = False  # num_envs is only the start of the search for the best number

    @property
    def algo_name(self) -> str:
        """Return the algorithm's name for folders and titles: without the package if it is custom."""
        return self.algo.rpartition(".")[2]

    @property
    def known(self) -> dict[str, Option]:
        """Return every option of the run by path: "num_envs", "memory.size"."""
        return known_options((self.options, self.agent))

    def value(self, path: str) -> Any:
        """Return the value of an option, or None if its part is not chosen."""
        for record in (self.options, self.agent):
            if path in options_of(record):
                return value_of(record, path)
        return None

    def replace(self, **values: Any) -> "Settings":
        """Return the settings with other values of options by path."""
        return self._replace(options=with_values(self.options, values), agent=with_values(self.agent, values))


def request(algo: str, written: Sequence[Setting]) -> Request:
    """Return the request of an algorithm and settings, with the settings of its preset."""
    by_default = not algo and not any(s.name in ("config", "env") for s in written)
    if by_default:
        written = [*from_mapping(DEFAULT), *written]
    last = next((s for s in reversed(written) if s.name == "config"), None)
    preset = "" if last is None else convert(PRESET, last._replace(values=[one(last, "a preset's name or file")]))
    if preset in ALGORITHMS:
        use = f"`train {preset}`, or algo={preset!r} from Python"
        raise ValueError(f"config: must be a preset, got the algorithm {preset!r}; use {use}")
    from_preset = [] if last is None else read_preset(preset, {s.name for s in written})
    given = [s for s in written if s.name != "config"]
    return with_algorithm(Request(algo, preset, from_preset, given, by_default), f"preset {preset}")


def with_algorithm(asked: Request, source: str) -> Request:
    """Return a request with the algorithm that it or its preset names. `source` is the preset in messages."""
    named = next((convert(ALGO, s) for s in asked.from_preset if s.name == "algo"), "")
    if asked.algo and named and asked.algo != named:
        raise ValueError(f"{source}: uses algorithm {named}, got {asked.algo}; leave {asked.algo} out")
    algo = asked.algo or named or "ppo"
    if algo.endswith(".py") or not agents.exists(algo):
        hint = nearest(algo, ALGORITHMS) or nearest(algo, shipped(), "--config {}".format)
        if (path_of(algo) / CONFIG).is_file():
            hint = f"; to resume the run in that folder, use {PROGRAM} --resume {algo}"
        elif algo.endswith(".py"):
            hint = f"; give the name by which Python imports it, such as {Path(algo).stem}"
        where = f" in {source}" if named else ""
        hint = hint or f"; there are {join_names(ALGORITHMS)}, and modules by name"
        raise UnknownAlgorithm(f"unknown algorithm {algo!r}{where}{hint}")
    return asked._replace(algo=algo, from_preset=[s for s in asked.from_preset if s.name != "algo"])


def defaults(algo: str) -> tuple[Options, Any]:
    """Return the options of a run and of an algorithm with their defaults."""
    try:
        return Options(), agents.options(algo)()
    except ValueError as error:
        raise UnknownAlgorithm(str(error)) from error


def resolve(asked: Request) -> Settings:
    """Return the settings of a request: given options override the preset's, which override the defaults."""
    of_preset, chosen = values_of_preset(asked)
    records = choose(chosen, asked.given)
    known = known_options(records)
    given = named(asked.given, known, records, asked.algo)
    values = {path: value for path, value in of_preset.items() if path in known}
    values = read_values(given, known, values)
    for name, remedy in REMEDIES.items():
        _check_arguments(name, values.get(name, {}), remedy)
    same = "env" not in of_preset or isinstance(values["env"], str) and same_env(of_preset["env"], values["env"])
    if not (same or asked.resumed or any(s.name == "solved_threshold" for s in given)):
        values.pop("solved_threshold", None)  # the preset's value holds for the preset's environment only
    if "run_dir" in values:
        values["run_dir"] = in_folder(RUNS, values["run_dir"])
    is_auto = values.get("num_envs") == "auto"
    if is_auto:
        start = of_preset.get("num_envs", 1)
        values["num_envs"] = 1 if start == "auto" else start
    options, agent = (with_values(record, values) for record in records)
    check(options, is_auto)
    return Settings(asked.algo, asked.preset, options, agent, asked.by_default, is_auto)


def values_of_preset(asked: Request) -> tuple[dict[str, Any], list[Any]]:
    """Return the values of a request's preset by path, and the default records with the parts that it chooses."""
    chosen = choose(defaults(asked.algo), asked.from_preset)
    known = known_options(chosen)
    return read_values(named(asked.from_preset, known, chosen, asked.algo), known), chosen


def check(options: Options, is_auto: bool) -> None:
    """Raise ValueError for options of a run that contradict each other. `is_auto`: num_envs will be chosen."""
    last_seed = options.seed + options.num_seeds - 1
    if last_seed > LAST_SEED:
        raise ValueError(f"num_seeds: seeds must be at most {LAST_SEED}, got seeds {options.seed} to {last_seed}")
    if options.stop_when_solved and options.solved_threshold is None:
        raise ValueError("stop_when_solved: needs a solved_threshold, got none; set solved_threshold")
    wrap.read(options.wrap)
    if options.players.kind == "self-play" and options.num_envs < 2 and not is_auto:
        problem = f"self-play needs 2 games, one for each side, got {options.num_envs}"
        raise ValueError(f"num_envs: {problem}; use 2 or more")


def plain(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if isinstance(value, type):
        return name_of(value)
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else "none" if value is None else str(value)


def directory_of(setting: Setting, expected: str) -> str:
    """Return the given directory. Raise ValueError for "", for example from a shell variable that is not set."""
    folder: str = convert(OF_RUN["resume"], setting._replace(values=[one(setting, expected)]))
    if not folder:
        raise ValueError(f"{setting.origin}: must be {expected}, got ''")
    return folder


def to_mapping(settings: Settings) -> dict[str, Any]:
    """Return plain values for YAML, which `read_preset` reads back, without the options in NOT_SAVED."""
    options = {name: value for name, value in to_plain(settings.options).items() if name not in NOT_SAVED}
    options["env"] = written_env(options["env"])
    return {"algo": settings.algo, **as_lists(options), **as_lists(to_plain(settings.agent))}


def _check_arguments(name: str, options: Mapping[str, Any], remedy: str) -> None:
    """Raise ValueError for an argument that a file cannot hold, since a resume reads arguments from a file."""
    for argument, value in options.items():
        if not fits_a_file(as_lists(value)):
            problem = f"{argument} must be numbers, words and lists of them, got type {type(value).__name__}"
            raise ValueError(f"{name}: {problem}; {remedy.format(argument)}")
