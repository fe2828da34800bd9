"""envpool's environments (Atari and some twenty other families): N emulators on the host behind one pool.

envpool resets on the step after the last one, as we do (see `types.TimeStep`), so its rows pass through as they are.
The pool is stepped from inside the compiled program, by envpool's own calls ("ffi") or, where these do not load, by a
call back to Python ("callback"); both give the same trajectories, and so does envpool's Python API.

What an agent meets is made uniform: frames are uint8 [H, W, C], other observations float32, small counts one-hot; a
lost life is the end of an episode but not of the game, and the score is that of the game, neither clipped nor cut. No
action, option or shape that would make envpool take the process down with it reaches it.
"""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import envpool
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxrl_fast import types
from jaxrl_fast.envs import inputs
from jaxrl_fast.spelling import nearest
from jaxrl_fast.types import Conditions, Env, EnvSpec, Game, Key, PyTree, TimeStep

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
}
HIDDEN = ("max_num_players", "base_path", "gym_reset_return_info", "zero_discount_on_life_loss", "task")
LEAST = {  # what envpool takes without looking, and may crash on if it is less
    **dict.fromkeys(("stack_num", "frame_skip", "noop_max", "max_episode_steps", "img_height", "img_width"), 1),
    **dict.fromkeys(("num_threads",), 0),
    **dict.fromkeys(("thread_affinity_offset", "mode", "difficulty"), -1),
}
MOST = {"num_threads": 1024, "thread_affinity_offset": 1023, "img_height": 1024, "img_width": 1024}
MOST |= {"stack_num": 64, "frame_skip": 1000, "noop_max": 10_000, "mode": 1000, "difficulty": 1000}
SWITCHES = ("full_action_space", "use_fire_reset", "use_inter_area_resize", "gray_scale")
MOST_ONE_HOT = 1024  # a count with more values than this is one number
SECONDS_EACH = 0.15  # that making an Atari environment takes
MANY = 128  # of them are worth a word


class Task(NamedTuple):
    """One of envpool's environments, and how it is to be driven."""

    name: str
    config: Mapping[str, Any]  # options, as envpool takes them
    action_dtype: Any  # as envpool wants it
    action_start: int  # the least discrete action
    bounds: inputs.Bounds
    raw: PyTree  # shapes and dtypes of one environment's observation, as envpool gives it
    spaces: PyTree  # gymnasium's spaces of the same
    protocol: str  # of Atari
    lives: bool  # a lost life ends an episode
    says_over: bool  # whether the game is over is told besides
    wide: bool  # something in it has 64 bits
    spec: EnvSpec


class State(NamedTuple):
    """Where N environments stand, as far as the device can know."""

    handle: jax.Array  # orders the calls: each takes the one before's
    last: jax.Array  # [N] bool: the next step begins an episode


class Pool:
    """N emulators, made when first needed.

    Compiled programs know envpool's pool by its address, so it has to outlive them: it is never given up (`KEPT`).
    """

    def __init__(self, task: Task, seed: tuple[int, ...]):
        self.task, self.seed = task, seed

    @functools.cached_property
    def envs(self) -> Any:
        """envpool's own object. An Atari environment takes some 0.15 s."""
        jax.devices()  # before envpool registers its calls, or a wrong version of jaxlib breaks JAX's start
        seeds = seeds_of(self.seed, self.task.spec.num_envs)
        shown = {"render_mode": "rgb_array"} if self.task.protocol else {}  # it costs nothing until it is asked for
        envs = envpool.make_gymnasium(self.task.name, **self.task.config, **shown, num_envs=len(seeds), seed=seeds)
        KEPT.append(envs)
        return envs

    @functools.cached_property
    def calls(self) -> tuple[np.ndarray, Callable[..., Any]]:
        """A handle [8] uint8, and envpool's step (handle, action) -> (handle, row) for compiled programs."""
        with jax.enable_x64(self.task.wide):
            handle, _, _, step = self.envs.xla()
        return handle, step

    def renew(self, number: int) -> None:
        """A new pool takes the place of this one, with chance by a number. Only for programs that ask by callback."""
        self.seed = *self.seed[:2], number
        if "envs" in self.__dict__:
            KEPT.remove(self.envs)
            del self.envs

    def picture(self) -> np.ndarray:
        """[H, W, 3] uint8: the screen of the first environment, in its own colours."""
        return np.asarray(self.envs.render(env_ids=[0]))[0]

    def handle(self, path: str) -> np.ndarray:
        """[8] uint8"""
        return self.calls[0] if path == "ffi" else np.zeros(8, np.uint8)

    def reset(self) -> PyTree:
        """First observations of new games, on the host."""
        return _narrow(self.envs.reset()[0])

    def step(self, action: Any) -> Any:
        """A row (obs, reward, terminated, truncated, game over), on the host."""
        obs, *ends, info = self.envs.step(np.asarray(action).astype(self.task.action_dtype))
        return (_narrow(obs), *ends, np.asarray(_game_over(self.task, info)))


