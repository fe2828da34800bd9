"""Read the learners of a run from a checkpoint in its folder."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jaxrl_fast import envs
from jaxrl_fast.config import paths, resume
from jaxrl_fast.config.population import LABEL
from jaxrl_fast.config.presets import read_meta
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.config.sources import join_names
from jaxrl_fast.parallel.placement import SHARDS
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.runs.choose import Which, choose_checkpoint
from jaxrl_fast.training import build
from jaxrl_fast.types import Agent, Env, Parallelism, PyTree
from jaxrl_fast.types.host import AtariProtocol
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.files import current_folder, inside
from jaxrl_fast.utils.parsing import parse_float
from jaxrl_fast.utils.random import key_of_seed


class SavedRun(NamedTuple):
    """The learners of a run as read from a checkpoint, with an environment for evaluation."""

    folder: Path
    settings: Settings
    env: Env  # for evaluation
    agent: Agent
    learners: PyTree  # [S, ...] if several seeds, on the host: the parts of the agent's state that acting requires
    seeds: list[int]
    checkpoint: Path
    env_steps: int
    diverged: list[int]  # seeds with losses or parameters that are not finite
    member: dict[str, float]  # values that distinguish these members from others of the same group of a sweep
    start: Path = Path()  # the directory that `folder` and options are relative to; environments may change the current
    opponents: Sequence[Any] = ()  # of each player in a match, see `match.open_opponent`


def open_env(
    folder: Path,
    env: Any = None,
    num_envs: int | Callable[[bool], int] = 1,
    play_seed: int = 0,
    env_options: Mapping[str, Any] = MappingProxyType({}),
    protocol: AtariProtocol = "",
) -> tuple[Settings, Env]:
    """Return the run's settings and `num_envs` environments for evaluation; `play_seed` seeds those on the host.

    `num_envs` may be a function of whether the environments are on the device. `env_options` and `protocol`, if given,
    replace the options of training.

    Raises:
        ValueError: If no run is there, or the environments cannot be made or have other observations or actions.
    """
    settings = resume.of_run(folder)
    devices.check_device()
    options = settings.options if env is None else dataclasses.replace(settings.options, env=env)
    resume.check_env(folder, options.env)
    changed = dataclasses.replace(
        options, env_options=options.env_options | dict(env_options), protocol=protocol or options.protocol
    )
    config_of = lambda options: build.host_env_config(options, build.WATCHING, play_seed)
    make = lambda options, num_envs: envs.make(options.env, num_envs, config_of(options), **options.env_options)
    count = num_envs if callable(num_envs) else lambda on_device: num_envs
    made = make(changed, count(True))
    if count(made.on_device) != count(True):
        assert made.view.resize, "envs.make provides it"
        made = made.view.resize(count(made.on_device), config_of(changed))
    if env_options or protocol:
        before = make(options, 1).spec
        for what in ("obs", "action"):
            old, new = str(getattr(before, what)), str(getattr(made.spec, what))
            if old != new:
                option = "env_options" if env_options else "protocol"
                raise ValueError(f"{option}: must keep the {what} {old} of training, got {new}")
    return settings._replace(options=options), made


def read_run(
    folder: Path, which: Which, settings: Settings, env: Env, member: Mapping[str, Any], start: Path | None = None
) -> SavedRun:
    """Return the learners of all seeds. In a group of a sweep, only members with the values in `member` count.

    `folder` is relative to `start`, by default the current directory, which making `env` may have changed.

    Raises:
        ValueError: If no checkpoint is intact, or the members with these values still differ in more than the seed.
    """
    start = start or current_folder()
    with inside(start):
        return _read_run(folder, which, settings, env, member)._replace(start=start)


def _read_run(folder: Path, which: Which, settings: Settings, env: Env, member: Mapping[str, Any]) -> SavedRun:
    """Do as `read_run`, with a folder that is relative to the current directory."""
    if which not in ("best", "last"):
        raise ValueError(f"which: must be 'best' or 'last', got {which!r}")
    labels = read_meta(folder / paths.CONFIG).get("members")
    labels = labels or [{"seed": settings.options.seed + i} for i in range(settings.options.num_seeds)]
    labels = [{name.removeprefix(LABEL): value for name, value in label.items()} for label in labels]
    indices = _member_indices(folder, labels, member)
    own = {name: value for name, value in labels[indices[0]].items() if name != "seed"}
    settings = settings.replace(**own)
    make = partial(_agent, settings, env)
    saved = choose_checkpoint(folder, which, _unneeded(make(1)))
    num_shards = saved.manifest["num_shards"]
    learners = _learners(make(num_shards), saved, len(labels), num_shards)
    if len(indices) < len(labels):
        select = lambda x: x[indices] if len(indices) > 1 else x[indices[0]]
        learners = jax.tree.map(select, learners)
    diverged_at = saved.manifest["host"]["scores"]["diverged"]
    seeds = [labels[i]["seed"] for i in indices]
    diverged = [labels[i]["seed"] for i in indices if diverged_at[i] is not None]
    env_steps = saved.manifest["env_steps"]
    return SavedRun(folder, settings, env, make(1), learners, seeds, saved.folder, env_steps, diverged, own)


def _member_indices(folder: Path, labels: Sequence[Mapping[str, Any]], member: Mapping[str, Any]) -> list[int]:
    """Return the indices of members with these values. Raise ValueError if the members differ in more than the seed."""
    names = [name for name in labels[0] if name != "seed"]
    requested = {}
    for name, value in member.items():
        full_name = name.removeprefix(LABEL).replace("-", "_")
        if full_name not in names:
            differ = (
                f"members of {folder} differ in {join_names(names)}"
                if names
                else f"{folder} has a single member; leave member out"
            )
            raise ValueError(f"member {name}={value}: {differ}")
        if full_name in requested:
            raise ValueError(f"member: {full_name} is given twice")
        try:
            requested[full_name] = parse_float(str(value))
        except ValueError:
            raise ValueError(f"member {name}={value}: {value!r} is not a number") from None
    indices = [i for i, label in enumerate(labels) if all(label[name] == value for name, value in requested.items())]
    for name in names:
        candidates = labels if name in requested else [labels[i] for i in indices]
        values = list(dict.fromkeys(label[name] for label in candidates))
        if name in requested and requested[name] not in values:
            available = join_names(map(str, values))
            raise ValueError(f"member {name}={requested[name]:g}: members of {folder} have {available}")
        if name not in requested and len(values) > 1:
            which = f"{name} ({join_names(map(str, values))})"
            example = " ".join(f"{n}={requested.get(n, labels[indices[0]][n])}" for n in names)
            raise ValueError(f"{folder} has members that differ in {which}; choose one, e.g. member {example}")
    if not indices:
        given = " ".join(f"{name}={value:g}" for name, value in requested.items())
        raise ValueError(f"member {given}: {folder} has no such member")
    return indices


def _describe_seeds(seeds: list[int]) -> str:
    """Return "3", "0 to 4" or "4 or 9"."""
    consecutive = seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    return f"{seeds[0]} to {seeds[-1]}" if consecutive and len(seeds) > 1 else " or ".join(map(str, seeds))


def select_seed(saved: SavedRun, seed: int) -> SavedRun:
    """Return the learner of one seed, without a seed axis. Raise ValueError if the run has no such seed."""
    if seed not in saved.seeds:
        trained = f"must be {_describe_seeds(saved.seeds)}, which {saved.folder} has trained"
        raise ValueError(f"seed: {trained}, got {seed}; leave it out")
    index = saved.seeds.index(seed)
    learner = jax.tree.map(lambda x: x[index], saved.learners) if len(saved.seeds) > 1 else saved.learners
    return saved._replace(seeds=[seed], learners=learner)


def row_agent(saved: SavedRun) -> Agent:
    """Return the run's agent for the rows of one environment: as if every training environment were a pool."""
    return _agent(saved.settings, saved.env, 1, num_pools=int(saved.settings.options.num_envs))


