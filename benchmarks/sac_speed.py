"""SAC: ours beside benchmarks/plain_sac.py, interleaved in one process, same hyperparameters; and beside itself.

    python benchmarks/sac_speed.py --sbx PYTHON              # CPU: all cases, about 10 minutes on 2 cores
    python benchmarks/sac_speed.py --gradient-steps 20000    # a GPU

    plain        Pendulum-v1 with 1, 16, 256 and 4096 environments, each beside the plain program
    one          Pendulum-v1 and envpool's HalfCheetah-v4 with one environment, beside SBX, which PYTHON has
    population   8 seeds in one program, and 8 runs of one seed in turn, on Pendulum-v1 with 16 environments

Networks have 2 layers of 256, batches have 256 transitions, and each environment step has one gradient step.
side_by_side.py explains the method. The steps of `plain` include the random ones at the start, those of `one` do not.
`share_of_bound` is the share of the speed that the matrix products of a gradient step would allow at the highest rate
of any product that is timed in this process (`product_rates`).
"""

import argparse
import functools
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import side_by_side

from jaxrl_fast.options import SAC
from jaxrl_fast.options.declare import configure
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.parsing import parse_int

devices.configure_cpu_devices()  # before gymnax is imported, which starts JAX
import plain_sac  # noqa: E402

PRESET = dict(
    batch_size=plain_sac.BATCH,
    learning_starts=plain_sac.START,
    learning_rate=plain_sac.LEARNING_RATE,
    critic_learning_rate=plain_sac.LEARNING_RATE,
    network={"hidden_sizes": (plain_sac.WIDTH, plain_sac.WIDTH)},
)
SBX = """
import sys, time, json
from sbx import SAC
env, steps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = SAC("MlpPolicy", env, learning_rate=1e-3, buffer_size=20_000, learning_starts=1_000, seed=seed)
model.learn(1_500)
start = time.perf_counter()
model.learn(steps, reset_num_timesteps=False)
print(json.dumps(steps / (time.perf_counter() - start)))
"""
PARTS = ("plain", "one", "population")
ONE = {"Pendulum-v1": (3, 1), "envpool/HalfCheetah-v4": (17, 6)}  # numbers in an observation and in an action


