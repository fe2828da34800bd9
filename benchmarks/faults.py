"""Test checkpoints under faults: kill processes while they save, and flip bits in saved files.

    PYTHONPATH=. python benchmarks/faults.py [--kills 200] [--flips 300] [--seed 0]

A process saves one checkpoint after another until SIGKILL ends it. It reports the number of a checkpoint once `wait`
has confirmed that it is on the disk. The next process continues in the same folder. Then single bits are flipped in the
newest checkpoint, equally often in each of its files. One line of JSON for each part has the counts:

    acknowledged   checkpoints that were reported
    half_written   kills that left unfinished files, which shows how many kills hit a save
    lost           kills after which the newest intact checkpoint was older than the last one reported
    damaged        kills after which a checkpoint was rejected or had wrong contents
    undetected     flips after which the previous checkpoint was not loaded instead

The exit status is 1 if any checkpoint was lost or damaged, or any flip was undetected.
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

from jaxrl_fast.runs import checkpoint, checkpoint_writer
from jaxrl_fast.utils import files

FILES = (checkpoint.ARRAYS, checkpoint.MANIFEST, checkpoint.SUM)
KEEP, MAX_DELAY_S = 2, 0.05  # checkpoints that are kept; the longest delay from a report to the kill


def save_forever(parent: Path, number: int, size: int, pipe: int) -> None:
    """Save checkpoints from the next number on. Report each as soon as it is acknowledged."""
    saver = checkpoint_writer.Writer(parent, KEEP)
    while True:
        number += 1
        score = float(number) if number % 3 == 0 else None
        saver.save(saver.folder(number), {"x": np.full(size, number)}, {"number": number}, score)
        if problem := saver.wait():
            raise OSError(problem)
        os.write(pipe, b"%d\n" % number)


def save_until_killed(parent: Path, number: int, size: int, num_reports: int, delay: float) -> list[int]:
    """Start a process that saves from this number on. Return the numbers that it reported.

    The process is killed `delay` seconds after it has reported `num_reports` checkpoints.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            save_forever(parent, number, size, writing)
        except OSError as problem:
            print(problem, file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as reports:
        numbers = [int(line) for line in itertools.islice(reports, num_reports)]
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit(f"the saving process ended before it was killed, after checkpoint {number}")
        return numbers + [int(line) for line in reports]


def kill_processes(parent: Path, num_kills: int, size: int, rng: np.random.Generator) -> dict[str, Any]:
    """Kill saving processes. Return counts of reported, lost and damaged checkpoints."""
    counts = dict(kills=0, acknowledged=0, half_written=0, lost=0, damaged=0)
    last = reported = 0
    for _ in range(num_kills):
        numbers = save_until_killed(parent, last, size, int(rng.integers(4)), rng.uniform(0, MAX_DELAY_S))
        reported = max([reported, *numbers])
        found, wrong = checkpoint.newest(parent)
        last = found.manifest["number"] if found else 0
        whole = found is None or (found.arrays["x"].shape == (size,) and (found.arrays["x"] == last).all())
        counts["kills"] += 1
        counts["acknowledged"] += len(numbers)
        counts["half_written"] += any(parent.glob(f"{files.ASIDE}*"))
        counts["lost"] += last < reported
        counts["damaged"] += bool(wrong) or not whole
    return counts


def flip_bits(parent: Path, num_flips: int, rng: np.random.Generator) -> dict[str, Any]:
    """Flip bits, one at a time. Return counts of all flips and of undetected ones."""
    saver = checkpoint_writer.Writer(parent, KEEP)
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
        counts["undetected"] += not is_detected(parent)
        path.write_bytes(intact)
    found, wrong = checkpoint.newest(parent)
    assert found and found.manifest["number"] == 2 and not wrong
    return counts


def is_detected(parent: Path) -> bool:
    """Return whether the newest checkpoint is rejected and the previous one is found."""
    try:
        found, wrong = checkpoint.newest(parent)
    except Exception:
        return False
    return found is not None and found.manifest["number"] == 1 and len(wrong) == 1


def main() -> int:
    """Print the counts of both parts. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--size", type=int, default=50_000, help="int64 numbers per checkpoint of the killed processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to make a temporary folder, on the disk to be tested")
    args = parser.parse_args()
    rng, bad = np.random.default_rng(args.seed), 0
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="faults_") as name:
        for line in (
            lambda: kill_processes(Path(name, "kills"), args.kills, args.size, rng),
            lambda: flip_bits(Path(name, "flips"), args.flips, rng),
        ):
            start = time.perf_counter()
            counts = line()
            print(json.dumps(counts | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)
            bad += sum(counts.get(k, 0) for k in ("lost", "damaged", "undetected"))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
