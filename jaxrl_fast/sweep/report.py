"""Write the results of a sweep: a table with a row for each member, a report and figures."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast.config import paths
from jaxrl_fast.config.paths import SWEEP_REPORT, SWEEP_TABLE
from jaxrl_fast.config.sources import SWEEP
from jaxrl_fast.runs import files
from jaxrl_fast.sweep import grid
from jaxrl_fast.sweep.directory import SweepPlan
from jaxrl_fast.sweep.table import Row, as_cell, configurations, locked, write_table
from jaxrl_fast.utils import devices, formatting, warnings
from jaxrl_fast.utils.files import replace
from jaxrl_fast.utils.importing import name_of

RULES = {
    "none": "No hyperparameter was scaled with the number of environments (`scale none`).",
    "learning-rate-linear": "The learning rate was multiplied by num_envs / {} (`scale learning-rate-linear`).",
    "learning-rate-sqrt": "The learning rate was multiplied by √(num_envs / {}) (`scale learning-rate-sqrt`).",
    "minibatches": "The number of minibatches was multiplied by num_envs / {}, at least 1, so that their size stayed "
    "the same (`scale minibatches`).",
}
MAX_TIES = 3  # configurations that are named if several are equally good


def write_report(sweep: SweepPlan) -> list[str]:
    """Write the table, the report and the figures. Return lines for the terminal: the ranking and the files."""
    table = write_table(sweep)
    drawn = figures_of(sweep, table)
    from jaxrl_fast.plotting import curves  # imports matplotlib

    saved = []
    with locked(sweep.folder):
        for name, figure in drawn.items():
            with warnings.warn_on_error(f"{name} could not be drawn"):
                curves.save(figure, sweep.folder / name)
                saved.append(name)
        replace(sweep.folder / SWEEP_REPORT, as_markdown(sweep, table, saved))
    lines = [line.replace("**", "") for line in ranking(sweep, table)]
    report, table_file = (sweep.shown(sweep.folder / name) for name in (SWEEP_REPORT, SWEEP_TABLE))
    return [*lines, f"  report {report}   table {table_file}"]


def as_markdown(sweep: SweepPlan, table: Sequence[Row], figure_names: Sequence[str]) -> str:
    """Return the report as Markdown."""
    settings = next(iter(sweep.groups.values())).settings
    env, num_envs = name_of(settings.options.env), settings.options.num_envs
    what = f"{settings.algo_name} on {'several environments' if 'env' in sweep.columns else env}"
    what += "" if "num_envs" in sweep.columns else f", {num_envs} environments"
    lines = [f"# Sweep of {what}", "", *ranking(sweep, table), ""]
    lines += [RULES[sweep.scale].format(sweep.base_num_envs), ""]
    lines += [
        "Steps per second are training throughput (updates included, compilation excluded) summed over the members of "
        f"a program; {SWEEP_TABLE} has it per member (`env_steps_per_s_member`). Time to the threshold is the training "
        "time of the program while all its members train. Memory is that of the compiled program.",
        "",
    ]
    lines += [*_table(sweep, table), ""]
    lines += [f"![{Path(name).stem.replace('_', ' ')}]({name})\n" for name in figure_names]
    not_done = [r for r in table if r["status"] != "done"]
    command = f"{SWEEP} --resume {quote(str(sweep.shown(sweep.folder)))}"
    if not_done:
        lines += ["## Not done", ""]
        named = lambda r: grid.words({c: r[c] for c in (*sweep.columns, "seed")})
        lines += [f"- {named(r)}: {r['status']}{': ' + r['failure'] if r['failure'] else ''}" for r in not_done]
        if any(r["status"] == "failed" for r in not_done):
            lines += ["", f"Retry the failed programs: `{command} --retry`."]
        lines.append("")
    device = next(
        (s["device"] for g in sweep.groups if (s := files.summary_if_any(sweep.folder / g))), devices.device()
    )
    lines.append(f"Device: {device}. Resume: `{command}`. All results: {SWEEP_TABLE}.")
    return "\n".join(lines) + "\n"


def ranking(sweep: SweepPlan, table: Sequence[Row]) -> list[str]:
    """Return lines that name the best configuration by each measure.

    The measures are throughput, final return, evaluation return, and time and steps to the threshold. Each environment
    is ranked separately.
    """
    if "env" not in sweep.columns:
        return _ranking(sweep, table)
    lines = []
    for env in dict.fromkeys(row["env"] for row in table):
        groups = {name: g for name, g in sweep.groups.items() if as_cell(g.settings.options.env) == env}
        part = sweep._replace(groups=groups, columns=tuple(c for c in sweep.columns if c != "env"))
        ranked = _ranking(part, [row for row in table if row["env"] == env])
        lines += [f"- On {env}, {line[2].lower()}{line[3:]}" for line in ranked]
    return lines


def _ranking(sweep: SweepPlan, table: Sequence[Row]) -> list[str]:
    """Return the ranking of configurations of one environment."""
    groups = configurations(sweep, table)
    if len(groups) < 2:
        return []
    named = lambda group: grid.words({c: group[0][c] for c in sweep.columns})
    lines = []
    ran = [g for g in groups if any(row["env_steps_per_s"] for row in g)]
    if ran:
        median = lambda group: statistics.median(_known(group, "env_steps_per_s"))  # over its programs
        lines += _fastest(sweep, [{**group[0], "env_steps_per_s": median(group)} for group in ran])
    for title, key in (("final return", "final_return"), ("evaluation return", "eval_return")):
        scored = [(group, _known(group, key)) for group in ran if _known(group, key)]
        if scored:  # first by the fraction of seeds that did not diverge, for the survivors alone are biased
            scored.sort(key=lambda pair: (-len(pair[1]) / len(pair[0]), -_iqm(pair[1])))
            num_known = lambda x, group: "" if len(x) == len(group) else f", {len(x)} of {len(group)}"
            results = [f"{_iqm(x):.1f}{num_known(x, group)}" for group, x in scored]
            of_seeds = " (IQM)" if any(len(x) > 1 for _, x in scored) else ""
            lines.append(
                f"- By {title}{of_seeds}: {_best_of([group for group, _ in scored], results, named, len(groups))}."
            )
    solved, *others = thresholds(sweep)
    if others:
        several = ", ".join("none" if x is None else f"{x:g}" for x in (solved, *others))
        return [*lines, f"- Thresholds differ ({several}), so time to solve is not ranked."]
    if solved is None:
        return [*lines, "- No threshold was given (`solved_threshold`), so time to solve is not ranked."]
    reached = [g for g in ran if _known(g, "steps_to_solve")]
    if not reached:
        return [*lines, f"- No configuration reached the threshold of {solved:g}."]
    for title, key, show in (
        ("time", "time_to_solve_s", formatting.seconds),
        ("steps", "steps_to_solve", formatting.short_number),
    ):
        reaching = [(group, _known(group, key)) for group in reached]
        reaching.sort(key=lambda pair: (-len(pair[1]) / len(pair[0]), statistics.median(pair[1])))
        results = [f"{show(statistics.median(x))}, median of {len(x)} of {len(group)}" for group, x in reaching]
        best = _best_of([group for group, _ in reaching], results, named, len(groups))
        lines.append(f"- By {title} to the threshold of {solved:g}: {best}.")
    return lines


def _best_of(
    ranked: Sequence[list[Row]], results: Sequence[str], named: Callable[[list[Row]], str], num_configurations: int
) -> str:
    """Return the name and the result of the best configuration, and of those whose printed result equals it."""
    names = [f"**{named(group)}**" for group, result in zip(ranked, results) if result == results[0]]
    if len(names) == num_configurations > 1:
        return f"all equal ({results[0]})"
    shown, more = names[:MAX_TIES], len(names) - MAX_TIES
    return f"{' and '.join(shown)}{f' and {more} more' if more > 0 else ''} ({results[0]})"


def thresholds(sweep: SweepPlan) -> list[float | None]:
    """Return the distinct values of solved_threshold."""
    return list(dict.fromkeys(group.settings.options.solved_threshold for group in sweep.groups.values()))


def _fastest(sweep: SweepPlan, ran: Sequence[Row]) -> list[str]:
    """Return the line about throughput; options in which members of one program differ are left out."""
    member_options = {name for group in sweep.groups.values() for name in group.members[0].values}
    shared = [c for c in sweep.columns if c not in member_options]
    if not shared:
        return []
    best, first = max(ran, key=_speed), min(ran, key=lambda row: row.get("num_envs", 0))
    named = lambda row: grid.words({c: row[c] for c in shared})
    ratio = f", {_speed(best) / _speed(first):.1f} times that of {named(first)}"
    ratio = ratio if "num_envs" in shared and best is not first else ""
    return [f"- By throughput: **{named(best)}** ({formatting.short_number(_speed(best))} steps/s{ratio})."]


def _speed(row: Row) -> float:
    """Return the environment steps per second of a row's program."""
    return row["env_steps_per_s"]


