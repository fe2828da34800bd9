"""Train random settings of the shipped search spaces, and show how good the defaults are among them.

    python benchmarks/landscape.py ppo_cartpole              # 128 settings x 10 seeds x 100k steps
    python benchmarks/landscape.py                           # all tasks; continues where an earlier call has stopped
    python benchmarks/landscape.py --figures                 # only draw the figures of the stored results

The settings of a task are drawn from `search.spaces.default_space` of its algorithm, uniformly on the scales of the
space and with a fixed seed. Options that are not in the space have the preset's values, with the changes in TASKS. Two
more settings are the algorithm's defaults and the preset's values of the searched options. The settings of a part and
their seeds are members of one program. Parts are runs in the folder `--runs`, so that a stopped call loses at most the
steps since a checkpoint.

A score is the mean return of the greedy policy over 32 episodes after the last step. The score of a setting is the mean
over its seeds; a setting with a seed that diverged is the worst.
"""

import argparse
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import side_by_side

from jaxrl_fast.config.load import from_keywords
from jaxrl_fast.config.population import Member
from jaxrl_fast.loggers.terminal import QuietConsole
from jaxrl_fast.search import spaces
from jaxrl_fast.search.trials import Result, Trial, score_of
from jaxrl_fast.sweep import directory, grid, table, worker
from jaxrl_fast.utils import files
from jaxrl_fast.utils.compile_cache import compile_cache

RESULTS = Path(__file__).parent / "results"
DQN_AT_100K: dict[str, Any] = {"total_steps": 100_000, "learning_starts": 1000, "explore": {"steps": 25_000}}
SAC_AT_20K = {"total_steps": 20_000, "batch_size": 64}  # two cores: 26 million gradient steps in a task
TASKS: dict[str, dict[str, Any]] = {  # presets, with changes
    "ppo_cartpole": {"total_steps": 100_000},
    "ppo_acrobot": {"total_steps": 100_000},
    "ppo_pendulum": {},
    "dqn_cartpole": DQN_AT_100K,
    "dqn_acrobot": DQN_AT_100K,
    "dqn_mountain_car": DQN_AT_100K,
    "sac_pendulum": SAC_AT_20K | {"solved_threshold": -200.0},
    "sac_mountain_car_continuous": SAC_AT_20K,
    "sac_cartpole": SAC_AT_20K | {"num_envs": 1, "replay_ratio": 0.25},
}
NUM_PARTS = 10  # programs of a task
REFERENCES = ("defaults", "preset")  # settings after the drawn ones
SAME_FOR_ALL: dict[str, Any] = {
    "eval_episodes": 32, "on_nonfinite": "continue", "loggers": [], "log_level": "quiet", "save_every": "10min",
}  # fmt: skip


class Report(side_by_side.Report):
    """A report whose lists of numbers are lines."""

    def save(self) -> None:
        """Replace the file atomically."""
        self._save()
        inner = re.compile(r"\[[^\[\]{}]*\]")
        files.replace(
            self.path,
            inner.sub(
                lambda found: re.sub(r"\s*\n\s*", " ", found[0]).replace("[ ", "[").replace(" ]", "]"),
                self.path.read_text(),
            ),
        )


