"""The mean return of the last episodes."""

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

WINDOW = 100  # episodes
MAX_STEPS = 27_000  # of an episode that is waited for: half an hour of Atari


class EndedEpisodes(NamedTuple):
    """The episodes that ended in an update, and the steps since the ones before."""

    ended: int
    return_sum: float
    num_steps: int  # of one environment
    longest: int  # steps of the longest episode that ended or continues


class EpisodeWindow:
    """The mean return of the last episodes: WINDOW or more, and all that ended in twice the time of the longest one.

    In less time short episodes would count for more than long ones if many environments begin together. A policy that
    ends half of its episodes at once would be judged by these. No episode counts as longer than MAX_STEPS.
    """

    def __init__(self):
        self.records: deque[EndedEpisodes] = deque()
        self.peaks: deque[int] = deque()  # the longest of the records, the longest of those after it, and so on
        self.waiting = EndedEpisodes(0, 0.0, 0, 0)  # since an episode ended
        self.episodes = self.num_steps = 0

    def add(self, ended: int, return_sum: float, num_steps: int, longest: int) -> None:
        """Add an update."""
        num_steps, longest = self.waiting.num_steps + num_steps, max(self.waiting.longest, min(longest, MAX_STEPS))
        self.waiting = EndedEpisodes(0, 0.0, 0 if ended else num_steps, 0 if ended else longest)
        if ended:
            self._append(EndedEpisodes(ended, return_sum, num_steps, longest))
            while self._covers(self.episodes - self.records[0].ended, self.num_steps - self.records[0].num_steps):
                self._drop_first()

    def restore(self, records: Iterable[EndedEpisodes]) -> None:
        """Restore the records; the last one is `waiting`."""
        *ended, self.waiting = records
        for record in ended:
            self._append(record)

    def _append(self, record: EndedEpisodes) -> None:
        self.records.append(record)
        self.episodes += record.ended
        self.num_steps += record.num_steps
        while self.peaks and self.peaks[-1] < record.longest:
            self.peaks.pop()
        self.peaks.append(record.longest)

    def _drop_first(self) -> None:
        first = self.records.popleft()
        self.episodes -= first.ended
        self.num_steps -= first.num_steps
        if first.longest == self.peaks[0]:
            self.peaks.popleft()

    def _covers(self, episodes: int, num_steps: int) -> bool:
        return episodes >= WINDOW and num_steps >= 2 * self.longest

    @property
    def longest(self) -> int:
        """Steps of the longest episode."""
        return self.peaks[0] if self.peaks else 0

    @property
    def full(self) -> bool:
        return self._covers(self.episodes, self.num_steps)

    @property
    def mean(self) -> float:
        """NaN before the first episode has ended."""
        return sum(record.return_sum for record in self.records) / self.episodes if self.episodes else math.nan
