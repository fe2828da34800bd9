"""Measure how much of the emulator's speed remains in Atari's Pong when a network acts, and when it also learns.

    python benchmarks/atari_speed.py                                              # CPU
    python benchmarks/atari_speed.py --num-envs 8,32,128,512,1024 --preset ppo_pong_fast    # a GPU

For each number of environments, several rounds time these contenders in turn. N is a value of `--async-pools`:

    raw_sync       envpool alone with random actions, through its Python API
    raw_async      the same, where envpool returns as soon as half of the environments have stepped
    raw            the faster of these two in each round
    network        the policy alone, on frames that exist already
    acting_N       emulator and policy in the scan of jaxrl_fast
    training_N     the same with the preset's updates
    overlapped_N   training with `--overlap`, where the policy is one update old; for each N but 0

Speeds are environment steps (of four frames) per second, without compilation. `acting_N_of_raw` and `training_N_of_raw`
are shares of raw. Where the network shares the emulator's cores, the fair bound is 1 / (1 / raw + 1 / network).
`acting_N_of_bound` is a share of that bound. Ratios are taken within a round; the JSON holds the medians over rounds.

Each contender has separate pools and a separate program, which are made at its first turn. The JSON is written after
each timing, so a killed case keeps its numbers; `rounds` counts the complete rounds. With 1024 or more environments,
making all of them is expensive. `--async-pools 0 --contenders raw,acting,training,network` has the fewest pools.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import envpool
import jax
import jax.numpy as jnp
import numpy as np
import side_by_side

from jaxrl_fast import agents, envs
from jaxrl_fast.config import load
from jaxrl_fast.envs.envpool import pool as adapter
from jaxrl_fast.envs.envpool import tasks
from jaxrl_fast.envs.host import pool as host_pool
from jaxrl_fast.parallel import collectives, program
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.training import build
from jaxrl_fast.types import Agent, Env, TimeStep
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.parsing import parse_int

CONTENDERS = ("raw", "acting", "training", "overlapped", "network")


def main():
    """Measure all cases, print a line for each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", default="8,32")
    parser.add_argument("--preset", default="ppo_pong")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="approximate length of one timing")
    parser.add_argument("--threads", type=int, default=0, help="threads of the emulator; 0: one per core")
    parser.add_argument("--async-pools", default="0,1,2", help="pools that step while the policy computes; 0: none")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="contenders to time")
    parser.add_argument("--host.bridge", dest="bridge", default="auto", help="calls of emulators: auto, ffi, callback")
    parser.add_argument("--output", default="")
    parser.add_argument("--append", action="store_true", help="keep the cases that the output has already")
    args = parser.parse_args()
    unknown = set(args.contenders.split(",")) - {*CONTENDERS}
    if unknown:
        parser.error(f"unknown contender {unknown.pop()!r}; choose from {', '.join(CONTENDERS)}")
    devices.configure_cpu_devices()
    report = side_by_side.Report("atari_speed", args.output, args.append)
    for num_envs in map(parse_int, args.num_envs.split(",")):
        report.add_incrementally("cases", measure(num_envs, args))
    print(f"written to {report.path}")


def measure(num_envs: int, args: argparse.Namespace) -> Iterator[dict]:
    """Measure one number of environments. Yield the case after each timing, with all numbers known by then."""
    _, _, agent, placement = prepare(args, num_envs, 0)
    steps = agent.rollout_length * num_envs
    makers, running = contenders(num_envs, args), {}
    rounds: list[dict[str, float]] = []
    for _ in range(args.rounds):
        rounds.append({})
        for name, make in makers.items():
            if name not in running:
                run = make()
                running[name] = run, max(1, round(args.seconds / seconds(run, 1)))
            run, repeats = running[name]
            rounds[-1][name] = steps * repeats / seconds(run, repeats)
            print(f"{num_envs} environments, {name}: {rounds[-1][name]:.0f} steps/s", flush=True)
            yield {
                "preset": args.preset,
                "num_envs": num_envs,
                "num_shards": placement.num_shards,
                "threads": args.threads,
                "pool_path": args.bridge,
                "rounds": sum(len(speeds) == len(makers) for speeds in rounds),
                **medians(rounds),
            }


def contenders(num_envs: int, args: argparse.Namespace) -> dict[str, Callable[[], Callable[[], None]]]:
    """Return a function by name that makes each contender. Each has separate pools, which stay open."""
    ways = [way for way in map(int, args.async_pools.split(",")) if num_envs % max(way, 1) == 0]
    whole, _, agent, _ = prepare(args, num_envs, 0)
    made = lambda change, way, overlap=False: make_update(*change(*prepare(args, num_envs, way, overlap)[1:]))
    makers = {"raw_sync": partial(raw, whole, agent.rollout_length)}
    if num_envs > 1:
        makers["raw_async"] = partial(raw_async, whole, agent.rollout_length)
    for way in ways:
        makers[f"acting_{way}"] = partial(made, without_learning, way)
        makers[f"training_{way}"] = partial(made, unchanged, way)
        if way:
            makers[f"overlapped_{way}"] = partial(made, unchanged, way, overlap=True)
    makers["network"] = partial(made, without_emulator, 0)
    chosen = args.contenders.split(",")
    return {name: make for name, make in makers.items() if name.split("_")[0] in chosen}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians over the rounds of all speeds and shares that are known."""
    rounds = [with_raw(speeds) for speeds in rounds]
    median = lambda values, name: statistics.median(of[name] for of in values if name in of)
    parts = [shares(speeds) for speeds in rounds]
    found = {f"{name}_steps_per_s": round(median(rounds, name)) for name in rounds[0]}
    return found | {name: round(median(parts, name), 3) for name in parts[0]}


def with_raw(speeds: dict[str, float]) -> dict[str, float]:
    """Return a round's speeds, and `raw`: the higher of the speeds of envpool alone."""
    raws = [speed for name, speed in speeds.items() if name.startswith("raw_")]
    return speeds | ({"raw": max(raws)} if raws else {})


