"""DQN on CartPole-v1: ours beside benchmarks/plain_dqn.py, interleaved in one process, same hyperparameters.

    python benchmarks/dqn_speed.py                              # CPU: 1, 10, 64, 1024 and 4096 environments
    python benchmarks/dqn_speed.py --num-envs 64,1024,16384     # a GPU

How it is measured: side_by_side.py.
"""

import argparse

import jax
import side_by_side

from jaxrl_fast import host
from jaxrl_fast.agents import configs
from jaxrl_fast.spelling import parse_int

host.offer_cpu_devices()  # before gymnax is imported, which starts JAX
import plain_dqn  # noqa: E402

PRESET = dict(
    capacity=plain_dqn.CAPACITY,
    batch_size=plain_dqn.BATCH,
    replay_ratio=1 / plain_dqn.TRAIN_EVERY,
    learning_starts=plain_dqn.START,
    epsilon_steps=plain_dqn.EPSILON_STEPS,
    max_grad_norm=0.0,
    hidden=(120, 84),
)


def main():
    """Measures, prints a line for each case as it goes, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", default="1,10,64,1024,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="aimed length of one timed training")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("dqn_speed", args.output)
    for num_envs in map(parse_int, args.num_envs.split(",")):
        report.add("cases", compare(num_envs, args.rounds, args.seconds))
    print(f"written to {report.path}")


def compare(num_envs: int, rounds: int, seconds: float) -> dict:
    """Plain and ours in turn, at equal numbers of environment steps; both keep enough rows for many environments.

    The plain program moves its target once in a step of all environments at most, so ours is asked to do that too.
    """
    capacity = max(plain_dqn.CAPACITY, 4 * num_envs)
    rate_guess = 30_000 if jax.default_backend() == "cpu" else 300_000
    preset = PRESET | {"capacity": capacity, "target_period": max(plain_dqn.TARGET_EVERY, num_envs)}
    length = configs.rollout_length(configs.DQN(**preset), num_envs)
    num_updates = max(30, round((plain_dqn.START + rate_guess * seconds) / (num_envs * length)))
    num_steps = num_updates * length * num_envs
    train = plain_dqn.make(num_envs, num_updates * length, capacity)
    plain = jax.jit(train).lower(jax.random.key(0)).compile()
    ours, num_shards = side_by_side.build(
        num_updates, algo="dqn", env="CartPole-v1", num_envs=num_envs, agent=preset, total_steps=num_steps
    )
    measured = side_by_side.compare(plain, ours, num_updates, num_steps, rounds)
    return {"num_envs": num_envs, "rollout_length": length, "shards": num_shards} | measured


if __name__ == "__main__":
    main()
