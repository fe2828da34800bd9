"""Whole trainings under fire: runs killed at random moments, over and over, must end with the bits of a run left alone.

    PYTHONPATH=. python benchmarks/killed_runs.py [--kills 102] [--seed 0]

A third of the kills each for PPO, DQN with all of Rainbow's parts, and PQN. A run trains in a process of its own, one
update a chunk, saving every few; SIGKILL comes up to SECONDS after its first update, wherever it then is: updating,
saving, evaluating, writing metrics. The next process goes on with `--resume`. Prints a line of JSON for each algorithm
and exits with 1 if anything differs: metrics apart from times, or any array of the last checkpoint.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

SECONDS, PAUSE_S = 1.0, 0.004  # the longest life after the first update; what each update waits, so that lives are many
CLOCKS = ("wall_time_s", "train_time_s", "env_steps_per_s")
COMMON = dict(env="CartPole-v1", num_envs=8, total_steps=200_000, eval_every=20_000, eval_episodes=8, log_every=1000)
COMMON |= dict(save_every=1500, tensorboard=False, log_level="quiet")
RAINBOW = dict(distribution="c51", num_atoms=7, noisy=True, prioritized=True, n_step=3, double=True, dueling=True)
RUNS = {
    "ppo": dict(agent=dict(rollout_length=8, hidden=(8,), normalize_observations=True, normalize_rewards=True)),
    "dqn": dict(agent=RAINBOW | dict(rollout_length=8, capacity=4096, batch_size=16, learning_starts=64, hidden=(8,))),
    "pqn": dict(agent=dict(rollout_length=8, hidden=(8,))),
}


def train(options: dict) -> None:
    """In a child: tells each update."""
    import jaxrl_fast
    from jaxrl_fast.training import dispatcher, trainer

    process_chunk, dispatcher.CHUNK_S = trainer.Trainer.process_chunk, 0.0

    def process_slowly(self, done):
        process_chunk(self, done)
        print(self.finished, flush=True)
        time.sleep(PAUSE_S)

    trainer.Trainer.process_chunk = process_slowly
    jaxrl_fast.fit(**options)


def life(options: dict, seconds: float | None) -> tuple[int, bool]:
    """A process until its end, or SIGKILL so long after its first update: the last update told, whether killed."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", repr({"log_level": "quiet"} | options)]
    told = [0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        told[0] = int(process.stdout.readline() or 0)
        reader = threading.Thread(target=lambda: told.extend(int(line) for line in process.stdout))
        reader.start()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        reader.join()
        status = process.wait()
    assert status in (0, -signal.SIGKILL), f"a run ended with {status}"
    return max(told), status != 0


def under_fire(algo: str, parent: Path, num_kills: int, rng: np.random.Generator) -> dict:
    """Kills one run so many times, and compares it with one that was left alone."""
    alone, killed = parent / f"{algo}_alone", parent / f"{algo}_killed"
    given = COMMON | RUNS[algo] | {"algo": algo}
    life(given | {"run_dir": str(alone)}, None)
    lives = []
    while sum(was_killed for _, was_killed in lives) < num_kills:
        options = {"resume": str(killed)} if killed.exists() else given | {"run_dir": str(killed)}
        lives.append(life(options, rng.uniform(0, SECONDS)))
        if not lives[-1][1]:
            break
    last, _ = life({"resume": str(killed)}, None)
    kills = sum(was_killed for _, was_killed in lives)
    return {"algo": algo, "kills": kills, "updates": last, "same": same(alone, killed)}


def same(one: Path, other: Path) -> bool:
    """Metrics but for times, and every bit of the last checkpoint."""
    from jaxrl_fast.config import paths
    from jaxrl_fast.runs import checkpoint

    def of(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in lines]
        saved, _ = checkpoint.newest(folder / paths.CHECKPOINTS)
        arrays = {k: x.tobytes() for k, x in saved.arrays.items() if k.rpartition("/")[2] not in CLOCKS}
        return records, arrays

    return of(one) == of(other)


def main() -> int:
    """Prints a line for each algorithm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=102)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(eval(args.child))
        return 0
    each = args.kills // len(RUNS)
    with tempfile.TemporaryDirectory(prefix="killed_runs_") as parent, ThreadPoolExecutor(os.cpu_count()) as pool:
        chances = map(np.random.default_rng, np.random.SeedSequence(args.seed).spawn(len(RUNS)))
        found = [pool.submit(under_fire, algo, Path(parent), each, rng) for algo, rng in zip(RUNS, chances)]
        for line in found:
            print(json.dumps(line.result()), flush=True)
    return int(not all(line.result()["same"] for line in found))


if __name__ == "__main__":
    sys.exit(main())
