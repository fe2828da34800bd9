"""Read the batches of an update in threads, while the program acts or learns from earlier batches."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

NUM_BATCHES = 2  # batches that are read at a time
MAX_BYTES = 2**28  # limit of the batches of a request that have been read, but not yet taken


class Ahead:
    """The batches of one caller, which requests the batches of an update and takes them one after another.

    The batches of the next update may be requested before all batches of this update are taken.
    """

    def __init__(self, threads: ThreadPoolExecutor):
        self.threads = threads
        self.requests: deque[Request] = deque(maxlen=2)
        self.spare: list[np.ndarray] = []  # arrays that have been taken, to be filled again

    def request(self, read: Callable[[int, np.ndarray], None], places: np.ndarray, num: int, num_bytes: int) -> None:
        """Begin to read the first `num` of K batches at places [2, P, K, M], each by `read(i, array [P, M, bytes])`."""
        self.requests.append(Request(self, read, places, num, num_bytes))

    def take(self, i: int, places: np.ndarray, out: np.ndarray) -> bool:
        """Wait for batch i at places [2, P, M], and copy it. Return False if it was not requested."""
        request = next((request for request in self.requests if request.has(i, places)), None)
        if request:
            request.take(i, out)
        return request is not None


class Request:
    """The batches of one update."""

    def __init__(
        self, of: Ahead, read: Callable[[int, np.ndarray], None], places: np.ndarray, num: int, num_bytes: int
    ):
        """Begin with the first batches."""
        _, num_places, _, num_rows = places.shape
        self.threads, self.spare, self.read, self.places, self.num = of.threads, of.spare, read, places, num
        self.shape = num_places, num_rows, num_bytes
        self.depth = max(MAX_BYTES // max(int(np.prod(self.shape)), 1), 1)
        self.pending: dict[int, Future[np.ndarray]] = {}
        self.num_begun = 0
        self._begin(0)

    def has(self, i: int, places: np.ndarray) -> bool:
        """Return whether batch i is at these places, and was not yet taken."""
        return self.num > i >= self.num_begun - len(self.pending) and np.array_equal(self.places[:, :, i], places)

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
