"""Draw learning curves with matplotlib: of one run, or of several in one figure."""

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from jaxrl_fast.metrics import statistics
from jaxrl_fast.utils.files import atomic_write

MAX_POINTS = 150  # points of a curve; more records are averaged
WIDTH, HEIGHT, MAX_HEIGHT = 7.2, 4.2, 20.0  # inches
MAX_COLUMNS = 3  # panels side by side
MAX_INSIDE, MAX_NAME_LENGTH = 8, 64  # curves in a legend inside the axes, characters of a name
INK, FAINT, MARK = "#1f5fa8", "#9fb8d6", "#c2571a"
COLORS = (INK, MARK, "#2f8f5b", "#8b5fbf", "#b8860b", "#4d5866", "#d1495b", "#2a9d9d")  # more curves use a color map
INTERVAL = "95% interval (stratified bootstrap)"


class NotebookFigure(Figure):
    """A figure that a notebook displays without `%matplotlib inline`."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """Save the figure as a file, without warnings about characters that the font lacks."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # a run's name may contain any character
            super().savefig(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG for a notebook."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file; an existing file is replaced only once the new one is complete."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary)


class Curve(NamedTuple):
    """A curve: one training, or the aggregate of several with the same options."""

    name: str
    x: np.ndarray  # [R]
    each: np.ndarray  # [S, R], of each of S trainings
    center: np.ndarray  # [R], the interquartile mean of several
    band: tuple[np.ndarray, np.ndarray] | None  # lower and upper end [R] of its 95% interval
    unit: str = "seeds"  # name of the trainings: seeds or runs


