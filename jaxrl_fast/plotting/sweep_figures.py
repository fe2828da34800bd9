"""The pictures of a sweep: what many environments, or other values, bring and what they cost."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter, NullLocator

from jaxrl_fast.config.population import Label, by_member
from jaxrl_fast.metrics.statistics import bootstrap, iqm
from jaxrl_fast.plotting import curves
from jaxrl_fast.utils import warnings

Row = Mapping[str, Any]
Members = Mapping[str, Mapping[Label, Sequence[Row]]]  # records by program and member
MAX_POINTS = 60  # of a curve; more records are averaged
COSTS = {"program_memory_mb": "memory of the program, MB", "compile_time_s": "seconds of compiling"}
FINAL = {"final_return": "return at the end"}
MAX_TICKS = 9  # with their own numbers
MAX_CURVES = 8  # in one panel; of more the best are drawn, by their final return


def draw(
    title: str,
    columns: Sequence[str],
    groups: Sequence[Sequence[Row]],
    records: Mapping[str, Sequence[Row]],
    goal: float | None,
) -> dict[str, curves.Picture]:
    """Figures by the name of their file. `groups` have rows that differ in seeds only, `records` are by program.

    One that cannot be drawn is left out, with a warning.
    """
    wanted: dict[str, Callable[[], curves.Picture | None]] = {}
    if shared := _shared(columns, groups):
        programs = _lines(shared, [*{g[0]["group"]: g for g in reversed(groups)}.values()])
        wanted["throughput.png"] = lambda: throughput(title, programs)
        wanted["cost.png"] = lambda: measures(title, programs, COSTS)
    scored = [g for g in groups if any(r["final_return"] is not None for r in g)]
    if len(scored) > 1:
        lines = _lines(columns, scored)
        wanted["final_return.png"] = lambda: measures(title, lines, FINAL, population_mean)
        if goal is not None and any(r["steps_to_solve"] is not None for g in groups for r in g):
            way = {"time_to_solve_s": f"seconds to a return of {goal:g}", "steps_to_solve": "steps to it"}
            wanted["threshold.png"] = lambda: measures(title, lines, way)
    wanted["curves.png"] = lambda: learning(title, columns, groups, records, goal)
    found: dict[str, curves.Picture | None] = {}
    for name, make in wanted.items():
        with warnings.warn_on_error(f"{name} could not be drawn"):
            found[name] = make()
    return {name: picture for name, picture in found.items() if picture is not None}


def throughput(title: str, lines: "Lines") -> curves.Picture:
    """Steps per second of all members together, with the speed-up over the smallest beside each point."""
    picture, (axes,) = _panels(title, 1)
    for (label, points), color in zip(lines.by_label.items(), colors(len(lines.by_label))):
        xs, ys = lines.places(points), [_median(group, "env_steps_per_s") for _, group in points]
        axes.plot(xs, np.array(ys), "o-", color=color, label=label or None)
        for x, y in zip(xs, ys):
            text = f"{y / ys[0]:.3g}×"
            axes.annotate(text, (x, y), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8)
    if all(len({group[0]["members"] for _, group in points}) == 1 for points in lines.by_label.values()):
        members = {group[0]["members"] for points in lines.by_label.values() for _, group in points}
        beside = f", {members.pop()} members together" if members != {1} and len(members) == 1 else ""
    else:
        beside = ", all members together"
    lines.label(axes, f"steps per second{beside}", log=True)
    axes.margins(y=0.15)
    return picture


def population_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Inter-quartile mean and the ends of its interval."""
    center = float(iqm(np.array(values)))
    if len(values) < 2:
        return center, center, center
    low, high = bootstrap(np.array(values)[:, None], num_resamples=500)
    return center, float(low), float(high)


