"""Turn the metrics of updates into records, and track each seed's training. On the host, in float64."""

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_fast.metrics import statistics
from jaxrl_fast.metrics.records import QUARANTINED, SUM_SUFFIX, RecordBuffer, Rows, summarize
from jaxrl_fast.metrics.window import EndedEpisodes, EpisodeWindow

CLOCKS = ("train_time_s", "wall_time_s")
OF_EPISODES = ("episodes", "return_sum", "longest_episode")
MAX_QUARANTINED_SHARE, MIN_QUARANTINED = 0.01, 100  # a run stops once its failed steps exceed both
NUMBERS = ("solved", "diverged", "valid_steps", "quarantined", "updates", "recorded", "recorded_time", "evaluations")
Solved = tuple[int, float]  # environment steps and seconds of training until then


class NotFinite(NamedTuple):
    """A metric that is not finite."""

    member: int  # its index
    metric: str
    update: int


class MetricsTracker:
    """Scores, evaluations and divergence of each member so far. `state_dict` returns all state for an exact resume."""

    def __init__(
        self,
        labels: list[dict[str, Any]],
        record_length: int,
        steps_per_update: int,
        rollout_length: int,
        solved_threshold: float | None,
        compares_evaluations: bool = True,
    ):
        self.labels, self.solved_threshold = labels, solved_threshold
        self.compares_evaluations = compares_evaluations  # False: the mean return over players is not informative
        self.steps_per_update, self.rollout_length = steps_per_update, rollout_length
        self.buffer = RecordBuffer(record_length)
        self.windows = [EpisodeWindow() for _ in labels]
        self.solved: list[Solved | None] = [None] * len(labels)
        self.diverged: list[int | None] = [None] * len(labels)  # environment steps
        self.valid_steps = [0] * len(labels)
        self.quarantined = [0] * len(labels)  # steps that failed
        self.updates, self.recorded, self.recorded_time = 0, 0, 0.0
        self.evaluations: list[dict[str, Any]] = []

    def add_quarantined(self, rows: Rows) -> list[tuple[int, int]]:
        """Count the failed steps of updates, before `add`. Return members with too many, and the update of each."""
        found = []
        for i, counts in enumerate(np.asarray(rows.get(QUARANTINED, ()), np.int64)):
            so_far = self.quarantined[i] + np.cumsum(counts)
            steps = (self.updates + 1 + np.arange(len(counts))) * self.steps_per_update
            excess = so_far > np.maximum(MAX_QUARANTINED_SHARE * steps, MIN_QUARANTINED)
            if excess.any() and self.diverged[i] is None:
                found.append((i, self.updates + 1 + int(excess.argmax())))
            self.quarantined[i] = int(so_far[-1])
        return found

    def add(self, rows: Rows) -> list[NotFinite]:
        """Add updates: metrics [S, U] and the clocks. Return what newly diverged, in order."""
        found = [f for i in range(len(self.labels)) if self.diverged[i] is None and (f := self._not_finite(rows, i))]
        for wrong in found:
            self.diverged[wrong.member] = wrong.update * self.steps_per_update
        self.buffer.add(rows)
        self.updates += rows[CLOCKS[0]].shape[1]
        return sorted(found, key=lambda wrong: wrong.update)

    def records(
        self, everything: bool = False, hold_last: bool = False, evaluation: list[dict[str, Any]] | None = None
    ) -> Iterator[list[dict]]:
        """Yield complete records, each with a dictionary for each member. The last one includes the evaluation.

        `hold_last`: keep the record that ends now, because an evaluation may follow.
        """
        complete = list(self.buffer.take(everything, hold_last))
        for rows in complete:
            clock, wall = (float(rows[name][0, -1]) for name in CLOCKS)
            length = rows[CLOCKS[0]].shape[1]
            self.recorded += length
            speed = length * self.steps_per_update * len(self.labels) / max(clock - self.recorded_time, 1e-9)
            self.recorded_time = clock
            common = {
                "env_steps": self.recorded * self.steps_per_update,
                "num_updates": self.recorded,
                "wall_time_s": round(wall, 4),
                "train_time_s": round(clock, 4),
                "env_steps_per_s": round(speed, 1),
            }
            means = summarize({k: x for k, x in rows.items() if k not in CLOCKS})
            for i in range(len(self.labels)):
                for episodes, total, longest in zip(*(rows[name][i] for name in OF_EPISODES), strict=True):
                    self.windows[i].add(int(episodes), float(total), self.rollout_length, int(longest))
                self.valid_steps[i] += int(rows["valid_steps"][i].astype("int64").sum())
                self._check_solved(i, common["env_steps"], common["train_time_s"])
            records = [
                label | common | {"valid_steps": valid} | scores
                for label, valid, scores in zip(self.labels, self.valid_steps, means, strict=True)
            ]
            yield [r | e for r, e in zip(records, evaluation)] if rows is complete[-1] and evaluation else records

    @property
    def evaluated_at(self) -> int | None:
        """Return the environment steps of the last evaluation."""
        return self.evaluations[-1]["env_steps"] if self.evaluations else None

    @property
    def longest_episode(self) -> int:
        """Return the steps of the longest of the last episodes; 0 if none has ended yet. Later records count too."""
        later = [self.buffer.rows[name] for name in ("episodes", "longest_episode") if name in self.buffer.rows]
        longest = [window.longest for window in self.windows]
        if later and later[0].any():
            longest.append(int(later[1].max()))
        return max(longest)

    @property
    def diverged_members(self) -> list[int]:
        """Return the indices of members whose training has diverged."""
        return [i for i, wrong in enumerate(self.diverged) if wrong is not None]

    def settled_at(self) -> int | None:
        """Return the environment steps at which the last member was solved or diverged; None before that."""
        both = zip(self.solved, self.diverged, strict=True)
        steps = [solved[0] if solved else diverged for solved, diverged in both]
        settled = [at for at in steps if at is not None]
        return max(settled) if len(settled) == len(steps) else None

    def final_returns(self) -> list[float | None]:
        """Return each seed's mean return of the last episodes; None before the first one and after divergence."""
        means = [statistics.finite(w.mean) for w in self.windows]
        return [mean if wrong is None else None for mean, wrong in zip(means, self.diverged)]

    def best(self) -> dict[str, Any]:
        """Return the evaluation with the highest mean return, or {}."""
        if not self.compares_evaluations:
            return {}
        finished = [e for e in self.evaluations if e["eval_return_mean"] is not None]
        return max(finished, key=lambda e: e["eval_return_mean"], default={})

    def state_dict(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return everything, as JSON values and as arrays by name."""
        host = {name: copy.copy(getattr(self, name)) for name in NUMBERS}
        as_list = lambda record: [record.ended, _as_json(record.return_sum), record.num_steps, record.longest]
        host["windows"] = [[as_list(record) for record in (*w.records, w.waiting)] for w in self.windows]
        return host, {f"ledger/{name}": np.array(x, order="C") for name, x in self.buffer.rows.items()}

    def restore(self, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Restore the result of `state_dict`."""
        for name in NUMBERS:
            setattr(self, name, host[name])
        self.solved = [(s[0], s[1]) if s else None for s in self.solved]
        for window, records in zip(self.windows, host["windows"], strict=True):
            window.restore([EndedEpisodes(ended, float(x), *times) for ended, x, *times in records])
        rows = {k.removeprefix("ledger/"): x for k, x in arrays.items() if k.startswith("ledger/")}
        if rows:
            self.buffer.add(rows)

    def reset_solved(self) -> None:
        """Recompute which members are solved from the last episodes, because the threshold has changed."""
        self.solved = [None] * len(self.labels)
        for i in range(len(self.labels)):
            self._check_solved(i, self.recorded * self.steps_per_update, round(self.recorded_time, 4))

    def _check_solved(self, i: int, env_steps: int, train_time_s: float) -> None:
        window, threshold, diverged_at = self.windows[i], self.solved_threshold, self.diverged[i]
        is_valid = diverged_at is None or env_steps < diverged_at
        if self.solved[i] is None and threshold is not None and window.full and window.mean >= threshold and is_valid:
            self.solved[i] = env_steps, train_time_s

    def _not_finite(self, rows: Rows, i: int) -> NotFinite | None:
        """Return the first loss of seed i that is not finite, or None. Other metrics may be undefined."""
        bad = {name: ~np.isfinite(x[i]) for name, x in rows.items() if "loss" in name}
        first = {name: int(x.argmax()) for name, x in bad.items() if x.any()}
        if not first:
            return None
        name = min(first, key=lambda name: first[name])
        return NotFinite(i, name.removesuffix(SUM_SUFFIX), self.updates + first[name] + 1)


def _as_json(x: float) -> float | str:
    """Return the number, or its name as text if JSON cannot represent it."""
    return x if math.isfinite(x) else str(x)
