"""Let options of an environment follow a schedule over the environment steps of a run. Workers import this without JAX.

A schedule is written 4..12@2M: from 4 to 12 in the first two million steps, then 12. In 4..12..9@2M, the points are
equally far apart. With 4@callback, only a callback changes the value.
"""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from jaxrl_fast.utils.formatting import short_number
from jaxrl_fast.utils.parsing import MAX_FLOAT, Number, as_schedule, nearest, parse_float, parse_int

CALLBACK = "callback"
METRIC = "env_option/"  # begins the names of values in records
MAX_WHOLE, MAX_LENGTH = 2**24, 10**12  # whole numbers that float32 holds; steps of a schedule
TIME_LIMIT = "max_steps_in_episode"


class Schedule(NamedTuple):
    """The values of one option: linear between points that are equally far apart, then constant."""

    points: tuple[float, ...]
    num_steps: int  # environment steps from the first point to the last; 0: the first one, unless a callback changes it
    is_whole: bool = False  # values are rounded to whole numbers
    least: float = -MAX_FLOAT

    def __str__(self) -> str:
        """Return "4 to 12 in 2M steps"."""
        points = " to ".join(f"{x:g}" for x in self.points)
        if not self.num_steps:
            return f"{self.points[0]:g} until a callback changes it"
        return f"{points} in {short_number(self.num_steps)} steps"

    def knots(self, num_envs: int) -> list[float]:
        """Return the steps of each of N environments at the points."""
        return [i * self.num_steps / (len(self.points) - 1) / num_envs for i in range(len(self.points))]

    def at(self, env_steps: int) -> float:
        """Return the value after this number of environment steps, summed over environments."""
        if not self.num_steps:
            return self.typed(self.points[0])
        i, part = divmod(env_steps * (len(self.points) - 1), self.num_steps)
        if i >= len(self.points) - 1:
            return self.last
        low, high = self.points[int(i) : int(i) + 2]
        return self.typed(low + (high - low) * part / self.num_steps)

    def typed(self, value: float) -> float:
        """Return a value with the type of the option. Halves are rounded to the even number."""
        return round(value) if self.is_whole else float(value)

    @property
    def last(self) -> float:
        """Return the last value, which evaluations use."""
        return self.typed(self.points[-1])

    def fixed(self) -> "Schedule":
        """Return the schedule that has the last value from the beginning."""
        return self._replace(points=self.points[-1:], num_steps=0)

    def check(self, name: str, value: Any) -> float:
        """Return a value that replaces the schedule. Raise ValueError if the option cannot have it."""
        number = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
        most = MAX_WHOLE if self.is_whole else MAX_FLOAT
        if not number or self.is_whole and value != round(value) or not max(self.least, -most) <= value <= most:
            kind = f"a whole number from {max(self.least, -most)} to {most}" if self.is_whole else "a finite number"
            raise ValueError(f"{name}: must be {kind}, got {value!r}")
        return self.typed(value)


def read(name: str, text: str, default: Any) -> Schedule:
    """Return the schedule in a text, for an option with this default, a number. Raise ValueError for a wrong one.

    An option that is declared as int gets whole numbers. If its default happens to be one, its values are whole if all
    are written without a point.
    """
    parts = as_schedule(text)
    assert parts, "the caller has checked it"
    values, steps = parts[0].split(".."), parts[1]
    form = f"got {text}; write it as 4..12@2M, 4..12..9@2M or 4@callback"
    try:
        points = tuple(map(parse_float, values))
    except ValueError:
        raise ValueError(f"{name}: the values of a schedule must be numbers, {form}") from None
    try:
        num_steps = 0 if steps == CALLBACK else parse_int(steps)
    except (ValueError, OverflowError):
        raise ValueError(f"{name}: a schedule must end with a number of environment steps, {form}") from None
    if steps != CALLBACK and not 1 <= num_steps <= MAX_LENGTH:
        raise ValueError(f"{name}: a schedule must have 1 to {MAX_LENGTH:.0e} environment steps, {form}")
    if len(points) == 1 and num_steps:
        raise ValueError(f"{name}: a schedule must have two or more values, {form}")
    is_int = isinstance(default, int)
    whole = is_int and (type(default) is int or not any("." in x for x in values))
    schedule = Schedule(points, num_steps, whole, 1 if name == TIME_LIMIT else -MAX_FLOAT)
    for value in points:
        schedule.check(name, value)
    return schedule


def values(schedules: Mapping[str, Schedule], env_steps: int, chosen: Mapping[str, float]) -> dict[str, float]:
    """Return the value of each option after this number of steps; `chosen` ones replace their schedules."""
    return {name: chosen[name] if name in chosen else each.at(env_steps) for name, each in schedules.items()}


def check_choice(schedules: Mapping[str, Schedule], name: str, value: Any) -> float:
    """Return a value that a callback chooses for an option. Raise ValueError if it cannot."""
    if name not in schedules:
        hint = nearest(name, schedules) or f"; train with {name}=VALUE@callback in env_options"
        raise ValueError(f"set_env_option: {name!r} has no schedule in this run{hint}")
    return schedules[name].check(f"set_env_option {name}", value)


def is_number(default: Any) -> bool:
    """Return whether an option with this default can follow a schedule: it is one number, also in an array."""
    if isinstance(default, bool):
        return False
    is_array = hasattr(default, "__array__") and getattr(default, "shape", None) == ()
    return isinstance(default, Real) or is_array and default.dtype.kind in "iuf"


def as_default(default: Any) -> Any:
    """Return a default as a Python number. A whole number that is not declared as int takes any number."""
    if isinstance(default, int | float):
        return default
    return int(default) if default.dtype.kind in "iu" else float(default)


def undeclared(default: Any) -> Any:
    """Return the value of an attribute, whose type is not declared, as a default."""
    default = as_default(default)
    return Number(default) if isinstance(default, Integral) else default


def info(schedules: Mapping[str, Schedule]) -> tuple[str, ...]:
    """Return a line for the user, if there are schedules."""
    parts = "; ".join(f"{name} {each}" for name, each in schedules.items())
    return (f"scheduled: {parts}; evaluations use the last value",) if schedules else ()
