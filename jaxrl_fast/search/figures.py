"""Draw the figures of a search: its progress, each option against the score, importance and parallel coordinates."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.ticker import EngFormatter

from jaxrl_fast.plotting import curves
from jaxrl_fast.search.spaces import Dimension, distributions, drawn_of, position, word
from jaxrl_fast.search.trials import DEFAULT, Result, Trial, ranked
from jaxrl_fast.utils import formatting
from jaxrl_fast.utils.importing import name_of

MAX_COLUMNS = 3  # panels side by side
MIN_TRIALS = 20  # with a score, for an importance: 5 in the best quarter
TARGET = 0.25  # the share of trials that count as good for an importance
MAX_TICKS = 9  # labeled choices on an axis


def of(result: Result) -> dict[str, Callable[[], curves.NotebookFigure]]:
    """Return functions that draw the figures, by file name; empty without a trial that has a finite score."""
    scored = [trial for trial in ranked(result.trials) if trial.score != -math.inf]
    if not scored:
        return {}
    figures: dict[str, Callable[[], curves.NotebookFigure]] = {
        "progress.png": lambda: progress(result, scored),
        "options.png": lambda: options(result, scored),
    }
    if len(scored) >= MIN_TRIALS and len(result.space) > 1 and len({trial.score for trial in scored}) > 1:
        figures["importance.png"] = lambda: importance(result, scored)
    if len(scored) > 1 and len(result.space) > 1:
        figures["parallel.png"] = lambda: parallel(result, scored)
    return figures


def progress(result: Result, scored: Sequence[Trial]) -> curves.NotebookFigure:
    """Draw the score of each trial and the best so far, against the environment steps of the whole search."""
    figure, axes = _figure(result)
    in_time = sorted(scored, key=lambda trial: (trial.env_steps_at_end, trial.number))
    steps, scores = np.array([(trial.env_steps_at_end, trial.score) for trial in in_time], np.float64).T
    stopped = np.array([trial.status == "stopped" for trial in in_time])
    for chosen, color, label in ((stopped, "0.75", "stopped trials"), (~stopped, curves.FAINT, "trials")):
        if chosen.any():
            axes.plot(steps[chosen], scores[chosen], "o", ms=4, color=color, label=label)
    best = np.maximum.accumulate(scores)
    axes.step(steps, best, where="post", color=curves.INK, lw=2, label="best so far")
    diverged = [t.env_steps_at_end for t in result.trials if t.score == -math.inf]
    if diverged:
        on_the_axis = axes.get_xaxis_transform()
        axes.plot(diverged, [0.01] * len(diverged), "x", color=curves.MARK, transform=on_the_axis, label="diverged")
    if np.isfinite(result.test.get(DEFAULT, (math.nan,))).all():
        axes.axhline(
            np.mean(result.test[DEFAULT]), color="0.35", lw=1, ls=(0, (4, 3)), label="base settings on test seeds"
        )
    axes.set(
        xlabel="environment steps of the search, all trials and seeds", ylabel=_score_label(result), xlim=(0, None)
    )
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(frameon=False, fontsize=8)
    return figure


def options(result: Result, scored: Sequence[Trial]) -> curves.NotebookFigure:
    """Draw the score against each option, with a panel for each. The later a trial, the darker; a star is the best."""
    num_columns = min(len(result.space), MAX_COLUMNS)
    num_rows = -(-len(result.space) // num_columns)
    figure = curves.NotebookFigure(figsize=(3.6 * num_columns + 0.6, 2.9 * num_rows), dpi=130, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False, sharey=True).ravel()
    order, ys = np.array([trial.number for trial in scored]), np.array([trial.score for trial in scored])
    points: Any = None
    for axes, dimension in zip(panels, result.space):
        curves.style_axes(axes)
        xs = np.array([_position(dimension, trial.values[dimension.name]) for trial in scored])
        if dimension.kind == "choice":  # so that points of one choice are seen apart
            xs = xs + (order * 0.618 % 1 - 0.5) * 0.3
        points = axes.scatter(xs, ys, c=order, cmap="viridis_r", s=14)
        axes.plot(xs[:1], ys[:1], "*", ms=13, color=curves.MARK)
        axes.set_xlabel(curves.escape_text(dimension.name))
        _scale_axis(axes, dimension)
    for axes in panels[len(result.space) :]:
        axes.set_visible(False)
    for row in panels[::num_columns]:
        row.set_ylabel(_score_label(result))
    figure.colorbar(points, ax=list(panels), label="trial", shrink=0.7)
    figure.suptitle(curves.escape_text(_title(result)), x=0.01, ha="left", fontsize=11)
    return figure


def importances(result: Result, scored: Sequence[Trial]) -> dict[str, float]:
    """Return the importance of each option by PED-ANOVA, in decreasing order; the sum is 1.

    Watanabe et al. 2023: an option matters if the best quarter of the trials have other values of it than all trials.
    """
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", storage=optuna.storages.InMemoryStorage())
    optuna.logging.set_verbosity(before)
    of_space = distributions(result.space)
    for trial in scored:
        drawn = {d.name: drawn_of(d, trial.values[d.name]) for d in result.space}
        study.add_trial(optuna.trial.create_trial(params=drawn, distributions=of_space, value=trial.score))
    return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=TARGET))


def importance(result: Result, scored: Sequence[Trial]) -> curves.NotebookFigure:
    """Draw the importance of each option as a bar."""
    found = importances(result, scored)
    figure, axes = _figure(result, height=1.4 + 0.35 * len(found))
    names, shares = [*found][::-1], [*found.values()][::-1]
    bars = axes.barh([*map(curves.escape_text, names)], shares, color=curves.INK, height=0.6)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=3, fontsize=8)
    axes.set(xlabel=f"importance (PED-ANOVA, best {TARGET:.0%} of {len(scored)} trials)", xlim=(0, max(shares) * 1.12))
    axes.grid(axis="y", visible=False)
    return figure


def parallel(result: Result, scored: Sequence[Trial]) -> curves.NotebookFigure:
    """Draw each trial as a line over the options, each on its scale; good trials are dark and in front."""
    figure, axes = _figure(result, width=max(curves.WIDTH, 1.5 * len(result.space) + 1.5))
    shares = np.array([[position(d, trial.values[d.name]) for d in result.space] for trial in scored[::-1]])
    positions = np.arange(len(result.space))
    lines = LineCollection([np.stack([positions, line], 1) for line in shares], cmap="viridis_r", lw=1.2, alpha=0.7)
    lines.set_array(np.linspace(0, 1, len(scored)))
    axes.add_collection(lines)
    axes.plot(positions, shares[-1], color=curves.MARK, lw=2.5, label="best trial")
    axes.set(xlim=(-0.3, len(positions) - 0.7), ylim=(-0.14, 1.14), yticks=[])
    axes.set_xticks(positions, [curves.escape_text(d.name.replace(".", ".\n")) for d in result.space], fontsize=8)
    axes.grid(axis="x", color="0.75")
    at: Any = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 7}
    for x, dimension in zip(positions, result.space):
        values = dimension.values or (dimension.low, dimension.high)
        for share, value in zip(np.linspace(0, 1, len(values)), values):
            axes.annotate(curves.escape_text(_text(value)), (x, share), xytext=(0, 7 if share else -7), **at)
    axes.spines["left"].set_visible(False)
    colorbar = figure.colorbar(lines, ax=axes, ticks=[0, 1], label=f"rank by {_score_label(result)}")
    colorbar.ax.set_yticklabels(["worst", "best"])
    axes.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 1.12))
    return figure


def _position(dimension: Dimension, value: Any) -> float:
    """Return the position of a value along the axis of `options`; of a choice, its index."""
    if dimension.kind == "choice":
        return [*map(word, dimension.values)].index(word(value))
    return float(drawn_of(dimension, value) if dimension.scale == "one_minus" else value)


def _scale_axis(axes: Any, dimension: Dimension) -> None:
    """Set scale and ticks of an option's axis. The axis of a discount has 1 - x, and grows to the left."""
    if dimension.kind == "choice":
        names = [*map(word, dimension.values)]
        shown = range(0, len(names), -(-len(names) // MAX_TICKS))
        axes.set_xticks(list(shown), [curves.escape_text(names[i]) for i in shown], fontsize=8)
        axes.set_xlim(-0.5, len(names) - 0.5)
    elif dimension.scale == "one_minus":
        axes.set_xscale("log")
        axes.invert_xaxis()
        axes.xaxis.set_major_formatter(lambda x, _: f"{1 - x:.10g}")
        axes.xaxis.set_minor_formatter(lambda *_: "")
    elif dimension.scale in ("log", "power_of_two"):
        axes.set_xscale("log", base=2 if dimension.scale == "power_of_two" else 10)
        if dimension.kind == "whole":
            axes.xaxis.set_major_formatter(lambda x, _: formatting.short_number(x))


def _figure(result: Result, width: float = curves.WIDTH, height: float = curves.HEIGHT) -> tuple[Any, Any]:
    """Return a figure with one panel and the title of the search."""
    figure = curves.NotebookFigure(figsize=(width, height), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    curves.style_axes(axes)
    axes.set_title(curves.escape_text(_title(result)), loc="left", fontsize=11)
    return figure, axes


def _title(result: Result) -> str:
    return f"{result.settings.algo_name.upper()} on {name_of(result.settings.options.env)}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else word(value)


def _score_label(result: Result) -> str:
    seeds = f"mean of {len(result.seeds)} seeds" if len(result.seeds) > 1 else "one seed"
    return f"{result.score_kind} score ({seeds})"
