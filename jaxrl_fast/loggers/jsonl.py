"""Write records to metrics.jsonl."""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

from jaxrl_fast.loggers.sinks import Record


class JsonLines:
    """Writes one JSON object a line, to the disk at once, and never half of one.

    The file is new, unless it is to be continued after its first `size` bytes. Lines that do not fit on the disk wait
    for the next write.
    """

    def __init__(self, path: Path, size: int | None = None):
        self.file = path.open("xb" if size is None or not path.exists() else "r+b", buffering=0)
        assert not size or path.stat().st_size >= size, "bytes that were never written"
        self.size = self.file.truncate(size or 0)
        self.waiting = b""
        self.num_failures = 0  # since something was written

    def write(self, records: Sequence[Record]) -> None:
        lines = "".join(json.dumps(r, allow_nan=False) + "\n" for r in records)
        self.waiting += lines.encode()
        self._write_waiting()

    def sync(self) -> int:
        """Sync the file to the disk. Return its size in bytes."""
        self._write_waiting()
        os.fsync(self.file.fileno())
        return self.size

    def close(self) -> None:
        with self.file:
            self._write_waiting()

    def _write_waiting(self) -> None:
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
