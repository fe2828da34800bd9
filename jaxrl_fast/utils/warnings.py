"""Print lines to standard error."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from jaxrl_fast.utils.errors import why

SILENCED: list[str] = []  # why this process prints no warnings


def silence(reason: str) -> None:
    """Print no warning any more, because another process prints the same."""
    SILENCED.append(reason)


def warn(line: str) -> None:
    """Print a warning to standard error."""
    if not SILENCED:
        print_stderr(f"warning: {line}")


def once(function: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes on the first line only."""
    lines: list[str] = []

    def pass_on(line: str) -> None:
        if not lines:
            lines.append(line)
            function(line)

    return pass_on


@contextlib.contextmanager
def warn_on_error(what: str) -> Iterator[None]:
    """Print a warning, starting with `what`, instead of raising an error in the context."""
    try:
        yield
    except Exception as error:
        warn(f"{what} ({why(error)})")


def print_stderr(line: str) -> None:
    """Print a line to standard error; a failure, as of a closed file or a full disk, is ignored."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # RuntimeError: a signal arrived in another print
        print(line, file=sys.stderr)
