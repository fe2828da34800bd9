"""Settings of a run from a command line, a preset file or Python keywords, through one door and with one set of names.

All three are read as pairs of an option's name and a value ("num_envs", "agent.learning_rate"), later ones over
earlier ones, and converted by the types of the dataclasses below. Whatever is wrong is a `ValueError` of one
sentence. Neither jax nor numpy is imported here, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.spelling import nearest, parse_float, parse_int, parse_period

CONFIG = "config.yaml"  # of a run: everything, resolved
PROGRAM = "python -m jaxrl_fast.train"
DEFAULT = {"config": "ppo_cartpole", "stop_when_solved": True}  # without an algorithm, a preset or an environment
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
MOST_COUNTED = 2**30  # environment steps that a schedule may last: they are counted in int32
LAST_SEED = 2**31 - 1  # JAX reads larger ones modulo 2^32 and negative ones as others


@dataclass(frozen=True)
class Task:
    """What is learnt, and for how long."""

    env: Any = "CartPole-v1"
    """Environment: an id such as gymnax/CartPole-v1, or package.module:Class for one of your own."""
    env_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the environment, as key=value (more than one: a list, or the option again)."""
    num_envs: int = 64
    """Environments that step together."""
    total_steps: int = 500_000
    """Environment steps in all, rounded up to whole updates."""
    seed: int = 0
    """Of everything random; seeds from here on where there are several."""
    num_seeds: int = 1
    """Independent trainings in one program."""
    devices: int | Literal["auto"] = "auto"
    """Devices that the environments are split over."""


@dataclass(frozen=True)
class Evaluation:
    """When and how the greedy policy is tested, in environments of its own."""

    eval_every: int = 0
    """Environment steps between evaluations; 0: only at the end."""
    eval_episodes: int = 128
    """Episodes in an evaluation."""
    eval_envs: int = 128
    """Environments that they are played in."""
    solved: float | None = None
    """Mean return of 100 training episodes that counts as solved."""
    stop_when_solved: bool = False
    """End the run there."""


@dataclass(frozen=True)
class Output:
    """Where results go."""

    run_dir: str = ""
    """Folder of this run; left out, runs/NAME."""
    name: str = ""
    """Name of this run; left out, made of algorithm, environment, seed and time."""
    log_every: int = 0
    """Environment steps between lines of metrics.jsonl; 0: some 500 lines in all."""
    report_every: float = 1.0
    """Seconds between lines on the terminal."""
    log_level: Literal["info", "quiet"] = "info"
    """quiet: only warnings and errors."""
    tensorboard: bool = True
    """Write TensorBoard events into the run's folder."""
    wandb: bool = False
    """Log to Weights & Biases."""
    trackio: bool = False
    """Log to trackio."""
    project: str = "jaxrl_fast"
    """Project name for wandb and trackio."""
    compile_cache: bool = True
    """Keep compiled programs in ~/.cache/jaxrl_fast (or JAX_COMPILATION_CACHE_DIR)."""


@dataclass(frozen=True)
class Checkpoints:
    """When the run is saved, and from where it goes on."""

    resume: str = ""
    """Folder of a run to go on with, in that folder. Only its length and what it tells of itself may be changed."""
    save_every: int | str = "5min"
    """Environment steps (1M) or time (30s, 5min, 2h) between checkpoints; 0: only at the end and at a stop."""
    keep: int = 2
    """Newest checkpoints that are kept, beside the best one evaluated."""
    on_nonfinite: Literal["stop", "continue"] = "stop"
    """When a seed's numbers are no longer finite; continue: the other seeds go on."""


@dataclass(frozen=True)
class Options(Checkpoints, Output, Evaluation, Task):
    """All options of a run that are not the algorithm's own."""


class Settings(NamedTuple):
    """One run, resolved."""

    algo: str
    preset: str  # the preset's name or file, "" where there is none
    options: Options
    agent: Any  # the algorithm's dataclass of CONFIGS
    by_default: bool = False  # nothing said what to train


