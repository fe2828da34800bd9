"""Describe an exception in one line."""

import re
import sysconfig
import traceback
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
PATH_SEPARATORS = r"[/\\]"


def where(error: BaseException) -> str:
    """Return the last line of user code in a traceback, as " (own.py:57, in step_env)", or "" if there is none."""
    installed = (PACKAGE, "<", sysconfig.get_path("stdlib"))
    is_user_code = lambda path: (
        not path.startswith(installed) and "site-packages" not in path and "dist-packages" not in path
    )
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    if not frames:
        return ""
    path, line, name, _ = frames[-1]
    return f" ({re.split(PATH_SEPARATORS, path)[-1]}:{line}, in {name})"


def why(error: Exception) -> str:
    """Return an error in one line: the operating system's message, or the error's type and first line.

    If JAX reports the error of a callback, with its traceback, the last line is used.
    """
    lines = str(error).strip().splitlines()
    line = lines[-1:] if any("Traceback (most recent call last)" in line for line in lines) else lines[:1]
    return getattr(error, "strerror", None) or ": ".join([type(error).__name__, *line])
