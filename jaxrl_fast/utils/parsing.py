"""Parse the names and numbers that users write. Standard library only."""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

SECONDS = {"min": 60, "h": 3600, "s": 1}
SUFFIXES = {"k": 10**3, "M": 10**6, "B": 10**9}
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
MIN_FLOAT, MAX_FLOAT = 2.0**-126, 3.4e38  # range of normal float32 numbers


def nearest(word: str, names: Iterable[object], spell: Callable[[str], str] = str, cutoff: float = 0.6) -> str:
    """Return the end of an error message about an unknown word: "; did you mean a or b?", or "".

    A name whose last part is the word, as in "replay.size" for "size", is always suggested.

    Args:
        word: The unknown word.
        names: The known names.
        spell: Converts a name to the form shown to the user.
        cutoff: Minimum similarity, from 0 to 1.
    """
    by_lower = {str(name).lower(): str(name) for name in names}
    tail = word.lower().rpartition(".")[2]
    close = [name for name in by_lower if name.rpartition(".")[2] == tail]
    close = close or difflib.get_close_matches(word.lower(), by_lower, n=2, cutoff=cutoff)
    spelled = dict.fromkeys(spell(by_lower[name]) for name in close)
    return f"; did you mean {' or '.join(spelled)}?" if close else ""


def shown(words: object) -> str:
    """Return a user's words for a message of one line: unchanged, or as their repr if they are not printable."""
    text = str(words)
    return text if text.isprintable() else repr(text)


def one_line(value: object) -> str:
    """Return a value as text of one line, for a message: spaces and exceptions may have several lines."""
    return " ".join(str(value).split())


def parse_int(text: str) -> int:
    """Return an integer written as 64, 64k, 1e6, 1.5M or 2_000. Raise ValueError if it is not one."""
    factor = SUFFIXES.get(text[-1:], 1)
    text = text[:-1] if factor > 1 else text
    try:
        return int(text) * factor
    except ValueError:
        value = float(text) * factor
        if not math.isfinite(value) or not math.isclose(value, round(value), rel_tol=1e-12):  # 4.1M: 4099999.9999999995
            raise ValueError from None
        return round(value)


def parse_float(text: str) -> float:
    """Return a finite number written as 2.5e-4 or 10k. Raise ValueError if it is not one."""
    factor = SUFFIXES.get(text[-1:], 1)
    value = float(text[:-1] if factor > 1 else text) * factor
    if not math.isfinite(value):
        raise ValueError
    return value


def parse_seconds(text: str) -> float:
    """Return a duration in seconds, written as 30, 30s, 5min or 2h. Raise ValueError if it is not one."""
    unit = next((unit for unit in SECONDS if text.endswith(unit)), "")
    return parse_float(text.removesuffix(unit)) * SECONDS.get(unit, 1)


def parse_period(text: str) -> tuple[int, float]:
    """Return a period as environment steps (64k, 1M) and seconds (30s, 5min, 2h), one of which is 0.

    Raises:
        ValueError: If it is neither, or negative.
    """
    period = (0, parse_seconds(text)) if text.endswith(tuple(SECONDS)) else (parse_int(text), 0.0)
    if min(period) < 0:
        raise ValueError
    return period


def as_schedule(value: Any) -> tuple[str, str] | None:
    """Return the values and the steps of a schedule such as "4..12@2M", as text, which may be wrong; else None."""
    text = value if isinstance(value, str) else ""
    values, at, steps = text.partition("@")
    is_meant = at and (not values or ".." in text or values[0] in "+-." or values[0].isdigit())
    return (values, steps) if is_meant else None


class Number(int):
    """A default that is a whole number, of an argument that is not declared as int: it takes any number."""


def as_annotated(default: Any, annotation: Any) -> Any:
    """Return a default that is a whole number as the type of its annotation: int, float or `Number`."""
    if type(default) is not int:
        return default
    kinds = {*re.findall(r"\w+", annotation if isinstance(annotation, str) else getattr(annotation, "__name__", ""))}
    kinds = kinds or {*re.findall(r"\w+", str(annotation))}
    if kinds & {"int", "float"} == {"int"}:
        return default
    return float(default) if kinds & {"int", "float"} == {"float"} else Number(default)
