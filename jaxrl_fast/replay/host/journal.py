"""Append groups of blocks to files. A checkpoint records the length of each file that it needs.

    RUN/replay/00000003.bin    successive groups: for each environment the length of its block, uint32, and the block

A file never changes below the length that a checkpoint records. So saving a run copies nothing, and a killed run finds
all data of its last checkpoint. A resumed run begins a new file.
"""

import contextlib
import hashlib
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_fast.utils.files import REPLAY_ENDING, sync

LENGTH = struct.Struct("<I")


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Give an OSError in the context the path of a file that is used by its descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


class Segment:
    """One file."""

    def __init__(self, path: Path, group: int | None = None):
        self.path, self.group = path, group  # the first group; None: a group that is not full
        self.num_groups = 0
        self.num_bytes = 0
        self.digest = hashlib.sha256()  # of the appended bytes
        self.sha256 = ""  # of a complete file
        self.descriptor = -1

    @property
    def end(self) -> int:
        """Return the group after the last one; 0 without groups."""
        return (self.group or 0) + self.num_groups

    def append(self, record: bytes) -> None:
        """Write the blocks of the next group."""
        with named(self.path):
            _write(self.descriptor, record, self.num_bytes)
        self.num_groups += 1
        self.num_bytes += len(record)
        self.digest.update(record)

    def entry(self) -> dict[str, Any]:
        """Return the entry of the file in a checkpoint that is saved now."""
        return {
            "name": self.path.name,
            "group": self.group,
            "num_groups": self.num_groups,
            "bytes": self.num_bytes,
            "sha256": self.sha256 or self.digest.hexdigest(),
        }

    def open(self, flags: int) -> int:
        """Open the file. Return its descriptor."""
        self.descriptor = os.open(self.path, flags, 0o644)
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        return self.descriptor

    def close(self) -> None:
        """Close the file, if it is open."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class Journal:
    """The files of one buffer. One thread may append while another saves."""

    def __init__(self, folder: Path, num_envs: int):
        folder.mkdir(exist_ok=True)
        self.folder, self.num_envs = folder, num_envs
        self.next_number = max((int(path.stem) for path in self._files()), default=0) + 1
        self.in_use: list[Segment] = []  # the oldest first
        self.current: Segment | None = None  # the one that is appended to, the last of those in use
        self.named: set[str] = set()  # files that a checkpoint needs, or one that is being written
        self.lock = threading.RLock()

    def begin(self, size: int) -> None:
        """Begin a new file, with room for `size` bytes if that is known. Raise OSError if the disk is full."""
        with self.lock:
            self.current = self._create()
            self.in_use.append(self.current)
        if size and hasattr(os, "posix_fallocate"):
            with named(self.current.path):
                os.posix_fallocate(self.current.descriptor, 0, size)

    def has_room(self, num_bytes: int, file_bytes: int) -> bool:
        """Return whether a file is open that is at most `file_bytes` long after `num_bytes` more."""
        return self.current is not None and self.current.num_bytes + num_bytes <= file_bytes

    def append(self, group: int, blocks: Sequence[Any]) -> tuple[int, list[int]]:
        """Append the blocks of a group. Return the file's descriptor, and the place of each block."""
        segment = self.current
        assert segment, "`begin` comes first"
        places, place = [], segment.num_bytes
        for block in blocks:
            places.append(place + LENGTH.size)
            place += LENGTH.size + len(block)
        record = _record(blocks)
        with self.lock:
            segment.append(record)
            segment.group = group if segment.group is None else segment.group
        return segment.descriptor, places

    def end(self) -> None:
        """Close the current file for appending."""
        self.current = None

    def cancel(self) -> None:
        """Delete the current file."""
        with self.lock:
            segment, self.current = self.current, None
            if segment:
                self.in_use.remove(segment)
                segment.close()
                segment.path.unlink(missing_ok=True)

    def adopt(self, file: Mapping[str, Any]) -> Segment:
        """Use a file that a checkpoint names, without appending to it."""
        segment = Segment(self.folder / file["name"], file["group"])
        segment.num_groups, segment.num_bytes, segment.sha256 = file["num_groups"], file["bytes"], file["sha256"]
        with self.lock:
            self.in_use.append(segment)
        return segment

    def segments(self, oldest: int) -> list[dict[str, Any]]:
        """Return the entries of the files with groups from `oldest` on, which are kept until the next `prune`."""
        with self.lock:
            found = [segment.entry() for segment in self.in_use if segment.end > oldest]
            self.named |= {entry["name"] for entry in found}
        return found

    def sync(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Flush files to the disk."""
        for entry in entries:
            sync(self.folder / entry["name"])
        sync(self.folder)

    def write_apart(self, blocks: Sequence[Any]) -> list[dict[str, Any]]:
        """Write the blocks of a group that is not full to a separate file. Return its entry; none without blocks."""
        if not blocks:
            return []
        with self.lock:
            segment = self._create()
            self.named.add(segment.path.name)
        try:
            segment.append(_record(blocks))
        finally:
            segment.close()
        self.sync([segment.entry()])
        return [segment.entry()]

    def read(self, file: Mapping[str, Any]) -> Iterator[list[bytes]]:
        """Yield the blocks of each group of a file."""
        with (self.folder / file["name"]).open("rb") as content:
            for _ in range(file["num_groups"]):
                blocks = []
                for _ in range(self.num_envs):
                    (length,) = LENGTH.unpack(content.read(LENGTH.size))
                    blocks.append(content.read(length))
                yield blocks

    def drop(self, oldest: int) -> None:
        """Release files whose groups are all older than `oldest`. Delete the ones that no checkpoint names."""
        with self.lock:
            for segment in [x for x in self.in_use if x.end <= oldest and x is not self.current]:
                self.in_use.remove(segment)
                segment.close()
                if segment.path.name not in self.named:
                    segment.path.unlink(missing_ok=True)

    def prune(self, named: set[str]) -> None:
        """Delete the files that are neither named nor in use."""
        with self.lock:
            self.named = named
            used = {segment.path.name for segment in self.in_use}
            for path in self._files():
                if path.name not in named | used:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close all files."""
        for segment in self.in_use:
            segment.close()

    def _create(self) -> Segment:
        path = self.folder / f"{self.next_number:08d}{REPLAY_ENDING}"
        self.next_number += 1
        segment = Segment(path)
        segment.open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        return segment

    def _files(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.suffix == REPLAY_ENDING and path.stem.isdecimal()]


def _record(blocks: Sequence[Any]) -> bytes:
    """Return the bytes of a group."""
    return b"".join(part for block in blocks for part in (LENGTH.pack(len(block)), block))


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
