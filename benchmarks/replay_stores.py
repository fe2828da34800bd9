"""Replay stores: bytes a transition, samples per second and memory of the process, with frames of Atari games.

    python benchmarks/replay_stores.py --capacity 50000 --games Pong Breakout

Each store is measured in a process of its own. A compiled program adds rollouts of 4 steps of 8 environments, reads 8
batches of 32 after each, as DQN does at a replay ratio of 1/4, and sums all bytes that it has read. "memmap" is a plain
numpy memory map behind the same program. The frames are those of random play, recorded once and written again and
again, or with noise in every pixel ("Noise"). `memory_mb` is the growth of the resident set, measured after the buffer
was filled; `bytes` is what one transition takes where the frames are kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import side_by_side

from jaxrl_fast import replay
from jaxrl_fast.types import Discrete, EnvSpec, Parallelism, Transition
from jaxrl_fast.utils import devices

devices.configure_cpu_devices(1)

NUM_ENVS, STACK, STEPS, BATCH, BATCHES, CLIP = 8, 4, 4, 32, 8, 1024
STORES = (
    ("device", "none"),
    ("host", "none"),
    ("host", "zstd"),
    ("disk", "none"),
    ("disk", "zstd"),
    ("memmap", "none"),
)
SPEC = EnvSpec("frames", jax.ShapeDtypeStruct((84, 84, STACK), jnp.uint8), Discrete(4), NUM_ENVS, STACK)


class Memmap:
    """Frames in a numpy memory map, in place of `replay.host.blocks`."""

    def __init__(self, sizes: tuple[int, ...], path: Path):
        self.frames = np.memmap(path, np.uint8, "w+", shape=sizes)
        self.num_bytes = 0

    def write(self, group: int, data: np.ndarray) -> None:
        self.frames[group % len(self.frames)] = data
        self.num_bytes = min(self.num_bytes + data.nbytes, self.frames.nbytes)

    def read(self, request: Any, out: np.ndarray) -> None:
        out[request.row] = self.frames[request.group % len(self.frames), request.env, request.at]

    def close(self) -> None:
        del self.frames


def record(game: str, path: Path) -> None:
    """Write frames [CLIP, 8, 84, 84] of random play, or of noise."""
    rng = np.random.default_rng(0)
    if game == "Noise":
        np.save(path, rng.integers(0, 256, (CLIP, NUM_ENVS, 84, 84), np.uint8))
        return
    import envpool

    pool = envpool.make_gymnasium(f"{game}-v5", num_envs=NUM_ENVS, stack_num=1, seed=0)
    pool.reset()
    num_actions = pool.action_space.n
    np.save(path, np.stack([pool.step(rng.integers(0, num_actions, NUM_ENVS))[0][:, 0] for _ in range(CLIP)]))


def resident_mb() -> float:
    """Return the resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def measure(clip: Path, storage: str, compression: str, capacity: int, seconds: float) -> dict[str, Any]:
    """Fill one store, and then alternate adding and reading for so long."""
    frames = np.load(clip)
    frames = np.concatenate([frames, frames[: STACK - 1]])
    config = replay.ReplayConfig(capacity // NUM_ENVS // STEPS * STEPS, NUM_ENVS, 1, STACK)
    of_store = "host" if storage == "memmap" else storage
    buffer = replay.uniform(replay.stored(config, SPEC, Parallelism(), of_store, compression), SPEC)
    ones = jnp.ones((STEPS, NUM_ENVS))

    def update(state: Any, rollout: Any, key: jax.Array, num: jax.Array) -> Any:
        obs = jnp.stack([rollout[i : i + STEPS] for i in range(STACK)], -1)
        steps = Transition(obs, ones.astype(jnp.int32), ones, ones, ones < 0, ones > 0, ())
        state = buffer.add(state, steps)
        keys = jax.random.split(key, BATCHES)
        of_batch = buffer.read_ahead(state, keys, num, BATCH) if buffer.read_ahead else lambda i: state

        def one(i: jax.Array, total: jax.Array) -> jax.Array:
            sample = buffer.sample(of_batch(i), keys[i], BATCH, 0.99)[0]
            return total + sample.obs.sum(dtype=jnp.uint32) + sample.next_obs.sum(dtype=jnp.uint32)

        return state, jax.lax.fori_loop(0, num, one, jnp.uint32(0))

    before = resident_mb()
    with tempfile.TemporaryDirectory(dir=clip.parent) as folder:
        for resource in buffer.resources:
            resource.open(Path(folder) / resource.name)
        host = buffer.resources[0].open.__self__ if buffer.resources else None
        if storage == "memmap":
            host.blocks = Memmap(host.blocks.frames.shape, Path(folder) / "map")
        program = jax.jit(update, donate_argnums=0)
        state, key, row = buffer.init(), jax.random.key(0), 0
        fill_start = time.perf_counter()
        for _ in range(config.num_rows // STEPS):
            state, _ = program(state, frames[row : row + STEPS + STACK - 1], key, jnp.int32(0))
            row = (row + STEPS) % CLIP
        jax.block_until_ready(state)
        fill_s = time.perf_counter() - fill_start
        memory, start, num, key_all = resident_mb() - before, time.perf_counter(), 0, jax.random.split(key, 10_000)
        while time.perf_counter() - start < seconds and num < len(key_all):
            state, total = program(state, frames[row : row + STEPS + STACK - 1], key_all[num], jnp.int32(BATCHES))
            total.block_until_ready()
            row, num = (row + STEPS) % CLIP, num + 1
        elapsed = time.perf_counter() - start
        kept = host.blocks.num_bytes if host else sum(x.nbytes for x in jax.tree.leaves(state))
        for resource in buffer.resources:
            resource.close()
    return {
        "store": storage,
        "compression": compression,
        "capacity": capacity,
        "bytes": round(kept / (config.num_rows * NUM_ENVS), 1),
        "samples_per_s": round(num * BATCHES * BATCH / elapsed),
        "frames_written_per_s": round(config.num_rows * NUM_ENVS / fill_s),
        "memory_mb": round(memory, 1),
    }


def main() -> None:
    """Measure all stores in turn, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", nargs="+", default=["Pong", "Breakout", "Noise"])
    parser.add_argument("--stores", nargs="+", default=[f"{store}-{compression}" for store, compression in STORES])
    parser.add_argument("--capacity", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--output", default="")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        clip, store = args.one
        print(json.dumps(measure(Path(clip), *store.split("-"), args.capacity, args.seconds)))
        return
    report = side_by_side.Report("replay_stores", args.output)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for game in args.games:
            clip = Path(folder) / f"{game}.npy"
            record(game, clip)
            for store in args.stores:
                sizes = ["--capacity", str(args.capacity), "--seconds", str(args.seconds)]
                command = [sys.executable, __file__, "--one", str(clip), store, *sizes]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                report.add("cases", {"game": game} | json.loads(done.stdout.splitlines()[-1]))
    print(f"written to {report.path}")


if __name__ == "__main__":
    main()
