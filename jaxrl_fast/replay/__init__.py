"""Define replay buffers: a record of functions, made by `uniform` (`ring`) or `prioritized` (`ring` and `sum_tree`).

A buffer holds the last rows of N environments. Its functions are pure, so that a buffer on another device, on the host
or on disk fills the same record.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxrl_fast.options.replay import Prioritized as PrioritizedOptions
from jaxrl_fast.options.replay import Uniform as UniformOptions
from jaxrl_fast.parallel import collectives
from jaxrl_fast.replay import ring, sum_tree
from jaxrl_fast.replay.host import host_store
from jaxrl_fast.replay.ring import ReplayConfig as ReplayConfig
from jaxrl_fast.replay.ring import Ring
from jaxrl_fast.replay.ring import Sample as Sample
from jaxrl_fast.rl.off_policy import Draws as Draws
from jaxrl_fast.types import EnvSpec, Key, Parallelism, PyTree, Transition
from jaxrl_fast.types.host import HostResource
from jaxrl_fast.utils import target

MIN_PRIORITY = 1e-6  # a transition with error 0 keeps some probability of being sampled


class WeightedBatch(NamedTuple):
    """This device's part of a batch."""

    rows: Any  # [B]: `Sample`, or sequences
    weight: Array  # f32 [B]: of each row in the loss; 0 where none was found
    index: Any  # of the batch of this shard, for `update_priorities`


class Replay(NamedTuple):
    """A replay buffer as functions of its state R."""

    init: Callable[[], PyTree]
    add: Callable[..., PyTree]  # (R, rows [T, N, ...], carry=()) to R: over the oldest rows; carry before the first
    sample: Callable[..., WeightedBatch]  # see `uniform`
    size: Callable[[PyTree], Array]  # rows of each environment, int32
    discard_tail: Callable[[PyTree], PyTree]  # R to R when all environments restart: the newest row has no successor
    update_priorities: Callable[[PyTree, Any, Array], PyTree] | None = None  # (R, index, errors [B]); None: it has none
    # (R, Draws, batch_size) to a function: `sample` from its value at i < num, with keys[i], is as from R. None: it is
    # useless, or impossible since the draws depend on priorities.
    read_ahead: Callable[..., Callable[[Array], PyTree]] | None = None
    resources: tuple[HostResource, ...] = ()  # the parts on the host


def make(
    config: ReplayConfig,
    spec: EnvSpec,
    parallelism: Parallelism = Parallelism(),
    priority_exponent: float | Array | None = None,
) -> Replay:
    """Return a buffer that samples uniformly, or in proportion to priorities if `priority_exponent` is given."""
    if priority_exponent is None:
        return uniform(config, spec, parallelism)
    return prioritized(config, spec, parallelism, priority_exponent)


def priority_exponent(options: UniformOptions) -> float | Array | None:
    """Return the exponent of priorities, or None for a replay that samples uniformly."""
    return options.alpha if isinstance(options, PrioritizedOptions) else None


def importance_exponent(options: UniformOptions, total: int, num_updates: Array) -> Array | float:
    """Return the exponent of importance weights: it rises from beta to 1 over `total` updates."""
    if not isinstance(options, PrioritizedOptions):
        return 1.0
    exponent: Array = optax.linear_schedule(options.beta, 1.0, total)(num_updates)
    return exponent


def config_of(options: UniformOptions, spec: EnvSpec, parallelism: Parallelism, period: int) -> ReplayConfig:
    """Return the shape of the buffer that options choose. Its number of rows is a multiple of `period`."""
    num_rows = options.size // (period * spec.num_envs * parallelism.num_shards) * period
    config = ReplayConfig(num_rows, spec.num_envs, options.n_step, spec.frame_stack)
    return stored(config, spec, parallelism, options.storage, options.compression)


def stored(
    config: ReplayConfig, spec: EnvSpec, parallelism: Parallelism, storage: str = "device", compression: str = "none"
) -> ReplayConfig:
    """Return the config with the observations on the "device", or in the memory ("host") or on the "disk" of the host.

    There they may be compressed ("zstd"). "auto" is the device; a run decides before it makes its agent.
    """
    if storage in ("auto", "device"):
        return config
    sizes = config.num_rows, config.num_envs, ring.frame_like(config, spec.obs)
    return config._replace(store=host_store(*sizes, parallelism, storage == "disk", compression == "zstd"))