def _agent(settings: Settings, env: Env, num_shards: int, num_pools: int | None = None) -> Agent:
    """Return the agent of a run, or of one of its shards if there are several."""
    options = settings.options
    num_envs = int(options.num_envs)
    steps_per_update = settings.agent.length(num_envs) * num_envs
    axis_name = SHARDS if num_shards > 1 else None
    env = env._replace(
        spec=env.spec._replace(num_envs=num_envs // num_shards * max(len(env.spec.players), 1)),
        parallelism=Parallelism(axis_name, num_shards, num_pools=num_pools or max(options.host.async_pools, 1)),
    )
    num_updates = -(-options.total_steps // steps_per_update)
    return build.make_agent(settings.agent, build.load_algorithm(settings), env, num_updates)


def _unneeded(agent: Agent) -> checkpoint.Unneeded:
    """Return a predicate on the names of a checkpoint's arrays: whether acting does not need the array."""
    needed = checkpoint.names({"agent": agent.policy_state(jax.eval_shape(agent.init, key_of_seed(0)))})
    return lambda name: name not in needed


def _learners(agent: Agent, saved: checkpoint.Checkpoint, num_seeds: int, num_shards: int) -> PyTree:
    """Return the agent's state in a checkpoint, without the shard axis and with a seed axis if there are several."""
    axes = (num_seeds,) * (num_seeds > 1) + (num_shards,) * (num_shards > 1)
    one = jax.eval_shape(agent.init, key_of_seed(0))
    like = {"agent": jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), one)}
    kinds = {name: kind for name, kind in saved.manifest["arrays"].items() if name.startswith("agent/")}
    saved = saved._replace(manifest=saved.manifest | {"arrays": kinds})
    part = lambda tree: {"agent": agent.policy_state(tree["agent"])}
    first_shard = (slice(None),) * (num_seeds > 1) + (0,) * (num_shards > 1)
    return jax.tree.map(lambda x: x[first_shard], checkpoint.unflatten(like, saved, part)["agent"])
