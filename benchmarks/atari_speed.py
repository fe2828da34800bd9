"""Pong: how much of the emulator's speed is left when a network acts, and when it learns too.

    python benchmarks/atari_speed.py                                              # CPU
    python benchmarks/atari_speed.py --num-envs 8,32,128,512,1024 --preset ppo_pong_fast    # a GPU

For each number of environments these are timed in turn, several rounds: `raw_sync`, envpool alone with random actions,
by its Python API; `raw_async`, the same where it answers as soon as half of the environments have stepped, and `raw`,
the better of the two in each round; `network`, the policy alone on frames that are there already; for each way of
waiting (`--async-pools`) `acting`, both inside our scan, and `training`, with the preset's updates; and for each but 0
`overlapped`, training with `--overlap`, the policy one update old. Speeds are environment steps (of four frames) per
second, compilation not counted. `acting_of_raw` and `training_of_raw` are shares of raw; where the network shares the
emulator's cores the fair bound is 1 / (1 / raw + 1 / network), of which `acting_of_bound` is the share. Medians of the
rounds' ratios.

A contender has pools and a program of its own, made when its turn first comes, and the JSON is written after each
timing: a case that is killed leaves what it had (`rounds` says how many are whole). With 1024 environments and more
that is much to make; `--async-pools 0 --contenders raw,acting,training,network` has the fewest pools.
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
from jaxrl_fast.envs import host_pool
from jaxrl_fast.envs.envpool import pool as adapter
from jaxrl_fast.envs.envpool import tasks
from jaxrl_fast.parallel import collectives, program
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.training import build
from jaxrl_fast.types import Agent, Env, TimeStep
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.parsing import parse_int

CONTENDERS = ("raw", "acting", "training", "overlapped", "network")


def main():
    """Measures, prints a line for each case as it goes, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", default="8,32")
    parser.add_argument("--preset", default="ppo_pong")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each thing in each round, about")
    parser.add_argument("--threads", type=int, default=0, help="of the emulator; 0: as many as cores")
    parser.add_argument("--async-pools", default="0,1,2", help="pools that work while the policy thinks; 0: none does")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="those to be timed")
    parser.add_argument("--host-bridge", default="auto", help="how programs reach the emulators; auto, ffi or callback")
    parser.add_argument("--output", default="")
    parser.add_argument("--append", action="store_true", help="to the cases that are in the output already")
    args = parser.parse_args()
    unknown = set(args.contenders.split(",")) - {*CONTENDERS}
    if unknown:
        parser.error(f"there is no contender {unknown.pop()!r}; there are {', '.join(CONTENDERS)}")
    devices.configure_cpu_devices()
    report = side_by_side.Report("atari_speed", args.output, args.append)
    for num_envs in map(parse_int, args.num_envs.split(",")):
        report.grow("cases", measure(num_envs, args))
    print(f"written to {report.path}")


def measure(num_envs: int, args: argparse.Namespace) -> Iterator[dict]:
    """One number of environments, as far as it is known after each timing."""
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
                "pool_path": args.host_bridge,
                "rounds": sum(len(speeds) == len(makers) for speeds in rounds),
                **medians(rounds),
            }


def contenders(num_envs: int, args: argparse.Namespace) -> dict[str, Callable[[], Callable[[], None]]]:
    """What makes each of them: pools are kept, and each has its own."""
    ways = [way for way in map(int, args.async_pools.split(",")) if num_envs % max(way, 1) == 0]
    whole, _, agent, _ = prepare(args, num_envs, 0)
    made = lambda change, way, overlap=False: run_of(*change(*prepare(args, num_envs, way, overlap)[1:]))
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
    """Over the rounds, of each speed and each share as far as they are there."""
    rounds = [with_raw(speeds) for speeds in rounds]
    median = lambda values, name: statistics.median(of[name] for of in values if name in of)
    parts = [shares(speeds) for speeds in rounds]
    found = {f"{name}_steps_per_s": round(median(rounds, name)) for name in rounds[0]}
    return found | {name: round(median(parts, name), 3) for name in parts[0]}


def with_raw(speeds: dict[str, float]) -> dict[str, float]:
    """A round's speeds, and what envpool alone can do at best."""
    raws = [speed for name, speed in speeds.items() if name.startswith("raw_")]
    return speeds | ({"raw": max(raws)} if raws else {})


def shares(speeds: dict[str, float]) -> dict[str, float]:
    """Of a round, those of which both speeds are there."""
    if {"raw", "network"} <= speeds.keys():
        speeds = speeds | {"bound": 1 / (1 / speeds["raw"] + 1 / speeds["network"])}
    pairs = [(name, "raw") for name in speeds if name.startswith(("acting_", "training_", "overlapped_"))]
    pairs += [(name, "bound") for name in speeds if name.startswith("acting_")]
    pairs += [(name, "training_0") for name in speeds if name.startswith("overlapped_")]
    pairs += [(name, name.replace("overlapped", "training")) for name in speeds if name.startswith("overlapped_")]
    return {f"{a}_of_{b}": speeds[a] / speeds[b] for a, b in pairs if {a, b} <= speeds.keys()}


def prepare(args: argparse.Namespace, num_envs: int, in_flight: int, overlap: bool = False) -> tuple:
    """All environments in one pool; and what `train` has: those of a shard, the agent, their placement."""
    threads = {"num_threads": args.threads} if args.threads else {}
    settings = load.from_keywords(
        args.preset,
        num_envs=num_envs,
        env_options=threads,
        async_pools=in_flight,
        overlap=overlap,
        host_bridge=args.host_bridge,
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
    """The same task with all environments in one pool."""
    return env.step.args[0].pools[0].open_pool.args[0]


def raw(env, length: int) -> Callable[[], None]:
    """envpool's Python API with random actions, in a pool of its own with the same options."""
    task, num_envs = task_of(env), env.spec.num_envs
    pool = adapter.EnvpoolPool(task, 0, host_pool.seeds_of((1, 0, 0), num_envs)).envs
    pool.reset()
    chance, num_actions = np.random.default_rng(0), env.spec.action.num

    def run():
        for action in chance.integers(num_actions, size=(length, env.spec.num_envs), dtype=np.int32):
            pool.step(action)

    return run


def raw_async(env, length: int) -> Callable[[], None]:
    """The same in envpool's asynchronous mode: whoever has stepped gets its next action, half of them at a time."""
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
    """The emulator and the policy in one scan; frames are not kept."""
    update = lambda state, rollout, key: (
        state,
        {"reward": collectives.all_reduce_sum(rollout.steps.reward.sum(), env.parallelism.axis_name)},
    )
    return env, agent._replace(update=update), placement


def without_emulator(env: Env, agent: Agent, placement: Placement) -> tuple[Env, Agent, Placement]:
    """The policy alone, each time on other frames."""
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


def run_of(env: Env, agent: Agent, placement: Placement) -> Callable[[], None]:
    """An update of what `train` runs."""
    built = program.build(env, agent, 1000, placement)
    state = built.init(np.int32(0))

    def run():
        nonlocal state
        state, metrics = built.chunk(state, np.int32(1))
        jax.block_until_ready(metrics)

    return run


if __name__ == "__main__":
    main()