def uniform(config: ReplayConfig, spec: EnvSpec, parallelism: Parallelism = Parallelism()) -> Replay:
    """Return a buffer from which each readable transition is sampled with the same probability.

    `sample(R, key, batch_size, gamma, beta)` returns a WeightedBatch of transitions. B is `batch_size` over the number
    of devices that split a batch. Rewards are n-step sums discounted by `gamma`; `beta` is not used here.
    """
    on_cpu = target.platform() == "cpu"
    ahead = _read_ahead if config.store.get_ahead else None if on_cpu or config.store.resources else _draw_ahead
    return Replay(
        init=partial(ring.init, config, spec.obs, spec.action, spec.has_action_mask),
        add=partial(_add_uniform, config),
        sample=sampler(partial(draw_uniformly, partial(ring.draw, config), parallelism), partial(_read, config)),
        size=lambda state: state.size,
        discard_tail=partial(ring.discard_tail, config),
        read_ahead=partial(ahead, config, parallelism) if ahead else None,
        resources=config.store.resources,
    )


def prioritized(
    config: ReplayConfig, spec: EnvSpec, parallelism: Parallelism = Parallelism(), exponent: float | Array = 0.5
) -> Replay:
    """Return a buffer that samples in proportion to (error + MIN_PRIORITY) ^ exponent (Schaul et al. 2016).

    `sample` as in `uniform`; its weights are importance weights with exponent `beta` (section 3.4). New transitions get
    the largest priority so far. `update_priorities` takes the errors [B] of the whole batch of this shard.
    """
    num_items = config.num_rows * config.num_envs
    return Replay(
        init=lambda: Prioritized(
            ring.init(config, spec.obs, spec.action, spec.has_action_mask), sum_tree.init(num_items), jnp.float32(1)
        ),
        add=partial(_add_prioritized, config, parallelism),
        sample=sampler(
            partial(draw_by_priority, config.num_envs, parallelism),
            lambda state, *places: ring.read(config, state.ring, *places),
        ),
        size=lambda state: state.ring.size,
        discard_tail=lambda state: state._replace(ring=ring.discard_tail(config, state.ring)),
        update_priorities=partial(update_priorities, exponent),
        resources=config.store.resources,
    )


class Prioritized(NamedTuple):
    """The state of a prioritized buffer."""

    ring: Ring
    priorities: sum_tree.Tree
    max_priority: Array  # f32: the largest priority so far; between two calls of `add`, of this shard alone


class Drawn(NamedTuple):
    """A ring, and the batch that was drawn from it for one gradient step."""

    ring: Ring
    batch: tuple[Array, Array, Array]  # of `ring.draw`


class Index(NamedTuple):
    """The sampled transitions, for `update_priorities`."""

    item: Array  # int32 [B]
    found: Array  # bool [B]: False where nothing could be sampled


def importance_weights(prob: Array, exponent: float | Array, axis_name: str | None = None) -> Array:
    """Return (1 / P)^exponent over the largest in the batch, f32 [B], for sampling probabilities P [B]; 0 where P is 0.

    Schaul et al. 2016, section 3.4; the size of the buffer, which is there too, cancels. Each shard samples its part of
    the batch from its own environments, with equal probability.
    """
    found = prob > 0
    weight = jnp.where(found, jnp.where(found, prob, 1) ** -exponent, 0)
    largest = collectives.all_gather(weight.max(), axis_name).max()
    return weight / jnp.maximum(largest, 1e-30)


def draw_args(parallelism: Parallelism, batch_size: int) -> tuple[int, Callable[[Array], Array]]:
    """Return the number of transitions that this device draws, and a selector of its part of the random numbers."""
    own = partial(collectives.local_rows, num_grad_workers=parallelism.num_grad_workers, axis=-1)
    return batch_size // parallelism.num_shards, own


def draw_uniformly(
    draw: Callable[..., tuple[Array, Array, Array]],
    parallelism: Parallelism,
    state: PyTree,
    key: Key,
    batch_size: int,
    beta: float | Array,
) -> tuple[Array, Array, Array, None]:
    """Return this device's places and environments [B] from `draw`, weights [B] of 1 where it found any, and None."""
    drawn = isinstance(state, Drawn)
    place, env, found = state.batch if drawn else draw(state, key, *draw_args(parallelism, batch_size))
    return place, env, found.astype(jnp.float32), None


