"""Compute the mean return of the last episodes."""

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

WINDOW = 100  # episodes
MAX_STEPS = 27_000  # longest episode that the window takes into account: half an hour of Atari


class EndedEpisodes(NamedTuple):
    """The episodes that ended in an update, and the steps since the last update with ended episodes."""

    ended: int
    return_sum: float
    num_steps: int  # steps of one environment
    longest: int  # steps of the longest episode, ended or not


class EpisodeWindow:
    """The mean return of the last episodes: at least WINDOW, and all of the last 2 x (longest episode) steps.

    When many environments start together, short episodes end first. A shorter window would overrepresent them.
    Episodes count as at most MAX_STEPS long.
    """

    def __init__(self):
        self.records: deque[EndedEpisodes] = deque()
        self.peaks: deque[int] = deque()  # descending: the longest of all records, of those after it, and so on
        self.waiting = EndedEpisodes(0, 0.0, 0, 0)  # since the last ended episode
        self.episodes = self.num_steps = 0

    def add(self, ended: int, return_sum: float, num_steps: int, longest: int) -> None:
        """Add the episodes of an update: their number, sum of returns, steps, and longest episode."""
        num_steps, longest = self.waiting.num_steps + num_steps, max(self.waiting.longest, min(longest, MAX_STEPS))
        self.waiting = EndedEpisodes(0, 0.0, 0 if ended else num_steps, 0 if ended else longest)
        if ended:
            self._append(EndedEpisodes(ended, return_sum, num_steps, longest))
            while self._covers(self.episodes - self.records[0].ended, self.num_steps - self.records[0].num_steps):
                self._drop_first()

    def restore(self, records: Iterable[EndedEpisodes]) -> None:
        """Restore saved records; the last one is `waiting`."""
        *ended, self.waiting = records
        for record in ended:
            self._append(record)

    def _append(self, record: EndedEpisodes) -> None:
        """Append a record and update the sums and peaks."""
        self.records.append(record)
        self.episodes += record.ended
        self.num_steps += record.num_steps
        while self.peaks and self.peaks[-1] < record.longest:
            self.peaks.pop()
        self.peaks.append(record.longest)

    def _drop_first(self) -> None:
        """Remove the oldest record."""
        first = self.records.popleft()
        self.episodes -= first.ended
        self.num_steps -= first.num_steps
        if first.longest == self.peaks[0]:
            self.peaks.popleft()

    def _covers(self, episodes: int, num_steps: int) -> bool:
        """Return whether these numbers of episodes and steps are sufficient."""
        return episodes >= WINDOW and num_steps >= 2 * self.longest

    @property
    def longest(self) -> int:
        """Return the steps of the longest episode in the window."""
        return self.peaks[0] if self.peaks else 0

    @property
    def full(self) -> bool:
        """Return whether the window has sufficient episodes and steps."""
        return self._covers(self.episodes, self.num_steps)

    @property
    def mean(self) -> float:
        """Return the mean return, or NaN before the first episode has ended."""
        return sum(record.return_sum for record in self.records) / self.episodes if self.episodes else math.nan
