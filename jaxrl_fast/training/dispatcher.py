"""Submit chunks of updates to the device: while one is computed, the next one is already queued."""

import time
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_fast import loop
from jaxrl_fast.parallel import team
from jaxrl_fast.parallel.program import NONFINITE_KEY, Program
from jaxrl_fast.utils.memory import nbytes
from jaxrl_fast.utils.signals import interruptible

CHUNK_S = 0.5  # target seconds of a chunk: short enough to stop promptly, long enough to hide the host's work
COPIED_BYTES = 2**26  # of a state that each chunk copies: the target is CHUNK_S longer for each
GROWTH = 8  # the largest ratio of the lengths of successive chunks


class PendingChunk(NamedTuple):
    """A chunk that was submitted."""

    rows: Any  # metrics, still on the device
    num_updates: int
    start: float  # when it was submitted
    end: float | None  # when it was done, if the submission blocked until then
    before: loop.TrainState | None  # the state before it, if that is kept


class ChunkResult(NamedTuple):
    """A chunk that has been computed."""

    rows: dict[str, np.ndarray]  # metrics, [S, U]
    finite: np.ndarray  # [S] bool: whether all parameters were finite at its end
    num_updates: int
    duration: float  # seconds
    idle: float  # seconds before it in which the device was idle


class Dispatcher:
    """The queue of a program's updates on the device, and their metrics."""

    def __init__(self, program: Program, state: loop.TrainState, num_seeds: int, num_submitted: int = 0):
        """Begin with a state after `num_submitted` updates."""
        self.program, self.num_seeds = program, num_seeds
        self.before: loop.TrainState | None = None  # the state before the chunk that is being submitted, if kept
        self.submitting = False
        self.state = state  # after all submitted updates
        self.num_submitted = num_submitted  # updates, those before a resume included
        self.queue: deque[PendingChunk] = deque()
        copied = nbytes(state) if program.keeps_state else 0
        self.chunk_s = CHUNK_S * (1 + copied / COPIED_BYTES)
        self.length, self.rate = 1, 0.0  # updates in the last chunk, updates a second
        self.latest_start = 0.0  # of the newest chunk
        self.mark_idle()

    def mark_idle(self) -> None:
        """Count the device as idle from now. Its work until now does not count as training."""
        self.idle_since = time.perf_counter()

    @property
    def num_pending(self) -> int:
        """Return the number of chunks that were submitted and not collected."""
        return len(self.queue)

    def submit(self, limit: int) -> None:
        """Submit a chunk of about `chunk_s` that ends at update `limit` at the latest."""
        by_clock = lambda: max(min(int(self.rate * self.chunk_s), self.length * GROWTH), 1)
        self.length = min(team.current().decide(by_clock), self.program.capacity, limit - self.num_submitted)
        self.before = self.state if self.program.keeps_state else None
        self.submitting = True
        start = time.perf_counter()
        length = np.asarray(self.length, np.int32)
        self.state, rows = interruptible(self.program.chunk, self.state, length)  # may block until it is computed
        end = time.perf_counter() if _ready(rows) else None
        self.queue.append(PendingChunk(rows, self.length, start, end, self.before))
        self.submitting, self.before = False, None
        self.latest_start = start
        self.num_submitted += self.length

    def collect(self) -> ChunkResult:
        """Wait for the oldest pending chunk."""
        chunk = self.queue[0]
        # If it is done already, its end is unknown: the device may have idled until the next one was submitted.
        idle_until = self.latest_start if chunk.end is None and _ready(chunk.rows) else chunk.start
        idle = max(idle_until - self.idle_since, 0.0)
        rows = jax.device_get(interruptible(jax.block_until_ready, chunk.rows))
        now = max(chunk.end or time.perf_counter(), self.idle_since)  # its recorded end may precede the last chunk's
        duration, self.idle_since = now - self.idle_since, now
        self.rate = chunk.num_updates / max(duration, 1e-9)
        self.queue.popleft()
        rows = {k: x.reshape(-1, x.shape[-1])[: self.num_seeds, : chunk.num_updates] for k, x in rows.items()}
        return ChunkResult(rows, ~rows.pop(NONFINITE_KEY)[:, -1], chunk.num_updates, duration, idle)

    def discard_pending(self) -> bool:
        """Return to the state after the last collected chunk, when a chunk has failed. False if it was not kept."""
        if not (self.queue or self.submitting):
            return True
        state = self.queue[0].before if self.queue else self.before
        self.queue.clear()
        if state is not None:
            self.state = state
        return state is not None


def _ready(rows: Any) -> bool:
    return all(x.is_ready() for x in rows.values())
