"""Build the environments and the agent of a run: whole, or in shards on several devices. Nothing is compiled."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxrl_fast import agents, async_rollout, envs, players
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.envs.host import sharded
from jaxrl_fast.envs.host.config import HostEnvConfig, Shard, num_workers_ahead, workers_of
from jaxrl_fast.envs.wrappers import time_limit
from jaxrl_fast.kernels import host_call
from jaxrl_fast.kernels.build import enabled, is_available
from jaxrl_fast.networks import torsos, views
from jaxrl_fast.options import wrap
from jaxrl_fast.options.algorithm import network_of
from jaxrl_fast.options.run import Options
from jaxrl_fast.parallel import team
from jaxrl_fast.parallel.placement import Placement, check_processes, max_grad_workers
from jaxrl_fast.training import bonus_data, memory, replay_storage
from jaxrl_fast.types import SHARED_MEMORY_AXIS, Agent, Env, EnvSpec
from jaxrl_fast.utils import target
from jaxrl_fast.utils.errors import where, why
from jaxrl_fast.utils.parsing import nearest

TRAINING, EVALUATION, WATCHING = 0, 1, 2  # purposes of environments; each has its own seeds
CAPABILITIES = frozenset({"shards", "grad_workers", "sequential_seeds"})  # the names allowed in SUPPORTS
# Each gradient worker needs that many rows. Then workers pay off for agents whose parameters and optimizer take at most
# MAX_LEARNED bytes, because each worker sums and updates all of them. With twice the rows, they pay off for twice the
# bytes. MAX_REPEATED bounds the bytes of all workers together.
MIN_ROWS_PER_WORKER, MAX_LEARNED, MAX_REPEATED = 64, 2**21, 2**30


def load_algorithm(settings: Settings) -> Any:
    """Return the algorithm of a run, for environments with or without players. Raises ValueError as `agents.load`."""
    return players.learning(agents.load(settings.algo), settings.options.players)


def build(
    settings: Settings, algorithm: Any, num_updates: int, before: Mapping[str, Any] | None = None, done: int = 0
) -> tuple[Settings, Env, Agent, Placement]:
    """Return the environments and the agent of one shard, and the placement of seeds and shards on devices.

    The environment is made once, and so is the agent, with its replay on the device. A resumed run has made `done`
    updates; it keeps the number of shards and gradient workers in the manifest of its checkpoint, `before`. The
    returned settings have the options that the environment decides: the Atari protocol and the rewards to train on.
    """
    enabled(), target.platform()  # raise ValueError for wrong environment variables, before any other error
    options = settings.options
    config = host_env_config(options, TRAINING, done)
    env = envs.make(options.env, options.num_envs, config, **options.env_options)
    env = time_limit.terminating(env) if wrap.read(options.wrap).time_limit else env
    settings = bonus_data.loaded(_with_protocol(settings, env), env)
    placement = choose_placement(settings, algorithm, env, before)
    check_processes(placement)
    env = _shard(env, settings.options, placement, done)
    agent_config = replay_storage.on_device(settings.agent)
    agent = make_agent(agent_config, algorithm, env, num_updates)
    workers = placement.num_grad_workers
    data = bonus_data.of_program(agent_config)
    if workers > 1 and not _pays_to_repeat(env, agent, data, _gradient_rows(settings, env.spec) // workers):
        placement = placement._replace(num_grad_workers=1)
        env = _shard(env, settings.options, placement, done)
        agent = make_agent(agent_config, algorithm, env, num_updates)
    return settings, env, agent, placement


def choose_placement(
    settings: Settings, algorithm: Any, env: Env, before: Mapping[str, Any] | None = None
) -> Placement:
    """Return how the seeds and shards of a run are placed on devices: arithmetic on rows, network and devices.

    With `--devices auto` there are as many shards as devices, or fewer where a shard would have too few rows. A single
    seed with too few rows for shards may have gradient workers. Raises ValueError for a number of devices that is not
    possible.
    """
    options, supported = settings.options, supports(algorithm)
    busy_cores = _num_busy_cores(settings, supported, env.spec)
    in_turn = "sequential_seeds" in supported and target.platform() == "cpu" and busy_cores >= 1
    placement = Placement(options.num_seeds, sequential_seeds=in_turn)
    num_shards = _num_shards(settings, supported, env, busy_cores, before)
    if num_shards > 1:
        placement = placement._replace(num_shards=num_shards)
        shares_memory = placement.sharded and "grad_workers" in supported and num_shards <= max_grad_workers()
        return placement._replace(axis_name=SHARED_MEMORY_AXIS) if shares_memory else placement
    alone = options.num_seeds == 1 and options.devices == "auto"
    if not alone or not (env.on_device or _waiting_for_host_pays(settings)) or "grad_workers" not in supported:
        return placement
    rows = _gradient_rows(settings, env.spec)
    worth = rows // MIN_ROWS_PER_WORKER if _network_kind(settings, env.spec) in torsos.VECTORS else 1
    most = before["num_grad_workers"] if before else worth
    most = min(most, len(target.devices()), max_grad_workers())
    parts = _num_parts(settings, env.spec)
    workers = next((number for number in range(most, 0, -1) if parts % number == 0), 1)
    return placement._replace(num_grad_workers=workers)


def _waiting_for_host_pays(settings: Settings) -> bool:
    """Return whether it pays that gradient workers wait for the worker that steps host environments.

    With a replay, gradient steps take most of the time; without one, rollouts do. An exception of an environment
    releases the waiting workers, but only if C calls the environment.
    """
    options, has_replay = settings.options, settings.agent.replay is not None
    from_c = options.host.bridge != "callback" and not options.host.exact_resume and is_available(host_call.KERNEL)
    return has_replay and from_c and not options.host.async_pools and not options.host.ahead


def make_agent(agent_config: Any, algorithm: Any, env: Env, num_updates: int) -> Agent:
    """Return the agent of a run of `num_updates` updates. With overlap, the first update has nothing to learn from.

    Raises ValueError if the algorithm does not fit the environment or returns no agent.
    """
    num_learning = max(num_updates - async_rollout.overlaps(env), 1)
    with blamed(algorithm.__name__, env, sentences=True):
        own = (env.parallelism,) if supports(algorithm) else ()
        agent = algorithm.make(agent_config, env.spec, num_learning, *own)
    if not isinstance(agent, Agent):
        raise ValueError(f"algorithm {algorithm.__name__!r}: make must return an Agent, got {agent!r}")
    if agent.rollout_length < 1:
        raise ValueError(
            f"algorithm {algorithm.__name__!r}: rollout_length must be 1 or more, got {agent.rollout_length}"
        )
    return agent


def supports(algorithm: Any) -> frozenset[str]:
    """Return the names that the algorithm's module declares in SUPPORTS.

    "shards": `make` takes a Parallelism and sums gradients over its axis, and Config has `gradient_rows(num_envs)`.
    "grad_workers": it also splits the rows of a gradient step by `collectives.local_rows`.
    "sequential_seeds": its state is small enough that seeds may be trained in turn on a CPU, without a replay.
    Raises ValueError for another name.
    """
    declared = frozenset(getattr(algorithm, "SUPPORTS", ()))
    for name in sorted(declared - CAPABILITIES, key=str):
        hint = nearest(str(name), CAPABILITIES) or f"; use some of {', '.join(sorted(CAPABILITIES))}"
        raise ValueError(f"algorithm {algorithm.__name__!r}: SUPPORTS has an unknown name, got {name!r}{hint}")
    return declared


@contextmanager
def blamed(algorithm: str, env: Env, sentences: bool = False) -> Iterator[None]:
    """Turn an error in a custom algorithm into a ValueError that names the place.

    With `sentences`, a ValueError of the algorithm is a message for users and is not changed.
    """
    try:
        yield
    except Exception as error:
        if sentences and isinstance(error, ValueError) or not (place := where(error)):
            raise
        raise ValueError(f"algorithm {algorithm!r} cannot learn in {env.spec.id}: {why(error)}{place}") from error


def evaluation_env(options: Options, env: Env, done: int = 0) -> Env:
    """Return the environments for evaluations, made from those for training.

    They are the same if there are no evaluations, or if a single host environment is evaluated at the end of the run
    only: a second one may not exist, such as of a robot or of a simulator with one license.
    """
    is_single = options.num_envs == 1 and not options.eval_every and not options.host.exact_resume
    if not options.max_eval_episodes or is_single and env.host and not env.pools:
        return env._replace(parallelism=env.parallelism._replace(num_grad_workers=1))
    num_envs = num_eval_envs(options, options.eval_envs, env.on_device)
    return _resized(env, num_envs, host_env_config(options, EVALUATION, done))


def num_eval_envs(options: Options, asked: int, on_device: bool) -> int:
    """Return the number of environments for evaluations, where `asked` is the option."""
    num_envs = min(asked, options.max_eval_episodes)
    is_default = asked == Options().eval_envs
    return min(num_envs, options.num_envs) if is_default and not on_device else num_envs  # each takes time to make


def host_env_config(options: Options, purpose: int, done: int = 0, shard: Shard | None = None) -> HostEnvConfig:
    """Return the settings of host environments for a purpose, in a run that has made `done` updates."""
    bridge = "callback" if options.host.exact_resume else options.host.bridge
    training, shard = purpose == TRAINING, shard or Shard()
    num_pools, ahead = (options.host.async_pools, options.host.ahead) if training else (0, 0)
    workers = workers_of(options.host.workers, float(options.host.timeout))
    if ahead:  # a pool for each worker
        num_pools = num_workers_ahead(options.num_envs, workers)
        workers = workers._replace(num=1)
    return HostEnvConfig(
        seed=(options.seed, purpose, done),
        protocol=options.protocol,
        bridge=bridge,
        num_async_pools=num_pools,
        overlap=options.host.overlap and training,
        ahead=ahead,
        shard=shard,
        workers=workers,
        wrappers=wrappers_of(options),
        render=purpose == WATCHING,
        schedules=training,
    )


def wrappers_of(options: Options) -> wrap.Wrappers:
    """Return what is put around the environments of a run. Physics simulations are in quarantine by default."""
    chosen = wrap.read(options.wrap)
    return chosen if chosen.quarantine is not None else chosen._replace(quarantine=envs.is_physics(options.env))


def _with_protocol(settings: Settings, env: Env) -> Settings:
    """Return the settings with the Atari protocol of the environment, and with the reward clipping that it has."""
    if env.on_device:
        return settings
    settings = settings._replace(options=dataclasses.replace(settings.options, protocol=env.protocol))
    if env.protocol and settings.agent.rewards == "auto":
        settings = settings.replace(rewards="sign" if env.protocol == "dqn2015" else "raw")
    return settings


def _num_shards(
    settings: Settings, supported: frozenset[str], env: Env, busy_cores: int, before: Mapping[str, Any] | None
) -> int:
    options, num_devices, num_envs = settings.options, len(target.devices()), settings.options.num_envs
    if before:
        return before["num_shards"]
    if options.devices == "auto" and team.current().count > 1:
        asked = num_devices if options.num_seeds == 1 else 1
    elif options.devices == "auto":
        if options.host.ahead or "shards" not in supported or not (env.on_device or target.platform() == "cpu"):
            return 1  # pools on several GPUs only on request
        parts, num_pools = _num_parts(settings, env.spec), max(options.host.async_pools, 1)
        counts = range(min(num_devices, busy_cores), 1, -1)
        return next((count for count in counts if num_envs % (count * num_pools) == 0 and parts % count == 0), 1)
    else:
        asked = int(options.devices)
    if asked > num_devices:
        problem = f"must be at most {num_devices}, the number of JAX's devices"
        raise ValueError(f"devices: {problem}, got {asked}; use {num_devices}")
    if asked > 1 and "shards" not in supported:
        raise ValueError(f'devices: {settings.algo} must declare SUPPORTS = {{"shards"}}, got {asked}; use 1')
    if num_envs % asked:
        most = next(count for count in range(asked, 0, -1) if num_envs % count == 0)
        raise ValueError(f"devices: must divide num_envs {num_envs}, got {asked}; use {most}")
    return asked


def _num_parts(settings: Settings, spec: EnvSpec) -> int:
    """Return the number of parts into which a gradient step may be split over devices: its rows, or whole sequences."""
    return _gradient_rows(settings, spec) // (settings.agent.sequence() or 1)


def _num_busy_cores(settings: Settings, supported: frozenset[str], spec: EnvSpec) -> int:
    """Return how many cores the rows of a gradient step occupy.

    With fewer rows than `min_rows`, a shard waits longer than it saves, and a seed is faster together with others.
    """
    if "shards" not in supported:
        return 0
    rows = _gradient_rows(settings, spec)
    return rows // torsos.kind_of(_network_kind(settings, spec)).min_rows


def _gradient_rows(settings: Settings, spec: EnvSpec) -> int:
    """Return the rows of a gradient step of one policy. `spec` is of all environments."""
    rows: int | None = settings.agent.gradient_rows(players.num_learner_envs(spec, settings.options.players))
    if rows is None:
        raise ValueError(f"algorithm {settings.algo!r}: SUPPORTS needs Config.gradient_rows(num_envs); add it")
    return rows


def _network_kind(settings: Settings, spec: EnvSpec) -> str:
    """Return the kind of torso that the algorithm's options ask for."""
    network, obs = network_of(settings.agent), views.of_actor(settings.agent, spec.obs)
    return torsos.choose_kind(obs, network.kind, network.observations) if network else torsos.choose_kind(obs)


