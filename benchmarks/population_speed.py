"""Measure what a population saves: many trainings in one program against the same trainings one after another.

    python benchmarks/population_speed.py                  # PPO and DQN, 16 seeds; 64 learning rates; the curves
    python benchmarks/population_speed.py --only curve --num-envs 1,8,64,512,4096,16384     # a GPU

The JSON has four parts:

    seeds            16 seeds in one program, and 16 runs of one seed one after another: seconds of training, and the
                     ratio of the two. The single runs share one compiled program. Compilation is reported separately.
    learning_rates   64 learning rates in one compilation against one run: seconds of training and of compilation.
    turns            seeds that train in turn on a CPU, and the same seeds side by side on each core: seconds of
                     training.
    curve            environment steps per second from one environment up, updates included, and the speed-up over the
                     first count. All counts have the preset's hyperparameters.

Each round measures both sides in turn, so that a slow moment of the machine affects both. Numbers are medians over the
rounds, with `least` and `most`.
"""

import argparse
import statistics
import time

import numpy as np
import side_by_side
from side_by_side import timed

from jaxrl_fast.config import load
from jaxrl_fast.config.population import Member
from jaxrl_fast.parallel import program
from jaxrl_fast.training import plan
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.parsing import parse_int

CASES = {
    "ppo": dict(algo="ppo", env="CartPole-v1", num_envs=64),
    "dqn": dict(algo="dqn", env="CartPole-v1", num_envs=64, learning_starts=1024, replay={"size": 16_384}),
}
CURVES = {
    "ppo CartPole-v1": dict(algo="ppo", env="CartPole-v1"),
    "ppo Breakout-MinAtar": dict(preset="ppo_minatar_breakout"),
}
TURNS = {  # options, number of seeds, environment steps of each
    "ppo CartPole-v1, 16 environments": (dict(algo="ppo", env="CartPole-v1", num_envs=16), 16, 50_000),
    "ppo CartPole-v1, 64 environments": (dict(algo="ppo", env="CartPole-v1", num_envs=64), 16, 100_000),
    "ppo CartPole-v1, 512 environments": (dict(algo="ppo", env="CartPole-v1", num_envs=512), 8, 300_000),
    "ppo Breakout-MinAtar": (dict(preset="ppo_minatar_breakout"), 4, 25_000),
    "pqn Breakout-MinAtar": (dict(preset="pqn_minatar_breakout"), 4, 25_000),
}
PARTS = ("seeds", "learning_rates", "turns", "curve")


