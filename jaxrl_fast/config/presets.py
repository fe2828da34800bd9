"""Read files of options: presets, and the config.yaml of a run."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast.config.paths import CONFIG, check_format
from jaxrl_fast.config.population import LABEL
from jaxrl_fast.config.sources import PROGRAM, Setting, from_mapping, join_names
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.formatting import counted, short_number
from jaxrl_fast.utils.parsing import nearest

YAML_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9]\d*)",
    "tag:yaml.org,2002:float": r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.inf|\.nan",
}
PLAIN_WORDS = (*YAML_NUMBERS, "tag:yaml.org,2002:timestamp")  # types that are not resolved as YAML does


def shipped() -> dict[str, Path]:
    """Return the presets of the package by name."""
    return {path.stem: path for path in sorted(_folder().glob("*.yaml"))}


def published_file() -> Path:
    """Return the file with the outcomes of the published trainings of presets, by benchmarks/published.py."""
    return _folder() / "published.json"


def warnings(preset: str, threshold: float | None, total_steps: int) -> tuple[str, ...]:
    """Return a warning if no published seed of a preset reached its threshold in `total_steps` or more steps."""
    path = shipped().get(Path(preset).stem)
    if path is None or preset != path.stem and Path(preset).resolve() != path.resolve():
        return ()
    row = json.loads(published_file().read_text(encoding="utf-8")).get(path.stem)
    if row is None or row["solved"] or threshold != row["threshold"] or total_steps > row["env_steps"]:
        return ()
    problem = f"none of {counted(row['seeds'], 'published seed')} of {path.stem} reached {threshold:g}"
    return (f"solved_threshold: {problem} in {short_number(row['env_steps'])} steps; train longer or lower it",)


def _folder() -> Path:
    package = Path(__file__).parents[1]
    return next((f for f in (package / "configs", package.parent / "configs") if f.is_dir()), package)


def read_preset(name: str, given: Collection[str] = ()) -> list[Setting]:
    """Return the settings of a preset: a path, or the bare name of a shipped one.

    `given` has the names of the settings that override the preset's.
    """
    presets = shipped()
    path = presets.get(name) or path_of(name, "config")
    if (path / CONFIG).is_file():
        raise ValueError(f"config: must be a preset, got the run directory {name!r}; use {path / CONFIG}")
    if not path.is_file():
        is_name = len(Path(name).parts) == 1 and not path.is_dir()
        hint = nearest(name, presets) or f"; shipped are {join_names(presets)}" if is_name else ""
        raise ValueError(f"config: must be a preset or a file, got {name!r}{hint}")
    content = _load(path)
    if not content:
        raise ValueError(f"{path}: the preset is empty; name options, such as env: CartPole-v1")
    meta = _meta(content, path)
    if meta:
        check_format(meta.get("format", 1), path)
        _check_preset(meta, path, "env" in given)
        of_protocol = ["rewards"] if "protocol" in given else []
        decided = meta.get("decided", [])  # by the run, from its environment and memory
        content = _without([name for name in decided if "env" in given or name in of_protocol], content)
    return _settings(content, path)


def _without(names: Collection[str], content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a file's content without some options: "quarantine", "replay.storage"."""
    kept = {name: value for name, value in content.items() if prefix + name not in names}
    parts = {name: value for name, value in kept.items() if isinstance(value, Mapping) and "kind" in value}
    return kept | {name: _without(names, part, f"{prefix}{name}.") for name, part in parts.items()}


def _check_preset(meta: Mapping[str, Any], path: Path, names_env: bool) -> None:
    """Raise ValueError for the config.yaml of a run that its options do not describe completely."""
    if "members" in meta:
        names = join_names(dict.fromkeys(str(name).removeprefix(LABEL) for label in meta["members"] for name in label))
        raise ValueError(
            f"config: a preset cannot hold several values of {names}, got {len(meta['members'])} members of a sweep "
            f"in {path}; give the options of one of them"
        )
    if meta.get("env_is_an_object") and not names_env:
        raise ValueError(
            f"config: {path} was trained on an environment instance that cannot be rebuilt from its name; "
            "pass it from Python as env=..."
        )


def read_run(path: Path, origin: object) -> tuple[list[Setting], dict[str, Any]]:
    """Return the settings in the config.yaml of a run, and its `meta` entry: versions, members, an id."""
    content = _load(path)
    if not content:
        raise ValueError(f"{path}: the file is empty; restore it")
    meta = _meta(content, path)
    check_format(meta.get("format", 1), origin)
    return _settings(content, path), meta


def read_meta(path: Path) -> dict[str, Any]:
    """Return the `meta` entry in the config.yaml of a run: versions, members, an id."""
    return _meta(_load(path), path)


def _meta(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found = content.get("meta") or {}
    members = found.get("members", [{"seed": 0}]) if isinstance(found, Mapping) else None
    are_members = isinstance(members, list) and members and all(isinstance(m, Mapping) and "seed" in m for m in members)
    if not (are_members and isinstance(found.get("decided", []), list)):
        raise ValueError(f"{path}: `meta` is damaged; restore the file")
    return dict(found)


def _settings(content: Mapping[str, Any], path: Path) -> list[Setting]:
    if "config" in content:
        raise ValueError(f"{path}: a preset cannot include another, got config: {content['config']!r}")
    if "resume" in content:
        run = quote(str(content["resume"]))
        raise ValueError(f"{path}: a preset cannot name a run to resume; use {PROGRAM} --resume {run}")
    options = {key: value for key, value in content.items() if key != "meta"}
    return from_mapping(options, lambda key: f"{key} in {path}")


def _load(path: Path) -> Mapping[str, Any]:
    """Return the options in a file, by name. Raise ValueError if they cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: not readable as YAML ({str(error).splitlines()[0]})") from error
    return _parse(text, path)


def _parse(text: str, path: Path) -> Mapping[str, Any]:
    """Return options by name. Raise ValueError if the text cannot be parsed; `path` is its source."""
    import yaml

    try:
        content = yaml.load(text, _loader()) or {}
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise ValueError(f"{path}{where}: not readable as YAML ({problem})") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: must map options to values, such as `num_envs: 64`")
    return content


def _loader() -> Any:
    """Return YAML's safe loader, but with words as text: 010 is not 8, 1:30 is not 90, 2026-11-24 is not a date.

    Repeated names, of which YAML would take the last, are errors. Aliases are errors, too.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(
                    problem="aliases are not supported", problem_mark=self.peek_event().start_mark
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names: list[Any] = []
            for key, _ in node.value:
                if key.value in names:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                names.append(key.value)
            return super().construct_mapping(node, deep)

    known = yaml.SafeLoader.yaml_implicit_resolvers.items()
    Loader.yaml_implicit_resolvers = {c: [of for of in kinds if of[0] not in PLAIN_WORDS] for c, kinds in known}
    for tag, pattern in YAML_NUMBERS.items():
        Loader.add_implicit_resolver(tag, re.compile(f"^({pattern})$"), list("-+.0123456789"))
    return Loader
