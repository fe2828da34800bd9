"""Time a search of PPO on CartPole beside the same trials by Stable-Baselines3, in turn.

    python benchmarks/search_speed.py --sb3 PYTHON    # PYTHON has stable-baselines3; about 10 minutes on 2 cores

The search is a command: 64 random trials x 4 seeds of 100k steps, with start, compilation (no cache), scores and
report, without test seeds. Stable-Baselines3 trains a part of these trials with equal settings in processes of its
own: `in_turn` one after the other with all threads of torch, `on_cores` one on each core with one thread. Their seconds
are scaled to all trials. It makes no evaluation, and the start of its processes does not count.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import side_by_side

TRIALS, SEEDS, STEPS = 64, 4, 100_000
SPACE = ["learning-rate=1e-5..1e-2", "gamma=0.9..0.9999", "clip-coef=0.1..0.4"]
SB3 = """
import json, sys, time
import torch
from stable_baselines3 import PPO
values, steps, seed, threads = json.loads(sys.argv[1]), *map(int, sys.argv[2:])
torch.set_num_threads(threads)
from stable_baselines3.common.env_util import make_vec_env
model = PPO(
    "MlpPolicy", make_vec_env("CartPole-v1", n_envs=16, seed=seed), seed=seed, device="cpu", n_steps=128,
    batch_size=256, n_epochs=4, learning_rate=values["learning_rate"], gamma=values["gamma"],
    clip_range=values["clip_coef"], ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5, gae_lambda=0.95,
)
start = time.perf_counter()
model.learn(steps)
print(json.dumps(time.perf_counter() - start))
"""


def main():
    """Time rounds of both, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sb3", required=True, help="a Python with stable-baselines3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report, cores = side_by_side.Report("search_speed", args.output), os.cpu_count() or 1
    seconds: dict[str, list[float]] = {"ours": [], "in_turn": [], "on_cores": []}
    for number in range(args.rounds):
        spent, trials = search(number)
        with ThreadPoolExecutor(cores) as threads:
            part = list(threads.map(partial(sb3, args.sb3, seed=number, threads=1), trials[:cores]))
        alone = sb3(args.sb3, trials[0], number, cores)
        seconds["ours"].append(spent)
        seconds["on_cores"].append(statistics.mean(part) * TRIALS * SEEDS / cores)
        seconds["in_turn"].append(alone * TRIALS * SEEDS)
    versions = subprocess.run([args.sb3, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    kept = [
        line for line in versions.splitlines() if line.split("==")[0] in ("stable_baselines3", "torch", "gymnasium")
    ]
    found = {"trials": TRIALS, "seeds": SEEDS, "env_steps_each": STEPS, "sb3": kept, "cores": cores}
    found |= {f"{name}_s": [round(x, 1) for x in values] for name, values in seconds.items()}
    for name in ("in_turn", "on_cores"):
        ratios = [b / a for a, b in zip(seconds["ours"], seconds[name], strict=True)]
        found[f"ratio_{name}"] = round(statistics.median(ratios), 1)
        found[f"ratio_{name}_range"] = [round(min(ratios), 1), round(max(ratios), 1)]
    report.put("search", found)


def search(seed: int) -> tuple[float, list[dict]]:
    """Return the seconds of the command, and the values of its trials."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxrl_fast.search", "--config", "ppo_cartpole", "--over", *SPACE]
        command += ["--trials", str(TRIALS), "--seeds", str(SEEDS), "--total-steps", str(STEPS), "--seed", str(seed)]
        command += ["--sampler", "random", "--test-seeds", "0", "--search-dir", f"{folder}/search"]
        start = time.perf_counter()
        subprocess.run(command, check=True, env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"})
        seconds = time.perf_counter() - start
        rows = [*csv.DictReader((Path(folder) / "search" / "trials.csv").open())]
    return seconds, [{name: float(row[name]) for name in ("learning_rate", "gamma", "clip_coef")} for row in rows]


def sb3(python: str, values: dict, seed: int, threads: int) -> float:
    """Return the seconds of one training by Stable-Baselines3."""
    command = [python, "-c", SB3, json.dumps(values), str(STEPS), str(seed), str(threads)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
