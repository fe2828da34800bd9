"""Measure DQN on CartPole-v1: jaxrl_fast and benchmarks/plain_dqn.py in turn, in one process, same hyperparameters.

    python benchmarks/dqn_speed.py                              # CPU: 1, 10, 64, 1024 and 4096 environments
    python benchmarks/dqn_speed.py --num-envs 64,1024,16384     # a GPU
    python benchmarks/dqn_speed.py --preset rainbow_minatar_breakout --num-envs 64,256,1024,4096,16384   # no comparison

side_by_side.py explains the method. With `--preset` there is no plain program to compare with. jaxrl_fast then trains
with a preset of DQN and its replay ratio at each number of environments. It is timed from its first gradient step on.
The replay buffer has the preset's size, or a larger one if it would hold fewer than 8 rollouts.
"""

import argparse
import statistics
from functools import partial

import jax
import numpy as np
import side_by_side

from jaxrl_fast.config import load
from jaxrl_fast.options import DQN
from jaxrl_fast.options.declare import configure
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.parsing import parse_int

devices.configure_cpu_devices()  # before gymnax is imported, which starts JAX
import plain_dqn  # noqa: E402

PRESET = dict(
    batch_size=plain_dqn.BATCH,
    replay_ratio=1 / plain_dqn.TRAIN_EVERY,
    learning_starts=plain_dqn.START,
    explore={"steps": plain_dqn.EPSILON_STEPS},
    optimizer={"max_grad_norm": 0.0},
    network={"hidden_sizes": (120, 84), "kernel_init": "lecun_normal"},  # flax's kernels, as in the plain program
)
MIN_ROLLOUTS, TRIAL = 8, 2_048  # rollouts in the replay buffer; environment steps of the first, uncounted timing


def main():
    """Measure all cases, print a line for each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", default="1,10,64,1024,4096")
    parser.add_argument("--preset", default="", help="time only jaxrl_fast, with this preset of DQN")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="intended length of one timed training")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    if args.preset and load.from_keywords(args.preset).algo != "dqn":
        parser.error(f"{args.preset} is not a preset of DQN")
    report = side_by_side.Report(f"{args.preset or 'dqn'}_speed", args.output)
    measure = partial(measure_preset, args.preset) if args.preset else compare
    for num_envs in map(parse_int, args.num_envs.split(",")):
        report.add("cases", measure(num_envs, args.rounds, args.seconds))
    print(f"written to {report.path}")


def compare(num_envs: int, rounds: int, seconds: float) -> dict:
    """Time the plain program and jaxrl_fast in turn, for equal numbers of environment steps.

    Both replay buffers hold at least 4 rows of all environments. The plain program updates its target at most once per
    step of all environments, so jaxrl_fast gets a target period of at least that length.
    """
    capacity = max(plain_dqn.CAPACITY, 4 * num_envs)
    rate_guess = 30_000 if jax.default_backend() == "cpu" else 300_000
    interval = max(plain_dqn.TARGET_EVERY, num_envs)
    preset = PRESET | {"replay": {"size": capacity}, "target": {"interval": interval}}
    length = configure(DQN, **preset).length(num_envs)
    num_updates = max(30, round((plain_dqn.START + rate_guess * seconds) / (num_envs * length)))
    num_steps = num_updates * length * num_envs
    train = plain_dqn.make(num_envs, num_updates * length, capacity)
    plain = jax.jit(train).lower(jax.random.key(0)).compile()
    ours, num_shards = side_by_side.build(
        num_updates, algo="dqn", env="CartPole-v1", num_envs=num_envs, total_steps=num_steps, **preset
    )
    measured = side_by_side.compare(plain, ours, num_updates, num_steps, rounds)
    return {"num_envs": num_envs, "rollout_length": length, "shards": num_shards} | measured


def measure_preset(preset: str, num_envs: int, rounds: int, seconds: float) -> dict:
    """Time jaxrl_fast with a preset, after learning has started.

    A short uncounted timing determines how many updates take the given seconds.
    """
    settings = load.from_keywords(preset, num_envs=num_envs)
    length = settings.agent.length(num_envs)
    per_update, capacity = length * num_envs, max(settings.agent.replay.size, MIN_ROLLOUTS * length * num_envs)
    before = -(-settings.agent.first_learning(num_envs) // per_update)
    num_updates = max(settings.options.total_steps // per_update, before + 1)
    ours, num_shards = side_by_side.build(num_updates, preset=preset, num_envs=num_envs, replay={"size": capacity})
    probe = max(1, TRIAL // per_update)
    num_updates = max(1, round(probe * seconds / side_by_side.timed(ours, np.int32(0), probe, before)[0]))
    speeds = []
    for seed in range(rounds):
        duration, metrics = side_by_side.timed(ours, np.int32(seed), num_updates, before)
        speeds.append(float(metrics["valid_steps"].sum()) / duration)
    return {
        "preset": preset,
        "num_envs": num_envs,
        "rollout_length": length,
        "shards": num_shards,
        "capacity": capacity,
        "replay_ratio": settings.agent.replay_ratio,
        "env_steps": num_updates * per_update,
        "steps_per_s": round(statistics.median(speeds)),
        "least": round(min(speeds)),
        "most": round(max(speeds)),
        "compile_s": round(ours.compile_time_s, 2),
    }


if __name__ == "__main__":
    main()
