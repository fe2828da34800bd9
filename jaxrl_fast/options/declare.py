"""Declare options on dataclass fields: default, meaning, bounds, and uses in sweeps and resumes.

An option belongs to the part that uses it. A part is a record of options. `choice` declares a field that holds
one of several parts, and choosing a part brings its options into existence. An option's name is its path through the
parts: "learning_rate", "memory" (which part), "memory.size". Only the standard library is imported.
"""

import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NewType, TypeVar

Seconds = NewType("Seconds", float)  # may be written with a unit: 30s, 5min, 2h
Importable = NewType("Importable", str)  # package.module:Class
Period = NewType("Period", str)  # environment steps or a time: 1M, 30s, 5min, 2h
RayActors = NewType("RayActors", str)  # a number of Ray actors: ray:64
Record = TypeVar("Record")  # a dataclass of options


class Bounds(NamedTuple):
    """The numbers that an option accepts."""

    min: float
    max: float = math.inf
    exclusive_min: bool = False

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int | float) and self.min <= number <= self.max and not self._is_excluded(number)

    def __str__(self) -> str:
        low = f"above {self.min}" if self.exclusive_min else f"at least {self.min}" if self.min > -math.inf else ""
        high = f"at most {self.max}" if self.max < math.inf else ""
        return " and ".join(filter(None, (low, high)))

    @property
    def short(self) -> str:
        """Return the bounds for a table: ">= 1", "> 0", "0 to 1". A maximum that is a type's limit is left out."""
        if self.max >= LARGE:
            return f"{'>' if self.exclusive_min else '>='} {self.min}"
        low = f"> {self.min}, " if self.exclusive_min else f"{self.min} to " if self.min > -math.inf else ""
        return f"{low}{self.max}" if low.endswith("to ") else f"{low}<= {self.max}"

    def _is_excluded(self, number: float) -> bool:
        return self.exclusive_min and number == self.min


LARGE = 2**24  # a maximum of this or more is a type's limit, which tables leave out
MAX_SCHEDULE = 2**30  # environment steps of a schedule: counted in int32
MAX_INDEX = 2**31 - 1
COUNT, POSITIVE, FRACTION, NON_NEGATIVE = Bounds(1), Bounds(0, exclusive_min=True), Bounds(0, 1), Bounds(0)
SIZE = Bounds(1, MAX_INDEX)  # lengths of arrays


@dataclass(frozen=True)
class Part:
    """The base of records that `choice` chooses from. `kind` is the word that has chosen the record."""

    kind: str = dataclasses.field(default="", kw_only=True)


class Option(NamedTuple):
    """One option of a record, as its field declares it."""

    name: str  # its path: "learning_rate", "memory.size"
    kind: Any  # the field's type; of a choice, the words
    default: Any = None
    help: str = ""
    bounds: Bounds | None = None  # of each number
    words: tuple[str, ...] = ()  # accepted besides the type's values
    traced: bool | str = False  # a sweep compiles one program for all values; "nonzero": for all but 0
    sweepable: bool = True  # a sweep may have several values
    resumable: bool | str = False  # a resume may change it; "inexact": unless the run has exact_resume
    equal: Callable[[Any, Any], bool] = operator.eq  # compares two values when a run is resumed
    parts: Mapping[str, Part] = MappingProxyType({})  # of a choice: by word, with defaults; "": the only one
    custom: Part | None = None  # of a choice: the part that "package.module:Class" chooses

    def part(self, word: str) -> Part:
        """Return the part that a word chooses, with its defaults."""
        if word in self.parts:
            return self.parts[word]
        assert self.custom, f"{self.name} has no part {word!r}"
        return dataclasses.replace(self.custom, kind=word)


def option(
    default: Any,
    help: str = "",
    *,
    bounds: Bounds | tuple[float, ...] | None = None,
    words: tuple[str, ...] = (),
    traced: bool | Literal["nonzero"] = False,
    sweepable: bool = True,
    resumable: bool | Literal["inexact"] = False,
    equal: Callable[[Any, Any], bool] = operator.eq,
) -> Any:
    """Return a dataclass field that declares an option; `--help`, parsing and sweeps read it.

        @dataclass(frozen=True)
        class Config:
            rollout_length: int = option(32, "Environment steps between updates.", bounds=(1,))
            entropy_coef: float = option(0.01, "Weight of the entropy bonus.", bounds=(0,), traced=True)

    Args:
        default: the value when nothing else is given.
        help: one or two sentences for `--help`.
        bounds: the numbers accepted, as (min,) or (min, max); `Bounds(0, exclusive_min=True)` excludes the minimum.
        words: words accepted besides the values of the type, such as ("auto",).
        traced: whether `make` only calculates with this real number, so that a sweep over it is one program;
            "nonzero" if 0 changes the program.
        sweepable: whether a sweep may have several values of the option.
        resumable: whether a resume may change the option; "inexact": unless the run has `exact_resume`.
        equal: compares two values when a run is resumed.
    """
    names = ("help", "words", "traced", "sweepable", "resumable", "equal")
    declared = dict(zip(names, (help, words, traced, sweepable, resumable, equal), strict=True))
    metadata = {"option": declared | {"bounds": None if bounds is None else Bounds(*bounds)}}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def choice(default: str, help: str = "", *, custom: Part | None = None, **parts: Part) -> Any:
    """Return a dataclass field that holds one of several parts; the word of a part chooses it, with its defaults.

        @dataclass(frozen=True)
        class GRU(Part):
            size: int = option(128, "Width of the recurrent layer.", bounds=(1,))

        @dataclass(frozen=True)
        class Config:
            memory: Part = choice("none", "Recurrent layer after the network.", none=Part(), gru=GRU(size=64))

    Then `--memory gru --memory.size 256` sets `config.memory` to `GRU(size=256, kind="gru")`.

    Args:
        default: the word of the part that is chosen when nothing else is given.
        help: one or two sentences for `--help`.
        custom: the part that a class of a user, "package.module:Class", chooses.
        **parts: the parts by their words, with their defaults.
    """
    named = {word: dataclasses.replace(part, kind=word) for word, part in parts.items()}
    metadata = {"option": {"help": help, "parts": named, "custom": custom}}
    return dataclasses.field(default=named[default], metadata=metadata)


