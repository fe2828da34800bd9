"""Store the full groups of a buffer: in an array, as compressed blocks in memory, or in files.

A group holds a block of rows of each environment. Group g replaces group g - G, where G groups are kept.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import thread_time
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl_fast.replay.host.codec import RAW, Codec
from jaxrl_fast.replay.host.journal import Journal

NUM_UNPACKERS = min(4, os.cpu_count() or 1)  # threads: zstandard works outside of Python's lock
NUM_READERS = 8  # threads: a disk answers several requests in the time of one
MIN_FILES, MAX_FILES, FILE_BYTES = 4, 256, 2**26  # files of a full buffer, and bytes of a file if that allows
NOT_WAITING = getattr(os, "RWF_NOWAIT", 0)  # flag of `preadv`: read only from the page cache; 0: always read

Sizes = tuple[int, int, int, int]  # groups G, environments N, rows of a block, bytes of a frame


class Request(NamedTuple):
    """The frames to read, and their rows in the result."""

    group: np.ndarray  # [M]
    env: np.ndarray  # [M]
    at: np.ndarray  # [M] the row in its block
    row: np.ndarray  # [M] ascending


class Blocks(Protocol):
    """Full groups. Several threads may read at a time, and one may write a group that is not read."""

    codec: Codec
    num_bytes: int  # bytes of the stored blocks
    num_raw_bytes: int  # bytes of the same frames before compression
    codec_time: float  # seconds of all threads for compressing and decompressing

    def write(self, group: int, data: np.ndarray) -> None:
        """Keep a group [N, rows, B] in place of the oldest one."""

    def read(self, request: Request, out: np.ndarray) -> None:
        """Write the requested frames to `out` [rows, B]."""

    def blocks_of(self, group: int) -> list[Any]:
        """Return a group's encoded blocks, which do not change later. Not needed where blocks lie in files."""

    def load(self, file: Mapping[str, Any], journal: Journal) -> None:
        """Keep the groups in a file of the journal."""

    def close(self) -> None:
        """Stop all threads."""


class ArrayBlocks:
    """Frames in one array."""

    def __init__(self, sizes: Sizes):
        self.frames, self.codec = np.zeros(sizes, np.uint8), RAW
        self.flat = self.frames.reshape(-1, sizes[-1])
        self.num_bytes = self.num_raw_bytes = 0
        self.codec_time = 0.0

    def write(self, group: int, data: np.ndarray) -> None:
        self.frames[group % len(self.frames)] = data
        self.num_bytes = self.num_raw_bytes = min(self.num_bytes + data.nbytes, self.frames.nbytes)

    def read(self, request: Request, out: np.ndarray) -> None:
        num_groups, num_envs, block, _ = self.frames.shape
        index = ((request.group % num_groups) * num_envs + request.env) * block + request.at
        first, num = int(request.row[0]), len(index)
        if request.row[-1] - first == num - 1:
            np.take(self.flat, index, axis=0, out=out[first : first + num], mode="clip")
        else:
            out[request.row] = self.flat[index]

    def blocks_of(self, group: int) -> list[Any]:
        return [self.codec.encode(block) for block in self.frames[group % len(self.frames)].copy()]

    def load(self, file: Mapping[str, Any], journal: Journal) -> None:
        journal.adopt(file)
        for group, blocks in zip(_groups(file), journal.read(file)):
            self.write(group, np.stack([self.codec.decode(block, self.frames.shape[2:]) for block in blocks]))

    def close(self) -> None:
        del self.frames, self.flat


