"""Files: paths as users write them, free names, atomic replacement."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ASIDE = ".writing-"  # what a name begins with that is not there to stay


def replace(path: Path, text: str) -> None:
    """Writes a file that is always either the old one or the new one."""
    with whole(path) as aside:
        aside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name beside it to write to, which takes the file's place once all is written."""
    target = path.resolve()
    aside = target.with_name(f"{ASIDE}{target.name}")
    try:
        yield aside
        sync(aside)
        aside.replace(target)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # as it was named, and not the file beside it, or none
        aside.unlink(missing_ok=True)
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Onto the disk: a file's content, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def leads_elsewhere(name: str) -> bool:
    """A folder's name that is none: it has folders in it, goes up, or is of blanks."""
    return Path(name).name != name or name == ".." or name.isspace()


def path_of(text: str, said: str = "") -> Path:
    """A path as someone wrote it. ValueError where it cannot be one: no such user (~someone), or a name too long."""
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # exists() hides what is wrong with it from Python 3.14 on
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        shown = text if len(text) < 100 else f"{text[:100]}..."
        raise ValueError(f"{f'{said} ' if said else ''}{shown!r} is no path ({why})") from error
    return path
