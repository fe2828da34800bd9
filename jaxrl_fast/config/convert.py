"""Convert written values to the options' types and check their bounds. Mistakes raise a one-line ValueError."""

import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jaxrl_fast.config.sources import SWEEP, Setting, one
from jaxrl_fast.options.declare import Importable, Option, Period, RayActors, Seconds
from jaxrl_fast.options.host import RAY
from jaxrl_fast.utils import importing
from jaxrl_fast.utils.parsing import (
    MAX_FLOAT,
    MIN_FLOAT,
    WORDS,
    nearest,
    parse_float,
    parse_int,
    parse_period,
    parse_seconds,
)

MAX_DOUBLE = 1e308
SWITCHES = (bool, bool | None)  # types of options that need no value: --x and --no-x
EXPECTED = {
    int: "a whole number (64, 64k, 10M, 1e6)",
    float: "a number",
    Seconds: "a time (30, 30s, 5min, 2h)",
    Period: "environment steps (64k, 1M) or a time (30s, 5min, 2h)",
    RayActors: "Ray actors (ray:64, at most ray:1024)",
    Importable: "a class (package.module:Class)",
    bool: "true or false",
    types.NoneType: "none",
    str: "text",
    Any: "a value",
}


def convert(option: Option, setting: Setting) -> Any:
    """Return the value of an option. Raise ValueError if its type is wrong, or if it is out of bounds."""
    kind, origin = option.kind, typing.get_origin(option.kind)
    if origin in (tuple, dict) and setting.on_command_line and not setting.values:
        raise ValueError(f"{setting.origin}: needs a value, or several")
    if origin is tuple:
        one_kind, values = typing.get_args(kind)[0], setting.values
        if len(values) == 1 and _is_none(values[0]):
            values = []
        elif one_kind is str or typing.get_origin(one_kind) is Literal:
            values = [part.strip() for v in values for part in str(v).split(",") if part.strip()]
        value: Any = tuple(_convert_one(option, one_kind, setting, v) for v in values)
    elif origin is dict:
        pairs = [_pair(setting, v) for v in setting.values]
        value = dict(pairs)
        for name in value:
            if [key for key, _ in pairs].count(name) > 1:
                raise ValueError(f"{setting.origin}: {name} is given twice; keep one")
    elif kind in SWITCHES and not setting.values:
        value = True
    else:
        value = _convert_one(option, kind, setting, one(setting, expected(option)))
    _check_bounds(option, setting, value)
    return value


def _check_bounds(option: Option, setting: Setting, value: Any) -> None:
    """Raise ValueError if a number is out of the option's bounds, or does not fit into float32."""
    for number in value if isinstance(value, tuple) else (value,):
        shown = _short(number) if isinstance(number, int | float) else number
        if isinstance(number, float) and number and not MIN_FLOAT <= abs(number) <= MAX_FLOAT:
            raise ValueError(f"{setting.origin}: must be a 32-bit number, got {shown}")
        if option.bounds and isinstance(number, int | float) and number not in option.bounds:
            raise ValueError(f"{setting.origin}: must be {option.bounds}, got {shown}")


def _short(number: float) -> str:
    """Return a number as text for a message. A whole number may exceed the range of a float."""
    if abs(number) > MAX_DOUBLE:
        return "a number beyond 1e308"
    return f"{number:g}" if abs(number) > 10**15 else str(number)


def is_integer(option: Option) -> bool:
    """Return whether an option takes whole numbers."""
    return int in _kinds(option.kind)


def expected(option: Option) -> str:
    """Return a description of the values that an option takes, for messages."""
    return _expected(option.kind, option.words)


def _expected(kind: Any, words: Sequence[str] = ()) -> str:
    kinds = _kinds(kind)
    found = [EXPECTED[k] for k in kinds if k in EXPECTED and k is not Importable]
    found += [repr(a) for k in kinds if typing.get_origin(k) is Literal for a in typing.get_args(k)]
    return " or ".join((*found, *map(repr, words), *(EXPECTED[k] for k in kinds if k is Importable)))


def _kinds(kind: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _convert_one(option: Option, kind: Any, setting: Setting, value: Any) -> Any:
    text = str(value).strip()
    if text in option.words:
        return text
    for alternative in _kinds(kind):
        try:
            return _cast(alternative, value)
        except ValueError:
            continue
    choices = [*option.words, *(a for k in _kinds(kind) if typing.get_origin(k) is Literal for a in typing.get_args(k))]
    hint = nearest(text, choices)
    if typing.get_origin(option.kind) is tuple and re.search(r"[\[\](),]", text):
        parts = re.findall(r"[^\s\[\](),]+", " ".join(map(str, setting.values)))
        way = f"{setting.origin} {' '.join(parts)}" if setting.on_command_line else f"[{', '.join(parts)}]"
        hint = f"; separate several by spaces: {way}" if setting.on_command_line else f"; give a list, {way}"
    elif option.sweepable and setting.on_command_line and ("," in text or is_integer(option) and _is_range(text)):
        hint = f"; {SWEEP} takes several"
    raise ValueError(
        f"{setting.origin}: must be {_expected(kind, option.words)}, got {importing.describe(value)}{hint}"
    )


def _cast(kind: Any, value: Any) -> Any:
    """Return the value as this type. Raise ValueError if it does not fit."""
    text = str(value).strip()
    if kind is Any:
        return value
    if kind is types.NoneType and _is_none(value):
        return None
    if typing.get_origin(kind) is Literal:
        for word in typing.get_args(kind):
            if word.replace("-", "_") == text.replace("-", "_"):
                return word
    if kind is bool and text.lower() in WORDS:
        return WORDS[text.lower()]
    if kind is Importable:
        return importing.name_of(value) if isinstance(value, type) else _path(text)
    if kind is Seconds:
        return parse_seconds(text)
    if kind is Period:
        num_steps, seconds = parse_period(text)
        return text if seconds else num_steps
    if kind is RayActors and text.startswith(RAY) and 1 <= parse_int(text.removeprefix(RAY)) <= 1024:
        return f"{RAY}{parse_int(text.removeprefix(RAY))}"
    if kind in (int, float) and not isinstance(value, bool):
        return parse_int(text) if kind is int else parse_float(text)
    if kind is str and isinstance(value, str | Path):
        return str(value)
    raise ValueError


def _is_none(value: Any) -> bool:
    """Return whether a written value means nothing."""
    return value is None or str(value).strip().lower() in ("none", "null")


def _is_range(text: str) -> bool:
    """Return whether text is a range as a sweep takes it, such as 0..4, or as other programs do: 0-4 or 0:4."""
    return bool(re.search(r"\d(\.\.|[-:])\d", text))


def _path(text: str) -> str:
    """Return text that names a class. Raises ValueError for other text."""
    if not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", text):
        raise ValueError
    return text


def _pair(setting: Setting, text: Any) -> tuple[str, Any]:
    """Return key=value as a pair; a pair unchanged."""
    if isinstance(text, tuple):
        return text[0].replace("-", "_"), text[1]
    key, equals, value = str(text).partition("=")
    if not (key and equals):
        raise ValueError(f"{setting.origin}: must be key=value, got {importing.describe(text)}")
    return key.replace("-", "_"), value
