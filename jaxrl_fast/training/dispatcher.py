"""Chunks of updates for the device: while it computes one, the next one waits already."""

import time
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_fast import loop
from jaxrl_fast.parallel.program import NONFINITE_KEY, Program

CHUNK_S = 0.5  # what a chunk aims at: short enough to stop at once, long enough that the host costs nothing
GROWTH = 8  # of a chunk's length from one to the next


class PendingChunk(NamedTuple):
    """A chunk that the device was given."""

    rows: Any  # metrics, still on the device
    num_updates: int
    began: float  # when it was given
    ended: float | None  # when it was done, if giving it meant waiting for it


class ChunkResult(NamedTuple):
    """A chunk that has been computed."""

    rows: dict[str, np.ndarray]  # metrics, [S, U]
    finite: np.ndarray  # [S] bool: whether all parameters were finite at its end
    num_updates: int
    duration: float  # seconds
    idle: float  # seconds before it that the device had nothing to do


class Dispatcher:
    """Gives a program's updates to the device, and takes their metrics from it."""

    def __init__(self, program: Program, state: loop.TrainState, num_seeds: int, num_given: int = 0):
        self.program, self.num_seeds = program, num_seeds
        self.state = state  # after all that was given
        self.num_given = num_given  # updates, in all processes of a run
        self.queue: deque[PendingChunk] = deque()
        self.length, self.rate = 1, 0.0  # updates in the last chunk, updates a second
        self.mark_free()

    def mark_free(self) -> None:
        """From now on the device waits for chunks: what it did before was no training."""
        self.free_since = time.perf_counter()

    @property
    def num_waiting(self) -> int:
        """Chunks that were given and not taken."""
        return len(self.queue)

    def give(self, boundary: int) -> None:
        """A chunk of about CHUNK_S that ends at update `boundary` at the latest."""
        by_clock = max(min(int(self.rate * CHUNK_S), self.length * GROWTH), 1)
        self.length = min(by_clock, self.program.capacity, boundary - self.num_given)
        began = time.perf_counter()
        self.state, rows = self.program.chunk(self.state, np.asarray(self.length, np.int32))
        ended = time.perf_counter() if _ready(rows) else None
        self.queue.append(PendingChunk(rows, self.length, began, ended))
        self.latest_began = began
        self.num_given += self.length

    def take(self) -> ChunkResult:
        """Waits for the chunk that was given first of those that wait."""
        chunk = self.queue.popleft()
        # If it is done already, nobody knows since when: the device may have idled until the next one was given.
        idle_until = self.latest_began if chunk.ended is None and _ready(chunk.rows) else chunk.began
        idle = max(idle_until - self.free_since, 0.0)
        rows = jax.device_get(jax.block_until_ready(chunk.rows))
        now = max(chunk.ended or time.perf_counter(), self.free_since)  # it may be known to be done before the last one
        duration, self.free_since = now - self.free_since, now
        self.rate = chunk.num_updates / max(duration, 1e-9)
        rows = {k: x.reshape(-1, x.shape[-1])[: self.num_seeds, : chunk.num_updates] for k, x in rows.items()}
        return ChunkResult(rows, ~rows.pop(NONFINITE_KEY)[:, -1], chunk.num_updates, duration, idle)


def _ready(rows: Any) -> bool:
    return all(x.is_ready() for x in rows.values())
