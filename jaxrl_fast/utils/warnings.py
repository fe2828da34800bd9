"""Print lines to standard error."""

import contextlib
import sys
from collections.abc import Iterator

from jaxrl_fast.utils.errors import why


def warn(line: str) -> None:
    """On standard error."""
    print_stderr(f"warning: {line}")


@contextlib.contextmanager
def warned(what: str) -> Iterator[None]:
    """What goes wrong in here is a warning, for it is not worth ending anything."""
    try:
        yield
    except Exception as error:
        warn(f"{what} ({why(error)})")


def print_stderr(line: str) -> None:
    """Prints a line to standard error, if anybody reads it and there is room: one that is lost ends no training."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a signal came while another line was written
        print(line, file=sys.stderr)