class Setting(NamedTuple):
    """One option as someone wrote it."""

    name: str  # "num_envs", "agent.learning_rate"
    values: list[Any]
    said: str  # how to name it in a message: "--num-envs", "num_envs in configs/x.yaml"


class Range(NamedTuple):
    """What a number may be."""

    least: float
    most: float = math.inf
    above: bool = False  # `least` itself is out


COUNT, POSITIVE, FRACTION, NOT_NEGATIVE = Range(1), Range(0, above=True), Range(0, 1), Range(0)
# A name means the same in every algorithm.
RANGES = {
    **dict.fromkeys(("num_envs", "total_steps", "num_seeds", "devices", "eval_episodes", "eval_envs", "keep"), COUNT),
    **dict.fromkeys(("eval_every", "log_every", "report_every", "save_every"), NOT_NEGATIVE),
    "seed": Range(0, LAST_SEED),
    **dict.fromkeys(("agent.rollout_length", "agent.num_minibatches", "agent.num_epochs", "agent.hidden"), COUNT),
    **dict.fromkeys(("agent.learning_rate", "agent.adam_epsilon", "agent.clip", "agent.target_kl"), POSITIVE),
    **dict.fromkeys(("agent.gamma", "agent.gae_lambda", "agent.q_lambda"), FRACTION),
    **dict.fromkeys(("agent.epsilon_start", "agent.epsilon_end", "agent.importance_exponent"), FRACTION),
    **dict.fromkeys(("agent.max_grad_norm", "agent.value_coef", "agent.entropy_coef"), NOT_NEGATIVE),
    **dict.fromkeys(("agent.priority_exponent", "agent.epsilon_ladder", "agent.munchausen_alpha"), NOT_NEGATIVE),
    **dict.fromkeys(("agent.replay_ratio", "agent.munchausen_temperature"), POSITIVE),
    **dict.fromkeys(("agent.batch_size", "agent.n_step"), COUNT),
    **dict.fromkeys(("agent.target_period", "agent.epsilon_steps"), Range(1, MOST_COUNTED)),
    "agent.learning_starts": Range(0, MOST_COUNTED),
    "agent.capacity": Range(1, LAST_SEED),
    "agent.target_step_size": Range(0, 1, above=True),
    "agent.num_atoms": Range(2),
    "agent.munchausen_clip": Range(-math.inf, 0),
}


def from_command_line(argv: Sequence[str]) -> Settings:
    """Settings from a command line. Prints the help and exits where it is asked for."""
    positional, written = tokenise(argv)
    if len(positional) > 1:
        raise ValueError(f"{positional[1]!r} is one word too many: only an algorithm stands without an option's name")
    asks_help = any(s.name in ("help", "h") for s in written)
    settings = resolve(positional[0] if positional else "", [s for s in written if s.name not in ("help", "h")])
    if asks_help:
        print_help(settings)
        raise SystemExit(0)
    return settings


