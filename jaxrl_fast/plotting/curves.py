"""Learning curves as pictures: of one run, and of several beside each other."""

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

MAX_POINTS = 150  # of the curve; more records are averaged
WIDTH, HEIGHT, MAX_HEIGHT = 7.2, 4.2, 20.0  # inches
MAX_COLUMNS = 3  # of figures side by side
MAX_INSIDE, MAX_LETTERS = 8, 64  # curves that are named within the axes, letters of a name
INK, FAINT, MARK = "#1f5fa8", "#9fb8d6", "#c2571a"
COLORS = (INK, MARK, "#2f8f5b", "#8b5fbf", "#b8860b", "#4d5866", "#d1495b", "#2a9d9d")  # more curves: a scale
INTERVAL = "95% interval (stratified bootstrap)"


class Picture(Figure):
    """A figure that a notebook shows, whether it has been told to show figures or not."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # that the font lacks a sign of some run's name
            super().savefig(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def save(picture: Figure, path: Path) -> None:
    """A picture as a file, which is the old one until the new one is whole."""
    with atomic_write(path) as aside:
        picture.savefig(aside)


class Curve(NamedTuple):
    """One or several trainings of the same kind."""

    name: str
    x: np.ndarray  # [R]
    each: np.ndarray  # [S, R]
    center: np.ndarray  # [R]: the inter-quartile mean of several
    band: tuple[np.ndarray, np.ndarray] | None  # [R] each: an interval of it
    of: str = "seeds"  # what several trainings are


def figure(
    title: str, curve: Curve, evals: Sequence[Mapping[str, Any]], solved: float | None, of: str = "seed"
) -> Picture:
    """Return against environment steps, of one run."""
    picture, axes = _blank()
    many = curve.each.shape[0] > 1
    faint = axes.plot(curve.x, curve.each.T, color=FAINT, lw=0.8, alpha=0.8)
    faint[0].set_label(f"each {of}" if many else "each record")
    label = f"inter-quartile mean of {curve.each.shape[0]} {of}s" if many else "training, last 100 episodes"
    draw(axes, curve._replace(name=label), INK, INTERVAL)
    names = "env_steps", "eval_return_mean", "eval_return_std"
    if known := [e for e in evals if None not in (e[name] for name in names)]:  # None where no episode has ended
        at, mean, spread = ([e[name] for e in known] for name in names)
        style: dict[str, Any] = {"fmt": "o", "color": MARK, "ms": 4, "lw": 1, "capsize": 2, "zorder": 3}
        axes.errorbar(at, mean, spread, label="evaluation (mean ± std)", **style)
    if solved is not None:
        axes.axhline(solved, color="0.35", lw=1, ls=(0, (4, 3)), label=f"solved at {solved:g}")
    return _finish(picture, axes, title, "environment steps", "return of an episode")


def compare(panels: Mapping[str, Sequence[Curve]], x_label: str, y_label: str) -> Picture:
    """Several curves beside each other, in the order that they come; those of each title in axes of their own."""
    num_columns = min(len(panels), MAX_COLUMNS)
    num_rows = -(-len(panels) // num_columns)
    longest = max(map(len, panels.values()))
    beside = longest > MAX_INSIDE
    width = (WIDTH if num_columns == 1 else 5.0) + 4.0 * beside
    height = max(HEIGHT, min(0.8 + 0.17 * longest, MAX_HEIGHT)) if beside else HEIGHT
    picture = Picture(figsize=(width * num_columns, height * num_rows), dpi=130, layout="constrained")
    for place, (title, curves) in enumerate(panels.items()):
        axes = picture.add_subplot(num_rows, num_columns, place + 1)
        scale = colormaps["viridis"](np.linspace(0, 0.9, len(curves)))
        for i, curve in enumerate(curves):
            of = f" ({curve.each.shape[0]} {curve.of})" if curve.each.shape[0] > 1 else ""
            color = COLORS[i] if len(curves) <= len(COLORS) else scale[i]
            draw(axes, curve._replace(name=(shortened(curve.name) if beside else curve.name) + of), color)
        _finish(picture, axes, title, x_label, y_label, beside)
    return picture


def shortened(name: str) -> str:
    """A long name without its middle: its beginning says what it is, its end mostly tells it from others."""
    return name if len(name) <= MAX_LETTERS else f"{name[: MAX_LETTERS // 2]} … {name[-MAX_LETTERS // 2 + 3 :]}"


def draw(axes: Axes, curve: Curve, color: Any, band_label: str | None = None) -> None:
    """A curve with its interval."""
    if curve.band is not None:
        axes.fill_between(curve.x, *curve.band, color=color, alpha=0.22, lw=0, label=band_label)
    alone = np.isfinite(curve.center).sum() == 1  # a point, of which no line is drawn
    axes.plot(curve.x, curve.center, color=color, lw=2, marker="o" if alone else None, label=literal(curve.name))


def literal(text: str) -> str:
    """For matplotlib, which reads as a formula what stands between two dollars, and no label that begins with _."""
    return f"{' ' * text.startswith('_')}{text}".replace("$", r"\$")


def _blank() -> tuple[Picture, Axes]:
    picture = Picture(figsize=(WIDTH, HEIGHT), dpi=130, layout="constrained")
    return picture, picture.add_subplot()


def _finish(picture: Picture, axes: Axes, title: str, x_label: str, y_label: str, beside: bool = False) -> Picture:
    axes.set_xlabel(literal(x_label))
    axes.set_ylabel(literal(y_label))
    axes.set_title(literal(title), loc="left", fontsize=11)
    style(axes)
    axes.set_xlim(left=0)
    if axes.get_xlim()[1] >= 1000:  # less, such as seconds, is plain
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if beside:
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    else:
        axes.legend(frameon=False, fontsize=8, loc="best")
    return picture


def style(axes: Axes) -> None:
    """A faint grid behind, and no box around."""
    axes.grid(color="0.9", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def thin(
    steps: np.ndarray, returns: np.ndarray, episodes: np.ndarray, most: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At most so many groups of records: last step [R], mean return [S, R] (NaN for none) and episodes [S, R].

    A return that is NaN is unknown, and its episodes are not counted.
    """
    groups = np.array_split(np.arange(steps.size), min(most, steps.size))
    episodes = np.where(np.isnan(returns), 0, episodes)
    count = np.stack([episodes[:, g].sum(1) for g in groups], 1)
    total = np.stack([np.where(episodes[:, g] > 0, returns[:, g] * episodes[:, g], 0).sum(1) for g in groups], 1)
    with np.errstate(invalid="ignore"):
        return np.array([steps[g[-1]] for g in groups]), total / np.where(count > 0, count, np.nan), count


