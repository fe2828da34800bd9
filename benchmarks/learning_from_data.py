"""Learn from demonstrations and from a teacher, next to the same training without them, and store the returns.

    python benchmarks/learning_from_data.py mountain_car_bc mountain_car --num-seeds 8
    python benchmarks/learning_from_data.py cartpole_distill cartpole --num-seeds 8
    python benchmarks/learning_from_data.py                     # only prints the table of stored results

MountainCar's demonstrations are 20 episodes of a rule, which pushes the car in the direction of its velocity.
CartPole's teacher is a run of ppo_cartpole of 200k steps. `return` is the mean return of the last training episodes
of each seed, and `greedy` that of 64 episodes of the greedy policy after it. All seeds of a case share a program.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import gymnasium
import numpy as np

import jaxrl_fast
from jaxrl_fast.utils import files

KEPT = Path(__file__).parent / "results" / "learning_from_data_cpu.json"
MOUNTAIN_CAR = {
    "algo": "ppo", "env": "gymnax/MountainCar-v0", "num_envs": 16, "total_steps": 200_000,
    "normalize_observations": True,
}  # fmt: skip
CARTPOLE = {"preset": "ppo_cartpole", "total_steps": 30_000, "solved_threshold": None}
CASES = {
    "mountain_car": (MOUNTAIN_CAR, None),
    "mountain_car_bc": (MOUNTAIN_CAR, {"kind": "bc", "weight": 0.1, "anneal": 100_000}),
    "cartpole": (CARTPOLE, None),
    "cartpole_distill": (CARTPOLE, {"kind": "distill", "weight": 1.0}),
}


def demonstrate(path: Path, num_episodes: int = 20) -> float:
    """Write episodes of the rule as a dataset. Return their mean return."""
    env, observations, actions = gymnasium.make("MountainCar-v0"), [], []
    for episode in range(num_episodes):
        obs, _ = env.reset(seed=episode)
        ended = False
        while not ended:
            observations.append(obs)
            actions.append(2 if obs[1] >= 0 else 0)
            obs, _, terminated, truncated, _ = env.step(actions[-1])
            ended = terminated or truncated
    np.savez(path, observations=np.array(observations), actions=np.array(actions))
    return -len(actions) / num_episodes


def measure(options: dict, bonus: dict | None, num_seeds: int) -> dict:
    """Train the seeds of a case in one program, and return their scores."""
    preset = options.get("preset")
    rest = {name: value for name, value in options.items() if name != "preset"}
    with tempfile.TemporaryDirectory() as folder:
        source = None
        if bonus and bonus["kind"] == "bc":
            path = Path(folder) / "demonstrations.npz"
            source = demonstrate(path)
            bonus = bonus | {"dataset": str(path)}
        elif bonus and bonus["kind"] == "distill":
            teacher = jaxrl_fast.fit("ppo_cartpole", total_steps=200_000, run_dir=f"{folder}/teacher")
            source = teacher.evaluate(episodes=64)["eval_return_mean"]
            bonus = bonus | {"run": str(teacher.folder)}
        given = {"bonus": bonus} if bonus else {}
        run = jaxrl_fast.fit(preset, **rest, **given, num_seeds=num_seeds, run_dir=f"{folder}/run", eval_episodes=0)
        greedy = [seed["eval_return_mean"] for seed in run.evaluate(episodes=64)["seeds"]]
    summary = run.summary
    scores = zip(summary["members"], summary["final_return_per_seed"], greedy, strict=True)
    return {
        "seeds": {str(label["seed"]): {"return": last, "greedy": best} for label, last, best in scores},
        "bonus": {name: value for name, value in (bonus or {}).items() if name not in ("dataset", "run")},
        "source_return": source,
        **{name: summary[name] for name in ("env_id", "env_steps", "train_time_s", "device", "versions")},
    }


def table(kept: dict) -> str:
    """Return a line for each stored case: mean and standard deviation over seeds."""
    lines = []
    for case, found in kept.items():
        scores = [[seed[name] for seed in found["seeds"].values()] for name in ("return", "greedy")]
        shown = [f"{statistics.mean(x):8.2f} ± {statistics.stdev(x) if len(x) > 1 else 0:5.2f}" for x in scores]
        source = "" if found["source_return"] is None else f"   source {found['source_return']:.1f}"
        lines.append(f"{case:<18} {len(scores[0])} seeds   return {shown[0]}   greedy {shown[1]}{source}")
    return "\n".join(lines)


def main(description: str | None, cases: dict, path: Path) -> None:
    """Run the cases that are named, store them in a file, and print the table of all."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *cases])
    parser.add_argument("--num-seeds", type=int, default=8)
    args = parser.parse_args()
    kept = json.loads(path.read_text()) if path.exists() else {}
    for case in args.cases:
        kept[case] = measure(*cases[case], args.num_seeds)
        files.replace(path, json.dumps(dict(sorted(kept.items())), indent=2) + "\n")
    print(table(kept))


if __name__ == "__main__":
    main(__doc__, CASES, KEPT)
