"""Replay stores beside other buffers: bytes a transition, samples per second and memory, with frames of Atari games.

    python benchmarks/replay_stores.py --sb3 /path/to/python    # of an environment that has Stable-Baselines3
    python benchmarks/replay_stores.py --memory                 # a million transitions; speeds are left out
    python benchmarks/replay_stores.py --policies FOLDER        # frames of trained policies; speeds are left out

Each case is measured in a process of its own. A compiled program adds rollouts of 4 steps of 8 environments, reads 8
batches of 32 after each, as DQN does at a replay ratio of 1/4, and sums all bytes that it has read. "memmap" is a plain
numpy memory map behind the same program. "flashbax" is its flat buffer, of whole observations, in a program that does
the same. "sb3" and "sb3-optimized" are Stable-Baselines3's buffer without and with `optimize_memory_usage`, which
return torch tensors (replay_sb3.py).

Frames are those of random play, recorded once and written again and again; "Noise" has random pixels. With --policies,
those of the runs FOLDER/Pong, FOLDER/Breakout, FOLDER/MsPacman and FOLDER/Enduro, which sample their actions. "84x84"
are stacks of 4 gray frames, "100x100x3" single frames in colour. `bytes` is what one transition takes where its frames
are kept. `memory_mb` is the growth of the resident set while the buffer is filled, and `peak_mb` the most that the
process has had (VmHWM), with Python, JAX and the compiled program. The page cache, which the system can take back, is
in neither. `cold_samples_per_s`: files are written out and dropped from the page cache before each update.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NUM_ENVS, BATCH, BATCHES, CLIP, GAMMA = 8, 32, 8, 2048, 0.99
FRAMES = {"84x84": ((84, 84), 4), "100x100x3": ((100, 100, 3), 0)}  # shape, and frames of a stack
STORES = ("device-none", "host-none", "host-zstd", "disk-none", "disk-zstd", "memmap", "flashbax")
SPEED = [  # (game, frames, store)
    *(("Pong", "84x84", store) for store in (*STORES, "sb3", "sb3-optimized")),
    *((game, "84x84", store) for game in ("Breakout", "MsPacman", "Enduro") for store in ("host-zstd", "disk-zstd")),
    *(("Noise", "84x84", store) for store in ("host-zstd", "disk-none", "disk-zstd")),
    *((game, "100x100x3", "host-zstd") for game in ("Pong", "Breakout", "MsPacman", "Enduro")),
    *(("MsPacman", "100x100x3", store) for store in ("device-none", "disk-none")),
]
MEMORY = [
    *((game, "84x84", "host-zstd") for game in ("Pong", "Breakout", "MsPacman", "Enduro")),
    ("Noise", "84x84", "disk-none"),
]
TRAINED = [(game, frames, "host-zstd") for game in ("Pong", "Breakout", "MsPacman", "Enduro") for frames in FRAMES]


class Clip(NamedTuple):
    """Frames [CLIP, 8, ...] in a file, of which a few rows are read at a time."""

    path: Path
    shape: tuple[int, ...]  # of one frame

    def rows(self, start: int, num: int) -> np.ndarray:
        """Return rows from `start` on, again from the first one at the end."""
        size = NUM_ENVS * int(np.prod(self.shape))
        parts = [(start % CLIP, min(num, CLIP - start % CLIP))]
        parts += [(0, num - parts[0][1])] * (num > parts[0][1])
        read = [np.fromfile(self.path, np.uint8, count * size, offset=row * size) for row, count in parts]
        return np.concatenate(read).reshape(num, NUM_ENVS, *self.shape)


def record(game: str, shape: tuple[int, ...], path: Path, run: str = "") -> Clip:
    """Write frames of random play, of the policy of a run, or of noise."""
    rng = np.random.default_rng(0)
    if game == "Noise":
        frames = rng.integers(0, 256, (CLIP, NUM_ENVS, *shape), np.uint8)
    else:
        size = dict(img_height=shape[0], img_width=shape[1], gray_scale=len(shape) == 2)
        pool = make_pool(game, stack_num=1, **size)
        pool.reset()
        act = trained_player(game, run) if run else lambda: rng.integers(0, pool.action_space.n, NUM_ENVS)
        steps = (pool.step(act())[0] for _ in range(CLIP))
        frames = np.stack([obs[:, 0] if len(shape) == 2 else obs.transpose(0, 2, 3, 1) for obs in steps])
    frames.tofile(path)
    return Clip(path, shape)


def make_pool(game: str, **options: Any) -> Any:
    """Return environments of Atari. Those of one game do the same at the same actions, whatever they show."""
    import envpool

    return envpool.make_gymnasium(f"{game}-v5", num_envs=NUM_ENVS, seed=0, **options)


def trained_player(game: str, run: str) -> Callable[[], np.ndarray]:
    """Return a function that gives the next actions of a run's policy, which plays in environments of its own."""
    import jax

    import jaxrl_fast

    trained = jaxrl_fast.load(run, which="last")
    height, width, stack = trained.env.spec.obs.shape
    pool = make_pool(game, img_height=height, img_width=width, stack_num=stack)
    obs, keys = pool.reset()[0], iter(jax.random.split(jax.random.key(0), CLIP))

    def act() -> np.ndarray:
        nonlocal obs
        actions = np.asarray(trained.policy(obs.transpose(0, 2, 3, 1), next(keys), explore=True))
        obs = pool.step(actions)[0]
        return actions

    return act


