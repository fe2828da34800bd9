"""Train presets over several seeds, keep their learning curves, and draw the curves for docs/.

    python benchmarks/curves.py ppo_cartpole ppo_acrobot --num-seeds 5
    python benchmarks/curves.py sac_half_cheetah --runs runs/learning/sac_half_cheetah_*   # of trained runs
    python benchmarks/curves.py                                # only draws the kept curves

`learning.py` keeps only final numbers. This script keeps each seed's mean return at up to fifty points in
results/curves.json, and draws one panel per preset in results/curves_ALGO.png.
"""

import argparse
import json
import tempfile
from pathlib import Path

import matplotlib
import numpy as np

import jaxrl_fast
from jaxrl_fast.metrics import statistics
from jaxrl_fast.runs import files
from jaxrl_fast.utils import formatting
from jaxrl_fast.utils.files import replace

RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "curves.json"
NUM_POINTS = 50
INK = "#1f5fa8"


def main():
    """Train the named presets, and draw a figure for each algorithm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("presets", nargs="*")
    parser.add_argument("--num-seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--total-steps", default=None, help="environment steps, instead of the preset's")
    parser.add_argument(
        "--runs", nargs="+", type=Path, help="the runs of one preset: read their metrics, train nothing"
    )
    args = parser.parse_args()
    if args.runs and len(args.presets) != 1:
        parser.error("--runs: requires one preset, the name of the curve")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for preset in args.presets:
        kept[preset] = (
            curve_of(args.runs) if args.runs else train(preset, args.first_seed, args.num_seeds, args.total_steps)
        )
        replace(KEPT, json.dumps(kept, indent=1) + "\n")
    if not kept:
        parser.error("no curves are kept yet: name presets to train")
    for algo in sorted({curve["algo"] for curve in kept.values()}):
        path = RESULTS / f"curves_{algo}.png"
        draw({name: curve for name, curve in kept.items() if curve["algo"] == algo}).savefig(path)
        print(path)


def train(preset: str, first_seed: int, num_seeds: int, total_steps: str | None) -> dict:
    """Train a preset. Return its `curve_of`."""
    options = {"total_steps": total_steps} if total_steps else {}
    with tempfile.TemporaryDirectory() as folder:
        run = jaxrl_fast.fit(
            preset, seed=first_seed, num_seeds=num_seeds, run_dir=f"{folder}/run", loggers=(), **options
        )
        return curve_of([run.folder])


def curve_of(runs: list[Path]) -> dict:
    """Return the curve of runs: steps [P], each seed's returns [S, P] (null without an episode), and the versions.

    Point p is the mean over the episodes that ended in the p-th part of the steps. The runs must have different seeds.
    """
    records = [record for run in runs for record in files.read_metrics(run)]
    each = {seed: [r for r in records if r["seed"] == seed] for seed in sorted({r["seed"] for r in records})}
    num_points = min(NUM_POINTS, *map(len, each.values()))
    last = max(r["env_steps"] for r in records)
    part = lambda record: -(-record["env_steps"] * num_points // last) - 1
    summary = files.read_summary(runs[-1])
    return {
        "algo": summary["algo"],
        "env_id": summary["env_id"],
        "seeds": list(each),
        "solved_threshold": summary["solved_threshold"],
        "steps": [last * (p + 1) // num_points for p in range(num_points)],
        "returns": [
            [mean_return([r for r in own if part(r) == p]) for p in range(num_points)] for own in each.values()
        ],
        "device": summary["device"],
        "versions": summary["versions"],
    }


def mean_return(records: list[dict]) -> float | None:
    """Return the mean return over all episodes that ended in these records, or None."""
    ended = [r for r in records if r["episodes"]]
    num_episodes = sum(r["episodes"] for r in ended)
    return round(sum(r["return_mean"] * r["episodes"] for r in ended) / num_episodes, 3) if ended else None


def draw(curves: dict):
    """Draw a panel for each preset: every seed, the interquartile mean and its 95% interval."""
    figure, panels = make_panels(len(curves), "return of an episode, training")
    for axes, (name, curve) in zip(panels, curves.items(), strict=True):
        returns = np.array(curve["returns"], float)
        known = ~np.isnan(returns).any(0)
        steps, returns = np.array(curve["steps"])[known], returns[:, known]
        axes.plot(steps, returns.T, color=INK, alpha=0.25, lw=0.8)
        if len(returns) > 1:
            low, high = statistics.bootstrap(returns[:, None], num_resamples=500)
            axes.fill_between(steps, low, high, color=INK, alpha=0.2, lw=0)
        axes.plot(steps, statistics.iqm(returns), color=INK, lw=2)
        if curve["solved_threshold"] is not None:
            axes.axhline(curve["solved_threshold"], color="0.4", lw=1, ls=(0, (4, 3)))
        axes.set_title(f"{name} ({formatting.counted(len(returns), 'seed')})", loc="left", fontsize=10)
    figure.tight_layout()
    return figure


def make_panels(number: int, label: str):
    """Return a figure and its panels, at most three in a row, over environment steps. `label` is of the other axis."""
    matplotlib.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter

    columns = min(number, 3)
    lines = -(-number // columns)
    figure, panels = plt.subplots(lines, columns, figsize=(4.2 * columns, 3.1 * lines), dpi=120, squeeze=False)
    for axes in panels.flat[number:]:
        axes.remove()
    for axes in panels.flat[:number]:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel(label, fontsize=10)
    return figure, list(panels.flat[:number])


if __name__ == "__main__":
    main()
