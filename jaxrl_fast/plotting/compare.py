"""Compare runs: group them into curves and draw them in one figure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxrl_fast.config import cli, paths, resume
from jaxrl_fast.config.parts import by_path
from jaxrl_fast.config.paths import METRICS
from jaxrl_fast.config.population import LABEL, by_member
from jaxrl_fast.config.settings import to_mapping
from jaxrl_fast.options.declare import complete, option, options_of
from jaxrl_fast.options.run import Task
from jaxrl_fast.utils import files, formatting, warnings
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.parsing import nearest, shown

# Metrics weighted by the number of episodes of a record
BY_EPISODE = ("return_mean", "return_min", "return_max", "episode_length_mean")
X_AXES = {  # metric and label of the horizontal axis
    "steps": ("env_steps", "environment steps"),
    "seconds": ("train_time_s", "seconds of training"),
    "episodes": ("episodes", "episodes"),
}
NOT_COMPARED = ("seed", "num_seeds", "devices")  # runs that differ only in these belong to one curve
MAX_NAMED_OPTIONS = 3  # in a curve's name
SPACES = str.maketrans("_.", "  ")  # in the names of options
MAX_BINS = 60  # points of a curve


@dataclass(frozen=True)
class Options:
    """Axes, curves and file of the figure."""

    x: Literal["steps", "seconds", "episodes"] = option(
        "steps", "Horizontal axis: environment steps of each seed, seconds of training, or training episodes."
    )
    y: str = option("return_mean", "Metric: any name in metrics.jsonl.")
    group_by: tuple[str, ...] = option(
        (), "Options by which runs are grouped into curves. Default: all that differ, except the seed."
    )
    out: str = option(
        "",
        "File to write, .png, .svg or .pdf; an existing one is replaced. Default: a new plot.png in the current "
        "directory.",
    )


class RunRecords(NamedTuple):
    """The options and records of a run, or of one member of a sweep's group."""

    folder: Path
    options: Mapping[str, Any]  # by name: "env", "num_envs", "gamma"
    records: list[Mapping[str, Any]]


def compare(runs: Any, **options: Any) -> Any:
    """Draw the curves of runs as a matplotlib figure: `compare(["runs/a", "runs/b"], x="seconds")`.

    Args:
        runs: One or several folders, or results of `fit`.
        **options: Options of the plot command; `out` saves the figure to a file.

    Raises:
        ValueError: If an option is not valid, or no run can be drawn.
    """
    from jaxrl_fast.plotting import curves

    several = [runs] if isinstance(runs, (str, Path)) or hasattr(runs, "folder") else list(runs)
    if not several:
        raise ValueError("runs: got an empty list; give at least one run")
    chosen = cli.from_keywords(Options, options)
    drawn = draw_figure(group_runs([path_of(str(getattr(run, "folder", run))) for run in several], chosen), chosen)
    if chosen.out:
        curves.save(drawn, path_of(chosen.out))
    return drawn


def group_runs(targets: Sequence[Path], options: Options) -> dict[str, list[RunRecords]]:
    """Return the runs in or below the folders `targets`, by the names of their curves.

    Raises:
        ValueError: If no run can be drawn, or the output file cannot be written.
    """
    if options.out:
        files.check_out(path_of(options.out, "out"), (".png", ".svg", ".pdf"))
    runs = read_runs(targets)
    records = (record for run in runs for record in run.records)
    metrics = {name for record in records for name, value in record.items() if _is_number(value) and "." not in name}
    if options.y not in metrics:
        if any(options.y in record for run in runs for record in run.records):
            why = "no episode has finished yet" if options.y in BY_EPISODE else "it has no value yet"
            raise ValueError(f"y: {why} in these runs, got {options.y}; wait, or draw another metric")
        hint = nearest(options.y, metrics) or f"; available: {', '.join(sorted(metrics)) or 'none yet'}"
        raise ValueError(f"y: no such metric in these runs, got {options.y}{hint}")
    without = [run for run in runs if not any(_is_number(record.get(options.y)) for record in run.records)]
    if without:
        warnings.warn(f"{len(without)} of {len(runs)} runs have no {options.y} and are left out")
        runs = [run for run in runs if run not in without]
    if not options.group_by:
        return group_by_options(runs)
    known = dict.fromkeys(name for run in runs for name in run.options)
    found: dict[str, list[RunRecords]] = {}
    keys = [find_option(name, known) for name in options.group_by]
    if "env" not in keys and len({format_option("env", run.options["env"]) for run in runs}) > 1:
        keys.append("env")  # returns of different environments cannot be averaged
    for run in sorted(runs, key=lambda run: _rank([run.options.get(key) for key in keys])):
        found.setdefault(", ".join(format_option(key, run.options.get(key)) for key in keys), []).append(run)
    return found


