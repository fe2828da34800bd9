"""Update off-policy algorithms: gradient steps at an exact replay ratio, and target updates.

Everything is counted in environment steps. An update adds some of them and makes the gradient steps that are due by the
replay ratio. A remaining fraction is carried over to the next update, so the ratio holds exactly for any number of
environments. Ratios are fractions, and counts are int32.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxrl_fast.kernels.branch import cond
from jaxrl_fast.networks import flat
from jaxrl_fast.options.algorithm import OffPolicy, as_fraction
from jaxrl_fast.options.replay import Prioritized
from jaxrl_fast.options.target import PeriodicAverage
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import exploration
from jaxrl_fast.rl.exploration import MAX_COUNT
from jaxrl_fast.types import EnvSpec, Key, Metrics, Parallelism, PyTree
from jaxrl_fast.utils import target

MAX_WASTE = 2  # gradient steps that an accelerator computes for each one that counts
MAX_PRIORITIES = 2**24  # float32 cannot distinguish more places in their sum


class ReplayRatio(NamedTuple):
    """The schedule of gradient steps over environment steps. Fixed while tracing."""

    ratio: Fraction  # gradient steps per environment step
    first_learning: int  # environment steps before the first gradient step
    rollout_length: int  # T
    num_envs: int = 1  # N, on all shards

    @property
    def steps_per_update(self) -> int:
        """Return the environment steps of an update, on all shards."""
        return self.rollout_length * self.num_envs


class Counts(NamedTuple):
    """The counts that are carried over between updates."""

    grad_step_remainder: Array  # int32: the part of a gradient step that is due, in units of 1 / ratio.denominator
    steps_since_target_update: Array  # int32: environment steps, in units of 1 / ratio.numerator


class State(NamedTuple):
    """The whole state of an off-policy algorithm."""

    learner: PyTree  # the variables that a gradient step changes
    replay: PyTree
    counts: Counts
    num_updates: Array  # int32


def init() -> Counts:
    """Return the counts before the first update."""
    return Counts(jnp.int32(0), jnp.int32(0))


def init_state(learner: PyTree, buffer: PyTree) -> State:
    """Return the state before the first update."""
    return State(learner, buffer, init(), jnp.int32(0))


class Draws(NamedTuple):
    """The keys that draw the batches of an update."""

    keys: Key  # [K]
    num: Array  # int32: the number of batches needed


# A gradient step: (buffer, num_updates, keys [2], learner, counts) -> (learner, buffer, counts, metrics). Metrics are
# sums or rows of weighted numbers, and "weight" is that of the rows.
Step = Callable[[PyTree, Array, Key, PyTree, Counts], tuple[PyTree, PyTree, Counts, Metrics]]


def learn(context: Any, step: Step, state: State, key: Key) -> tuple[State, Metrics]:
    """Make the gradient steps that are due after a rollout was added to the replay buffer.

    `context` has the algorithm's `config`, `parallelism`, `replay` and `ratio`. Returns metrics: for each metric of a
    step, its weighted mean times the number of steps, and that number. Only a buffer with priorities is changed by the
    steps. Any other stays out of their loop, and all batches may be read before the first step. The first key of each
    step must be the key that draws its batch.
    """
    num_steps, counts = num_grad_steps_due(context.ratio, state.counts, num_env_steps(context.ratio, state))
    max_steps, usual = max_grad_steps(context.ratio), context.ratio.ratio * context.ratio.steps_per_update
    buffer_of: Callable[[Array], PyTree] = lambda i: state.replay
    if context.replay.read_ahead:
        keys = split_for_steps(jax.random.clone(key), max_steps)[:, 0]  # a step draws the same again
        buffer_of = context.replay.read_ahead(state.replay, Draws(keys, num_steps), context.config.batch_size)

    def once(i: Array, changing: PyTree, keys: Key) -> tuple[PyTree, Metrics]:
        learner, counts, changed = changing
        buffer = buffer_of(i) if changed is None else changed
        learner, buffer, counts, metrics = step(buffer, state.num_updates, keys, learner, counts)
        return (learner, counts, None if changed is None else buffer), metrics

    changing = flat.pack(state.learner), counts, state.replay if context.replay.update_priorities else None
    (learner, counts, changed), sums = gradient_steps(num_steps, max_steps, once, changing, key, usual)
    sums = collectives.all_reduce_sum(jax.tree.map(jnp.sum, sums), context.parallelism.grad_axis)
    per_weight = num_steps / jnp.maximum(sums.pop("weight"), 1e-12)
    metrics = {f"{name}_sum": x * per_weight for name, x in sums.items()} | {"gradient_steps": num_steps}
    buffer = state.replay if changed is None else changed
    return State(flat.unpack(learner), buffer, counts, state.num_updates + 1), metrics


def num_env_steps(schedule: ReplayRatio, state: State) -> Array:
    """Return the environment steps of all updates so far on all shards, int32, at most MAX_COUNT."""
    return exploration.env_steps(schedule.steps_per_update, state.num_updates)


def num_gradient_steps(schedule: ReplayRatio, num_updates: int) -> int:
    """Return the gradient steps of a run of `num_updates` updates, at least 1."""
    return max(int(schedule.ratio * (num_updates * schedule.steps_per_update - schedule.first_learning)), 1)


def num_grad_steps_due(schedule: ReplayRatio, counts: Counts, env_steps: Array) -> tuple[Array, Counts]:
    """Return the gradient steps due after one more update, int32 [], and the counts with the rest.

    `env_steps`: before that update. After s environment steps, floor(ratio * (s - first_learning)) gradient steps have
    been made in all.
    """
    ratio, per_update = schedule.ratio, schedule.steps_per_update
    new = jnp.clip(env_steps + per_update - schedule.first_learning, 0, per_update)
    due = counts.grad_step_remainder + ratio.numerator * new
    return due // ratio.denominator, counts._replace(grad_step_remainder=due % ratio.denominator)


def max_grad_steps(schedule: ReplayRatio) -> int:
    """Return the most gradient steps that one update can make."""
    ratio = schedule.ratio
    return (ratio.denominator - 1 + ratio.numerator * schedule.steps_per_update) // ratio.denominator


def schedule_of(config: OffPolicy, spec: EnvSpec, parallelism: Parallelism) -> ReplayRatio:
    """Return the schedule of gradient steps. Raise ValueError if sizes do not fit, or if it cannot be counted."""
    num_envs = spec.num_envs * parallelism.num_shards
    schedule = ReplayRatio(config.ratio, config.first_learning(num_envs), config.length(num_envs), num_envs)
    check_sizes(config, spec, parallelism, schedule)
    check(schedule, config.target.interval if isinstance(config.target, PeriodicAverage) else 1)
    return schedule


def check_sizes(config: OffPolicy, spec: EnvSpec, parallelism: Parallelism, schedule: ReplayRatio) -> None:
    """Raise ValueError if a batch does not fit the devices or the buffer."""
    num_devices = parallelism.num_shards * parallelism.num_grad_workers
    if config.batch_size % num_devices:
        raise ValueError(
            f"batch_size: must be a multiple of {num_devices}, the number of devices, got {config.batch_size}; "
            f"use {-(-config.batch_size // num_devices) * num_devices}"
        )
    if config.replay.size < config.batch_size:
        raise ValueError(
            f"replay.size: must hold one batch of {config.batch_size}, got {config.replay.size}; "
            "use a larger buffer or a smaller batch_size"
        )
    if isinstance(config.replay, Prioritized) and config.replay.size > MAX_PRIORITIES:
        raise ValueError(
            f"replay.size: must be at most {MAX_PRIORITIES} with replay prioritized, got {config.replay.size}; "
            f"use {MAX_PRIORITIES}, or replay uniform"
        )
    if config.learning_starts > config.replay.size:
        raise ValueError(
            f"learning_starts: must be at most replay.size ({config.replay.size}), got {config.learning_starts}; "
            f"use {config.replay.size} or fewer"
        )
    n_step, rollout_length = config.replay.n_step, schedule.rollout_length
    num_rows = n_step + max(spec.frame_stack, 1) + rollout_length  # the fewest that can be written and read
    smallest = -(-num_rows // rollout_length) * schedule.steps_per_update
    if config.replay.size < smallest:
        raise ValueError(
            f"replay.size: must be at least {smallest} for n_step {n_step} and rollouts of {rollout_length} "
            f"steps in each of {schedule.num_envs} environments, got {config.replay.size}; use {smallest} or more"
        )


def check(schedule: ReplayRatio, target_update_interval: int) -> None:
    """Raise ValueError if the replay ratio cannot be counted exactly in int32. Names the nearest one that can."""
    per_update = schedule.steps_per_update
    longest = max(per_update, target_update_interval)

    def countable(ratio: Fraction) -> bool:
        return ratio.numerator * longest <= MAX_COUNT and ratio.denominator <= MAX_COUNT

    if countable(schedule.ratio):
        return
    asked = float(schedule.ratio)
    tens = [q for q in (2**a * 5**b for a in range(31) for b in range(14)) if q <= MAX_COUNT]  # decimal fractions
    near = [max(1, min(round(asked * q), MAX_COUNT // longest)) / q for q in tens]
    nearest = min((x for x in near if countable(as_fraction(x))), key=lambda x: abs(x - asked))
    raise ValueError(
        f"replay_ratio: cannot be counted exactly with {per_update} steps per update and target.interval "
        f"{target_update_interval}, got {asked}; use {nearest}"
    )


def gradient_steps(
    num_steps: Array,
    max_steps: int,
    step: Callable[[Array, PyTree, Key], tuple[PyTree, PyTree]],
    state: PyTree,
    key: Key,
    usual_steps: float | Fraction | None = None,
) -> tuple[PyTree, PyTree]:
    """Make `num_steps` gradient steps, int32 [], at most `max_steps`: `step(i, state, keys [2])` -> (state, metrics).

    Returns the state and the sums of the metrics. All keys are made at once, at the cost of a few. An accelerator makes
    `max_steps` and discards those that are not due, unless `usual_steps`, their mean number, are much fewer: a loop
    whose length the host must read would make it wait in each pass. None: about `max_steps`.
    """
    keys = split_for_steps(key, max_steps)
    one = jax.ShapeDtypeStruct(keys.shape[1:], keys.dtype)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, jnp.int32(0), state, one)[1])

    def once(i: Array, so_far: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        state, sums = so_far
        state, metrics = step(i, state, jax.random.clone(keys[i]))  # each row is used once, which JAX cannot infer
        return state, jax.tree.map(jnp.add, sums, metrics)

    num_steps = same_for_all_seeds(num_steps)
    with jax.named_scope("gradient_steps"):
        sums: tuple[PyTree, PyTree]
        if target.platform() == "cpu" or usual_steps is not None and usual_steps * MAX_WASTE < max_steps:
            sums = jax.lax.fori_loop(0, num_steps, once, (state, zeros))
            return sums
        pack, start = flat.Numbers.of, (state, zeros)
        passed = lambda i, packed: pack(once(i, packed.tree(start)))
        masked = lambda i, packed: jax.tree.map(partial(jnp.where, i < num_steps), passed(i, packed), packed)
        sums = jax.lax.fori_loop(0, max_steps, masked, pack(start)).tree(start)
        return sums


def split_for_steps(key: Key, max_steps: int) -> Key:
    """Return two keys for each gradient step, [max_steps, 2]."""
    return jax.random.split(key, (max_steps, 2))


def update_target(
    schedule: ReplayRatio, period: int, tau: float | Array, params: PyTree, target: PyTree, counts: Counts
) -> tuple[PyTree, Counts]:
    """Return the target parameters and the counts after one more gradient step.

    A gradient step counts as 1 / ratio environment steps. Every `period` of them the target moves by
    `optax.incremental_update` with step size `tau`; 1 copies the parameters. A period of 1 moves it after every
    gradient step, also at ratios above 1, as in algorithm 1 of SAC and of REDQ.
    """
    whole = schedule.ratio.denominator if period == 1 else period * schedule.ratio.numerator
    since = counts.steps_since_target_update + schedule.ratio.denominator
    move = lambda: optax.incremental_update(params, target, tau)
    target = cond(same_for_all_seeds(since >= whole), move, lambda: target)
    return target, counts._replace(steps_since_target_update=since % whole)


@jax.custom_batching.custom_vmap
def same_for_all_seeds(x: Array) -> Array:
    """Mark a scalar as identical across vmapped seeds, so that loops and conditions on it stay unbatched."""
    return x


@same_for_all_seeds.def_vmap
def _first(num_seeds: int, in_batched: list[bool], x: Array) -> tuple[Array, bool]:
    return (same_for_all_seeds(x[0]) if in_batched[0] else x), False  # shards may be a batch within that of seeds
