"""DQN on Atari with each replay storage: environment steps per second at the preset's replay ratio, interleaved.

    python benchmarks/replay_dqn.py

All stores train in one process, each with its own environments and its own buffer, which is filled first. Then they
take turns, in rounds: `ratio` is the median over the rounds of the speed over that of "device" in the same round.
`cpu_ratio` is the same of the processor time, of all threads, which depends less on other programs. `read_ms` is how
long the program waited for one update's batches.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import side_by_side

from jaxrl_fast.config import load
from jaxrl_fast.parallel import program
from jaxrl_fast.training import build
from jaxrl_fast.utils import devices

devices.configure_cpu_devices("auto")
NUM_UPDATES = 10**6  # over which schedules decay
STORES = ("device-none", "host-none", "host-zstd", "disk-none", "disk-zstd")


class Contender:
    """One store: a compiled run, and the state that it has reached."""

    def __init__(self, store: str, args: argparse.Namespace, folder: Path):
        storage, compression = store.split("-")
        replay = {"size": args.capacity, "storage": storage}
        replay |= {} if storage == "device" else {"compression": compression}
        settings = load.from_keywords(args.preset, replay=replay, learning_starts=args.capacity // 2)
        algorithm = build.load_algorithm(settings)
        settings, env, _, placement = build.build(settings, algorithm, NUM_UPDATES)
        self.agent = build.make_agent(settings.agent, algorithm, env, NUM_UPDATES)
        self.per_update = self.agent.rollout_length * settings.options.num_envs
        self.buffers = []
        for resource in self.agent.learning.resources:
            (folder / store).mkdir()
            resource.open(folder / store / resource.name)
            self.buffers.append(resource.open.__self__)
        self.ours = program.build(env, self.agent, NUM_UPDATES, placement)
        self.state = self.ours.init(np.int32(0))

    def advance(self, num_updates: int) -> dict[str, float]:
        """Seconds of the clock, of the processor and of reading for so many updates."""
        now = lambda: (time.perf_counter(), time.process_time(), sum(x.read_time for x in self.buffers))
        before = now()
        self.state, _ = side_by_side.advance(self.ours, self.state, num_updates)
        return {name: b - a for name, a, b in zip(("wall", "cpu", "read"), before, now())}


def main() -> None:
    """Fill all buffers, measure in rounds, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="dqn_pong")
    parser.add_argument("--stores", nargs="+", default=STORES)
    parser.add_argument("--capacity", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=1_000, help="environment steps of a store in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("replay_dqn", args.output)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        made = {store: Contender(store, args, Path(folder)) for store in args.stores}
        for contender in made.values():
            contender.advance(args.capacity * 5 // 4 // contender.per_update)
        rounds = [
            {store: contender.advance(args.steps // contender.per_update) for store, contender in made.items()}
            for _ in range(args.rounds)
        ]
        first = args.stores[0]
        num_updates = args.steps // made[first].per_update
        for store in args.stores:
            of = lambda what: statistics.median(each[store][what] for each in rounds)  # noqa: B023
            over = lambda what: statistics.median(each[first][what] / each[store][what] for each in rounds)  # noqa: B023
            case: dict[str, Any] = {"preset": args.preset, "store": store, "capacity": args.capacity}
            case |= {"steps_per_s": round(args.steps / of("wall"), 1), "ratio": round(over("wall"), 3)}
            case |= {"cpu_ms": round(1000 * of("cpu") / num_updates, 2), "cpu_ratio": round(over("cpu"), 3)}
            case |= {"read_ms": round(1000 * of("read") / num_updates, 2)}
            report.add("cases", case)
        for contender in made.values():
            for resource in contender.agent.learning.resources:
                resource.close()
    print(f"written to {report.path}")


if __name__ == "__main__":
    main()
