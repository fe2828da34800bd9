"""Measure PPO on CartPole-v1: jaxrl_fast and benchmarks/plain_ppo.py in turn, in one process, same hyperparameters.

    python benchmarks/ppo_speed.py                       # CPU: 4, 64, 1024 and 4096 environments
    python benchmarks/ppo_speed.py --num-envs 64,1024,16384,65536 --num-seeds 1,64   # a GPU
    python benchmarks/ppo_speed.py --memory gru,lstm,lru     # only ours, with a memory and without: about 2 minutes

side_by_side.py explains the method. `populations` has many seeds in one program of jaxrl_fast. `start_up` has the times
of whole commands.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import side_by_side
from side_by_side import timed

from jaxrl_fast.parallel import program
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.parsing import parse_int

devices.configure_cpu_devices()  # before gymnax is imported, which starts JAX
import plain_ppo  # noqa: E402

PRESET = dict(rollout_length=plain_ppo.LENGTH, num_minibatches=plain_ppo.MINIBATCHES, num_epochs=plain_ppo.EPOCHS)


def main():
    """Measure all cases, print a line for each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", default="4,64,1024,4096")
    parser.add_argument("--num-seeds", default="1", help="if more than one: only jaxrl_fast, all seeds in one program")
    parser.add_argument("--memory", default="", help="only these memories, next to an agent without one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="intended length of one timed training")
    parser.add_argument("--no-start-up", action="store_true", help="leave out the times of whole commands")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    if args.memory:
        return memories(args.memory.split(","), args.rounds, args.seconds, args.output)
    report = side_by_side.Report("ppo_speed", args.output)
    for num_envs in map(parse_int, args.num_envs.split(",")):
        report.add("cases", compare(num_envs, args.rounds, args.seconds))
    for num_seeds in map(int, args.num_seeds.split(",")):
        if num_seeds > 1:
            report.add("populations", population(num_seeds, args.rounds, args.seconds))
    if not args.no_start_up:
        report.put("start_up", start_up())
    print(f"written to {report.path}")


def compare(num_envs: int, rounds: int, seconds: float) -> dict:
    """Time the plain program and jaxrl_fast in turn, for equal numbers of updates."""
    rate_guess = 150_000 if jax.default_backend() == "cpu" else 3_000_000
    num_updates = max(10, round(rate_guess * seconds / (num_envs * plain_ppo.LENGTH)))
    plain = jax.jit(plain_ppo.make(num_envs, num_updates)).lower(jax.random.key(0)).compile()
    ours, num_shards = build(num_envs, 1, num_updates)
    num_steps = num_updates * plain_ppo.LENGTH * num_envs
    measured = side_by_side.compare(plain, ours, num_updates, num_steps, rounds)
    return {"num_envs": num_envs, "shards": num_shards} | measured


def population(num_seeds: int, rounds: int, seconds: float) -> dict:
    """Time many seeds of 64 environments in one program, in steps of all seeds per second."""
    num_envs, steps_per_update = 64, 64 * plain_ppo.LENGTH * num_seeds
    num_updates = max(3, round(150_000 * seconds / steps_per_update))
    ours, _ = build(num_envs, num_seeds, num_updates)
    seeds = np.arange(num_seeds, dtype=np.int32)
    timed(ours, seeds, num_updates)
    speeds = [num_updates * steps_per_update / timed(ours, seeds, num_updates)[0] for _ in range(rounds)]
    return {"num_seeds": num_seeds, "num_envs": num_envs, "ours_steps_per_s": round(statistics.median(speeds))}


def memories(kinds: list[str], rounds: int, seconds: float, output: str) -> None:
    """Steps per second with each memory of 64 numbers and without one, in turn, on 64 environments."""
    report, num_envs = side_by_side.Report("ppo_memory_speed", output), 64
    for kind in kinds:
        num_updates = max(10, round(30_000 * seconds / (num_envs * plain_ppo.LENGTH)))
        agents = {"none": {}, kind: {"memory": {"kind": kind, "size": 64}}}
        programs = {name: build(num_envs, 1, num_updates, **agent)[0] for name, agent in agents.items()}
        speeds = {name: [] for name in programs}
        for seed in range(-1, rounds):  # round -1 warms up
            for name, ours in programs.items():
                elapsed = timed(ours, np.int32(max(seed, 0)), num_updates)[0]
                speeds[name] += [num_updates * plain_ppo.LENGTH * num_envs / elapsed] * (seed >= 0)
        report.add("cases", {"memory": kind, "num_envs": num_envs} | side_by_side.compared(speeds, kind, "none"))
    print(f"written to {report.path}")


def build(num_envs: int, num_seeds: int, num_updates: int, **agent) -> tuple[program.Program, int]:
    """Build the program of jaxrl_fast, with the default hyperparameters, and return its number of devices."""
    total_steps = num_updates * plain_ppo.LENGTH * num_envs
    return side_by_side.build(
        num_updates, algo="ppo", env="CartPole-v1", num_envs=num_envs, num_seeds=num_seeds,
        total_steps=total_steps, **PRESET, **agent,
    )  # fmt: skip


def start_up() -> dict:
    """Time whole commands in separate processes: help, and a first update with an empty and with a full cache."""
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
            "host_share": long["device_idle_fraction"],
            "peak_memory_mb": long["peak_memory_mb"],
        }


if __name__ == "__main__":
    main()
