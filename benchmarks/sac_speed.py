"""SAC: ours beside benchmarks/plain_sac.py, interleaved in one process, same hyperparameters; and beside itself.

    python benchmarks/sac_speed.py                                  # CPU: all cases, about 8 minutes on 2 cores
    python benchmarks/sac_speed.py --only sbx --sbx PYTHON --append # SBX on Pendulum, by the Python that has it
    python benchmarks/sac_speed.py --gradient-steps 20000           # a GPU

    plain        Pendulum-v1 with 1, 16, 256 and 4096 environments, each beside the plain program
    cheetah      envpool's HalfCheetah-v4 with one environment, ours alone
    population   8 seeds in one program, and 8 runs of one seed in turn, on Pendulum-v1 with 16 environments
    sbx          SBX on Pendulum-v1 with one environment

Networks have 2 layers of 256, batches have 256 transitions, and each environment step has one gradient step.
side_by_side.py explains the method. `share_of_bound` is the share of the time that the matrix multiplications alone
would take. They are timed in the same process.
"""

import argparse
import json
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
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


PARTS = ("plain", "cheetah", "population", "sbx")


def main():
    """Measure all cases, print a line for each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; sbx needs --sbx")
    parser.add_argument("--num-envs", default="1,16,256,4096", help="of the part plain")
    parser.add_argument("--gradient-steps", type=parse_int, default=2_000, help="of each training, at least")
    parser.add_argument("--num-seeds", type=int, default=8, help="of the part population")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sbx", default="", help="a Python with sbx-rl and gymnasium")
    parser.add_argument("--append", action="store_true", help="to the JSON of earlier commands")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("sac_speed", args.output, args.append)
    only = args.only.split(",")
    for num_envs in map(parse_int, args.num_envs.split(",")) if "plain" in only else ():
        report.add("cases", compare(num_envs, args.gradient_steps, args.rounds))
    if "cheetah" in only:
        report.put("half_cheetah", alone("envpool/HalfCheetah-v4", args.gradient_steps, args.rounds))
    if "population" in only:
        report.put("population", population(args.num_seeds, args.gradient_steps // 4, args.rounds))
    if "sbx" in only and args.sbx:
        report.put("sbx", sbx(args.sbx, args.gradient_steps, args.rounds))
    print(f"written to {report.path}")


def sizes(num_envs: int, gradient_steps: int) -> tuple[dict, int, int]:
    """The hyperparameters, the length of a rollout, and the updates in which so many gradient steps are made."""
    start = max(plain_sac.START, 2 * num_envs)
    preset = PRESET | {"learning_starts": start, "buffer_size": max(plain_sac.CAPACITY, 8 * num_envs)}
    length = common.rollout_length(sac.SAC(**preset), num_envs)
    return preset, length, -(-(start + gradient_steps) // (num_envs * length))


def compare(num_envs: int, gradient_steps: int, rounds: int) -> dict:
    """Time the plain program and jaxrl_fast in turn, for equal numbers of environment steps."""
    preset, length, num_updates = sizes(num_envs, gradient_steps)
    num_steps = num_updates * length * num_envs
    make = plain_sac.make(num_envs, num_updates * length, preset["learning_starts"], preset["buffer_size"])
    plain = jax.jit(make).lower(jax.random.key(0)).compile()
    ours, num_devices = side_by_side.build(
        num_updates, algo="sac", env="Pendulum-v1", num_envs=num_envs, agent=preset, total_steps=num_steps
    )
    measured = side_by_side.compare(plain, ours, num_updates, num_steps, rounds)
    found = {"num_envs": num_envs, "rollout_length": length, "devices": num_devices} | measured
    return found | share(measured["ours_steps_per_s"], preset, num_steps, rounds)


def share(steps_per_s: float, preset: dict, num_steps: int, rounds: int) -> dict:
    """Gradient steps per second that the matrix time_multiplications alone allow, and which part of them is reached."""
    bound, learning = 1 / time_multiplications(rounds), 1 - preset["learning_starts"] / num_steps
    return {
        "gradient_steps_per_s": round(steps_per_s * learning),
        "gradient_steps_bound_per_s": round(bound),
        "share_of_bound": round(steps_per_s * learning / bound, 3),
    }


def alone(env: str, gradient_steps: int, rounds: int) -> dict:
    """Ours with one environment, nothing beside it."""
    preset, length, num_updates = sizes(1, gradient_steps)
    num_steps = num_updates * length
    options = dict(algo="sac", env=env, num_envs=1, agent=preset, total_steps=num_steps)
    ours, num_devices = side_by_side.build(num_updates, **options)
    seconds = [side_by_side.timed(ours, np.int32(seed), num_updates)[0] for seed in range(-1, rounds)][1:]
    speeds = [num_steps / x for x in seconds]
    found = {"env": env, "env_steps": num_steps, "devices": num_devices} | middle(speeds)
    return found | share(statistics.median(speeds), preset, num_steps, rounds)


def population(num_seeds: int, gradient_steps: int, rounds: int) -> dict:
    """Seeds in one program, and as many runs of one seed: seconds of training, in turn."""
    preset, length, num_updates = sizes(16, gradient_steps)
    options = dict(algo="sac", env="Pendulum-v1", num_envs=16, agent=preset, total_steps=num_updates * length * 16)
    many, _ = side_by_side.build(num_updates, num_seeds=num_seeds, **options)
    one, _ = side_by_side.build(num_updates, **options)
    together, in_turn = [], []
    for _ in range(rounds):
        together.append(side_by_side.timed(many, np.arange(num_seeds, dtype=np.int32), num_updates)[0])
        in_turn.append(sum(side_by_side.timed(one, np.int32(seed), num_updates)[0] for seed in range(num_seeds)))
    ratios = [b / a for a, b in zip(together, in_turn, strict=True)]
    return {
        "num_seeds": num_seeds,
        "env_steps_each": options["total_steps"],
        "together_s": round(statistics.median(together), 2),
        "in_turn_s": round(statistics.median(in_turn), 2),
        "compile_together_s": round(many.compile_time_s, 1),
        "compile_one_s": round(one.compile_time_s, 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def middle(speeds: list[float]) -> dict:
    """Steps per second: median, least and most."""
    return {"steps_per_s": round(statistics.median(speeds)), "least": round(min(speeds)), "most": round(max(speeds))}


def time_multiplications(rounds: int) -> float:
    """Return the median seconds of a gradient step's matrix multiplications in the second layers, on all cores."""
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


def sbx(python: str, num_steps: int, rounds: int) -> dict:
    """Return the steps per second of SBX with the same hyperparameters, without compilation."""
    command = [python, "-c", SBX, str(num_steps), str(rounds)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    return middle(found)


if __name__ == "__main__":
    main()
