"""Write what a search has found: a preset, a table of the trials, a report and figures."""

import math
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast.config.paths import FORMAT, SWEEP_REPORT
from jaxrl_fast.config.sources import PROGRAM
from jaxrl_fast.options.run import NOT_SAVED, OF_RUN, written_env
from jaxrl_fast.search.spaces import text_of, word
from jaxrl_fast.search.trials import DEFAULT, Result, Trial, best_of, ranked, score_of
from jaxrl_fast.sweep.table import as_csv
from jaxrl_fast.utils import formatting, warnings
from jaxrl_fast.utils.files import replace
from jaxrl_fast.utils.importing import name_of
from jaxrl_fast.utils.plain import as_lists

PRESET, TABLE, REPORT = "best.yaml", "trials.csv", SWEEP_REPORT
MAX_ROWS = 20  # trials in the table of the report
SCORES = {
    "final": "mean return of the last evaluation",
    "best": "mean return of the best evaluation, which promises too much, because its luck is chosen too",
    "area": "mean return over all evaluations, the area below the curve",
}
OF_A_POPULATION = (
    "The values are those at the end of population-based training. The tuning score is of networks that had other "
    "values before; the test trains with these values from the first step."
)


def write(folder: Path, result: Result) -> list[str]:
    """Write best.yaml, trials.csv, report.md and the figures. Return lines for the terminal.

    best.yaml is left out while no trial has a score. The files replace those of an earlier call.
    """
    best = best_of(result)
    if best:
        replace(folder / PRESET, preset_of(result, best))
    if result.trials:
        replace(folder / TABLE, as_csv(rows_of(result)))
    saved = _save_figures(folder, result)
    lines = summary(result)
    train = f"Train the best settings: `{PROGRAM} --config {quote(str(folder / PRESET))}`"
    replace(folder / REPORT, as_markdown(result, [*lines, *([f"- {train}."] if best else [])], saved))
    plain = [line.replace("**", "").removeprefix("- ") for line in lines]
    preset = f"preset {folder / PRESET}   " if best else ""
    return [*plain, f"  {preset}report {folder / REPORT}   table {folder / TABLE}"]


def preset_of(result: Result, best: Trial) -> str:
    """Return the text of a preset with the base run's settings and the values of a trial.

    It holds the options that differ from their defaults, and those that were searched. Options that change no result,
    such as those of logging, and the seeds are left out.
    """
    import yaml

    settings = result.settings.replace(**best.values)
    values: dict[str, Any] = {"algo": settings.algo}
    for name, option in settings.known.items():
        value = settings.value(name)
        changes_no_result = name in OF_RUN and not option.sweepable and option.resumable
        left_out = changes_no_result or name in (*NOT_SAVED, "seed", "num_seeds") or "" in option.parts
        if name in ("env", "total_steps") or name in best.values or not left_out and value != option.default:
            values[name] = written_env(value) if name == "env" and not isinstance(value, type) else _plain(value)
    if not isinstance(settings.options.env, str | type):
        values["meta"] = {"format": FORMAT, "env_is_an_object": True}  # which a file cannot rebuild
    test = f"; on test seeds {mean_of(result.test[best.number])}" if best.number in result.test else ""
    says = f"# Found by a search of {formatting.counted(len(result.trials), 'trial')}: trial {best.number}, score "
    says += f"{mean_of(best.scores)} on {formatting.counted(len(best.scores), 'tuning seed')}{test}."
    says += f"\n# {OF_A_POPULATION}" if result.scheduler == "pbt" else ""
    return f"{says}\n{yaml.safe_dump(values, sort_keys=False)}"


def rows_of(result: Result) -> list[dict[str, Any]]:
    """Return the rows of trials.csv, in the order of the trials. `scores` has the score of each seed."""
    rows = []
    for trial in result.trials:
        values = {dimension.name: trial.values.get(dimension.name) for dimension in result.space}
        of_trial = trial._asdict() | {"scores": trial.scores, "test_scores": result.test.get(trial.number, ())}
        rows.append({"number": trial.number, **values, **{k: v for k, v in of_trial.items() if k != "values"}})
    return rows


