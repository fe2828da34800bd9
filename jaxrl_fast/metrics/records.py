"""Collect the metrics of updates and merge them into records."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_fast.metrics.statistics import finite

Rows = Mapping[str, np.ndarray]  # metric: [S, U], a value for each seed and update
SCORES = ("episodes", "valid_steps", "return_sum", "return_min", "return_max", "length_sum", "longest_episode")
QUARANTINED = "quarantined"  # steps that failed, if environments are in quarantine
# If an update reports GRADIENT_STEPS, metrics with SUM_SUFFIX are sums over that number of steps.
GRADIENT_STEPS, SUM_SUFFIX = "gradient_steps", "_sum"


class RecordBuffer:
    """A buffer that accepts updates in chunks of any length and returns records of a fixed length.

    The records therefore depend on the updates alone, not on how they were dispatched. With `max_updates`, the oldest
    chunks are dropped as long as that many updates remain.
    """

    def __init__(self, length: int, max_updates: float = math.inf):
        self.length, self.max_updates = length, max_updates
        self.chunks: deque[Rows] = deque()
        self.available = 0  # updates in all chunks

    def add(self, rows: Rows) -> None:
        """Append a chunk."""
        self.chunks.append(rows)
        self.available += _num_updates(rows)
        while self.available - _num_updates(self.chunks[0]) >= self.max_updates:
            self.available -= _num_updates(self.chunks.popleft())

    @property
    def rows(self) -> dict[str, np.ndarray]:
        """Return all updates in the buffer as one chunk; {} if it is empty."""
        if len(self.chunks) > 1:
            names = self.chunks[0]
            self.chunks = deque([{k: np.concatenate([c[k] for c in self.chunks], axis=1) for k in names}])
        return dict(self.chunks[0]) if self.available else {}

    def take(self, everything: bool = False, hold_last: bool = False) -> Iterator[Rows]:
        """Yield and remove complete records.

        Args:
            everything: Also yield the last, shorter record.
            hold_last: Keep a record that ends with the last update, because an evaluation may follow.
        """
        while self.available >= self.length + hold_last or everything and self.available:
            rows = self.rows
            self.chunks = deque([{k: x[:, self.length :] for k, x in rows.items()}])
            self.available = _num_updates(self.chunks[0])
            yield {k: x[:, : self.length] for k, x in rows.items()}


def _num_updates(rows: Rows) -> int:
    """Return the number of updates in a chunk."""
    return next(iter(rows.values())).shape[1]


def summarize(rows: Rows) -> list[dict[str, Any]]:
    """Return a record for each seed: statistics of ended episodes, and the mean of everything else; None if unknown.

    Algorithms with a varying number of gradient steps in an update report sums (`loss_sum`) and that number instead.
    """
    totals = {k: np.asarray(rows[k], np.float64).sum(1) for k in ("episodes", "return_sum", "length_sum")}
    low, high = rows["return_min"].min(1), rows["return_max"].max(1)
    means = {k: np.asarray(x, np.float64).mean(1) for k, x in rows.items() if not _is_score(k)}
    if GRADIENT_STEPS in means:
        means = {k: x for k, x in means.items() if not k.endswith(SUM_SUFFIX)} | _per_gradient_step(rows)
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
        if QUARANTINED in rows:
            scores[QUARANTINED] = int(rows[QUARANTINED][i].sum())
        records.append(scores | _by_player(rows, i) | {k: finite(x[i]) for k, x in means.items()})
    return records


def _is_score(name: str) -> bool:
    """Return whether a metric is a count or a sum of episodes, of all players or of one: "return_sum/left"."""
    return name.partition("/")[0] in (*SCORES, QUARANTINED)


def _by_player(rows: Rows, i: int) -> dict[str, float | None]:
    """Return the mean return of each player for seed i: "return_mean/left", None if no episode has ended."""
    found: dict[str, float | None] = {}
    for name in rows:
        what, slash, player = name.partition("/")
        if what == "return_sum" and slash:
            episodes = np.asarray(rows[f"episodes/{player}"][i], np.int64).sum()
            total = np.asarray(rows[name][i], np.float64).sum()
            found[f"return_mean/{player}"] = finite(total / episodes) if episodes else None
    return found


def _per_gradient_step(rows: Rows) -> dict[str, np.ndarray]:
    """Return the mean of each sum over gradient steps, NaN without gradient steps; and the number of gradient steps."""
    count = np.asarray(rows[GRADIENT_STEPS], np.float64).sum(1)
    sums = {k: x for k, x in rows.items() if k.endswith(SUM_SUFFIX) and k not in SCORES}
    totals = {k: np.asarray(x, np.float64).sum(1) for k, x in sums.items()}
    means = {k.removesuffix(SUM_SUFFIX): x / np.where(count > 0, count, np.nan) for k, x in totals.items()}
    return means | {GRADIENT_STEPS: count}


def merge_seeds(rows: Rows) -> Rows:
    """Return rows [S, U] as [1, S * U]."""
    return {k: x.reshape(1, -1) for k, x in rows.items()}
