"""Split the written value of an option into several values: 1,8,64 and 0..4, or a list from Python."""

import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_fast.config.convert import SWITCHES, convert, is_integer
from jaxrl_fast.config.settings import plain
from jaxrl_fast.config.sources import Setting, from_mapping
from jaxrl_fast.envs import BACKENDS
from jaxrl_fast.options.declare import Option, Part
from jaxrl_fast.utils.importing import describe
from jaxrl_fast.utils.parsing import parse_int, shown

MAX_VALUES = 10_000  # runs in a sweep


def split_words(option: Option, setting: Setting) -> list[Setting]:
    """Return one setting for each value of a comma list or a range: 1,8,64 or 0..4, both ends included."""
    origin = typing.get_origin(option.kind)
    if not option.sweepable or option.kind in SWITCHES and not setting.values or origin is dict:
        return [setting]
    text = " ".join(map(str, setting.values))
    parts = text.split(",")
    if setting.values and not all(part.strip() for part in parts):
        raise ValueError(f"{setting.origin}: has an empty value, got {text!r}")
    if len(setting.values) > 1 and "," not in text and origin is not tuple:
        use = ",".join(map(str, setting.values))
        raise ValueError(f"{setting.origin}: takes one word, got {shown(text)}; use {shown(use)}")
    several = [value for part in parts for value in _range(option, setting, part.strip())]
    return [setting._replace(values=value.split()) for value in several] if len(several) > 1 else [setting]


def split_values(option: Option, setting: Setting) -> list[Setting]:
    """Return one setting for each element of a list, tuple, range or array, unless a tuple is a single value."""
    (value,) = setting.values
    if isinstance(value, range) and len(value) > MAX_VALUES:
        raise ValueError(f"{setting.origin}: has at most {MAX_VALUES} values, got {value}")
    value = value.tolist() if hasattr(value, "tolist") else value
    pair = setting.name == "env" and isinstance(value, tuple) and not isinstance((*value, "")[0], str | type)
    one = not option.sweepable or pair  # of an environment and its parameters
    several = list(value) if isinstance(value, list | tuple | range) and not one else [value]
    if len(several) > MAX_VALUES:
        raise ValueError(f"{setting.origin}: has at most {MAX_VALUES} values, got {len(several)}")
    if option.parts and len(several) > 1 and any(isinstance(v, Mapping | Part) for v in several):
        remedy = "give the options of a part by their own names"
        raise ValueError(f"{setting.origin}: several values must be words, got {describe(several)}; {remedy}")
    if typing.get_origin(option.kind) is tuple and not any(isinstance(v, list | tuple) for v in several):
        several = [value]
    if not several:
        raise ValueError(f"{setting.origin}: needs at least one value, got {value!r}")
    return [setting_of(setting.name, v) for v in several]


def setting_of(name: str, value: Any) -> Setting:
    """Return the setting of an option to a Python value."""
    return from_mapping({name: value})[0]


def without_repeats(option: Option, several: Iterable[Setting]) -> list[Setting]:
    """Return the settings without repeated values; CartPole-v1 and gymnax/CartPole-v1 are the same."""
    found: dict[Any, Setting] = {}
    for setting in several:
        value = convert(option, setting)
        key = value.removeprefix(f"{BACKENDS[0]}/") if option.name == "env" and isinstance(value, str) else value
        found.setdefault(key if type(key).__hash__ else repr(key), setting)
    return [*found.values()]


def refuse_repeated(option: Option, several: list[Setting]) -> None:
    """Raise ValueError for a value that is given twice."""
    once = {id(setting) for setting in without_repeats(option, several)}
    for setting in several:
        if id(setting) not in once:
            raise ValueError(f"{setting.origin}: has {plain(convert(option, setting))} twice; keep one")


def _range(option: Option, setting: Setting, text: str) -> list[str]:
    """Return the values of a range for an option that takes whole numbers: 0..4 gives 0 1 2 3 4."""
    first, dots, last = text.partition("..")
    if is_integer(option) and re.fullmatch(r"\d+[-:]\d+", text):
        raise ValueError(f"{setting.origin}: must be a range such as {re.sub('[-:]', '..', text)}, got {text!r}")
    if not dots or not is_integer(option):
        return [text]
    try:
        low, high = parse_int(first), parse_int(last)
    except ValueError:
        raise ValueError(f"{setting.origin}: must be a range of two whole numbers (0..4), got {text!r}") from None
    if high < low:
        raise ValueError(f"{setting.origin}: the smaller number of a range comes first, got {text}")
    if high - low >= MAX_VALUES:
        raise ValueError(f"{setting.origin}: has at most {MAX_VALUES} values, got {text}")
    return [str(number) for number in range(low, high + 1)]
