"""Read command lines and report mistakes, for all commands."""

import errno
import io
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

from jaxrl_fast import __version__
from jaxrl_fast.config import help
from jaxrl_fast.config.parts import named, read_values
from jaxrl_fast.config.sources import from_mapping, tokenize
from jaxrl_fast.options.declare import options_of
from jaxrl_fast.parallel import team
from jaxrl_fast.parallel.line import Refused
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.errors import EnvFault, blamed, remedy_of, user_traceback, why

Ready = TypeVar("Ready")
DISK_FULL_ERRNOS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # no room, or none for this user
PERMISSION_ERRNOS = errno.EACCES, errno.EPERM, errno.EROFS
BROKEN_PIPE = 13  # the signal's number


class CommandSpec(NamedTuple):
    """The usage of a command."""

    program: str  # "python -m jaxrl_fast.video"
    positional: str  # the arguments before the options: "RUN"
    options: type  # a dataclass of options, all with defaults
    description: str  # a sentence or two
    min_args: int = 1  # positional ones
    max_args: int = 1


def run_command(
    prepare: Callable[[Sequence[str]], Ready], act: Callable[[Ready], int | None], argv: Sequence[str] | None
) -> int:
    """Run a command and return its exit status.

    A ValueError of one line from `prepare` is a user's mistake: status 2. A full disk or a missing permission gives
    status 1. So does an error in an environment, after a line about its place and the traceback of the user's code.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--version" in argv:
        print(version_line())
        return 0
    try:
        try:
            ready = prepare(argv)
        except EnvFault:
            raise
        except ValueError as error:
            if "\n" in str(error) or blamed(error) is not None:  # not a message for users
                raise
            return _refuse(str(error), 2, is_known=isinstance(error, Refused))
        return act(ready) or 0
    except OSError as error:
        is_known = error.errno in (*DISK_FULL_ERRNOS, *PERMISSION_ERRNOS) or bool(remedy_of(error))
        if not is_known or blamed(error) is not None:
            return _report(error)
        what = "written" if error.errno in DISK_FULL_ERRNOS else "opened"
        which = error.filename or "standard output or another file"
        return _refuse(f"{which}: cannot be {what} ({error.strerror}){remedy_of(error)}", 1)
    except EnvFault as error:
        return _refuse(str(error), 1)
    except Exception as error:
        return _report(error)


def _refuse(line: str, status: int, is_known: bool = False) -> int:
    """Print an error and return the status. Of several processes, process 0 prints it, and all end."""
    processes = team.current()
    processes.fail(line, status)
    if processes.leads and not is_known:
        print(f"error: {line}", file=sys.stderr)
    return status


def _report(error: Exception) -> int:
    """Print the place and the traceback of an environment's error, and return the exit status; raise any other."""
    place = blamed(error)
    if place is None:
        raise error
    print(f"error: {place}{remedy_of(error)}\n{user_traceback(error)}", end="", file=sys.stderr)
    team.current().fail(place)
    return 1


def version_line() -> str:
    """Return the versions of this package and of JAX: "jaxrl_fast 0.1.0, jax 0.10.2"."""
    return f"jaxrl_fast {__version__}, jax {metadata.version('jax')}"


def start(main: Callable[[], int]) -> None:
    """Run a command as a process and exit. Ctrl-C ends it at once unless a training is running."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    devices.limit_blas_threads()
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the current directory was removed; change to another", file=sys.stderr)
        sys.exit(2)
    if sys.stdout is None:  # closed by the shell: >&-
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters
    status: Any = 0
    try:
        status = main()
    except SystemExit as asked:
        status = asked.code
    except BrokenPipeError:
        status = 128 + BROKEN_PIPE
    except Exception as error:
        if team.current().count == 1:
            raise
        traceback.print_exc()
        team.current().fail(why(error))
        status = 1
    except KeyboardInterrupt:  # the command has removed its unfinished files
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    try:
        sys.stdout.flush()
    except OSError as error:  # a reader such as `head` left, or the disk is full
        status = 128 + BROKEN_PIPE if isinstance(error, BrokenPipeError) else status
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if team.current().count > 1:  # JAX's own end waits for processes that may have failed
        team.current().leave()
        sys.stderr.flush()
        os._exit(status or 0)
    sys.exit(status)


def read(usage: CommandSpec, argv: Sequence[str]) -> tuple[list[str], Any]:
    """Return the positional arguments and the options. Print the help and exit if `--help` is given."""
    words, written = tokenize(argv)
    usage_line = f"{usage.program} {usage.positional} [options]"
    if any(s.name == "help" for s in written):
        help.print_help(usage_line, textwrap.wrap(usage.description, help.width()), [usage.options()])
        raise SystemExit(0)
    known = options_of(usage.options)
    options = usage.options(**read_values(named(written, known, program=usage.program), known))
    if len(words) > usage.max_args:
        raise ValueError(f"unexpected argument {words[usage.max_args]!r}; usage: {usage_line}")
    if len(words) < usage.min_args:
        raise ValueError(f"{usage.positional} is missing before the options; usage: {usage_line}")
    return words, options


def from_keywords(options_type: type, given: Mapping[str, Any]) -> Any:
    """Return a dataclass of options from Python's keywords."""
    known = options_of(options_type)
    return options_type(**read_values(named(from_mapping(given), known), known))
