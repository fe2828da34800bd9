"""Store the last R steps of N environments in a ring, each observation once, and sample transitions uniformly.

The ring is time-major, [R, N, ...]. Since environments reset on the next step, the observation of the next row is
always the true successor. So successors are not stored separately. If observations are stacks of frames, only the
newest frame of each is stored, and the stack is rebuilt from the rows before it (`rl.frame_stack`).

Rows are numbered by their place in the ring; `head` is the place of the next one. A row can be read once it has
`n_step` successors, and until a frame of its stack is overwritten. Rows whose action was ignored (resets) are never
drawn. Prioritized drawing is in `sum_tree.py`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jaxrl_fast.replay.store import DEVICE, Batches, FramesAhead, FrameStore, Place
from jaxrl_fast.replay.store import at as _at
from jaxrl_fast.rl.frame_stack import compress, join_frames, num_channels, rows_of_stacks, stack_ages
from jaxrl_fast.rl.off_policy import Draws
from jaxrl_fast.types import Key, PyTree, Space, Transition

MAX_UNROLLED = 8  # steps of an n-step return
NUM_TRIES = 4  # draws for one sample: all of them hit resets with probability (episode length + 1)^-4


class ReplayConfig(NamedTuple):
    """The fixed shape of a buffer."""

    num_rows: int  # R, a multiple of the length of the rollouts that are added
    num_envs: int  # N
    n_step: int = 1
    frame_stack: int = 0  # frames in the last axis of an observation; 0: observations are stored whole
    store: FrameStore = DEVICE  # of the observations


class Ring(NamedTuple):
    """The last R rows of N environments. Rows beyond `size` are zero."""

    obs: PyTree  # state of the store: [R, N, ...] of the environment's dtype; only the newest frame of a stack
    age: Array | None  # [R, N] uint8: rows since all frames of the stack were equal, at most frame_stack - 1
    action: Array  # [R, N, ...]
    reward: Array  # [R, N] f32
    discount: Array  # [R, N] f32
    last: Array  # [R, N] bool
    valid: Array  # [R, N] bool
    head: Array  # int32: the next row to write
    size: Array  # int32: rows written so far, at most R
    action_mask: Array | None = None  # [R, N, num_outputs] bool, if the environment has masks


class Sample(NamedTuple):
    """B transitions of up to n steps, fewer at the end of an episode."""

    obs: PyTree  # [B, ...]
    action: Array  # [B, ...]
    reward: Array  # [B] f32: discounted sum
    discount: Array  # [B] f32: of the value of next_obs, gamma included
    next_obs: PyTree  # [B, ...]
    action_mask: Array | None = None  # [B, num_outputs] bool at obs
    next_action_mask: Array | None = None  # [B, num_outputs] bool at next_obs


def init(config: ReplayConfig, obs: PyTree, action: Space, has_action_mask: bool = False) -> Ring:
    """Return an empty ring for observations like `obs` (ShapeDtypeStruct of one environment)."""
    zeros = lambda shape, dtype: jnp.zeros((config.num_rows, config.num_envs, *shape), dtype)
    stacked = config.frame_stack > 1
    return Ring(
        obs=config.store.init(config.num_rows, config.num_envs, frame_like(config, obs)),
        age=zeros((), jnp.uint8) if stacked else None,
        action=action.zeros(config.num_rows, config.num_envs),
        reward=zeros((), jnp.float32),
        discount=zeros((), jnp.float32),
        last=zeros((), bool),
        valid=zeros((), bool),
        head=jnp.int32(0),
        size=jnp.int32(0),
        action_mask=zeros((action.num_outputs,), bool) if has_action_mask else None,
    )


def add(config: ReplayConfig, ring: Ring, steps: Transition) -> Ring:
    """Write T rows [T, N, ...] over the oldest ones. T divides R.

    An invalid row is the reset after an episode. If a failed step makes the first row invalid, the newest row so far
    becomes the last one of its episode, as in `rollout.as_rollout`, so that n-step targets do not extend beyond it.
    """
    num_new = steps.reward.shape[0]
    assert config.num_rows % num_new == 0, (config.num_rows, num_new)
    put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), ring.head, axis=0)
    obs, stack = steps.obs, config.frame_stack
    age = ring.age
    if age is not None:
        obs, same = jax.vmap(partial(compress, stack))(steps.obs)
        age = put(age, stack_ages(stack, same, age[ring.head - 1]))  # row -1 is the last one
    last = ring.last.at[ring.head - 1].set(ring.last[ring.head - 1] | ~steps.valid[0])
    return Ring(
        obs=config.store.put(ring.obs, ring.head, obs),
        age=age,
        action=put(ring.action, steps.action),
        reward=put(ring.reward, steps.reward),
        discount=put(ring.discount, steps.discount),
        last=put(last, steps.last),
        valid=put(ring.valid, steps.valid),
        head=(ring.head + num_new) % config.num_rows,
        size=jnp.minimum(ring.size + num_new, config.num_rows),
        action_mask=jax.tree.map(put, ring.action_mask, steps.action_mask),
    )


def discard_tail(config: ReplayConfig, ring: Ring) -> Ring:
    """Truncate all episodes at the newest row, whose successor will be missing.

    This row cannot be drawn, and the episodes of the row before it end. It has the place of a reset: targets bootstrap
    from its observation, as in any truncated episode.
    """
    newest = jnp.arange(config.num_rows) == (ring.head - 1) % config.num_rows
    before = jnp.roll(newest, -1).at[ring.head - 1].set(False)
    return ring._replace(valid=ring.valid & ~newest[:, None], last=ring.last | before[:, None])


def num_lost(config: ReplayConfig, ring: Ring) -> Array:
    """Return the number of oldest rows that cannot be read, int32: some of their frames are overwritten."""
    return jnp.where(ring.size == config.num_rows, max(config.frame_stack - 1, 0), 0)


def num_readable(config: ReplayConfig, ring: Ring) -> Array:
    """Return the number of rows that can be read, int32, at least 0."""
    return jnp.maximum(ring.size - config.n_step - num_lost(config, ring), 0)


def draw(
    config: ReplayConfig, ring: Ring, key: Key, batch_size: int, own: Callable[[Array], Array] = lambda x: x
) -> tuple[Array, Array, Array]:
    """Sample rows [B] and environments [B] uniformly from the readable steps with a valid action.

    Also returns bool [B]: False where no such step was found, so that the sample must have weight 0. This happens if
    no row can be read yet, or if all NUM_TRIES draws hit resets. The cost does not depend on the size of the ring. Each
    gradient worker selects its part of the last axis of the random numbers by `own`.
    """
    readable = num_readable(config, ring)
    place, env = own(random_numbers(key, (2, NUM_TRIES, batch_size)))
    place = (place % jnp.maximum(readable, 1).astype(jnp.uint32)).astype(jnp.int32) + num_lost(config, ring)
    row = (ring.head - ring.size + place) % config.num_rows
    env = (env % config.num_envs).astype(jnp.int32)
    valid = _at(ring.valid, row, env) & (readable > 0)
    first = jnp.argmax(valid, axis=0)[None]
    pick = lambda x: jnp.take_along_axis(x, first, axis=0)[0]
    return pick(row), pick(env), pick(valid)


def read(config: ReplayConfig, ring: Ring, row: Array, env: Array, gamma: float | Array) -> Sample:
    """Return the transitions that begin at rows [B] of environments [B].

    reward = sum_{i < k} (prod_{j < i} gamma d_j) r_i,  discount = prod_{i < k} gamma d_i,  with
    k = min(n_step, steps to the end of the episode) (Sutton & Barto 2018, eq. 7.1); next_obs is k rows later.
    """
    reward, discount, following = n_step_sums(config, ring, row, env, gamma)
    mask = lambda row: jax.tree.map(lambda x: _at(x, row, env), ring.action_mask)
    obs, next_obs = observations(config, ring, (row, following), env)
    return Sample(obs, _at(ring.action, row, env), reward, discount, next_obs, mask(row), mask(following))


def read_ahead(
    config: ReplayConfig,
    ring: Ring,
    draws: Draws,
    batch_size: int,
    own: Callable[[Array], Array] = lambda x: x,
) -> Callable[[Array], Ring]:
    """Begin to read the frames of the batches of an update.

    Returns a function from i to a ring from which only batch i can be read, as `draw` chooses it from draws.keys[i].
    Call the function once with each of 0 to draws.num - 1.
    """
    get_ahead = config.store.get_ahead
    assert get_ahead, "the store reads one batch at a time"
    of_batch = get_ahead(ring.obs, _batches(config, ring, draws, batch_size, own))
    return lambda i: ring._replace(obs=FramesAhead(of_batch(i)))


def _batches(config: ReplayConfig, ring: Ring, draws: Draws, batch_size: int, own: Callable[[Array], Array]) -> Batches:
    """Return the places of the frames of each batch."""
    row, env, _ = jax.vmap(lambda key: draw(config, ring, key, batch_size, own))(draws.keys)  # [K, B]
    each = row.reshape(-1), env.reshape(-1)
    rows = each[0], n_step_sums(config, ring, *each, 1.0)[2]
    split = lambda place: jax.tree.map(lambda x: x.reshape(*row.shape, *x.shape[1:]), place)
    return Batches([split(place) for place in _places(config, ring, rows, each[1])], draws.num)


def n_step_sums(
    config: ReplayConfig, ring: Ring, row: Array, env: Array, gamma: float | Array
) -> tuple[Array, Array, Array]:
    """Return rewards, discounts and next rows [B] of the transitions from rows [B] of environments [B]; see `read`."""

    def add(i: int | Array, sums: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        reward, discount, going, length = sums
        at = (row + i) % config.num_rows
        reward += jnp.where(going, discount * _at(ring.reward, at, env), 0)
        discount *= jnp.where(going, gamma * _at(ring.discount, at, env), 1)
        return reward, discount, going & ~_at(ring.last, at, env), length + going

    none = jnp.zeros(row.shape), jnp.ones(row.shape), jnp.ones(row.shape, bool), jnp.zeros(row.shape, jnp.int32)
    few = min(config.n_step, MAX_UNROLLED)  # since unrolled loops take long to compile
    reward, discount, _, length = jax.lax.fori_loop(0, config.n_step, add, none, unroll=few)
    following = (row + length) % config.num_rows
    return reward, discount, following


def random_numbers(key: Key, shape: tuple[int, ...]) -> Array:
    """Return random numbers, uint32: counters after two keyed rounds of MurmurHash3's mixer (Appleby 2011).

    jax.random would take ten times as long on a CPU, a tenth of a small gradient step. The rounds use a key made by
    jax.random. The remainder of 32 bits modulo R is uniform to one part in 2^32 / R, which no sample can detect.
    """
    keys = jax.random.key_data(key)
    x = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    for i in range(2):
        x = (x + keys[i]) * jnp.uint32(0x9E3779B1)
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        x ^= x >> 16
    return x


def observations(config: ReplayConfig, ring: Ring, rows: Sequence[Array], env: Array) -> list[PyTree]:
    """Return the observations at each of the rows [B] of environments [B]."""
    if isinstance(ring.obs, FramesAhead):
        fetched = ring.obs.frames
        found = [jax.tree.map(lambda x: x[i], fetched) for i in range(len(rows))]  # noqa: B023
    else:
        found = config.store.get(ring.obs, _places(config, ring, rows, env))
    return found if ring.age is None else [join_frames(frames) for frames in found]


def _places(config: ReplayConfig, ring: Ring, rows: Sequence[Array], env: Array) -> list[Place]:
    """Return where the frames of the observations at each of the rows [B] of environments [B] are: [B], or [B, F]."""
    if ring.age is None:
        return [(row, env) for row in rows]
    stacks = [rows_of_stacks(config.frame_stack, _at(ring.age, row, env), row) for row in rows]
    return [(stack % config.num_rows, jnp.broadcast_to(env[:, None], stack.shape)) for stack in stacks]


def frame_like(config: ReplayConfig, obs: PyTree) -> PyTree:
    """Return the shapes and dtypes of the stored part of an observation."""
    if config.frame_stack <= 1:
        return obs
    newest = lambda x: ShapeDtypeStruct((*x.shape[:-1], num_channels(config.frame_stack, x)), x.dtype)
    return jax.tree.map(newest, obs)