def not_an_option() -> Any:
    """Return a field of a part for what is read from the places that its options name, None until then."""
    return dataclasses.field(default=None, repr=False, compare=False, kw_only=True, metadata={"option": None})


def part(default: Part, help: str = "") -> Any:
    """Return a dataclass field that holds a part without alternatives."""
    return dataclasses.field(default=default, metadata={"option": {"help": help, "parts": {"": default}}})


def options_of(record: Any) -> dict[str, Option]:
    """Return the options of a record by path. Of a type: with the parts that are chosen by default.

    A field without `option` has a type and a default only.
    """
    if isinstance(record, type):
        return _options_of_type(record)
    return dict(_walk(None, record, ""))


@functools.cache
def _options_of_type(record_type: Any) -> dict[str, Option]:
    return options_of(record_type())


def _walk(defaults: Any, chosen: Any, prefix: str) -> Iterable[tuple[str, Option]]:
    """Yield the options of a record and of its parts. `defaults` is the record with its defaults; None: its type's."""
    for name, option in fields_of(type(chosen)).items():
        default = option.default if defaults is None else getattr(defaults, name)
        path = prefix + name
        if not option.parts:
            yield path, option._replace(name=path, default=default)
            continue
        part = getattr(chosen, name)
        yield path, option._replace(name=path, default=default.kind)
        yield from _walk(default if default.kind == part.kind else option.part(part.kind), part, f"{path}.")


def fields_of(record_type: type) -> dict[str, Option]:
    """Return the options that the fields of a record declare, without those of its parts."""
    return _fields_of(record_type)


@functools.cache
def _fields_of(record_type: Any) -> dict[str, Option]:
    hints = typing.get_type_hints(record_type)
    found = {}
    for field in dataclasses.fields(record_type):
        if field.name == "kind" and issubclass(record_type, Part) or field.metadata.get("option", {}) is None:
            continue
        factory = field.default_factory
        default = field.default if isinstance(factory, dataclasses._MISSING_TYPE) else factory()
        implied = {"bounds": COUNT} if field.name == "rollout_length" else {}  # every algorithm has it
        declared = implied | field.metadata.get("option", {})
        kind = hints[field.name]
        if parts := declared.get("parts"):
            words = Literal[tuple(parts)]  # type: ignore[valid-type]
            kind = words | Importable if declared.get("custom") else words
        found[field.name] = Option(field.name, kind, default, **declared)
    return found


def value_of(record: Any, path: str) -> Any:
    """Return the value of an option of a record; of a choice, the word of the chosen part."""
    value = functools.reduce(getattr, path.split("."), record)
    return value.kind if isinstance(value, Part) else value


def replace(record: Record, values: Mapping[str, Any]) -> Record:
    """Return a record with other values by path. A word of a choice chooses a part with its defaults."""
    own = {path: value for path, value in values.items() if "." not in path}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, dot, rest = path.partition(".")
        if dot:
            inner.setdefault(name, {})[rest] = value
    for name, option in fields_of(type(record)).items():
        if option.parts and (name in own or name in inner):
            part = getattr(record, name)
            chosen = own.get(name, part)
            if isinstance(chosen, str):
                chosen = part if chosen == part.kind else option.part(chosen)
            own[name] = replace(chosen, inner.get(name, {}))
    return dataclasses.replace(record, **own)  # type: ignore[type-var]


def complete(name: str, known: Iterable[str]) -> list[str]:
    """Return the paths that a name means: itself, or every path whose last words it is."""
    paths = [*known]
    return [name] if name in paths else [path for path in paths if path.endswith(f".{name}")]


def configure(record_type: Callable[[], Record], **values: Any) -> Record:
    """Return a record with some values: of options by their last words, and of parts as a word, a mapping or a record.

    configure(DQN, batch_size=32, memory={"kind": "gru", "size": 64}, n_step=3)

    Values are not converted or checked, so they may be traced. Raise ValueError for a name that no option, or more than
    one, has.
    """
    record = record_type()
    parts = {name: value for name, value in values.items() if name in fields_of(type(record)) and name in values}
    for name, value in parts.items():
        if isinstance(value, Mapping) and fields_of(type(record))[name].parts:
            named = {inner: x for inner, x in value.items() if inner != "kind"}
            word = value.get("kind", getattr(record, name).kind)
            record = replace(record, {name: word} | {f"{name}.{inner}": x for inner, x in named.items()})
        else:
            record = replace(record, {name: value})
    for name, value in values.items():
        if name not in parts:
            paths = complete(name, options_of(record))
            if len(paths) != 1:
                raise ValueError(f"{name}: must name one option, got {', '.join(paths) or 'none'}; use another name")
            record = replace(record, {paths[0]: value})
    return record
