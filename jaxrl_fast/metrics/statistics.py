"""Statistics over seeds and episodes: IQM and bootstrap intervals. float64, on the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_DRAWN = 2**22  # scores resampled at a time
CI95 = 0.025, 0.975  # the quantiles that enclose 95%


def finite(x: Any) -> float | None:
    """Return a float that JSON can hold, or None."""
    return float(x) if x is not None and np.isfinite(x) else None


def iqm(scores: np.ndarray, axis: int | tuple[int, ...] = 0) -> np.ndarray:
    """Return the inter-quartile mean: without the floor(n / 4) lowest and highest scores.

    Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice".
    """
    axes = (axis,) if isinstance(axis, int) else axis
    moved = np.moveaxis(np.asarray(scores, np.float64), axes, range(len(axes)))
    flat = np.sort(moved.reshape(-1, *moved.shape[len(axes) :]), axis=0)
    cut = flat.shape[0] // 4
    return flat[cut : flat.shape[0] - cut].mean(0)


def bootstrap(scores: np.ndarray, num_resamples: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Return a 95% percentile interval of the IQM of scores [S, M, ...]: S seeds of M tasks.

    Stratified: the seeds of each task are resampled within that task (the same paper, section 4.1).
    """
    num_seeds, num_tasks = scores.shape[:2]
    rng = np.random.default_rng(0)
    means = []
    for _ in range(num_resamples):
        drawn = rng.integers(num_seeds, size=(num_seeds, num_tasks))
        means.append(iqm(scores[drawn, np.arange(num_tasks)], axis=(0, 1)))
    low, high = np.quantile(means, CI95, axis=0)
    return low, high


def mean_interval(groups: Sequence[np.ndarray], num_resamples: int = 2000) -> tuple[float, float]:
    """Return a 95% percentile interval of the mean of all scores; each group has the scores of one training.

    Groups are resampled if there are several, and scores within each: Efron and Tibshirani 1993, chapter 8.
    """
    rng = np.random.default_rng(0)
    total, count = np.zeros(num_resamples), np.zeros(num_resamples)
    for _ in groups:
        drawn = rng.integers(len(groups), size=num_resamples)
        for i, scores in enumerate(groups):
            places = np.flatnonzero(drawn == i)
            scores = np.asarray(scores, np.float64)
            some = max(MAX_DRAWN // scores.size, 1)  # rows at a time: all at once would take 32 kB a score
            for part in (places[at : at + some] for at in range(0, places.size, some)):
                total[part] += scores[rng.integers(scores.size, size=(part.size, scores.size))].sum(1)
            count[places] += scores.size
    low, high = np.quantile(total / count, CI95)
    return float(low), float(high)
