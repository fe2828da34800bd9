"""Describe envpool's tasks: their spaces, the Atari protocols, and the options that a user may set.

Only specifications are made here, so every mistake is reported before a pool exists.
"""

import functools
import json
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import envpool
import jax
import numpy as np

from jaxrl_fast.envs.envpool import opengl, probe, qt
from jaxrl_fast.envs.gymnasium.spaces import action_space, as_tree, encode, is_channel_first_image
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.host.pool import PoolSpec
from jaxrl_fast.types import EnvSpec, PyTree
from jaxrl_fast.utils.arguments import coerce, refuse_option
from jaxrl_fast.utils.devices import num_cores
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.importing import install
from jaxrl_fast.utils.parsing import nearest, one_line

warnings.filterwarnings("ignore", ".*precision lowered by casting")  # from gymnasium, about the bounds of a Box

PROTOCOLS: dict[str, dict[str, Any]] = {
    # Mnih et al. 2015, "Human-level control ...", methods: a lost life ends an episode; up to 30 no-ops start a game
    "dqn2015": {"episodic_life": True, "repeat_action_probability": 0.0, "use_fire_reset": True, "noop_max": 30},
    # Machado et al. 2018, "Revisiting the Arcade Learning Environment", section 5: sticky actions, whole games
    "machado2018": {"episodic_life": False, "repeat_action_probability": 0.25, "use_fire_reset": False, "noop_max": 1},
}
ATARI_FAMILY = "envpool.atari"
RESERVED_OPTIONS = {  # options of envpool that another option sets
    "num_envs": "num_envs",
    "batch_size": "num_envs (all environments step together)",
    "seed": "seed",
    "env_seed": "seed",
    "episodic_life": "protocol",
    "repeat_action_probability": "protocol",
    "reward_clip": "rewards",
    **dict.fromkeys(("env_name", "task_name", "distribution_mode"), "env"),
    **dict.fromkeys(("scenario", "adroit_task", "hand_task"), "env"),
}
HIDDEN_OPTIONS = ("max_num_players", "base_path", "gym_reset_return_info", "zero_discount_on_life_loss", "task")
MIN_OPTION_VALUES = {  # envpool does not check these, and may crash below
    **dict.fromkeys(("stack_num", "frame_skip", "noop_max", "max_episode_steps"), 1),
    **dict.fromkeys(("img_height", "img_width"), 36),  # a network would take smaller frames for boards
    **dict.fromkeys(("num_threads", "num_levels", "start_level"), 0),
    **dict.fromkeys(("thread_affinity_offset", "mode", "difficulty"), -1),
}
MAX_OPTION_VALUES = {
    **dict.fromkeys(("stack_num",), 15),
    **dict.fromkeys(("frame_skip", "mode", "difficulty"), 1000),
    **dict.fromkeys(("img_height", "img_width", "num_threads"), 1024),
    "thread_affinity_offset": 1023,
    "noop_max": 10_000,
    **dict.fromkeys(("num_levels", "start_level"), 10**9),  # larger ones overflow to negative levels
}
SAFE_OPTIONS = {"num_threads", "thread_affinity_offset", "max_episode_steps"}  # need no trial within the bounds
SAFE_ATARI_OPTIONS = SAFE_OPTIONS | {
    *("stack_num", "frame_skip", "noop_max", "img_height", "img_width", "full_action_space"),
    *("gray_scale", "use_inter_area_resize", "use_fire_reset"),
}
BUILD_S_PER_ENV = {  # seconds of one core to make an environment, by family; other families take no time
    "envpool.atari": 0.15,
    "envpool.gfootball": 0.5,
    "envpool.mujoco.dmc": 0.12,
    "envpool.mujoco.metaworld": 0.08,
    "envpool.mujoco.myosuite": 0.4,
    "envpool.mujoco.playground": 0.3,
    "envpool.mujoco.robotics": 0.07,
    "envpool.vizdoom": 0.06,
}
NO_TIME_LIMIT_FAMILIES = ("envpool.highway", "envpool.jumanji", "envpool.pgx", qt.PROCGEN_FAMILY)
MUJOCO_FAMILIES = ("dmc", "gym", "metaworld", "myosuite", "playground", "robotics")
OPENGL_FAMILIES = tuple(f"envpool.mujoco.{name}" for name in MUJOCO_FAMILIES)  # draw themselves with OpenGL
RENDERED_FAMILIES = (  # draw themselves
    ATARI_FAMILY,
    *(f"envpool.{name}" for name in ("box2d", "highway", "jumanji", "minigrid", "pgx")),
    *OPENGL_FAMILIES,
)
MAX_EPISODE_STEPS = {
    "JumperMemory-v0": 2000
}  # where envpool's limit is too low, so that terminations would count as truncations


