"""Stable-Baselines3's replay buffer, measured as replay_stores.py does, which runs this script with another Python."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from replay_stores import BATCH, BATCHES, FRAMES, NUM_ENVS, Clip, status_mb
from stable_baselines3.common.buffers import ReplayBuffer

STEPS = 4  # rows that are added before batches are read


def measure(clip: Clip, stack: int, optimized: bool, capacity: int, seconds: float) -> dict[str, Any]:
    """Fill the buffer, then alternate adding and reading."""
    before, shape = status_mb("VmRSS"), (*clip.shape, stack) if stack else clip.shape
    arguments = spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(4)
    # With less memory, it cannot tell time limits from ends.
    buffer = ReplayBuffer(
        capacity,
        *arguments,
        device="cpu",
        n_envs=NUM_ENVS,
        optimize_memory_usage=optimized,
        handle_timeout_termination=not optimized,
    )
    zeros, infos = np.zeros(NUM_ENVS), [{} for _ in range(NUM_ENVS)]

    def add(row: int) -> None:
        frames = clip.rows(row, STEPS + max(stack, 1))
        for i in range(STEPS):
            of = lambda j: np.moveaxis(frames[j : j + stack], 0, -1) if stack else frames[j]
            buffer.add(of(i), of(i + 1), zeros[:, None], zeros, zeros, infos)

    row, fill_start = 0, time.perf_counter()
    while row * NUM_ENVS < capacity:
        add(row)
        row += STEPS
    fill_s = time.perf_counter() - fill_start
    memory, spent, num = status_mb("VmRSS") - before, 0.0, 0
    while spent < seconds or num < 2:
        start, total = time.perf_counter(), 0
        add(row)
        for _ in range(BATCHES):
            sample = buffer.sample(BATCH)
            total += int(sample.observations.sum()) + int(sample.next_observations.sum())
        spent, row, num = spent + time.perf_counter() - start, row + STEPS, num + 1
    num_bytes = buffer.observations.nbytes + (0 if optimized else buffer.next_observations.nbytes)
    return {
        "frames_written_per_s": round(row * NUM_ENVS / fill_s),
        "bytes": round(num_bytes / capacity, 1),
        "samples_per_s": round(num * BATCHES * BATCH / spent),
        "memory_mb": round(memory, 1),
        "peak_mb": round(status_mb("VmHWM"), 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3)
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--seconds", type=float)
    args = parser.parse_args()
    path, frames, store = args.one
    shape, stack = FRAMES[frames]
    optimized = store == "sb3-optimized"
    print(json.dumps(measure(Clip(Path(path), shape), stack, optimized, args.capacity, args.seconds)))
