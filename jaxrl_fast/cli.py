"""What all commands share: how a command line is read, and what becomes of a mistake in it."""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxrl_fast.config.convert import check_range, convert, merge_values
from jaxrl_fast.config.help import help_registry
from jaxrl_fast.config.names import refuse_unknown, without_no
from jaxrl_fast.config.options import types_of
from jaxrl_fast.config.sources import Setting, from_mapping, tokenize
from jaxrl_fast.utils import devices

Ready = TypeVar("Ready")
DISK_FULL_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
)  # what goes wrong where there is no room, or none for this user
PERMISSION_ERRNOS = errno.EACCES, errno.EPERM, errno.EROFS  # what goes wrong where this user may not read or write
BROKEN_PIPE = 13  # the signal's number, where there are signals


class CommandSpec(NamedTuple):
    """How a command is called."""

    program: str  # "python -m jaxrl_fast.video"
    words: str  # what stands before the options: "RUN"
    options: type  # a dataclass of options, all with defaults
    meaning: str  # what it does, a sentence or two
    least: int = 1  # words
    most: int = 1


def run_command(
    prepare: Callable[[Sequence[str]], Ready], act: Callable[[Ready], int | None], argv: Sequence[str] | None
) -> int:
    """A command: what a user can get wrong is refused while it prepares.

    Returns its exit status: 1 where there is no room to write, or no right to read or write.
    """
    try:
        try:
            ready = prepare(sys.argv[1:] if argv is None else argv)
        except ValueError as error:
            if "\n" in str(error):  # not one of our sentences
                raise
            print(f"error: {error}", file=sys.stderr)
            return 2
        return act(ready) or 0
    except OSError as error:
        if error.errno not in (*DISK_FULL_ERRNOS, *PERMISSION_ERRNOS):
            raise
        what = "written" if error.errno in DISK_FULL_ERRNOS else "opened"
        which = error.filename or "standard output, or another file,"
        print(f"error: {which} cannot be {what} ({error.strerror})", file=sys.stderr)
        return 1


def start(main: Callable[[], int]) -> None:
    """A command as a process: a first Ctrl-C ends it at once, unless a training is under way."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    devices.limit_blas_threads()
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the current directory is there no more; change to another", file=sys.stderr)
        sys.exit(2)
    if sys.stdout is None:  # closed by the shell: >&-
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of a terminal that does not know our signs
    status: Any = 0
    try:
        status = main()
    except SystemExit as asked:
        status = asked.code
    except BrokenPipeError:
        status = 128 + BROKEN_PIPE
    try:
        sys.stdout.flush()
    except OSError as error:  # the reader left, as `head` does, or the disk is full: no reason for a traceback
        status = 128 + BROKEN_PIPE if isinstance(error, BrokenPipeError) else status
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def read(usage: CommandSpec, argv: Sequence[str]) -> tuple[list[str], Any]:
    """The words before the options, and the options. Prints the help and exits where it is asked for."""
    words, written = tokenize(argv)
    if any(s.name in ("help", "h") for s in written):
        print_help(usage)
        raise SystemExit(0)
    options = convert_all(usage.options, written, usage.program)
    if len(words) > usage.most:
        raise ValueError(f"{words[usage.most]!r} is one word too many: {usage.program} {usage.words} [options]")
    if len(words) < usage.least:
        raise ValueError(f"{usage.words} is missing, before the options: {usage.program} {usage.words} [options]")
    return words, options


def from_keywords(options_type: type, given: Mapping[str, Any]) -> Any:
    """A dataclass of options from Python's keywords."""
    return convert_all(options_type, from_mapping(given, lambda name: name), "")


def convert_all(options_type: type, written: Sequence[Setting], program: str) -> Any:
    """A dataclass of options from what was written, wherever it was."""
    known = types_of(options_type)
    values: dict[str, Any] = {}
    for setting in (without_no(s, known) for s in written):
        if setting.name not in known:
            refuse_unknown(setting, known, program=program)
        value = convert(known[setting.name], setting)
        check_range(setting, value)
        values[setting.name] = merge_values(known[setting.name], values.get(setting.name), value)
    return options_type(**values)


def print_help(usage: CommandSpec) -> None:
    """Every option with its meaning and its default."""
    import tyro

    prog = f"{usage.program} {usage.words}"
    tyro.cli(usage.options, args=["--help"], prog=prog, description=usage.meaning, registry=help_registry())