def over(x: np.ndarray, y: np.ndarray, weight: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Records [R] of one training as weighted means between edges [B + 1]: [B], NaN where there is none.

    A record that lies on an edge belongs to what ends there.
    """
    place = np.searchsorted(edges * (1 + 1e-9), x, side="left") - 1
    good = ~np.isnan(y) & (place >= 0) & (place < edges.size - 1)
    sums = [np.bincount(place[good], z[good], minlength=edges.size - 1) for z in (weight * np.nan_to_num(y), weight)]
    with np.errstate(invalid="ignore"):
        return sums[0] / np.where(sums[1] > 0, sums[1], np.nan)


def hold(y: np.ndarray) -> np.ndarray:
    """[S, R] with every gap filled by what came before; NaN where nothing did."""
    place = np.maximum.accumulate(np.where(np.isnan(y), 0, np.arange(y.shape[1])), axis=1)
    return np.take_along_axis(y, place, axis=1)


def gathered(name: str, x: np.ndarray, each: np.ndarray, of: str = "seeds") -> Curve:
    """A curve of trainings [S, R]: of several the inter-quartile mean and its interval, from where all are known.

    A training of which nothing is known at all has no part in it.
    """
    held = hold(each)
    if held.shape[0] == 1:
        return Curve(name, x, each, held[0], None)
    held = held[~np.isnan(held).all(1)]
    if not len(held):
        return Curve(name, x, each, np.full(x.size, np.nan), None, of)
    known = ~np.isnan(held).any(0)
    center, low, high = np.full((3, x.size), np.nan)
    if known.any():
        center[known] = statistics.iqm(held[:, known])
        low[known], high[known] = statistics.bootstrap(held[:, None, known], num_resamples=500)
    return Curve(name, x, each, center, (low, high), of)