def main():
    """Train the tasks that are not finished, write the JSON after each, and draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=[*TASKS], help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--num-settings", type=int, default=128)
    parser.add_argument("--num-seeds", type=int, default=10)
    parser.add_argument("--runs", type=Path, default=Path("runs/landscape"), help="folder of the unfinished work")
    parser.add_argument("--output", default="")
    parser.add_argument("--figures", action="store_true", help="train nothing")
    args = parser.parse_args()
    if unknown := {*args.tasks} - {*TASKS}:
        parser.error(f"tasks: must be some of {', '.join(TASKS)}, got {', '.join(sorted(unknown))}")
    if args.num_seeds < 2:
        parser.error(f"num-seeds: must be 2 or more, since settings are chosen on half of them, got {args.num_seeds}")
    report = Report("landscape", args.output, append=True)
    stored = report.content.setdefault("tasks", {})
    with compile_cache(True):
        for name in args.tasks if not args.figures else ():
            if name not in stored:
                stored[name] = train(
                    name, args.num_settings, args.num_seeds, args.runs / f"{name}-{args.num_settings}x{args.num_seeds}"
                )
                report.save()
                print(f"{name}: {stored[name]['summary']}", flush=True)
    for found in stored.values():  # of results by an earlier version
        found["summary"] = summary(np.array(found["scores"], np.float64), found["threshold"])
    report.save()
    for algo in dict.fromkeys(name.partition("_")[0] for name in stored):
        of_algo = {name: stored[name] for name in TASKS if name in stored and name.startswith(f"{algo}_")}
        path = report.path.with_name(f"landscape_{algo}.png")
        draw(of_algo).savefig(path)
        print(f"written to {path}")


def train(name: str, num_settings: int, num_seeds: int, folder: Path) -> dict[str, Any]:
    """Return the settings of a task and the scores of their seeds, trained in NUM_PARTS programs."""
    base, space = task(name)
    chosen = settings_of(base, space, num_settings)
    parts = np.array_split(np.arange(len(chosen)), min(NUM_PARTS, len(chosen)))
    groups = {}
    for i, part in enumerate(parts):
        members = tuple(Member(seed, chosen[j]) for j in part for seed in range(num_seeds))
        groups[f"part-{i}"] = grid.part(grid.Group(base, members), members)
    plan = directory.SweepPlan(folder.absolute(), groups, tuple(d.name for d in space), "none", 0)
    plan.folder.mkdir(parents=True, exist_ok=True)
    grid.offer_devices([base])
    for i, (part_name, group) in enumerate(groups.items()):
        announce = lambda i=i: print(f"{name}: program {i + 1} of {len(groups)}", flush=True)
        done = worker.run_group(plan.folder / part_name, group, QuietConsole(), announce)
        if done and (done["signal"] or done["unsaved"] or done["message"].startswith("failed")):
            raise SystemExit(f"{name}, {part_name}: {done['message']}; the same command continues")
    rows = table.table_rows(plan)
    if unfinished := directory.unfinished(plan):
        raise SystemExit(f"{name}: another process trains {', '.join(unfinished)}; repeat the command")
    if failed := {row["program"]: row["failure"] for row in rows if row["status"] == "failed"}:
        raise SystemExit(f"{name}: failed programs {failed}; delete their folders in {folder}, and repeat the command")
    scores = np.array([math.nan if row["eval_return"] is None else row["eval_return"] for row in rows], np.float64)
    scores = scores.reshape(len(chosen), num_seeds)
    seconds = sum({row["program"]: row["train_time_s"] + row["compile_time_s"] for row in rows}.values())
    options = base.options
    return {
        "env": options.env,
        "steps": options.total_steps,
        "threshold": options.solved_threshold,
        "seconds": round(seconds),
        "space": [*spaces.default_space(base.algo)],
        "values": {d.name: [float(f"{each[d.name]:.6g}") for each in chosen] for d in space},
        "scores": [[None if math.isnan(x) else round(x, 2) for x in each] for each in scores.tolist()],
    } | {"summary": summary(scores, options.solved_threshold)}


def task(name: str) -> tuple[Any, tuple[spaces.Dimension, ...]]:
    """Return the base settings of a task and the space that is searched."""
    base = from_keywords(name, **SAME_FOR_ALL | TASKS[name])
    return base, spaces.parse("default", base.known, base.algo)


def settings_of(base: Any, space: tuple[spaces.Dimension, ...], number: int) -> list[dict[str, float]]:
    """Return the values of the drawn settings, and of REFERENCES."""
    rng = np.random.default_rng(0)
    drawn = [{d.name: float(spaces.resample(d, rng)) for d in space} for _ in range(number)]
    known = base.known
    defaults = {d.name: float(known[d.name].default) for d in space}
    return [*drawn, defaults, {d.name: float(base.value(d.name)) for d in space}]


def summary(scores: np.ndarray, threshold: float | None) -> dict[str, Any]:
    """Return statistics of scores [settings, seeds], of which the last are those of REFERENCES.

    `chosen_by_half` is the score of the best setting on half of the seeds, by which it is chosen, and `on_other_half`
    its score on the others, as means over all halves. Settings that diverged are not chosen.
    """
    drawn, references = scores[: -len(REFERENCES)], scores[-len(REFERENCES) :]
    means = np.array([score_of(each) for each in drawn])
    finite = means[np.isfinite(means)]
    halves = [[*half] for half in itertools.combinations(range(scores.shape[1]), scores.shape[1] // 2)]
    stable = drawn[np.isfinite(means)]
    others = [[i for i in range(scores.shape[1]) if i not in half] for half in halves]
    best = [int(np.argmax(stable[:, half].mean(1))) for half in halves]
    number = lambda x: round(float(x), 2) if np.isfinite(x) else None
    near = finite.max() - 0.05 * (finite.max() - finite.min())
    found: dict[str, Any] = {
        "quantiles": {f"{q}": number(np.quantile(finite, q / 100)) for q in (0, 10, 25, 50, 75, 90, 100)},
        "diverged": int(len(means) - len(finite)),
        "solved": None if threshold is None else int((means >= threshold).sum()),
        "near_the_best": int((means >= near).sum()),  # within 5% of the range of scores
        "chosen_by_half": number(np.mean([stable[i, half].mean() for i, half in zip(best, halves)])),
        "on_other_half": number(np.mean([stable[i, other].mean() for i, other in zip(best, others)])),
    }
    for name, each in zip(REFERENCES, references):
        found[name] = {"score": number(score_of(each)), "rank": 1 + int((means > score_of(each)).sum())}
    return found


def draw(tasks: dict[str, dict[str, Any]]) -> Any:
    """Return a figure with a row for each task: sorted scores, scores over two options, and importance."""
    from jaxrl_fast.plotting import curves
    from jaxrl_fast.search import figures

    figure = curves.NotebookFigure(figsize=(13, 3.6 * len(tasks)), dpi=110, layout="constrained")
    rows = figure.subplots(len(tasks), 3, squeeze=False)
    for (name, found), (hill, heat, bars) in zip(tasks.items(), rows):
        base, space = task(name)
        scores = np.array(found["scores"], np.float64)
        means = np.array([score_of(each) for each in scores])
        for axes in (hill, bars):
            curves.style_axes(axes)
        _draw_hill(hill, means, found)
        hill.set_title(f"{name}, {found['steps'] // 1000}k steps", loc="left", fontsize=10)
        values = {d.name: np.array(found["values"][d.name]) for d in space}
        _draw_heat(figure, heat, space[0], next(d for d in space if d.name == "gamma"), values, means)
        drawn = range(len(means) - len(REFERENCES))
        trials = [
            Trial(i, {n: v[i] for n, v in values.items()}, (), means[i], 1) for i in drawn if np.isfinite(means[i])
        ]
        result = Result(base, space, tuple(trials), {}, "random", "none", "final", (), (), 0.0)
        shares = figures.importances(result, trials)
        bars.barh([*shares][::-1], [*shares.values()][::-1], color=curves.INK, height=0.6)
        bars.set_xlabel(f"importance (PED-ANOVA, best {figures.TARGET:.0%})")
        bars.grid(axis="y", visible=False)
    return figure


def _draw_hill(axes: Any, means: np.ndarray, found: dict[str, Any]) -> None:
    """Draw the scores of the drawn settings, best first, with lines at the references and the threshold."""
    from jaxrl_fast.plotting import curves

    drawn = means[: -len(REFERENCES)]
    axes.plot(np.arange(1, len(drawn) + 1), np.where(np.isfinite(drawn), drawn, np.nan)[np.argsort(-drawn)], ".-", lw=1)
    for reference, color in zip(REFERENCES, (curves.MARK, "#2f8f5b")):
        at = found["summary"][reference]
        if at["score"] is not None:
            axes.axhline(at["score"], color=color, lw=1.2, label=f"{reference} (rank {at['rank']} of {len(drawn)})")
    if found["threshold"] is not None:
        axes.axhline(found["threshold"], color="0.35", lw=1, ls=(0, (4, 3)), label="threshold")
    axes.set(xlabel="settings, best first", ylabel="greedy return, mean of seeds")
    axes.legend(frameon=False, fontsize=8)


def _draw_heat(figure: Any, axes: Any, across: Any, up: Any, values: dict[str, np.ndarray], means: np.ndarray) -> None:
    """Draw the mean score over a grid of two options, each on its scale."""
    bins = np.linspace(0, 1, 7)
    drawn = slice(0, len(means) - len(REFERENCES))
    finite = np.isfinite(means[drawn])
    places = [np.array([spaces.position(d, v) for v in values[d.name][drawn]])[finite] for d in (across, up)]
    count = np.histogram2d(*places, bins)[0]
    total = np.histogram2d(*places, bins, weights=means[drawn][finite])[0]
    with np.errstate(invalid="ignore"):
        mesh = axes.pcolormesh(bins, bins, (total / count).T, cmap="viridis")
    ticks = np.linspace(0, 1, 4)
    label = lambda d: [f"{spaces.at(d, tick):.4g}" for tick in ticks]
    axes.set_xticks(ticks, label(across))
    axes.set_yticks(ticks, label(up))
    axes.set(xlabel=across.name, ylabel=up.name)
    figure.colorbar(mesh, ax=axes, label="mean greedy return")


if __name__ == "__main__":
    main()
