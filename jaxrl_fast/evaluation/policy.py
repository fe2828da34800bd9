"""A trained policy from its run's folder: `jaxrl_fast.load("runs/mine").policy(obs)` is an action."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast import agents, envs
from jaxrl_fast.agents.configs import common
from jaxrl_fast.config import paths, resume
from jaxrl_fast.config.options import Options
from jaxrl_fast.config.paths import CHECKPOINTS
from jaxrl_fast.config.presets import read_meta
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.config.sources import join_names
from jaxrl_fast.parallel.placement import SHARDS
from jaxrl_fast.runs import checkpoint, files
from jaxrl_fast.training import build
from jaxrl_fast.types import Agent, Array, Env, EnvSpec, Key, Parallelism, PolicyInput, PyTree
from jaxrl_fast.utils import warnings
from jaxrl_fast.utils.parsing import parse_float

Which = Literal["best", "last"]


class Saved(NamedTuple):
    """What a run's folder holds of its learners."""

    folder: Path
    settings: Settings
    env: Env  # to play in
    agent: Agent
    learners: PyTree  # [S, ...] where there are several seeds, on the host; what acting needs of them
    seeds: list[int]
    checkpoint: Path
    env_steps: int
    lost: list[int]  # those of the seeds whose numbers were no longer finite
    member: dict[str, float]  # values that tell these from others that were trained with them, in a part of a sweep


class Trained(NamedTuple):
    """A training of one seed, ready to act.

    `policy(obs, key=None, explore=False)` is compiled. It takes an observation as `env.spec.obs` has it or a batch of
    them [B, ...], and gives the environment's own actions: int32, or float32 within the true bounds. It is greedy; with
    `explore` it acts as in training, and wants a key.
    """

    policy: Callable[..., Array]
    env: Env
    agent: Agent
    agent_state: PyTree
    settings: Settings
    seed: int
    checkpoint: Path
    env_steps: int

    def __repr__(self) -> str:
        return f"Trained({self.settings.algo} on {self.env.spec.id}, seed {self.seed}, {str(self.checkpoint)!r})"


def load(
    folder: Path,
    seed: int | None = None,
    which: Which = "best",
    env: Any = None,
    member: Mapping[str, Any] | None = None,
) -> Trained:
    """What the run in this folder has learned; `api.load` says more."""
    saved = read(folder, which, *settle(folder, env), member or {})
    saved = only(saved, saved.seeds[0] if seed is None else seed)
    state = jax.device_put(saved.learners)
    agent, options = saved.agent, saved.settings.options
    num_envs = num_exploring(options)
    if jax.tree.leaves(agent.initial_carry):
        what = "its policy has a memory, and is no function of an observation"
        raise ValueError(f"{folder}: {what}; evaluate and video play it, and .agent.exploit takes the memory")
    policies = Policies(
        partial(jax.jit(partial(greedy, agent)), state), partial(jax.jit(partial(exploring, agent, num_envs)), state)
    )
    act = partial(decide, saved.env, policies)
    return Trained(act, saved.env, agent, state, saved.settings, saved.seeds[0], saved.checkpoint, saved.env_steps)


def settle(folder: Path, env: Any = None, num_envs: int = 1, play_seed: int = 0) -> tuple[Settings, Env]:
    """The run's settings, and so many environments to play in; those on the host have their chance from `play_seed`."""
    settings = resume.of_run(folder)
    options = settings.options if env is None else dataclasses.replace(settings.options, env=env)
    resume.check_env(folder, options.env)
    host_config = build.host_config(options, build.WATCHING, play_seed)
    return settings._replace(options=options), envs.make(options.env, num_envs, host_config, **options.env_options)


def read(folder: Path, which: Which, settings: Settings, play_in: Env, member: Mapping[str, Any]) -> Saved:
    """The learners of all seeds; of a part of a sweep, of those members that have these values."""
    if which not in ("best", "last"):
        raise ValueError(f"which: {which!r} is neither 'best' nor 'last'")
    labels = read_meta(folder / paths.CONFIG).get("members")
    labels = labels or [{"seed": settings.options.seed + i} for i in range(settings.options.num_seeds)]
    places = _places(folder, labels, member)
    own = {name: value for name, value in labels[places[0]].items() if name != "seed"}
    agent = dataclasses.replace(settings.agent, **{name.removeprefix("agent."): value for name, value in own.items()})
    settings = settings._replace(agent=agent)
    make = partial(_agent, settings, play_in)
    saved = choose(folder, which, _unneeded(make(1)))
    num_shards = saved.manifest["num_shards"]
    learners = _learners(make(num_shards), saved, len(labels), num_shards)
    if len(places) < len(labels):
        some = lambda x: x[places] if len(places) > 1 else x[places[0]]
        learners = jax.tree.map(some, learners)
    diverged = saved.manifest["host"]["scores"]["diverged"]
    seeds, lost = ([labels[i]["seed"] for i in places if every or diverged[i] is not None] for every in (True, False))
    env_steps = saved.manifest["env_steps"]
    return Saved(folder, settings, play_in, make(1), learners, seeds, saved.folder, env_steps, lost, own)


