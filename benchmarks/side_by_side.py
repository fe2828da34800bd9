"""Shared code of the speed benchmarks, which time jaxrl_fast and a plain program in turn in one process.

Both programs have the same hyperparameters. Speeds are environment steps per second of training, with updates and
without compilation. For jaxrl_fast only valid steps count, which excludes the reset rows. Each round runs every
contender once with a different seed. Ratios are medians of the ratios within a round, so that a slow moment of the
machine affects both. Returns are means over the episodes of the last tenth of the updates, with the standard deviation
over the rounds' seeds.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_fast.config import load
from jaxrl_fast.parallel import program
from jaxrl_fast.runs import fingerprint
from jaxrl_fast.training import build as training_build
from jaxrl_fast.utils import devices

RESULTS = Path(__file__).parent / "results"
devices.limit_blas_threads()  # as the commands of jaxrl_fast do; it applies to the plain program too


class Report:
    """A JSON file that is written after each case, so that an interrupted benchmark keeps its results."""

    def __init__(self, benchmark: str, output: str = "", append: bool = False):
        self.path = Path(output or RESULTS / f"{benchmark}_{devices.device().split()[0]}.json")
        self.content: dict[str, Any] = {
            "benchmark": benchmark,
            "device": devices.device(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "versions": fingerprint.versions() | {"xla_flags": os.environ.get("XLA_FLAGS", "")},
        }
        if append and self.path.exists():  # the cases of earlier commands come first
            self.content = json.loads(self.path.read_text()) | self.content
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, case: dict) -> None:
        """Append a case to the list under a name."""
        self.content.setdefault(name, []).append(case)
        self._write(case)

    def put(self, name: str, case: dict) -> None:
        """Set the only case under a name."""
        self.content[name] = case
        self._write(case)

    def add_incrementally(self, name: str, cases: Iterable[dict]) -> None:
        """Append a case to the list under a name, and write it again for each version in `cases`.

        Each version holds all that is known of the case by then. The last one is printed.
        """
        self.content.setdefault(name, []).append({})
        for case in cases:
            self.content[name][-1] = case
            self._save()
        print(json.dumps(self.content[name][-1]), flush=True)

    def _write(self, case: dict) -> None:
        print(json.dumps(case), flush=True)
        self._save()

    def _save(self) -> None:
        """Replace the file atomically, because the process may be killed at any time."""
        aside = self.path.with_name(self.path.name + ".new")
        aside.write_text(json.dumps(self.content, indent=2) + "\n")
        aside.replace(self.path)


def compare(
    plain: Callable[[jax.Array], tuple], ours: program.Program, num_updates: int, num_steps: int, rounds: int
) -> dict:
    """Time both programs, each for `num_steps` environment steps. Return their speeds, returns and ratios.

    `plain` is compiled. It maps a PRNG key to the parameters, and to the sum of returns and the number of the episodes
    that ended. jaxrl_fast makes these steps in `num_updates` updates.
    """
    speeds, returns = {"plain": [], "ours": []}, {"plain": [], "ours": []}
    for seed in range(-1, rounds):  # round -1 warms up
        start = time.perf_counter()
        _, (scores, episodes) = jax.block_until_ready(plain(jax.random.key(max(seed, 0))))
        plain_time = time.perf_counter() - start
        ours_time, metrics = timed(ours, np.int32(max(seed, 0)), num_updates)
        if seed < 0:
            continue
        speeds["plain"].append(num_steps / plain_time)
        speeds["ours"].append(float(metrics["valid_steps"].sum()) / ours_time)
        returns["plain"].append(last_tenth(scores, episodes))
        returns["ours"].append(last_tenth(metrics["return_sum"], metrics["episodes"]))
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["plain"], strict=True)]
    return {
        "env_steps": num_steps,
        "plain_steps_per_s": round(statistics.median(speeds["plain"])),
        "ours_steps_per_s": round(statistics.median(speeds["ours"])),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "plain_return": mean_and_std(returns["plain"]),
        "ours_return": mean_and_std(returns["ours"]),
        # None where no episode ended
        "returns_agree": agree(returns["plain"], returns["ours"]) if any(returns["ours"]) else None,
    }


def build(num_updates: int, **options: Any) -> tuple[program.Program, int]:
    """Return the program that `train` would run with these options, and its number of devices."""
    settings = load.from_keywords(**options)
    _, env, agent, placement = training_build.build(settings, training_build.load_algorithm(settings), num_updates)
    return program.build(env, agent, num_updates, placement), placement.num_devices


def steps_per_update(**options: Any) -> int:
    """Return the environment steps of an update with these options."""
    settings = load.from_keywords(**options)
    return settings.agent.length(settings.options.num_envs) * settings.options.num_envs


def timed(ours: program.Program, seed: np.ndarray, num_updates: int, before: int = 0) -> tuple[float, dict]:
    """Time updates after the first `before` ones, which are not timed. Return the seconds and the metrics."""
    state, _ = advance(ours, jax.block_until_ready(ours.init(seed)), before)
    start = time.perf_counter()
    _, rows = advance(ours, state, num_updates)
    seconds = time.perf_counter() - start
    return seconds, {k: np.concatenate([r[k] for r in rows], -1).astype(np.float64) for k in rows[0]}


def advance(ours: program.Program, state: Any, num_updates: int) -> tuple[Any, list[dict]]:
    """Make updates, in as many chunks as the program needs. Return the state and the metrics of each chunk."""
    rows, left = [], num_updates
    while left:
        length = min(left, ours.capacity)
        state, metrics = ours.chunk(state, np.int32(length))
        rows.append({k: x[..., :length] for k, x in jax.device_get(metrics).items()})
        left -= length
    return state, rows


def compared(speeds: dict[str, list[float]], first: str, second: str) -> dict:
    """Medians of both, and the ratio of the first to the second."""
    ratios = [a / b for a, b in zip(speeds[first], speeds[second], strict=True)]
    return {f"{name}_steps_per_s": round(statistics.median(speed)) for name, speed in speeds.items()} | {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def last_tenth(scores, episodes) -> float:
    """Return the mean return over the episodes that ended in the last tenth of the updates."""
    scores, episodes = (np.asarray(x, np.float64)[-max(1, len(x) // 10) :] for x in (scores, episodes))
    return float(scores.sum() / max(episodes.sum(), 1))


def mean_and_std(values: list[float]) -> list[float]:
    """Return the mean and the standard deviation, rounded to one digit."""
    return [round(statistics.mean(values), 1), round(statistics.stdev(values), 1) if len(values) > 1 else 0.0]


def agree(first: list[float], second: list[float]) -> bool:
    """Return whether the means differ by at most three standard errors of their difference, or 2% of the larger.

    With a single value each, the limit is 25% of the larger. Sizes are compared without their signs.
    """
    means = statistics.mean(first), statistics.mean(second)
    difference, larger = abs(means[0] - means[1]), max(map(abs, means))
    if len(first) < 2:
        return difference <= 0.25 * larger
    error = (statistics.variance(first) / len(first) + statistics.variance(second) / len(second)) ** 0.5
    return difference <= max(3 * error, 0.02 * larger)


def cpu_model() -> str:
    """Return the name of the CPU as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
