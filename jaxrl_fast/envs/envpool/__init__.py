"""The envpool backend: Atari and some twenty other families, on the host."""

import functools
from collections.abc import Mapping
from typing import Any

import envpool

from jaxrl_fast.envs.envpool import tasks
from jaxrl_fast.envs.envpool.pool import (
    Pool,
    choose_path,
    close_pools,
    open_pools,
    receive,
    reseed,
    reset,
    send,
    step,
    to_env_action,
)
from jaxrl_fast.types import AsyncPools, Env, HostEnvConfig, Parallelism

SLOW_BUILD_S = 10  # seconds of making environments that are worth a word


family = tasks.family  # of a task by its name, for lists of them


def registered() -> tuple[str, ...]:
    return tuple(envpool.list_all_envs())


def make(name: str, num_envs: int, options: Mapping[str, Any], conditions: HostEnvConfig | None = None) -> Env:
    """N environments of one of envpool's tasks. The pool itself is made when it is first needed."""
    conditions = conditions or HostEnvConfig()
    task = tasks.describe(name, num_envs, options, conditions)
    path, warnings = choose_path(conditions.path)
    num_pools = max(conditions.in_flight, 1)
    if num_envs % num_pools:
        several = f" on each of {conditions.num_shards} devices" if conditions.num_shards > 1 else ""
        raise ValueError(
            f"--in-flight {num_pools}: {num_envs * conditions.num_shards} environments do not divide into so many pools"
            f"{several}"
        )
    part = task if num_pools == 1 else tasks.describe(name, num_envs // num_pools, options, conditions)
    shard, num_shards = conditions.shard, conditions.num_shards
    numbers = range(shard * num_pools, (shard + 1) * num_pools)
    pools = tuple(Pool(part, conditions.seed, number, num_shards * num_pools) for number in numbers)
    return Env(
        functools.partial(reset, pools),
        functools.partial(step, pools, path),
        task.spec,
        on_device=False,
        parallelism=Parallelism(num_pools=num_pools),
        info=_in_flight(conditions),
        warnings=warnings + _too_much(part, num_shards * num_pools),
        protocol=task.protocol,
        render=pools[0].render if task.protocol else None,
        to_env_action=functools.partial(to_env_action, task),
        reseed=functools.partial(reseed, pools) if path == "callback" else lambda number: None,
        open=functools.partial(open_pools, pools),
        close=functools.partial(close_pools, pools),
        pools=AsyncPools(
            num_pools,
            functools.partial(send, pools, path),
            functools.partial(receive, pools, path),
            conditions.overlap,
        )
        if conditions.in_flight
        else None,
    )


def _in_flight(conditions: HostEnvConfig) -> tuple[str, ...]:
    """What it means for the agent."""
    num_pools = conditions.in_flight
    if not num_pools:
        return ()
    pools = f"{num_pools} pools are" if num_pools > 1 else "the environments are"
    if conditions.overlap:
        policy = "a rollout is played while the agent learns from the one before, by a policy that is one update old"
    else:
        policy = "a rollout's first step is decided by the policy before the last update"
    return (f"{pools} in flight on each device: {policy}",)


def _too_much(task: tasks.Task, num_pools: int) -> tuple[str, ...]:
    """More than is sane, though it can be done: of so many pools for this task."""
    found: tuple[str, ...] = ()
    num_envs, num_cores = task.spec.num_envs, tasks.num_cores()
    num_threads = num_pools * task.config["num_threads"]
    if num_threads > 2 * num_cores:
        which = f"num_threads {num_threads}" if num_pools == 1 else f"{num_threads} threads of {num_pools} pools"
        found += (f"{which} are more than twice the {num_cores} cores here, which slows them all",)
    one = tasks.SECONDS_EACH.get(family(task.name), 0.0)
    seconds = num_pools * num_envs * one / min(num_envs, num_cores)  # a pool is made by as many threads
    if seconds >= SLOW_BUILD_S:
        found += (f"{num_pools * num_envs} environments take some {seconds:.0f} s to make, on {num_cores} cores",)
    return found