class Task(NamedTuple):
    """One of envpool's tasks under some options."""

    name: str
    config: Mapping[str, Any]  # options, as envpool takes them
    is_64_bit: bool  # an observation or action has 64 bits
    pool: PoolSpec


def describe(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig) -> Task:
    """Return the description of one pool. Raise ValueError if the task or an option is not supported."""
    env_id = f"envpool/{name}"
    if name not in envpool.list_all_envs():
        hint = nearest(name, envpool.list_all_envs(), "envpool/{}".format)
        raise ValueError(f"unknown environment {env_id!r}{hint}")
    is_atari = family(name) == ATARI_FAMILY
    protocol = (host_config.protocol or "dqn2015") if is_atari else ""
    known = _specify(env_id, name, {})
    if known.config.max_num_players > 1:
        raise ValueError(f"{env_id}: games of {known.config.max_num_players} players are not supported")
    given = _checked(env_id, known.config._asdict(), options)
    if "max_episode_steps" in given and not _has_time_limit(name, known.config.max_episode_steps):
        hint = "; set duration instead" if hasattr(known.config, "duration") else ""
        raise ValueError(f"max_episode_steps: envpool ignores it in {env_id}, got {given['max_episode_steps']}{hint}")
    limit = {"max_episode_steps": MAX_EPISODE_STEPS[name]} if name in MAX_EPISODE_STEPS else {}
    config: dict[str, Any] = {**PROTOCOLS.get(protocol, {}), **limit, **given}
    if not given.keys() <= (SAFE_ATARI_OPTIONS if is_atari else SAFE_OPTIONS):
        _try(env_id, name, config, given)
    threads = given.get("num_threads") or _num_threads(num_envs, host_config)  # 0 is envpool's default
    config["num_threads"] = max(threads // host_config.shard.num, 1)
    spec = _specify(env_id, name, config)
    action, start, bounds, _ = action_space(env_id, spec.action_space)
    raw, spaces = _observation(env_id, spec)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(spec.state_array_spec)]
    images = all(is_channel_first_image(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(raw))
    stack = getattr(spec.config, "stack_num", 0) if images else 0  # otherwise the last axis is not the stacked one
    action_dtype = spec.action_array_spec["action"].dtype
    pool = PoolSpec(
        env=EnvSpec(env_id, None, action, num_envs, stack),  # type: ignore[arg-type]
        raw_obs=raw,
        action_dtype=action_dtype,
        action_start=start,
        bounds=bounds,
        encode=functools.partial(encode, spaces),
        reports_game_over="info:terminated" in spec.state_array_spec,
        ends_at_life_loss=bool(config.get("episodic_life", False)),
        can_render=family(name) in RENDERED_FAMILIES,
        check_render=functools.partial(_check_opengl, env_id, name, config),
        protocol=protocol,
    )
    return Task(name, config, any(np.dtype(dtype).itemsize == 8 for dtype in (*dtypes, action_dtype)), pool)


def option_names(name: str) -> tuple[str, ...]:
    """Return the names of a task's options in envpool."""
    return tuple(_specify(f"envpool/{name}", name, {}).config._asdict())


def family(name: str) -> str:
    """Return the module of envpool that a task comes from: "envpool.atari"."""
    return envpool.registration.registry.specs[name][0]


def _has_time_limit(name: str, default: int) -> bool:
    """Return whether envpool ends episodes at `max_episode_steps`; some families ignore this option."""
    return default < 2**31 - 1 and (family(name) not in NO_TIME_LIMIT_FAMILIES or name.endswith("Sokoban-v0"))


def _num_threads(num_envs: int, host_config: HostEnvConfig) -> int:
    """Return the default number of threads for one pool on each device, summed over devices.

    One or two pools get a thread for each core, because one of two may wait while the other works. More pools share
    twice as many threads as there are cores.
    """
    share = 2 * num_cores() // max(host_config.num_async_pools, 1)
    return min(num_envs * host_config.shard.num, num_cores(), max(share, 1))


def _checked(env_id: str, defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options with the types of the defaults. Raise ValueError if a value is out of range."""
    known = tuple(name for name in defaults if name not in RESERVED_OPTIONS and name not in HIDDEN_OPTIONS)
    values = {}
    for name, given in options.items():
        if name in RESERVED_OPTIONS:
            raise ValueError(f"{name}: not an option of {env_id}, got {given}; use {RESERVED_OPTIONS[name]}")
        if name not in known:
            refuse_option(env_id, name, known)
        value = values[name] = coerce(env_id, name, given, defaults[name])
        low, high = MIN_OPTION_VALUES.get(name, -(2**31)), MAX_OPTION_VALUES.get(name, 2**31 - 1)
        if isinstance(value, int) and not low <= value <= high:
            raise ValueError(f"{name}: must be {low} to {high} for {env_id}, got {given}")
    return values


def _try(env_id: str, name: str, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError if one environment with these options fails in its first steps, in a child process."""
    reason = probe.rejection_reason(name, _as_json(config))
    if reason:
        values = ", ".join(f"{option}={value}" for option, value in given.items())
        raise ValueError(f"{env_id} cannot be made with {values}: {reason}")


def _check_opengl(env_id: str, name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError if the task draws with OpenGL and has no image, in a child process."""
    if family(name) not in OPENGL_FAMILIES:
        return
    advice = opengl.load()
    if not advice:
        reason = probe.image_failure(name, _as_json(config))
        advice = reason and f"{reason}; {opengl.INSTALL}"
    if advice:
        raise ValueError(f"{env_id} cannot be drawn: {advice}")


def _as_json(config: Mapping[str, Any]) -> str:
    """Return options for a trial with one thread."""
    return json.dumps({**config, "num_threads": 1}, sort_keys=True, default=str)


def _specify(env_id: str, name: str, config: Mapping[str, Any]) -> Any:
    """Return envpool's specification of the task."""
    try:
        qt.load_for(family(name))
        return envpool.make_spec(name, **config)
    except Exception as error:  # families without a library, or with a bad option, may raise anything
        if family(name) == qt.PROCGEN_FAMILY and isinstance(error, (ImportError, OSError)):
            remedy = f"Procgen requires Qt 5.15, from {install('procgen')}, and libGL and glib"
            raise ValueError(f"{env_id} cannot be made: {remedy} ({error.__cause__ or error})") from error
        raise ValueError(f"{env_id} cannot be made: {why(error)}") from error


def _observation(env_id: str, spec: Any) -> tuple[PyTree, PyTree]:
    """Return shapes and dtypes of one environment's observation, and gymnasium's spaces for it."""
    raw: dict[str, Any] = {}
    for name, array in spec.state_array_spec.items():
        if name.startswith("obs"):
            shape = tuple(n for n in array.shape if n != -1)  # -1 is the axis of players, and there is one player
            _put(raw, name.replace(":", ".").split("."), jax.ShapeDtypeStruct(shape, array.dtype))
    spaces = as_tree(spec.observation_space)
    parts = jax.tree.leaves(raw["obs"])
    if len(parts) == 1 and not isinstance(spaces, dict):  # a named part in a space without names
        raw["obs"] = parts[0]
    structure: Any = jax.tree.structure(raw["obs"])
    if structure != jax.tree.structure(spaces):
        raise ValueError(f"{env_id}: unsupported observation space, got {one_line(spec.observation_space)}")
    return raw["obs"], spaces


def _put(tree: dict[str, Any], path: list[str], leaf: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = leaf