def from_keywords(
    preset: str | None = None, algo: str = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> Settings:
    """Settings from Python: the options' names as keywords, the algorithm's own in `agent`."""
    given = ({"config": preset} if preset else {}) | options | ({"agent": agent} if agent else {})
    return resolve(algo, from_mapping(given, lambda name: name))


def tokenise(argv: Sequence[str]) -> tuple[list[str], list[Setting]]:
    """The words before the first option, and the options with their values. `-` and `_` are the same in names."""
    positional: list[str] = []
    settings: list[Setting] = []
    for word in argv:
        if word.startswith("-") and word[1:2].isalpha() or word.startswith("--"):
            name, equals, value = word.partition("=")
            bare = name.removeprefix("-" if name == "-h" else "--")
            settings.append(Setting(bare.replace("-", "_"), [value] if equals else [], name))
        else:
            (settings[-1].values if settings else positional).append(word)
    aliases = {"env_option": "env_options"}
    return positional, [s._replace(name=aliases.get(s.name, s.name)) for s in settings]


def from_mapping(mapping: Mapping[str, Any], say: Any) -> list[Setting]:
    """The same from nested names, as in a preset: {"num_envs": 64, "agent": {"gamma": 0.99}}."""
    settings = []
    for name, value in mapping.items():
        if name == "agent":
            if not isinstance(value, Mapping):
                raise ValueError(f"{say('agent')}: the algorithm's options by name are wanted, not {value!r}")
            settings += [Setting(f"agent.{k}", _as_values(v), say(f"agent.{k}")) for k, v in value.items()]
        else:
            settings.append(Setting(str(name), [value] if name == "env" else _as_values(value), say(name)))
    return settings


def resolve(algo: str, written: list[Setting]) -> Settings:
    """Presets first, what was written over them, defaults below."""
    resume = next((_one(s, "a run's folder") for s in reversed(written) if s.name == "resume"), "")
    if resume:
        return resumed(algo, [s for s in written if s.name != "resume"], Path(str(resume)).expanduser())
    by_default = not algo and not any(s.name in ("config", "env") for s in written)
    if by_default:
        written = from_mapping(DEFAULT, lambda name: name) + written
    preset = next((_one(s, "a preset's name or file") for s in reversed(written) if s.name == "config"), None)
    from_preset = [] if preset is None else read_preset(str(preset))
    of_preset = next((_one(s, "an algorithm") for s in from_preset if s.name == "algo"), "")
    if algo and of_preset and algo != of_preset:
        raise ValueError(f"preset {preset} is for {of_preset}, not {algo}")
    algo = algo or of_preset or "ppo"
    if algo not in CONFIGS:
        raise ValueError(f"unknown algorithm {algo!r}{nearest(algo, CONFIGS) or f'; there are {_listed(CONFIGS)}'}")
    settings = [s for s in from_preset if s.name != "algo"] + [s for s in written if s.name != "config"]
    agent_type = CONFIGS[algo]
    values: dict[str, Any] = {}
    known = types_of(Options) | {f"agent.{name}": kind for name, kind in types_of(agent_type).items()}
    for setting in map(lambda s: _without_no(s, known), settings):
        if setting.name not in known:
            _refuse_name(setting, known, algo)
        value = convert(known[setting.name], setting)
        values[setting.name] = values.get(setting.name, {}) | value if setting.name == "env_options" else value
        _check_range(setting, value)
        if setting.name == "save_every":
            _check_period(setting, value)
    own = {name[6:]: value for name, value in values.items() if name.startswith("agent.")}
    options = Options(**{name: value for name, value in values.items() if not name.startswith("agent.")})
    last_seed = options.seed + options.num_seeds - 1
    if last_seed > LAST_SEED:
        raise ValueError(f"seeds {options.seed} to {last_seed} pass {LAST_SEED}, the last one there is")
    if options.stop_when_solved and options.solved is None:
        raise ValueError("--stop-when-solved needs to know what solved means: give --solved RETURN")
    return Settings(algo, preset or "", options, agent_type(**own), by_default)


def resumed(algo: str, written: list[Setting], folder: Path) -> Settings:
    """Those of the run in this folder, with what was written over them where that may change."""
    path = folder / CONFIG
    if not path.is_file():
        siblings = [f.name for f in folder.parent.iterdir() if (f / CONFIG).is_file()] if folder.parent.is_dir() else []
        hint = nearest(folder.name, siblings, lambda name: str(folder.with_name(name)))
        raise ValueError(f"--resume {folder}: there is no run in it (no {CONFIG}){hint}")
    for setting in written:
        if setting.name in ("config", "run_dir", "name"):
            raise ValueError(f"{setting.said} does not go with --resume, which goes on in the run's own folder")
    as_preset = Setting("config", [str(path)], "--resume")
    before, now = resolve(algo, [as_preset]), resolve(algo, [as_preset, *written])
    for setting in map(lambda s: s._replace(name=_positive(s.name)), written):
        place, name = ("agent", setting.name[6:]) if setting.name.startswith("agent.") else ("options", setting.name)
        old, new = (getattr(getattr(which, place), name) for which in (before, now))
        fixed = place == "agent" or name in types_of(Task) and name != "total_steps"
        same = _same_env(old, new) if name == "env" else old == new
        if fixed and not same:
            raise ValueError(f"{setting.said} {_plain(new)}: this run has {_plain(old)}, and goes on only with that")
    return now._replace(preset="", options=dataclasses.replace(now.options, resume=str(folder)))


def types_of(dataclass_type: type) -> dict[str, Any]:
    """Each field's type by name."""
    hints = typing.get_type_hints(dataclass_type)
    return {f.name: hints[f.name] for f in dataclasses.fields(dataclass_type)}


def convert(kind: Any, setting: Setting) -> Any:
    """The value as the option's type has it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_convert_one(arguments[0], setting, v) for v in setting.values)
    if origin is dict:
        return dict(_pair(setting, v) for v in setting.values)
    if kind is bool and not setting.values:
        return True
    if kind is bool and setting.said.startswith("--") and len(setting.values) > 1:
        raise ValueError(f"{setting.said} takes no value; what is {setting.values[0]!r}?")
    wanted = _wanted(kind)
    return _convert_one(kind, setting, _one(setting, wanted))


def print_help(settings: Settings) -> None:
    """Every option with its group, its meaning and its default under this preset."""
    import tyro

    groups = [*reversed(Options.__bases__), type(settings.agent)]
    names = [*(g.__name__.lower() for g in groups[:-1]), "agent"]
    markers = [tyro.conf.OmitArgPrefixes] * (len(groups) - 1) + [None]
    shape = dataclasses.make_dataclass("Help", [(n, m[g] if m else g) for n, g, m in zip(names, groups, markers)])
    parts = [g(**{f.name: getattr(settings.options, f.name) for f in dataclasses.fields(g)}) for g in groups[:-1]]
    tyro.cli(
        shape,
        args=["--help"],
        default=shape(*parts, settings.agent),
        prog=f"{PROGRAM} [{'|'.join(CONFIGS)}] [--config PRESET]",
        description=f"Trains {settings.algo}. --config takes a file or one of: {_listed(shipped())}. Options given "
        "override it. Numbers may be written 1e6, 64k, 10M. Without an algorithm, a preset or an environment: "
        f"--config {DEFAULT['config']} --stop-when-solved.",
        registry=_registry(),
    )


def _registry() -> Any:
    """How the help shows what tyro would not: a dictionary."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()
    as_pairs = PrimitiveConstructorSpec(
        nargs="*",
        metavar="KEY=VALUE ...",
        instance_from_str=lambda texts: dict(text.split("=", 1) for text in texts),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [f"{k}={v}" for k, v in value.items()],
    )
    registry.primitive_rule(lambda info: as_pairs if info.type_origin is dict else None)
    return registry


def read_preset(name: str) -> list[Setting]:
    """A preset's settings: a path, or the bare name of a shipped one."""
    import yaml

    presets = shipped()
    path = presets.get(name) or Path(name).expanduser()
    if not path.is_file():
        hint = nearest(name, presets) or f"; shipped are {_listed(presets) or 'none'}"
        raise ValueError(f"there is no preset {name!r}, neither shipped nor as a file{hint}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise ValueError(f"{path}{where}: this is not readable as YAML ({problem})") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: options by name are wanted, such as `num_envs: 64`")
    content = {key: value for key, value in content.items() if key != "made"}
    if "config" in content:
        raise ValueError(f"{path}: a preset cannot name another one (config: {content['config']})")
    return from_mapping(content, lambda key: f"{key} in {path}")


def shipped() -> dict[str, Path]:
    """The presets that come along, by name."""
    package = Path(__file__).parent
    folder = next((f for f in (package / "configs", package.parent / "configs") if f.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def to_mapping(settings: Settings) -> dict[str, Any]:
    """Plain values for YAML, which `read_preset` reads back. What belongs to one run only is left out."""
    options = {f: getattr(settings.options, f) for f in types_of(Options) if f not in ("run_dir", "name", "resume")}
    if not isinstance(options["env"], str):
        options["env"] = repr(options["env"])
    options["env_options"] = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in options["env_options"].items()}
    agent = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(settings.agent).items()}
    return {"algo": settings.algo, **options, "agent": agent}


def _convert_one(kind: Any, setting: Setting, value: Any) -> Any:
    for option in typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,):
        try:
            return _cast(option, value)
        except ValueError:
            continue
    near = nearest(str(value), typing.get_args(kind)) if typing.get_origin(kind) is Literal else ""
    raise ValueError(f"{setting.said}: {value!r} is not {_wanted(kind)}{near}")


