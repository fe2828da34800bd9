"""Measure how much speed each kernel in C gains: presets with all kernels, and with one or all of them switched off.

    python benchmarks/kernels.py                                 # five presets, about a quarter of an hour on two cores
    python benchmarks/kernels.py --rows ppo_cartpole --seconds 1

One process compiles all variants of a preset, each with its value of JAXRL_FAST_KERNELS. Then they train in turn,
round by round, each from its current state. Speeds are valid environment steps per second of training, with updates and
without compilation. A ratio is a variant's speed over that of `all` in the same round; the report has their median,
minimum and maximum. A ratio of 0.9 means that training without the kernel is 10% slower.
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import side_by_side

from jaxrl_fast.config import load
from jaxrl_fast.kernels.build import KERNELS, VARIABLE
from jaxrl_fast.parallel.program import Program
from jaxrl_fast.utils import devices

devices.configure_cpu_devices()  # before gymnax is imported, which starts JAX

ROWS: dict[str, dict[str, Any]] = {
    "ppo_cartpole": dict(preset="ppo_cartpole", num_envs=64),
    "dqn_cartpole": dict(preset="dqn_cartpole"),
    "ppo_minatar_breakout": dict(preset="ppo_minatar_breakout"),
    "pqn_minatar_breakout": dict(preset="pqn_minatar_breakout"),
    "ppo_pong_small": dict(preset="ppo_pong_small"),
}
NEEDS_ENVPOOL = ("ppo_pong_small",)
# Name of the variant: its value of JAXRL_FAST_KERNELS, and more options of the run. Without the all-reduce there are no
# gradient workers either, and shards sum by XLA; on one device there are neither workers nor shards.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("auto", {}),
    **{f"without_{name}": (",".join(other for other in KERNELS if other != name), {}) for name in KERNELS},
    "xla": ("xla", {}),
    "one_device": ("auto", {"devices": 1}),
}


def main() -> None:
    """Measure each row, print it and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="some of the rows, separated by commas")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="some of the variants; `all` is always measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="intended length of one timed training")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    rows, variants = args.rows.split(","), list(dict.fromkeys(["all", *args.variants.split(",")]))
    for word, known in [*((row, ROWS) for row in rows), *((variant, VARIANTS) for variant in variants)]:
        if word not in known:
            parser.error(f"unknown {word!r}; choose from {', '.join(known)}")
    report = side_by_side.Report("kernels", args.output)
    for row in rows:
        if row in NEEDS_ENVPOOL and not importlib.util.find_spec("envpool"):
            print(f"{row}: left out, because envpool is not installed")
            continue
        report.add("rows", measure(row, variants, args.rounds, args.seconds))
    print(f"written to {report.path}")


def measure(row: str, variants: list[str], rounds: int, seconds: float) -> dict:
    """Return speeds and ratios of the variants of a row."""
    settings = load.from_keywords(**ROWS[row])
    num_envs = int(settings.options.num_envs)
    per_update = num_envs * settings.agent.length(num_envs)
    first_learning = settings.agent.first_learning(num_envs)  # in environment steps
    before = -(-first_learning // per_update)
    runs = {}
    for name in variants:
        print(f"{row}: compiling {name}", flush=True)
        runs[name] = Run(row, name, settings.options.total_steps // per_update)
        runs[name].speed(before + 1)  # the first update that learns is not timed
    num_updates = max(1, round(seconds * runs["all"].speed(1) / per_update))
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds):
        for name in variants[i % len(variants) :] + variants[: i % len(variants)]:
            speeds[name].append(runs[name].speed(num_updates))
    found = {name: summary(speeds[name], speeds["all"]) | {"devices": runs[name].num_devices} for name in variants}
    return {
        "row": row,
        "num_envs": num_envs,
        "env_steps": num_updates * per_update,
        "rounds": rounds,
        "variants": found,
    }


class Run:
    """A training of one variant, and its current state."""

    def __init__(self, row: str, variant: str, num_updates: int):
        self.kernels, options = VARIANTS[variant]
        with kernels_switched(self.kernels):
            self.program: Program
            self.program, self.num_devices = side_by_side.build(num_updates, **ROWS[row], **options)
            self.state = jax.block_until_ready(self.program.init(np.int32(0)))

    def speed(self, num_updates: int) -> float:
        """Train for some updates and return the valid environment steps per second."""
        with kernels_switched(self.kernels):
            start = time.perf_counter()
            self.state, rows = side_by_side.advance(self.program, self.state, num_updates)
            seconds = time.perf_counter() - start
        return sum(float(metrics["valid_steps"].sum()) for metrics in rows) / seconds


@contextmanager
def kernels_switched(value: str) -> Iterator[None]:
    """Set JAXRL_FAST_KERNELS, which is read while a program is traced."""
    previous = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = previous


def summary(speeds: list[float], baseline: list[float]) -> dict:
    """Return the median speed, and median, minimum and maximum of the ratios to the baseline of the same round."""
    ratios = [speed / base for speed, base in zip(speeds, baseline, strict=True)]
    return {
        "steps_per_s": round(statistics.median(speeds)),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


if __name__ == "__main__":
    main()