def figures_of(sweep: SweepPlan, table: Sequence[Row]) -> dict[str, Any]:
    """Return the figures by their file names; empty if nothing has been trained."""
    from jaxrl_fast.plotting import sweep_figures

    settings = next(iter(sweep.groups.values())).settings
    done = [r for r in table if r["env_steps_per_s"]]
    if not done:
        return {}
    title = settings.algo_name.upper() + ("" if "env" in sweep.columns else f" on {name_of(settings.options.env)}")
    groups = configurations(sweep, done)
    records = {name: _records(sweep.folder / name) for name in sweep.groups}
    threshold, *others = thresholds(sweep)
    return sweep_figures.draw_figures(title, sweep.columns, groups, records, None if others else threshold)


def _table(sweep: SweepPlan, table: Sequence[Row]) -> list[str]:
    """Return the report's table as Markdown lines, one for each configuration."""
    has_threshold = any(threshold is not None for threshold in thresholds(sweep))
    heads = [
        *sweep.columns,
        "seeds",
        "return (IQM, 95%)",
        "eval return (IQM)",
        "solved",
        "steps to solve",
        "time to solve",
    ]
    heads += ["steps/s", "members", "compile", "memory MB"]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for group in configurations(sweep, table):
        first, steps = group[0], _known(group, "steps_to_solve")
        median = lambda key, show, group=group: show(statistics.median(known)) if (known := _known(group, key)) else ""
        evaluated = _known(group, "eval_return")
        num_known = len(_known(group, "final_return"))
        seeds = str(len(group)) if num_known == len(group) else f"{num_known} of {len(group)}"
        cells = [first[c] for c in sweep.columns] + [seeds, _mean_and_interval(_known(group, "final_return"))]
        cells += [f"{_iqm(evaluated):.1f}" if evaluated else "", f"{len(steps)}/{len(group)}" if has_threshold else ""]
        cells += [median("steps_to_solve", formatting.short_number), median("time_to_solve_s", formatting.seconds)]
        cells += [
            median("env_steps_per_s", formatting.short_number),
            first["members"],
            median("compile_time_s", formatting.seconds),
        ]
        cells += [median("program_memory_mb", lambda x: f"{x:.0f}")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _mean_and_interval(returns: list[float]) -> str:
    """Return the IQM and its 95% interval, "480.1 (471.0 to 490.2)"; a single return has no interval."""
    import numpy as np

    from jaxrl_fast.metrics.statistics import bootstrap

    if not returns:
        return ""
    interval = ""
    if len(returns) > 1:
        low, high = bootstrap(np.array(returns)[:, None])
        interval = f" ({low:.1f} to {high:.1f})"
    return f"{_iqm(returns):.1f}{interval}"


def _iqm(values: list[float]) -> float:
    """Return the inter-quartile mean."""
    import numpy as np

    from jaxrl_fast.metrics.statistics import iqm

    return float(iqm(np.array(values)))


def _known(group: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the values of a column that are known."""
    return [row[key] for row in group if row[key] is not None]


def _records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run; [] with a warning if they cannot be read."""
    path = folder / paths.METRICS
    if path.is_file():
        with warnings.warn_on_error(f"{path} cannot be read"):
            return files.read_metrics(folder)
    return []
