"""Measure the throughput and memory of a run over a thousand checkpoints: is its end as fast as its start?

    python benchmarks/soak.py                      # 1,000 checkpoints, 5,000 chunks
    python benchmarks/soak.py --checkpoints 10000
    python benchmarks/soak.py --algo players       # two players of games/Paddles, each with its own DQN
    python benchmarks/soak.py --old-and-new        # an old process and a new one, in turn

Changes in the machine's speed hide a trend of a few percent. `--old-and-new` avoids this. After one process has made
its checkpoints, another resumes from the last of them. Both then train the same bits and differ only in age. In each
round both train from one checkpoint to the next, one after the other. Their order alternates, because the first one
finds the caches cold. Two processes of the same age also differ by some percent. Several such pairs are therefore
measured, and in every other pair the new process is started first. The ratio is old over new, of wall-clock seconds and
of CPU seconds of all cores.

The chunks are single updates, so that there are many of them. The measured wall time includes the checkpoints. A fixed
numpy computation is timed at each checkpoint, because changes in the machine's speed affect both. A trend is the
least-squares slope times the length, as a share of the mean: the growth from the run's start to its end. The first
tenth is left out, because caches and allocators settle and DQN's replay buffer fills. CPU time is reported too, because
other programs affect it less than wall time. Memory is the private memory of the process, with swapped pages.

Exit status 1 means that something grows too much. Memory may grow by 1%. One program, an evaluation, may be compiled
after the first checkpoint. The time of an old run over that of a new one may be 1.01 at the lower end of its interval.
"""

import argparse
import contextlib
import math
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import numpy as np
import side_by_side

import jaxrl_fast
from jaxrl_fast.training import checkpoint_manager, dispatcher
from jaxrl_fast.utils import devices

devices.configure_cpu_devices(1)

CHUNKS_EACH, NUM_ENVS, LENGTH, NUM_POINTS = 5, 64, 32, 50
BLOCK = 100  # checkpoints whose CPU time is told together
DQN = dict(algo="dqn", replay={"size": 16_384}, replay_ratio=1 / 64)
TASKS = {
    "ppo": dict(algo="ppo", env="CartPole-v1", rollout_length=LENGTH),
    "dqn": DQN | dict(env="CartPole-v1"),
    "players": DQN | dict(env="games/Paddles", players="independent"),
}
SETTLED = 100  # checkpoints after which caches and the replay buffer are full
WRITTEN_S = 2.0  # seconds within which a checkpoint is certainly written
CONTEXT = multiprocessing.get_context("spawn")
ALLOWED = 0.01  # growth from a run's start to its end
MATRIX = np.ones((384, 384), np.float32)


class Recorder:
    """Times and memory of the process at each checkpoint."""

    def __init__(self):
        self.times: list[float] = []  # start of each checkpoint
        self.done: list[float] = []  # end of the reference computation at that checkpoint
        self.reference: list[float] = []  # seconds
        self.cpu: list[tuple[float, float]] = []  # seconds of all cores, at the same two moments as `times` and `done`
        self.memory: list[int] = []  # bytes
        self.given = 0  # submitted chunks
        self.compiled_later = 0  # programs, after the first checkpoint; the last evaluation compiles one

    @contextlib.contextmanager
    def recording(self):
        """Record trainings that run within this context."""
        save, submit = checkpoint_manager.CheckpointManager.save, dispatcher.Dispatcher.submit

        def noted_save(keeper, *args):
            self.times.append(time.perf_counter())
            before = time.process_time()
            self.memory.append(own_memory())
            self.reference.append(reference())
            self.done.append(time.perf_counter())
            self.cpu.append((before, time.process_time()))
            return save(keeper, *args)

        def noted_submit(dispatcher, limit):
            self.given += 1
            return submit(dispatcher, limit)

        def listen(event, duration, **_):
            self.compiled_later += bool(self.times) and event.endswith("backend_compile_duration")

        jax.monitoring.register_event_duration_secs_listener(listen)
        checkpoint_manager.CheckpointManager.save, dispatcher.Dispatcher.submit = noted_save, noted_submit
        try:
            yield
        finally:
            checkpoint_manager.CheckpointManager.save, dispatcher.Dispatcher.submit = save, submit
            jax.monitoring.unregister_event_duration_listener(listen)


