"""Read the names and unconverted values of options from a command line, a preset or keywords."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_fast.config.plain import as_lists
from jaxrl_fast.utils.importing import FLAX_FIELDS, describe
from jaxrl_fast.utils.parsing import shown

ALIASES = {
    "env_option": "env_options",
    "agent.network_option": "agent.network_options",
    "slurm_option": "slurm_options",
    "h": "help",
}
SINGULAR = {name: alias for alias, name in ALIASES.items() if name != "help"}  # as help and messages write them


class Setting(NamedTuple):
    """The name and the unconverted values of one option."""

    name: str  # "num_envs", "agent.learning_rate"
    values: list[Any]
    origin: str  # its name in messages: "--num-envs", "num_envs in configs/x.yaml"

    @property
    def on_command_line(self) -> bool:
        return self.origin.startswith("-") and " " not in self.origin

    def spell(self, name: str) -> str:
        """Return another option's name in the spelling of this one: --num-envs or num_envs."""
        return f"--{SINGULAR.get(name, name).replace('_', '-')}" if self.on_command_line else name


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
            origin, equals, value = word.partition("=")
            name = origin.removeprefix("-" if origin == "-h" else "--").replace("-", "_")
            settings.append(Setting(ALIASES.get(name, name), [value] if equals else [], origin))
        else:
            (settings[-1].values if settings else positional).append(word)
    return positional, settings


def from_mapping(mapping: Mapping[str, Any], origin: Any = str) -> list[Setting]:
    """Return the settings of nested names, as in a preset: {"num_envs": 64, "agent": {"gamma": 0.99}}."""
    settings = []
    for name, value in mapping.items():
        if name == "agent":
            if not isinstance(value, Mapping):
                got = describe(value)
                raise ValueError(f"{origin('agent')}: must map the algorithm's options to values, got {got}")
            named = _with_class_of_network(value)
            settings += [Setting(f"agent.{k}", _as_values(v), origin(f"agent.{k}")) for k, v in named.items()]
        else:
            settings.append(Setting(str(name), [value] if name == "env" else _as_values(value), origin(name)))
    names = [setting.name.replace("-", "_") for setting in settings]
    for setting in settings:
        if names.count(setting.name.replace("-", "_")) > 1:
            raise ValueError(f"{setting.origin}: given twice; keep one")
        for text in (setting.name, *(part for v in setting.values for part in (v if isinstance(v, tuple) else (v,)))):
            _check_line(text)
    return settings


def one(setting: Setting, expected: str) -> Any:
    """Return the only value of a setting."""
    if not setting.values:
        raise ValueError(f"{setting.origin}: needs a value; give {expected}")
    if len(setting.values) > 1:
        raise ValueError(f"{setting.origin}: takes one value, got {shown(' '.join(map(_word, setting.values)))}")
    return setting.values[0]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else describe(value)


def join_names(names: Iterable[str]) -> str:
    """Return names for a sentence: "ppo, dqn"."""
    return ", ".join(names)


def _with_class_of_network(agent: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an algorithm's options with a flax module as its class and its arguments."""
    module = agent.get("network")
    if not dataclasses.is_dataclass(module) or isinstance(module, type):
        return agent
    arguments = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        if not field.init or field.name in FLAX_FIELDS or value is field.default:
            continue
        arguments[field.name] = as_lists(value)
    return {**agent, "network": type(module), "network_options": arguments}


def _check_line(text: Any) -> None:
    """Raise ValueError for text with characters that do not fit into a one-line message or a path."""
    if isinstance(text, str) and (len(text.splitlines()) > 1 or "\0" in text):
        what = "a null character" if "\0" in text else "a line break"
        raise ValueError(f"{text[:100]!r} has {what} in it; remove it")


def _as_values(value: Any) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy's
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    return list(value) if isinstance(value, list | tuple) else [value]
