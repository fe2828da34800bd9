"""From settings to environments and the agent for them: whole, or in shards on several devices. Nothing is compiled."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from jaxrl_fast import async_rollout, envs
from jaxrl_fast.agents import configs
from jaxrl_fast.config.options import Options
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.envs import sharded
from jaxrl_fast.networks import torso
from jaxrl_fast.parallel.placement import Placement, max_grad_workers
from jaxrl_fast.training import memory
from jaxrl_fast.types import SHARED_MEMORY_AXIS, Agent, Env, HostEnvConfig
from jaxrl_fast.utils.errors import where, why

TRAINING, EVALUATION, WATCHING = 0, 1, 2  # what environments are for; each has chance of its own
# Rows of a gradient step that are work enough for a core, by the network that sees them. With less in a shard waiting
# costs more than sharing saves, and with less in a seed it is better computed along with others.
MIN_ROWS = {"mlp": 512, "minatar": 64, "nature": 8, "dqn2013": 8, "impala": 8}
# Hands pay off with as many rows each and with parameters, optimizer and all, that are no more than so many bytes: of
# a larger network one hand has too much to add up and to update, and boards in small batches are convolved too slowly.
MIN_ROWS_PER_WORKER, MAX_LEARNED, MAX_REPEATED = 64, 2**21, 2**28  # the last are bytes in all that each keeps


def whole_env(settings: Settings, algorithm: Any, num_updates: int, done: int = 0) -> tuple[Env, Agent]:
    """All environments together, and the agent for them, for a run that goes on after `done` updates."""
    options = settings.options
    env = envs.make(options.env, int(options.num_envs), host_config(options, TRAINING, done), **options.env_options)
    return env, make_agent(settings.agent, algorithm, env, num_updates)


def make_agent(agent_config: Any, algorithm: Any, env: Env, num_updates: int) -> Agent:
    """The agent of a run with so many updates. Where play overlaps with learning the first one learns nothing."""
    num_learning = max(num_updates - async_rollout.overlaps(env), 1)
    with blamed(algorithm.__name__, env, sentences=True):
        own = (env.parallelism,) if supports(algorithm) else ()
        agent = algorithm.make(agent_config, env.spec, num_learning, *own)
    if not isinstance(agent, Agent):
        raise ValueError(f"algorithm {algorithm.__name__!r}: its make gives {agent!r}, and not an Agent")
    if agent.rollout_length < 1:
        raise ValueError(f"algorithm {algorithm.__name__!r}: rollout_length {agent.rollout_length} is less than a step")
    return agent


def supports(algorithm: Any) -> frozenset[str]:
    """Return what the algorithm's module declares: "shards", "grad_workers", or nothing."""
    return getattr(algorithm, "SUPPORTS", frozenset())


@contextmanager
def blamed(algorithm: str, env: Env, sentences: bool = False) -> Iterator[None]:
    """What goes wrong here in an algorithm of one's own is a ValueError that tells the place.

    `sentences`: a ValueError of its own is one for users, and stays as it is.
    """
    try:
        yield
    except Exception as error:
        if sentences and isinstance(error, ValueError) or not (place := where(error)):
            raise
        raise ValueError(f"algorithm {algorithm!r} cannot learn in {env.spec.id}: {why(error)}{place}") from error


def shard_env(
    settings: Settings, algorithm: Any, num_updates: int, before: Mapping[str, Any] | None = None, done: int = 0
) -> tuple[Env, Agent, Placement]:
    """The environments and the agent of one shard, and how shards and seeds are dealt to devices.

    Left to us, there are as many shards as devices, or fewer where one would get too little work for an update; where
    there are none, cores may be hands. A run that goes on after `done` updates has as many shards as its checkpoint
    says that there were `before`, on whatever devices there are, and as many hands if there are cores for them.
    """
    env, agent = whole_env(settings, algorithm, num_updates, done)
    as_before = before["num_shards"] if before else None
    placement = Placement(settings.options.num_seeds, sequential_seeds=_sequential_seeds(settings, env))
    for count in _counts_to_try(settings, env, as_before):
        try:
            dealt = _by_memory(settings, placement._replace(num_shards=count))
            shard = _shard(settings.options, dealt, done)
            env, agent, placement = shard, make_agent(settings.agent, algorithm, shard, num_updates), dealt
            break
        except ValueError:
            if as_before or settings.options.devices != "auto":
                raise
    if placement.num_shards == 1 and (num_grad_workers := _num_grad_workers(settings, env, agent, before)) > 1:
        env = env._replace(parallelism=env.parallelism._replace(num_grad_workers=num_grad_workers))
        agent = make_agent(settings.agent, algorithm, env, num_updates)
        placement = placement._replace(num_grad_workers=num_grad_workers)
    return env, agent, placement