def shares(speeds: dict[str, float]) -> dict[str, float]:
    """Return the shares of a round for which both speeds are known."""
    if {"raw", "network"} <= speeds.keys():
        speeds = speeds | {"bound": 1 / (1 / speeds["raw"] + 1 / speeds["network"])}
    pairs = [(name, "raw") for name in speeds if name.startswith(("acting_", "training_", "overlapped_"))]
    pairs += [(name, "bound") for name in speeds if name.startswith("acting_")]
    pairs += [(name, "training_0") for name in speeds if name.startswith("overlapped_")]
    pairs += [(name, name.replace("overlapped", "training")) for name in speeds if name.startswith("overlapped_")]
    return {f"{a}_of_{b}": speeds[a] / speeds[b] for a, b in pairs if {a, b} <= speeds.keys()}


def prepare(args: argparse.Namespace, num_envs: int, in_flight: int, overlap: bool = False) -> tuple:
    """Return all environments in one pool, then what `train` uses: a shard's environments, the agent, the placement."""
    threads = {"num_threads": args.threads} if args.threads else {}
    settings = load.from_keywords(
        args.preset,
        num_envs=num_envs,
        env_options=threads,
        host={"async_pools": in_flight, "overlap": overlap, "bridge": args.bridge},
    )
    settings, *of_shard = build.build(settings, agents.load(settings.algo), 1000)
    options = settings.options
    config = build.host_env_config(options, build.TRAINING)
    return envs.make(options.env, options.num_envs, config, **options.env_options), *of_shard


def seconds(run: Callable[[], None], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return time.perf_counter() - began


def task_of(env: Env) -> tasks.Task:
    """Return the task of an environment that has a single pool."""
    return env.step.args[0].pools[0].open_pool.args[0]


def raw(env, length: int) -> Callable[[], None]:
    """Return a function that steps envpool with random actions, by its Python API, in a separate pool."""
    task, num_envs = task_of(env), env.spec.num_envs
    pool = adapter.EnvpoolPool(task, 0, host_pool.seeds_of((1, 0, 0), num_envs)).envs
    pool.reset()
    chance, num_actions = np.random.default_rng(0), env.spec.action.num

    def run():
        for action in chance.integers(num_actions, size=(length, env.spec.num_envs), dtype=np.int32):
            pool.step(action)

    return run


def raw_async(env, length: int) -> Callable[[], None]:
    """Return the same for envpool's asynchronous mode: the half that has stepped first gets its next actions."""
    task, num_envs = task_of(env), env.spec.num_envs
    batch_size = num_envs // 2
    seeds = host_pool.seeds_of((1, 0, 0), num_envs)
    pool = envpool.make_gymnasium(task.name, **task.config, num_envs=num_envs, batch_size=batch_size, seed=seeds)
    pool.async_reset()
    chance, num_actions = np.random.default_rng(0), env.spec.action.num

    def run():
        for action in chance.integers(num_actions, size=(length * num_envs // batch_size, batch_size), dtype=np.int32):
            info = pool.recv()[4]
            pool.send(action, info["env_id"])

    return run


def unchanged(env: Env, agent: Agent, placement: Placement) -> tuple[Env, Agent, Placement]:
    return env, agent, placement


def without_learning(env: Env, agent: Agent, placement: Placement) -> tuple[Env, Agent, Placement]:
    """Replace the agent's update by one that learns nothing. The scan keeps no frames."""
    update = lambda state, rollout, key: (
        state,
        {"reward": collectives.all_reduce_sum(rollout.steps.reward.sum(), env.parallelism.axis_name)},
    )
    return env, agent._replace(update=update), placement


def without_emulator(env: Env, agent: Agent, placement: Placement) -> tuple[Env, Agent, Placement]:
    """Replace the emulator by frames that differ in each step, so that only the policy computes."""
    num_envs, frame = env.spec.num_envs, env.spec.obs
    none, never = jnp.zeros(num_envs), jnp.zeros(num_envs, bool)
    timestep = lambda frames: TimeStep(frames, none, none + 1, never)

    def reset(key):
        frames = jnp.zeros((num_envs, *frame.shape), frame.dtype)
        return frames, timestep(frames)

    def step(frames, action):
        frames = frames + action.reshape(-1, 1, 1, 1).astype(frames.dtype)
        return frames, timestep(frames)

    return without_learning(Env(reset, step, env.spec, parallelism=env.parallelism), agent, placement)


def make_update(env: Env, agent: Agent, placement: Placement) -> Callable[[], None]:
    """Return a function that runs one update of the program that `train` runs."""
    built = program.build(env, agent, 1000, placement)
    state = built.init(np.int32(0))

    def run():
        nonlocal state
        state, metrics = built.chunk(state, np.int32(1))
        jax.block_until_ready(metrics)

    return run


if __name__ == "__main__":
    main()
