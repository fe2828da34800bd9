"""Step envpool's environments: Atari and some twenty other families, in one thread pool.

envpool resets on the step after the last one, as `types.TimeStep` requires, so its rows pass through unchanged. A
compiled program calls the pool through envpool's XLA custom calls ("ffi") or, where these do not load, through Python
("callback"). Both give the same trajectories as envpool's Python API.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import envpool
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs import spaces
from jaxrl_fast.envs.envpool import probe, tasks
from jaxrl_fast.envs.host.env import Bridge, callback_bridge
from jaxrl_fast.envs.host.pool import LazyPool, Row
from jaxrl_fast.types import PyTree
from jaxrl_fast.utils.errors import why


class EnvpoolPool:
    """n environments of one task, as `host_pool.HostPool`."""

    def __init__(self, task: tasks.Task, index: int, seeds: Sequence[int]) -> None:
        self.task, self.index = task, index
        self.envs = self._make(seeds)

    def _make(self, seeds: Sequence[int]) -> Any:
        """Return envpool's own object. An Atari environment takes a core about 0.15 s."""
        jax.devices()  # if envpool registers its calls first, a mismatched jaxlib breaks JAX's start
        config = dict(self.task.config)
        if config.get("thread_affinity_offset", -1) >= 0:  # give each pool its own cores
            config["thread_affinity_offset"] += self.index * config["num_threads"]
        if self.task.pool.can_render:
            config["render_mode"] = "rgb_array"  # free until `render` is called
        return envpool.make_gymnasium(self.task.name, **config, num_envs=self.task.pool.env.num_envs, seed=[*seeds])

    @functools.cached_property
    def calls(self) -> tuple[Any, Any]:
        """Return envpool's send (handle, action) -> handle and recv handle -> (handle, row) for compiled programs."""
        with jax.enable_x64(self.task.is_64_bit):
            _, recv, send, _ = self.envs.xla()
        return send, recv

    def reset(self) -> PyTree:
        """Return first observations of new episodes."""
        return self.envs.reset()[0]

    def send(self, action: np.ndarray) -> None:
        """Start a step."""
        self.envs.send(action)

    def recv(self) -> Row:
        """Return the row of the pending step."""
        obs, reward, terminated, truncated, info = self.envs.recv()
        return Row(obs, reward, terminated, truncated, _game_over(self.task, info))

    def reseed(self, seeds: Sequence[int]) -> None:
        """Replace the environments by new ones, because envpool takes seeds only when it makes them."""
        self.close()
        self.envs = self._make(seeds)

    def render(self) -> np.ndarray:
        """Return the first environment's screen, uint8 [H, W, 3]."""
        return np.asarray(self.envs.render(env_ids=[0]))[0]

    def close(self) -> None:
        """Release the environments."""
        self.envs = None
        self.__dict__.pop("calls", None)


def ffi_bridge(pool: LazyPool) -> Bridge:
    """Return calls of the pool by envpool's XLA custom calls. The compiled program holds the pool's address."""
    bind = functools.partial
    return Bridge(bind(_ffi_send, pool), bind(_ffi_recv, pool), bind(_ffi_step, pool), can_reseed=False)


def _ffi_send(pool: LazyPool, handle: jax.Array, action: jax.Array) -> jax.Array:
    with _enable_x64(pool):
        return pool.pool.calls[0](handle, action.astype(pool.spec.action_dtype))


def _ffi_recv(pool: LazyPool, handle: jax.Array) -> tuple[jax.Array, Row]:
    with _enable_x64(pool):
        handle, (obs, reward, terminated, truncated, info) = pool.pool.calls[1](handle)
        obs = jax.tree.map(lambda x: jax.lax.convert_element_type(x, spaces.narrow_dtype(x.dtype)), obs)
    return handle, Row(obs, reward, terminated, truncated, _game_over(pool.pool.task, info))


def _ffi_step(pool: LazyPool, handle: jax.Array, action: jax.Array) -> tuple[jax.Array, Row]:
    return _ffi_recv(pool, _ffi_send(pool, handle, action))


def _enable_x64(pool: LazyPool) -> Any:
    """Trace with 64 bits if the task has any; otherwise envpool would access memory beyond its arrays."""
    return jax.enable_x64(pool.pool.task.is_64_bit or jax.config.values["jax_enable_x64"])


def _game_over(task: tasks.Task, info: Mapping[str, Any]) -> Any:
    """Return [n] bool, separate from `terminated` because of lost lives and of time limits on the same step."""
    return info["terminated"] > 0 if task.pool.reports_game_over else None


PROBE_POOLS: list[Any] = []  # kept alive: JAX caches the program that was compiled with their address


@functools.cache
def ffi_unavailable_reason() -> str:
    """Return why envpool's XLA calls cannot be used, or "" if they can; a pool of one small environment is tried.

    On a GPU the trial runs in a child process, which may abort.
    """
    if not sys.platform.startswith("linux"):
        return "they require Linux"
    if jax.default_backend() != "cpu":
        return probe.ffi_failure()
    try:
        envs = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=[0], num_threads=1)
        PROBE_POOLS.append(envs)
        envs.reset()
        handle, _, _, step = envs.xla()
        jax.block_until_ready(jax.jit(step)(handle, jnp.zeros(1, jnp.int32)))
    except Exception as error:  # a mismatched jaxlib may raise anything
        return why(error)
    return ""


def choose_bridge(name: str) -> tuple[Any, tuple[str, ...]]:
    """Return the function that makes the bridge called "auto", "ffi" or "callback", and warnings for the user."""
    if name == "callback":
        return callback_bridge, ()
    reason = ffi_unavailable_reason()
    if reason and name == "ffi":
        raise ValueError(f"host.bridge: envpool's XLA calls do not load ({reason}), got ffi; use callback")
    if reason:
        return callback_bridge, (f"envpool is stepped through Python because its XLA calls do not load ({reason})",)
    return ffi_bridge, ()