def draw_by_priority(
    num_envs: int, parallelism: Parallelism, state: Any, key: Key, batch_size: int, beta: float | Array
) -> tuple[Array, Array, Array, Index]:
    """Return this device's places and environments [B] drawn by the priorities of items place * N + environment.

    Also returns their importance weights [B], and the index of the whole batch of this shard.
    """
    item, priority = sum_tree.draw(state.priorities, key, batch_size // parallelism.num_shards)
    prob = priority / jnp.maximum(sum_tree.total(state.priorities), 1e-30)
    weight = importance_weights(prob, beta, parallelism.axis_name)
    drawn = item // num_envs, item % num_envs, weight
    return *collectives.local_rows(drawn, parallelism.num_grad_workers), Index(item, priority > 0)


def _draw_ahead(
    config: ReplayConfig, parallelism: Parallelism, state: Ring, draws: Draws, batch_size: int
) -> "Callable[[Array], Drawn]":
    """Draw all batches of an update at once: fewer kernels for an accelerator."""
    draw = lambda key: ring.draw(config, state, key, *draw_args(parallelism, batch_size))
    places = jax.vmap(draw)(draws.keys)
    return lambda i: Drawn(state, jax.tree.map(lambda x: x[i], places))


def _read(config: ReplayConfig, state: "Ring | Drawn", *arguments: Any) -> Sample:
    return ring.read(config, state.ring if isinstance(state, Drawn) else state, *arguments)


def _read_ahead(
    config: ReplayConfig, parallelism: Parallelism, state: Ring, draws: Draws, batch_size: int
) -> Callable[[Array], Ring]:
    return ring.read_ahead(config, state, draws, *draw_args(parallelism, batch_size))


def sampler(
    draw: Callable[..., tuple[Array, Array, Array, Any]], read: Callable[..., Any]
) -> Callable[..., WeightedBatch]:
    """Return the `sample` of a replay that draws (places, environments, weights, index) and reads at the places."""

    def sample(
        state: PyTree, key: Key, batch_size: int, gamma: float | Array, beta: float | Array = 1.0
    ) -> WeightedBatch:
        place, env, weight, index = draw(state, key, batch_size, beta)
        return WeightedBatch(read(state, place, env, gamma), weight, index)

    return sample


def _add_uniform(config: ReplayConfig, state: Ring, steps: Transition, carry: PyTree = ()) -> Ring:
    return ring.add(config, state, steps)


def _add_prioritized(
    config: ReplayConfig, parallelism: Parallelism, state: Prioritized, steps: Transition, carry: PyTree = ()
) -> Prioritized:
    """Add rows. Newly readable transitions get the largest priority; transitions no longer readable get 0."""
    num_new = steps.reward.shape[0]
    data = ring.add(config, state.ring, steps)
    max_priority = collectives.all_gather(state.max_priority, parallelism.axis_name).max()
    lost = max(config.frame_stack - 1, 0)  # rows whose older frames are overwritten
    offset = jnp.arange(-config.n_step - num_new, lost)
    row = (data.head + offset) % config.num_rows
    priority = jnp.where((offset < -config.n_step)[:, None] & data.valid[row], max_priority, 0.0)
    item = row[:, None] * config.num_envs + jnp.arange(config.num_envs)[None]
    return Prioritized(data, sum_tree.update(state.priorities, item.reshape(-1), priority.reshape(-1)), max_priority)


def sum_gradient(replay: Replay, parallelism: Parallelism, gradient: PyTree, errors: Array) -> tuple[PyTree, Array]:
    """Return the sum of the gradient over all devices, and the errors of this shard's whole batch for its priorities.

    `errors` [B] are those of this device's rows. Both are exchanged at once.
    """
    if not replay.update_priorities or parallelism.num_grad_workers == 1:
        return collectives.all_reduce_sum(gradient, parallelism.grad_axis), errors
    errors = collectives.scatter_rows(errors, parallelism.num_grad_workers)
    summed: tuple[PyTree, Array] = collectives.all_reduce_sum((gradient, errors), parallelism.grad_axis)
    return summed


def update_priorities(exponent: float | Array, state: Any, index: Index, errors: Array) -> Any:
    """Return a prioritized buffer with the priorities that follow from the errors [B] of sampled items."""
    priority = jnp.where(index.found, (errors + MIN_PRIORITY) ** exponent, 0)
    return state._replace(
        priorities=sum_tree.update(state.priorities, index.item, priority),
        max_priority=jnp.maximum(state.max_priority, priority.max()),
    )
