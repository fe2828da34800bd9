"""Drive pools of host environments from a compiled program, as a `types.Env`."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs import spaces
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.host.pool import LazyPool, OpenPool, PoolSpec, Row, first_done, of_all, open_all, raw_rows
from jaxrl_fast.envs.schedules import Schedule, info
from jaxrl_fast.kernels.host_call import ERRORS, HANDLE, call_python
from jaxrl_fast.types import Env, EpisodeScore, Key, Parallelism, PyTree, TimeStep, View
from jaxrl_fast.types.host import AsyncPools, HostEnv


class State(NamedTuple):
    """The device's state of N host environments."""

    handle: jax.Array  # as HANDLE: keeps calls in order
    last: tuple[jax.Array, ...]  # [n] bool for each pool: the next step resets


class Bridge(NamedTuple):
    """The functions by which a compiled program calls one pool."""

    send: Callable[[jax.Array, jax.Array], jax.Array]  # (handle, action [n, ...]) -> handle
    recv: Callable[[jax.Array], tuple[jax.Array, Row]]  # handle -> (handle, row)
    step: Callable[[jax.Array, jax.Array], tuple[jax.Array, Row]]  # (handle, action) -> (handle, row)
    can_reseed: bool = True  # False: a compiled program works with one pool only


class Driver(NamedTuple):
    """The pools of one shard."""

    spec: PoolSpec  # of each pool
    pools: tuple[LazyPool, ...]
    bridges: tuple[Bridge, ...]


def make_env(
    spec: PoolSpec,
    open_pool: OpenPool,
    config: HostEnvConfig,
    make_bridge: Callable[[LazyPool], Bridge] | None = None,
    warnings: tuple[str, ...] = (),
    num_workers: int = 0,
    schedules: Mapping[str, Schedule] | None = None,
) -> Env:
    """Return the environments of one shard; no pool is opened yet.

    Args:
        spec: describes one pool of `num_envs_per_pool` environments.
        open_pool: opens one with given seeds.
        config: the run's seed, number of pools and shard.
        make_bridge: how a compiled program calls a pool; by default one Python callback for each step.
        warnings: one sentence each, printed before training.
        num_workers: processes that step each pool.
        schedules: of options by name.
    """
    if config.bridge == "ffi" and make_bridge is None:
        raise ValueError(f"host.bridge: {spec.env.id} has no XLA calls, got ffi; use callback")
    obs = jax.eval_shape(functools.partial(_seen, spec), raw_rows(spec).obs)
    obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), obs)
    spec = spec._replace(env=spec.env._replace(obs=obs))
    own = (lambda raw: raw) if spec.mask_is_part else spec.visible  # a mask in `info` is not part of an observation
    num_pools, total = max(config.num_async_pools, 1), config.shard.num * max(config.num_async_pools, 1)
    first = config.shard.rank * num_pools
    pools = tuple(LazyPool(spec, open_pool, config.seed, i, total) for i in range(first, first + num_pools))
    driver = Driver(spec, pools, tuple(map(make_bridge or callback_bridge, pools)))
    return Env(
        functools.partial(reset, driver),
        functools.partial(step, driver),
        spec.env._replace(num_envs=spec.env.num_envs * num_pools),
        _host(driver, config, num_workers)._replace(schedules=schedules or {}),
        View(
            functools.partial(to_env_action, spec),
            spec.action_tree,
            spaces.raw_spec(own(spec.raw_obs), obs),
            functools.partial(_seen, spec) if spec.mask_is_part else spec.encode,
            spec.action_mask if spec.mask_is_part else None,
            info=_info(config, num_workers) + info(schedules or {}),
            warnings=warnings,
        ),
        Parallelism(num_pools=1 if config.ahead else num_pools),
    )


