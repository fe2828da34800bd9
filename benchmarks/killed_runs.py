"""Kill and resume runs at random moments, and check that they end with the bits of an uninterrupted run.

    PYTHONPATH=. python benchmarks/killed_runs.py [--kills 102] [--seed 0]

PPO, DQN with all of Rainbow's parts, and PQN get a third of the kills each. A run trains in a separate process, with
one update per chunk and a checkpoint every few updates. SIGKILL ends the process up to SECONDS after its first update,
at any point: while it updates, saves, evaluates or writes metrics. The next process resumes the run. The script prints
a line of JSON for each algorithm. The exit status is 1 if anything differs: metrics other than times, or any array of
the last checkpoint.
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

SECONDS = 1.0  # the longest time from a process's first update to the kill
PAUSE_S = 0.004  # pause after each update, which slows the run so that it can be killed often
CLOCKS = ("wall_time_s", "train_time_s", "env_steps_per_s")
COMMON = dict(env="CartPole-v1", num_envs=8, total_steps=200_000, eval_every=20_000, eval_episodes=8, log_every=1000)
COMMON |= dict(save_every=1500, loggers=(), log_level="quiet")
RAINBOW = dict(value={"kind": "c51", "atoms": 7}, noisy=True, double=True, dueling=True)
RAINBOW |= dict(replay={"kind": "prioritized", "size": 4096, "n_step": 3})
RUNS = {
    "ppo": dict(rollout_length=8, hidden_sizes=(8,), normalize_observations=True, rewards="normalized"),
    "dqn": RAINBOW | dict(rollout_length=8, batch_size=16, learning_starts=64, hidden_sizes=(8,)),
    "pqn": dict(rollout_length=8, hidden_sizes=(8,)),
}


def train(options: dict) -> None:
    """Train in a child process, and print the number of each update."""
    import jaxrl_fast
    from jaxrl_fast.training import dispatcher, trainer

    process_chunk, dispatcher.CHUNK_S = trainer.Trainer.process_chunk, 0.0

    def process_slowly(self, done):
        process_chunk(self, done)
        print(self.finished, flush=True)
        time.sleep(PAUSE_S)

    trainer.Trainer.process_chunk = process_slowly
    jaxrl_fast.fit(**options)


def run_process(options: dict, seconds: float | None) -> tuple[int, bool]:
    """Run a process until it ends, or kill it this many seconds after its first update.

    Return the last update that it printed, and whether it was killed.
    """
    command = [sys.executable, "-W", "ignore", __file__, "--child", repr({"log_level": "quiet"} | options)]
    updates = [0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        updates[0] = int(process.stdout.readline() or 0)
        reader = threading.Thread(target=lambda: updates.extend(int(line) for line in process.stdout))
        reader.start()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        reader.join()
        status = process.wait()
    assert status in (0, -signal.SIGKILL), f"a run ended with status {status}"
    return max(updates), status != 0


def kill_and_compare(algo: str, parent: Path, num_kills: int, rng: np.random.Generator) -> dict:
    """Kill and resume one run this many times, and compare it with an uninterrupted one."""
    uninterrupted, killed = parent / f"{algo}_uninterrupted", parent / f"{algo}_killed"
    given = COMMON | RUNS[algo] | {"algo": algo}
    run_process(given | {"run_dir": str(uninterrupted)}, None)
    processes = []
    while sum(was_killed for _, was_killed in processes) < num_kills:
        options = {"resume": str(killed)} if killed.exists() else given | {"run_dir": str(killed)}
        processes.append(run_process(options, rng.uniform(0, SECONDS)))
        if not processes[-1][1]:
            break
    last, _ = run_process({"resume": str(killed)}, None)
    kills = sum(was_killed for _, was_killed in processes)
    return {"algo": algo, "kills": kills, "updates": last, "same": same(uninterrupted, killed)}


def same(one: Path, other: Path) -> bool:
    """Return whether all metrics except times, and all bits of the last checkpoint, are equal."""
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
    """Print a line for each algorithm. Return the exit status."""
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
        rngs = map(np.random.default_rng, np.random.SeedSequence(args.seed).spawn(len(RUNS)))
        found = [pool.submit(kill_and_compare, algo, Path(parent), each, rng) for algo, rng in zip(RUNS, rngs)]
        for line in found:
            print(json.dumps(line.result()), flush=True)
    return int(not all(line.result()["same"] for line in found))


if __name__ == "__main__":
    sys.exit(main())
