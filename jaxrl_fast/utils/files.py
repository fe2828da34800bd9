"""Parse paths, find free names and replace files atomically."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ASIDE = ".writing-"  # prefix of temporary files and folders
REPLAY, REPLAY_ENDING = "replay", ".bin"  # of a run's replay: begins the names of folders, and ends those of files


def replace(path: Path, text: str) -> None:
    """Write a text file atomically. A folder's name that is not UTF-8 is written with question marks."""
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="replace")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` once the context ends without an error."""
    target = path.resolve()
    aside = target.with_name(f"{ASIDE}{target.name}")
    try:
        yield aside
        sync(aside)
        aside.replace(target)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # not the temporary file
        aside.unlink(missing_ok=True)
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder, without those that are deleted meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def new_file(path: Path) -> Path:
    """Return this path, or the first of path-2, path-3 ... that does not exist."""
    candidates = (path.with_stem(f"{path.stem}-{i}") if i > 1 else path for i in range(1, sys.maxsize))
    return next(candidate for candidate in candidates if not candidate.exists())


def claim_file(path: Path) -> Path:
    """Create and return an empty `new_file`, so that no other process takes the same name."""
    while True:
        candidate = new_file(path)
        try:
            candidate.open("x").close()
            return candidate
        except FileExistsError:
            continue


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[Path]:
    """Yield a `claim_file` to write to; it is removed if the context ends with an error."""
    claimed_path = claim_file(path)
    created = claimed_path.absolute()
    try:
        yield claimed_path
    except BaseException:
        with contextlib.suppress(OSError):
            if not created.stat().st_size:
                created.unlink()
        raise


def check_out(path: Path, endings: Sequence[str], option: str = "out") -> None:
    """Raise ValueError unless the file of an option can be written and has one of these endings."""
    if path.suffix.lower() not in endings:
        raise ValueError(f"{option}: must end with {' or '.join(endings)}, got {str(path)!r}; rename it")
    if path.is_dir():
        raise ValueError(f"{option}: must be a file, got the folder {str(path)!r}; add a name")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: must be in an existing folder, got {str(path)!r}; create {str(path.parent)!r}")
    check_writable(path, option)


def check_writable(path: Path, option: str = "out") -> None:
    """Raise ValueError if the user may not write this file."""
    path = path.resolve()
    if not (os.access(path.parent, os.W_OK) and (os.access(path, os.W_OK) or not path.exists())):
        raise ValueError(f"{option}: must be writable, got {str(path)!r} (no permission); choose another file")
    try:
        os.lstat(path.with_name(f"{ASIDE}{path.name}"))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # that of the file itself may not be
            problem = f"the name {path.name[:60]}... is too long for a temporary file {ASIDE}NAME"
            raise ValueError(f"{option}: {problem}, got {len(path.name)} characters; use a shorter one") from error


def is_folder_name(name: str) -> bool:
    """Return whether a name is valid for a folder: without separators, not "..", and not blank."""
    return Path(name).name == name and name != ".." and not name.isspace()


def current_folder() -> Path:
    """Return the absolute current directory; "." if it has been deleted, so that absolute paths still work."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()


def inside(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Make `folder` the current directory until the context ends, so that relative paths have their old meaning.

    Environments may have changed the current directory. If they have not, nothing is done.
    """
    return contextlib.nullcontext() if current_folder() == folder else contextlib.chdir(folder)


def path_of(text: str, option: str = "") -> Path:
    """Return a path with ~ expanded. Raise ValueError if it is not valid: an unknown user, or a name that is too long.

    Args:
        text: The path as the user wrote it.
        option: The option, for the error message.
    """
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # exists() hides the error since Python 3.14
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = text if len(text) < 100 else f"{text[:100]}..."
        raise ValueError(f"{f'{option} ' if option else ''}{shown!r} is not a valid path ({reason})") from error
    return path
