"""envpool's tasks: what their specifications say, made uniform, and which options they may have.

Nothing is made here but specifications, so that whatever is wrong is said before there is a pool.
"""

import functools
import json
import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import envpool
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast import types
from jaxrl_fast.envs.envpool import probe, qt
from jaxrl_fast.envs.spaces import Bounds, coerce, refuse_option, true_bounds
from jaxrl_fast.types import AtariProtocol, EnvSpec, HostEnvConfig, PyTree
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.parsing import nearest

warnings.filterwarnings("ignore", ".*precision lowered by casting")  # gymnasium's, of bounds: no user's concern

PROTOCOLS: dict[str, dict[str, Any]] = {
    # Mnih et al. 2015, "Human-level control ...", methods: a lost life ends an episode, up to 30 no-ops begin a game
    "dqn2015": {"episodic_life": True, "repeat_action_probability": 0.0, "use_fire_reset": True, "noop_max": 30},
    # Machado et al. 2018, "Revisiting the Arcade Learning Environment", section 5: sticky actions, whole games
    "machado2018": {"episodic_life": False, "repeat_action_probability": 0.25, "use_fire_reset": False, "noop_max": 1},
}
FAMILY = "envpool.atari"  # that they are for
OURS = {  # options of envpool that are said in another way here
    "num_envs": "--num-envs",
    "batch_size": "--num-envs, for all environments step together",
    "seed": "--seed",
    "env_seed": "--seed",
    "episodic_life": "--protocol",
    "repeat_action_probability": "--protocol",
    "reward_clip": "--agent.clip-rewards",
    **dict.fromkeys(("env_name", "task_name", "distribution_mode"), "--env"),
    **dict.fromkeys(("scenario", "adroit_task", "hand_task"), "--env"),
}
HIDDEN = ("max_num_players", "base_path", "gym_reset_return_info", "zero_discount_on_life_loss", "task")
MIN_VALUES = {  # what envpool takes without looking, and may crash on if it is less
    **dict.fromkeys(("stack_num", "frame_skip", "noop_max", "max_episode_steps"), 1),
    **dict.fromkeys(("img_height", "img_width"), 36),  # smaller frames would be taken for boards, and not be scaled
    **dict.fromkeys(("num_threads", "num_levels", "start_level"), 0),
    **dict.fromkeys(("thread_affinity_offset", "mode", "difficulty"), -1),
}
MAX_VALUES = {"num_threads": 1024, "thread_affinity_offset": 1023, "img_height": 1024, "img_width": 1024}
MAX_VALUES |= dict.fromkeys(("num_levels", "start_level"), 10**9)  # beyond them lie levels below 0
MAX_VALUES |= {"stack_num": 15, "frame_skip": 1000, "noop_max": 10_000, "mode": 1000, "difficulty": 1000}
SAFE_OPTIONS = {
    "num_threads",
    "thread_affinity_offset",
    "max_episode_steps",
}  # of these no value within the bounds harms
SAFE_ATARI_OPTIONS = SAFE_OPTIONS | {
    "stack_num",
    "frame_skip",
    "noop_max",
    "img_height",
    "img_width",
    "full_action_space",
}
SAFE_ATARI_OPTIONS |= {"gray_scale", "use_inter_area_resize", "use_fire_reset"}
SECONDS_EACH = {  # of a core, to make an environment, by its family; those of others are made in a moment
    "envpool.atari": 0.15,
    "envpool.gfootball": 0.5,
    "envpool.mujoco.dmc": 0.12,
    "envpool.mujoco.metaworld": 0.08,
    "envpool.mujoco.myosuite": 0.4,
    "envpool.mujoco.playground": 0.3,
    "envpool.mujoco.robotics": 0.07,
    "envpool.vizdoom": 0.06,
}
NO_TIME_LIMIT_FAMILIES = ("envpool.highway", "envpool.jumanji", "envpool.pgx", qt.FAMILY)  # of `max_episode_steps`
LIMITS = {"JumperMemory-v0": 2000}  # of steps; where envpool says less, and would call a death after that no death
MAX_ONE_HOT = 1024  # a count with more values than this is one number


class Task(NamedTuple):
    """One of envpool's environments, and how it is to be driven."""

    name: str
    config: Mapping[str, Any]  # options, as envpool takes them
    action_dtype: Any  # as envpool wants it
    action_start: int  # the least discrete action
    bounds: Bounds
    raw: PyTree  # shapes and dtypes of one environment's observation, as envpool gives it
    spaces: PyTree  # gymnasium's spaces of the same
    protocol: AtariProtocol
    lives: bool  # a lost life ends an episode
    says_over: bool  # whether the game is over is told besides
    wide: bool  # something in it has 64 bits
    spec: EnvSpec


