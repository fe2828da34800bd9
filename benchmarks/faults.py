"""Checkpoints under fire: processes killed while they save, and bits flipped in what they saved.

    PYTHONPATH=. python benchmarks/faults.py [--kills 200] [--flips 300] [--seed 0]

A process saves one checkpoint after the other and tells the number of each once `wait` has said that it is on the
disk, until SIGKILL ends it; the next one goes on in the same folder. `lost` counts the kills after which the newest
intact checkpoint was older than the last one told; `half_written` those that left something unfinished, which shows
how many hit a save. Then single bits are flipped in the newest checkpoint's files, drawn in equal parts: `undetected`
were not answered with the checkpoint before.

Prints a line of JSON for each, and exits with 1 if anything was lost or went undetected.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_fast.runs import checkpoint, checkpoint_saver
from jaxrl_fast.utils import files

FILES = (checkpoint.ARRAYS, checkpoint.MANIFEST, checkpoint.SUM)
KEEP, PATIENCE_S = 2, 0.05  # checkpoints that are kept; the longest wait from what was told to the kill


def save_for_ever(parent: Path, number: int, size: int, pipe: int) -> None:
    """Checkpoints after this number, each told as soon as it is acknowledged."""
    saver = checkpoint_saver.Saver(parent, KEEP)
    while True:
        number += 1
        score = float(number) if number % 3 == 0 else None
        saver.save(saver.folder(number), {"x": np.full(size, number)}, {"number": number}, score)
        if problem := saver.wait():
            raise OSError(problem)
        os.write(pipe, b"%d\n" % number)


def killed(parent: Path, number: int, size: int, num_told: int, delay: float) -> list[int]:
    """What a process told that saved from this number on; it was killed so many seconds after so many."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            save_for_ever(parent, number, size, writing)
        except OSError as problem:
            print(problem, file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as told:
        numbers = [int(line) for line in itertools.islice(told, num_told)]
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit(f"the process that saves ended by itself, after {number}")
        return numbers + [int(line) for line in told]


def kill(parent: Path, num_kills: int, size: int, rng: np.random.Generator) -> dict[str, Any]:
    """Counts of what was told, and of what is there afterwards."""
    counts = dict(kills=0, acknowledged=0, half_written=0, lost=0, damaged=0)
    last = told = 0
    for _ in range(num_kills):
        numbers = killed(parent, last, size, int(rng.integers(4)), rng.uniform(0, PATIENCE_S))
        told = max([told, *numbers])
        found, wrong = checkpoint.newest(parent)
        last = found.manifest["number"] if found else 0
        whole = found is None or (found.arrays["x"].shape == (size,) and (found.arrays["x"] == last).all())
        counts["kills"] += 1
        counts["acknowledged"] += len(numbers)
        counts["half_written"] += any(parent.glob(f"{files.ASIDE}*"))
        counts["lost"] += last < told
        counts["damaged"] += bool(wrong) or not whole
    return counts


def flip(parent: Path, num_flips: int, rng: np.random.Generator) -> dict[str, Any]:
    """Counts of bits flipped, one at a time, and of those that were not answered with the checkpoint before."""
    saver = checkpoint_saver.Saver(parent, KEEP)
    for number in (1, 2):
        arrays, kinds = checkpoint.flatten({"x": np.arange(100) * number, "y": np.ones((3, 5), np.float32)})
        saver.save(saver.folder(number), arrays, {"number": number, "arrays": kinds}, None)
        saver.wait()
    counts = dict(flips=0, undetected=0)
    for i in range(num_flips):
        path = saver.folder(2) / FILES[i % len(FILES)]
        intact = path.read_bytes()
        place = rng.integers(8 * len(intact))
        damaged = bytearray(intact)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        counts["flips"] += 1
        counts["undetected"] += not noticed(parent)
        path.write_bytes(intact)
    found, wrong = checkpoint.newest(parent)
    assert found and found.manifest["number"] == 2 and not wrong
    return counts


def noticed(parent: Path) -> bool:
    """The newest checkpoint is refused, and the one before is found."""
    try:
        found, wrong = checkpoint.newest(parent)
    except Exception:
        return False
    return found is not None and found.manifest["number"] == 1 and len(wrong) == 1


def main() -> int:
    """Prints both lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--size", type=int, default=50_000, help="int64 numbers in a checkpoint whose writer is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to make a temporary folder: on the disk that is meant")
    args = parser.parse_args()
    rng, bad = np.random.default_rng(args.seed), 0
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="faults_") as name:
        for line in (
            lambda: kill(Path(name, "kills"), args.kills, args.size, rng),
            lambda: flip(Path(name, "flips"), args.flips, rng),
        ):
            start = time.perf_counter()
            counts = line()
            print(json.dumps(counts | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)
            bad += sum(counts.get(k, 0) for k in ("lost", "damaged", "undetected"))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