class PackedBlocks:
    """Compressed blocks in memory."""

    def __init__(self, sizes: Sizes, codec: Codec):
        self.sizes, self.codec = sizes, codec
        self.blocks: list[list[bytes]] = [[] for _ in range(sizes[0])]
        self.threads = ThreadPoolExecutor(NUM_UNPACKERS, "replay-reader")
        self.num_bytes = self.num_raw_bytes = 0
        self.codec_time = 0.0

    def write(self, group: int, data: np.ndarray) -> None:
        start = thread_time()
        blocks = [self.codec.encode(block) for block in data]
        self.codec_time += thread_time() - start
        self._keep(group, blocks)

    def read(self, request: Request, out: np.ndarray) -> None:
        get = lambda group, env: self.blocks[group % len(self.blocks)][env]
        self.codec_time += unpack(get, self.codec, self.sizes, request, out, self.threads)

    def blocks_of(self, group: int) -> list[Any]:
        return self.blocks[group % len(self.blocks)]

    def load(self, file: Mapping[str, Any], journal: Journal) -> None:
        journal.adopt(file)
        for group, blocks in zip(_groups(file), journal.read(file)):
            self._keep(group, blocks)

    def close(self) -> None:
        self.threads.shutdown()
        self.blocks.clear()

    def _keep(self, group: int, blocks: list[bytes]) -> None:
        old, self.blocks[group % len(self.blocks)] = self.blocks[group % len(self.blocks)], blocks
        self.num_bytes += sum(map(len, blocks)) - sum(map(len, old))
        self.num_raw_bytes += (bool(blocks) - bool(old)) * self.sizes[1] * self.sizes[2] * self.sizes[3]


class FileBlocks:
    """Blocks in the files of a journal, which is written as groups come. Files without a needed group are dropped."""

    def __init__(self, sizes: Sizes, codec: Codec, journal: Journal):
        self.sizes, self.codec, self.journal = sizes, codec, journal
        num_groups, num_envs, block, num_bytes = sizes
        self.file_bytes = file_bytes(num_groups, num_envs * (4 + block * num_bytes))
        self.file = np.zeros(num_groups, np.int64)  # descriptors
        self.place = np.zeros((num_groups, num_envs), np.int64)
        self.length = np.zeros((num_groups, num_envs), np.int64)
        self.threads = ThreadPoolExecutor(NUM_READERS, "replay-reader")
        self.num_bytes = self.num_raw_bytes = 0
        self.codec_time = 0.0

    def write(self, group: int, data: np.ndarray) -> None:
        if not self.journal.has_room(data.nbytes + 4 * len(data), self.file_bytes):
            self.journal.end()
            self.journal.drop(group + 1 - len(self.file))
            self.journal.begin(0 if self.codec.is_packed else self.file_bytes)
        start = thread_time()
        blocks = [self.codec.encode(block) for block in data]
        self.codec_time += thread_time() - start
        descriptor, places = self.journal.append(group, blocks)
        self._keep(group, descriptor, places, [len(block) for block in blocks])

    def read(self, request: Request, out: np.ndarray) -> None:
        if self.codec.is_packed:
            self.codec_time += unpack(self._block, self.codec, self.sizes, request, out, self.threads)
            return
        slot, num_bytes = request.group % len(self.file), self.sizes[-1]
        offset = self.place[slot, request.env] + request.at * num_bytes
        file = self.file[slot]
        joined = (np.diff(offset) == num_bytes) & (np.diff(file) == 0) & (np.diff(request.row) == 1)
        starts = np.flatnonzero(np.concatenate([[True], ~joined]))
        lengths = np.diff(starts, append=len(offset))
        jobs = zip(file[starts].tolist(), offset[starts].tolist(), request.row[starts].tolist(), lengths.tolist())
        in_cache = lambda job: _read_into(job[0], job[1], out[job[2] : job[2] + job[3]], NOT_WAITING)
        cold = [job for job in jobs if not in_cache(job)]

        def read(some: list[tuple[int, int, int, int]]) -> None:
            for descriptor, place, row, num in some:
                _read_into(descriptor, place, out[row : row + num])

        list(self.threads.map(read, _shares(cold, NUM_READERS)))

    def blocks_of(self, group: int) -> list[Any]:
        raise AssertionError("the files are part of each checkpoint")

    def load(self, file: Mapping[str, Any], journal: Journal) -> None:
        descriptor, place = journal.adopt(file).open(os.O_RDONLY), 0
        for group, blocks in zip(_groups(file), journal.read(file)):
            lengths = [len(block) for block in blocks]
            places = place + np.cumsum([4 + length for length in [0, *lengths[:-1]]])
            self._keep(group, descriptor, places.tolist(), lengths)
            place += sum(lengths) + 4 * len(lengths)

    def close(self) -> None:
        self.threads.shutdown()

    def _block(self, group: int, env: int) -> bytes:
        slot = group % len(self.file)
        return os.pread(int(self.file[slot]), int(self.length[slot, env]), int(self.place[slot, env]))

    def _keep(self, group: int, descriptor: int, places: list[int], lengths: list[int]) -> None:
        slot = group % len(self.file)
        is_new = self.file[slot] == 0
        self.num_bytes += sum(lengths) - int(self.length[slot].sum())
        self.num_raw_bytes += int(is_new) * self.sizes[1] * self.sizes[2] * self.sizes[3]
        self.file[slot], self.place[slot], self.length[slot] = descriptor, places, lengths


