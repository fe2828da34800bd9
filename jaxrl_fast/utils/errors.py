"""Describe an exception in one line, with options as the command line or Python spells them."""

import contextlib
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
PATH_SEPARATORS = r"[/\\]"
COMMAND = r"(python -m jaxrl_fast[^;]*)"  # it keeps its options
OPTION = r"(?<![\w-])--(?P<agent>agent\.)?(?P<no>no-)?(?P<name>[a-z][a-z0-9-]*)"
from_python = ContextVar("from_python", default=False)  # whether the user has called a function, and no command


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

    If JAX reports the error of a callback, with its traceback, the first line after the traceback's frames is used.
    """
    text = str(error).strip()
    _, traceback_found, after = text.rpartition("Traceback (most recent call last)")
    lines = [line for line in after.splitlines()[1:] if line.strip() and not line.startswith(" ")]
    line = lines[:1] if traceback_found and lines else text.splitlines()[:1]
    return getattr(error, "strerror", None) or ": ".join([type(error).__name__, *line])


@contextlib.contextmanager
def spelled_as_keywords() -> Iterator[None]:
    """Spell options as Python's keywords in warnings, and in a ValueError that leaves the context."""
    with from_function():
        try:
            yield
        except ValueError as error:
            if type(error).__str__ is ValueError.__str__ and error.args:
                error.args = (as_keywords(str(error.args[0])), *error.args[1:])
            raise


@contextlib.contextmanager
def from_function() -> Iterator[None]:
    """Spell options as Python's keywords in warnings only: errors of a training may be a user's own."""
    token = from_python.set(True)
    try:
        yield
    finally:
        from_python.reset(token)


def as_keywords(text: str) -> str:
    """Return a message with --num-envs as num_envs and --no-overlap as overlap=False, except in whole commands."""

    def spell(match: re.Match[str]) -> str:
        name = f"{match['agent'] or ''}{match['name'].replace('-', '_')}"
        return f"{name}=False" if match["no"] else name

    parts = re.split(COMMAND, text)
    return "".join(part if i % 2 else re.sub(OPTION, spell, part) for i, part in enumerate(parts))
