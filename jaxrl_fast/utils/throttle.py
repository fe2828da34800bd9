"""What is not to happen too often."""

import time


class Throttle:
    """True at most once in so many seconds, or in that share of the time so far where it is more."""

    def __init__(self, every: float, first: bool = False, share: float = 0.0):
        self.every, self.share, self.began = every, share, time.perf_counter()
        self.last = -float("inf") if first else self.began

    def due(self) -> bool:
        if not self.over():
            return False
        self.last = time.perf_counter()
        return True

    def over(self) -> bool:
        """Whether it would be due; asking does not begin another interval."""
        now = time.perf_counter()
        return now - self.last >= max(self.every, self.share * (now - self.began))
