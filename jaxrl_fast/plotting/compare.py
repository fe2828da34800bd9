"""Compare runs: group them into curves and draw them in one figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxrl_fast import cli
from jaxrl_fast.config import paths, resume
from jaxrl_fast.config.options import Task
from jaxrl_fast.config.paths import METRICS
from jaxrl_fast.config.population import by_member
from jaxrl_fast.config.settings import UnknownAlgorithm, to_mapping
from jaxrl_fast.utils import files, formatting, warnings
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.option import option, options_of
from jaxrl_fast.utils.parsing import nearest, shown

BY_EPISODE = (
    "return_mean",
    "return_min",
    "return_max",
    "episode_length_mean",
)  # a record counts as often as it has episodes
X = {  # the numbers of a record, and what they are called
    "steps": ("env_steps", "environment steps"),
    "seconds": ("train_time_s", "seconds of training"),
    "episodes": ("episodes", "episodes"),
}
NOT_COMPARED = ("seed", "num_seeds", "devices")  # runs that differ in nothing else are trainings of one kind
MAX_NAMED = 3  # options in a curve's name
MAX_BINS = 60  # points of a curve


@dataclass(frozen=True)
class Options:
    """What is drawn."""

    x: Literal["steps", "seconds", "episodes"] = option(
        "steps", "Horizontal axis; steps and seconds are those of one seed's program."
    )
    y: str = option("return_mean", "Metric: any name in metrics.jsonl.")
    group_by: tuple[str, ...] = option(
        (), "Options whose values separate the curves. Default: all that differ, except the seed."
    )
    out: str = option(
        "", "File to write, .png, .svg or .pdf; an existing one is replaced. Default: a new plot.png here."
    )


class Unreadable(ValueError):
    """The records of a run."""


class Run(NamedTuple):
    """One run as it was written down."""

    folder: Path
    options: Mapping[str, Any]  # by name: "env", "num_envs", "agent.gamma"
    records: list[Mapping[str, Any]]


def compare(runs: Any, **options: Any) -> Any:
    """A comparison as a matplotlib figure: `compare(["runs/a", "runs/b"], x="seconds")`; `out` saves it.

    `runs` are folders or what `fit` returns, several or one.
    """
    from jaxrl_fast.plotting import curves

    chosen = cli.from_keywords(Options, options)
    several = [runs] if isinstance(runs, (str, Path)) or hasattr(runs, "folder") else list(runs)
    if not several:
        raise ValueError("runs: there is none to compare")
    drawn = picture(groups([path_of(str(getattr(run, "folder", run))) for run in several], chosen), chosen)
    if chosen.out:
        curves.save(drawn, path_of(chosen.out))
    return drawn


def groups(places: Sequence[Path], options: Options) -> dict[str, list[Run]]:
    """The runs below these places, by the names of their curves. ValueError: nothing to draw, or no place for it."""
    if options.out:
        files.check_out(path_of(options.out, "--out"), (".png", ".svg", ".pdf"))
    runs = read_known(places)
    records = (record for run in runs for record in run.records)
    metrics = {name for record in records for name, value in record.items() if _number(value) and "." not in name}
    if options.y not in metrics:
        hint = nearest(options.y, metrics) or f"; there are {', '.join(sorted(metrics)) or 'none yet'}"
        raise ValueError(f"--y {options.y}: these runs have no such metric{hint}")
    without = [run for run in runs if not any(_number(record.get(options.y)) for record in run.records)]
    if without:
        warnings.warn(f"{len(without)} of {len(runs)} runs have no {options.y}, and are left out")
        runs = [run for run in runs if run not in without]
    if not options.group_by:
        return named(runs)
    known = dict.fromkeys(name for run in runs for name in run.options)
    found: dict[str, list[Run]] = {}
    for name in options.group_by:
        if name.replace("-", "_") not in known:
            raise ValueError(f"--group-by {name}: no run has such an option{nearest(name.replace('-', '_'), known)}")
    keys = [name.replace("-", "_") for name in options.group_by]
    if "env" not in keys and len({said("env", run.options["env"]) for run in runs}) > 1:
        keys.append("env")  # scores of different tasks have no mean
    for run in sorted(runs, key=lambda run: _rank([run.options.get(key) for key in keys])):
        found.setdefault(", ".join(said(key, run.options.get(key)) for key in keys), []).append(run)
    return found


def each_once(places: Sequence[Path]) -> list[Path]:
    """The runs in these folders or below them, none of them twice, by the first name that it comes with."""
    found: dict[Path, Path] = {}
    for place in places:
        for folder in folders(place):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def folders(place: Path) -> list[Path]:
    """The runs in a folder or anywhere below it."""
    if (place / paths.CONFIG).is_file() and (place / METRICS).is_file():
        return [place]
    below = sorted(path.parent for path in place.rglob(paths.CONFIG)) if place.is_dir() else []
    found = [folder for folder in below if (folder / METRICS).is_file()]
    if not found:
        siblings = [f.name for f in place.parent.iterdir() if f.is_dir()] if place.parent.is_dir() else []
        hint = "" if place.is_dir() else nearest(place.name, siblings, lambda name: str(place.with_name(name)))
        what = f"no {paths.CONFIG} beside a {METRICS}"
        raise ValueError(f"{shown(place)}: there is no run in it or below ({what}){hint}")
    return found


def read_known(places: Sequence[Path]) -> list[Run]:
    """All runs whose algorithm and records are to be had; the others are left out, with a warning, if not all are."""
    found: list[Run] = []
    left_out: dict[Path, ValueError] = {}
    for folder in each_once(places):
        try:
            found += read(folder)
        except (UnknownAlgorithm, Unreadable) as error:
            left_out[folder] = error
    for folder, why_not in left_out.items():
        if not found:
            raise ValueError(f"{folder}: {why_not}") from why_not
        warnings.warn(f"{folder} is left out: {why_not}")
    return found


def read(folder: Path) -> list[Run]:
    """A run's options by name, and its records; one for each hyperparameter that its records say is their own."""
    from jaxrl_fast.runs import files

    settings = to_mapping(resume.of_run(folder))
    agent = settings.pop("agent")
    options = {name: settings[name] for name in ("algo", *options_of(Task))}
    options |= {f"agent.{name}": value for name, value in agent.items()}
    try:
        records = files.read_metrics(folder)
    except (OSError, ValueError) as error:
        raise Unreadable(f"its {METRICS} cannot be read ({str(error).splitlines()[0]})") from error
    members: dict[str, Run] = {}
    for record in records:
        own = {name: value for name, value in record.items() if name.startswith("agent.")}
        members.setdefault(repr(own), Run(folder, options | own, [])).records.append(record)
    return list(members.values())