KEPT: list[Any] = []  # pools, to the end of the process


def registered() -> tuple[str, ...]:
    return tuple(envpool.list_all_envs())


def make(name: str, num_envs: int, options: Mapping[str, Any], conditions: Conditions | None = None) -> Env:
    """N environments of one of envpool's tasks. The pool itself is made when it is first needed."""
    conditions = conditions or Conditions()
    task = describe(name, num_envs, options, conditions)
    path, notes = _choose_path(conditions.path)
    notes += _warnings(task)
    drive = Pool(task, conditions.seed), path
    return Env(
        functools.partial(reset, *drive),
        functools.partial(step, *drive),
        task.spec,
        on_device=False,
        notes=notes,
        protocol=task.protocol,
        picture=drive[0].picture if task.protocol else None,
        own_action=functools.partial(own_action, task),
        renew=drive[0].renew if path == "callback" else None,
    )


def reset(pool: Pool, path: str, key: Key) -> tuple[State, TimeStep]:
    """First observations of N new games. The chance in them is the pool's, which was seeded when it was made."""
    del key
    task, num_envs = pool.task, pool.task.spec.num_envs
    shapes = jax.ShapeDtypeStruct((8,), jnp.uint8), raw_obs(task)
    handle, obs = io_callback(lambda: (pool.handle(path), pool.reset()), shapes)
    zeros = functools.partial(jnp.zeros, num_envs)
    game = Game(zeros(jnp.float32), zeros(bool)) if task.lives else ()
    timestep = TimeStep(encode(task, obs), zeros(jnp.float32), jnp.ones(num_envs), zeros(bool), game)
    return State(handle, zeros(bool)), timestep


def step(pool: Pool, path: str, state: State, action: jax.Array) -> tuple[State, TimeStep]:
    """One step of all; where the last one ended an episode, the first row of the next.

    A game that is over on the very step that time runs out is called truncated by envpool; Atari says it besides.
    """
    task = pool.task
    inputs.check_action(task.spec, action)
    action = own_action(task, action)
    advance = _step_by_ffi if path == "ffi" else _step_by_callback
    handle, (obs, reward, terminated, truncated, over) = advance(pool, state.handle, action)
    reward = jnp.where(state.last, 0.0, reward)
    died = terminated | over
    timestep = TimeStep(
        obs=encode(task, obs),
        reward=reward,
        discount=1.0 - died.astype(jnp.float32),
        last=died | truncated,
        game=Game(reward, over | truncated) if task.lives else (),
    )
    return State(handle, timestep.last), timestep


def own_action(task: Task, action: jax.Array) -> jax.Array:
    """Agents' actions [N, ...] as envpool has them, int32 or float32."""
    return inputs.to_env_action(task.spec, task.bounds, action) + task.action_start


def _step_by_ffi(pool: Pool, handle: jax.Array, action: jax.Array) -> tuple[jax.Array, Any]:
    """envpool's own call. Where it has 64 bits it is traced with them, or it would write beyond its arrays."""
    task = pool.task
    with jax.enable_x64(task.wide or jax.config.values["jax_enable_x64"]):
        handle, row = pool.calls[1](handle, action.astype(task.action_dtype))
        obs, reward, terminated, truncated, info = row
        obs = jax.tree.map(lambda x: jax.lax.convert_element_type(x, _narrow_dtype(x.dtype)), obs)
    return handle, (obs, reward, terminated, truncated, _game_over(task, info))


