"""PPO on CartPole-v1: ours beside benchmarks/plain_ppo.py, interleaved in one process, same hyperparameters.

    python benchmarks/ppo_speed.py                       # CPU: 4, 64, 1024 and 4096 environments
    python benchmarks/ppo_speed.py --num-envs 64,1024,16384,65536 --num-seeds 1,64   # a GPU

Speeds are environment steps per second of training, updates included, compilation not; ours counts only valid steps,
which leaves out the reset rows. Each round runs every contender once with a seed of its own; ratios are medians of
the ratios within a round, so that a slow moment of the machine hits both. Returns are means over the episodes of the
last tenth of the updates, with the spread over the rounds' seeds.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxrl_fast import agents, config, host, plan, program
from jaxrl_fast.spelling import parse_int

host.offer_cpu_devices()  # before gymnax is imported, which starts JAX
sys.path.insert(0, str(Path(__file__).parent))
import plain_ppo  # noqa: E402

PRESET = dict(rollout_length=plain_ppo.LENGTH, num_minibatches=plain_ppo.MINIBATCHES, num_epochs=plain_ppo.EPOCHS)


def main():
    """Measures, prints a line for each case as it goes, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", default="4,64,1024,4096")
    parser.add_argument("--num-seeds", default="1", help="more than one: only ours, all seeds in one program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="aimed length of one timed training")
    parser.add_argument("--no-start-up", action="store_true", help="leave out the times of whole commands")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    results = {
        "benchmark": "ppo_speed",
        "device": host.device(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "versions": host.versions() | {"xla_flags": os.environ.get("XLA_FLAGS", "")},
        "cases": [],
        "populations": [],
    }
    output = Path(args.output or f"benchmarks/results/ppo_speed_{host.device().split()[0]}.json")
    output.parent.mkdir(parents=True, exist_ok=True)

    def tell(case):
        print(json.dumps(case), flush=True)
        output.write_text(json.dumps(results, indent=2) + "\n")

    for num_envs in map(parse_int, args.num_envs.split(",")):
        case = compare(num_envs, args.rounds, args.seconds)
        results["cases"].append(case)
        tell(case)
    for num_seeds in map(int, args.num_seeds.split(",")):
        if num_seeds > 1:
            case = population(num_seeds, args.rounds, args.seconds)
            results["populations"].append(case)
            tell(case)
    if not args.no_start_up:
        results["start_up"] = start_up()
        tell(results["start_up"])
    print(f"written to {output}")


def compare(num_envs: int, rounds: int, seconds: float) -> dict:
    """Plain and ours in turn, at equal numbers of updates."""
    rate_guess = 150_000 if jax.default_backend() == "cpu" else 3_000_000
    num_updates = max(10, round(rate_guess * seconds / (num_envs * plain_ppo.LENGTH)))
    plain = jax.jit(plain_ppo.make(num_envs, num_updates)).lower(jax.random.key(0)).compile()
    ours, num_shards = build(num_envs, 1, num_updates)
    speeds, returns = {"plain": [], "ours": []}, {"plain": [], "ours": []}
    for seed in range(-1, rounds):  # round -1 warms up
        start = time.perf_counter()
        _, (scores, episodes) = jax.block_until_ready(plain(jax.random.key(max(seed, 0))))
        plain_time = time.perf_counter() - start
        ours_time, metrics = timed(ours, np.int32(max(seed, 0)), num_updates)
        if seed < 0:
            continue
        num_steps = num_updates * plain_ppo.LENGTH * num_envs
        speeds["plain"].append(num_steps / plain_time)
        speeds["ours"].append(float(metrics["valid_steps"].sum()) / ours_time)
        returns["plain"].append(last_tenth(scores, episodes))
        returns["ours"].append(last_tenth(metrics["return_sum"], metrics["episodes"]))
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["plain"], strict=True)]
    return {
        "num_envs": num_envs,
        "env_steps": num_updates * plain_ppo.LENGTH * num_envs,
        "shards": num_shards,
        "plain_steps_per_s": round(statistics.median(speeds["plain"])),
        "ours_steps_per_s": round(statistics.median(speeds["ours"])),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "plain_return": mean_and_std(returns["plain"]),
        "ours_return": mean_and_std(returns["ours"]),
        "returns_agree": agree(returns["plain"], returns["ours"]),
    }


