"""Provide envpool's environments, which run on the host: Atari and some twenty other families."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxrl_fast.envs.envpool import opengl

opengl.load()

import envpool

from jaxrl_fast.envs.envpool import tasks
from jaxrl_fast.envs.envpool.pool import EnvpoolPool, choose_bridge
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.host.env import make_env
from jaxrl_fast.envs.host.pool import HostPool, num_envs_per_pool
from jaxrl_fast.types import Env
from jaxrl_fast.utils import formatting

SLOW_BUILD_S = 10  # warn if making the environments takes longer

family = tasks.family  # of a task, by its name


def registered() -> tuple[str, ...]:
    """Return the names of all tasks."""
    return tuple(envpool.list_all_envs())


def is_physics(name: str) -> bool:
    """Return whether MuJoCo simulates a task: those of gym, dm_control, Meta-World and others."""
    return name in envpool.list_all_envs() and family(name).startswith("envpool.mujoco.")


def option_names(name: str) -> tuple[str, ...]:
    """Return the names of a task's options."""
    return tasks.option_names(name)


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig) -> Env:
    """Return N environments of one task. Raise ValueError if the task or an option is not supported."""
    task = tasks.describe(name, num_envs_per_pool(num_envs, host_config), options, host_config)
    bridge, warnings = choose_bridge(host_config.bridge)
    warnings += _resource_warnings(task, host_config.shard.num * max(host_config.num_async_pools, 1))
    return make_env(task.pool, functools.partial(_open, task), host_config, bridge, warnings)


def _open(task: tasks.Task, index: int, seeds: list[int]) -> HostPool:
    return EnvpoolPool(task, index, seeds)


def _resource_warnings(task: tasks.Task, num_pools: int) -> tuple[str, ...]:
    """Return warnings about too many threads or a long construction."""
    found: tuple[str, ...] = ()
    num_envs, num_cores = task.pool.env.num_envs, tasks.num_cores()
    num_threads = num_pools * task.config["num_threads"]
    if num_threads > 2 * num_cores:
        which = f"num_threads {num_threads}" if num_pools == 1 else f"{num_threads} threads in {num_pools} pools"
        cores = formatting.counted(num_cores, "available core")
        found += (f"{which}: more than twice the {cores}, which slows down every thread",)
    seconds_each = tasks.BUILD_S_PER_ENV.get(family(task.name), 0.0)
    seconds = num_pools * num_envs * seconds_each / min(num_envs, num_cores)  # a pool is made by as many threads
    if seconds >= SLOW_BUILD_S:
        made, cores = formatting.counted(num_pools * num_envs, "environment"), formatting.counted(num_cores, "core")
        found += (f"making {made} takes about {seconds:.0f} s on {cores}",)
    return found
