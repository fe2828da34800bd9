"""From what someone wrote to values of the options' types, in their ranges; else a ValueError of one sentence."""

import math
import types
import typing
from pathlib import Path
from typing import Any, Literal

from jaxrl_fast.config.options import RANGES, SWITCHES, Seconds
from jaxrl_fast.config.sources import Setting, in_front, one
from jaxrl_fast.utils.parsing import (
    MAX_FLOAT,
    MIN_FLOAT,
    WORDS,
    nearest,
    parse_float,
    parse_int,
    parse_period,
    parse_seconds,
    suffix_hint,
)


def convert(kind: Any, setting: Setting) -> Any:
    """The value as the option's type has it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (tuple, dict) and setting.said.startswith("-") and not setting.values:
        raise ValueError(f"{setting.said} wants a value, or several")
    if origin is tuple:
        return tuple(_convert_one(arguments[0], setting, v, of_several=True) for v in setting.values)
    if origin is dict:
        pairs = [_pair(setting, v) for v in setting.values]
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{setting.said}: {name} is there twice")
        return dict(pairs)
    if kind in SWITCHES and not setting.values:
        return True
    if kind in SWITCHES and setting.said.startswith("--") and len(setting.values) > 1:
        raise ValueError(f"{setting.said} takes no value; what is {setting.values[0]!r}?{in_front(setting)}")
    wanted = _wanted(kind)
    return _convert_one(kind, setting, one(setting, wanted))


def merge_values(kind: Any, before: Any, value: Any) -> Any:
    """The value of an option that is given again: the new one, but pairs (key=value) go to those that are there."""
    return {**before, **value} if typing.get_origin(kind) is dict and before else value


def check_range(setting: Setting, value: Any) -> None:
    """Refuses numbers that the option cannot have."""
    allowed = RANGES.get(setting.name)
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and number and not MIN_FLOAT <= abs(number) <= MAX_FLOAT:
            raise ValueError(f"{setting.said}: {number} is more, or less, than a number of 32 bits can be")
        if allowed is None or not isinstance(number, (int, float)):
            continue
        if number > allowed.most or number < allowed.least or allowed.above and number == allowed.least:
            bound = f"above {allowed.least}" if allowed.above else f"at least {allowed.least}"
            upper = f" and at most {allowed.most}" if allowed.most < math.inf else ""
            shown = f"{number:g}" if abs(number) > 10**15 else number
            raise ValueError(f"{setting.said}: {shown} is out of range; it must be {bound}{upper}")
    if setting.name == "save_every":
        _check_period(setting, value)


def is_integer(kind: Any) -> bool:
    """Whether an option of this type takes whole numbers."""
    return int in (kind, *typing.get_args(kind))


def _check_period(setting: Setting, value: int | str) -> None:
    try:
        parse_period(str(value))
    except ValueError:
        minutes = f"; minutes are {value}in" if str(value).endswith("m") else ""
        raise ValueError(
            f"{setting.said}: {value!r} is neither steps (64k, 1M) nor a time (30s, 5min, 2h){minutes}"
        ) from None


def _convert_one(kind: Any, setting: Setting, value: Any, of_several: bool = False) -> Any:
    for option in typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,):
        try:
            return _cast(option, value)
        except ValueError:
            continue
    near = nearest(str(value), typing.get_args(kind)) if typing.get_origin(kind) is Literal else ""
    if is_integer(kind) or float in (kind, *typing.get_args(kind)):
        near = suffix_hint(str(value)) or (_several_meant(setting, str(value)) if of_several else "")
    where = in_front(setting) if kind in SWITCHES else ""
    raise ValueError(f"{setting.said}: {value!r} is not {_wanted(kind)}{near}{where}")


def _several_meant(setting: Setting, text: str) -> str:
    """For a message about 64,64."""
    if "," not in text or not setting.said.startswith("--"):
        return ""
    return f"; did you mean {setting.said} {' '.join(text.replace(',', ' ').split())}?"


def _cast(kind: Any, value: Any) -> Any:
    """ValueError where the value is not of this kind."""
    text = str(value).strip()
    if kind is Any:
        return value
    if kind is types.NoneType and (value is None or text.lower() in ("none", "null")):
        return None
    if typing.get_origin(kind) is Literal and text in typing.get_args(kind):
        return text
    if kind is bool and text.lower() in WORDS:
        return WORDS[text.lower()]
    if kind is Seconds:
        return parse_seconds(text)
    if kind in (int, float) and not isinstance(value, bool):
        return parse_int(text) if kind is int else parse_float(text)
    if kind is str and isinstance(value, (str, Path)):
        return str(value)
    raise ValueError


def _wanted(kind: Any) -> str:
    """In words, for messages."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_wanted(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(a) for a in typing.get_args(kind))
    words = {int: "a whole number (64, 64k, 1e6)", float: "a number", Seconds: "a time (30, 30s, 5min, 2h)"}
    words |= {bool: "true or false", types.NoneType: "none"}
    return words.get(kind, "a word")


def _pair(setting: Setting, text: Any) -> tuple[str, Any]:
    """key=value as a pair; a pair is one already."""
    if isinstance(text, tuple):
        return text[0].replace("-", "_"), text[1]
    key, equals, value = str(text).partition("=")
    if not (key and equals):
        raise ValueError(f"{setting.said}: {text!r} is not of the form key=value")
    return key.replace("-", "_"), value
