"""Start the episodes of N environments: from a buffer of starts on a CPU, from a start drawn in each step elsewhere.

Both give the same episodes, since the starts of an environment follow from its own key, and their states are the same.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.envs.gymnax import scheduled
from jaxrl_fast.envs.gymnax.single import Single, reset_one
from jaxrl_fast.types import Key, PyTree
from jaxrl_fast.utils import target

MAX_OPERATIONS = 500  # of a reset that is computed in each step off a CPU
LOOP = re.compile(r"\b(cond|scan|while)\[")  # primitives that are many kernels


class Episode(NamedTuple):
    """The first states of N episodes."""

    env: PyTree  # [N, ...] gymnax's own state
    obs: PyTree  # [N, ...]
    key_data: jax.Array  # [N, ...] for randomness in the steps that follow


class ResetBuffer(NamedTuple):
    """The start of each environment's next episode, computed in advance.

    Keys are stored as raw data, because JAX's check for reused keys cannot follow a choice among keys.
    """

    episode: Episode  # [N]
    used: jax.Array  # [N] bool: this start was used and must be replaced before the next reset
    key_data: jax.Array  # [N, ...] for all later episodes
    values: scheduled.Values | None = None  # [N] scheduled parameters with which the next start is drawn


def take(
    single: Single, impl: Any, resets: ResetBuffer, needed: jax.Array, values: scheduled.Values
) -> tuple[Episode, ResetBuffer]:
    """Return a start for every environment that needs one [N], and the buffer afterwards.

    Scheduled parameters have these `values` [] now. The start of an episode is drawn with those at the beginning of the
    environment's episode before it. So it does not depend on when it is drawn.

    Off a CPU, a quick reset is computed in each step, since a branch would stop the device until the host has read the
    condition.
    """
    now = {name: jnp.where(needed, x, resets.values[name]) for name, x in values.items()} if resets.values else None
    if target.platform() == "cpu" or not is_quick(single):
        resets = refill(single, impl, resets, needed)
        return resets.episode, resets._replace(used=resets.used | needed, values=now)
    fresh, key_data = draw(single, jax.random.wrap_key_data(resets.key_data, impl=impl), resets.values)
    start = where(resets.used, fresh, resets.episode)
    key_data = where(resets.used & needed, key_data, resets.key_data)
    return start, resets._replace(used=resets.used | needed, key_data=key_data, values=now)


def is_quick(single: Single) -> bool:
    """Return whether a reset has no loop and few operations, so that it costs an accelerator little."""
    program = str(jax.make_jaxpr(functools.partial(reset_one, single))(jax.random.key(0)))
    return not LOOP.search(program) and program.count(" = ") <= MAX_OPERATIONS


def draw(single: Single, key: Key, values: scheduled.Values | None = None) -> tuple[Episode, jax.Array]:
    """Return the start of an episode for each key [N], and key data [N, ...] for later episodes.

    `values` [N] are those of scheduled parameters.
    """
    keys = jax.vmap(functools.partial(jax.random.split, num=3))(key)  # [N, 3]
    begin = lambda key, values: reset_one(scheduled.with_values(single, values), key)
    env_state, obs = jax.vmap(begin)(keys[:, 0], values)
    return Episode(env_state, obs, jax.random.key_data(keys[:, 1])), jax.random.key_data(keys[:, 2])


def refill(single: Single, impl: Any, resets: ResetBuffer, needed: jax.Array) -> ResetBuffer:
    """Return the buffer with an unused start for every environment that needs one [N].

    Resetting N environments costs more than stepping them, and some episode starts at nearly every step. So all used
    starts are replaced only once an environment needs another one. The time of replacement does not affect values,
    because each environment's episodes follow from its own key. A batch of seeds can therefore share one condition;
    under a plain `vmap`, each step would reset.
    """
    shared = jax.custom_batching.custom_vmap(functools.partial(_refill_if_needed, single, impl))
    shared.def_vmap(functools.partial(_refill_seeds, single, impl))
    return shared(resets, needed)


def _refill_if_needed(single: Single, impl: Any, resets: ResetBuffer, needed: jax.Array) -> ResetBuffer:
    replace_used = functools.partial(_replace_used, single, impl)
    return jax.lax.cond((resets.used & needed).any(), replace_used, lambda same: same, resets)


def _replace_used(single: Single, impl: Any, resets: ResetBuffer) -> ResetBuffer:
    fresh = draw(single, jax.random.wrap_key_data(resets.key_data, impl=impl), resets.values)
    episode, key_data = where(resets.used, fresh, (resets.episode, resets.key_data))
    return ResetBuffer(episode, jnp.zeros_like(resets.used), key_data, resets.values)


def _refill_seeds(
    single: Single, impl: Any, num_seeds: int, batched: Any, resets: ResetBuffer, needed: jax.Array
) -> tuple[ResetBuffer, PyTree]:
    """Apply `refill` to [S, N] as to [S * N]."""

    def flat(x, is_batched):
        x = x if is_batched else jnp.broadcast_to(x, (num_seeds, *x.shape))
        return x.reshape(
            x.shape[0] * x.shape[1], *x.shape[2:]
        )  # with explicit sizes, because -1 fails for arrays without elements

    filled = refill(single, impl, *jax.tree.map(flat, (resets, needed), tuple(batched)))
    filled = jax.tree.map(lambda x: x.reshape(num_seeds, len(x) // num_seeds, *x.shape[1:]), filled)
    return filled, jax.tree.map(lambda _: True, filled)


def where(mask: jax.Array, first: PyTree, second: PyTree) -> PyTree:
    """Return rows of the first tree [N, ...] where `mask` [N] or [N, P] is True, else rows of the second."""
    mask_of = lambda a: mask.reshape(mask.shape + (1,) * (a.ndim - mask.ndim))
    return jax.tree.map(lambda a, b: jnp.where(mask_of(a), a, b), first, second)
