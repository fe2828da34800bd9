"""Trainings of Atari's games without a GPU: their curves, kept in results/GAME_cpu.json and drawn beside each other.

    python benchmarks/atari_learning.py RUN --name "ppo_pong_small, seed 2" --cpu "AMD EPYC"   # of a finished run
    python benchmarks/atari_learning.py                                                        # only draws

A training takes half an hour or more, so they are made one by one, by `python -m jaxrl_fast.train --config
ppo_pong_small` and the other presets that end so.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import yaml

from jaxrl_fast.plotting import curves

RESULTS = Path(__file__).parent / "results"
CONFIGS = Path(__file__).parent.parent / "configs"
GAMES = "pong", "breakout"
NUM_POINTS = 60
SETTINGS = "learning_rate", "clip_coef", "clip_vloss", "entropy_coef", "network"  # of an agent, where they differ
SAID = (  # of a summary
    *("status", "protocol", "num_envs", "seed", "env_steps", "train_time_s", "final_return_mean", "solved"),
    "steps_to_solve",
    *("eval_return_mean", "eval_return_std", "eval_episodes", "versions"),
)


def main():
    """Keeps a run, if one is named, and draws all of its game; else of every game."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--name", help="of its curve")
    parser.add_argument("--cpu", help="what it was made on")
    parser.add_argument("--note", default="", help="what else there is to know")
    args = parser.parse_args()
    games = GAMES
    if args.run:
        if not args.name or not args.cpu:
            parser.error("a run wants --name and --cpu")
        env_id, training = read(args.run)
        game = re.fullmatch(r"envpool/(\w+)-v5", env_id)
        if game is None:
            parser.error(f"{args.run} is a run of {env_id}, which is no game of Atari")
        games = (game[1].lower(),)
        kept = load(games[0]) or {"benchmark": "atari_learning", "cores": 2, "env_id": env_id, "trainings": {}}
        kept["trainings"][args.name] = {"cpu": args.cpu, "note": args.note} | training
        path_of(games[0]).write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    for game in games:
        path = path_of(game).with_suffix(".png")
        draw(load(game)).savefig(path)
        print(path)


def path_of(game: str) -> Path:
    return RESULTS / f"{game}_cpu.json"


def load(game: str) -> dict:
    """What is kept of a game, which may be nothing yet."""
    path = path_of(game)
    return json.loads(path.read_text()) if path.exists() else {}


def read(run: Path) -> tuple[str, dict]:
    """A run's environment, and what it came to.

    Its curve is of some sixty stretches, the mean return of all episodes that ended in each.
    """
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
    said = {name: summary[name] for name in SAID}
    return summary["env_id"], {"settings": settings, "summary": said, "curve": curve}


def draw(kept: dict) -> curves.NotebookFigure:
    """Return against environment steps; trainings that are not named after a preset are in axes of their own."""
    panels: dict[str, list[curves.Curve]] = {}
    for name, training in kept["trainings"].items():
        x, y = (np.array([point[key] for point in training["curve"]], float) for key in ("env_steps", "return_mean"))
        shipped = (CONFIGS / f"{name.partition(',')[0]}.yaml").exists()
        title = f"{kept['env_id']}, {'presets' if shipped else 'other settings'}"
        panels.setdefault(title, []).append(curves.Curve(name, x, y[None], y, None))
    return curves.draw_panels(panels, "environment steps", "return of an episode")


if __name__ == "__main__":
    main()
