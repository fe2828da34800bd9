"""Read the names and unconverted values of options from a command line, a preset or keywords."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_fast.options.declare import Part
from jaxrl_fast.utils.importing import FLAX_FIELDS, describe
from jaxrl_fast.utils.parsing import shown
from jaxrl_fast.utils.plain import as_lists

PROGRAM, SWEEP, SEARCH = (f"python -m jaxrl_fast.{command}" for command in ("train", "sweep", "search"))

ALIASES = {
    "env_option": "env_options",
    "network.option": "network.options",
    "slurm_option": "slurm_options",
    "ray_option": "ray_options",
    "h": "help",
}
SINGULAR = {name: alias for alias, name in ALIASES.items() if name != "help"}  # as help writes them


class Setting(NamedTuple):
    """The name and the unconverted values of one option."""

    name: str  # as it is written, or the option's path: "num_envs", "memory.size"
    values: list[Any]
    origin: str  # its name in messages: "num_envs", "num_envs in configs/x.yaml"
    on_command_line: bool = False


def tokenize(argv: Sequence[str]) -> tuple[list[str], list[Setting]]:
    """Return the words before the first option, and the options with their values. `-` and `_` in names are equal."""
    positional: list[str] = []
    settings: list[Setting] = []
    for word in argv:
        _check_line(word)
    for i, word in enumerate(argv):
        if word == "--":  # only positional words follow
            positional += argv[i + 1 :]
            break
        if word.startswith("-") and word[1:2].isalpha() or word.startswith("--"):
            spelled, equals, value = word.partition("=")
            name = spelled.removeprefix("-" if spelled == "-h" else "--").replace("-", "_")
            name = ALIASES.get(name, name)
            origin = name if spelled.startswith("--") else spelled
            settings.append(Setting(name, [value] if equals else [], origin, on_command_line=True))
        else:
            (settings[-1].values if settings else positional).append(word)
    return positional, settings


def from_mapping(mapping: Mapping[str, Any], origin: Any = str) -> list[Setting]:
    """Return the settings of a mapping, as in a preset: {"num_envs": 64, "memory": {"kind": "gru", "size": 256}}.

    The options of the algorithm may stand in a separate mapping, `agent`.
    """
    agent = mapping.get("agent", {})
    if not isinstance(agent, Mapping):
        raise ValueError(f"{origin('agent')}: must map the algorithm's options to values, got {describe(agent)}")
    settings = []
    for name, value in (*((n, v) for n, v in mapping.items() if n != "agent"), *agent.items()):
        value = _with_arguments(value) if name == "network" else value
        settings.append(Setting(str(name), [value] if name == "env" else as_values(value), origin(name)))
    _refuse_repeated(settings)
    for setting in settings:
        for text in (setting.name, *(part for v in setting.values for part in (v if isinstance(v, tuple) else (v,)))):
            _check_line(text)
    return settings


def _refuse_repeated(settings: Sequence[Setting]) -> None:
    """Raise ValueError for an option that a mapping names twice, perhaps in a part too: memory {size: 3}."""
    named: list[tuple[str, Setting]] = []
    for setting in settings:
        name = setting.name.replace("-", "_")
        pairs = [v for v in setting.values if isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], str)]
        inner = [key for key, _ in pairs if key != "kind"]
        is_part = inner and name != "env" and not name.endswith("options")
        named += [(f"{name}.{key}", setting) for key in inner] if is_part else [(name, setting)]
    for i, (name, setting) in enumerate(named):
        if name in (other for other, _ in named[:i]):
            raise ValueError(f"{setting.origin}: given twice; keep one")


def one(setting: Setting, expected: str) -> Any:
    """Return the only value of a setting."""
    if not setting.values:
        raise ValueError(f"{setting.origin}: needs a value; give {expected}")
    if len(setting.values) > 1:
        raise ValueError(
            f"{setting.origin}: takes one value, got {shown(' '.join(map(describe_value, setting.values)))}"
        )
    return setting.values[0]


def describe_value(value: Any) -> str:
    """Return a value for a message: text as it is, other values in a few words."""
    return value if isinstance(value, str) else describe(value)


def join_names(names: Iterable[str]) -> str:
    """Return names for a sentence: "ppo, dqn"."""
    return ", ".join(names)


def _with_arguments(module: Any) -> Any:
    """Return a flax module as its class and its arguments; other values unchanged."""
    if not dataclasses.is_dataclass(module) or isinstance(module, type | Part):
        return module
    arguments = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        if not field.init or field.name in FLAX_FIELDS or value is field.default:
            continue
        arguments[field.name] = as_lists(value)
    return {"kind": type(module), "options": arguments}


def _check_line(text: Any) -> None:
    """Raise ValueError for text with characters that do not fit into a one-line message or a path."""
    if isinstance(text, str) and (len(text.splitlines()) > 1 or "\0" in text):
        what = "a null character" if "\0" in text else "a line break"
        raise ValueError(f"{text[:100]!r} has {what} in it; remove it")


def as_values(value: Any) -> list[Any]:
    """Return the values of an option: the elements of a list, the pairs of a mapping or a part, else the value."""
    if isinstance(value, Part):
        declared = [field.name for field in dataclasses.fields(value) if field.metadata.get("option", {}) is not None]
        value = {name: getattr(value, name) for name in declared}
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy's
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    return list(value) if isinstance(value, list | tuple) else [value]
