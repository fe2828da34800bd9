"""Settings of a run from a command line, a preset file or Python keywords, through one door and with one set of names.

All three are read as pairs of an option's name and a value ("num_envs", "agent.learning_rate"; `written`), later ones
over earlier ones, and converted (`values`) by the types of the dataclasses (`options`). Whatever is wrong is a
`ValueError` of one sentence. Neither jax nor numpy is imported, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxrl_fast import agents
from jaxrl_fast.agents.configs import CONFIGS, NEEDS
from jaxrl_fast.config.convert import check_range, convert, is_integer, merge_values
from jaxrl_fast.config.names import SWEEP, known_options, refuse_unknown, speller, without_no
from jaxrl_fast.config.options import DEFAULT, LAST_SEED, SINGLE, Options, types_of
from jaxrl_fast.config.paths import CONFIG
from jaxrl_fast.config.presets import read_preset, shipped
from jaxrl_fast.config.sources import Setting, from_mapping, join_names, one
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.parsing import nearest


class UnknownAlgorithm(ValueError):
    """There is none of that name, or it cannot be imported from here."""


class Settings(NamedTuple):
    """One run, resolved."""

    algo: str
    preset: str  # the preset's name or file, "" where there is none
    options: Options
    agent: Any  # the algorithm's dataclass
    by_default: bool = False  # nothing said what to train

    @property
    def algo_name(self) -> str:
        """The algorithm's name without the package that one of one's own is in: for folders and titles."""
        return self.algo.rpartition(".")[2]


def resolve(algo: str, written: list[Setting]) -> Settings:
    """Presets first, what was written over them, defaults below."""
    by_default = nothing_requested(algo, written)
    if by_default:
        written = from_mapping(DEFAULT, lambda name: name) + written
    preset = preset_of(written)
    if preset in CONFIGS:
        raise ValueError(f"{preset!r} is an algorithm and no preset: `train {preset}`, or algo={preset!r} from Python")
    from_preset = [] if preset is None else read_preset(preset)
    of_preset = next((one(s, "an algorithm") for s in from_preset if s.name == "algo"), "")
    if algo and of_preset and algo != of_preset:
        run = next((s for s in written if s.name == "config" and s.said == "--resume"), None)
        what = f"--resume {Path(run.values[0]).parent} is a run of" if run else f"preset {preset} is for"
        raise ValueError(f"{what} {of_preset}, not {algo}")
    algo = str(algo or of_preset or "ppo")
    if algo.endswith(".py") or not agents.exists(algo):
        _refuse_algorithm(algo, of_preset and f" of {preset}: no module of that name is found from here")
    settings = [s for s in from_preset if s.name != "algo"] + [s for s in written if s.name != "config"]
    try:
        agent_type = agents.options(algo)
    except ValueError as error:
        raise UnknownAlgorithm(str(error)) from error
    values: dict[str, Any] = {}
    known = known_options(agent_type)
    for setting in (without_no(s, known) for s in settings):
        if setting.name not in known:
            refuse_unknown(setting, known, algo)
        value = _convert(known[setting.name], setting)
        if setting.name == "env_options":
            _check_env_options(setting, value)
        check_range(setting, value)
        values[setting.name] = merge_values(known[setting.name], values.get(setting.name), value)
    if not any(s.said == "--resume" for s in written):
        _drop_foreign_threshold(values, from_preset, written)
    for place, other in (("run_dir", "name"), ("name", "run_dir")):  # a preset's is overridden by either
        if any(s.name == place for s in written) and not any(s.name == other for s in written):
            values.pop(other, None)
    own = {name[6:]: value for name, value in values.items() if name.startswith("agent.")}
    options = Options(**{name: value for name, value in values.items() if not name.startswith("agent.")})
    last_seed = options.seed + options.num_seeds - 1
    if last_seed > LAST_SEED:
        raise ValueError(f"seeds {options.seed} to {last_seed} pass {LAST_SEED}, the last one there is")
    if options.stop_when_solved and options.solved is None:
        raise ValueError("--stop-when-solved needs to know what solved means: give --solved RETURN")
    return Settings(algo, preset or "", options, agent_type(**own), by_default)


def _refuse_algorithm(algo: str, of_preset: str) -> NoReturn:
    hint = nearest(algo, CONFIGS) or nearest(algo, shipped(), "--config {}".format)
    if (path_of(algo) / CONFIG).is_file():
        hint = f"; to go on with the run in that folder, --resume {algo}"
    elif algo.endswith(".py"):
        hint = f"; of one's own it is a module's name, as one imports it, such as {Path(algo).stem}"
    raise UnknownAlgorithm(f"unknown algorithm {algo!r}{of_preset}{hint or f'; there are {join_names(CONFIGS)}'}")


def _convert(kind: Any, setting: Setting) -> Any:
    """The value. Several of them, as a sweep takes them, are for a sweep."""
    try:
        return convert(kind, setting)
    except ValueError:
        text = setting.values[0] if len(setting.values) == 1 else None
        one_wanted = setting.name not in SINGLE and typing.get_origin(kind) not in (tuple, dict)
        one_wanted &= setting.said.startswith("--")
        if isinstance(text, str) and one_wanted and ("," in text or ".." in text and is_integer(kind)):
            raise ValueError(f"{setting.said} takes one value, not {text}; {SWEEP} takes several") from None
        raise


def folder_of(setting: Setting, wanted: str) -> str:
    """The folder that was given. ValueError for none, as of a shell's variable that is not set."""
    folder: str = convert(str, setting)
    if not folder:
        raise ValueError(f"{setting.said} wants {wanted}, and '' is none")
    return folder


