"""From settings to environments and the agent for them: whole, or in shards on several devices. Nothing is compiled."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxrl_fast import config, envs, in_flight, networks
from jaxrl_fast.envs import shards
from jaxrl_fast.placement import SHARDS, Placement
from jaxrl_fast.spelling import where, why
from jaxrl_fast.types import Agent, Conditions, Env

TRAINING, EVALUATION, WATCHING = 0, 1, 2  # what environments are for; each has chance of its own
# Rows of a gradient step that are work enough for a core, by the network that sees them. With less in a shard waiting
# costs more than sharing saves, and with less in a seed it is better computed along with others.
LEAST_ROWS = {"mlp": 512, "minatar": 64, "nature": 8, "dqn2013": 8, "impala": 8}


def undivided(settings: config.Settings, algorithm: Any, num_updates: int, done: int = 0) -> tuple[Env, Agent]:
    """All environments together, and the agent for them, for a run that goes on after `done` updates."""
    options = settings.options
    env = envs.make(options.env, int(options.num_envs), conditions(options, TRAINING, done), **options.env_options)
    return env, make_agent(settings.agent, algorithm, env, num_updates)


def make_agent(agent_config: Any, algorithm: Any, env: Env, num_updates: int) -> Agent:
    """The agent of a run with so many updates. Where play overlaps with learning the first one learns nothing."""
    num_learning = max(num_updates - in_flight.overlaps(env), 1)
    with blamed(algorithm.__name__, env, sentences=True):
        agent = algorithm.make(agent_config, env.spec, num_learning)
    if not isinstance(agent, Agent):
        raise ValueError(f"algorithm {algorithm.__name__!r}: its make gives {agent!r}, and not an Agent")
    if agent.rollout_length < 1:
        raise ValueError(f"algorithm {algorithm.__name__!r}: rollout_length {agent.rollout_length} is less than a step")
    return agent


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


def divide(
    settings: config.Settings, algorithm: Any, num_updates: int, as_before: int | None = None, done: int = 0
) -> tuple[Env, Agent, Placement]:
    """The environments and the agent of one shard, and how shards and seeds are dealt to devices.

    Left to us, there are as many shards as devices, or fewer where one would get too little work for an update. A run
    that goes on after `done` updates has as many `as_before`, on whatever devices there are.
    """
    env, agent = undivided(settings, algorithm, num_updates, done)
    num_shards = 1
    for count in _counts_to_try(settings, env, as_before):
        try:
            shard = _shard(settings.options, count, done)
            env, agent, num_shards = shard, make_agent(settings.agent, algorithm, shard, num_updates), count
            break
        except ValueError:
            if as_before or settings.options.devices != "auto":
                raise
    return env, agent, Placement(settings.options.num_seeds, num_shards, _in_turn(settings, env))


def evaluation(options: config.Options, on_device: bool, done: int = 0) -> Env:
    """The environments that are played in for scores."""
    num_envs = min(options.eval_envs, options.eval_episodes)
    if not on_device and options.eval_envs == config.Options().eval_envs:  # each takes time to make
        num_envs = min(num_envs, int(options.num_envs))
    return envs.make(options.env, num_envs, conditions(options, EVALUATION, done), **options.env_options)


def conditions(options: config.Options, purpose: int, done: int = 0, shard: int = 0, num_shards: int = 1) -> Conditions:
    """How environments on the host are run, for training or evaluation, by a run that goes on after so many updates."""
    path = "callback" if options.exact_resume else options.pool_path
    num_pools = options.in_flight if purpose == TRAINING else 0
    overlap = options.overlap and purpose == TRAINING
    return Conditions((options.seed, purpose, done), options.protocol, path, num_pools, overlap, shard, num_shards)


def _counts_to_try(settings: config.Settings, env: Env, as_before: int | None) -> list[int]:
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


def _shard(options: config.Options, num_shards: int, done: int) -> Env:
    """The environments of one of several shards: of any of them on the device, of the one that asks on the host."""

    def make(shard: int) -> Env:
        own = conditions(options, TRAINING, done, shard, num_shards)
        return envs.make(options.env, int(options.num_envs) // num_shards, own, **options.env_options)

    first = make(0)
    if not first.on_device:
        return shards.join([first, *map(make, range(1, num_shards))], SHARDS)
    return first._replace(spec=first.spec._replace(axis_name=SHARDS, num_shards=num_shards))


def _cores_worth(settings: config.Settings, env: Env) -> int:
    """How many cores a gradient step is work enough for. `env` may be a shard."""
    if not hasattr(settings.agent, "gradient_rows"):  # an algorithm of one's own, which may know nothing of shards
        return 0
    rows = settings.agent.gradient_rows(int(settings.options.num_envs))
    return rows // LEAST_ROWS[networks.choose(env.spec.obs, getattr(settings.agent, "network", "auto"))]


def _in_turn(settings: config.Settings, env: Env) -> bool:
    """A CPU is quicker with one seed after another where each keeps its core busy: less data is in use at a time.

    Not with a replay, which would be copied at each turn.
    """
    keeps_little = not hasattr(settings.agent, "capacity")
    return jax.default_backend() == "cpu" and keeps_little and _cores_worth(settings, env) >= 1