def main():
    """Measure all cases, print a line for each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--num-envs", default="1,16,256,4096", help="of the part plain")
    parser.add_argument("--gradient-steps", type=parse_int, default=2_000, help="of each training, at least")
    parser.add_argument("--num-seeds", type=int, default=8, help="of the part population")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sbx", default="", help="a Python with sbx-rl and gymnasium[mujoco]")
    parser.add_argument("--append", action="store_true", help="to the JSON of earlier commands")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("sac_speed", args.output, args.append)
    only = args.only.split(",")
    for num_envs in map(parse_int, args.num_envs.split(",")) if "plain" in only else ():
        report.add("cases", compare(num_envs, args.gradient_steps, args.rounds))
    if "one" in only:
        report.put("product_rates", product_rates())
        for env, sizes_of_env in ONE.items():
            report.add("one", one(env, sizes_of_env, args.gradient_steps, args.rounds, args.sbx))
    if "population" in only:
        report.put("population", population(args.num_seeds, args.gradient_steps // 4, args.rounds))
    print(f"written to {report.path}")


def sizes(num_envs: int, gradient_steps: int) -> tuple[dict, int, int]:
    """The hyperparameters, the length of a rollout, and the updates in which so many gradient steps are made."""
    start = max(plain_sac.START, 2 * num_envs)
    preset = PRESET | {"learning_starts": start, "replay": {"size": max(plain_sac.CAPACITY, 8 * num_envs)}}
    length = configure(SAC, **preset).length(num_envs)
    return preset, length, -(-(start + gradient_steps) // (num_envs * length))


def compare(num_envs: int, gradient_steps: int, rounds: int) -> dict:
    """Time the plain program and jaxrl_fast in turn, for equal numbers of environment steps."""
    preset, length, num_updates = sizes(num_envs, gradient_steps)
    num_steps = num_updates * length * num_envs
    make = plain_sac.make(num_envs, num_updates * length, preset["learning_starts"], preset["replay"]["size"])
    plain = jax.jit(make).lower(jax.random.key(0)).compile()
    ours, num_devices = side_by_side.build(
        num_updates, algo="sac", env="Pendulum-v1", num_envs=num_envs, total_steps=num_steps, **preset
    )
    measured = side_by_side.compare(plain, ours, num_updates, num_steps, rounds)
    return {"num_envs": num_envs, "rollout_length": length, "devices": num_devices} | measured


def one(env: str, sizes_of_env: tuple[int, int], gradient_steps: int, rounds: int, sbx: str) -> dict:
    """Time the gradient steps of one environment, and those of SBX on gymnasium's environment, in turn.

    The random steps at the start are not timed. Each round of SBX is a process, which compiles before its clock starts.
    """
    preset, length, _ = sizes(1, gradient_steps)
    num_updates, before = -(-gradient_steps // length), -(-preset["learning_starts"] // length) + 1
    options = dict(algo="sac", env=env, num_envs=1, total_steps=(num_updates + before) * length) | preset
    ours, num_devices = side_by_side.build(num_updates, **options)
    speeds: dict[str, list[float]] = {"ours": [], "sbx": []}
    for seed in range(-1, rounds):  # round -1 warms up
        seconds, metrics = side_by_side.timed(ours, np.int32(max(seed, 0)), num_updates, before)
        if seed < 0:
            continue
        speeds["ours"].append(float(metrics["gradient_steps"].sum()) / seconds)
        if sbx:
            command = [sbx, "-c", SBX, env.rpartition("/")[2], str(gradient_steps), str(seed)]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            speeds["sbx"].append(json.loads(printed.splitlines()[-1]))
    bound = max(product_rates().values()) / products(*sizes_of_env)
    found = {"env": env, "gradient_steps": num_updates * length, "devices": num_devices}
    found |= side_by_side.compared(speeds, "ours", "sbx") if sbx else middle(speeds["ours"])
    median = statistics.median(speeds["ours"])
    return found | {"bound_steps_per_s": round(bound), "share_of_bound": round(median / bound, 3)}


def population(num_seeds: int, gradient_steps: int, rounds: int) -> dict:
    """Seeds in one program, and as many runs of one seed: seconds of training, in turn."""
    preset, length, num_updates = sizes(16, gradient_steps)
    options = dict(algo="sac", env="Pendulum-v1", num_envs=16, total_steps=num_updates * length * 16) | preset
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


def products(obs_size: int, action_size: int) -> float:
    """Return the floating-point operations of the matrix products in a gradient step.

    The target: the actor once, both critics once. The critics: forward, and backward to kernels and to the inputs of
    layers. The actor: the same for itself; both critics forward, and backward to all inputs.
    """
    width, rows = plain_sac.WIDTH, plain_sac.BATCH

    def layers(inputs: int, outputs: int) -> tuple[int, int]:
        """Return the multiplications of a row in all layers, and in those after the first."""
        after_first = width * width + width * outputs
        return inputs * width + after_first, after_first

    actor, actor_back = layers(obs_size, 2 * action_size)
    critic, critic_back = layers(obs_size + action_size, 1)
    target = actor + 2 * critic
    of_critics = 2 * (2 * critic + critic_back)
    of_actor = 2 * actor + actor_back + 2 * 2 * critic
    return 2.0 * rows * (target + of_critics + of_actor)


@functools.cache
def product_rates() -> dict[str, float]:
    """Return operations per second of matrix products, the best of several tries for each form, on all cores."""
    return rates_of(plain_sac.BATCH, plain_sac.WIDTH) | rates_of(2048, 2048)


def rates_of(rows: int, width: int) -> dict[str, float]:
    """Return the rates of products of [rows, width] and [width, width] by XLA and by BLAS."""
    x, w = np.ones((rows, width), np.float32), np.full((width, width), 1 / width, np.float32)
    times, num_cores = max(50 * 256**3 // (rows * width * width), 1), devices.num_cores()
    chain = jax.jit(lambda x, w: jax.lax.fori_loop(0, times, lambda _, y: jnp.einsum("...rk,...kn->...rn", y, w), x))
    pair = np.stack([x, x]), np.stack([w, w])
    threads = ThreadPoolExecutor(num_cores)
    forms: dict[str, tuple[Callable, int]] = {
        "xla": (lambda: jax.block_until_ready(chain(x, w)), 1),
        "xla_two_at_once": (lambda: jax.block_until_ready(chain(*pair)), 2),
        "blas": (lambda: list(threads.map(lambda _: [x @ w for _ in range(times)], range(num_cores))), num_cores),
    }
    found = {}
    for name, (run, number) in forms.items():
        run()
        seconds = min(seconds_of(run) for _ in range(7))
        found[f"{name}_{rows}x{width}"] = 2.0 * number * times * rows * width * width / seconds
    return found


def seconds_of(run: Callable) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
