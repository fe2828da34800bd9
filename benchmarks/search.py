"""Compare ways to search at equal environment steps, and store the scores of the settings that they find.

    python benchmarks/search.py cartpole acrobot --searches 10   # an interrupted run continues where it was
    python benchmarks/search.py                                  # only prints the table of stored results

Each search has the steps of 32 full runs, two seeds in a trial: 16 whole trials drawn at random or by TPE, a population
of 16 trials (pbt), and successive halving with about half of these steps (30 trials). `test` is the mean score of the
best trial, trained again with 10 seeds that the search has not seen; `tuning` is the score that the search has seen.
`steps` are those of the search, `test` excluded. The space is the one that is shipped for PPO.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jaxrl_fast
from jaxrl_fast.search import prepare, winners, work
from jaxrl_fast.search.trials import ranked
from jaxrl_fast.utils import devices, files

KEPT = Path(__file__).parent / "results" / "search_cpu.json"
SEEDS, TEST_SEEDS = 2, 10
TASKS = {
    "cartpole": {"preset": "ppo_cartpole", "total_steps": 50_000},
    "acrobot": {"preset": "ppo_acrobot", "total_steps": 100_000},
    "pendulum": {"preset": "ppo_pendulum", "total_steps": 100_000},
    "mountain_car_continuous": {"preset": "ppo_mountain_car_continuous", "total_steps": 50_000},
    "breakout_minatar": {"preset": "ppo_minatar_breakout", "num_envs": 32, "total_steps": 200_000},
}
WAYS = {
    "random": {"sampler": "random", "trials": 16},
    "tpe": {"sampler": "tpe", "trials": 16},
    "halving": {"sampler": "random", "trials": 30, "scheduler": "halving"},
    "pbt": {"sampler": "random", "trials": 16, "scheduler": "pbt"},
}


def main() -> None:
    """Run the searches that are not stored yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", help=", ".join(TASKS))
    parser.add_argument("--searches", type=int, default=10)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()
    for task in args.tasks:
        for seed in range(args.searches):
            for way in args.ways:
                kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
                if str(seed) not in kept.get(task, {}).get(way, {}):
                    found = search(TASKS[task], WAYS[way], seed)
                    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
                    kept.setdefault(task, {}).setdefault(way, {})[str(seed)] = found
                    kept[task]["settings"] = TASKS[task]
                    kept["about"] = {"device": devices.device(), "seeds": SEEDS, "test_seeds": TEST_SEEDS, "ways": WAYS}
                    files.replace(KEPT, json.dumps(kept, indent=1) + "\n")
                    print(task, way, seed, found, flush=True)
    print(table(json.loads(KEPT.read_text())))


def search(task: dict, way: dict, seed: int) -> dict:
    """Run one search, and return its scores, steps and seconds. Seeds of different searches do not overlap."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = {"over": "default", "seeds": SEEDS, "test_seeds": TEST_SEEDS, "winners": 1, "log_level": "quiet"}
        options |= {"seed": 1000 * (seed + 1), "eval_episodes": 32, "eval_envs": 32, "search_dir": f"{folder}/search"}
        found = jaxrl_fast.search(**options | task | way)
        plan = prepare.read(found.folder)
        trials = work.trials_of(plan)
        tests = json.loads((found.folder / winners.TESTS).read_text())
    best = ranked(trials)[0]
    return {
        "tuning": round(best.score, 3),
        "test": round(statistics.mean(tests[str(best.number)]), 3),
        "default": round(statistics.mean(tests["-1"]), 3),
        "steps": max(trial.env_steps_at_end for trial in trials),
        "seconds": round(time.perf_counter() - began, 1),
    }


def table(kept: dict) -> str:
    """Return the table in Markdown, with a line for each task and way."""
    lines = [
        "| task | way | searches | steps | tuning | test | default |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in (name for name in kept if name in TASKS):
        for way in (name for name in kept[task] if name in WAYS):
            runs = [*kept[task][way].values()]
            cells = [task, way, str(len(runs)), f"{max(r['steps'] for r in runs) / 1e6:.2f}M"]
            cells += [spread([r[name] for r in runs]) for name in ("tuning", "test", "default")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Return the mean and the standard deviation over searches, as text."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


if __name__ == "__main__":
    main()