def reached(run: str) -> dict[str, Any]:
    """Return what the policy of a run has reached in training."""
    summary = json.loads((Path(run) / "summary.json").read_text())
    return {name: summary[name] for name in ("env_steps", "final_return_mean", "eval_return_mean")}


def status_mb(name: str) -> float:
    """Return a size of this process: VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def evict(folder: Path) -> None:
    """Write all files to the disk, and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(clip: Clip, stack: int, store: str, capacity: int, seconds: float) -> dict[str, Any]:
    """Fill one store, then alternate adding and reading for so long; with 0 seconds, read 100 times."""
    import jax
    import replay_contenders

    long = 64 if seconds == 0 else 4  # rows of a rollout
    before = status_mb("VmRSS")
    with tempfile.TemporaryDirectory(dir=clip.path.parent) as name:
        folder = Path(name)
        made = replay_contenders.make(store, clip.shape, stack, capacity, long, folder)
        lead, row = max(stack, 1) - 1, 0
        program, state, key = jax.jit(made.update, donate_argnums=0), made.state, jax.random.key(0)
        fill_start = time.perf_counter()
        for _ in range(capacity // NUM_ENVS // long + 1):
            state, _ = program(state, clip.rows(row, long + lead), key, 0)
            row += long
        jax.block_until_ready(state)
        result = {"frames_written_per_s": round(row * NUM_ENVS / (time.perf_counter() - fill_start))}
        memory, keys = status_mb("VmRSS") - before, jax.random.split(key, 10_000)
        result["bytes"] = round(made.num_bytes(state), 1)
        warm_up = 20 if seconds == 0 else 2
        for cold in [False] + [True] * (store.startswith(("disk", "memmap")) and seconds > 0):
            spent, num = 0.0, 0
            while num < warm_up or spent < seconds and num < len(keys):
                rollout = clip.rows(row, long + lead)
                if cold:
                    evict(folder)
                start = time.perf_counter()
                state, total = program(state, rollout, keys[num], BATCHES)
                total.block_until_ready()
                spent, row, num = spent + time.perf_counter() - start, row + long, num + 1
            speed = "cold_samples_per_s" if cold else "samples_per_s"
            result |= {speed: round(num * BATCHES * BATCH / spent)} if seconds else {}
        result |= {"memory_mb": round(memory, 1), "peak_mb": round(status_mb("VmHWM"), 1)}
        made.close()
    return result if seconds else {k: x for k, x in result.items() if not k.endswith("per_s")}


def main() -> None:
    """Measure the cases in turn, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="a million transitions; memory only")
    parser.add_argument("--capacity", type=int, default=0, help="default: 20,000, or a million with --memory")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="only cases with this text, such as Pong or disk-zstd")
    parser.add_argument("--sb3", default="", help="a Python that has stable-baselines3")
    parser.add_argument("--policies", default="", metavar="FOLDER", help="a folder of runs that are named after games")
    parser.add_argument("--append", action="store_true", help="add to the cases of the JSON")
    parser.add_argument("--output", default="")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    capacity = args.capacity or (1_000_000 if args.memory else 20_000)
    seconds = 0.0 if args.memory or args.policies else args.seconds
    if args.one:
        path, frames, store = args.one
        print(json.dumps(measure(Clip(Path(path), FRAMES[frames][0]), FRAMES[frames][1], store, capacity, seconds)))
        return
    import side_by_side

    name = "replay_policies" if args.policies else "replay_memory" if args.memory else "replay_stores"
    report = side_by_side.Report(name, args.output, args.append)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for game, frames, store in TRAINED if args.policies else MEMORY if args.memory else SPEED:
            if args.only not in f"{game} {frames} {store}" or store.startswith("sb3") and not args.sb3:
                continue
            path, run = Path(folder) / f"{game}-{frames}", args.policies and str(Path(args.policies) / game)
            if not path.exists():
                record(game, FRAMES[frames][0], path, run)
            sizes = ["--capacity", str(capacity), "--seconds", str(seconds), *["--memory"] * args.memory]
            script = [sys.executable, __file__]
            if store.startswith("sb3"):
                script, sizes = [args.sb3, str(Path(__file__).with_name("replay_sb3.py"))], sizes[:4]
            command = [*script, "--one", str(path), frames, store, *sizes]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            case = {"game": game, "frames": frames, "store": store, "capacity": capacity}
            case |= {"policy": reached(run)} if run else {}
            report.add("cases", case | json.loads(done.stdout.splitlines()[-1]))
    print(f"written to {report.path}")


if __name__ == "__main__":
    main()