def _cast(kind: Any, value: Any) -> Any:
    """ValueError where the value is not of this kind."""
    text = str(value).strip()
    if kind is Any:
        return value
    if kind is types.NoneType and (value is None or text.lower() in ("none", "null")):
        return None
    if typing.get_origin(kind) is Literal and text in typing.get_args(kind):
        return text
    if kind is bool and text.lower() in WORDS:
        return WORDS[text.lower()]
    if kind in (int, float) and not isinstance(value, bool):
        return parse_int(text) if kind is int else parse_float(text)
    if kind is str and isinstance(value, (str, Path)):
        return str(value)
    raise ValueError


def _wanted(kind: Any) -> str:
    """In words, for messages."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_wanted(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(a) for a in typing.get_args(kind))
    words = {int: "a whole number (64, 64k, 1e6)", float: "a number", bool: "true or false", types.NoneType: "none"}
    return words.get(kind, "a word")


def _pair(setting: Setting, text: Any) -> tuple[str, Any]:
    """key=value as a pair; a pair is one already."""
    if isinstance(text, tuple):
        return text
    key, equals, value = str(text).partition("=")
    if not (key and equals):
        raise ValueError(f"{setting.said}: {text!r} is not of the form key=value")
    return key.replace("-", "_"), value


def _as_values(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _one(setting: Setting, wanted: str) -> Any:
    if len(setting.values) == 1:
        return setting.values[0]
    if not setting.values:
        raise ValueError(f"{setting.said} wants a value: {wanted}")
    raise ValueError(f"{setting.said} takes one value; {setting.values[1]!r} is one too many")


def _check_range(setting: Setting, value: Any) -> None:
    allowed = RANGES.get(setting.name)
    for number in value if isinstance(value, tuple) else (value,):
        if allowed is None or not isinstance(number, (int, float)):
            continue
        if number > allowed.most or number < allowed.least or allowed.above and number == allowed.least:
            bound = f"above {allowed.least}" if allowed.above else f"at least {allowed.least}"
            upper = f" and at most {allowed.most}" if allowed.most < math.inf else ""
            raise ValueError(f"{setting.said}: {number} is out of range; it must be {bound}{upper}")


def _check_period(setting: Setting, value: int | str) -> None:
    try:
        parse_period(str(value))
    except ValueError:
        raise ValueError(f"{setting.said}: {value!r} is neither steps (64k, 1M) nor a time (30s, 5min, 2h)") from None


def _without_no(setting: Setting, known: Mapping[str, Any]) -> Setting:
    """--no-x and --agent.no-x as x, false."""
    positive = _positive(setting.name)
    if positive != setting.name and known.get(positive) is bool and not setting.values:
        return Setting(positive, ["false"], setting.said)
    return setting


def _positive(name: str) -> str:
    prefix, dot, last = name.rpartition(".")
    return f"{prefix}{dot}{last.removeprefix('no_')}"


def _same_env(old: Any, new: Any) -> bool:
    """With or without its backend; what is no id has no name that could be compared."""
    return not isinstance(new, str) or new in (old, str(old).rpartition("/")[2])


def _plain(value: Any) -> str:
    """As it is written on a command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _refuse_name(setting: Setting, known: Iterable[str], algo: str) -> NoReturn:
    dashed = setting.said.startswith("-")
    spell = (lambda name: "--" + name.replace("_", "-")) if dashed else (lambda name: name)
    name = setting.name.removeprefix("no_")
    written = setting.said if dashed else setting.said.replace(setting.name, repr(setting.name), 1)
    ending = f"; {PROGRAM} --help lists all" if dashed else ""
    what = f"{algo} has no option" if name.startswith("agent.") else "there is no option"
    raise ValueError(f"{what} {written}{nearest(name, known, spell) or ending}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
