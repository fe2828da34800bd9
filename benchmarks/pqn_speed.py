"""Measure PQN on Breakout-MinAtar: jaxrl_fast and benchmarks/plain_pqn.py in turn, with the same hyperparameters.

    python benchmarks/pqn_speed.py                                   # CPU: 128 environments
    python benchmarks/pqn_speed.py --num-envs 64,1024,4096,16384     # a GPU

Both run in one process. side_by_side.py explains the method.
"""

import argparse

import jax
import side_by_side

from jaxrl_fast.utils import devices
from jaxrl_fast.utils.parsing import parse_int

devices.configure_cpu_devices()  # before gymnax is imported, which starts JAX
import plain_pqn  # noqa: E402

PRESET = dict(
    rollout_length=plain_pqn.LENGTH,
    num_minibatches=plain_pqn.MINIBATCHES,
    num_epochs=plain_pqn.EPOCHS,
    learning_rate=plain_pqn.LEARNING_RATE,
    explore={"steps": plain_pqn.EPSILON_STEPS},
    network={"kernel_init": "lecun_normal"},  # flax's default, as in the plain program
)


def main():
    """Measure all cases, print a line for each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", default="128")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="intended length of one plain training")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("pqn_speed", args.output)
    for num_envs in map(parse_int, args.num_envs.split(",")):
        report.add("cases", compare(num_envs, args.rounds, args.seconds))
    print(f"written to {report.path}")


def compare(num_envs: int, rounds: int, seconds: float) -> dict:
    """Time the plain program and jaxrl_fast in turn, for equal numbers of updates."""
    rate_guess = 3_000 if jax.default_backend() == "cpu" else 300_000
    num_updates = max(5, round(rate_guess * seconds / (num_envs * plain_pqn.LENGTH)))
    num_steps = num_updates * plain_pqn.LENGTH * num_envs
    plain = jax.jit(plain_pqn.make(num_envs, num_updates)).lower(jax.random.key(0)).compile()
    ours, num_shards = side_by_side.build(
        num_updates, algo="pqn", env="Breakout-MinAtar", num_envs=num_envs, total_steps=num_steps, **PRESET
    )
    measured = side_by_side.compare(plain, ours, num_updates, num_steps, rounds)
    return {"num_envs": num_envs, "shards": num_shards} | measured


if __name__ == "__main__":
    main()