def own_memory() -> int:
    """Return the bytes of private memory. Pages of libraries do not count, because the system may reclaim them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines) if rest.endswith("kB")}
    return 1024 * (sizes["RssAnon"] + sizes["VmSwap"])


def reference() -> float:
    """Return the seconds of a fixed computation."""
    start = time.perf_counter()
    for _ in range(4):
        np.dot(MATRIX, MATRIX)
    return time.perf_counter() - start


def trend(values: np.ndarray) -> float:
    """Return the growth of the fitted line from one end to the other, over the mean."""
    slope, _ = np.polyfit(np.arange(len(values)), values, 1)
    return float(slope * (len(values) - 1) / values.mean())


def blocks(values: np.ndarray) -> np.ndarray:
    """Sums of BLOCK values each; the last ones are left out."""
    return values[: len(values) // BLOCK * BLOCK].reshape(-1, BLOCK).sum(axis=1)


def group_medians(values: np.ndarray, count: int) -> np.ndarray:
    """Return the medians of this number of groups, so that one pause of the machine is one outlier."""
    return np.array([np.median(part) for part in np.array_split(values, count)])


def main() -> None:
    """Measure, print, and write the JSON and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--algo", default="ppo,dqn")
    parser.add_argument("--old-and-new", action="store_true")
    parser.add_argument("--rounds", type=int, default=400, help="rounds of each pair of --old-and-new; an even number")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of --old-and-new; an even number, at least four")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    if args.pairs < 4 or args.pairs % 2 or args.rounds % 2 or args.checkpoints < 2:
        parser.error("--pairs and --rounds must be even, with at least four pairs and two checkpoints")
    report = side_by_side.Report("soak_old_and_new" if args.old_and_new else "soak", args.output)
    lines, grown = {}, []
    for algo in args.algo.split(","):
        if args.old_and_new:
            case = old_and_new(algo, args.checkpoints, args.rounds, args.pairs)
        else:
            *lines[algo], case = soak(algo, args.checkpoints)
        report.add("cases", case)
        grown += growth(case)
    print(f"written to {report.path}")
    if lines:
        figure(lines).savefig(report.path.with_suffix(".png"), dpi=120)
        print(f"written to {report.path.with_suffix('.png')}")
    for line in grown:
        print(line, file=sys.stderr)
    sys.exit(bool(grown))


def growth(case: dict) -> list[str]:
    """Return a sentence per quantity that grew. The speed of `soak` is not judged: it depends on the machine too."""
    compiled, slowest = case.get("compiled_after_the_first_checkpoint", 1), case.get("clock_interval", [1.0])[0]
    wrong = {
        f"memory grew by {100 * case.get('memory_trend', 0):.1f}%": case.get("memory_trend", 0) > ALLOWED,
        f"{compiled} programs were compiled after the first checkpoint, one evaluation expected": compiled > 1,
        f"an old run takes at least {slowest:.3f} of the time of a new one": slowest > 1 + ALLOWED,
    }
    return [f"{case['algo']}: {what}" for what, holds in wrong.items() if holds]


def soak(algo: str, num_checkpoints: int) -> tuple[np.ndarray, np.ndarray, dict]:
    """Train with many checkpoints. Return relative speeds, bytes of memory, and the case for the JSON."""
    seen, per_checkpoint = Recorder(), steps_per_checkpoint(algo)
    with tempfile.TemporaryDirectory() as folder, seen.recording():
        run = train(algo, num_checkpoints, folder)
        size = sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
    settled = len(seen.times) // 10
    elapsed = np.array(seen.times[1:]) - np.array(seen.done[:-1])
    speed = per_checkpoint / elapsed[settled:]
    beside = speed * np.array(seen.reference)[1:][settled:]
    memory = np.array(seen.memory[settled:], np.float64)
    starts, ends = np.array(seen.cpu).T
    work = (starts[1:] - ends[:-1])[settled:]
    case = {
        "algo": algo,
        "checkpoints": run.summary["num_checkpoints"],
        "chunks": seen.given,
        "compiled_after_the_first_checkpoint": seen.compiled_later,
        "steps_per_s": round(statistics.median(speed)),
        "speed_trend": round(trend(group_medians(beside, min(NUM_POINTS, len(beside)))), 4),
        "speed_trend_of_the_machine_too": round(trend(group_medians(speed, min(NUM_POINTS, len(speed)))), 4),
        "cpu_time_trend": round(trend(group_medians(work, min(NUM_POINTS, len(work)))), 4),
        f"cpu_s_of_{BLOCK}_checkpoints": np.round(blocks(starts[1:] - ends[:-1]), 2).tolist(),
        "memory_mb": round(float(np.median(memory)) / 2**20, 1),
        "memory_trend": round(trend(memory), 4),
        "save_share": round(run.summary["save_time_s"] / run.summary["wall_time_s"], 4),
        "run_folder_mb": round(size / 2**20, 2),
    }
    return beside / np.median(beside), memory, case


def steps_per_checkpoint(algo: str) -> int:
    """Return the environment steps between checkpoints."""
    return CHUNKS_EACH * NUM_ENVS * (LENGTH if algo == "ppo" else 1)


def train(algo: str, num_checkpoints: int, folder: str) -> jaxrl_fast.Run:
    """Train with one update per chunk. Resume the training if the folder has it."""
    dispatcher.CHUNK_S = 0.0
    per_checkpoint = steps_per_checkpoint(algo)
    run = Path(folder, "run")
    if run.exists():
        return jaxrl_fast.fit(resume=str(run), log_level="quiet")
    return jaxrl_fast.fit(
        **TASKS[algo],
        num_envs=NUM_ENVS,
        total_steps=num_checkpoints * per_checkpoint,
        save_every=per_checkpoint,
        log_every=per_checkpoint,
        run_dir=str(run),
        loggers="tensorboard",
        log_level="quiet",
    )