def main():
    """Measure all parts, print a line for each case, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--algos", default="ppo,dqn")
    parser.add_argument("--curves", default=",".join(CURVES))
    parser.add_argument("--num-seeds", type=int, default=16)
    parser.add_argument("--num-rates", type=int, default=64)
    parser.add_argument("--num-envs", default="1,2,4,8,16,64,256,1024,4096", help="environments of the curve")
    parser.add_argument("--steps", type=parse_int, default=200_000, help="environment steps of each training")
    parser.add_argument("--seconds", type=float, default=4.0, help="intended length of a timed training of the curve")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    devices.configure_cpu_devices()
    report = side_by_side.Report("population_speed", args.output)
    only = args.only.split(",")
    for algo in args.algos.split(",") if "seeds" in only else ():
        report.add("seeds", seeds(algo, args.num_seeds, args.steps, args.rounds))
    for algo in args.algos.split(",") if "learning_rates" in only else ():
        report.add("learning_rates", learning_rates(algo, args.num_rates, args.steps, args.rounds))
    for name in TURNS if "turns" in only else ():
        report.add("turns", {"what": name} | turns(*TURNS[name], args.rounds))
    for name in args.curves.split(",") if "curve" in only else ():
        counts = list(map(parse_int, args.num_envs.split(",")))
        for case in curve(CURVES[name], counts, args.seconds, args.rounds):
            report.add("curve", {"what": name} | case)
    print(f"written to {report.path}")


def seeds(algo: str, num_seeds: int, steps: int, rounds: int) -> dict:
    """Time a population of seeds, and as many single runs."""
    many, num_updates = build(CASES[algo], steps, tuple(Member(i) for i in range(num_seeds)))
    one, _ = build(CASES[algo], steps, (Member(0),))
    seconds = {"together": [], "sequential_seeds": []}
    for _ in range(rounds):
        seconds["together"].append(timed(many, np.arange(num_seeds, dtype=np.int32), num_updates)[0])
        start = time.perf_counter()
        for seed in range(num_seeds):
            timed(one, np.int32(seed), num_updates)
        seconds["sequential_seeds"].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["sequential_seeds"], seconds["together"], strict=True)]
    return {
        "algo": algo,
        "num_seeds": num_seeds,
        "env_steps_each": steps,
        "together_s": round(statistics.median(seconds["together"]), 3),
        "in_turn_s": round(statistics.median(seconds["sequential_seeds"]), 3),
        "compile_together_s": round(many.compile_time_s, 2),
        "compile_one_s": round(one.compile_time_s, 2),
        **spread(ratios),
    }


def learning_rates(algo: str, num_rates: int, steps: int, rounds: int) -> dict:
    """Time a population of learning rates in one compilation, and one run."""
    rates = np.geomspace(1e-5, 1e-2, num_rates)
    population = tuple(Member(0, {"learning_rate": float(rate)}) for rate in rates)
    many, num_updates = build(CASES[algo], steps, population)
    one, _ = build(CASES[algo], steps, population[:1])
    seconds = {"many": [], "one": []}
    for _ in range(rounds):
        seconds["many"].append(timed(many, np.zeros(num_rates, np.int32), num_updates)[0])
        seconds["one"].append(timed(one, np.int32(0), num_updates)[0])
    ratios = [a / b for a, b in zip(seconds["many"], seconds["one"], strict=True)]
    return {
        "algo": algo,
        "num_rates": num_rates,
        "env_steps_each": steps,
        "population_s": round(statistics.median(seconds["many"]), 3),
        "one_run_s": round(statistics.median(seconds["one"]), 3),
        "compile_population_s": round(many.compile_time_s, 2),
        "compile_one_s": round(one.compile_time_s, 2),
        **spread(ratios),
    }


def turns(case: dict, num_seeds: int, steps: int, rounds: int) -> dict:
    """Time the same seeds side by side and in turn."""
    population = tuple(Member(i) for i in range(num_seeds))
    built = {sequential_seeds: build(case, steps, population, sequential_seeds) for sequential_seeds in (False, True)}
    seconds = {sequential_seeds: [] for sequential_seeds in built}
    for _ in range(rounds):
        for sequential_seeds, (ours, num_updates) in built.items():
            seconds[sequential_seeds].append(timed(ours, np.arange(num_seeds, dtype=np.int32), num_updates)[0])
    ratios = [a / b for a, b in zip(seconds[False], seconds[True], strict=True)]
    return {
        "num_seeds": num_seeds,
        "env_steps_each": steps,
        "side_by_side_s": round(statistics.median(seconds[False]), 3),
        "in_turn_s": round(statistics.median(seconds[True]), 3),
        "side_by_side_mb": round(built[False][0].memory / 2**20, 1),
        "in_turn_mb": round(built[True][0].memory / 2**20, 1),
        **spread(ratios),
    }


def curve(case: dict, counts: list[int], seconds: float, rounds: int) -> list[dict]:
    """Return the steps per second for each number of environments. Each round times all of them in turn."""
    built = {}
    for num_envs in counts:
        per_update = steps_per_update(case, num_envs)
        probe, num_updates = build(case | {"num_envs": num_envs}, 3 * per_update, (Member(0),))
        timed(probe, np.int32(0), num_updates)
        rate = num_updates * per_update / timed(probe, np.int32(0), num_updates)[0]
        steps = max(round(rate * seconds / per_update), 3) * per_update
        built[num_envs] = *build(case | {"num_envs": num_envs}, steps, (Member(0),)), steps
        timed(built[num_envs][0], np.int32(0), 1)
    speeds = {num_envs: [] for num_envs in counts}
    for i in range(rounds):
        for num_envs, (ours, num_updates, steps) in built.items():
            speeds[num_envs].append(steps / timed(ours, np.int32(i), num_updates)[0])
    first = statistics.median(speeds[counts[0]])
    return [
        {
            "num_envs": num_envs,
            "steps_per_s": round(statistics.median(ours)),
            "least": round(min(ours)),
            "most": round(max(ours)),
            "speed_up": round(statistics.median(ours) / first, 2),
            "compile_s": round(built[num_envs][0].compile_time_s, 2),
            "memory_mb": round(built[num_envs][0].memory / 2**20, 1),
        }
        for num_envs, ours in speeds.items()
    ]


def build(
    case: dict, steps: int, population: tuple[Member, ...], sequential_seeds: bool | None = None
) -> tuple[program.Program, int]:
    """Return the program that a sweep would run for this population, and its number of updates."""
    settings = load.from_keywords(**case | {"total_steps": steps})
    settings = settings.replace(**population[0].values, num_seeds=len(population))
    ready = plan.validate_plan(settings, population)
    num_updates, placement = ready.num_updates, ready.placement._replace(num_seeds=len(population))
    placement = placement if sequential_seeds is None else placement._replace(sequential_seeds=sequential_seeds)
    built = program.build(ready.env, ready.agent, num_updates, placement, ready.varied)
    return built, num_updates


def steps_per_update(case: dict, num_envs: int) -> int:
    """Return the environment steps of one update."""
    settings = load.from_keywords(**case | {"num_envs": num_envs})
    return settings.agent.length(num_envs) * num_envs


def spread(ratios: list[float]) -> dict:
    """Return the median, minimum and maximum over the rounds."""
    return {name: round(of(ratios), 3) for name, of in (("ratio", statistics.median), ("least", min), ("most", max))}


if __name__ == "__main__":
    main()
