"""Resolve the settings of a run from a command line, a preset file or Python keywords.

All three are read as pairs of an option's name and a value ("num_envs", "agent.learning_rate"; `sources`) into one
`Request`, which reads a preset file once. `resolve` converts the values (`convert`): given options over the preset's,
and the preset's over the defaults. Every mistake is a ValueError of one line. Neither jax nor numpy is imported, so
that `--help` and error messages appear at once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_fast import agents
from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.config.convert import convert, read_values, without_no
from jaxrl_fast.config.options import (
    DEFAULT,
    LAST_SEED,
    NOT_SAVED,
    OF_RUN,
    Options,
    known_options,
    same_env,
    written_env,
)
from jaxrl_fast.config.paths import CONFIG
from jaxrl_fast.config.plain import as_lists, fits_a_file
from jaxrl_fast.config.presets import read_preset, shipped
from jaxrl_fast.config.sources import Setting, from_mapping, join_names, one
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.importing import name_of
from jaxrl_fast.utils.option import Option, options_of
from jaxrl_fast.utils.parsing import nearest

PRESET = Option("config", str)
ALGO = Option("algo", str)
REMEDIES = {  # for arguments that a file cannot hold
    "env_options": "make the environment with it, env=MyEnv({}=...)",
    "agent.network_options": "make {} the default of a subclass",
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

    def value(self, name: str) -> Any:
        """Return the value of the option of this name, such as "agent.gamma", or None if it does not exist."""
        last = name.removeprefix("agent.")
        return getattr(self.options if last == name else self.agent, last, None)


def request(algo: str, written: Sequence[Setting]) -> Request:
    """Return the request of an algorithm and settings, with the settings of its preset."""
    by_default = not algo and not any(s.name in ("config", "env") for s in written)
    if by_default:
        written = [*from_mapping(DEFAULT), *written]
    last = next((s for s in reversed(written) if s.name == "config"), None)
    preset = "" if last is None else convert(PRESET, last._replace(values=[one(last, "a preset's name or file")]))
    if preset in CONFIGS:
        use = f"`train {preset}`, or algo={preset!r} from Python"
        raise ValueError(f"--config: must be a preset, got the algorithm {preset!r}; use {use}")
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
        hint = nearest(algo, CONFIGS) or nearest(algo, shipped(), "--config {}".format)
        if (path_of(algo) / CONFIG).is_file():
            hint = f"; to resume the run in that folder, use --resume {algo}"
        elif algo.endswith(".py"):
            hint = f"; give the name by which Python imports it, such as {Path(algo).stem}"
        where = f" in {source}" if named else ""
        hint = hint or f"; there are {join_names(CONFIGS)}, and modules by name"
        raise UnknownAlgorithm(f"unknown algorithm {algo!r}{where}{hint}")
    return asked._replace(algo=algo, from_preset=[s for s in asked.from_preset if s.name != "algo"])


def options_of_algorithm(algo: str) -> dict[str, Option]:
    """Return every option of a run with this algorithm, by name."""
    try:
        return known_options(agents.options(algo))
    except ValueError as error:
        raise UnknownAlgorithm(str(error)) from error


def resolve(asked: Request) -> Settings:
    """Return the settings of a request: given options override the preset's, which override the defaults."""
    known = options_of_algorithm(asked.algo)
    of_preset = read_values(asked.from_preset, known, algo=asked.algo)
    values = read_values(asked.given, known, of_preset, asked.algo)
    given = {without_no(s, known).name for s in asked.given}
    for setting in (*asked.from_preset, *asked.given):
        if setting.name in REMEDIES:
            _check_arguments(setting, values[setting.name])
    same = "env" not in of_preset or isinstance(values["env"], str) and same_env(of_preset["env"], values["env"])
    if not (same or asked.resumed or "solved_threshold" in given):
        values.pop("solved_threshold", None)  # the preset's value holds for the preset's environment only
    for place, other in (("run_dir", "name"), ("name", "run_dir")):  # either overrides the preset's
        if place in given and other not in given:
            values.pop(other, None)
    is_auto = values.get("num_envs") == "auto"
    if is_auto:
        start = of_preset.get("num_envs", 1)
        values["num_envs"] = 1 if start == "auto" else start
    own = {name[6:]: value for name, value in values.items() if name.startswith("agent.")}
    options = Options(**{name: value for name, value in values.items() if not name.startswith("agent.")})
    last_seed = options.seed + options.num_seeds - 1
    if last_seed > LAST_SEED:
        raise ValueError(f"--num-seeds: seeds must be at most {LAST_SEED}, got seeds {options.seed} to {last_seed}")
    if options.stop_when_solved and options.solved_threshold is None:
        raise ValueError("--stop-when-solved: needs --solved-threshold RETURN")
    if options.players != "self-play" and options.opponent_pool != Options.opponent_pool:
        raise ValueError(
            f"--opponent-pool: has no effect without --players self-play, got {options.opponent_pool}; leave it out"
        )
    if options.players == "self-play" and options.num_envs < 2 and not is_auto:
        problem = f"self-play needs 2 games, one for each side, got {options.num_envs}"
        raise ValueError(f"--num-envs: {problem}; use 2 or more")
    agent = agents.options(asked.algo)(**own)
    return Settings(asked.algo, asked.preset, options, agent, asked.by_default, is_auto)


def check_unused(asked: Request, agents: Sequence[Any]) -> None:
    """Raise ValueError for an option that has no effect because no agent has the value that it needs.

    An option of a preset passes if the preset also sets the needed option, which other settings may have turned off.
    """
    options = {f"agent.{name}": option for name, option in options_of(type(agents[0])).items()}
    of_preset = {s.name for s in asked.from_preset}
    needs_of = lambda setting: options[setting.name].needs if setting.name in options else ()
    settled = lambda setting: f"agent.{needs_of(setting)[0]}" in of_preset
    for setting in (*(s for s in asked.from_preset if needs_of(s) and not settled(s)), *asked.given):
        if not needs_of(setting):
            continue
        switch, *values = needs_of(setting)
        if all(getattr(agent, switch) not in values for agent in agents):
            other = setting.spell(f"agent.{switch}")
            if values == [False]:
                raise ValueError(f"{setting.origin}: has no effect with {other}")
            way = "" if values == [True] else f" {' or '.join(map(plain, values))}"
            raise ValueError(f"{setting.origin}: has no effect without {other}{way}")


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
    options = {f: getattr(settings.options, f) for f in OF_RUN if f not in NOT_SAVED}
    options["env"] = written_env(options["env"])
    agent = {name: as_lists(value) for name, value in dataclasses.asdict(settings.agent).items()}
    return {"algo": settings.algo, **{name: as_lists(value) for name, value in options.items()}, "agent": agent}


def _check_arguments(setting: Setting, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that a file cannot hold, since a resume reads arguments from a file."""
    for name, value in options.items():
        if not fits_a_file(as_lists(value)):
            problem = f"{name} must be numbers, words and lists of them, got type {type(value).__name__}"
            raise ValueError(f"{setting.origin}: {problem}; {REMEDIES[setting.name].format(name)}")
