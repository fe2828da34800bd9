"""Draw the figures of a sweep: throughput, cost, returns and learning curves of its configurations."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter, NullLocator

from jaxrl_fast.config.population import LABEL, Label, by_member
from jaxrl_fast.metrics.statistics import bootstrap, iqm
from jaxrl_fast.plotting import curves
from jaxrl_fast.utils import warnings

Row = Mapping[str, Any]
Members = Mapping[str, Mapping[Label, Sequence[Row]]]  # records by program and member
MAX_POINTS = 60  # points of a curve; more records are averaged
COSTS = {"program_memory_mb": "memory of the program, MB", "compile_time_s": "compile time, s"}
FINAL = {"final_return": "final return"}
MAX_TICKS = 9  # labeled ticks on an axis
MAX_CURVES = 8  # curves in one panel: those with the best final return


def draw_figures(
    title: str,
    columns: Sequence[str],
    groups: Sequence[Sequence[Row]],
    records: Mapping[str, Sequence[Row]],
    threshold: float | None,
) -> dict[str, curves.NotebookFigure]:
    """Draw all figures of a sweep and return them by their file names; a figure that fails is left out with a warning.

    Args:
        title: Title of each figure.
        columns: Options in which the configurations differ.
        groups: The configurations; the rows of each differ only in their seeds.
        records: The records of each program.
        threshold: The return that counts as solved, or None.
    """
    plots: dict[str, Callable[[], curves.NotebookFigure | None]] = {}
    if shared := _shared(columns, groups):
        programs = _lines(shared, [*{g[0]["program"]: g for g in reversed(groups)}.values()])
        plots["throughput.png"] = lambda: plot_throughput(title, programs)
        plots["cost.png"] = lambda: plot_measures(title, programs, COSTS)
    scored = [g for g in groups if _known(g, "final_return")]
    if len(scored) > 1:
        lines = _lines(columns, scored)
        plots["final_return.png"] = lambda: plot_measures(title, lines, FINAL, population_mean)
        if threshold is not None and any(_known(g, "steps_to_solve") for g in groups):
            solve = {"time_to_solve_s": f"seconds to a return of {threshold:g}", "steps_to_solve": "steps to it"}
            plots["threshold.png"] = lambda: plot_measures(title, lines, solve)
    plots["curves.png"] = lambda: plot_learning_curves(title, columns, groups, records, threshold)
    found: dict[str, curves.NotebookFigure | None] = {}
    for name, make in plots.items():
        with warnings.warn_on_error(f"{name} could not be drawn"):
            found[name] = make()
    return {name: figure for name, figure in found.items() if figure is not None}


def plot_throughput(title: str, lines: "LinesByColumn") -> curves.NotebookFigure:
    """Draw the steps per second of each program, with the speed-up over its first point."""
    figure, (axes,) = _panels(title, 1)
    for (label, points), color in zip(lines.by_label.items(), colors(len(lines.by_label))):
        xs, ys = lines.positions(points), [statistics.median(_known(group, "env_steps_per_s")) for _, group in points]
        axes.plot(xs, np.array(ys), "o-", color=color, label=label or None)
        for x, y in zip(xs, ys):
            text = f"{y / ys[0]:.3g}×"
            axes.annotate(text, (x, y), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8)
    if all(len({group[0]["members"] for _, group in points}) == 1 for points in lines.by_label.values()):
        members = {group[0]["members"] for points in lines.by_label.values() for _, group in points}
        suffix = f", {members.pop()} members together" if members != {1} and len(members) == 1 else ""
    else:
        suffix = ", all members together"
    lines.label(axes, f"steps per second{suffix}", log=True)
    axes.margins(y=0.15)
    return figure


def population_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the interquartile mean and both ends of its 95% bootstrap interval."""
    center = float(iqm(np.array(values)))
    if len(values) < 2:
        return center, center, center
    low, high = bootstrap(np.array(values)[:, None], num_resamples=500)
    return center, float(low), float(high)