def find_option(name: str, known: Iterable[str]) -> str:
    """Return the path of the option that a name means. Raise ValueError if no option, or more than one, has it."""
    written = name.replace("-", "_")
    paths = complete(written, known)
    if not paths:
        raise ValueError(f"group_by: no run has such an option, got {name}{nearest(written, known)}")
    if len(paths) > 1:
        raise ValueError(f"group_by: must name one option, got {name} for {' and '.join(paths)}; use a whole name")
    return paths[0]


def find_runs(target: Path) -> list[Path]:
    """Return the runs in a folder or anywhere below it. Raise ValueError if there is none."""
    if (target / paths.CONFIG).is_file() and (target / METRICS).is_file():
        return [target]
    below = sorted(path.parent for path in target.rglob(paths.CONFIG)) if target.is_dir() else []
    found = [folder for folder in below if (folder / METRICS).is_file()]
    if not found:
        siblings = [f.name for f in target.parent.iterdir() if f.is_dir()] if target.parent.is_dir() else []
        hint = "" if target.is_dir() else nearest(target.name, siblings, lambda name: str(target.with_name(name)))
        missing = f"no {paths.CONFIG} with a {METRICS}"
        raise ValueError(f"{shown(target)}: no run found in it or below ({missing}){hint}")
    return found


def read_runs(targets: Sequence[Path]) -> list[RunRecords]:
    """Return all runs that can be read, each once, and warn about the others. Raise ValueError if none can be read."""
    found: list[RunRecords] = []
    left_out: dict[Path, ValueError] = {}
    folders: dict[Path, Path] = {}
    for folder in (folder for target in targets for folder in find_runs(target)):
        folders.setdefault(folder.resolve(), folder)
    for folder in folders.values():
        try:
            found += read_run(folder)
        except ValueError as error:
            left_out[folder] = error
    for folder, problem in left_out.items():
        if not found:
            raise ValueError(problem if str(folder) in str(problem) else f"{shown(folder)}: {problem}") from problem
        warnings.warn(f"{shown(folder)} is left out: {problem}")
    return found


def read_run(folder: Path) -> list[RunRecords]:
    """Return a run's options and records, one entry for each combination of values in which its members differ."""
    from jaxrl_fast.runs import files

    chosen = resume.of_run(folder)
    of_run = by_path(to_mapping(chosen), chosen.known)
    options = {name: of_run[name] for name in ("algo", *options_of(Task), *options_of(chosen.agent)) if name in of_run}
    try:
        records = files.read_metrics(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"its {METRICS} cannot be read ({str(error).splitlines()[0]})") from error
    members: dict[str, RunRecords] = {}
    for record in records:
        own = {name.removeprefix(LABEL): value for name, value in record.items() if name.startswith(LABEL)}
        members.setdefault(repr(own), RunRecords(folder, options | own, [])).records.append(record)
    return list(members.values())


def group_by_options(runs: Sequence[RunRecords]) -> dict[str, list[RunRecords]]:
    """Return runs with the same options together, by a distinguishing name; a repeated seed starts another curve."""
    kinds: dict[str, list[list[RunRecords]]] = {}
    seeds_of = lambda run: {record["seed"] for record in run.records}
    for run in runs:
        kind = repr({name: value for name, value in run.options.items() if name not in NOT_COMPARED})
        of_kind, seeds = kinds.setdefault(kind, []), seeds_of(run)
        free = (same for same in of_kind if not any(seeds & seeds_of(other) for other in same))
        if (curve := next(free, None)) is not None:
            curve.append(run)
        else:
            of_kind.append([run])
    every_curve = (same for of_kind in kinds.values() for same in of_kind)
    ordered = sorted(every_curve, key=lambda same: _rank(same[0].options.values()))
    return dict(zip(unique_names([same[0] for same in ordered]), ordered, strict=True))


