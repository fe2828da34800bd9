"""Collect the numbers of updates and merge them into records."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_fast.metrics.statistics import finite

Rows = Mapping[str, np.ndarray]  # [S, U]: a number for each seed and update
SCORES = ("episodes", "valid_steps", "return_sum", "return_min", "return_max", "length_sum", "longest_episode")
COUNT, SUM = "gradient_steps", "_sum"  # beside the one, metrics with the other are sums over so many steps


class RecordBuffer:
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


def summarize(rows: Rows) -> list[dict[str, Any]]:
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
            "episode_length_mean": finite(totals["length_sum"][i] / some) if episodes else None,
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
