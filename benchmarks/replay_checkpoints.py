"""What it costs to save a large replay on disk: only the blocks that are new are written, and files are not copied.

    python benchmarks/replay_checkpoints.py --gigabytes 10

A buffer of frames of 84x84 random bytes is filled. Then rows are added, as many as a run adds between two checkpoints,
and the run is saved: `wait_s` is how long training waits, and `thread_s` how long the thread that writes the checkpoint
takes, while training continues. The arrays that lie on the device (16 bytes a transition) are part of it. Files are
written to the current folder.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import side_by_side

from jaxrl_fast.replay import host
from jaxrl_fast.replay.host import buffer as host_buffer
from jaxrl_fast.runs import checkpoint_writer
from jaxrl_fast.utils.files import REPLAY

NUM_ENVS, NUM_BYTES, ROWS = 8, 84 * 84, 64


def main() -> None:
    """Fill, save several times, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=100_000, help="transitions between two checkpoints")
    parser.add_argument("--period", type=float, default=300.0, help="seconds between two checkpoints")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("replay_checkpoints", args.output)
    num_rows = int(args.gigabytes * 1e9) // NUM_BYTES // NUM_ENVS // ROWS * ROWS
    made = host_buffer.HostBuffer(host_buffer.Shape(num_rows, NUM_ENVS, NUM_BYTES), on_disk=True, compressed=False)
    frames = np.random.default_rng(0).integers(0, 256, (ROWS, NUM_ENVS, NUM_BYTES), np.uint8)
    arrays = {"rest": np.zeros(16 * num_rows * NUM_ENVS, np.uint8)}

    def add(transitions: int) -> None:
        for _ in range(-(-transitions // (ROWS * NUM_ENVS))):
            made.put(0, made.count % num_rows, frames)

    with tempfile.TemporaryDirectory(dir=".") as name:
        run = Path(name)
        (run / "checkpoints").mkdir()
        resource = host.resource(made, REPLAY)
        resource.open(run / resource.name)
        saver = checkpoint_writer.Writer(run / "checkpoints", 2, (resource,))
        add(num_rows * NUM_ENVS)
        for i in range(args.saves + 1):
            start = time.perf_counter()
            saver.save(saver.folder(i + 1), arrays, {"env_steps": i}, None)
            waited = time.perf_counter()
            assert not saver.wait(), "the disk is full"
            wait_s, thread_s = waited - start, time.perf_counter() - waited
            if i:  # the first one writes out what the fill has left in the page cache
                shares = {
                    "wait_share": round(wait_s / args.period, 5),
                    "thread_share": round(thread_s / args.period, 5),
                }
                case = {"gigabytes": args.gigabytes, "new_transitions": args.steps, "period_s": args.period}
                report.add("saves", case | {"wait_s": round(wait_s, 3), "thread_s": round(thread_s, 3)} | shares)
            add(args.steps)
        on_disk = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        report.put("bytes_on_disk", {"bytes": on_disk, "of_buffer": num_rows * NUM_ENVS * NUM_BYTES})
        resource.close()
    print(f"written to {report.path}")


if __name__ == "__main__":
    main()