def _step_by_callback(pool: Pool, handle: jax.Array, action: jax.Array) -> tuple[jax.Array, Any]:
    """By way of Python. Each call takes the handle that the one before gave, so they keep their order."""
    task = pool.task
    number, flag = (jax.ShapeDtypeStruct((task.spec.num_envs,), dtype) for dtype in (jnp.float32, bool))
    shapes = jax.ShapeDtypeStruct((8,), jnp.uint8), (raw_obs(task), number, flag, flag, flag)
    return io_callback(lambda handle, action: (handle, pool.step(action)), shapes, handle, action)


def raw_obs(task: Task) -> PyTree:
    """What envpool gives for N environments, narrowed to 32 bits."""
    shape = lambda leaf: jax.ShapeDtypeStruct((task.spec.num_envs, *leaf.shape), _narrow_dtype(leaf.dtype))
    return jax.tree.map(shape, task.raw)


def encode(task: Task, obs: PyTree) -> PyTree:
    """Observations [N, ...] as agents meet them."""
    return jax.tree.map(_encode, obs, task.spaces)


def _encode(x: jax.Array, space: Any) -> jax.Array:
    num = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 0
    if 0 < num <= MOST_ONE_HOT:
        return jax.nn.one_hot(x - int(space.start), num, dtype=jnp.float32)
    if x.ndim == 4 and x.dtype == jnp.uint8 and x.shape[1] < min(x.shape[2:]):
        return jnp.moveaxis(x, 1, -1)
    if x.ndim == 2 and x.dtype == jnp.uint8:  # a text: bytes become [0, 1)
        return x.astype(jnp.float32) / 256
    x = x[:, None] if x.ndim == 1 else x
    return x if x.dtype in (jnp.bool_, jnp.uint8) else x.astype(jnp.float32)


def describe(name: str, num_envs: int, options: Mapping[str, Any], conditions: Conditions) -> Task:
    """What envpool says of a task under these options. ValueError of one sentence where it cannot be driven."""
    env_id = f"envpool/{name}"
    if name not in envpool.list_all_envs():
        raise ValueError(f"unknown environment {env_id!r}{nearest(name, registered())}")
    atari = family(name) == FAMILY
    if conditions.protocol and not atari:
        raise ValueError(f"--protocol {conditions.protocol}: {env_id} is no game of Atari, for which protocols are")
    protocol = conditions.protocol or ("dqn2015" if atari else "")
    known = _specify(env_id, name, {})
    given = _checked(env_id, known.config._asdict(), options)
    config = {"num_threads": min(num_envs, _cores()), **PROTOCOLS.get(protocol, {}), **given}
    spec = _specify(env_id, name, config)
    if spec.config.max_num_players > 1:
        raise ValueError(f"{env_id} cannot be driven: it is a game of {spec.config.max_num_players} players")
    action, start, bounds = _action(env_id, spec)
    raw, spaces = _observation(env_id, spec)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(spec.state_array_spec)]
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
        spec=EnvSpec(env_id, None, action, num_envs, getattr(spec.config, "stack_num", 0)),  # type: ignore[arg-type]
    )
    obs = jax.eval_shape(functools.partial(encode, task), raw_obs(task))
    obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), obs)
    return task._replace(spec=task.spec._replace(obs=obs))


def family(name: str) -> str:
    """The module of envpool that a task comes from: "envpool.atari"."""
    return envpool.registration.registry.specs[name][0]


def seeds_of(seed: tuple[int, ...], num_envs: int) -> list[int]:
    """A seed for each environment, all different. envpool's own, seed + i, are the same for most of two pools."""
    chance = np.random.default_rng(seed)
    found: dict[int, None] = {}
    while len(found) < num_envs:
        found |= dict.fromkeys(chance.integers(2**31, size=num_envs).tolist())
    return list(found)[:num_envs]


