"""Convert arguments of environments and networks, given as text or as plain values, to the types of their defaults."""

import contextlib
import json
from enum import Enum
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.utils.parsing import MAX_FLOAT, WORDS, Number, as_schedule, nearest, parse_float, parse_int

NESTED_TYPES = (tuple, list, dict)


def refuse_option(owner: str, name: str, known: tuple[str, ...], offered: tuple[str, ...] = ()) -> NoReturn:
    """Raise ValueError for an option that this environment or network does not have; `offered` are hints only."""
    hint = nearest(name, (*known, *offered)) or f"; it has {', '.join(known) or 'none'}"
    raise ValueError(f"{owner} has no option {name!r}{hint}")


def as_range(value: Any) -> tuple[str, str] | None:
    """Return both ends of a range of numbers such as "8..12", as text; None for any other value."""
    low, _, high = value.partition("..") if isinstance(value, str) else ("", "", "")
    try:
        parse_float(low), parse_float(high)
    except ValueError:
        return None
    return low, high


def coerce(owner: str, name: str, value: Any, default: Any) -> Any:
    """Return an option's value, given as a number, a string or a list, with the type of its default."""
    if as_schedule(value) and not isinstance(default, str):
        remedy = "only numbers that an environment reads in each step follow a schedule"
        raise ValueError(f"{name}: must be one value for {owner}, got {value}; {remedy}")
    if as_range(value) and not isinstance(default, str):
        remedy = "only parameters of an environment on the device are drawn at each reset"
        raise ValueError(f"{name}: must be one value for {owner}, got {value}; {remedy}")
    try:
        return _as_type_of(default, value)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        if isinstance(default, (np.ndarray, jax.Array)):
            expected, example = f"an array of shape {list(default.shape)}", default.tolist()
        else:
            expected = "a number" if isinstance(default, Number) else type(default).__name__
            example = repr(default)
        raise ValueError(f"{name}: must be {expected} for {owner}, got {value!r}; for example {example}") from error


def whole_number(owner: str, name: str, value: Any, most: int) -> int:
    """Return an option's value as a whole number from 1 to `most`."""
    number = coerce(owner, name, value, 1)
    if not 1 <= number <= most:
        raise ValueError(f"{name}: must be 1 to {most} for {owner}, got {value}")
    return int(number)


def _as_number(default: int | float, text: str) -> int | float:
    """Return a number of the default's type, or of any type where that is `Number`. Whole numbers are exact."""
    if isinstance(default, float):
        return parse_float(text)
    try:
        return parse_int(text)
    except ValueError:
        if not isinstance(default, Number):
            raise
        return parse_float(text)


def _as_type_of(default: Any, value: Any) -> Any:
    default = default.item() if isinstance(default, np.generic) else default
    if isinstance(default, bool):
        return ({"1": True, "0": False} | WORDS)[str(value).lower()]
    if isinstance(default, Enum):
        return value if isinstance(value, type(default)) else type(default)[str(value)]
    if isinstance(default, (int, float)):
        number = _as_number(default, str(value))
        if isinstance(value, bool) or abs(number) > MAX_FLOAT:
            raise ValueError
        return number
    if isinstance(default, (np.ndarray, jax.Array)):
        value = json.loads(value) if isinstance(value, str) else value
        array = np.asarray(value, dtype=default.dtype)
        if array.shape != default.shape or not np.all(np.isfinite(array)):
            raise ValueError
        return jnp.asarray(array)
    if isinstance(default, str) and value is not None:
        if isinstance(value, (bool, *NESTED_TYPES)):
            raise ValueError
        return str(value)
    if isinstance(value, str):  # the default is None or absent, so the text decides the type
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    expected = dict if isinstance(default, dict) else (tuple, list) if isinstance(default, NESTED_TYPES) else object
    if value is not None and not isinstance(value, expected):
        raise ValueError
    return tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
