"""Players of games/Paddles learn together from nothing; how do they play against the scripted paddle meanwhile?

    python benchmarks/players_learning.py independent shared --num-seeds 5
    python benchmarks/players_learning.py                                    # only draws what is kept

Players are trained with each other, or with earlier versions of themselves. At ten places of the training their greedy
policies play against the scripted paddle, which they have never met. The curves are the mean returns of each seed on
both sides, at most 5 and at least -5; above 0 a player beats the script. `cooperative` players are paid for rallies,
and play with each other.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from curves import make_panels
from learning import program

import jaxrl_fast
from jaxrl_fast.evaluation import episodes, match, policy, saved_run
from jaxrl_fast.training import evaluator
from jaxrl_fast.utils.parsing import parse_int

RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "players_learning.json"
NUM_POINTS = 10
CASES = {
    "independent": dict(players="independent"),
    "shared": dict(players="shared"),
    "shared_unmirrored": dict(players="shared", env_options={"mirror": False}),
    "self_play": dict(players="self-play"),
    "fast_ball": dict(players="independent", env_options={"ball_speed": 2.0}),
    "cooperative": dict(players="shared", env_options={"cooperative": True}),
}
COLORS = {"left": "#1f5fa8", "right": "#d9822b"}


def main():
    """Trains what is named, keeps the curves and draws them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--num-seeds", type=int, default=5)
    parser.add_argument("--total-steps", default="1M")
    parser.add_argument("--episodes", type=int, default=64, help="of each seed and side, at each place")
    args = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for case in args.cases:
        kept[case] = train(case, args.num_seeds, args.total_steps, args.episodes)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        print(case, {side: np.mean(kept[case][side], 0).round(2).tolist() for side in COLORS})
    if not kept:
        parser.error("no curve is kept yet: name cases to train")
    draw(kept).savefig(KEPT.with_suffix(".png"))
    print(KEPT.with_suffix(".png"))


def train(case: str, num_seeds: int, total_steps: str, num_episodes: int) -> dict:
    """Steps [P], returns of both sides [S, P], and what they were made with."""
    every = str(parse_int(total_steps) // NUM_POINTS)
    with tempfile.TemporaryDirectory() as folder:
        run = jaxrl_fast.fit(
            algo="ppo", env="games/Paddles", num_envs=64, total_steps=total_steps, num_seeds=num_seeds,
            save_every=every, keep_checkpoints=2 * NUM_POINTS, run_dir=f"{folder}/run", loggers=(),
            console_every=60, **CASES[case],
        )  # fmt: skip
        steps, returns = curves(run.folder, case != "cooperative", num_episodes)
        same = ("num_envs", "env_steps", "env_steps_per_s", "train_time_s", "device", "versions")
        about = {"seeds": num_seeds, "options": CASES[case], "program": program()} | {k: run.summary[k] for k in same}
    return about | {"steps": steps} | {side: np.round(x, 3).tolist() for side, x in returns.items()}


def curves(folder: Path, against_script: bool, num_episodes: int) -> tuple[list[int], dict]:
    """The steps [P] of a run's checkpoints, and the returns of each player [S, P] at these. Deletes the checkpoints."""
    options = episodes.Options(episodes=num_episodes, which="last", against=match.SCRIPTED * against_script)
    saved = episodes.open_run(folder, options)
    names, settings, env = saved.env.spec.players, saved.settings, saved.env
    agents = [policy.player_agent(saved.agent, i) for i in range(len(names))]
    own = match.open_opponent(saved, options) if against_script else []
    sides = [evaluator.Evaluator(one, agent, saved.seeds, num_episodes) for one, agent in zip(own, agents)]
    together = evaluator.Evaluator(env, saved.agent, saved.seeds, num_episodes)
    steps, returns = [], []
    while True:
        steps.insert(0, saved.env_steps)
        if sides:
            scores = [side.episodes(saved.learners, -1)[0] for side in sides]
        else:
            scores = evaluator.by_player(names, together.episodes(saved.learners, -1)[0])
        returns.insert(0, [np.mean(score, axis=-1) for score in scores])
        shutil.rmtree(saved.checkpoint)
        if not any(saved.checkpoint.parent.glob("step-*")):
            return steps, dict(zip(names, np.moveaxis(np.array(returns), 0, 2), strict=True))
        saved = saved_run.read_run(folder, "last", settings, env, {})


def draw(kept: dict):
    """Draw a panel for each case: every seed and the mean, of both sides."""
    figure, panels = make_panels(len(kept), "return of an episode, greedy")
    for axes, (name, curve) in zip(panels, kept.items(), strict=True):
        for side, color in COLORS.items():
            returns = np.array(curve[side])
            axes.plot(curve["steps"], returns.T, color=color, alpha=0.25, lw=0.8)
            axes.plot(curve["steps"], returns.mean(0), color=color, lw=2, label=side)
        axes.axhline(0, color="0.4", lw=1, ls=(0, (4, 3)))
        axes.set_title(f"{name} ({curve['seeds']} seeds)", loc="left", fontsize=10)
    panels[0].legend(frameon=False)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