@functools.cache
def why_no_ffi() -> str:
    """Why envpool's own calls cannot be used here; "" where they can. A pool of one small environment is tried."""
    if not sys.platform.startswith("linux"):
        return "they are for Linux only"
    jax.devices()
    try:
        envs = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=[0], num_threads=1)
        KEPT.append(envs)
        envs.reset()
        handle, _, _, step = envs.xla()
        jax.block_until_ready(jax.jit(step)(handle, jnp.zeros(1, jnp.int32)))
    except Exception as error:  # whatever a wrong version of jaxlib makes of it
        return inputs.one_line(error)
    return ""


def _choose_path(wanted: str) -> tuple[str, tuple[str, ...]]:
    """How the pool is stepped, and what there is to say about it."""
    if wanted == "callback":
        return wanted, ()
    why = why_no_ffi()
    if why and wanted == "ffi":
        raise ValueError(f"--pool-path ffi: envpool's calls do not load here ({why}); callback works")
    if why:
        return "callback", (f"envpool is stepped through Python, for its own calls do not load here ({why})",)
    return "ffi", ()


def _warnings(task: Task) -> tuple[str, ...]:
    """More than is sane, though it can be done."""
    found: tuple[str, ...] = ()
    num_envs, num_threads = task.spec.num_envs, task.config["num_threads"]
    if num_threads > 2 * _cores():
        found += (f"num_threads {num_threads} are more than twice the {_cores()} cores here, which slows them all",)
    if task.protocol and num_envs >= MANY:
        found += (f"{num_envs} emulators take some {num_envs * SECONDS_EACH:.0f} s to make",)
    return found


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _checked(env_id: str, defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options with the types of the defaults, none beyond what envpool survives."""
    known = tuple(name for name in defaults if name not in OURS and name not in HIDDEN)
    values = {}
    for name, given in options.items():
        if name in OURS:
            raise ValueError(f"{name}={given} for {env_id}: that is said by {OURS[name]} here")
        if name not in known:
            inputs.refuse_option(env_id, name, known)
        value = values[name] = inputs.coerce(env_id, name, given, defaults[name])
        least, most = LEAST.get(name, -(2**31)), MOST.get(name, 2**31 - 1)
        if isinstance(value, int) and not least <= value <= most:
            raise ValueError(f"{name}={given} for {env_id}: {least} to {most} is wanted")
    return values


def _specify(env_id: str, name: str, config: Mapping[str, Any]) -> Any:
    try:
        return envpool.make_spec(name, **config)
    except Exception as error:  # whatever envpool says to a family that lacks something, or to an option
        raise ValueError(f"{env_id} cannot be made: {inputs.one_line(error)}") from error


def _action(env_id: str, spec: Any) -> tuple[types.Discrete | types.Box, int, inputs.Bounds]:
    """The action space for agents, the least discrete action, and the true bounds of a continuous one."""
    space = spec.action_space
    refused = f"{env_id} cannot be driven: its action space is {space}"
    if isinstance(space, gymnasium.spaces.Discrete):
        return types.Discrete(int(space.n)), int(space.start), ()
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"{refused}, and not one Discrete or one Box of floats")
    return types.Box(space.shape or (1,)), 0, inputs.true_bounds(refused, space.low, space.high, space.shape)


def _observation(env_id: str, spec: Any) -> tuple[PyTree, PyTree]:
    """Shapes and dtypes of one environment's observation, and gymnasium's spaces for it."""
    raw: dict[str, Any] = {}
    for name, array in spec.state_array_spec.items():
        if name.startswith("obs"):
            shape = tuple(n for n in array.shape if n != -1)  # -1: one of each player, and there is one
            _put(raw, name.replace(":", ".").split("."), jax.ShapeDtypeStruct(shape, array.dtype))
    spaces = _unpacked(spec.observation_space)
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


def _game_over(task: Task, info: Mapping[str, Any]) -> Any:
    """[N] bool: what is told besides, for a lost life is no end of the game, and time may run out as it ends."""
    return info["terminated"] > 0 if task.says_over else np.zeros(task.spec.num_envs, bool)


def _narrow(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.asarray(x, _narrow_dtype(x.dtype)), tree)


def _narrow_dtype(dtype: Any) -> Any:
    """Of at most 32 bits."""
    return {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}.get(np.dtype(dtype).name, dtype)