def _places(folder: Path, labels: Sequence[Mapping[str, Any]], member: Mapping[str, Any]) -> list[int]:
    """Where those stand that have these values. ValueError where they differ in more than the seed."""
    names = [name for name in labels[0] if name != "seed"]
    wanted = {}
    for name, value in member.items():
        whole = f"agent.{name.removeprefix('agent.').replace('-', '_')}"
        if whole not in names:
            differ = (
                f"its members differ in {join_names(names)}" if names else "only its seeds differ, if there are several"
            )
            raise ValueError(f"--member {name}={value}: {differ} ({folder})")
        if whole in wanted:
            raise ValueError(f"--member: {whole} is there twice")
        try:
            wanted[whole] = parse_float(str(value))
        except ValueError:
            raise ValueError(f"--member {name}={value}: {value!r} is not a number") from None
    places = [i for i, label in enumerate(labels) if all(label[name] == value for name, value in wanted.items())]
    for name in names:
        among = labels if name in wanted else [labels[i] for i in places]
        values = list(dict.fromkeys(label[name] for label in among))
        if name in wanted and wanted[name] not in values:
            raise ValueError(
                f"--member {name}={wanted[name]:g}: members of {folder} have {join_names(map(str, values))}"
            )
        if name not in wanted and len(values) > 1:
            which = f"{name} ({join_names(map(str, values))})"
            one = " ".join(f"{n.removeprefix('agent.')}={wanted.get(n, labels[places[0]][n])}" for n in names)
            raise ValueError(f"{folder} has members that differ in {which}; choose by --member {one}")
    if not places:
        raise ValueError(f"--member {' '.join(f'{n}={v:g}' for n, v in wanted.items())}: {folder} has no such member")
    return places


def _named(seeds: list[int]) -> str:
    """seed 3; seeds 0 to 4; seeds 4, 9"""
    in_line = seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    which = f"{seeds[0]} to {seeds[-1]}" if in_line and len(seeds) > 1 else join_names(map(str, seeds))
    return f"seed{'s' * (len(seeds) > 1)} {which}"


def _without_checkpoint(folder: Path) -> str:
    """How a run without one comes to one."""
    if files.summary_if_any(folder).get("status") == "diverged":
        return "its numbers were not finite any more before one was saved"
    return f"wait for it where the run is under way, else train with --resume {quote(str(folder))} goes on to one"


def choose(folder: Path, which: Which, unneeded: checkpoint.Unneeded) -> checkpoint.Checkpoint:
    """The checkpoint that evaluated best or the newest; where that is damaged, the newest intact one, and a warning."""
    parent = folder / CHECKPOINTS
    if not checkpoint.folders(parent):
        raise ValueError(f"{folder} has no checkpoint to play from; {_without_checkpoint(folder)}")
    best = checkpoint.best(parent) if which == "best" else None
    wrong = []
    if best is not None:
        try:
            return checkpoint.read(best, unneeded)
        except ValueError as error:
            wrong = [str(error)]
    newest, newer = checkpoint.newest(parent, unneeded)
    wrong += [line for line in newer if line not in wrong]
    if newest is None:
        raise ValueError(f"{folder}: none of its {len(wrong)} checkpoints is intact ({wrong[0]})")
    for line in wrong:
        warnings.warn(f"{line}; going back to {newest.folder.name}")
    return newest


def only(saved: Saved, seed: int) -> Saved:
    """What was read, of one seed only; its learner has no axis of seeds."""
    if seed not in saved.seeds:
        raise ValueError(f"seed {seed}: {saved.folder} has trained {_named(saved.seeds)}")
    place = saved.seeds.index(seed)
    learner = jax.tree.map(lambda x: x[place], saved.learners) if len(saved.seeds) > 1 else saved.learners
    return saved._replace(seeds=[seed], learners=learner)


class Policies(NamedTuple):
    """Both ways to act, compiled: batches of observations to an agent's actions."""

    exploit: Callable[[PyTree], Array]
    explore: Callable[[PyTree, Key], Array]


def decide(env: Env, policies: Policies, obs: PyTree, key: Key | None = None, explore: bool = False) -> Array:
    """The environment's own action for an observation, or for each of a batch (see `Trained`)."""
    if explore and key is None:
        raise ValueError("policy(obs, explore=True) wants a key too, such as jax.random.key(0)")
    batch, is_one = as_batch(env.spec, obs)
    if not is_one and not len(jax.tree.leaves(batch)[0]):
        raise ValueError("there is no observation in this batch")
    action = env.to_env_action(policies.explore(batch, key) if explore and key is not None else policies.exploit(batch))
    return action[0] if is_one else action