def _host(driver: Driver, config: HostEnvConfig, num_workers: int) -> HostEnv:
    """Return the functions of all pools that the host calls, and the halves of a step."""
    spec, pools, _ = driver
    halves = AsyncPools(
        len(pools),
        functools.partial(send, driver),
        functools.partial(receive, driver),
        config.overlap,
        config.ahead,
        functools.partial(wait, driver, config.workers.timeout or None),
    )
    can_reseed = all(bridge.can_reseed for bridge in driver.bridges)
    of_pools = of_all(dict(enumerate(pools)))
    together = of_pools if can_reseed else of_pools | {"reseed": lambda number: None}
    if config.ahead:
        together["open"] = functools.partial(open_all, pools)
    return HostEnv(
        **together,
        render=pools[0].render if spec.can_render else None,
        check_render=spec.check_render,
        protocol=spec.protocol,
        num_workers=num_workers,
        pools=halves if config.num_async_pools else None,
    )


def reset(driver: Driver, key: Key) -> tuple[State, TimeStep]:
    """Start N episodes. Pools were seeded when they were opened, so the key is not used."""
    del key
    spec, num_envs = driver.spec, driver.spec.env.num_envs
    zeros, ones = functools.partial(jnp.zeros, num_envs), jnp.ones(num_envs)
    handle, rows = jnp.zeros(HANDLE.shape, HANDLE.dtype), []
    for pool in driver.pools:
        handle, obs = call_python(pool.reset, pool.rows.obs, handle)
        score = EpisodeScore(zeros(jnp.float32), zeros(bool)) if spec.ends_at_life_loss else None
        rows.append(TimeStep(_seen(spec, obs), zeros(jnp.float32), ones, zeros(bool), score, _mask(spec, obs)))
    return State(handle, tuple(row.last for row in rows)), _join(rows)


def step(driver: Driver, state: State, action: jax.Array) -> tuple[State, TimeStep]:
    """Take a step in all N environments; an environment whose last step ended an episode resets."""
    spec, num_pools = driver.spec, len(driver.pools)
    spaces.check_action(spec.env._replace(num_envs=spec.env.num_envs * num_pools), action)
    if num_pools == 1:
        handle, row = driver.bridges[0].step(state.handle, _action(spec, state.last[0], action))
        return _follow(driver, 0, state, handle, row)
    for i, actions in enumerate(jnp.split(action, num_pools)):
        state = send(driver, i, state, actions)
    rows = []
    for i in range(num_pools):
        state, timestep = receive(driver, i, state)
        rows.append(timestep)
    return state, _join(rows)


def send(driver: Driver, i: int, state: State, action: jax.Array) -> State:
    """Start a step of pool i with actions [n, ...]."""
    spaces.check_action(driver.spec.env, action)
    return state._replace(handle=driver.bridges[i].send(state.handle, _action(driver.spec, state.last[i], action)))


def receive(driver: Driver, i: int, state: State) -> tuple[State, TimeStep]:
    """Wait for the step of pool i."""
    return _follow(driver, i, state, *driver.bridges[i].recv(state.handle))


def wait(driver: Driver, timeout_s: float | None, sent: jax.Array) -> jax.Array:
    """Wait until the step of at least one pool is done, of those whose action is sent; return which are: bool [num]."""
    first = lambda sent: first_done(driver.pools, sent, timeout_s)
    return call_python(first, sent, jnp.zeros(HANDLE.shape, HANDLE.dtype), sent)[1]


def _follow(driver: Driver, i: int, state: State, handle: jax.Array, row: Row) -> tuple[State, TimeStep]:
    """Return the state and time step after a row of pool i.

    If a backend reports both a truncation and the end of the game, the step is terminated: its discount is 0.
    """
    spec = driver.spec
    reward = jnp.where(state.last[i], 0.0, row.reward)
    game_over = row.game_over if spec.reports_game_over else jnp.zeros(spec.env.num_envs, bool)
    terminated = row.terminated | game_over
    timestep = TimeStep(
        obs=spaces.readable(terminated, _seen(spec, row.obs)),
        reward=reward,
        discount=1.0 - terminated.astype(jnp.float32),
        last=terminated | row.truncated,
        score=EpisodeScore(reward, game_over | row.truncated) if spec.ends_at_life_loss else None,
        action_mask=_mask(spec, row.obs),
    )
    return State(handle, (*state.last[:i], timestep.last, *state.last[i + 1 :])), timestep