def raw_obs(task: Task) -> PyTree:
    """What envpool gives for N environments, narrowed to 32 bits."""
    shape = lambda leaf: jax.ShapeDtypeStruct((task.spec.num_envs, *leaf.shape), narrow_dtype(leaf.dtype))
    return jax.tree.map(shape, task.raw)


def encode(task: Task, obs: PyTree) -> PyTree:
    """Observations [N, ...] as agents meet them."""
    return jax.tree.map(_encode, obs, task.spaces)


def _encode(x: jax.Array, space: Any) -> jax.Array:
    num = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 0
    if 0 < num <= MAX_ONE_HOT:
        return jax.nn.one_hot(x - int(space.start), num, dtype=jnp.float32)
    if _is_image(x.shape[1:], x.dtype):
        return jnp.moveaxis(x, 1, -1)
    if x.ndim == 2 and x.dtype == jnp.uint8:  # a text: bytes become [0, 1)
        return x.astype(jnp.float32) / 256
    x = x[:, None] if x.ndim == 1 else x
    return x if x.dtype in (jnp.bool_, jnp.uint8) else x.astype(jnp.float32)


def _is_image(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether one environment's observation is an image: its channels come first."""
    return len(shape) == 3 and dtype == jnp.uint8 and shape[0] < min(shape[1:])


def describe(name: str, num_envs: int, options: Mapping[str, Any], conditions: HostEnvConfig) -> Task:
    """What envpool says of a task under these options. ValueError of one sentence where it cannot be driven."""
    env_id = f"envpool/{name}"
    if name not in envpool.list_all_envs():
        hint = nearest(name, envpool.list_all_envs(), "envpool/{}".format)
        raise ValueError(f"unknown environment {env_id!r}{hint}")
    atari = family(name) == FAMILY
    if conditions.protocol and not atari:
        raise ValueError(f"--protocol {conditions.protocol}: {env_id} is no game of Atari, for which protocols are")
    protocol = conditions.protocol or ("dqn2015" if atari else "")
    known = _specify(env_id, name, {})
    if known.config.max_num_players > 1:
        raise ValueError(f"{env_id} cannot be driven: it is a game of {known.config.max_num_players} players")
    given = _checked(env_id, known.config._asdict(), options)
    if "max_episode_steps" in given and not _has_time_limit(name, known.config.max_episode_steps):
        value = given["max_episode_steps"]
        near = "; its duration is an option" if hasattr(known.config, "duration") else ""
        raise ValueError(f"max_episode_steps={value} for {env_id}: envpool would not end its episodes there{near}")
    limit = {"max_episode_steps": LIMITS[name]} if name in LIMITS else {}
    config: dict[str, Any] = {**PROTOCOLS.get(protocol, {}), **limit, **given}
    if not given.keys() <= (SAFE_ATARI_OPTIONS if atari else SAFE_OPTIONS):
        _try(env_id, name, config, given)
    threads = given.get("num_threads") or _threads_of_pools(num_envs, conditions)  # 0 is envpool's word for that
    config["num_threads"] = max(threads // conditions.num_shards, 1)
    spec = _specify(env_id, name, config)
    action, start, bounds = _action(env_id, spec)
    raw, spaces = _observation(env_id, spec)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(spec.state_array_spec)]
    images = all(_is_image(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(raw))
    stack = getattr(spec.config, "stack_num", 0) if images else 0  # else it is not the last axis that is stacked
    task = Task(
        name=name,
        config=config,
        action_dtype=spec.action_array_spec["action"].dtype,
        action_start=start,
        bounds=bounds,
        raw=raw,
        spaces=spaces,
        protocol=protocol,
        lives=bool(config.get("episodic_life", False)),
        says_over="info:terminated" in spec.state_array_spec,
        wide=any(np.dtype(d).itemsize == 8 for d in (*dtypes, spec.action_array_spec["action"].dtype)),
        spec=EnvSpec(env_id, None, action, num_envs, stack),  # type: ignore[arg-type]
    )
    obs = jax.eval_shape(functools.partial(encode, task), raw_obs(task))
    obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), obs)
    return task._replace(spec=task.spec._replace(obs=obs))


def family(name: str) -> str:
    """The module of envpool that a task comes from: "envpool.atari"."""
    return envpool.registration.registry.specs[name][0]


