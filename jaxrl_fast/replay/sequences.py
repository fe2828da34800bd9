"""Sample sequences of consecutive steps from a ring, with the memory's carry before each (R2D2).

Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning", section 2.

Sequences begin at every P-th row, and the carry of acting is stored there. So a carry takes 1 / P of the memory that it
would take at every row. A sequence has L steps; the n rows after it complete its n-step targets. Rows in it may belong
to several episodes.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.options.memory import OfReplay
from jaxrl_fast.options.replay import Uniform
from jaxrl_fast.parallel import collectives
from jaxrl_fast.replay import Replay, draw_by_priority, draw_uniformly, ring, sampler, sum_tree, update_priorities
from jaxrl_fast.replay.ring import ReplayConfig, Ring, Sample
from jaxrl_fast.replay.store import at
from jaxrl_fast.types import EnvSpec, Key, Parallelism, PyTree, Transition

MAX_SHARE = 0.9  # weight of the largest error in the priority of a sequence; the mean error has the rest (section 2.3)


class SequenceConfig(NamedTuple):
    """The fixed shape of a buffer of sequences."""

    ring: ReplayConfig  # its num_rows is a multiple of `period`
    length: int  # L, with the burn-in
    burn_in: int  # first steps that only compute the carry
    period: int  # P: rows between the starts of two sequences, a multiple of the length of the rollouts that are added

    @property
    def num_rows_read(self) -> int:
        """Return the rows of a sequence and of its last target, M = L + n."""
        return self.length + self.ring.n_step

    @property
    def num_slots(self) -> int:
        """Return the number of starts in each environment."""
        return self.ring.num_rows // self.period


class Sequences(NamedTuple):
    """B sequences, of which the last L - burn_in = K steps are learned from."""

    obs: PyTree  # [B, M, ...]
    carry: PyTree  # [B, ...] before the first step, stored while acting
    reset: Array  # [B, M] bool: an episode begins after the step
    steps: Sample  # [B * K, ...] of the steps that are learned from, without observations
    following: Array  # [B, K] int32: the places in `obs` of the next observations
    weight: Array  # [B, K] f32: 0 where the action was ignored


class State(NamedTuple):
    """The state of a buffer of sequences."""

    ring: Ring
    carry: PyTree  # [num_slots, N, ...]
    priorities: sum_tree.Tree | None
    max_priority: Array | None  # f32: the largest priority so far


def make(
    config: SequenceConfig,
    spec: EnvSpec,
    initial_carry: PyTree,
    parallelism: Parallelism = Parallelism(),
    exponent: float | Array | None = None,
) -> Replay:
    """Return a buffer that samples sequences uniformly, or in proportion to priorities if an `exponent` is given.

    `sample(R, key, batch_size, gamma, beta)` returns a WeightedBatch of Sequences. Its `update_priorities` takes the
    errors [B] of sequences: see `errors_of`.
    """
    draw_any = partial(draw_uniformly, partial(draw, config), parallelism)
    draw_one = draw_any if exponent is None else partial(draw_by_priority, config.ring.num_envs, parallelism)
    return Replay(
        init=partial(init, config, spec, initial_carry, exponent is not None),
        add=partial(add, config, parallelism),
        sample=sampler(draw_one, partial(read, config)),
        size=lambda state: state.ring.size,
        discard_tail=lambda state: state._replace(ring=ring.discard_tail(config.ring, state.ring)),
        update_priorities=None if exponent is None else partial(update_priorities, exponent),
        resources=config.ring.store.resources,
    )


def check(
    memory: OfReplay, options: Uniform, spec: EnvSpec, parallelism: Parallelism, rollout_length: int, period: int
) -> None:
    """Raise ValueError if the sequences of an agent with memory do not fit its rollouts or its buffer."""
    length, burn_in = memory.sequence_length, memory.burn_in
    if burn_in >= length:
        raise ValueError(
            f"memory.burn_in: must be less than the {length} steps of a sequence, got {burn_in}; use {length // 4}"
        )
    if rollout_length > length - burn_in:
        raise ValueError(
            f"rollout_length: must be at most the {length - burn_in} steps of a sequence after its burn_in, got "
            f"{rollout_length}; use {length - burn_in}"
        )
    num_envs = spec.num_envs * parallelism.num_shards
    num_rows = length + options.n_step + max(spec.frame_stack, 1) + rollout_length  # the fewest for one sequence
    smallest = (num_rows + 2 * period) // period * period * num_envs
    if options.size < smallest:
        raise ValueError(
            f"replay.size: must be at least {smallest} for sequences of {length} steps in each of {num_envs} "
            f"environments, got {options.size}; use {smallest} or more"
        )


def errors_of(errors: Array, weight: Array) -> Array:
    """Return the error of each sequence, f32 [B], from the errors of its steps [B, K] where `weight` is 1.

    The result is MAX_SHARE times the largest error plus 1 - MAX_SHARE times the mean error.
    """
    counted = jnp.where(weight > 0, errors, 0)
    mean = counted.sum(-1) / jnp.maximum(weight.sum(-1), 1)
    return MAX_SHARE * counted.max(-1) + (1 - MAX_SHARE) * mean


def init(config: SequenceConfig, spec: EnvSpec, initial_carry: PyTree, is_prioritized: bool) -> State:
    """Return an empty buffer."""
    slots = config.num_slots, config.ring.num_envs
    return State(
        ring.init(config.ring, spec.obs, spec.action, spec.has_action_mask),
        jax.tree.map(lambda x: jnp.zeros((*slots, *jnp.shape(x)), x.dtype), initial_carry),
        sum_tree.init(slots[0] * slots[1]) if is_prioritized else None,
        jnp.float32(1) if is_prioritized else None,
    )


def add(config: SequenceConfig, parallelism: Parallelism, state: State, steps: Transition, carry: PyTree = ()) -> State:
    """Add rows [T, N, ...], and the carry [N, ...] before them if a sequence begins with the first one."""
    before = state.ring
    slot, begins = before.head // config.period, before.head % config.period == 0
    put = lambda old, new: old.at[slot].set(jnp.where(begins, new, old[slot]))
    after = ring.add(config.ring, before, steps)
    state = state._replace(ring=after, carry=jax.tree.map(put, state.carry, carry))
    if state.priorities is None or state.max_priority is None:
        return state
    max_priority = collectives.all_gather(state.max_priority, parallelism.axis_name).max()
    num_new = steps.reward.shape[0]
    lost = max(config.ring.frame_stack - 1, 0)
    num_changed = min((config.num_rows_read + num_new + lost) // config.period + 2, config.num_slots)
    slots = ((after.head + lost) // config.period - jnp.arange(num_changed)) % config.num_slots
    could, can = is_readable(config, before, slots), is_readable(config, after, slots)
    item = slots[:, None] * config.ring.num_envs + jnp.arange(config.ring.num_envs)[None]
    old = state.priorities.levels[0][item]
    priority = jnp.where(can[:, None], jnp.where(could[:, None], old, max_priority), 0.0)
    priorities = sum_tree.update(state.priorities, item.reshape(-1), priority.reshape(-1))
    return state._replace(priorities=priorities, max_priority=max_priority)


def starts(config: SequenceConfig, data: Ring) -> tuple[Array, Array]:
    """Return the slot of the oldest sequence that can be read, and the number of sequences in each environment."""
    oldest = data.head - data.size + config.ring.num_rows  # not negative
    first = -(-(oldest + ring.num_lost(config.ring, data)) // config.period)
    last = (oldest + data.size - config.num_rows_read) // config.period
    return first % config.num_slots, jnp.maximum(last - first + 1, 0)


def is_readable(config: SequenceConfig, data: Ring, slot: Array) -> Array:
    """Return whether the sequences of these slots can be read, bool [...]."""
    first, count = starts(config, data)
    return (slot - first) % config.num_slots < count


def draw(
    config: SequenceConfig, state: State, key: Key, batch_size: int, own: Callable[[Array], Array]
) -> tuple[Array, Array, Array]:
    """Draw slots and environments [B] uniformly; also return whether there are any, bool [B]."""
    first, count = starts(config, state.ring)
    slot, env = own(ring.random_numbers(key, (2, batch_size)))
    slot = (first + (slot % jnp.maximum(count, 1).astype(jnp.uint32)).astype(jnp.int32)) % config.num_slots
    env = (env % config.ring.num_envs).astype(jnp.int32)
    return slot, env, jnp.broadcast_to(count > 0, env.shape)


def read(config: SequenceConfig, state: State, slot: Array, env: Array, gamma: float | Array) -> Sequences:
    """Return the sequences of these slots and environments [B]. Rewards are n-step sums, as in `ring.read`."""
    data, sizes = state.ring, config.ring
    row = (slot[:, None] * config.period + jnp.arange(config.num_rows_read)[None]) % sizes.num_rows  # [B, M]
    wide = jnp.broadcast_to(env[:, None], row.shape)
    (obs,) = ring.observations(sizes, data, [row.reshape(-1)], wide.reshape(-1))
    valid = at(data.valid, row, wide)
    learned = row[:, config.burn_in : config.length]
    flat, flat_env = learned.reshape(-1), wide[:, config.burn_in : config.length].reshape(-1)
    reward, discount, following = ring.n_step_sums(sizes, data, flat, flat_env, gamma)
    mask = lambda row: jax.tree.map(lambda x: at(x, row, flat_env), data.action_mask)
    steps = Sample(None, at(data.action, flat, flat_env), reward, discount, None, mask(flat), mask(following))
    ahead = (following - flat) % sizes.num_rows  # 1 to n_step
    return Sequences(
        obs=jax.tree.map(lambda x: x.reshape(*row.shape, *x.shape[1:]), obs),
        carry=jax.tree.map(lambda x: at(x, slot, env), state.carry),
        reset=~valid,
        steps=steps,
        following=jnp.arange(config.burn_in, config.length)[None] + ahead.reshape(learned.shape),
        weight=valid[:, config.burn_in : config.length].astype(jnp.float32),
    )
