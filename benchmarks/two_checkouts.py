"""Compare the training speed of two checkouts of this repository, side by side.

    python benchmarks/two_checkouts.py BEFORE AFTER     # folders of the checkouts; about eight minutes on two cores

Each round trains every row once with each checkout, in turn, in separate processes. A speed is `env_steps_per_s` of
summary.json: environment steps of training per second, with updates, without compilation. A ratio is the speed of AFTER
over that of BEFORE in the same round; the report has their median, minimum and maximum.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import side_by_side

ROWS = {  # options that both checkouts know
    "ppo_cartpole, 64 environments": "--config ppo_cartpole --num-envs 64 --total-steps 2M",
    "ppo_cartpole, 1024 environments": "ppo --env CartPole-v1 --num-envs 1024 --total-steps 4M",
    "dqn_cartpole, 64 environments": "--config dqn_cartpole --num-envs 64 --total-steps 400k",
    "ppo_minatar_breakout": "--config ppo_minatar_breakout --total-steps 400k",
    "pqn_minatar_breakout": "--config pqn_minatar_breakout --total-steps 200k",
}


def main() -> None:
    """Measure each row, print it and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="", help="only rows with this text in their name")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("two_checkouts", args.output)
    for name, line in ROWS.items():
        if args.rows in name:
            report.add("rows", measure(name, line, args.before, args.after, args.rounds))
    print(f"written to {report.path}")


def measure(name: str, line: str, before: Path, after: Path, rounds: int) -> dict:
    """Return speeds and ratios of a row."""
    for checkout in (before, after):
        speed(checkout, line)  # compiles
    pairs = [(speed(before, line), speed(after, line)) for _ in range(rounds)]
    ratios = [new / old for old, new in pairs]
    found = {
        "row": name,
        "before": statistics.median(old for old, _ in pairs),
        "after": statistics.median(new for _, new in pairs),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }
    print(found)
    return found


def speed(checkout: Path, line: str) -> float:
    """Train once with a checkout. Return environment steps per second."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "jaxrl_fast.train", *line.split(), "--run-dir", str(run)]
        command += ["--log-level", "quiet", "--eval-episodes", "1", "--eval-envs", "1"]
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        subprocess.run(command, check=True, env=environment, cwd=folder)
        return json.loads((run / "summary.json").read_text(encoding="utf-8"))["env_steps_per_s"]


if __name__ == "__main__":
    main()
