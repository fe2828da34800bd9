"""Describe an exception in one line."""

import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

PACKAGE = str(Path(__file__).parents[1])
PATH_SEPARATORS = r"[/\\]"
INSTALLED = rf"(?:site|dist)-packages{PATH_SEPARATORS}"


def where(error: BaseException) -> str:
    """Return the last line of user code in a traceback, as " (own.py:57, in step_env)", or "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_code(frame.filename)]
    if not frames:
        return ""
    path, line, name, _ = frames[-1]
    return f" ({re.split(PATH_SEPARATORS, path)[-1]}:{line}, in {name})"


def user_line(stacks: Iterable[FrameType]) -> str:
    """Return the line of user code that this package has called and that has not returned, in any thread, or ""."""
    for stack in stacks:
        frames = traceback.extract_stack(stack)
        ours = [i for i, frame in enumerate(frames) if frame.filename.startswith(PACKAGE)]
        theirs = [frame for frame in frames[ours[-1] :] if _is_user_code(frame.filename)] if ours else []
        if theirs:
            return f"{re.split(PATH_SEPARATORS, theirs[-1].filename)[-1]}:{theirs[-1].lineno}, in {theirs[-1].name}"
    return ""


def place(error: BaseException) -> str:
    """Return `where`, or else the innermost line of an installed package, with its code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_installed(frame.filename)]
    if (found := where(error)) or not frames:
        return found
    path, line, name, code = frames[-1]
    return f" ({re.split(INSTALLED, path)[-1]}:{line}, in {name}{code and ': '}{code})"


def _is_installed(path: str) -> bool:
    return re.search(INSTALLED, path) is not None and not path.startswith(PACKAGE)


def _is_user_code(path: str) -> bool:
    installed = (PACKAGE, "<", sysconfig.get_path("stdlib"))
    return not path.startswith(installed) and "site-packages" not in path and "dist-packages" not in path


class EnvFault(ValueError):
    """An environment returned a value that it must not return, or the process that steps it has ended."""


class EnvInterrupted(Exception):
    """An environment raised an exception that would end the program, such as asyncio.CancelledError: the cause."""


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker process, as text: the `__cause__` of the exception raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


BLAME = "raised by the environment: "  # begins a note of an exception


def blame(error: BaseException, place: str) -> None:
    """Note on an exception where an environment has raised it: "my_module:MyEnv: step failed in environment 3"."""
    if blamed(error) is None:
        error.add_note(BLAME + place)


def blamed(error: BaseException) -> str | None:
    """Return where an environment has raised this exception, or None if it is of another origin."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(BLAME)]
    return notes[0].removeprefix(BLAME) if notes else None


REMEDY = "remedy: "  # begins a note of an exception


def add_remedy(error: BaseException, remedy: str) -> None:
    """Note on an exception what the user can do."""
    error.add_note(REMEDY + remedy)


def remedy_of(error: BaseException) -> str:
    """Return what the user can do about this exception as the end of a line, or ""."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(REMEDY))
    return "".join(f"; {note.removeprefix(REMEDY)}" for note in notes)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a program does not fit into memory, unlike an environment that raises such an error."""
    return blamed(error) is None and (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text_of(error))


def text_of(error: BaseException) -> str:
    """Return the message of an exception, or "" if its own `__str__` fails."""
    try:
        return str(error)
    except Exception:
        return ""


def raised_here(error: BaseException) -> bool:
    """Return whether this package has raised a ValueError, whose message is for users."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and frame.filename.startswith(PACKAGE)


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an exception without the frames above the user's code."""
    if isinstance(error.__cause__, WorkerTraceback):
        return str(error.__cause__.args[0])
    if isinstance(error, EnvInterrupted) and error.__cause__ is not None:
        error = error.__cause__
    below = error.__traceback__  # the frames that this package has called
    for frame in _frames(error.__traceback__):
        below = frame.tb_next if frame.tb_frame.f_code.co_filename.startswith(PACKAGE) else below
    frames = next((f for f in _frames(below) if _is_user_code(f.tb_frame.f_code.co_filename)), below)
    notes, error.__notes__ = getattr(error, "__notes__", []), []
    try:
        return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    finally:
        error.__notes__ = notes


def _frames(first: TracebackType | None) -> Iterator[TracebackType]:
    while first is not None:
        yield first
        first = first.tb_next


def why(error: BaseException) -> str:
    """Return an error in one line: the operating system's message, or the error's type and first line.

    If JAX reports the error of a callback, with its traceback, the first line after the traceback's frames is used.
    """
    text = text_of(error).strip()
    _, traceback_found, after = text.rpartition("Traceback (most recent call last)")
    lines = [line for line in after.splitlines()[1:] if line.strip() and not line.startswith(" ")]
    line = lines[:1] if traceback_found and lines else text.splitlines()[:1]
    return getattr(error, "strerror", None) or ": ".join([type(error).__name__, *line])
