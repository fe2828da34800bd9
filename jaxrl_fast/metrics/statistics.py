"""Compute statistics over seeds and episodes in float64 on the host: IQM and bootstrap intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_DRAWN = 2**22  # scores resampled at a time, to limit memory
CI95 = 0.025, 0.975  # quantiles of a 95% interval


def finite(x: Any) -> float | None:
    """Return a float, or None if it is not finite and thus not valid JSON."""
    return float(x) if x is not None and np.isfinite(x) else None


def iqm(scores: np.ndarray, axis: int | tuple[int, ...] = 0) -> np.ndarray:
    """Return the interquartile mean: the mean without the floor(n / 4) lowest and highest scores.

    Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice".
    """
    axes = (axis,) if isinstance(axis, int) else axis
    moved = np.moveaxis(np.asarray(scores, np.float64), axes, range(len(axes)))
    flat = np.sort(moved.reshape(-1, *moved.shape[len(axes) :]), axis=0)
    cut = flat.shape[0] // 4
    return flat[cut : flat.shape[0] - cut].mean(0)


def bootstrap(scores: np.ndarray, num_resamples: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Return both ends [...] of a 95% percentile interval of the IQM of scores [S, M, ...]: S seeds of M tasks.

    Stratified bootstrap: the seeds of each task are resampled separately (Agarwal et al. 2021, section 4.1).
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
    """Return both ends of a 95% percentile interval of the mean of all scores.

    The groups, if there are several, and the scores within each are resampled (Efron and Tibshirani 1993, chapter 8).

    Args:
        groups: The scores [E] of each training.
        num_resamples: Number of bootstrap resamples.
    """
    rng = np.random.default_rng(0)
    total, count = np.zeros(num_resamples), np.zeros(num_resamples)
    for _ in groups:
        drawn = rng.integers(len(groups), size=num_resamples)
        for i, scores in enumerate(groups):
            indices = np.flatnonzero(drawn == i)
            scores = np.asarray(scores, np.float64)
            num_rows = max(MAX_DRAWN // scores.size, 1)  # at a time, for all rows together would take 32 kB per score
            for part in (indices[start : start + num_rows] for start in range(0, indices.size, num_rows)):
                total[part] += scores[rng.integers(scores.size, size=(part.size, scores.size))].sum(1)
            count[indices] += scores.size
    low, high = np.quantile(total / count, CI95)
    return float(low), float(high)
