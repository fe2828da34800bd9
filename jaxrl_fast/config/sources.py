"""What someone wrote on a command line, in a preset or as keywords: options by name, their values not yet read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_fast.config.options import SINGLE


class Setting(NamedTuple):
    """One option as someone wrote it."""

    name: str  # "num_envs", "agent.learning_rate"
    values: list[Any]
    said: str  # how to name it in a message: "--num-envs", "num_envs in configs/x.yaml"


def tokenize(argv: Sequence[str]) -> tuple[list[str], list[Setting]]:
    """The words before the first option, and the options with their values. `-` and `_` are the same in names."""
    positional: list[str] = []
    settings: list[Setting] = []
    for word in argv:
        _check_line(word)
    for i, word in enumerate(argv):
        if word == "--":  # words follow, whatever they look like
            positional += argv[i + 1 :]
            break
        if word.startswith("-") and word[1:2].isalpha() or word.startswith("--"):
            name, equals, value = word.partition("=")
            bare = name.removeprefix("-" if name == "-h" else "--")
            settings.append(Setting(bare.replace("-", "_"), [value] if equals else [], name))
        else:
            (settings[-1].values if settings else positional).append(word)
    aliases = {"env_option": "env_options"}
    return positional, [s._replace(name=aliases.get(s.name, s.name)) for s in settings]


def from_mapping(mapping: Mapping[str, Any], say: Any) -> list[Setting]:
    """Settings from nested names, as in a preset: {"num_envs": 64, "agent": {"gamma": 0.99}}."""
    settings = []
    for name, value in mapping.items():
        if name == "agent":
            if not isinstance(value, Mapping):
                raise ValueError(f"{say('agent')}: the algorithm's options by name are wanted, not {value!r}")
            settings += [Setting(f"agent.{k}", _as_values(v), say(f"agent.{k}")) for k, v in value.items()]
        else:
            settings.append(Setting(str(name), [value] if name == "env" else _as_values(value), say(name)))
    names = [setting.name.replace("-", "_") for setting in settings]
    for setting in settings:
        if names.count(setting.name.replace("-", "_")) > 1:
            raise ValueError(f"{setting.said} is there twice")
        for text in (setting.name, *(part for v in setting.values for part in (v if isinstance(v, tuple) else (v,)))):
            _check_line(text)
    return settings


def _check_line(text: Any) -> None:
    """What is wrong with it is to be said in one line, and no path has a null character."""
    if isinstance(text, str) and (len(text.splitlines()) > 1 or "\0" in text):
        what = "a null character" if "\0" in text else "a line break"
        raise ValueError(f"{text[:100]!r} has {what} in it")


def one(setting: Setting, wanted: str) -> Any:
    """Its only value."""
    if len(setting.values) == 1:
        return setting.values[0]
    if not setting.values:
        raise ValueError(f"{setting.said} wants a value: {wanted}")
    several = "" if setting.name in SINGLE else "; jaxrl_fast.sweep takes several"
    hint = in_front(setting, 1) if setting.said.startswith("-") else several
    raise ValueError(f"{setting.said} takes one value; {setting.values[1]!r} is one too many{hint}")


def in_front(setting: Setting, i: int = 0) -> str:
    """On a command line: where what seems to be value i of an option has its place if it is none, and is no number."""
    word = str(setting.values[i])
    misplaced = setting.said.startswith("--") and not word[:1].isdigit()
    return "; an algorithm or the folder of a run comes before all options" if misplaced else ""


def join_names(names: Iterable[str]) -> str:
    """For a sentence."""
    return ", ".join(names)


def _as_values(value: Any) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy's
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    return list(value) if isinstance(value, (list, tuple)) else [value]