def population(num_seeds: int, rounds: int, seconds: float) -> dict:
    """Many seeds of 64 environments in one program: steps of all seeds per second."""
    num_envs, steps_per_update = 64, 64 * plain_ppo.LENGTH * num_seeds
    num_updates = max(3, round(150_000 * seconds / steps_per_update))
    ours, _ = build(num_envs, num_seeds, num_updates)
    seeds = np.arange(num_seeds, dtype=np.int32)
    timed(ours, seeds, num_updates)
    speeds = [num_updates * steps_per_update / timed(ours, seeds, num_updates)[0] for _ in range(rounds)]
    return {"num_seeds": num_seeds, "num_envs": num_envs, "ours_steps_per_s": round(statistics.median(speeds))}


def build(num_envs: int, num_seeds: int, num_updates: int) -> tuple[program.Program, int]:
    """The program that `train` would run, with its defaults, and into how many shards it splits the environments."""
    settings = config.from_keywords(
        algo="ppo", env="CartPole-v1", num_envs=num_envs, num_seeds=num_seeds, agent=PRESET,
        total_steps=num_updates * plain_ppo.LENGTH * num_envs,
    )  # fmt: skip
    env, agent, num_shards = plan.divide(settings, agents.load("ppo"), num_updates)
    return program.build(env, agent, num_seeds, num_updates, num_shards), num_shards


def timed(ours: program.Program, seed: np.ndarray, num_updates: int) -> tuple[float, dict]:
    """Seconds for all updates, in as many chunks as the program needs, and their metrics."""
    state, rows, left = jax.block_until_ready(ours.init(seed)), [], num_updates
    start = time.perf_counter()
    while left:
        length = min(left, ours.capacity)
        state, metrics = ours.chunk(state, np.int32(length))
        rows.append({k: x[..., :length] for k, x in jax.device_get(metrics).items()})
        left -= length
    seconds = time.perf_counter() - start
    return seconds, {k: np.concatenate([r[k] for r in rows], -1).astype(np.float64) for k in rows[0]}


def start_up() -> dict:
    """Seconds of whole commands, each a process: help, and a first update with an empty and with a full cache."""
    command = [sys.executable, "-m", "jaxrl_fast.train"]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}

        def seconds(*words):
            start = time.perf_counter()
            subprocess.run([*command, *words], check=True, capture_output=True, env=environment)
            return round(time.perf_counter() - start, 2)

        def run(name, *words):
            wall = seconds("ppo", "--run-dir", f"{folder}/{name}", *words)
            return wall, json.loads(Path(folder, name, "summary.json").read_text())

        run_one = ("--num-envs", "64", "--total-steps", "8192", "--eval-episodes", "1")
        help_s = min(seconds("--help") for _ in range(3))
        cold_s, cold = run("cold", *run_one)
        cached_s, cached = run("cached", *run_one)
        _, long = run("long", "--num-envs", "64", "--total-steps", "4M")
        return {
            "help_s": help_s,
            "one_update_cold_s": cold_s,
            "one_update_cached_s": cached_s,
            "compile_cold_s": cold["compile_time_s"],
            "compile_cached_s": cached["compile_time_s"],
            "host_share": long["host_share"],
            "peak_memory_mb": long["peak_memory_mb"],
        }


def last_tenth(scores, episodes) -> float:
    """Mean return over the episodes that ended in the last tenth of the updates."""
    scores, episodes = (np.asarray(x, np.float64)[-max(1, len(x) // 10) :] for x in (scores, episodes))
    return float(scores.sum() / max(episodes.sum(), 1))


def mean_and_std(values: list[float]) -> list[float]:
    return [round(statistics.mean(values), 1), round(statistics.stdev(values), 1) if len(values) > 1 else 0.0]


def agree(first: list[float], second: list[float]) -> bool:
    """The means differ by less than three standard errors of their difference, or by less than 2% of the larger."""
    if len(first) < 2:
        return abs(first[0] - second[0]) < 0.25 * max(first[0], second[0])
    error = (statistics.variance(first) / len(first) + statistics.variance(second) / len(second)) ** 0.5
    difference = abs(statistics.mean(first) - statistics.mean(second))
    return difference < max(3 * error, 0.02 * max(statistics.mean(first), statistics.mean(second)))


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
