"""Write configs/published.json: for each preset, how many seeds of its published training reached the threshold.

    python benchmarks/published.py

A run of a preset that no seed has solved warns about it. tests/test_benchmarks.py checks that the file is up to date.
"""

import json
from pathlib import Path
from typing import Any

from jaxrl_fast.config import load, presets
from jaxrl_fast.utils.files import replace

RESULTS = Path(__file__).parent / "results"
ATARI = "pong_cpu.json", "breakout_cpu.json"  # of atari_learning.py: a training is named "PRESET, seed 0"


def collect() -> dict[str, Any]:
    """Return the number of seeds, of solved ones, the steps and the threshold of each preset with a threshold."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, row in _read("learning.json").items():
        seeds = row["seeds"].values()
        found[name] = [{"solved": seed["solved_at"] is not None, "env_steps": row["env_steps"]} for seed in seeds]
    for file in ATARI:
        for name, training in _read(file)["trainings"].items():
            if training["summary"].get("status") == "done":
                found.setdefault(name.partition(", ")[0], []).append(training["summary"])
    published = {}
    for name in presets.shipped():
        threshold = load.from_keywords(name).options.solved_threshold
        if threshold is not None and (seeds := found.get(name)):
            num_solved, steps = sum(seed["solved"] for seed in seeds), min(seed["env_steps"] for seed in seeds)
            published[name] = {"seeds": len(seeds), "solved": num_solved, "env_steps": steps, "threshold": threshold}
    return published


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


if __name__ == "__main__":
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in collect().items())
    replace(presets.published_file(), f"{{\n{lines}\n}}\n")