def summary(result: Result) -> list[str]:
    """Return lines about the search: the best trial, the base settings, and the trials that diverged."""
    best = best_of(result)
    lines = []
    if best is None:
        lines.append("- No trial has a score." if not ranked(result.trials) else "- All scored trials diverged.")
    else:
        lines.append(
            f"- Best: **trial {best.number}**, {mean_of(best.scores)} on tuning seeds{_test_of(result, best)}."
        )
        on_test = {t.number: score_of(result.test.get(t.number, ())) for t in ranked(result.trials)}
        if best.number in result.test and (other := max(on_test, key=lambda n: on_test[n])) != best.number:
            says = f"- On test seeds trial {other} scores more, {mean_of(result.test[other])}."
            lines.append(f"{says} If you choose it for that, test it on further seeds.")
    if DEFAULT in result.test:
        base = f"- The base settings: {mean_of(result.test[DEFAULT])} on the same test seeds"
        is_better = best and score_of(result.test.get(best.number, ())) > score_of(result.test[DEFAULT])
        lines.append(f"{base}." if is_better else f"{base}, so this search has found nothing better.")
    steps = formatting.short_number(max((trial.env_steps_at_end for trial in result.trials), default=0))
    counted = formatting.counted(len(result.trials), "trial")
    effort = f"{counted} with {formatting.counted(len(result.seeds), 'seed')} each, {steps} environment steps together"
    chosen = f"sampler {result.sampler}, scheduler {result.scheduler}"
    lines.append(f"- {effort}, in {formatting.seconds(result.seconds)}; {chosen}.")
    for status, what in (("stopped", "stopped early"), ("failed", "failed"), ("running", "not finished")):
        if number := sum(trial.status == status for trial in result.trials):
            lines.append(f"- {number} of {counted}: {what}.")
    lines += [f"  - Failed: {why}" for why in dict.fromkeys(trial.failure for trial in result.trials) if why]
    scored = ranked(result.trials)
    scores = [score for trial in scored for score in trial.scores]
    if diverged := sum(not math.isfinite(score) for score in scores):
        trials = sum(trial.score == -math.inf for trial in scored)
        lines.append(f"- {trials} of {counted} diverged, {diverged} of {len(scores)} seeds; they are ranked last.")
    return lines


def as_markdown(result: Result, lines: Sequence[str], figure_names: Sequence[str]) -> str:
    """Return the report as Markdown. `lines` is its summary."""
    settings, best = result.settings, best_of(result)
    where = f"{name_of(settings.options.env)}, {formatting.counted(settings.options.num_envs, 'environment')}"
    parts = [f"# Search of {settings.algo_name.upper()} on {where}", "", *lines, "", _about_scores(result), ""]
    if best:
        searched = lambda d: text_of(d).removeprefix(f"{d.name} ")
        values = lambda d: [cell(settings.value(d.name)), cell(best.values.get(d.name))]
        rows: list[list[Any]] = [[d.name, searched(d), *values(d)] for d in result.space]
        parts += ["## Best settings", "", *_table(["option", "searched", "base run", "best"], rows), ""]
    if tested := [trial for trial in ranked(result.trials) if trial.number in result.test]:
        heads = ["trial", "tuning score", "test score", "promised too much by"]
        scores = lambda t: [mean_of(t.scores), mean_of(result.test[t.number])]
        rows = [[trial.number, *scores(trial), _number(_excess(result, trial))] for trial in tested]
        parts += ["## On test seeds", "", *_table(heads, rows), ""]
    if result.trials:
        parts += [f"## The best {min(MAX_ROWS, len(result.trials))} of {len(result.trials)} trials", ""]
        parts += [*_trials(result), "", f"All trials are in {TABLE}.", ""]
    parts += [f"![{Path(name).stem.replace('_', ' ')}]({name})\n" for name in figure_names]
    return "\n".join(parts).rstrip() + "\n"


