"""Read the batches of an update in threads, while the program learns from earlier batches."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

NUM_BATCHES = 2  # batches that are read at a time
MAX_BYTES = 2**28  # limit of the batches of a request that have been read, but not yet taken


class Ahead:
    """The batches of one caller, which requests the batches of an update and takes them one after another."""

    def __init__(self, threads: ThreadPoolExecutor):
        self.threads = threads
        self.spare: list[np.ndarray] = []  # arrays that have been taken, to be filled again

    def request(self, read: Callable[[int, np.ndarray], None], shape: tuple[int, int, int], num: int) -> None:
        """Begin to read `num` batches of a shape [P, M, bytes], each by `read(i, array)`."""
        self.read, self.shape, self.num = read, shape, num
        self.depth = max(MAX_BYTES // max(int(np.prod(shape)), 1), 1)
        self.pending: dict[int, Future[np.ndarray]] = {}
        self.num_begun = 0
        self._begin(0)

    def take(self, i: int, out: np.ndarray) -> None:
        """Wait for batch i, which follows the last one taken, and copy it."""
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
