"""Describe an exception in one line."""

import re
import sysconfig
import traceback
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
PATH_SEPARATORS = r"[/\\]"


def where(error: BaseException) -> str:
    """For a sentence's end: " (own.py:57, in step_env)", the last place of an error in what is not installed, or ""."""
    not_own = (PACKAGE, "<", sysconfig.get_path("stdlib"))
    is_own = lambda path: not path.startswith(not_own) and "site-packages" not in path and "dist-packages" not in path
    places = [at for at in traceback.extract_tb(error.__traceback__) if is_own(at.filename)]
    if not places:
        return ""
    path, line, name, _ = places[-1]
    return f" ({re.split(PATH_SEPARATORS, path)[-1]}:{line}, in {name})"


def why(error: Exception) -> str:
    """What went wrong, for a sentence's end: the system's words, or the kind of error and its first line.

    Where JAX reports what a callback raised, that is its last line.
    """
    lines = str(error).strip().splitlines()
    line = lines[-1:] if any("Traceback (most recent call last)" in line for line in lines) else lines[:1]
    return getattr(error, "strerror", None) or ": ".join([type(error).__name__, *line])
