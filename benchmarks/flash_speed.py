"""Time SAC's gradient steps with the parts of FlashSAC beside their matrix products alone, in turn in one process.

    python benchmarks/flash_speed.py    # about 2 minutes on 2 cores

The reduced size of control.py: a block of 128, twin critics with 101 atoms, batches of 256, a step of the policy after
every second one. `products` computes each product of a gradient step once, forward and backward, from networks of the
same sizes that have no normalization, activation, optimizer, target or replay.
"""

import argparse
import itertools
import statistics

import control
import jax
import jax.numpy as jnp
import numpy as np
import sac_speed
import side_by_side

from jaxrl_fast import kernels
from jaxrl_fast.networks.torsos.flash import EXPANSION
from jaxrl_fast.utils import devices

BATCH, ATOMS = 256, 101


def main():
    """Measure each environment, print a line, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradient-steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    devices.configure_cpu_devices()
    report = side_by_side.Report("flash_speed", args.output)
    for env, obs_size, action_size in (("gymnax/Pendulum-v1", 3, 1), ("envpool/HalfCheetah-v4", 17, 6)):
        report.add("cases", compare(env, obs_size, action_size, args.gradient_steps, args.rounds))
    print(f"written to {report.path}")


def compare(env: str, obs_size: int, action_size: int, steps: int, rounds: int) -> dict:
    """Time gradient steps and their products in turn."""
    options = control.options_of("half_cheetah", "flash") | {"env": env, "learning_starts": 1_000, "batch_size": BATCH}
    length = side_by_side.steps_per_update(algo="sac", num_envs=1, **options | {"total_steps": 10_000})
    updates, before = -(-steps // length), -(-1_000 // length) + 1
    options["total_steps"] = (updates + before) * length
    ours, num_devices = side_by_side.build(updates, algo="sac", num_envs=1, **options)
    alone = products(obs_size, action_size, options["network"]["hidden_sizes"][0])
    times: dict[str, list[float]] = {"ours": [], "products": []}
    for seed in range(-1, rounds):  # round -1 warms up
        seconds, metrics = side_by_side.timed(ours, np.int32(max(seed, 0)), updates, before)
        found = {"ours": seconds / float(metrics["gradient_steps"].sum()), "products": alone(steps // 2)}
        for name, value in found.items() if seed >= 0 else ():
            times[name].append(1e3 * value)
    ratios = [a / b for a, b in zip(times["ours"], times["products"], strict=True)]
    return {
        "env": env,
        "devices": num_devices,
        "gradient_steps": steps,
        **{f"{name}_ms": round(statistics.median(values), 2) for name, values in times.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def products(obs_size: int, action_size: int, width: int):
    """Return a function from a number of pairs of gradient steps to the seconds that their products take in one step.

    A pair has two steps of the critics and one of the policy.
    """
    random = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(random.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)
    sizes = lambda first, last: [first, width, EXPANSION * width, width, last]
    layers = lambda sizes, *lead: [array(*lead, a, b) for a, b in itertools.pairwise(sizes)]
    actor = layers(sizes(obs_size, 2 * action_size))
    critic, critic_of_target = (layers(sizes(obs_size + action_size, ATOMS), 2) for _ in range(2))
    rows = {"obs": array(2 * BATCH, obs_size), "input": array(2 * BATCH, obs_size + action_size)}

    def forward(layers, x):
        for kernel in layers:
            x = kernels.dense(x, kernel, jnp.zeros(kernel.shape[-1]))
        return x

    twin = jax.vmap(forward, (0, None))
    square = lambda y: (y**2).sum()

    def critics(carry):
        actor, critic, rows = carry
        action, target = forward(actor, rows["obs"][:BATCH]), twin(critic_of_target, rows["input"])
        gradient = jax.grad(lambda layers: square(twin(layers, rows["input"]) - target * action[0, 0]))(critic)
        return actor, jax.tree.map(lambda w, g: w - 1e-9 * g, critic, gradient), rows

    def policy(carry):
        actor, critic, rows = carry

        def loss(layers):
            output = forward(layers, rows["obs"])[:BATCH, :action_size]
            joined = jnp.concatenate([rows["obs"][:BATCH], output], -1)
            return square(twin(critic, joined))

        gradient = jax.grad(loss)(actor)
        return jax.tree.map(lambda w, g: w - 1e-9 * g, actor, gradient), critic, rows

    run = jax.jit(lambda carry, pairs: jax.lax.fori_loop(0, pairs, lambda _, c: policy(critics(critics(c))), carry))

    def seconds(pairs: int) -> float:
        taken = sac_speed.seconds_of(lambda: jax.block_until_ready(run((actor, critic, rows), pairs)))
        return taken / (2 * pairs)

    return seconds


if __name__ == "__main__":
    main()
