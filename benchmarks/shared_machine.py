"""Measure how much slower several simultaneous runs on the cores of one machine are than one run alone.

    python benchmarks/shared_machine.py                                  # all cases, 1 to 4 runs at once
    python benchmarks/shared_machine.py --cases ppo_64 --runs 1,2 --devices auto

Each run is a separate process with the same number of environment steps. All runs are compiled before the clock starts:
a callback blocks each run at its first record until the last one has reached it. `factor` is the time until the slowest
run ends, divided by the number of runs times the time of one run alone. 1 means that sharing costs nothing. One run is
also measured next to programs that compute all the time. Rounds are interleaved, and medians are reported.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import side_by_side

import jaxrl_fast

CASES = {
    "ppo_16": dict(algo="ppo", env="CartPole-v1", num_envs=16),
    "ppo_64": dict(algo="ppo", env="CartPole-v1", num_envs=64),
    "dqn_64": dict(algo="dqn", env="CartPole-v1", num_envs=64, learning_starts=1000),
}
BUSY = "while True: sum(range(10_000))"  # a program that keeps one core busy
NUM_RECORDS, WAIT_S = 20, 0.005


class Start:
    """A callback that waits at the first record for the other runs, and stores the time of the latest record."""

    def __init__(self, folder: Path, name: str, num_runs: int):
        self.folder, self.name, self.num_runs = folder, name, num_runs
        self.began = self.ended = 0.0

    def on_record(self, records, state):
        self.ended = time.perf_counter()
        if not self.began:
            (self.folder / self.name).touch()
            while len(list(self.folder.glob("ready_*"))) < self.num_runs:
                time.sleep(WAIT_S)
            self.began = time.perf_counter()


def main():
    """Measure all cases, print a line for each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--devices", default="auto,1")
    parser.add_argument("--runs", default="1,2,3,4")
    parser.add_argument("--busy", default="1,4", help="also one run next to this number of busy programs; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="intended length of one run alone")
    parser.add_argument("--output", default="")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(**json.loads(args.child))
    report = side_by_side.Report("shared_machine", args.output)
    for name in args.cases.split(","):
        for devices in args.devices.split(","):
            options = CASES[name] | {"devices": devices}
            steps = num_steps(options, args.seconds)
            beside = [(1, int(busy)) for busy in args.busy.split(",") if int(busy)]
            several = [(int(n), 0) for n in args.runs.split(",")] + beside
            rounds = [
                {case: run_together(options | {"total_steps": steps}, *case) for case in several}
                for _ in range(args.rounds)
            ]
            found = {case: statistics.median(times[case] for times in rounds) for case in several}
            for (n, busy), seconds in found.items():
                factor = seconds / (n * found[several[0]]) if several[0] == (1, 0) else None
                report.add("cases", {
                    "case": name, "devices": devices, "runs": n, "busy_programs": busy, "env_steps": steps,
                    "seconds": round(seconds, 2), "factor": factor and round(factor, 2),
                })  # fmt: skip
    print(f"written to {report.path}")


def num_steps(options: dict, seconds: float) -> int:
    """Return the environment steps that one run alone makes in this number of seconds."""
    probe = 200_000
    return round(probe * seconds / run_together(options | {"total_steps": probe}, 1))


def run_together(options: dict, num_runs: int, num_busy: int = 0) -> float:
    """Train several runs at the same time. Return the seconds from their start until the last one ends."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child"]
        runs = [
            subprocess.Popen(
                [*command, json.dumps({"folder": folder, "index": i, "num_runs": num_runs, "options": options})]
            )
            for i in range(num_runs)
        ]
        while len(list(Path(folder).glob("ready_*"))) < num_runs and all(run.poll() is None for run in runs):
            time.sleep(WAIT_S)
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(num_busy)]
        try:
            if any([run.wait() for run in runs]):
                raise SystemExit("a run failed")
        finally:
            for program in busy:
                program.kill()
                program.wait()
        spans = [json.loads(path.read_text()) for path in Path(folder).glob("time_*")]
        return max(end for _, end in spans) - min(begin for begin, _ in spans)


def child(folder: str, index: int, num_runs: int, options: dict) -> None:
    """Train one run. Write the times of the clock's start and of the last record."""
    start = Start(Path(folder), f"ready_{index}", num_runs)
    jaxrl_fast.fit(
        **options,
        seed=index,
        run_dir=f"{folder}/run_{index}",
        log_every=options["total_steps"] // NUM_RECORDS,
        eval_episodes=1,
        loggers=(),
        log_level="quiet",
        save_every=0,
        callbacks=[start],
    )
    (Path(folder) / f"time_{index}").write_text(json.dumps([start.began, start.ended]))


if __name__ == "__main__":
    main()