def _seen(spec: PoolSpec, raw: PyTree) -> PyTree:
    """Return raw observations [n, ...] as agents see them."""
    return spec.encode(spec.visible(raw))


def _mask(spec: PoolSpec, raw: PyTree) -> PyTree:
    """Return the action mask in raw observations, bool [n, mask_size], or None."""
    return spec.action_mask(raw) if spec.action_mask else None


def to_env_action(spec: PoolSpec, action: jax.Array) -> jax.Array:
    """Return agents' actions [n, ...] within the environment's true bounds, int32 or float32."""
    scaled = spaces.to_env_action(spec.env, spec.bounds, action)
    return scaled + np.broadcast_to(np.asarray(spec.action_start, scaled.dtype), scaled.shape)


def _action(spec: PoolSpec, last: jax.Array, action: jax.Array) -> jax.Array:
    """Return the actions that a pool gets."""
    action = to_env_action(spec, action)
    return jnp.where(last, 0, action) if spec.noop_after_last else action


def callback_bridge(pool: LazyPool) -> Bridge:
    """Call the pool through Python."""
    bind = functools.partial
    return Bridge(bind(_callback_send, pool), bind(_callback_recv, pool), bind(_callback_step, pool))


def _callback_send(pool: LazyPool, handle: jax.Array, action: jax.Array) -> jax.Array:
    return call_python(pool.send, None, handle, action)[0]


def _callback_recv(pool: LazyPool, handle: jax.Array) -> tuple[jax.Array, Row]:
    return call_python(pool.recv, pool.rows, handle)


def _callback_step(pool: LazyPool, handle: jax.Array, action: jax.Array) -> tuple[jax.Array, Row]:
    def both(action: Any) -> Row:
        pool.send(action)
        return pool.recv()

    return call_python(both, pool.rows, handle, action)


@contextlib.contextmanager
def original_errors() -> Iterator[None]:
    """Raise the original error of a host environment, with its traceback, instead of JAX's JaxRuntimeError.

    JAX's own report of it is not logged.
    """
    logger, is_other = logging.getLogger("jax._src.callback"), lambda record: not ERRORS
    ERRORS.clear()
    logger.addFilter(is_other)
    try:
        yield
    except jax.errors.JaxRuntimeError:
        if not ERRORS:
            raise
        raise ERRORS[0] from ERRORS[0].__cause__
    finally:
        logger.removeFilter(is_other)
        ERRORS.clear()


def _join(rows: list[TimeStep]) -> TimeStep:
    """Return [N, ...] from [n, ...] of each pool."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *rows) if len(rows) > 1 else rows[0]


def _info(config: HostEnvConfig, num_workers: int) -> tuple[str, ...]:
    """Return sentences about the age of the policy that acts, and about worker processes."""
    one, several = ("Ray actor", "Ray actors") if config.workers.ray else ("worker process", "worker processes")
    steps = f"{num_workers} {several} step" if num_workers > 1 else f"1 {one} steps"
    workers = (f"{steps} the environments of each pool",) if num_workers else ()
    num_pools = config.num_async_pools
    if config.ahead:
        old = f"{config.ahead} updates old" if config.ahead > 1 else "1 update old"
        return (f"{num_pools} {several if num_pools > 1 else one} act by a policy that is {old}",)
    if not num_pools:
        return workers
    pools = f"{num_pools} pools step" if num_pools > 1 else "1 pool steps"
    if config.overlap:
        lag = "a rollout is collected during the update before it, by a policy that is one update old"
    else:
        lag = "the first action of a rollout is chosen by the policy before the last update"
    return (f"{pools} asynchronously on each device: {lag}", *workers)
