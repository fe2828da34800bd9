"""Write records to metrics.jsonl."""

import contextlib
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

from jaxrl_fast.loggers.sinks import Record
from jaxrl_fast.utils.files import atomic_write


class JsonLines:
    """A JSON Lines file: one object per line, written unbuffered and never partly.

    Lines that cannot be written, for example to a full disk, are kept and written the next time.

    Args:
        path: The file, which must not exist if `size` is None.
        size: The number of bytes after which to continue an existing file; the rest is removed.
    """

    def __init__(self, path: Path, size: int | None = None):
        self.path = path
        self.file = path.open("x+b" if size is None or not path.exists() else "r+b", buffering=0)
        assert not size or path.stat().st_size >= size, "the file is shorter than `size`"
        self.size = self.file.truncate(size or 0)
        self.waiting = b""
        self.num_failures = 0  # since the last success

    def write(self, records: Sequence[Record]) -> None:
        """Append records. Raise OSError if they cannot be written now."""
        lines = "".join(json.dumps(r, allow_nan=False) + "\n" for r in records)
        self.waiting += lines.encode()
        self._write_waiting()

    def sync(self) -> int:
        """Flush all lines to the disk and return the size of the file in bytes."""
        self._write_waiting()
        os.fsync(self.file.fileno())
        return self.size

    def restore(self) -> bool:
        """Write the file again if it has been deleted, moved or replaced. Return whether it was."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.file.fileno()), self.path.stat()):
                return False
        self.file.seek(0)
        with atomic_write(self.path) as aside:
            aside.write_bytes((self.file.readall() or b"")[: self.size])
        self.file.close()
        self.file = self.path.open("r+b", buffering=0)
        return True

    def close(self) -> None:
        """Write the remaining lines and close the file."""
        with self.file:
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write all waiting lines completely, or none of them."""
        try:
            self.file.seek(self.size)
            written = self.file.write(self.waiting)
            if written < len(self.waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.num_failures += 1
            self.file.truncate(self.size)
            raise
        self.size, self.waiting, self.num_failures = self.size + written, b"", 0