def file_bytes(num_groups: int, group_bytes: int) -> int:
    """Return the most bytes of a file of `FileBlocks` with so large groups."""
    total = num_groups * group_bytes
    return max(total // MAX_FILES, min(total // MIN_FILES, FILE_BYTES), group_bytes)


def unpack(
    get: Callable[[int, int], bytes],
    codec: Codec,
    sizes: Sizes,
    request: Request,
    out: np.ndarray,
    threads: ThreadPoolExecutor,
) -> float:
    """Write frames of compressed blocks to `out`. Each block is unpacked once. Return the seconds of all threads."""
    key = request.group * sizes[1] + request.env
    order = np.argsort(key, kind="stable")
    key, (group, env, at, row) = key[order], (x[order] for x in request)
    is_new = key[1:] != key[:-1]  # whether another block begins, and whether frames do not follow each other in both
    breaks = is_new | (at[1:] - at[:-1] != 1) | (row[1:] - row[:-1] != 1)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    ends = np.concatenate([starts[1:], [len(key)]])
    runs = list(zip(at[starts].tolist(), row[starts].tolist(), (ends - starts).tolist()))
    first = np.concatenate([[0], np.flatnonzero(is_new) + 1])
    bounds = [*np.searchsorted(starts, first).tolist(), len(runs)]
    jobs = list(zip(group[first].tolist(), env[first].tolist(), bounds, bounds[1:]))

    def fill(some: list[tuple[int, int, int, int]]) -> float:
        seconds = 0.0
        for of_group, of_env, begin, end in some:
            data, start = get(of_group, of_env), thread_time()
            block = codec.decode(data, sizes[2:])
            seconds += thread_time() - start
            for place, target, num in runs[begin:end]:
                out[target : target + num] = block[place : place + num]
        return seconds

    return sum(threads.map(fill, _shares(jobs, NUM_UNPACKERS)))


def _shares(jobs: list[Any], num: int) -> Iterator[list[Any]]:
    """Yield the jobs of each of `num` threads."""
    size = max(-(-len(jobs) // num), 1)
    return (jobs[i : i + size] for i in range(0, len(jobs), size))


def _groups(file: Mapping[str, Any]) -> range:
    return range(file["group"], file["group"] + file["num_groups"])


def _read_into(descriptor: int, offset: int, rows: np.ndarray, flags: int = 0) -> bool:
    """Fill an array from a place in a file. Raise OSError if the file is too short.

    With NOT_WAITING, return False if the disk would have to be read, or if that cannot be known.
    """
    view, done = rows.data.cast("B"), 0
    while done < len(view):
        try:
            num = os.preadv(descriptor, [view[done:]], offset + done, flags)
        except OSError:
            if flags:
                return False
            raise
        if not num:
            raise OSError(f"a file of the replay buffer ends at byte {offset + done}")
        done += num
    return True
