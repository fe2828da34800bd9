"""Choose the parts of a run, and find the option that a written name means.

A run's options are those of several records: `Options` of the run, and the algorithm's. Choosing a part brings its
options into existence, so the parts are chosen first.
"""

import typing
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_fast.config.convert import SWITCHES, convert
from jaxrl_fast.config.names import positive, refuse_ambiguous, refuse_unknown
from jaxrl_fast.config.sources import PROGRAM, Setting, as_values
from jaxrl_fast.options.declare import Option, Part, complete, fields_of, options_of, replace


def known_options(records: Sequence[Any]) -> dict[str, Option]:
    """Return the options of records by path: "num_envs", "memory.size"."""
    return {path: option for record in records for path, option in options_of(record).items()}


def choose(records: Sequence[Any], settings: Sequence[Setting]) -> list[Any]:
    """Return records with the parts that settings choose; their other options have their defaults."""
    chosen, decided = [*records], set[str]()
    while pending := [
        o for path, o in known_options(chosen).items() if o.parts and "" not in o.parts and path not in decided
    ]:
        known = known_options(chosen)
        named = {(*complete(s.name, known),): s for s in apart(settings, known)}  # the last one of an option
        for option in pending:
            decided.add(option.name)
            if setting := named.get((option.name,)):
                word = convert(option, setting)
                chosen = [with_values(record, {option.name: word}) for record in chosen]
    return chosen


def with_values(record: Any, values: Mapping[str, Any]) -> Any:
    """Return a record with those of the values that are its own, by path."""
    own = fields_of(type(record))
    return replace(record, {path: value for path, value in values.items() if path.partition(".")[0] in own})


def apart(settings: Sequence[Setting], known: Mapping[str, Option]) -> list[Setting]:
    """Return settings with each option of a part apart: memory {kind: gru, size: 64} is memory gru, memory.size 64."""
    found = []
    for setting in settings:
        paths = complete(setting.name, known)
        option = known[paths[0]] if len(paths) == 1 else None
        pairs = [value for value in setting.values if isinstance(value, tuple)]
        if option is None or not option.parts or not pairs:
            found.append(setting)
            continue
        origin, within, file = setting.origin.partition(" in ")
        for name, value in pairs:
            inner = "" if name == "kind" else f".{name}"
            values = [value] if isinstance(value, type) else as_values(value)
            of_part = setting._replace(name=option.name + inner, values=values, origin=f"{origin}{inner}{within}{file}")
            found += apart([of_part], known) if inner else [of_part]  # a part may have parts
    return found


def find(
    setting: Setting,
    known: Mapping[str, Option],
    records: Sequence[Any] = (),
    algo: str = "",
    program: str = PROGRAM,
) -> Setting:
    """Return a setting with the path of its option; --no-x becomes x, false.

    Raise ValueError if no option has that name, or if several have. `records` are those with these known options.
    """
    paths = complete(setting.name, known)
    if not paths and (name := positive(setting.name)) != setting.name:
        paths = [path for path in complete(name, known) if known[path].kind in SWITCHES]
        if len(paths) == 1 and setting.values:
            raise ValueError(f"{setting.origin}: takes no value, got {setting.values[0]!r}")
        setting = setting._replace(values=["false"])
    if not paths:
        refuse_unknown(setting, known, records, algo, program)
    if len(paths) > 1:
        refuse_ambiguous(setting, paths)
    if "" in known[paths[0]].parts:
        inner = next(path for path in known if path.startswith(f"{paths[0]}."))
        raise ValueError(
            f"{setting.origin}: has no value of its own, got one; name one of its options, such as {inner}"
        )
    return setting._replace(name=paths[0])


def named(
    settings: Sequence[Setting],
    known: Mapping[str, Option],
    records: Sequence[Any] = (),
    algo: str = "",
    program: str = PROGRAM,
) -> list[Setting]:
    """Return settings with the paths of their options, and with each option of a part apart. Raise as `find`."""
    found, written = [], dict[str, str]()
    for given in apart(settings, known):
        setting = find(given, known, records, algo, program)
        if not given.on_command_line and written.setdefault(setting.name, given.name) != given.name:
            raise ValueError(f"{given.origin}: given twice, as {written[setting.name]} and {given.name}; keep one")
        found.append(setting)
    return found


def read_values(
    settings: Sequence[Setting], known: Mapping[str, Option], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the values of `named` settings by path, over those in `before`. The last setting of an option wins.

    Repeated key=value options accumulate their pairs.
    """
    values = dict(before or {})
    for setting in settings:
        name, option = setting.name, known[setting.name]
        value = convert(option, setting)
        if setting.on_command_line and option.kind is str and not value.strip() and not option.default:
            raise ValueError(f"{setting.origin}: must not be empty, got {value!r}; give a value or leave it out")
        merges = typing.get_origin(option.kind) is dict and name in values
        values[name] = values[name] | value if merges else value
    return values


def to_plain(record: Any) -> dict[str, Any]:
    """Return the values of a record by name. A part is its word, or with options a mapping with its word as `kind`."""
    found = {}
    for name in fields_of(type(record)):
        value = getattr(record, name)
        if isinstance(value, Part):
            inner = to_plain(value)
            value = ({"kind": value.kind} if value.kind else {}) | inner or value.kind
        found[name] = value
    return found


def by_path(mapping: Mapping[str, Any], known: Mapping[str, Option], prefix: str = "") -> dict[str, Any]:
    """Return the values of a mapping as `to_plain` makes it, by path. `known` has the choices by path."""
    found: dict[str, Any] = {}
    for name, value in mapping.items():
        path = prefix + name
        if isinstance(value, Mapping) and path in known and known[path].parts:
            found |= by_path(value, known, f"{path}.")
            found[path] = found.pop(f"{path}.kind", "")
        else:
            found[path] = value
    return found