def draw_run(
    title: str, curve: Curve, evals: Sequence[Mapping[str, Any]], solved: float | None, unit: str = "seed"
) -> NotebookFigure:
    """Draw the return of one run against environment steps.

    Args:
        title: Title of the figure.
        curve: The training returns.
        evals: Evaluations with `env_steps`, `eval_return_mean` and `eval_return_std`.
        solved: A return to mark with a line, or None.
        unit: The name of a training of `curve`.
    """
    figure = NotebookFigure(figsize=(WIDTH, HEIGHT), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    many = curve.each.shape[0] > 1
    faint = axes.plot(curve.x, curve.each.T, color=FAINT, lw=0.8, alpha=0.8)
    faint[0].set_label(f"each {unit}" if many else "each record")
    label = f"interquartile mean of {curve.each.shape[0]} {unit}s" if many else "training, last 100 episodes"
    draw_curve(axes, curve._replace(name=label), INK, INTERVAL)
    names = "env_steps", "eval_return_mean", "eval_return_std"
    if known := [e for e in evals if None not in (e[name] for name in names)]:  # None if no episode has ended
        at, mean, spread = ([e[name] for e in known] for name in names)
        style: dict[str, Any] = {"fmt": "o", "color": MARK, "ms": 4, "lw": 1, "capsize": 2, "zorder": 3}
        axes.errorbar(at, mean, spread, label="evaluation (mean ± std)", **style)
    if solved is not None:
        axes.axhline(solved, color="0.35", lw=1, ls=(0, (4, 3)), label=f"solved at {solved:g}")
    return _finish(figure, axes, title, "environment steps", "return of an episode")


def draw_panels(panels: Mapping[str, Sequence[Curve]], x_label: str, y_label: str) -> NotebookFigure:
    """Draw curves in one figure, with a panel for each title and in the given order."""
    num_columns = min(len(panels), MAX_COLUMNS)
    num_rows = -(-len(panels) // num_columns)
    longest = max(map(len, panels.values()))
    outside = longest > MAX_INSIDE  # place of the legend
    width = (WIDTH if num_columns == 1 else 5.0) + 4.0 * outside
    height = max(HEIGHT, min(0.8 + 0.17 * longest, MAX_HEIGHT)) if outside else HEIGHT
    figure = NotebookFigure(figsize=(width * num_columns, height * num_rows), dpi=130, layout="constrained")
    for i, (title, curves) in enumerate(panels.items()):
        axes = figure.add_subplot(num_rows, num_columns, i + 1)
        scale = colormaps["viridis"](np.linspace(0, 0.9, len(curves)))
        for curve, color in zip(curves, COLORS if len(curves) <= len(COLORS) else scale):
            count = f" ({curve.each.shape[0]} {curve.unit})" if curve.each.shape[0] > 1 else ""
            name = (shorten(curve.name) if outside else curve.name) + count
            draw_curve(axes, curve._replace(name=name), color)
        _finish(figure, axes, title, x_label, y_label, outside)
    return figure


def shorten(name: str) -> str:
    """Return a name without its middle if it is too long; its beginning and end distinguish it best."""
    half = MAX_NAME_LENGTH // 2
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[:half]} … {name[-half + 3 :]}"


def draw_curve(axes: Axes, curve: Curve, color: Any, band_label: str | None = None) -> None:
    """Draw a curve with its interval."""
    if curve.band is not None:
        axes.fill_between(curve.x, *curve.band, color=color, alpha=0.22, lw=0, label=band_label)
    is_point = np.isfinite(curve.center).sum() == 1  # a line of one point would be invisible
    axes.plot(curve.x, curve.center, color=color, lw=2, marker="o" if is_point else None, label=escape_text(curve.name))


def escape_text(text: str) -> str:
    """Return text that matplotlib prints literally: $ starts a formula, and labels that begin with _ are hidden."""
    return f"{' ' * text.startswith('_')}{text}".replace("$", r"\$")


def _finish(
    figure: NotebookFigure, axes: Axes, title: str, x_label: str, y_label: str, outside: bool = False
) -> NotebookFigure:
    """Add labels, title, style and legend; `outside` places the legend next to the axes."""
    axes.set_xlabel(escape_text(x_label))
    axes.set_ylabel(escape_text(y_label))
    axes.set_title(escape_text(title), loc="left", fontsize=11)
    style_axes(axes)
    axes.set_xlim(left=0)
    if axes.get_xlim()[1] >= 1000:  # smaller numbers, such as seconds, are printed in full
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if outside:
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    else:
        axes.legend(frameon=False, fontsize=8, loc="best")
    return figure


def style_axes(axes: Axes) -> None:
    """Draw a light grid in the background and remove the upper and right border."""
    axes.grid(color="0.9", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def downsample(
    steps: np.ndarray, returns: np.ndarray, episodes: np.ndarray, max_points: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average neighboring records so that at most `max_points` remain, weighted by their numbers of episodes.

    Args:
        steps: [R], environment steps at each record.
        returns: [S, R], mean returns; NaN if unknown, and then the episodes are not counted.
        episodes: [S, R], numbers of episodes.
        max_points: The maximum number of points P.

    Returns:
        Last step [P], mean return [S, P] (NaN without episodes) and number of episodes [S, P] of each point.
    """
    groups = np.array_split(np.arange(steps.size), min(max_points, steps.size))
    episodes = np.where(np.isnan(returns), 0, episodes)
    count = np.stack([episodes[:, g].sum(1) for g in groups], 1)
    total = np.stack([np.where(episodes[:, g] > 0, returns[:, g] * episodes[:, g], 0).sum(1) for g in groups], 1)
    with np.errstate(invalid="ignore"):
        return np.array([steps[g[-1]] for g in groups]), total / np.where(count > 0, count, np.nan), count


def bin_means(x: np.ndarray, y: np.ndarray, weight: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return weighted means [B] of the records [R] of one training between edges [B + 1]; NaN for empty bins.

    A record on an edge belongs to the bin that ends there.
    """
    index = np.searchsorted(edges * (1 + 1e-9), x, side="left") - 1
    valid = ~np.isnan(y) & (index >= 0) & (index < edges.size - 1)
    sums = [np.bincount(index[valid], z[valid], minlength=edges.size - 1) for z in (weight * np.nan_to_num(y), weight)]
    with np.errstate(invalid="ignore"):
        return sums[0] / np.where(sums[1] > 0, sums[1], np.nan)


def align(
    trainings: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], max_points: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return common points [P] along the axis and the mean values [S, P] of S trainings up to each point.

    The points end with the shortest training, and not before the first record of each.

    Args:
        trainings: x, y and weight [R] of the records of each training; the numbers of records may differ.
        max_points: The maximum number of points P.
    """
    first, last = zip(*((x[0], x[-1]) for x, _, _ in trainings), strict=True)
    end = max(min(last), *first)
    num_points = min(max_points, *(int((x <= end * (1 + 1e-9)).sum()) for x, _, _ in trainings))
    edges = np.linspace(0, end, num_points + 1)
    return edges[1:], np.stack([bin_means(*training, edges) for training in trainings])


def forward_fill(y: np.ndarray) -> np.ndarray:
    """Return y [S, R] with each NaN replaced by the last known value; leading NaNs remain."""
    index = np.maximum.accumulate(np.where(np.isnan(y), 0, np.arange(y.shape[1])), axis=1)
    return np.take_along_axis(y, index, axis=1)


def aggregate(name: str, x: np.ndarray, each: np.ndarray, unit: str = "seeds") -> Curve:
    """Return a curve of trainings [S, R]: for S > 1 their interquartile mean and its 95% bootstrap interval.

    The curve starts once all trainings have a value; a training without any value is ignored.
    """
    filled = forward_fill(each)
    if filled.shape[0] == 1:
        return Curve(name, x, each, filled[0], None)
    filled = filled[~np.isnan(filled).all(1)]
    if not len(filled):
        return Curve(name, x, each, np.full(x.size, np.nan), None, unit)
    known = ~np.isnan(filled).any(0)
    center, low, high = np.full((3, x.size), np.nan)
    if known.any():
        center[known] = statistics.iqm(filled[:, known])
        low[known], high[known] = statistics.bootstrap(filled[:, None, known], num_resamples=500)
    return Curve(name, x, each, center, (low, high), unit)
