"""Limit how often something happens."""

import time


class Throttle:
    """A limit: ready at most once every `every` seconds, or every `share` of the time so far if that is longer."""

    def __init__(self, every: float, first: bool = False, share: float = 0.0):
        self.every, self.share, self.start = every, share, time.perf_counter()
        self.last = -float("inf") if first else self.start

    def ready(self) -> bool:
        """Return whether the interval has passed, and if so start the next one."""
        if not self.elapsed():
            return False
        self.last = time.perf_counter()
        return True

    def elapsed(self) -> bool:
        """Return whether the interval has passed, without starting the next one."""
        now = time.perf_counter()
        return now - self.last >= max(self.every, self.share * (now - self.start))
