"""The learning curve of a run as a picture."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

MOST_POINTS = 150  # of the curve; more records are averaged
INK, BAND, FAINT, MARK = "#1f5fa8", "#1f5fa8", "#9fb8d6", "#c2571a"


class Picture(Figure):
    """A figure that a notebook shows, whether it has been told to show figures or not."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def figure(
    title: str,
    curve: Mapping[str, np.ndarray],
    evals: Sequence[Mapping[str, Any]],
    solved: float | None,
    of: str = "seed",
) -> Picture:
    """Return against environment steps: `curve` has steps [R], each seed's returns [S, R], centre, low and high [R]."""
    picture = Picture(figsize=(7.2, 4.2), dpi=130, layout="constrained")
    axes = picture.add_subplot()
    steps, returns = curve["steps"], curve["returns"]
    many = returns.shape[0] > 1
    faint = axes.plot(steps, returns.T, color=FAINT, lw=0.8, alpha=0.8)
    faint[0].set_label(f"each {of}" if many else "each record")
    if many:
        band = "95% interval (stratified bootstrap)"
        axes.fill_between(steps, curve["low"], curve["high"], color=BAND, alpha=0.22, lw=0, label=band)
    label = f"inter-quartile mean of {returns.shape[0]} {of}s" if many else "training, last 100 episodes"
    axes.plot(steps, curve["centre"], color=INK, lw=2, label=label)
    if evals:
        at, mean, spread = ([e[k] for e in evals] for k in ("env_steps", "eval_return_mean", "eval_return_std"))
        marks: dict[str, Any] = {"fmt": "o", "color": MARK, "ms": 4, "lw": 1, "capsize": 2, "zorder": 3}
        axes.errorbar(at, mean, spread, label="evaluation (mean ± std)", **marks)
    if solved is not None:
        axes.axhline(solved, color="0.35", lw=1, ls=(0, (4, 3)), label=f"solved at {solved:g}")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return of an episode")
    axes.set_title(title, loc="left", fontsize=11)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    style(axes)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8, loc="best")
    return picture


def style(axes: Any) -> None:
    """A faint grid behind, and no box around."""
    axes.grid(color="0.9", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def thin(
    steps: np.ndarray, returns: np.ndarray, episodes: np.ndarray, most: int = MOST_POINTS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At most so many groups of records: last step [R], mean return [S, R] (NaN for none) and episodes [S, R]."""
    groups = np.array_split(np.arange(steps.size), min(most, steps.size))
    count = np.stack([episodes[:, g].sum(1) for g in groups], 1)
    total = np.stack([np.where(episodes[:, g] > 0, returns[:, g] * episodes[:, g], 0).sum(1) for g in groups], 1)
    with np.errstate(invalid="ignore"):
        return np.array([steps[g[-1]] for g in groups]), total / np.where(count > 0, count, np.nan), count


def hold(returns: np.ndarray) -> np.ndarray:
    """[S, R] with every gap filled by what came before, or by what comes first."""
    known = ~np.isnan(returns)
    place = np.maximum.accumulate(np.where(known, np.arange(returns.shape[1]), -1), axis=1)
    place = np.where(place < 0, known.argmax(1)[:, None], place)
    return np.take_along_axis(returns, place, axis=1)