def train_in_turns(algo: str, num_checkpoints: int, folder: str, pipe) -> None:
    """Train in a child process. Send the wall-clock and CPU seconds from each checkpoint to the next through the pipe.

    The child waits for a message at the start, and again at each checkpoint.
    """
    save, began = checkpoint_manager.CheckpointManager.save, (0.0, 0.0)

    def waiting_save(*args):
        nonlocal began
        pipe.send((time.perf_counter() - began[0], time.process_time() - began[1]))
        pipe.recv()
        began = time.perf_counter(), time.process_time()
        return save(*args)

    checkpoint_manager.CheckpointManager.save = waiting_save
    pipe.recv()
    train(algo, num_checkpoints, folder)


def old_and_new(algo: str, num_checkpoints: int, num_rounds: int, num_pairs: int) -> dict:
    """Measure the cost of age: the geometric mean over pairs of processes, plus and minus two standard errors.

    The order in which the two were started matters, so the standard error is over pairs of pairs.
    """
    pairs = np.log([measure_pair(algo, num_checkpoints, num_rounds, i % 2 == 0) for i in range(num_pairs)])
    balanced = pairs.reshape(-1, 2, 2).mean(axis=1)  # [pair of pairs, clock or cores]
    middle, error = balanced.mean(axis=0), balanced.std(axis=0, ddof=1) / math.sqrt(len(balanced))
    shown = lambda logs: [round(float(x), 4) for x in np.exp(logs)]
    case = {"algo": algo, "old_after": num_checkpoints + SETTLED, "new_after": SETTLED, "rounds": num_rounds}
    for i, name in enumerate(("clock", "cpu")):
        case |= {
            f"{name}_old_over_new": shown(middle)[i],
            f"{name}_interval": shown([middle[i] - 2 * error[i], middle[i] + 2 * error[i]]),
            f"{name}_of_pairs": shown(pairs[:, i]),
        }
    return case


def measure_pair(algo: str, num_checkpoints: int, num_rounds: int, old_first: bool) -> np.ndarray:
    """Return [wall-clock, CPU time] of an old run over that of a new one, which resumes it after `num_checkpoints`.

    Each is the geometric mean of two medians: over the rounds that the old run started, and over the others.
    """
    with tempfile.TemporaryDirectory() as place:
        last = num_checkpoints + SETTLED + num_rounds + 1
        folders = {name: f"{place}/{name}" for name in ("old", "new")}
        pipes, children = {}, []
        for name in sorted(folders, reverse=old_first):
            pipes[name], end = CONTEXT.Pipe()
            children.append(CONTEXT.Process(target=train_in_turns, args=(algo, last, folders[name], end), daemon=True))
            children[-1].start()
        try:
            advance(pipes["old"], num_checkpoints)
            time.sleep(WRITTEN_S)
            shutil.copytree(folders["old"], folders["new"])
            for pipe in pipes.values():
                advance(pipe, SETTLED)
            times = np.zeros((num_rounds, 2, 2))  # [round, old or new, clock or cores]
            for i in range(num_rounds):
                for which in (0, 1) if i % 2 else (1, 0):
                    times[i, which] = advance(pipes["new" if which else "old"], 1)
        finally:
            for child in children:
                child.kill()
                child.join()
    logs = np.log(times[:, 0] / times[:, 1]).reshape(-1, 2, 2)  # [pair of rounds, order, clock or cores]
    return np.exp(np.median(logs, axis=0).mean(axis=0))


def advance(pipe: Connection, num_checkpoints: int) -> tuple[float, float]:
    """Let a child work up to its next `num_checkpoints` checkpoints. Return the seconds before the last of them."""
    for _ in range(num_checkpoints):
        pipe.send(None)
        seconds = pipe.recv()
    return seconds


def figure(lines: dict[str, list[np.ndarray]]):
    """Draw speed and memory over checkpoints."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(8, 5), layout="constrained")
    above, below = made.subplots(2, 1, sharex=True)
    for (algo, (speed, memory)), color in zip(lines.items(), ("tab:blue", "tab:orange", "tab:green")):
        middle = group_medians(speed, min(NUM_POINTS, len(speed)))
        place = np.linspace(0, len(speed), len(middle))
        above.plot(place, middle, label=algo.upper(), color=color)
        below.plot(memory / 2**20, label=algo.upper(), color=color)
    above.set(ylabel="relative speed", ylim=(0, None), title="As fast at its end as at its start")
    below.set(xlabel="checkpoints", ylabel="memory (MiB)", ylim=(0, None))
    above.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return made


if __name__ == "__main__":
    main()
