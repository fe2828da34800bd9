"""Declare an option on its dataclass field: default, meaning, bounds, and uses in sweeps and resumes.

Only the standard library is imported.
"""

import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NewType

Seconds = NewType("Seconds", float)  # may be written with a unit: 30s, 5min, 2h
Importable = NewType("Importable", str)  # package.module:Class
Period = NewType("Period", str)  # environment steps or a time: 1M, 30s, 5min, 2h


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
MAX_STEPS = 2**30  # environment steps of a schedule: counted in int32
MAX_INDEX = 2**31 - 1
COUNT, POSITIVE, FRACTION, NON_NEGATIVE = Bounds(1), Bounds(0, exclusive_min=True), Bounds(0, 1), Bounds(0)
SIZE = Bounds(1, MAX_INDEX)  # lengths of arrays


class Option(NamedTuple):
    """One option of a dataclass, as its field declares it."""

    name: str
    kind: Any  # the field's type
    default: Any = None
    help: str = ""
    bounds: Bounds | None = None  # of each number
    words: tuple[str, ...] = ()  # accepted besides the type's values
    needs: tuple[Any, ...] = ()  # (name, *values): no effect unless the option `name` has one of the values
    only: str = ""  # "continuous": no effect on discrete actions; see `option` for the others
    traced: bool | str = False  # a sweep compiles one program for all values; "nonzero": for all but 0
    sweepable: bool = True  # a sweep may have several values
    resumable: bool | str = False  # a resume may change it; "inexact": unless the run has exact_resume
    equal: Callable[[Any, Any], bool] = operator.eq  # compares two values when a run is resumed


def option(
    default: Any,
    help: str = "",
    *,
    bounds: Bounds | tuple[float, ...] | None = None,
    words: tuple[str, ...] = (),
    needs: tuple[Any, ...] = (),
    only: Literal["", "continuous", "several_envs", "several_steps", "images", "no_simba"] = "",
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
            prioritized: bool = option(False, "Draw transitions in proportion to their errors.")
            exponent: float = option(0.5, "Exponent of the errors.", bounds=(0, 1), needs=("prioritized", True))

    Args:
        default: the value when nothing else is given.
        help: one or two sentences for `--help`.
        bounds: the numbers accepted, as (min,) or (min, max); `Bounds(0, exclusive_min=True)` excludes the minimum.
        words: words accepted besides the values of the type, such as ("auto",).
        needs: another option's name and values without which this option has no effect; setting it then is an error.
        only: a run warns that the option has no effect without continuous actions ("continuous"), several environments
            ("several_envs"), several gradient steps in an update ("several_steps"), arrays [H, W, ...] ("images"),
            or another network than simba ("no_simba").
        traced: whether `make` only calculates with this real number, so that a sweep over it is one program;
            "nonzero" if 0 changes the program.
        sweepable: whether a sweep may have several values of the option.
        resumable: whether a resume may change the option; "inexact": unless the run has `exact_resume`.
        equal: compares two values when a run is resumed.
    """
    names = ("help", "words", "needs", "only", "traced", "sweepable", "resumable", "equal")
    declared = dict(zip(names, (help, words, needs, only, traced, sweepable, resumable, equal), strict=True))
    metadata = {"option": declared | {"bounds": None if bounds is None else Bounds(*bounds)}}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(dataclass_type: type) -> dict[str, Option]:
    """Return the options of a dataclass by name. A field without `option` has a type and a default only."""
    return _options_of(dataclass_type)


@functools.cache
def _options_of(dataclass_type: Any) -> dict[str, Option]:
    hints = typing.get_type_hints(dataclass_type)
    found = {}
    for field in dataclasses.fields(dataclass_type):
        factory = field.default_factory
        default = field.default if isinstance(factory, dataclasses._MISSING_TYPE) else factory()
        implied = {"bounds": COUNT} if field.name == "rollout_length" else {}  # every algorithm has it
        declared = implied | field.metadata.get("option", {})
        found[field.name] = Option(field.name, hints[field.name], default, **declared)
    return found
