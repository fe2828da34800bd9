"""What came of a sweep: a table with a row for each member, a report in words, and figures."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast.config import paths
from jaxrl_fast.config.names import SWEEP
from jaxrl_fast.config.paths import SWEEP_REPORT, SWEEP_TABLE
from jaxrl_fast.runs import files
from jaxrl_fast.sweep import grid
from jaxrl_fast.sweep.directory import SweepPlan
from jaxrl_fast.sweep.table import Row, as_cell, configurations, exclusive, write_table
from jaxrl_fast.utils import devices, formatting, warnings
from jaxrl_fast.utils.files import replace
from jaxrl_fast.utils.importing import name_of

RULES = {
    "none": "Nothing else was changed with the number of environments (`--scale none`).",
    "learning-rate-linear": "The learning rate was multiplied by num_envs / {} (`--scale learning-rate-linear`).",
    "learning-rate-sqrt": "The learning rate was multiplied by √(num_envs / {}) (`--scale learning-rate-sqrt`).",
    "minibatches": "The number of minibatches was multiplied by num_envs / {}, so that their size stayed the same; one "
    "where that is less than one (`--scale minibatches`).",
}
MAX_TIES = 3  # configurations that are named where none is better than the others


def write(sweep: SweepPlan) -> list[str]:
    """Table, report and figures; what to say of them, in lines."""
    table = write_table(sweep)
    drawn = figures_of(sweep, table)
    from jaxrl_fast.plotting import curves  # once there is something to draw

    saved = []
    with exclusive(sweep.folder):
        for name, picture in drawn.items():
            with warnings.warn_on_error(f"{name} could not be drawn"):
                curves.save(picture, sweep.folder / name)
                saved.append(name)
        replace(sweep.folder / SWEEP_REPORT, as_markdown(sweep, table, saved))
    verdicts = [line.replace("**", "") for line in ranking(sweep, table)]
    return [*verdicts, f"  report {sweep.folder / SWEEP_REPORT}   table {sweep.folder / SWEEP_TABLE}"]


def as_markdown(sweep: SweepPlan, table: Sequence[Row], pictures: Sequence[str]) -> str:
    """The report."""
    settings = next(iter(sweep.groups.values())).settings
    env, num_envs = name_of(settings.options.env), settings.options.num_envs
    what = f"{settings.algo_name} on {'several environments' if 'env' in sweep.columns else env}"
    what += "" if "num_envs" in sweep.columns else f", {num_envs} environments"
    lines = [f"# Sweep of {what}", "", *ranking(sweep, table), ""]
    lines += [RULES[sweep.scale].format(sweep.base_num_envs), ""]
    lines += [
        "Steps per second are of training, updates included, compiling not, and of all members of a program together; "
        f"what one has of it is `env_steps_per_s_member` in {SWEEP_TABLE}. Seconds to the threshold are training "
        "seconds of the program while all its members were trained. Memory is the program's, as compiled.",
        "",
    ]
    lines += [*_table(sweep, table), ""]
    lines += [f"![{Path(name).stem.replace('_', ' ')}]({name})\n" for name in pictures]
    wrong = [r for r in table if r["status"] != "done"]
    again = f"{SWEEP} --resume {quote(str(sweep.folder))}"
    if wrong:
        lines += ["## Not done", ""]
        named = lambda r: grid.words({c: r[c] for c in (*sweep.columns, "seed")})
        lines += [f"- {named(r)}: {r['status']}{': ' + r['failure'] if r['failure'] else ''}" for r in wrong]
        if any(r["status"] == "failed" for r in wrong):
            lines += ["", f"Once more what failed: `{again} --retry`."]
        lines.append("")
    device = next(
        (s["device"] for g in sweep.groups if (s := files.summary_if_any(sweep.folder / g))), devices.device()
    )
    lines.append(f"Made on {device}. Again: `{again}`; all of it: {SWEEP_TABLE}.")
    return "\n".join(lines) + "\n"


def ranking(sweep: SweepPlan, table: Sequence[Row]) -> list[str]:
    """Which configuration wins by throughput, by time and by steps to the threshold, in words.

    Environments are not compared: each has its own verdict.
    """
    if "env" not in sweep.columns:
        return _ranking(sweep, table)
    lines = []
    for env in dict.fromkeys(row["env"] for row in table):
        groups = {name: g for name, g in sweep.groups.items() if as_cell(g.settings.options.env) == env}
        part = sweep._replace(groups=groups, columns=tuple(c for c in sweep.columns if c != "env"))
        own = _ranking(part, [row for row in table if row["env"] == env])
        lines += [f"- On {env}, {line[2].lower()}{line[3:]}" for line in own]
    return lines


def _ranking(sweep: SweepPlan, table: Sequence[Row]) -> list[str]:
    """The verdict where there is one environment."""
    groups = configurations(sweep, table)
    if len(groups) < 2:
        return []
    named = lambda group: grid.words({c: group[0][c] for c in sweep.columns})
    lines = []
    ran = [g for g in groups if any(row["env_steps_per_s"] for row in g)]
    if ran:
        middle = lambda group: statistics.median(_known(group, "env_steps_per_s"))  # its seeds may be several programs
        lines += _fastest(sweep, [{**group[0], "env_steps_per_s": middle(group)} for group in ran])
    for title, key in (("final return", "final_return"), ("the greedy policy's return", "eval_return")):
        scored = [(group, _known(group, key)) for group in ran if _known(group, key)]
        if scored:  # those that lost the fewest seeds first: survivors of what diverges prove little
            scored.sort(key=lambda pair: (-len(pair[1]) / len(pair[0]), -_iqm(pair[1])))
            of_all = lambda x, group: "" if len(x) == len(group) else f", {len(x)} of {len(group)}"
            how = [f"{_iqm(x):.1f}{of_all(x, group)}" for group, x in scored]
            lines.append(f"- By {title}: {_first_of([group for group, _ in scored], how, named, len(groups))}.")
    solved, *others = thresholds(sweep)
    if others:
        several = ", ".join("none" if x is None else f"{x:g}" for x in (solved, *others))
        return [*lines, f"- Thresholds differ ({several}), so nothing is said of the way to them."]
    if solved is None:
        return [*lines, "- No threshold was given (`--solved RETURN`), so nothing is said of the way to one."]
    reached = [g for g in ran if _known(g, "steps_to_solve")]
    if not reached:
        return [*lines, f"- None reached the threshold of {solved:g}."]
    for title, key, show in (
        ("time", "time_to_solve_s", formatting.seconds),
        ("steps", "steps_to_solve", formatting.short_number),
    ):
        reaching = [(group, _known(group, key)) for group in reached]
        reaching.sort(key=lambda pair: (-len(pair[1]) / len(pair[0]), statistics.median(pair[1])))
        how = [f"{show(statistics.median(x))}, median of {len(x)} of {len(group)}" for group, x in reaching]
        best = _first_of([group for group, _ in reaching], how, named, len(groups))
        lines.append(f"- By {title} to the threshold of {solved:g}: {best}.")
    return lines


def _first_of(ranked: Sequence[list[Row]], how: Sequence[str], named: Callable[[list[Row]], str], number: int) -> str:
    """The best of so many configurations, of which some are ranked; and those that `how` does not tell from it."""
    names = [f"**{named(group)}**" for group, words in zip(ranked, how) if words == how[0]]
    if len(names) == number > 1:
        return f"all alike ({how[0]})"
    shown, more = names[:MAX_TIES], len(names) - MAX_TIES
    return f"{' and '.join(shown)}{f' and {more} more' if more > 0 else ''} ({how[0]})"


def thresholds(sweep: SweepPlan) -> list[float | None]:
    """What counts as solved, each once."""
    return list(dict.fromkeys(group.settings.options.solved for group in sweep.groups.values()))


def _fastest(sweep: SweepPlan, ran: Sequence[Row]) -> list[str]:
    """By what a program does, all its members together; values that members have of their own decide nothing of it."""
    of_members = {f"agent.{name}" for group in sweep.groups.values() for name in group.members[0].values}
    shared = [c for c in sweep.columns if c not in of_members]
    if not shared:
        return []
    best, first = max(ran, key=_speed), min(ran, key=lambda row: row.get("num_envs", 0))
    named = lambda row: grid.words({c: row[c] for c in shared})
    ratio = f", {_speed(best) / _speed(first):.1f} times that of {named(first)}"
    beside = ratio if "num_envs" in shared and best is not first else ""
    return [f"- By throughput: **{named(best)}** ({formatting.short_number(_speed(best))} steps/s{beside})."]


def _speed(row: Row) -> float:
    return row["env_steps_per_s"]


def figures_of(sweep: SweepPlan, table: Sequence[Row]) -> dict[str, Any]:
    """Pictures by the name of their file."""
    from jaxrl_fast.plotting import sweep_figures

    settings = next(iter(sweep.groups.values())).settings
    done = [r for r in table if r["env_steps_per_s"]]
    if not done:
        return {}
    title = settings.algo_name.upper() + ("" if "env" in sweep.columns else f" on {name_of(settings.options.env)}")
    groups = configurations(sweep, done)
    records = {name: _records(sweep.folder / name) for name in sweep.groups}
    goal, *others = thresholds(sweep)
    return sweep_figures.draw_figures(title, sweep.columns, groups, records, None if others else goal)


def _table(sweep: SweepPlan, table: Sequence[Row]) -> list[str]:
    """A line for each configuration."""
    wanted = any(threshold is not None for threshold in thresholds(sweep))
    heads = [*sweep.columns, "seeds", "return (IQM, 95%)", "greedy", "solved", "steps to it", "time to it"]
    heads += ["steps/s", "members", "compile", "memory MB"]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for group in configurations(sweep, table):
        first, steps = group[0], _known(group, "steps_to_solve")
        middle = lambda key, show, group=group: show(statistics.median(known)) if (known := _known(group, key)) else ""
        num_known = len(_known(group, "final_return"))
        seeds = str(len(group)) if num_known == len(group) else f"{num_known} of {len(group)}"
        cells = [first[c] for c in sweep.columns] + [seeds, _spread(_known(group, "final_return"))]
        cells += [middle("eval_return", lambda x: f"{x:.1f}"), f"{len(steps)}/{len(group)}" if wanted else ""]
        cells += [middle("steps_to_solve", formatting.short_number), middle("time_to_solve_s", formatting.seconds)]
        cells += [
            middle("env_steps_per_s", formatting.short_number),
            first["members"],
            middle("compile_time_s", formatting.seconds),
        ]
        cells += [middle("program_memory_mb", lambda x: f"{x:.0f}")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _spread(returns: list[float]) -> str:
    """480.1 (471.0 to 490.2); without an interval where there is one."""
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
    import numpy as np

    from jaxrl_fast.metrics.statistics import iqm

    return float(iqm(np.array(values)))


def _known(group: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in group if row[key] is not None]


def _records(folder: Path) -> list[dict[str, Any]]:
    path = folder / paths.METRICS
    if path.is_file():
        with warnings.warn_on_error(f"{path} cannot be read"):
            return files.read_metrics(folder)
    return []
