"""Store a replay buffer's frames on the host: the last R rows of N environments, as bytes.

Rows are written in order. Each block holds BLOCK rows of one environment, and a group the blocks of all environments.
The newest group is raw until it is full. Then a thread hands it to a `Blocks`, while the program computes.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from jaxrl_fast.replay.host import ahead
from jaxrl_fast.replay.host.blocks import ArrayBlocks, Blocks, FileBlocks, PackedBlocks, Request
from jaxrl_fast.replay.host.codec import RAW, ZSTD
from jaxrl_fast.replay.host.journal import Journal

BLOCK = 16  # rows: more compress better, fewer are unpacked faster
MAX_PENDING = 4  # full groups that are not yet written
ABANDONED: list[Any] = []  # objects that running programs may hold by their address


Newest = tuple[int, dict[int, np.ndarray]]  # the number of rows, and the groups of them that are not yet written


class Shape(NamedTuple):
    """The size of a buffer."""

    num_rows: int  # R
    num_envs: int  # N
    num_bytes: int  # of one frame


class HostBuffer:
    """The frames of one shard. Rows are numbered since the beginning; row t of R is at place t mod R."""

    def __init__(self, shape: Shape, on_disk: bool, compressed: bool, num_workers: int = 1):
        """Prepare a buffer; `open` allocates it. All gradient workers make the same calls, and the first one writes."""
        self.shape, self.on_disk, self.compressed = shape, on_disk, compressed
        self.num_workers = num_workers
        self.num_groups = -(-shape.num_rows // BLOCK) + 1  # kept when full
        self.calls: list[Any] = []  # objects that a compiled program holds by their address
        self.lock = threading.Lock()
        self.is_open = False

    def open(self, folder: Path) -> None:
        """Allocate an empty buffer; its files are in `folder`."""
        shape, sizes = self.shape, (self.num_groups, self.shape.num_envs, BLOCK, self.shape.num_bytes)
        codec = ZSTD if self.compressed else RAW
        self.journal = Journal(folder, shape.num_envs)
        if self.on_disk:
            self.blocks: Blocks = FileBlocks(sizes, codec, self.journal)
        else:
            self.blocks = PackedBlocks(sizes, codec) if self.compressed else ArrayBlocks(sizes)
        self.writer = ThreadPoolExecutor(1, "replay-writer")
        self.readers = ThreadPoolExecutor(ahead.NUM_BATCHES, "replay-ahead")
        self.ahead = [ahead.Ahead(self.readers) for _ in range(self.num_workers)]
        self.count, self.seen = 0, [0] * self.num_workers  # rows written, and rows that each worker has handed over
        self.newest = self._empty_group()
        self.pending: dict[int, tuple[np.ndarray, Future[None]]] = {}  # full groups that are being written
        self.num_saved = 0  # groups that the journal has
        self.read_time = self.write_time = 0.0  # seconds
        self.is_open = True

    def close(self) -> None:
        """Free everything. A program that is still running fails at its next call."""
        if not self.is_open:
            return
        self.is_open = False
        self.writer.shutdown(cancel_futures=True)
        self.readers.shutdown(cancel_futures=True)
        self.blocks.close()
        self.journal.close()
        del self.newest, self.blocks, self.pending, self.ahead
        if sys.exc_info()[0]:
            ABANDONED.append(self.calls)

    def put(self, worker: int, first_row: int, frames: np.ndarray) -> None:
        """Write frames [T, N, B] at the places from `first_row` on, which follow the newest row."""
        with self.lock:
            self._check_open()
            self.seen[worker] += len(frames)
            if self.seen[worker] <= self.count:  # another worker has written them
                return
            assert first_row == self.count % self.shape.num_rows, "the frames are not those of this state"
            while len(frames):
                at = self.count % BLOCK
                part, frames = frames[: BLOCK - at], frames[BLOCK - at :]
                self.newest[:, at : at + len(part)] = part.swapaxes(0, 1)
                self.count += len(part)
                if self.count % BLOCK == 0:
                    self._hand_over(self.count // BLOCK - 1)

    def get(self, row: np.ndarray, env: np.ndarray, num: int, out: np.ndarray) -> None:
        """Write the frames at the first `num` of places [P, K, M] to `out` [P, K, M, B]; zeros where no row is yet."""
        start = perf_counter()
        target = np.arange(row.size).reshape(row.shape)[:, :num].ravel()
        places = row[:, :num].ravel(), env[:, :num].ravel()
        self._read(self._newest_rows(), *places, target, out.reshape(-1, self.shape.num_bytes))
        self.read_time += perf_counter() - start

    def request(self, worker: int, row: np.ndarray, env: np.ndarray, num: int) -> None:
        """Begin to read the first `num` of K batches at places [P, K, M].

        They must be taken before a `put` overwrites their rows, and before the next request.
        """
        newest, places = self._newest_rows(), np.stack([row, env])
        read = lambda i, batch: self._read_batch(newest, places[:, :, i], batch)
        self.ahead[worker].request(read, (len(row), row.shape[2], self.shape.num_bytes), num)

    def take(self, worker: int, i: int, out: np.ndarray) -> None:
        """Write the frames [P, M, B] of batch i of those requested, which follows the last one taken, to `out`."""
        start = perf_counter()
        with self.lock:
            self._check_open()
        self.ahead[worker].take(i, out)
        self.read_time += perf_counter() - start

    def _read_batch(self, newest: Newest, places: np.ndarray, out: np.ndarray) -> None:
        """Write the frames at places [2, P, M] to `out` [P, M, B]."""
        row, env = places.reshape(2, -1)
        self._read(newest, row, env, np.arange(row.size), out.reshape(-1, self.shape.num_bytes))

    def _newest_rows(self) -> Newest:
        with self.lock:
            self._check_open()
            raw = {group: data for group, (data, _) in self.pending.items()}
            return self.count, raw | ({self.count // BLOCK: self.newest} if self.count % BLOCK else {})

    def _read(
        self,
        newest: Newest,
        place: np.ndarray,
        env: np.ndarray,
        target: np.ndarray,
        out: np.ndarray,
    ) -> None:
        """Write the frames at places [M] of environments [M] to rows `target` [M], which ascend, of `out` [..., B]."""
        count, raw = newest
        t = count - 1 - (count - 1 - place.astype(np.int64)) % self.shape.num_rows  # the newest row at that place
        group, at = np.divmod(t, BLOCK)
        for newer, data in raw.items():
            here = np.flatnonzero(group == newer)
            out[target[here]] = data[env[here], at[here]]
        out[target[t < 0]] = 0
        full = (t >= 0) & (group < min(raw, default=sys.maxsize))
        if full.any():
            self.blocks.read(Request(group[full], env[full], at[full], target[full]), out)

    def save(self) -> Callable[[], dict[str, Any]]:
        """Record the current state. Return a function that writes new groups and returns the argument of `load`."""
        self._flush()
        count, full = self.count, self.count // BLOCK
        oldest = max(count - self.shape.num_rows, 0) // BLOCK
        part = self.newest[:, : count % BLOCK].copy()
        newest = [self.blocks.codec.encode(block) for block in part] if part.size else []
        if self.on_disk:
            add = lambda: None
            segments = self.journal.segments(oldest)
        else:
            first = max(self.num_saved, oldest)
            new = [(group, self.blocks.blocks_of(group)) for group in range(first, full)]
            add = lambda: self._write_new(new, full, oldest)
            segments = None

        def write() -> dict[str, Any]:
            add()
            kept = self.journal.segments(oldest) if segments is None else segments
            self.journal.sync(kept)
            files = [*kept, *self.journal.write_apart(newest)]
            return {"count": count, "block": BLOCK, "shape": list(self.shape), "files": files}

        return write

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved buffer. Raise ValueError for another form, which another version may have saved."""
        form, own = (saved["block"], *saved["shape"]), (BLOCK, *self.shape)
        if form != own:
            raise ValueError(f"the saved replay must have block and shape {own}, got {form}; train it again")
        count = self.count = saved["count"]
        self.seen = [count] * self.num_workers
        at = count % BLOCK
        for file in saved["files"]:
            if file["group"] is None:
                for env, block in enumerate(next(iter(self.journal.read(file)))):
                    self.newest[env, :at] = self.blocks.codec.decode(block, (at, self.shape.num_bytes))
            else:
                self.blocks.load(file, self.journal)
        self.num_saved = count // BLOCK

    def prune(self, kept: list[Mapping[str, Any]]) -> None:
        """Delete the files that are not part of these saves and not in use."""
        self.journal.prune({file["name"] for saved in kept for file in saved["files"]})

    def report(self) -> dict[str, float]:
        """Return the bytes of the full blocks, and the seconds spent on reading, writing and compression.

        The program waits for reads. Writes and a part of the codec's time pass while it computes.
        """
        kept = self.blocks.num_bytes
        return {
            "bytes": kept,
            "compression_ratio": self.blocks.num_raw_bytes / kept if kept else 1.0,
            "read_time_s": self.read_time,
            "write_time_s": self.write_time,
            "codec_time_s": self.blocks.codec_time,
        }

    def _empty_group(self) -> np.ndarray:
        return np.zeros((self.shape.num_envs, BLOCK, self.shape.num_bytes), np.uint8)

    def _check_open(self) -> None:
        if not self.is_open:
            raise RuntimeError("the replay buffer is closed")

    def _hand_over(self, group: int) -> None:
        """Give a full group to the writer; wait for the oldest one if too many are pending."""
        done = [other for other, (_, future) in self.pending.items() if future.done()]
        if len(self.pending) - len(done) >= MAX_PENDING:
            done.append(next(other for other in self.pending if other not in done))
        for other in done:
            self._finish(other)
        data, self.newest = self.newest, self._empty_group()
        self.pending[group] = data, self.writer.submit(self._write, group, data)

    def _write(self, group: int, data: np.ndarray) -> None:
        start = perf_counter()
        self.blocks.write(group, data)
        self.write_time += perf_counter() - start

    def _flush(self) -> None:
        """Wait until all full groups are written."""
        with self.lock:
            for group in list(self.pending):
                self._finish(group)

    def _finish(self, group: int) -> None:
        """Wait until a full group is written. If writing failed, each call raises: later groups would replace it."""
        self.pending[group][1].result()
        del self.pending[group]

    def _write_new(self, new: list[tuple[int, list[Any]]], full: int, oldest: int) -> None:
        """Write groups to a new file of the journal."""
        if not new:
            return
        self.journal.begin(0)
        try:
            for group, blocks in new:
                self.journal.append(group, blocks)
        except BaseException:
            self.journal.cancel()
            raise
        self.journal.end()
        self.journal.drop(oldest)
        self.num_saved = full
