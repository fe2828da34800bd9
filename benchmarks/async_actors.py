"""Measure a training whose environments wait, and sometimes long, with actors that are 0, 1 and 2 updates ahead.

    python benchmarks/async_actors.py

16 environments, each in a worker process, sleep 20 ms in each step, and 200 ms in 5% of the steps. DQN trains on them
with a rollout of 2 steps per update. The three runs of a round follow one another; the JSON has the environment steps
a second of each, with the updates and without compilation, and the load of the machine.

`expected` was computed before the first measurement, by `expected_speed`: the same sleeps, in which nothing else takes
time. Without ahead, a step takes as long as the slowest of 16 environments: 121 ms on average, so 132 steps a second.
If no environment waited for another one, there would be 552.
"""

import argparse
import os
import statistics
import tempfile
import time

import gymnasium
import numpy as np
import side_by_side

import jaxrl_fast

SHORT_S, LONG_S, LONG_SHARE = 0.02, 0.2, 0.05
AHEAD = (0, 1, 2)


class Uneven(gymnasium.Env):
    """An environment that only waits."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        """Start an episode."""
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        """Wait."""
        time.sleep(LONG_S if self.np_random.random() < LONG_SHARE else SHORT_S)
        self.t += 1
        return np.full(4, self.t % 2, np.float32), 1.0, False, self.t == 200, {}


def expected_speed(num_envs: int, length: int, ahead: int, num_updates: int = 4000) -> float:
    """Return environment steps a second if only the sleeps take time. Rollout r begins after update r - `ahead`."""
    rng = np.random.default_rng(0)
    sleeps = np.where(rng.random((num_updates, length, num_envs)) < LONG_SHARE, LONG_S, SHORT_S)
    if not ahead:
        return num_envs * length * num_updates / sleeps.max(axis=2).sum()
    finished, updated = np.zeros(num_envs), [0.0]  # when each environment has finished its rollout; each update
    for r, of_rollout in enumerate(sleeps):
        finished = np.maximum(finished, updated[max(r - ahead, 0)]) + of_rollout.sum(axis=0)
        updated.append(max(updated[-1], finished.max()))
    return num_envs * length * num_updates / updated[-1]


def measured_speed(args: argparse.Namespace, ahead: int, seed: int) -> float:
    """Return the environment steps a second of a training."""
    with tempfile.TemporaryDirectory() as folder:
        result = jaxrl_fast.fit(
            algo="dqn",
            env=Uneven,
            seed=seed,
            num_envs=args.num_envs,
            rollout_length=args.length,
            total_steps=args.steps,
            learning_starts=args.num_envs * args.length,
            replay={"size": 10_000},
            workers=args.num_envs,
            ahead=ahead,
            eval_episodes=0,
            save_every=0,
            loggers=(),
            log_level="quiet",
            run_dir=f"{folder}/run",
        )
    return float(result.summary["env_steps"] / result.summary["train_time_s"])


def main() -> None:
    """Compute what is expected, measure in turn, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--length", type=int, default=2, help="steps of a rollout")
    parser.add_argument("--steps", type=int, default=4096, help="environment steps of each training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("async_actors", args.output)
    expected = {ahead: round(expected_speed(args.num_envs, args.length, ahead)) for ahead in AHEAD}
    print(f"expected steps/s {expected}")
    found: dict[int, list[float]] = {ahead: [] for ahead in AHEAD}
    load = []
    for seed in range(args.rounds):
        for ahead in AHEAD:
            found[ahead].append(measured_speed(args, ahead, seed))
            load.append(round(os.getloadavg()[0], 1))
        print({ahead: round(speeds[-1]) for ahead, speeds in found.items()}, load[-1])
    report.put(
        "training",
        {
            "num_envs": args.num_envs,
            "rollout_length": args.length,
            "sleep_ms": 1e3 * SHORT_S,
            "long_sleep_ms": 1e3 * LONG_S,
            "share_of_long": LONG_SHARE,
            "expected_steps_per_s": {str(ahead): x for ahead, x in expected.items()},
            "steps_per_s": {str(ahead): round(statistics.median(x)) for ahead, x in found.items()},
            "range": {str(ahead): [round(min(x)), round(max(x))] for ahead, x in found.items()},
            "load": load,
        },
    )
    print(f"written to {report.path}")


if __name__ == "__main__":
    main()