def mean_of(scores: Sequence[float]) -> str:
    """Return the mean of scores with its 95% bootstrap interval: "480.1 (471.0 to 490.2)".

    The mean of a single score has no interval. Seeds that diverged are counted, and left out of the mean.
    """
    import numpy as np

    from jaxrl_fast.metrics.statistics import mean_interval

    known = [score for score in scores if math.isfinite(score)]
    diverged = f", {len(scores) - len(known)} of {len(scores)} diverged" if len(known) < len(scores) else ""
    if not known:
        return f"diverged ({len(scores)} of {len(scores)})"
    interval = ""
    if len(known) > 1:
        low, high = mean_interval([np.array(known)])
        interval = f" ({_number(low)} to {_number(high)})"
    return f"{_number(math.fsum(known) / len(known))}{interval}{diverged}"


def _about_scores(result: Result) -> str:
    """Return what a score is, and how to read the two kinds of it."""
    seeds = lambda numbers: f"{formatting.counted(len(numbers), 'seed')} ({', '.join(map(str, numbers))})"
    kind = SCORES.get(result.score_kind, result.score_kind)
    text = f"The score of a seed is the {kind}. The mean over {seeds(result.seeds)} ranks a trial. Intervals are 95% "
    text += "bootstrap intervals of the mean over seeds. "
    text += f"{OF_A_POPULATION} " if result.scheduler == "pbt" else ""
    if not result.test:
        return f"{text}No trial has been trained on test seeds, so the scores of the best trials promise too much."
    text += f"The best of many scores is partly luck, so the winners are trained again on {seeds(result.test_seeds)}. "
    return f"{text}Only the test score is an estimate of what these settings reach."


def _trials(result: Result) -> list[str]:
    """Return the table of the best trials as Markdown lines, with those without a score at its end."""
    best = ranked(result.trials)
    shown = (best + [trial for trial in result.trials if trial not in best])[:MAX_ROWS]
    heads = ["trial", "score", *(dimension.name for dimension in result.space), "status", "steps", "rung"]
    rows: list[list[Any]] = []
    for trial in shown:
        values = [cell(trial.values.get(dimension.name)) for dimension in result.space]
        score = "" if trial.score is None else mean_of(trial.scores)
        rows.append([trial.number, score, *values, trial.status, formatting.short_number(trial.steps), trial.rung])
    without_rungs = None if any(trial.rung for trial in result.trials) else -1
    return _table(heads[:without_rungs], [row[:without_rungs] for row in rows])


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a table as Markdown lines."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in lines]


def _test_of(result: Result, trial: Trial) -> str:
    """Return the end of a sentence about a trial's test score, or ""."""
    if trial.number not in result.test:
        return ""
    excess = _excess(result, trial)
    much = "little" if excess < 0 else "much"
    promised = f": promised too {much} by {_number(abs(excess))}" if math.isfinite(excess) else ""
    return f", {mean_of(result.test[trial.number])} on test seeds{promised}"


def _excess(result: Result, trial: Trial) -> float:
    """Return by how much the tuning score exceeds the test score; infinite or NaN if a seed diverged."""
    return score_of(trial.scores) - score_of(result.test[trial.number])


def _number(score: float) -> str:
    """Return a score with one digit behind the point, or with four significant digits below 10; "" if not finite."""
    if not math.isfinite(score):
        return ""
    return f"{score:.1f}" if abs(score) >= 10 or score == 0 else f"{score:.4g}"


def cell(value: Any) -> str:
    """Return an option's value for a table: real numbers with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else word(value)


def _plain(value: Any) -> Any:
    """Return a value as YAML holds it."""
    return name_of(value) if isinstance(value, type) else as_lists(value)


def _save_figures(folder: Path, result: Result) -> list[str]:
    """Draw the figures, save them, and return the names of their files; one that fails is left out with a warning."""
    from jaxrl_fast.plotting import curves  # imports matplotlib
    from jaxrl_fast.search import figures

    saved = []
    for name, draw in figures.of(result).items():
        with warnings.warn_on_error(f"{name} could not be drawn"):
            curves.save(draw(), folder / name)
            saved.append(name)
    return saved
