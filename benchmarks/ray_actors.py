"""Measure environments that wait in Ray actors beside the same ones in worker processes.

    pip install -c constraints.txt -e ".[ray]"
    python benchmarks/ray_actors.py

64 environments, each in a process by itself, sleep 10 ms in each step. A pool in worker processes and a pool in Ray
actors take 100 steps each in turn, through the compiled bridge to Python. The JSON has the median milliseconds of a
step, the speed of actors in proportion to that of processes in each round, and the load of the machine.
"""

import argparse
import os
import statistics
import time

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import side_by_side

from jaxrl_fast import envs
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers


class Sleeping(gymnasium.Env):
    """An environment that only waits."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, sleep: float = 0.01) -> None:
        self.sleep, self.t = sleep, 0

    def reset(self, *, seed=None, options=None):
        """Start an episode."""
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        """Wait."""
        time.sleep(self.sleep)
        self.t += 1
        return np.full(4, self.t % 2, np.float32), 1.0, False, self.t == 200, {}


def main() -> None:
    """Measure both pools in turn, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--sleep", type=float, default=0.01, help="seconds of a step")
    parser.add_argument("--steps", type=int, default=100, help="in each measurement")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("ray_actors", args.output)
    workers = {"processes": Workers(args.num_envs, 60.0), "ray_actors": Workers(args.num_envs, 60.0, ray=True)}
    pools = {name: Pool(each, args) for name, each in workers.items()}
    rounds = []
    for _ in range(args.rounds + 1):
        rounds.append({name: pool.seconds(args.steps) for name, pool in pools.items()})
    found = {name: [1e3 * times[name] for times in rounds[1:]] for name in pools}
    ratios = [times["processes"] / times["ray_actors"] for times in rounds[1:]]
    report.put(
        "step",
        {
            "num_envs": args.num_envs,
            "sleep_ms": 1e3 * args.sleep,
            "ms_per_step": {name: round(statistics.median(times), 2) for name, times in found.items()},
            "speed_of_actors": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "start_s": {name: round(pool.start_s, 1) for name, pool in pools.items()},
            "load": [round(x, 1) for x in os.getloadavg()],
        },
    )
    for pool in pools.values():
        pool.env.host.close()
    print(f"written to {report.path}")


class Pool:
    """Environments with one kind of workers, and a compiled step."""

    def __init__(self, workers: Workers, args: argparse.Namespace) -> None:
        start = time.perf_counter()
        self.env = envs.make(Sleeping, args.num_envs, HostEnvConfig((0, 0, 0), workers=workers), sleep=args.sleep)
        self.env.host.open()
        self.start_s = time.perf_counter() - start
        self.state, _ = self.env.reset(jax.random.key(0))
        self.step = jax.jit(lambda state: self.env.step(state, jnp.zeros(args.num_envs, jnp.int32)))

    def seconds(self, num_steps: int) -> float:
        """Return the seconds of a step."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self.state, timestep = self.step(self.state)
        jax.block_until_ready(timestep)
        return (time.perf_counter() - start) / num_steps


if __name__ == "__main__":
    main()