def as_batch(spec: EnvSpec, obs: PyTree) -> tuple[PyTree, bool]:
    """Observations [B, ...] in the environment's dtypes, and whether it was a single one that had no B."""
    structure: Any = jax.tree.structure(spec.obs)
    try:
        given = [_array(x) for x in structure.flatten_up_to(_plain(obs))]
    except ValueError:  # it is made of other parts
        given = []
    extra = {x.ndim - like.ndim if _fits(x, like) else None for x, like in zip(given, jax.tree.leaves(spec.obs))}
    if extra not in ({0}, {1}):
        of_parts = lambda x: isinstance(x, (list, tuple)) and not isinstance(spec.obs, tuple)
        shown = jax.tree.map(_array, _plain(obs), is_leaf=of_parts)
        wanted, found = (jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree) for tree in (spec.obs, shown))
        raise ValueError(
            f"an observation of {spec.id} is {wanted}, alone or as a batch with one axis more; not {found}"
        )
    cast = lambda x, like: jnp.asarray(x if extra == {1} else x[None], like.dtype)
    return jax.tree.map(cast, structure.unflatten(given), spec.obs), extra == {0}


def _array(x: Any) -> Any:
    """On the host, unless it is traced: a policy may be a part of a program of one's own."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _plain(obs: PyTree) -> PyTree:
    """With dictionaries in the place of other mappings."""
    return {name: _plain(part) for name, part in obs.items()} if isinstance(obs, Mapping) else obs


def _fits(x: np.ndarray, like: jax.ShapeDtypeStruct) -> bool:
    """The shape, but for a batch's axis, and no number that would change; boards of bits may be any numbers."""
    same_shape = x.shape[max(x.ndim - like.ndim, 0) :] == like.shape
    return same_shape and (like.dtype == bool or np.can_cast(x.dtype, like.dtype, "same_kind"))


def greedy(agent: Agent, state: PyTree, obs: PyTree) -> Array:
    """Actions [B, ...] for observations [B, ...], by chance nowhere."""
    num_obs = jax.tree.leaves(obs)[0].shape[0]
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(0), 1, num_obs))
    return agent.exploit(state, PolicyInput(obs), (), noise).action


def num_exploring(options: Options) -> int:
    """How many environments explore side by side, an epsilon each: those of a pool, where they are dealt to some."""
    return int(options.num_envs) // max(options.in_flight, 1)


def exploring(agent: Agent, num_envs: int, state: PyTree, obs: PyTree, key: Key) -> Array:
    """Actions [B, ...] for observations [B, ...] as in training: row i is what environment i % N of a pool would do."""
    num_obs = jax.tree.leaves(obs)[0].shape[0]
    rounds = -(-num_obs // num_envs)

    def act(given):
        obs, key = given
        noise = jax.tree.map(lambda x: x[0], agent.sample_noise(key, 1, num_envs))
        return agent.explore(state, PolicyInput(obs), (), noise).action

    fill = lambda x: jnp.resize(x, (rounds, num_envs, *x.shape[1:]))
    action = jax.lax.map(act, (jax.tree.map(fill, obs), jax.random.split(key, rounds)))
    return action.reshape(-1, *action.shape[2:])[:num_obs]


def _agent(settings: Settings, env: Env, num_shards: int) -> Agent:
    """The agent of a run with such environments, or of one of its shards."""
    options = settings.options
    num_envs = int(options.num_envs)
    steps_per_update = common.rollout_length(settings.agent, num_envs) * num_envs
    axis_name = SHARDS if num_shards > 1 else None
    env = env._replace(
        spec=env.spec._replace(num_envs=num_envs // num_shards),
        parallelism=Parallelism(axis_name, num_shards, num_pools=max(options.in_flight, 1)),
    )
    num_updates = -(-options.total_steps // steps_per_update)
    return build.make_agent(settings.agent, agents.load(settings.algo), env, num_updates)


def _unneeded(agent: Agent) -> checkpoint.Unneeded:
    """Return a predicate on the names of a checkpoint's arrays: whether acting does not need the array."""
    needed = checkpoint.names({"agent": agent.policy_state(jax.eval_shape(agent.init, jax.random.key(0)))})
    return lambda name: name not in needed


def _learners(agent: Agent, saved: checkpoint.Checkpoint, num_seeds: int, num_shards: int) -> PyTree:
    """The agent's part of a checkpoint, with a seed axis where there are several, without shards."""
    axes = (num_seeds,) * (num_seeds > 1) + (num_shards,) * (num_shards > 1)
    one = jax.eval_shape(agent.init, jax.random.key(0))
    like = {"agent": jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), one)}
    kinds = {name: kind for name, kind in saved.manifest["arrays"].items() if name.startswith("agent/")}
    saved = saved._replace(manifest=saved.manifest | {"arrays": kinds})
    part = lambda tree: {"agent": agent.policy_state(tree["agent"])}
    first = (slice(None),) * (num_seeds > 1) + (0,) * (num_shards > 1)
    return jax.tree.map(lambda x: x[first], checkpoint.unflatten(like, saved, part)["agent"])