def median_and_range(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, minimum and maximum."""
    return statistics.median(values), min(values), max(values)


def plot_measures(
    title: str,
    lines: "LinesByColumn",
    metrics: Mapping[str, str],
    center: Callable[[Sequence[float]], tuple[float, float, float]] = median_and_range,
) -> curves.NotebookFigure | None:
    """Draw a panel for each metric (key and label): its center over the seeds, with error bars."""
    figure, panels = _panels(title, len(metrics))
    for axes, (key, name) in zip(panels, metrics.items()):
        for (label, points), color in zip(lines.by_label.items(), colors(len(lines.by_label))):
            known = [(x, values) for x, group in points if (values := _known(group, key))]
            if not known:
                continue
            centers, low, high = np.array([center(values) for _, values in known]).T
            style: dict[str, Any] = {"fmt": "o-", "ms": 4, "lw": 1.5, "capsize": 2, "color": color}
            axes.errorbar(
                lines.positions(known), centers, (centers - low, high - centers), label=label or None, **style
            )
        lines.label(axes, name, log=key not in FINAL)
    return figure


def plot_learning_curves(
    title: str,
    columns: Sequence[str],
    groups: Sequence[Sequence[Row]],
    records: Mapping[str, Sequence[Row]],
    threshold: float | None,
) -> curves.NotebookFigure | None:
    """Draw return against steps and against seconds: interquartile mean over the seeds with its 95% interval."""
    members = {name: by_member(lines) for name, lines in records.items()}
    recorded = [[r for r in g if records_of_row(r, members)] for g in groups]  # records may be missing
    drawn = [g for g in recorded if _known(g, "final_return")]
    if not drawn:
        return None
    best = sorted(drawn, key=lambda g: -max(_known(g, "final_return")))
    chosen = [g for g in drawn if any(g is b for b in best[:MAX_CURVES])]
    figure, panels = _panels(title, 2)
    for group, color in zip(chosen, colors(len(chosen))):
        label = ", ".join(f"{_label(c)} {_format(group[0][c])}" for c in columns)
        steps, seconds, returns = series(group, members)
        curve = curves.aggregate(label, steps, returns)
        for axes, x in zip(panels, (steps, seconds)):
            axes.plot(x, curve.center, color=color, lw=1.6, label=label or None)
            if curve.band is not None:
                axes.fill_between(x, *curve.band, color=color, alpha=0.18, lw=0)
    seeds = max(len(g) for g in chosen)
    name = f"return (IQM of {seeds} seeds, 95%)" if seeds > 1 else "return of an episode"
    for axes, unit in zip(panels, ("environment steps", "seconds of training, all members together")):
        if threshold is not None:
            axes.axhline(threshold, color="0.35", lw=1, ls=(0, (4, 3)))
        axes.set_xlabel(unit)
        axes.set_ylabel(name)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    if columns:
        more = f"the best {len(chosen)} of {len(drawn)}" if len(chosen) < len(drawn) else None
        panels[0].legend(edgecolor="none", fontsize=8, title=more, title_fontsize=8)  # opaque, for it may cover curves
    return figure


def records_of_row(row: Row, members: Members) -> Sequence[Row]:
    """Return the records of a row's training."""
    found = members[row["program"]]
    names = [name for name, _ in next(iter(found), ())]  # the same for all members of a program
    return found.get(tuple((name, row[name.removeprefix(LABEL)]) for name in names), ())


def series(group: Sequence[Row], members: Members) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return steps [P], seconds [P] and returns [S, P] of the S rows of a configuration."""
    lines = [
        [[r[k] if r[k] is not None else np.nan for k in RECORD_KEYS] for r in records_of_row(row, members)]
        for row in group
    ]
    trainings = [np.array(line, np.float64).T for line in lines]  # a run that was made longer has other records
    points, means = curves.align([(steps, mean, episodes) for steps, _, mean, episodes in trainings], MAX_POINTS)
    each_seconds = [np.interp(points, steps, seconds) for steps, seconds, _, _ in trainings]
    return points, np.mean(each_seconds, 0), curves.forward_fill(means)


RECORD_KEYS = ("env_steps", "train_time_s", "return_mean", "episodes")


class LinesByColumn:
    """Configurations ordered by one column, as a line for each combination of the others."""

    def __init__(self, column: str, others: Sequence[str], groups: Sequence[Sequence[Row]]):
        self.column = column
        self.values = list(dict.fromkeys(g[0][column] for g in groups))
        self.numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in self.values)
        self.values = sorted(self.values) if self.numeric else self.values
        self.by_label: dict[str, list[tuple[Any, Sequence[Row]]]] = {}
        for group in sorted(groups, key=lambda g: self.values.index(g[0][column])):
            label = ", ".join(f"{_label(c)} {_format(group[0][c])}" for c in others)
            self.by_label.setdefault(label, []).append((group[0][column], group))

    def positions(self, points: Sequence[tuple[Any, Any]]) -> list[float]:
        """Return the positions of points along the horizontal axis."""
        return [x if self.numeric else self.values.index(x) for x, _ in points]

    def label(self, axes: Any, name: str, log: bool) -> None:
        """Set labels, scales, ticks and the legend of the axes."""
        axes.set_xlabel(_label(self.column).replace("num envs", "environments"))
        axes.set_ylabel(name)
        if self.numeric and 0 < min(self.values) <= max(self.values) / 8:
            axes.set_xscale("log")
        if len(self.values) <= MAX_TICKS:
            positions = self.values if self.numeric else range(len(self.values))
            axes.set_xticks(positions, [_format(v) for v in self.values], fontsize=8)
            axes.xaxis.set_minor_locator(NullLocator())
        if log and all((line.get_ydata() > 0).all() for line in axes.lines):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(_tick))
            low, high = axes.get_ylim()
            is_short = low > 0 and high / low < 12  # about one power of ten, so that minor ticks need labels
            axes.yaxis.set_minor_formatter(FuncFormatter(_tick) if is_short else NullFormatter())
        if len(self.by_label) > 1 and len(self.by_label) <= 2 * MAX_CURVES:
            axes.legend(frameon=False, fontsize=8)


def colors(number: int) -> list[Any]:
    """Return colors from dark to light."""
    return [matplotlib.colormaps["viridis"](0.85 * i / max(number - 1, 1)) for i in range(number)]


def _lines(columns: Sequence[str], groups: Sequence[Sequence[Row]]) -> LinesByColumn:
    """Return the configurations along num_envs, else the first numeric column, else the first column."""
    numbers = [c for c in columns if all(isinstance(g[0][c], (int, float)) for g in groups)]
    column = "num_envs" if "num_envs" in columns else (numbers or list(columns))[0]
    return LinesByColumn(column, [c for c in columns if c != column], groups)


def _panels(title: str, number: int) -> tuple[curves.NotebookFigure, Sequence[Any]]:
    """Return a figure with `number` panels side by side."""
    figure = curves.NotebookFigure(figsize=(6.4 if number == 1 else 10.4, 4.2), dpi=130, layout="constrained")
    panels = figure.subplots(1, number, squeeze=False)[0]
    for axes in panels:
        curves.style_axes(axes)
    panels[0].set_title(curves.escape_text(title), loc="left", fontsize=11)
    return figure, panels


def _shared(columns: Sequence[str], groups: Sequence[Sequence[Row]]) -> list[str]:
    """Return the columns in which all members of a program have the same value."""
    programs = {g[0]["program"] for g in groups}
    return [c for c in columns if len({(g[0]["program"], repr(g[0][c])) for g in groups}) == len(programs)]


def _tick(value: float, _: Any) -> str:
    """Return the label of a tick."""
    return f"{value:g}" if value < 1000 else EngFormatter(sep="")(value)


def _label(column: str) -> str:
    """Return the label of a column."""
    return column.replace("_", " ")


def _format(value: Any) -> str:
    """Return a value as text for labels."""
    return f"{value:g}" if isinstance(value, float) else curves.escape_text(str(value))


def _known(group: Sequence[Row], key: str) -> list[float]:
    """Return the values of a metric in the rows of one configuration that have it."""
    return [row[key] for row in group if row[key] is not None]