def named(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one kind together, by what tells the kinds apart; a seed that comes twice is another curve."""
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        kind = repr({name: value for name, value in run.options.items() if name not in NOT_COMPARED})
        taken = (seed for other in kinds.get(kind, ()) for seed in seeds(other))
        kinds.setdefault(kind if not set(seeds(run)) & set(taken) else f"{kind} {len(kinds)}", []).append(run)
    ordered = sorted(kinds.values(), key=lambda same: _rank(same[0].options.values()))
    return dict(zip(distinct([same[0] for same in ordered]), ordered, strict=True))


def distinct(runs: Sequence[Run]) -> list[str]:
    """A name for each, no two alike: its algorithm and environment where they differ, and a few other things that do.

    Those that are still alike get all in which they differ, then their folders.
    """
    differ = differing(runs)
    if "algo" in differ and len({run.options["algo"] for run in runs}) == len(runs):
        differ = ["algo"]  # algorithms have options of their own, which need not be told
    names = [", ".join(said(n, run.options[n]) for n in differ[:MAX_NAMED]) for run in runs]
    names = names if differ else [f"{run.options['algo']} on {run.options['env']}" for run in runs]
    for tell in (by_options, by_folder):
        alike = {name: [run for run, other in zip(runs, names) if other == name] for name in names}
        names = [name + tell(run, alike[name]) if len(alike[name]) > 1 else name for name, run in zip(names, runs)]
    return names


def differing(runs: Sequence[Run]) -> list[str]:
    """Options that all of them have, and not all the same."""
    shared = [name for name in runs[0].options if all(name in run.options for run in runs)]
    return [n for n in shared if n not in NOT_COMPARED and len({repr(run.options[n]) for run in runs}) > 1]


def by_options(run: Run, alike: Sequence[Run]) -> str:
    """What tells a run from others of its name; an environment's backend too."""
    told = lambda name: str(run.options[name]) if name == "env" else said(name, run.options[name])
    return "".join(f", {told(name)}" for name in differing(alike))


def by_folder(run: Run, alike: Sequence[Run]) -> str:
    """Where a run lies: the folder's name, or its whole path where others of that name lie elsewhere."""
    same_name = len({other.folder.name for other in alike}) < len(alike)
    return f" ({run.folder if same_name else run.folder.name})"


def seeds(run: Run) -> list[int]:
    """The seeds that its records are of."""
    return list(dict.fromkeys(record["seed"] for record in run.records))


def said(name: str, value: Any) -> str:
    """An option and its value, in a few words."""
    if isinstance(value, Mapping):
        value = [f"{key} {x}" for key, x in value.items()] or "none"
    value = " ".join(map(str, value)) or "default" if isinstance(value, (list, tuple)) else value
    if name in ("algo", "env"):
        return str(value).rpartition("/")[2]
    return f"{name.removeprefix('agent.').replace('_', ' ')} {value}"


def picture(found: Mapping[str, Sequence[Run]], options: Options) -> Any:
    """All curves in one figure, those of each environment together."""
    from jaxrl_fast.plotting import curves

    together: dict[str, dict[str, Sequence[Run]]] = {}  # by environments, for returns in others do not compare
    for name, runs in found.items():
        together.setdefault(repr(sorted({said("env", run.options["env"]) for run in runs})), {})[name] = runs
    panels = {}
    for same in together.values():
        algos, envs = (sorted({str(run.options[n]) for runs in same.values() for run in runs}) for n in ("algo", "env"))
        title = f"{' and '.join(a.upper() for a in algos)} on {', '.join(envs)}"
        panels[title] = [curve(name, runs, options) for name, runs in same.items()]
    y_label = "return of an episode" if options.y == "return_mean" else options.y.replace("_", " ")
    return curves.compare(panels, X[options.x][1], y_label)


def curve(name: str, runs: Sequence[Run], options: Options) -> Any:
    """The trainings of one kind, as far as the shortest of them goes, and at least to the first record of each."""
    import numpy as np

    from jaxrl_fast.plotting import curves

    trainings = [series(records, options) for run in runs for records in by_member(run.records).values()]
    first, last = zip(*((x[0], x[-1]) for x, _, _ in trainings))
    end, longest = max(min(last), *first), max(last)
    if options.x == "steps" and longest > 1.1 * end:
        to, of_all = formatting.short_number(float(end)), formatting.short_number(float(longest))
        warnings.warn(f"{name}: drawn as far as its shortest training goes, {to} of {of_all} environment steps")
    of = "trainings" if differing(runs) else "seeds"
    num_bins = min(MAX_BINS, *(int((x <= end * (1 + 1e-9)).sum()) for x, _, _ in trainings))
    edges = np.linspace(0, end, num_bins + 1)
    each = np.stack([curves.over(*training, edges) for training in trainings])
    return curves.gathered(name, edges[1:], each, of)


def series(records: Sequence[Mapping[str, Any]], options: Options) -> tuple[Any, Any, Any]:
    """x, y and weight of each record of a training, [R]; y is NaN where it is unknown."""
    import numpy as np

    column = lambda name: np.array([np.nan if (v := r.get(name)) is None else v for r in records], np.float64)
    x, episodes = column(X[options.x][0]), column("episodes")
    weight = episodes if options.y in BY_EPISODE else np.ones(len(records))
    return np.cumsum(x) if options.x == "episodes" else x, column(options.y), weight


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rank(values: Any) -> list[tuple[bool, float, str]]:
    """Numbers by size, all else by its letters."""
    return [(not _number(v), float(v) if _number(v) else 0.0, str(v)) for v in values]
