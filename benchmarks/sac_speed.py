"""SAC on Pendulum-v1: ours beside benchmarks/plain_sac.py, interleaved in one process, same hyperparameters.

    python benchmarks/sac_speed.py                                  # CPU: 1, 16 and 256 environments
    python benchmarks/sac_speed.py --num-envs 16,256,4096           # a GPU
    python benchmarks/sac_speed.py --num-envs 1 --sbx PYTHON        # SBX too, by the Python that has it

Networks of 2 layers of 256, batches of 256, one gradient step for each environment step. How it is measured:
side_by_side.py. Also the share of the time that the matrix products alone would take, timed in the same process.
"""

import argparse
import json
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import side_by_side

from jaxrl_fast.agents.configs import common, sac
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.parsing import parse_int

devices.configure_cpu_devices()  # before gymnax is imported, which starts JAX
import plain_sac  # noqa: E402

PRESET = dict(
    buffer_size=plain_sac.CAPACITY,
    batch_size=plain_sac.BATCH,
    learning_starts=plain_sac.START,
    learning_rate=plain_sac.LEARNING_RATE,
    critic_learning_rate=plain_sac.LEARNING_RATE,
    hidden_sizes=(plain_sac.WIDTH, plain_sac.WIDTH),
)
# Passes of a batch through a layer in a gradient step. The target: the actor once, both critics once. The critics:
# forward, and backward to kernels and inputs. The actor: the same for itself; both critics forward and to their inputs.
PASSES = 1 + 2 + 2 * 3 + 3 + 2 * 2
SBX = """
import sys, time, json
from sbx import SAC
steps, out = int(sys.argv[1]), []
for seed in range(int(sys.argv[2])):
    model = SAC("MlpPolicy", "Pendulum-v1", learning_rate=1e-3, buffer_size=20_000, learning_starts=1_000, seed=seed)
    model.learn(1_500)
    start = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    out.append(steps / (time.perf_counter() - start))
print(json.dumps(out))
"""


def main():
    """Measures, prints a line for each case as it goes, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", default="1,16,256")
    parser.add_argument("--total-steps", type=parse_int, default=6_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sbx", default="", help="a Python with sbx-rl and gymnasium")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("sac_speed", args.output)
    for num_envs in map(parse_int, args.num_envs.split(",")):
        report.add("cases", compare(num_envs, args.total_steps, args.rounds))
    if args.sbx:
        report.put("sbx", sbx(args.sbx, args.total_steps, args.rounds))
    print(f"written to {report.path}")


def compare(num_envs: int, total_steps: int, rounds: int) -> dict:
    """Plain and ours in turn, at equal numbers of environment steps."""
    preset = PRESET | {"learning_starts": max(plain_sac.START, 2 * num_envs)}
    length = common.rollout_length(sac.SAC(**preset), num_envs)
    num_updates = max(2, total_steps // (num_envs * length))
    num_steps = num_updates * length * num_envs
    plain = jax.jit(plain_sac.make(num_envs, num_updates * length)).lower(jax.random.key(0)).compile()
    ours, num_devices = side_by_side.build(
        num_updates, algo="sac", env="Pendulum-v1", num_envs=num_envs, agent=preset, total_steps=num_steps
    )
    measured = side_by_side.compare(plain, ours, num_updates, num_steps, rounds)
    bound = 1 / products(rounds)
    learning = 1 - preset["learning_starts"] / num_steps
    return (
        {"num_envs": num_envs, "rollout_length": length, "devices": num_devices}
        | measured
        | {
            "gradient_steps_bound_per_s": round(bound),
            "share_of_bound": round(measured["ours_steps_per_s"] * learning / bound, 3),
        }
    )


def products(rounds: int) -> float:
    """Seconds of a gradient step's matrix products of the second layers alone, on all cores: the median."""
    width, rows = plain_sac.WIDTH, plain_sac.BATCH
    x, w = jnp.ones((rows, width)), jnp.full((width, width), 1e-3)
    many = 50 * PASSES
    run = jax.jit(lambda x, w: jax.lax.fori_loop(0, many, lambda i, y: y @ w, x))
    jax.block_until_ready(run(x, w))
    found = []
    for _ in range(max(rounds, 3)):
        start = time.perf_counter()
        jax.block_until_ready(run(x, w))
        found.append((time.perf_counter() - start) / 50)
    return statistics.median(found)


def sbx(python: str, total_steps: int, rounds: int) -> dict:
    """Steps per second of SBX at the same hyperparameters, compilation left out."""
    command = [python, "-c", SBX, str(total_steps), str(rounds)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    return {"steps_per_s": round(statistics.median(found)), "least": round(min(found)), "most": round(max(found))}


if __name__ == "__main__":
    main()
