"""Read preset files: YAML mappings from an option's name to its value."""

import re
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast.config.paths import CONFIG
from jaxrl_fast.config.sources import Setting, from_mapping, join_names
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.parsing import nearest

YAML_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9]\d*)",
    "tag:yaml.org,2002:float": r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.inf|\.nan",
}
NOT_YAMLS = (*YAML_NUMBERS, "tag:yaml.org,2002:timestamp")  # kinds of words that are not read as YAML reads them


def read_preset(name: str) -> list[Setting]:
    """A preset's settings: a path, or the bare name of a shipped one."""
    presets = shipped()
    path = presets.get(name) or path_of(name, "--config")
    if (path / CONFIG).is_file():
        raise ValueError(f"{name!r} is the folder of a run and no preset; its settings are one: {path / CONFIG}")
    if not path.is_file():
        if name and path.is_dir() or len(Path(name).parts) > 1:  # no shipped one was meant
            raise ValueError(f"--config {name} is {'a folder' if path.is_dir() else 'no file'}, and no preset")
        hint = nearest(name, presets) or f"; shipped are {join_names(presets) or 'none'}"
        raise ValueError(f"there is no preset {name!r}, neither shipped nor as a file{hint}")
    content = {key: value for key, value in _content(path).items() if key != "meta"}
    if not content:
        raise ValueError(f"{path} says nothing; a preset names options, such as env: CartPole-v1")
    if "config" in content:
        raise ValueError(f"{path}: a preset cannot name another one (config: {content['config']})")
    if "resume" in content:
        run = quote(str(content["resume"]))
        raise ValueError(f"{path}: a preset cannot name a run to go on with; --resume {run} does")
    return from_mapping(content, lambda key: f"{key} in {path}")


def read_meta(path: Path) -> dict[str, Any]:
    """What the config.yaml of a run says of how it was made, beside its settings: versions, members, an id."""
    found = _content(path).get("meta") or {}
    members = found.get("members", [{"seed": 0}]) if isinstance(found, Mapping) else None
    if not (isinstance(members, list) and members and all(isinstance(m, Mapping) and "seed" in m for m in members)):
        raise ValueError(f"{path}: `meta` is not as a run writes it")
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
    package = Path(__file__).parents[1]
    folder = next((f for f in (package / "configs", package.parent / "configs") if f.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
