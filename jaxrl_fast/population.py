"""Numbers about several trainings: what their updates add up to, and statistics over seeds. float64, on the host."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Rows = Mapping[str, np.ndarray]  # [S, U]: a number for each seed and update
SCORES = ("episodes", "valid_steps", "return_sum", "return_min", "return_max", "length_sum", "longest_game")
WINDOW = 100  # episodes
MOST_STEPS = 27_000  # of a game that is waited for: half an hour of Atari
MOST_DRAWN = 2**22  # scores drawn anew at a time
MIDDLE = 0.025, 0.975  # the quantiles between which 95% lie
COUNT, SUM = "gradient_steps", "_sum"  # beside the one, metrics with the other are sums over so many steps


class Ledger:
    """Takes updates in chunks of any length and gives them out in records of one length.

    So what is written depends on the updates alone, not on how fast they came. With `most`, whole chunks are let go
    that so many newer updates make old.
    """

    def __init__(self, length: int, most: float = math.inf):
        self.length, self.most = length, most
        self.chunks: deque[Rows] = deque()
        self.available = 0  # updates in all chunks

    def add(self, rows: Rows) -> None:
        self.chunks.append(rows)
        self.available += _width(rows)
        while self.available - _width(self.chunks[0]) >= self.most:
            self.available -= _width(self.chunks.popleft())

    @property
    def rows(self) -> dict[str, np.ndarray]:
        """All that is left, in one; empty where nothing is."""
        if len(self.chunks) > 1:
            names = self.chunks[0]
            self.chunks = deque([{k: np.concatenate([c[k] for c in self.chunks], axis=1) for k in names}])
        return dict(self.chunks[0]) if self.available else {}

    def take(self, everything: bool = False, waiting: bool = False) -> Iterator[Rows]:
        """Whole records; with `everything` also the shorter one that is left, `waiting` not the one that ends now."""
        while self.available >= self.length + waiting or everything and self.available:
            rows = self.rows
            self.chunks = deque([{k: x[:, self.length :] for k, x in rows.items()}])
            self.available = _width(self.chunks[0])
            yield {k: x[:, : self.length] for k, x in rows.items()}


def _width(rows: Rows) -> int:
    """Updates."""
    return next(iter(rows.values())).shape[1]


class Episodes(NamedTuple):
    """The episodes that ended in an update, and the time since those before."""

    ended: int
    return_sum: float
    num_steps: int  # of one environment
    longest: int  # steps of a game that ended or went on


class Window:
    """The mean return of the last episodes: WINDOW or more, and all that ended in twice the time of the longest game.

    In less time short games would count for more than long ones where many environments begin together, and a policy
    that ends half of its games at once, well or badly, would be judged by these. No game counts as longer than
    MOST_STEPS.
    """

    def __init__(self):
        self.records: deque[Episodes] = deque()
        self.peaks: deque[int] = deque()  # the longest of the records, the longest of those after it, and so on
        self.waiting = Episodes(0, 0.0, 0, 0)  # since an episode ended
        self.episodes = self.num_steps = 0

    def add(self, ended: int, return_sum: float, num_steps: int, longest: int) -> None:
        """One more update."""
        num_steps, longest = self.waiting.num_steps + num_steps, max(self.waiting.longest, min(longest, MOST_STEPS))
        self.waiting = Episodes(0, 0.0, 0 if ended else num_steps, 0 if ended else longest)
        if ended:
            self._append(Episodes(ended, return_sum, num_steps, longest))
            while self._covers(self.episodes - self.records[0].ended, self.num_steps - self.records[0].num_steps):
                self._drop_first()

    def restore(self, records: Iterable[Episodes]) -> None:
        """Takes up the records that there were; the last one is `waiting`."""
        *ended, self.waiting = records
        for record in ended:
            self._append(record)

    def _append(self, record: Episodes) -> None:
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
        """Steps of the longest game."""
        return self.peaks[0] if self.peaks else 0

    @property
    def full(self) -> bool:
        return self._covers(self.episodes, self.num_steps)

    @property
    def mean(self) -> float:
        """NaN before the first episode has ended."""
        return sum(record.return_sum for record in self.records) / self.episodes if self.episodes else math.nan


def summarise(rows: Rows) -> list[dict[str, Any]]:
    """A record for each seed: of the games that ended, and the mean of everything else. None where nothing is known.

    An algorithm whose updates make more or fewer gradient steps gives sums (`loss_sum`) and their number instead.
    """
    totals = {k: np.asarray(rows[k], np.float64).sum(1) for k in ("episodes", "return_sum", "length_sum")}
    low, high = rows["return_min"].min(1), rows["return_max"].max(1)
    means = {k: np.asarray(x, np.float64).mean(1) for k, x in rows.items() if k not in SCORES}
    if COUNT in means:
        means = {k: x for k, x in means.items() if not k.endswith(SUM)} | _per_gradient_step(rows)
    records = []
    for i, episodes in enumerate(totals["episodes"]):
        some = max(episodes, 1)
        scores = {
            "episodes": int(episodes),
            "return_mean": finite(totals["return_sum"][i] / some) if episodes else None,
            "return_min": finite(low[i]) if episodes else None,
            "return_max": finite(high[i]) if episodes else None,
            "length_mean": finite(totals["length_sum"][i] / some) if episodes else None,
        }
        records.append(scores | {k: finite(x[i]) for k, x in means.items()})
    return records


def _per_gradient_step(rows: Rows) -> dict[str, np.ndarray]:
    """Means of what was summed over gradient steps, NaN where there were none; and how many there were."""
    count = np.asarray(rows[COUNT], np.float64).sum(1)
    totals = {k: np.asarray(x, np.float64).sum(1) for k, x in rows.items() if k.endswith(SUM) and k not in SCORES}
    means = {k.removesuffix(SUM): x / np.where(count > 0, count, np.nan) for k, x in totals.items()}
    return means | {COUNT: count}


def merge_seeds(rows: Rows) -> Rows:
    """[S, U] as [1, S * U]."""
    return {k: x.reshape(1, -1) for k, x in rows.items()}


def finite(x: Any) -> float | None:
    """A float that JSON knows, or None."""
    return float(x) if x is not None and np.isfinite(x) else None


def iqm(scores: np.ndarray, axis: int | tuple[int, ...] = 0) -> np.ndarray:
    """Inter-quartile mean: without the floor(n / 4) lowest and highest.

    Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice".
    """
    axes = (axis,) if isinstance(axis, int) else axis
    moved = np.moveaxis(np.asarray(scores, np.float64), axes, range(len(axes)))
    flat = np.sort(moved.reshape(-1, *moved.shape[len(axes) :]), axis=0)
    cut = flat.shape[0] // 4
    return flat[cut : flat.shape[0] - cut].mean(0)


def bootstrap(scores: np.ndarray, num_resamples: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of a 95% percentile interval of the IQM of scores [S, M, ...]: S seeds of M tasks.

    Stratified: the seeds of each task are drawn anew from those of that task (the same paper, section 4.1).
    """
    num_seeds, num_tasks = scores.shape[:2]
    chance = np.random.default_rng(0)
    means = []
    for _ in range(num_resamples):
        drawn = chance.integers(num_seeds, size=(num_seeds, num_tasks))
        means.append(iqm(scores[drawn, np.arange(num_tasks)], axis=(0, 1)))
    low, high = np.quantile(means, MIDDLE, axis=0)
    return low, high


def mean_interval(groups: Sequence[np.ndarray], num_resamples: int = 2000) -> tuple[float, float]:
    """Lower and upper end of a 95% percentile interval of the mean of all scores, each group those of one training.

    Groups are drawn anew, if there are several, and scores within each: Efron and Tibshirani 1993, chapter 8.
    """
    chance = np.random.default_rng(0)
    total, count = np.zeros(num_resamples), np.zeros(num_resamples)
    for _ in groups:
        drawn = chance.integers(len(groups), size=num_resamples)
        for i, scores in enumerate(groups):
            places = np.flatnonzero(drawn == i)
            scores = np.asarray(scores, np.float64)
            some = max(MOST_DRAWN // scores.size, 1)  # rows at a time, for all would take 32 kB a score
            for part in (places[at : at + some] for at in range(0, places.size, some)):
                total[part] += scores[chance.integers(scores.size, size=(part.size, scores.size))].sum(1)
            count[places] += scores.size
    low, high = np.quantile(total / count, MIDDLE)
    return float(low), float(high)
