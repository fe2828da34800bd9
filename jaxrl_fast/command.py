"""What all commands share: how a command line is read, and what becomes of a mistake in it."""

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxrl_fast import host
from jaxrl_fast.manual import help_registry
from jaxrl_fast.naming import refuse_name, without_no
from jaxrl_fast.options import types_of
from jaxrl_fast.values import added, check_range, convert
from jaxrl_fast.written import Setting, from_mapping, tokenise

Ready = TypeVar("Ready")
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # what goes wrong where there is no room, or none for this user
CLOSED = errno.EACCES, errno.EPERM, errno.EROFS  # what goes wrong where this user may not read or write
BROKEN_PIPE = 13  # the signal's number, where there are signals


class Usage(NamedTuple):
    """How a command is called."""

    program: str  # "python -m jaxrl_fast.video"
    words: str  # what stands before the options: "RUN"
    options: type  # a dataclass of options, all with defaults
    meaning: str  # what it does, a sentence or two
    least: int = 1  # words
    most: int = 1


def run(
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
        if error.errno not in (*FULL, *CLOSED):
            raise
        what = "written" if error.errno in FULL else "opened"
        which = error.filename or "standard output, or another file,"
        print(f"error: {which} cannot be {what} ({error.strerror})", file=sys.stderr)
        return 1


def start(main: Callable[[], int]) -> None:
    """A command as a process: a first Ctrl-C ends it at once, unless a training is under way."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    host.quieten_blas()
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


def read(usage: Usage, argv: Sequence[str]) -> tuple[list[str], Any]:
    """The words before the options, and the options. Prints the help and exits where it is asked for."""
    words, written = tokenise(argv)
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
            refuse_name(setting, known, program=program)
        value = convert(known[setting.name], setting)
        check_range(setting, value)
        values[setting.name] = added(known[setting.name], values.get(setting.name), value)
    return options_type(**values)


def print_help(usage: Usage) -> None:
    """Every option with its meaning and its default."""
    import tyro

    prog = f"{usage.program} {usage.words}"
    tyro.cli(usage.options, args=["--help"], prog=prog, description=usage.meaning, registry=help_registry())


def new_file(path: Path) -> Path:
    """This path, or where there is a file already, the next of path-2, path-3 ... that is free."""
    tries = (path.with_stem(f"{path.stem}-{i}") if i > 1 else path for i in range(1, sys.maxsize))
    return next(free for free in tries if not free.exists())


def claim_file(path: Path) -> Path:
    """A `new_file` that is there from now on, empty: whoever else looks for one meanwhile takes another."""
    while True:
        free = new_file(path)
        try:
            free.open("x").close()
            return free
        except FileExistsError:
            continue


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[Path]:
    """A `claim_file` to write to, which is gone again where nothing came of it."""
    free = claim_file(path)
    try:
        yield free
    except BaseException:
        with contextlib.suppress(OSError):
            if not free.stat().st_size:
                free.unlink()
        raise


def check_out(path: Path, endings: Sequence[str]) -> None:
    """ValueError where a file of one of these kinds cannot be written here."""
    if path.suffix.lower() not in endings:
        raise ValueError(f"--out {path}: its name must end in {' or '.join(endings)}")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"--out {path}: {'it' if path.is_dir() else path.parent} is {'a' if path.is_dir() else 'no'} folder"
        )
    check_writable(path)


def check_writable(path: Path) -> None:
    """ValueError where this user may write no such file."""
    path = path.resolve()
    if not (os.access(path.parent, os.W_OK) and (os.access(path, os.W_OK) or not path.exists())):
        raise ValueError(f"{path} cannot be written: this user has no right to; --out chooses another place")
