"""envpool's environments (Atari and some twenty other families): N emulators on the host behind one pool.

envpool resets on the step after the last one, as we do (see `types.TimeStep`), so its rows pass through as they are.
The pool is driven from inside the compiled program, by envpool's own calls ("ffi") or, where these do not load, by
calls back to Python ("callback"); both give the same trajectories, and so does envpool's Python API. The environments
may be dealt to several pools, which take actions and answer later (`types.Pools`): then one works while the policy
thinks for another. Each environment has the same seed however they are dealt.

What an agent meets is made uniform: frames are uint8 [H, W, C], other observations float32, small counts one-hot; a
lost life is the end of an episode but not of the game, and the score is that of the game, neither clipped nor cut. No
action, option or shape that would make envpool take the process down with it reaches it.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import envpool
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxrl_fast.envs import spaces
from jaxrl_fast.envs.envpool import probe, tasks
from jaxrl_fast.types import EpisodeScore, Key, PyTree, TimeStep
from jaxrl_fast.utils.errors import why


class State(NamedTuple):
    """Where N environments stand, as far as the device can know."""

    handle: jax.Array  # [8] uint8, of no meaning: each call takes the one before's, and so they keep their order
    last: tuple[jax.Array, ...]  # [n] bool of each pool: the next step begins an episode


class Pool:
    """n emulators, made when first needed.

    Compiled programs know envpool's pool by its address, so it has to outlive them: it is `KEPT` until `close`.
    """

    def __init__(self, task: tasks.Task, seed: tuple[int, ...], number: int = 0, num_pools: int = 1):
        self.task, self.seed, self.number, self.num_pools = task, seed, number, num_pools

    @functools.cached_property
    def envs(self) -> Any:
        """envpool's own object. A core makes an Atari environment in some 0.15 s."""
        jax.devices()  # before envpool registers its calls, or a wrong version of jaxlib breaks JAX's start
        num_envs = self.task.spec.num_envs
        seeds = seeds_of(self.seed, num_envs * self.num_pools)[self.number * num_envs :][:num_envs]
        shown = {"render_mode": "rgb_array"} if self.task.protocol else {}  # it costs nothing until it is asked for
        config = dict(self.task.config)
        if config.get("thread_affinity_offset", -1) >= 0:  # each pool has cores of its own
            config["thread_affinity_offset"] += self.number * config["num_threads"]
        envs = envpool.make_gymnasium(self.task.name, **config, **shown, num_envs=num_envs, seed=seeds)
        KEPT.append(envs)
        return envs

    @functools.cached_property
    def calls(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """envpool's send (handle, action) -> handle and recv handle -> (handle, row), for compiled programs."""
        with jax.enable_x64(self.task.wide):
            _, recv, send, _ = self.envs.xla()
        return send, recv

    def close(self) -> None:
        """The emulators are given up. No program that was compiled with their address may run afterwards."""
        if "envs" in self.__dict__:
            KEPT.remove(self.envs)
            del self.envs
        self.__dict__.pop("calls", None)

    def reseed(self, number: int) -> None:
        """A new pool takes the place of this one, with chance by a number. Only for programs that ask by callback."""
        self.seed = *self.seed[:2], number
        self.close()

    def render(self) -> np.ndarray:
        """[H, W, 3] uint8: the screen of the first environment, in its own colors."""
        return np.asarray(self.envs.render(env_ids=[0]))[0]

    def reset(self) -> PyTree:
        """First observations of new games, on the host."""
        return _narrow(self.envs.reset()[0])

    def send(self, action: Any) -> None:
        """Actions, from the host."""
        self.envs.send(np.asarray(action).astype(self.task.action_dtype))

    def receive(self) -> Any:
        """A row (obs, reward, terminated, truncated, game over), on the host."""
        obs, *ends, info = self.envs.recv()
        return (_narrow(obs), *ends, np.asarray(_game_over(self.task, info)))


KEPT: list[Any] = []  # pools that compiled programs may know


def open_pools(pools: tuple[Pool, ...]) -> None:
    """Makes the emulators, which takes long where they are many."""
    for pool in pools:
        _ = pool.envs


def close_pools(pools: tuple[Pool, ...]) -> None:
    """Gives the emulators up."""
    for pool in pools:
        pool.close()


def reseed(pools: tuple[Pool, ...], number: int) -> None:
    """New games, and new chance by a number, behind the same functions."""
    for pool in pools:
        pool.reseed(number)


def reset(pools: tuple[Pool, ...], key: Key) -> tuple[State, TimeStep]:
    """First observations of N new games. The chance in them is the pools', which were seeded when they were made."""
    del key
    task, num_envs = pools[0].task, pools[0].task.spec.num_envs
    shapes = jax.ShapeDtypeStruct((8,), jnp.uint8), tasks.raw_obs(task)
    zeros = functools.partial(jnp.zeros, num_envs)
    handle, rows = jnp.zeros(8, jnp.uint8), []
    for pool in pools:
        handle, obs = io_callback(lambda handle, pool=pool: (handle, pool.reset()), shapes, handle)
        game = EpisodeScore(zeros(jnp.float32), zeros(bool)) if task.lives else ()
        rows.append(TimeStep(tasks.encode(task, obs), zeros(jnp.float32), jnp.ones(num_envs), zeros(bool), game))
    return State(handle, tuple(row.last for row in rows)), _join(rows)


def step(pools: tuple[Pool, ...], path: str, state: State, action: jax.Array) -> tuple[State, TimeStep]:
    """One step of all; where the last one ended an episode, the first row of the next."""
    spec = pools[0].task.spec
    spaces.check_action(spec._replace(num_envs=spec.num_envs * len(pools)), action)
    rows = []
    for i, actions in enumerate(jnp.split(action, len(pools))):
        state = send(pools, path, i, state, actions)
    for i in range(len(pools)):
        state, row = receive(pools, path, i, state)
        rows.append(row)
    return state, _join(rows)


def send(pools: tuple[Pool, ...], path: str, i: int, state: State, action: jax.Array) -> State:
    """Pool i gets actions [n, ...] and begins to work."""
    pool = pools[i]
    spaces.check_action(pool.task.spec, action)
    by = _send_by_ffi if path == "ffi" else _send_by_callback
    return state._replace(handle=by(pool, state.handle, to_env_action(pool.task, action)))


def receive(pools: tuple[Pool, ...], path: str, i: int, state: State) -> tuple[State, TimeStep]:
    """What came of the actions that pool i was sent.

    A game that is over on the very step that time runs out is called truncated by envpool; Atari says it besides.
    """
    pool, task = pools[i], pools[i].task
    by = _receive_by_ffi if path == "ffi" else _receive_by_callback
    handle, (obs, reward, terminated, truncated, over) = by(pool, state.handle)
    reward = jnp.where(state.last[i], 0.0, reward)
    died = terminated | over
    timestep = TimeStep(
        obs=spaces.readable(died, tasks.encode(task, obs)),
        reward=reward,
        discount=1.0 - died.astype(jnp.float32),
        last=died | truncated,
        score=EpisodeScore(reward, over | truncated) if task.lives else (),
    )
    return State(handle, (*state.last[:i], timestep.last, *state.last[i + 1 :])), timestep


def _join(rows: list[TimeStep]) -> TimeStep:
    """[N, ...] of all pools' [n, ...]."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *rows) if len(rows) > 1 else rows[0]


def to_env_action(task: tasks.Task, action: jax.Array) -> jax.Array:
    """Agents' actions [N, ...] as envpool has them, int32 or float32."""
    return spaces.to_env_action(task.spec, task.bounds, action) + task.action_start


def _send_by_ffi(pool: Pool, handle: jax.Array, action: jax.Array) -> jax.Array:
    """envpool's own call. Where it has 64 bits it is traced with them, or it would read and write beyond its arrays."""
    with _wide(pool.task):
        return pool.calls[0](handle, action.astype(pool.task.action_dtype))


def _receive_by_ffi(pool: Pool, handle: jax.Array) -> tuple[jax.Array, Any]:
    with _wide(pool.task):
        handle, (obs, *ends, info) = pool.calls[1](handle)
        obs = jax.tree.map(lambda x: jax.lax.convert_element_type(x, tasks.narrow_dtype(x.dtype)), obs)
    return handle, (obs, *ends, _game_over(pool.task, info))


def _wide(task: tasks.Task) -> Any:
    return jax.enable_x64(task.wide or jax.config.values["jax_enable_x64"])


def _send_by_callback(pool: Pool, handle: jax.Array, action: jax.Array) -> jax.Array:
    """By way of Python."""

    def call(handle, action):
        pool.send(action)
        return handle

    return io_callback(call, jax.ShapeDtypeStruct((8,), jnp.uint8), handle, action)


def _receive_by_callback(pool: Pool, handle: jax.Array) -> tuple[jax.Array, Any]:
    task = pool.task
    number, flag = (jax.ShapeDtypeStruct((task.spec.num_envs,), dtype) for dtype in (jnp.float32, bool))
    shapes = jax.ShapeDtypeStruct((8,), jnp.uint8), (tasks.raw_obs(task), number, flag, flag, flag)
    return io_callback(lambda handle: (handle, pool.receive()), shapes, handle)


def seeds_of(seed: tuple[int, ...], num_envs: int) -> list[int]:
    """A seed for each environment, all different. envpool's own, seed + i, are the same for most of two pools."""
    chance = np.random.default_rng(seed)
    found: dict[int, None] = {}
    while len(found) < num_envs:
        found |= dict.fromkeys(chance.integers(2**31, size=num_envs).tolist())
    return list(found)[:num_envs]


@functools.cache
def why_no_ffi() -> str:
    """Why envpool's own calls cannot be used here; "" where they can. A pool of one small environment is tried.

    On another device than a CPU it is tried in another process, which may die of it.
    """
    if not sys.platform.startswith("linux"):
        return "they are for Linux only"
    if jax.default_backend() != "cpu":
        return probe.why_no_calls()
    try:
        envs = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=[0], num_threads=1)
        KEPT.append(envs)
        envs.reset()
        handle, _, _, step = envs.xla()
        jax.block_until_ready(jax.jit(step)(handle, jnp.zeros(1, jnp.int32)))
    except Exception as error:  # whatever a wrong version of jaxlib makes of it
        return why(error)
    return ""


def choose_path(wanted: str) -> tuple[str, tuple[str, ...]]:
    """How the pool is stepped, and what its user should be warned of."""
    if wanted == "callback":
        return wanted, ()
    why = why_no_ffi()
    if why and wanted == "ffi":
        raise ValueError(f"--host-bridge ffi: envpool's calls do not load here ({why}); callback works")
    if why:
        return "callback", (f"envpool is stepped through Python, for its own calls do not load here ({why})",)
    return "ffi", ()


def _game_over(task: tasks.Task, info: Mapping[str, Any]) -> Any:
    """[N] bool: what is told besides, for a lost life is no end of the game, and time may run out as it ends."""
    return info["terminated"] > 0 if task.says_over else np.zeros(task.spec.num_envs, bool)


def _narrow(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.asarray(x, tasks.narrow_dtype(x.dtype)), tree)