def median_and_range(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def measures(
    title: str,
    lines: "Lines",
    wanted: Mapping[str, str],
    center: Callable[[Sequence[float]], tuple[float, float, float]] = median_and_range,
) -> curves.Picture | None:
    """A panel for each measure: its center over the seeds and how far it reaches."""
    picture, panels = _panels(title, len(wanted))
    for axes, (key, name) in zip(panels, wanted.items()):
        for (label, points), color in zip(lines.by_label.items(), colors(len(lines.by_label))):
            known = [(x, [r[key] for r in group if r[key] is not None]) for x, group in points]
            known = [(x, values) for x, values in known if values]
            if not known:
                continue
            middle, low, high = np.array([center(values) for _, values in known]).T
            style: dict[str, Any] = {"fmt": "o-", "ms": 4, "lw": 1.5, "capsize": 2, "color": color}
            axes.errorbar(lines.places(known), middle, (middle - low, high - middle), label=label or None, **style)
        lines.label(axes, name, log=key not in FINAL)
    return picture


def learning(
    title: str,
    columns: Sequence[str],
    groups: Sequence[Sequence[Row]],
    records: Mapping[str, Sequence[Row]],
    goal: float | None,
) -> curves.Picture | None:
    """Return against steps and against seconds: inter-quartile mean of the seeds, and its bootstrap interval."""
    members = {name: by_member(lines) for name, lines in records.items()}
    recorded = [[r for r in g if records_of(r, members)] for g in groups]  # a program's records may have been lost
    drawn = [g for g in recorded if any(r["final_return"] is not None for r in g)]
    if not drawn:
        return None
    best = sorted(drawn, key=lambda g: -max(r["final_return"] for r in g if r["final_return"] is not None))
    chosen = [g for g in drawn if any(g is b for b in best[:MAX_CURVES])]
    picture, panels = _panels(title, 2)
    for group, color in zip(chosen, colors(len(chosen))):
        label = ", ".join(f"{_short(c)} {_written(group[0][c])}" for c in columns)
        steps, seconds, returns = series(group, members)
        curve = curves.gathered(label, steps, returns)
        for axes, x in zip(panels, (steps, seconds)):
            axes.plot(x, curve.center, color=color, lw=1.6, label=label or None)
            if curve.band is not None:
                axes.fill_between(x, *curve.band, color=color, alpha=0.18, lw=0)
    seeds = max(len(g) for g in chosen)
    name = f"return (IQM of {seeds} seeds, 95%)" if seeds > 1 else "return of an episode"
    for axes, unit in zip(panels, ("environment steps", "seconds of training, all members together")):
        if goal is not None:
            axes.axhline(goal, color="0.35", lw=1, ls=(0, (4, 3)))
        axes.set_xlabel(unit)
        axes.set_ylabel(name)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    if columns:
        more = f"the best {len(chosen)} of {len(drawn)}" if len(chosen) < len(drawn) else None
        panels[0].legend(edgecolor="none", fontsize=8, title=more, title_fontsize=8)  # above what lies behind it
    return picture


def records_of(row: Row, members: Members) -> Sequence[Row]:
    """The records of a row's own training."""
    found = members[row["group"]]
    names = [name for name, _ in next(iter(found), ())]  # all members of a program have the same
    return found.get(tuple((name, row[name]) for name in names), ())


def series(group: Sequence[Row], members: Members) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps [R], seconds [R] and returns [S, R] of the rows of a configuration, from the records of their programs."""
    lines = [[[r[k] if r[k] is not None else np.nan for k in KEYS] for r in records_of(row, members)] for row in group]
    length = min(map(len, lines))
    steps, seconds, returns, episodes = np.moveaxis(np.array([line[:length] for line in lines], np.float64), -1, 0)
    at, means, _ = curves.thin(steps[0], returns, episodes, MAX_POINTS)
    clock, _, _ = curves.thin(seconds.mean(0), returns, episodes, MAX_POINTS)
    return at, clock, curves.hold(means)


KEYS = ("env_steps", "train_time_s", "return_mean", "episodes")


class Lines:
    """Configurations along one column, a line for each combination of the others."""

    def __init__(self, column: str, others: Sequence[str], groups: Sequence[Sequence[Row]]):
        self.column = column
        self.values = list(dict.fromkeys(g[0][column] for g in groups))
        self.numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in self.values)
        self.values = sorted(self.values) if self.numeric else self.values
        self.by_label: dict[str, list[tuple[Any, Sequence[Row]]]] = {}
        for group in sorted(groups, key=lambda g: self.values.index(g[0][column])):
            label = ", ".join(f"{_short(c)} {_written(group[0][c])}" for c in others)
            self.by_label.setdefault(label, []).append((group[0][column], group))

    def places(self, points: Sequence[tuple[Any, Any]]) -> list[float]:
        """Where they lie along the axis."""
        return [x if self.numeric else self.values.index(x) for x, _ in points]

    def label(self, axes: Any, name: str, log: bool) -> None:
        """Names, scales and ticks: those that were tried."""
        axes.set_xlabel(_short(self.column).replace("num envs", "environments"))
        axes.set_ylabel(name)
        if self.numeric and 0 < min(self.values) <= max(self.values) / 8:
            axes.set_xscale("log")
        if len(self.values) <= MAX_TICKS:
            places = self.values if self.numeric else range(len(self.values))
            axes.set_xticks(places, [_written(v) for v in self.values], fontsize=8)
            axes.xaxis.set_minor_locator(NullLocator())
        if log and all((line.get_ydata() > 0).all() for line in axes.lines):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(_tick))
            axes.yaxis.set_minor_formatter(FuncFormatter(_tick) if _narrow(axes) else NullFormatter())
        if len(self.by_label) > 1 and len(self.by_label) <= 2 * MAX_CURVES:
            axes.legend(frameon=False, fontsize=8)


def colors(number: int) -> list[Any]:
    """From dark to light."""
    return [matplotlib.colormaps["viridis"](0.85 * i / max(number - 1, 1)) for i in range(number)]


def _lines(columns: Sequence[str], groups: Sequence[Sequence[Row]]) -> Lines:
    """Along num_envs, or else the first column of numbers, or else the first."""
    numbers = [c for c in columns if all(isinstance(g[0][c], (int, float)) for g in groups)]
    column = "num_envs" if "num_envs" in columns else (numbers or list(columns))[0]
    return Lines(column, [c for c in columns if c != column], groups)


def _panels(title: str, number: int) -> tuple[curves.Picture, Sequence[Any]]:
    picture = curves.Picture(figsize=(6.4 if number == 1 else 10.4, 4.2), dpi=130, layout="constrained")
    panels = picture.subplots(1, number, squeeze=False)[0]
    for axes in panels:
        curves.style(axes)
    panels[0].set_title(curves.literal(title), loc="left", fontsize=11)
    return picture, panels


def _shared(columns: Sequence[str], groups: Sequence[Sequence[Row]]) -> list[str]:
    """Columns of which every program has one value."""
    programs = {g[0]["group"] for g in groups}
    return [c for c in columns if len({(g[0]["group"], repr(g[0][c])) for g in groups}) == len(programs)]


def _tick(value: float, _: Any) -> str:
    return f"{value:g}" if value < 1000 else EngFormatter(sep="")(value)


def _narrow(axes: Any) -> bool:
    """Less than a power of ten is seen, so that minor ticks need names."""
    low, high = axes.get_ylim()
    return low > 0 and high / low < 12


def _short(column: str) -> str:
    return column.removeprefix("agent.").replace("_", " ")


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else curves.literal(str(value))


def _median(group: Sequence[Row], key: str) -> float:
    """The median over the seeds of one configuration, which may be one program or several."""
    return statistics.median(row[key] for row in group if row[key] is not None)
