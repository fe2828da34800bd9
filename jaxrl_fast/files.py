"""Files that are whole: the old one or the new one, and on the disk once they have their name."""

import contextlib
import os
from collections.abc import Iterator
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
