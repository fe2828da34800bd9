"""Read the batches of an update in threads, while the program learns from the ones before."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

NUM_BATCHES = 2  # that are read at a time
MAX_BYTES = 2**28  # of batches that have been read and not been taken


class Ahead:
    """The batches of one caller. It requests those of an update, and then takes one after another."""

    def __init__(self, threads: ThreadPoolExecutor):
        self.threads = threads
        self.spare: list[np.ndarray] = []  # arrays that have been taken, to be filled again
        self.pending: dict[int, Future[np.ndarray]] = {}
        self.num = self.num_begun = 0

    def request(self, read: Callable[[int, np.ndarray], None], num: int, shape: tuple[int, ...]) -> None:
        """Begin to read batches 0 to num - 1, each an array of bytes, by `read(i, array)`."""
        assert not self.pending, "all batches of the last update were taken"
        self.read, self.num, self.num_begun, self.shape = read, num, 0, shape
        self.depth = max(MAX_BYTES // max(int(np.prod(shape)), 1), 1)
        self._begin(0)

    def take(self, i: int, out: np.ndarray) -> None:
        """Wait for batch i, and copy it."""
        self._begin(i)
        batch = self.pending.pop(i).result()
        out[...] = batch
        self.spare.append(batch)

    def _begin(self, i: int) -> None:
        """Begin with the batches that follow batch i."""
        for j in range(self.num_begun, min(i + self.depth, self.num)):
            batch = self.spare.pop() if self.spare else np.empty(self.shape, np.uint8)
            self.pending[j] = self.threads.submit(self._read, j, batch)
            self.num_begun = j + 1

    def _read(self, i: int, batch: np.ndarray) -> np.ndarray:
        self.read(i, batch)
        return batch