def evaluation(options: Options, on_device: bool, done: int = 0) -> Env:
    """The environments that are played in for scores."""
    num_envs = min(options.eval_envs, options.eval_episodes)
    if not on_device and options.eval_envs == Options().eval_envs:  # each takes time to make
        num_envs = min(num_envs, int(options.num_envs))
    return envs.make(options.env, num_envs, host_config(options, EVALUATION, done), **options.env_options)


def host_config(options: Options, purpose: int, done: int = 0, shard: int = 0, num_shards: int = 1) -> HostEnvConfig:
    """Return how host environments are run, for a purpose, in a process that starts after `done` updates."""
    bridge = "callback" if options.exact_resume else options.pool_path
    num_pools = options.in_flight if purpose == TRAINING else 0
    overlap = options.overlap and purpose == TRAINING
    return HostEnvConfig((options.seed, purpose, done), options.protocol, bridge, num_pools, overlap, shard, num_shards)


def _counts_to_try(settings: Settings, env: Env, as_before: int | None) -> list[int]:
    """Numbers of shards beyond 1, best first."""
    options, num_devices = settings.options, jax.local_device_count()
    num_envs = int(options.num_envs)
    if as_before:
        return [as_before] if as_before > 1 else []
    if options.devices == "auto":
        tried = env.on_device or jax.default_backend() == "cpu"  # pools on several GPUs: only where asked for
        most = min(num_devices, _cores_worth(settings, env)) if tried else 1
        return [count for count in range(most, 1, -1) if num_envs % count == 0]
    asked = int(options.devices)
    if asked > num_devices:
        raise ValueError(f"--devices {asked}: JAX has {num_devices} here")
    if asked > 1 and not hasattr(settings.agent, "gradient_rows"):
        raise ValueError(f"--devices {asked}: {settings.algo} says no gradient_rows, so it learns on one device")
    if num_envs % asked:
        raise ValueError(f"--devices {asked}: {num_envs} environments do not divide into so many")
    return [asked] if asked > 1 else []


def _by_memory(settings: Settings, placement: Placement) -> Placement:
    """The same, with sums in the memory that cores share, where they can. An algorithm of one's own keeps XLA's."""
    able = placement.sharded and settings.algo in configs.CONFIGS and placement.num_shards <= max_grad_workers()
    return placement._replace(axis_name=SHARED_MEMORY_AXIS) if able else placement


def _shard(options: Options, placement: Placement, done: int) -> Env:
    """The environments of one of several shards: of any of them on the device, of the one that asks on the host."""
    num_shards, axis_name = placement.num_shards, placement.axis_name

    def make(shard: int) -> Env:
        own = host_config(options, TRAINING, done, shard, num_shards)
        return envs.make(options.env, int(options.num_envs) // num_shards, own, **options.env_options)

    first = make(0)
    if not first.on_device:
        return sharded.join([first, *map(make, range(1, num_shards))], axis_name)
    return first._replace(parallelism=first.parallelism._replace(axis_name=axis_name, num_shards=num_shards))


def _cores_worth(settings: Settings, env: Env) -> int:
    """How many cores a gradient step is work enough for. `env` may be a shard."""
    if not hasattr(settings.agent, "gradient_rows"):  # an algorithm of one's own, which may know nothing of shards
        return 0
    rows = settings.agent.gradient_rows(int(settings.options.num_envs))
    return rows // MIN_ROWS[torso.choose_kind(env.spec.obs, getattr(settings.agent, "network", "auto"))]


def _num_grad_workers(settings: Settings, env: Env, agent: Agent, before: Mapping[str, Any] | None) -> int:
    """How many cores a single seed has that is too little work to be dealt into shards.

    Pools on the host cannot be repeated, and an algorithm of one's own knows nothing of hands.
    """
    options = settings.options
    alone = options.num_seeds == 1 and options.devices == "auto" and env.on_device
    if not alone or settings.algo not in configs.CONFIGS:
        return 1
    rows, kind = (
        settings.agent.gradient_rows(int(options.num_envs)),
        torso.choose_kind(env.spec.obs, settings.agent.network),
    )
    worth = rows // MIN_ROWS_PER_WORKER if kind == "mlp" else 1
    most = min(before.get("num_grad_workers", 1) if before else worth, jax.local_device_count())
    if most < 2 or (needs := memory.estimate(env, agent)).parameters > MAX_LEARNED or needs.total > MAX_REPEATED:
        return 1
    return next(number for number in range(min(most, max_grad_workers()), 0, -1) if rows % number == 0)


def _sequential_seeds(settings: Settings, env: Env) -> bool:
    """A CPU is quicker with one seed after another where each keeps its core busy: less data is in use at a time.

    Not with a replay, which would be copied at each turn.
    """
    keeps_little = not hasattr(settings.agent, "capacity")
    return jax.default_backend() == "cpu" and keeps_little and _cores_worth(settings, env) >= 1