def _pays_to_repeat(env: Env, agent: Agent, data: Mapping[str, Any], rows_per_worker: int) -> bool:
    """Return whether an agent is small enough that gradient workers pay off."""
    needed = memory.estimate(env, agent, data=data)
    most = MAX_LEARNED * rows_per_worker // MIN_ROWS_PER_WORKER
    return needed.parameters <= most and needed.total <= MAX_REPEATED


def _resized(env: Env, num_envs: int, config: HostEnvConfig) -> Env:
    assert env.view.resize, "envs.make provides it"
    return env.view.resize(num_envs, config)


def _shard(env: Env, options: Options, placement: Placement, done: int) -> Env:
    """Return the environments of one shard; host environments belong to the shard that calls them."""
    num_shards, axis_name = placement.num_shards, placement.axis_name
    if num_shards == 1:
        return env._replace(parallelism=env.parallelism._replace(num_grad_workers=placement.num_grad_workers))
    num_envs = options.num_envs // num_shards
    configs = [host_env_config(options, TRAINING, done, Shard(i, num_shards)) for i in range(num_shards)]
    if not env.on_device:
        return sharded.join([_resized(env, num_envs, config) for config in configs], axis_name)
    first = _resized(env, num_envs, configs[0])
    return first._replace(parallelism=first.parallelism._replace(axis_name=axis_name, num_shards=num_shards))