def _has_time_limit(name: str, default: int) -> bool:
    """Whether envpool ends an episode at `max_episode_steps`; some families have it, and go on."""
    return default < 2**31 - 1 and (family(name) not in NO_TIME_LIMIT_FAMILIES or name.endswith("Sokoban-v0"))


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads_of_pools(num_envs: int, conditions: HostEnvConfig) -> int:
    """The threads of one pool on each device, all devices together, unless told: at most twice the cores in flight.

    One pool or two get a thread for each core, for while one of two works the other may wait.
    """
    share = 2 * num_cores() // max(conditions.async_pools, 1)
    return min(num_envs * conditions.num_shards, num_cores(), max(share, 1))


def _checked(env_id: str, defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options with the types of the defaults, none beyond what envpool survives."""
    known = tuple(name for name in defaults if name not in OURS and name not in HIDDEN)
    values = {}
    for name, given in options.items():
        if name in OURS:
            raise ValueError(f"{name}={given} for {env_id}: that is said by {OURS[name]} here")
        if name not in known:
            refuse_option(env_id, name, known)
        value = values[name] = coerce(env_id, name, given, defaults[name])
        least, most = MIN_VALUES.get(name, -(2**31)), MAX_VALUES.get(name, 2**31 - 1)
        if isinstance(value, int) and not least <= value <= most:
            raise ValueError(f"{name}={given} for {env_id}: {least} to {most} is wanted")
    return values


def _try(env_id: str, name: str, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """ValueError where one environment with these options does not live through its first steps elsewhere."""
    why = probe.why_rejected(name, json.dumps({**config, "num_threads": 1}, sort_keys=True, default=str))
    if why:
        values = ", ".join(f"{option}={value}" for option, value in given.items())
        raise ValueError(f"{env_id} cannot be made with {values}: {why}")


def _specify(env_id: str, name: str, config: Mapping[str, Any]) -> Any:
    try:
        qt.load_for(family(name))
        return envpool.make_spec(name, **config)
    except Exception as error:  # whatever envpool says to a family that lacks something, or to an option
        if family(name) == qt.FAMILY and isinstance(error, (ImportError, OSError)):
            wants = 'Procgen wants Qt 5.15, of pip install "jaxrl_fast[procgen]", and that libGL and glib of the system'
            raise ValueError(f"{env_id} cannot be made: {wants} ({error.__cause__ or error})") from error
        raise ValueError(f"{env_id} cannot be made: {why(error)}") from error


def _action(env_id: str, spec: Any) -> tuple[types.Discrete | types.Box, int, Bounds]:
    """The action space for agents, the least discrete action, and the true bounds of a continuous one."""
    space = spec.action_space
    refused = f"{env_id} cannot be driven: its action space is {space}"
    if isinstance(space, gymnasium.spaces.Discrete):
        return types.Discrete(int(space.n)), int(space.start), ()
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"{refused}, and not one Discrete or one Box of floats")
    return types.Box(space.shape or (1,)), 0, true_bounds(refused, space.low, space.high, space.shape)


def _observation(env_id: str, spec: Any) -> tuple[PyTree, PyTree]:
    """Shapes and dtypes of one environment's observation, and gymnasium's spaces for it."""
    raw: dict[str, Any] = {}
    for name, array in spec.state_array_spec.items():
        if name.startswith("obs"):
            shape = tuple(n for n in array.shape if n != -1)  # -1: one of each player, and there is one
            _put(raw, name.replace(":", ".").split("."), jax.ShapeDtypeStruct(shape, array.dtype))
    spaces = _unpacked(spec.observation_space)
    parts = jax.tree.leaves(raw["obs"])
    if len(parts) == 1 and isinstance(spaces, gymnasium.spaces.Space):  # a part that has a name, and that none is told
        raw["obs"] = parts[0]
    here: Any = jax.tree.structure(raw["obs"])
    if here != jax.tree.structure(spaces):
        raise ValueError(f"{env_id} cannot be driven: its observation space is {spec.observation_space}")
    return raw["obs"], spaces


def _put(tree: dict[str, Any], path: list[str], leaf: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = leaf


def _unpacked(space: Any) -> PyTree:
    """gymnasium's Dict as a dictionary."""
    inner = getattr(space, "spaces", space) if isinstance(space, gymnasium.spaces.Dict) else space
    return {name: _unpacked(part) for name, part in inner.items()} if isinstance(inner, Mapping) else inner


def narrow_dtype(dtype: Any) -> Any:
    """The dtype of at most 32 bits that takes the place of this one."""
    return {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}.get(np.dtype(dtype).name, dtype)