def preset_of(written: Sequence[Setting]) -> str | None:
    """The preset's name or file, None where there is none."""
    last = next((s for s in reversed(written) if s.name == "config"), None)
    return None if last is None else convert(str, last._replace(values=[one(last, "a preset's name or file")]))


def check_unused(written: Sequence[Setting], agents: Sequence[Any]) -> None:
    """ValueError where what was written does nothing, for none of these agents has the switch on that it needs.

    A preset's options are let pass where it has a word on the switch as well, which may have been turned off since.
    """
    preset = preset_of(written)
    from_preset = [] if preset is None else read_preset(preset)
    known = {s.name for s in from_preset}
    mine = [s for s in from_preset if f"agent.{_needed(s)[0]}" not in known]
    for setting in [*mine, *written]:
        switch, values = _needed(setting)
        if switch and all(getattr(agent, switch, values[0]) not in values for agent in agents):
            way = "" if values == (True,) else f" {' or '.join(values)}"
            raise ValueError(f"{setting.said} does nothing without {speller(setting)(f'agent.{switch}')}{way}")


def _needed(setting: Setting) -> tuple[str, tuple[Any, ...]]:
    """The switch without which an option of the algorithm does nothing, and what it is to be; "" for none."""
    return NEEDS.get(setting.name.removeprefix("agent."), ("", ()))


def _drop_foreign_threshold(values: dict[str, Any], from_preset: list[Setting], written: list[Setting]) -> None:
    """What a preset calls solved, it says of its own environment."""
    env = next((one(s, "an environment") for s in from_preset if s.name == "env"), None)
    same = isinstance(values.get("env"), str) and same_env(env, values["env"])
    if env is not None and not same and not any(s.name == "solved" for s in written):
        values.pop("solved", None)


def nothing_requested(algo: str, written: list[Setting]) -> bool:
    """Whether nothing says what to train."""
    return not algo and not any(s.name in ("config", "env") for s in written)


def to_mapping(settings: Settings) -> dict[str, Any]:
    """Plain values for YAML, which `read_preset` reads back. What belongs to one run only is left out."""
    options = {f: getattr(settings.options, f) for f in types_of(Options) if f not in ("run_dir", "name", "resume")}
    if not isinstance(options["env"], str):
        options["env"] = re.sub(r" at 0x[0-9a-f]+", "", repr(options["env"]))  # another process has it elsewhere
    options["env_options"] = {name: as_lists(value) for name, value in options["env_options"].items()}
    agent = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(settings.agent).items()}
    return {"algo": settings.algo, **options, "agent": agent}


def as_lists(value: Any) -> Any:
    """Arrays as lists of numbers, also within lists and dictionaries, and what is none as it is."""
    if isinstance(value, (list, tuple)):
        return [as_lists(part) for part in value]
    if isinstance(value, dict):
        return {name: as_lists(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _check_env_options(setting: Setting, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option value that a file cannot hold: a resume reads the options from a file."""
    for name, value in options.items():
        if not _fits_a_file(as_lists(value)):
            raise ValueError(
                f"{setting.said}: {name} is of type {type(value).__name__}, and only numbers, words and lists of them "
                f"can be written down for later; make the environment with it: env=MyEnv({name}=...)"
            )


def _fits_a_file(value: Any) -> bool:
    """YAML and JSON both have it."""
    words = (str, int, float, bool, type(None))
    if type(value) is dict:
        return all(type(name) in words and _fits_a_file(part) for name, part in value.items())
    return all(map(_fits_a_file, value)) if type(value) in (list, tuple) else type(value) in words


def same_env(old: Any, new: Any) -> bool:
    """With or without its backend; what is no id has no name that could be compared."""
    if not isinstance(new, str):
        return True
    (backend, name), (other, its_name) = (env.rpartition("/")[::2] for env in (str(old), new))
    return name == its_name and (backend == other or not backend or not other)