def unique_names(runs: Sequence[RunRecords]) -> list[str]:
    """Return a unique name for each run, made of a few options in which the runs differ.

    Names that are still equal get all differing options, then the folders.
    """
    differ = differing_options(runs)
    if "algo" in differ and len({run.options["algo"] for run in runs}) == len(runs):
        differ = ["algo"]  # the name of the algorithm is sufficient
    names = [", ".join(format_option(n, run.options[n]) for n in differ[:MAX_NAMED_OPTIONS]) for run in runs]
    names = names if differ else [f"{run.options['algo']} on {run.options['env']}" for run in runs]
    for suffix in (options_suffix, folder_suffix):
        same = {name: [run for run, other in zip(runs, names) if other == name] for name in names}
        names = [name + suffix(run, same[name]) if len(same[name]) > 1 else name for name, run in zip(names, runs)]
    return names


def differing_options(runs: Sequence[RunRecords]) -> list[str]:
    """Return the options that all runs have, but with different values."""
    shared = [name for name in runs[0].options if all(name in run.options for run in runs)]
    return [n for n in shared if n not in NOT_COMPARED and len({repr(run.options[n]) for run in runs}) > 1]


def options_suffix(run: RunRecords, same: Sequence[RunRecords]) -> str:
    """Return the options that distinguish a run from others of the same name, including the backend."""
    text = lambda name: str(run.options[name]) if name == "env" else format_option(name, run.options[name])
    return "".join(f", {text(name)}" for name in differing_options(same))


def folder_suffix(run: RunRecords, same: Sequence[RunRecords]) -> str:
    """Return the name of the run's folder, or its path if several folders have that name."""
    is_ambiguous = len({other.folder.name for other in same}) < len(same)
    return f" ({shown(run.folder if is_ambiguous else run.folder.name)})"


def format_option(name: str, value: Any) -> str:
    """Return an option and its value as text for a name."""
    if isinstance(value, Mapping):
        value = [f"{key} {x}" for key, x in value.items()] or "none"
    value = " ".join(map(str, value)) or "default" if isinstance(value, (list, tuple)) else value
    if name in ("algo", "env"):
        return str(value).rpartition("/")[2]
    return f"{name.translate(SPACES)} {value}"


def draw_figure(found: Mapping[str, Sequence[RunRecords]], options: Options) -> Any:
    """Draw all curves in one figure, with a panel for each environment."""
    from jaxrl_fast.plotting import curves

    by_envs: dict[str, dict[str, Sequence[RunRecords]]] = {}  # returns of different environments are not comparable
    for name, runs in found.items():
        by_envs.setdefault(repr(sorted({format_option("env", run.options["env"]) for run in runs})), {})[name] = runs
    panels = {}
    for same in by_envs.values():
        algos, envs = (sorted({str(run.options[n]) for runs in same.values() for run in runs}) for n in ("algo", "env"))
        title = f"{' and '.join(a.upper() for a in algos)} on {', '.join(envs)}"
        panels[title] = [make_curve(name, runs, options) for name, runs in same.items()]
    y_label = "return of an episode" if options.y == "return_mean" else options.y.replace("_", " ")
    return curves.draw_panels(panels, X_AXES[options.x][1], y_label)


def make_curve(name: str, runs: Sequence[RunRecords], options: Options) -> Any:
    """Return the curve of several trainings: up to the end of the shortest, and at least to each one's first record."""
    from jaxrl_fast.plotting import curves

    trainings = [series(records, options) for run in runs for records in by_member(run.records).values()]
    points, each = curves.align(trainings, MAX_BINS)
    end, longest = points[-1], max(x[-1] for x, _, _ in trainings)
    if options.x == "steps" and longest > 1.1 * end:
        extent = " of ".join(formatting.short_number(float(x)) for x in (end, longest))
        warnings.warn(f"{name}: drawn up to the end of its shortest training, {extent} environment steps")
    unit = "trainings" if differing_options(runs) else "seeds"
    return curves.aggregate(name, points, each, unit)


def series(records: Sequence[Mapping[str, Any]], options: Options) -> tuple[Any, Any, Any]:
    """Return x, y and weight of each record of a training, float64 [R] each; y is NaN if unknown."""
    import numpy as np

    column = lambda name: np.array([np.nan if (v := r.get(name)) is None else v for r in records], np.float64)
    x, episodes = column(X_AXES[options.x][0]), column("episodes")
    weight = episodes if options.y in BY_EPISODE else np.ones(len(records))
    return np.cumsum(x) if options.x == "episodes" else x, column(options.y), weight


def _is_number(value: Any) -> bool:
    """Return whether a value is a number and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rank(values: Any) -> list[tuple[bool, float, str]]:
    """Return a sort key: numbers by size, everything else as text."""
    return [(not _is_number(v), float(v) if _is_number(v) else 0.0, str(v)) for v in values]
