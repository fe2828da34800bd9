"""Define a pool of host environments: the methods that a backend implements, and its declarations about rows.

`host_env.make_env` builds an environment from a `PoolSpec` and a function that opens a `HostPool`. The seed of each
environment, and so its trajectory, does not depend on how environments are split into pools and shards.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import connection
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs import spaces
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.types import EnvSpec, PyTree
from jaxrl_fast.types.host import AtariProtocol


class Row(NamedTuple):
    """One step of the n environments of a pool, as numpy arrays.

    The step after a terminated or truncated one ignores its action and returns the first observation of the next
    episode (gymnasium's NEXT_STEP). Its flags are False and its reward is ignored.
    """

    obs: PyTree  # [n, ...] with the shapes and dtypes of `PoolSpec.raw_obs`
    reward: Any  # [n]
    terminated: Any  # [n] bool: the state is terminal
    truncated: Any  # [n] bool: the time limit was reached
    game_over: Any = None  # [n] bool, required where `PoolSpec.reports_game_over`


class HostPool(Protocol):
    """n environments on the host that step together.

    An exception in a method ends the program that called it; `host_env.original_errors` raises it unchanged.
    """

    def reset(self) -> PyTree:
        """Discard a pending step, start n episodes, and return their first observations [n, ...]."""

    def send(self, action: np.ndarray) -> None:
        """Start a step with actions [n, ...] of `PoolSpec.action_dtype`, within the true bounds."""

    def recv(self) -> Row:
        """Wait for the pending step and return its row."""

    def reseed(self, seeds: Sequence[int]) -> None:
        """Discard a pending step and give each environment a new seed; a reset follows."""

    def render(self) -> np.ndarray:
        """Return the first environment's image, uint8 [H, W, 3]; only called where `PoolSpec.can_render`."""

    def close(self) -> None:
        """Release the environments; no call follows."""


class SavablePool(HostPool, Protocol):
    """A pool whose environments can be saved in the middle of their episodes, where `PoolSpec.why_not_saved` is ""."""

    def get_state(self) -> dict[str, np.ndarray]:
        """Finish a pending step, whose row `recv` still returns, and return the state as arrays by name."""

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the result of `get_state`, even if a step was pending. No reset is needed."""


class ScheduledPool(HostPool, Protocol):
    """A pool whose environments have options that follow schedules."""

    def set_options(self, chosen: Mapping[str, float], num_steps: int | None) -> None:
        """Finish a pending step, whose row `recv` still returns. Then set values that replace schedules.

        Each environment has made `num_steps` steps; None: as many as it knows.
        """


class PoolSpec(NamedTuple):
    """The description of a pool before it is opened."""

    env: EnvSpec  # num_envs is n, the number in this pool; `make_env` fills in obs
    raw_obs: PyTree  # shape and dtype of one environment's observation in a `Row`
    action_dtype: Any  # of the actions that `send` takes
    action_start: Any = 0  # the smallest discrete action, or an array of the smallest choices
    bounds: spaces.Bounds = ()  # true (low, high) of continuous actions
    action_tree: PyTree = None  # the parts of an action; see `types.View`
    encode: Callable[[PyTree], PyTree] = lambda obs: (
        obs
    )  # visible observations [n, ...], of at most 32 bits, for agents
    visible: Callable[[PyTree], PyTree] = lambda raw: raw  # the part of raw observations that agents may see
    action_mask: Callable[[PyTree], jax.Array] | None = None  # raw observations [n, ...] to bool [n, mask_size]
    mask_is_part: bool = False  # of the observation that the environment returns, and not of its `info`
    reports_game_over: bool = False
    ends_at_life_loss: bool = False  # a lost life terminates the episode but not the game; scores are of games
    noop_after_last: bool = False  # the environment plays on in the step after a last one; it gets action 0, a no-op
    why_not_saved: Callable[[], str] = lambda: "its backend cannot save it"  # "": the pool is a `SavablePool`
    can_render: bool = False
    check_render: Callable[[], None] = lambda: None  # raises ValueError if `render` would fail
    protocol: AtariProtocol = ""


OpenPool = Callable[[int, list[int]], HostPool]  # (index among the pools of all shards, a seed for each environment)


class LazyPool:
    """A pool that opens on first use, with seeds for its share of all environments."""

    def __init__(
        self, spec: PoolSpec, open_pool: OpenPool, seed: tuple[int, ...], index: int = 0, num_pools: int = 1
    ) -> None:
        self.spec, self.open_pool, self.seed = spec, open_pool, seed
        self.index, self.num_pools = index, num_pools  # among the pools of all shards
        self.rows = raw_rows(spec)
        self.opened: Any = None

    @property
    def pool(self) -> Any:
        """Return the backend's pool; open it if necessary."""
        return self.open()

    def open(self) -> Any:
        """Return the backend's pool; open it if necessary."""
        if self.opened is None:
            self.opened = self.open_pool(self.index, self.seeds())
            OPEN_POOLS.append(self.opened)
        return self.opened

    def seeds(self) -> list[int]:
        """Return a seed for each environment of this pool."""
        num_envs = self.spec.env.num_envs
        return seeds_of(self.seed, num_envs * self.num_pools)[self.index * num_envs :][:num_envs]

    def reset(self) -> PyTree:
        """Return first observations [n, ...] with the dtypes that the program expects."""
        return _checked(self.spec.env.id, "observation", self.pool.reset(), self.rows.obs)

    def send(self, action: Any) -> None:
        """Start a step. The actions [n, ...] may be on the device."""
        self.pool.send(np.asarray(action).astype(self.spec.action_dtype))

    def recv(self) -> Row:
        """Return the row of the pending step with the dtypes that the program expects."""
        row = Row(*self.pool.recv())
        return Row(*(_checked(self.spec.env.id, *each) for each in zip(Row._fields, row, self.rows)))

    def reseed(self, number: int) -> None:
        """Derive new seeds from `number`."""
        self.seed = *self.seed[:2], number
        if self.opened is not None:
            self.opened.reseed(self.seeds())

    def set_options(self, chosen: Mapping[str, float], num_steps: int | None) -> None:
        """Set values that replace schedules, and the steps that each environment has made, unless None."""
        self.pool.set_options(chosen, num_steps)

    def save(self) -> dict[str, np.ndarray] | str:
        """Return the state of all environments as arrays by name, or why it cannot be saved."""
        return self.spec.why_not_saved() or self.pool.get_state()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a state."""
        self.pool.set_state(state)

    def render(self) -> np.ndarray:
        """Return the first environment's image, uint8 [H, W, 3]."""
        return self.pool.render()

    def close(self) -> None:
        """Close the pool if it is open. A compiled program with its address must not run afterwards."""
        pool, self.opened = self.opened, None
        if pool is not None:
            OPEN_POOLS[:] = [other for other in OPEN_POOLS if other is not pool]
            pool.close()


OPEN_POOLS: list[HostPool] = []  # kept alive until closed: compiled programs may contain the address of a pool


def of_all(parts: Mapping[int, Any]) -> dict[str, Any]:
    """Return the functions of a `HostEnv` that call those of all parts: pools, or the `HostEnv` of each shard.

    The names of saved arrays begin with the index of a part. A process has those of its shards.
    """

    def call(name: str, *args: Any) -> None:
        for part in parts.values():
            getattr(part, name)(*args)

    def save() -> dict[str, Any] | str:
        found: dict[str, Any] = {}
        for i, part in parts.items():
            state = part.save()
            if isinstance(state, str):
                return state
            found |= {f"{i}/{name}": x for name, x in state.items()}
        return found

    def load(state: Mapping[str, Any]) -> None:
        for i, part in parts.items():
            part.load({name.removeprefix(f"{i}/"): x for name, x in state.items() if name.startswith(f"{i}/")})

    calls: dict[str, Any] = {name: partial(call, name) for name in ("open", "close", "reseed", "set_options")}
    return calls | {"save": save, "load": load}


def open_all(pools: Sequence[LazyPool]) -> None:
    """Open all pools at the same time: each waits for its workers to start."""
    with ThreadPoolExecutor(len(pools)) as threads:
        list(threads.map(LazyPool.open, pools))


def first_done(pools: Sequence[LazyPool], sent: np.ndarray, timeout_s: float | None) -> np.ndarray:
    """Wait until `recv` of one pool does not block, and return for which it does not, bool [P].

    Args:
        pools: P pools of one worker each, which have `waits_for`.
        sent: bool [P]: which ones have an action.
        timeout_s: seconds after which `recv` of the first pool is called in any case, so that it raises its error.
    """
    sent = np.asarray(sent)
    channels = {i: pools[i].pool.waits_for() for i in np.flatnonzero(sent).tolist()}
    is_done = not all(channels.values())
    found = connection.wait([x for own in channels.values() for x in own], 0 if is_done else timeout_s)
    done = np.array([i in channels and all(x in found for x in channels[i]) for i in range(len(pools))])
    return done if done.any() else np.arange(len(pools)) == np.argmax(sent)


def num_envs_per_pool(num_envs: int, config: HostEnvConfig) -> int:
    """Return n, the environments in each pool of one shard. Raise ValueError if they do not divide."""
    num_pools, num_shards = max(config.num_async_pools, 1), config.shard.num
    if num_envs % num_pools:
        where = f" on each of {num_shards} devices" if num_shards > 1 else ""
        raise ValueError(
            f"host.async_pools: {num_envs * num_shards} environments do not divide into {num_pools} pools{where}, "
            f"got {num_pools}; choose a divisor of {num_envs}"
        )
    return num_envs // num_pools


def seeds_of(seed: tuple[int, ...], num_envs: int) -> list[int]:
    """Return a random seed for each environment, all different.

    With consecutive seeds (seed + i), most environments of two runs with neighboring seeds would have equal seeds.
    """
    rng = np.random.default_rng(seed)
    found: dict[int, None] = {}
    while len(found) < num_envs:
        found |= dict.fromkeys(rng.integers(2**31, size=num_envs).tolist())
    return list(found)[:num_envs]


def raw_rows(spec: PoolSpec) -> Row:
    """Return shapes and dtypes of a row, narrowed to 32 bits."""
    num_envs = spec.env.num_envs
    number, flag = (jax.ShapeDtypeStruct((num_envs,), dtype) for dtype in (jnp.float32, jnp.bool_))
    shape = lambda leaf: jax.ShapeDtypeStruct((num_envs, *leaf.shape), spaces.narrow_dtype(leaf.dtype))
    return Row(jax.tree.map(shape, spec.raw_obs), number, flag, flag, flag if spec.reports_game_over else None)


def _checked(env_id: str, name: str, tree: PyTree, like: PyTree) -> PyTree:
    """Return numpy arrays with the dtypes of `like`. Raise ValueError if a shape differs."""

    def convert(x: Any, expected: jax.ShapeDtypeStruct) -> np.ndarray:
        array = np.asarray(x)
        if array.shape != expected.shape:
            raise ValueError(f"{env_id}: {name} must have shape {expected.shape}, got {array.shape}")
        return array.astype(expected.dtype, copy=False)

    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite
        return jax.tree.map(convert, tree, like) if jax.tree.leaves(like) else None
