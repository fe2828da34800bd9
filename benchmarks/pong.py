"""Trainings of Pong without a GPU: their curves, kept in results/pong_cpu.json and drawn beside each other.

    python benchmarks/pong.py RUN --name "64x64, seed 2" --cpu "AMD EPYC"   # a finished or stopped run's folder
    python benchmarks/pong.py                                               # only draws what is kept

A training takes half an hour or more, so they are made one by one, by `python -m jaxrl_fast.train --config
ppo_pong_small`, `pqn_pong_small` or `dqn_pong_small`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import yaml

from jaxrl_fast import curves

RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "pong_cpu.json"
NUM_POINTS = 60
SETTINGS = "learning_rate", "clip", "network"  # of an agent, that these trainings differ in
SAID = (  # of a summary
    *("status", "env_id", "protocol", "num_envs", "seed", "env_steps", "train_time_s", "final_return_mean", "solved"),
    "steps_to_solve",
    *("eval_return_mean", "eval_return_std", "eval_episodes", "versions"),
)


def main():
    """Keeps a run, if one is named, and draws all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--name", help="of its curve")
    parser.add_argument("--cpu", help="what it was made on")
    parser.add_argument("--note", default="", help="what else there is to know")
    args = parser.parse_args()
    kept = json.loads(KEPT.read_text())
    if args.run:
        if not args.name or not args.cpu:
            parser.error("a run wants --name and --cpu")
        kept["trainings"][args.name] = {"cpu": args.cpu, "note": args.note} | read(args.run)
        KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    path = KEPT.with_suffix(".png")
    draw(kept["trainings"]).savefig(path)
    print(path)


def read(run: Path) -> dict:
    """What a run came to, and its curve: of some sixty stretches, the mean return of all episodes that ended."""
    summary = json.loads((run / "summary.json").read_text())
    chosen = yaml.safe_load((run / "config.yaml").read_text())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = []
    for stretch in np.array_split(np.arange(len(records)), min(NUM_POINTS, len(records))):
        some = [records[i] for i in stretch]
        ended = [r for r in some if r["episodes"]]
        if ended:
            mean = np.average([r["return_mean"] for r in ended], weights=[r["episodes"] for r in ended])
            last = some[-1]
            curve.append({name: last[name] for name in ("env_steps", "train_time_s")} | {"return_mean": round(mean, 3)})
    settings = {name: chosen["agent"][name] for name in SETTINGS if name in chosen["agent"]} | chosen["env_options"]
    return {"settings": settings, "summary": {name: summary[name] for name in SAID}, "curve": curve}


def draw(trainings: dict) -> curves.Picture:
    """Return against environment steps."""
    each = []
    for name, training in trainings.items():
        x, y = (np.array([point[key] for point in training["curve"]], float) for key in ("env_steps", "return_mean"))
        each.append(curves.Curve(name, x, y[None], y, None))
    return curves.compare({"envpool/Pong-v5": each}, "environment steps", "return of an episode")


if __name__ == "__main__":
    main()
