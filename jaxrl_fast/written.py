"""What someone wrote on a command line, in a preset or as keywords: options by name, their values not yet read."""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from jaxrl_fast.options import SINGLE
from jaxrl_fast.spelling import nearest

CONFIG = "config.yaml"  # of a run: everything, resolved; a preset too
YAML_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9]\d*)",
    "tag:yaml.org,2002:float": r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.inf|\.nan",
}
NOT_YAMLS = (*YAML_NUMBERS, "tag:yaml.org,2002:timestamp")  # kinds of words that are not read as YAML reads them


class Setting(NamedTuple):
    """One option as someone wrote it."""

    name: str  # "num_envs", "agent.learning_rate"
    values: list[Any]
    said: str  # how to name it in a message: "--num-envs", "num_envs in configs/x.yaml"


def tokenise(argv: Sequence[str]) -> tuple[list[str], list[Setting]]:
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


def read_preset(name: str) -> list[Setting]:
    """A preset's settings: a path, or the bare name of a shipped one."""
    presets = shipped()
    path = presets.get(name) or path_of(name, "--config")
    if (path / CONFIG).is_file():
        raise ValueError(f"{name!r} is the folder of a run and no preset; its settings are one: {path / CONFIG}")
    if not path.is_file():
        if name and path.is_dir() or len(Path(name).parts) > 1:  # no shipped one was meant
            raise ValueError(f"--config {name} is {'a folder' if path.is_dir() else 'no file'}, and no preset")
        hint = nearest(name, presets) or f"; shipped are {listed(presets) or 'none'}"
        raise ValueError(f"there is no preset {name!r}, neither shipped nor as a file{hint}")
    content = {key: value for key, value in _content(path).items() if key != "made"}
    if not content:
        raise ValueError(f"{path} says nothing; a preset names options, such as env: CartPole-v1")
    if "config" in content:
        raise ValueError(f"{path}: a preset cannot name another one (config: {content['config']})")
    if "resume" in content:
        run = quote(str(content["resume"]))
        raise ValueError(f"{path}: a preset cannot name a run to go on with; --resume {run} does")
    return from_mapping(content, lambda key: f"{key} in {path}")


def made(path: Path) -> dict[str, Any]:
    """What the config.yaml of a run says of how it was made, beside its settings: versions, members, an id."""
    found = _content(path).get("made") or {}
    members = found.get("members", [{"seed": 0}]) if isinstance(found, Mapping) else None
    if not (isinstance(members, list) and members and all(isinstance(m, Mapping) and "seed" in m for m in members)):
        raise ValueError(f"{path}: `made` is not as a run writes it")
    return dict(found)


def _refuse_twice(node: Any, seen: set[int], within: frozenset[int] = frozenset()) -> None:
    """An error of YAML where a name is twice in one mapping: its own reader takes the last, and says nothing.

    And where something is a part of itself, being `within` it already.
    """
    import yaml

    if isinstance(node, yaml.ScalarNode) or node is None or id(node) in seen:
        return
    seen.add(id(node))
    within |= {id(node)}
    pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, part) for part in node.value]
    names = set()
    for key, value in pairs:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
            names.add(key.value)
        if id(value) in within:
            raise yaml.MarkedYAMLError(problem="this is a part of itself", problem_mark=node.start_mark)
        _refuse_twice(value, seen, within)


def _content(path: Path) -> Mapping[str, Any]:
    """A file of options by name. ValueError where it is none."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        _refuse_twice(yaml.compose(text, yaml.SafeLoader), set())
        content = yaml.load(text, _loader()) or {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise ValueError(f"{path}{where}: this is not readable as YAML ({problem})") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: options by name are wanted, such as `num_envs: 64`")
    return content


def _loader() -> Any:
    """YAML's safe one, but 010 is not 8, 1:30 not 90, and 2026-11-24 no date: words, to be read as elsewhere."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    known = yaml.SafeLoader.yaml_implicit_resolvers.items()
    loader.yaml_implicit_resolvers = {c: [of for of in kinds if of[0] not in NOT_YAMLS] for c, kinds in known}
    for tag, pattern in YAML_NUMBERS.items():
        loader.add_implicit_resolver(tag, re.compile(f"^({pattern})$"), list("-+.0123456789"))
    return loader


def shipped() -> dict[str, Path]:
    """The presets that come along, by name."""
    package = Path(__file__).parent
    folder = next((f for f in (package / "configs", package.parent / "configs") if f.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def leads_elsewhere(name: str) -> bool:
    """A folder's name that is none: it has folders in it, goes up, or is of blanks."""
    return Path(name).name != name or name == ".." or name.isspace()


def _check_line(text: Any) -> None:
    """What is wrong with it is to be said in one line, and no path has a null character."""
    if isinstance(text, str) and (len(text.splitlines()) > 1 or "\0" in text):
        what = "a null character" if "\0" in text else "a line break"
        raise ValueError(f"{text[:100]!r} has {what} in it")


def path_of(text: str, said: str = "") -> Path:
    """A path as someone wrote it. ValueError where it cannot be one: no such user (~someone), or a name too long."""
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # exists() hides what is wrong with it from Python 3.14 on
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        shown = text if len(text) < 100 else f"{text[:100]}..."
        raise ValueError(f"{f'{said} ' if said else ''}{shown!r} is no path ({why})") from error
    return path


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


def listed(names: Iterable[str]) -> str:
    """For a sentence."""
    return ", ".join(names)


def _as_values(value: Any) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy's
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    return list(value) if isinstance(value, (list, tuple)) else [value]
