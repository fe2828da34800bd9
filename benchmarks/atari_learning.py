"""Keep Atari trainings that ran without a GPU in results/GAME_cpu.json, and draw their learning curves.

    python benchmarks/atari_learning.py RUN --name "ppo_pong_small, seed 2" --cpu "AMD EPYC"   # adds a finished run
    python benchmarks/atari_learning.py                                                        # only draws

A training takes half an hour or more, so trainings are added one by one. They are made by `python -m jaxrl_fast.train
--config ppo_pong_small` and the other presets whose names end in `_small`. For each training, the JSON holds the CPU, a
note, settings, a part of summary.json and the learning curve.
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
SETTINGS = "learning_rate", "clip_coef", "clip_vloss", "entropy_coef", "network"  # of the agent, where it has them
SUMMARY_KEYS = (  # kept from summary.json
    *("status", "protocol", "num_envs", "seed", "env_steps", "train_time_s", "final_return_mean", "solved"),
    "steps_to_solve",
    *("eval_return_mean", "eval_return_std", "eval_episodes", "versions"),
)


def main():
    """Add a run, if one is given, and draw all trainings of its game. Otherwise draw every game."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--name", help="name of the curve")
    parser.add_argument("--cpu", help="CPU that the run was made on")
    parser.add_argument("--note", default="", help="remark to keep with the run")
    args = parser.parse_args()
    games = GAMES
    if args.run:
        if not args.name or not args.cpu:
            parser.error("a run requires --name and --cpu")
        env_id, training = read(args.run)
        game = re.fullmatch(r"envpool/(\w+)-v5", env_id)
        if game is None:
            parser.error(f"{args.run} is a run of {env_id}, which is not an Atari game")
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
    """Return what is kept of a game, or an empty dictionary."""
    path = path_of(game)
    return json.loads(path.read_text()) if path.exists() else {}


def read(run: Path) -> tuple[str, dict]:
    """Return a run's environment, and its settings, summary and learning curve.

    The curve has at most sixty points. Each is the mean return of all episodes that ended in a span of records.
    """
    summary = json.loads((run / "summary.json").read_text())
    chosen = yaml.safe_load((run / "config.yaml").read_text())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = []
    for span in np.array_split(np.arange(len(records)), min(NUM_POINTS, len(records))):
        some = [records[i] for i in span]
        ended = [r for r in some if r["episodes"]]
        if ended:
            mean = np.average([r["return_mean"] for r in ended], weights=[r["episodes"] for r in ended])
            last = some[-1]
            curve.append({name: last[name] for name in ("env_steps", "train_time_s")} | {"return_mean": round(mean, 3)})
    chosen |= {name: x for name, x in chosen.get("value", {}).items() if name == "clip_vloss"}
    word = lambda value: value["kind"] if isinstance(value, dict) else value  # of a part
    settings = {name: word(chosen[name]) for name in SETTINGS if name in chosen} | chosen["env_options"]
    kept_summary = {name: summary[name] for name in SUMMARY_KEYS}
    return summary["env_id"], {"settings": settings, "summary": kept_summary, "curve": curve}


def draw(kept: dict) -> curves.NotebookFigure:
    """Draw returns against environment steps. Trainings that are not named after a preset get separate axes."""
    panels: dict[str, list[curves.Curve]] = {}
    for name, training in kept["trainings"].items():
        x, y = (np.array([point[key] for point in training["curve"]], float) for key in ("env_steps", "return_mean"))
        shipped = (CONFIGS / f"{name.partition(',')[0]}.yaml").exists()
        title = f"{kept['env_id']}, {'presets' if shipped else 'other settings'}"
        panels.setdefault(title, []).append(curves.Curve(name, x, y[None], y, None))
    return curves.draw_panels(panels, "environment steps", "return of an episode")


if __name__ == "__main__":
    main()
