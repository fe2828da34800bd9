"""Measure two learners in one program against two simultaneous runs, and frames of games/Paddles against Atari's Pong.

    python benchmarks/players_speed.py                       # both parts, on an idle machine
    python benchmarks/players_speed.py --only learners --algos ppo,dqn --steps 100k --rounds 3     # under 4 minutes
    python benchmarks/players_speed.py --only frames --num-envs 64,256,1024,4096

learners   One program with `--players independent` in N environments, and two simultaneous processes. Each process
           trains one player in N environments against the scripted paddle. Speeds are environment steps per second,
           with updates, without compilation. The ratio is the one program's speed over the mean of the two runs. A
           ratio of 1 means that the second learner costs the same in one program as in another process.
frames     Environment steps per second with random actions and 4 stacked 84x84 gray frames. Paddles runs on the device;
           envpool's Pong-v5 makes 4 frames of the emulator in each step.

Each round measures both sides in turn, so that a slow moment of the machine affects both. Speeds and ratios are medians
over rounds; ratios also have their minimum and maximum.
"""

import argparse
import statistics
import subprocess
import sys
import time

import jax
import numpy as np
import side_by_side
from side_by_side import timed

from jaxrl_fast import envs
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.parsing import parse_int

CASES = {
    "ppo": dict(algo="ppo", num_envs=64),
    "pqn": dict(algo="pqn", num_envs=64),
    "dqn": dict(algo="dqn", num_envs=64, learning_starts=1024, replay={"size": 65_536}),
}
TOGETHER = dict(env="games/Paddles", players="independent")
ALONE = dict(env="games/Paddles", env_options={"opponent": "scripted"})
FRAMES = {"games/Paddles": dict(observation="image", frame_stack=4), "envpool/Pong-v5": {}}


def main():
    """Measure both parts, print a line for each case, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="learners,frames")
    parser.add_argument("--algos", default=",".join(CASES))
    parser.add_argument("--num-envs", default="64,256,1024,4096", help="numbers of environments of the frames")
    parser.add_argument("--steps", type=parse_int, default=400_000, help="environment steps of each training")
    parser.add_argument("--seconds", type=float, default=4.0, help="minimum length of a timed part of the frames")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="")
    parser.add_argument("--child", default="", help="internal: train one player by this algorithm per line on stdin")
    args = parser.parse_args()
    devices.configure_cpu_devices()
    if args.child:
        return child(args.child, args.steps, args.rounds)
    report = side_by_side.Report("players_speed", args.output)
    for algo in args.algos.split(",") if "learners" in args.only else ():
        report.add("learners", learners(algo, args.steps, args.rounds))
    for num_envs in map(parse_int, args.num_envs.split(",")) if "frames" in args.only else ():
        report.add("frames", frames(num_envs, args.seconds, args.rounds))
    print(f"written to {report.path}")


def learners(algo: str, steps: int, rounds: int) -> dict:
    """Time both ways to train two players, in turn."""
    ours, num_updates, steps = build(algo, TOGETHER, steps)
    words = [sys.executable, __file__, "--child", algo, "--steps", str(steps), "--rounds", str(rounds)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    runs = [subprocess.Popen(words, **pipes) for _ in range(2)]
    speeds = {"together": [], "two_runs": []}
    try:
        for run in runs:
            assert run.stdout.readline() == "ready\n"
        for number in range(-1, rounds):  # round -1 warms up
            together = timed(ours, np.int32(max(number, 0)), num_updates)[0]
            for run in runs:
                run.stdin.write("\n")
                run.stdin.flush()
            each = [float(run.stdout.readline()) for run in runs]
            if number >= 0:
                speeds["together"].append(steps / together)
                speeds["two_runs"].append(statistics.mean(steps / seconds for seconds in each))
    finally:
        for run in runs:
            run.kill()
            run.wait()
    return {"algo": algo, "env_steps": steps} | side_by_side.compared(speeds, "together", "two_runs")


def child(algo: str, steps: int, rounds: int) -> None:
    """Train one player whenever a line arrives, and print the seconds."""
    ours, num_updates, _ = build(algo, ALONE, steps)
    print("ready", flush=True)
    for number in range(rounds + 1):
        sys.stdin.readline()
        print(timed(ours, np.int32(number), num_updates)[0], flush=True)


def build(algo: str, task: dict, steps: int) -> tuple:
    """Return a program, its number of updates, and their environment steps."""
    case = CASES[algo] | task
    length = side_by_side.steps_per_update(**case)
    num_updates = max(steps // length, 1)
    return side_by_side.build(num_updates, **case, total_steps=steps)[0], num_updates, num_updates * length


def frames(num_envs: int, seconds: float, rounds: int) -> dict:
    """Time both environments with random actions, in turn."""
    steps = {name: make_stepper(name, num_envs, options) for name, options in FRAMES.items()}
    speeds = {name: [] for name in FRAMES}
    for number in range(-1, rounds):
        for name, run in steps.items():
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < (seconds if number >= 0 else 0.1):
                count += run()
            if number >= 0:
                speeds[name].append(count / (time.perf_counter() - start))
    return {"num_envs": num_envs} | side_by_side.compared(speeds, *FRAMES)


def make_stepper(name: str, num_envs: int, options: dict, length: int = 32):
    """Return a function that steps all environments `length` times, and returns the number of environment steps."""
    env = envs.make(name, num_envs, **options)

    @jax.jit
    def run(state, key):
        actions = jax.random.randint(key, (length, env.spec.num_envs), 0, env.spec.action.num)

        def step(state, action):
            state, timestep = env.step(state, action)
            return state, timestep.obs[:, 0, 0].sum() + timestep.reward.sum()  # makes the program render frames

        return jax.lax.scan(step, state, actions)

    now = [jax.jit(env.reset)(jax.random.key(0))[0], jax.random.key(1)]

    def advance() -> int:
        now[1], key = jax.random.split(now[1])
        now[0], sums = run(now[0], key)
        jax.block_until_ready(sums)
        return length * num_envs

    return advance


if __name__ == "__main__":
    main()
