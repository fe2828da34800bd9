"""Split the rows of a rollout into minibatches: each row once an epoch, in a random order that is cheap to compute.

For an agent with memory, whole sequences take the place of rows: consecutive steps of one environment.

`jax.random.permutation` sorts twice and takes a third to a half of a small PPO's time. A bijection of [0, num_rows)
that depends on a key requires no sort: each place is computed independently of the others.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.types import Key, PyTree
from jaxrl_fast.utils import target

NUM_ROUNDS = 4
MIN_ROWS, MAX_ROWS = 256, 1024  # rows of a part on a CPU: activations stay in its cache, and there are few calls


def shuffle(key: Key, num_rows: int) -> Array:
    """Return a random permutation of [0, num_rows), int32 [num_rows], for num_rows below 2^31.

    Each round multiplies, adds and xorshifts, and is a bijection of the integers below the next power of two. The
    rounds are the mixing steps of Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators",
    section 4, with constants drawn from the key. While a place is num_rows or more, further rounds map it along its
    cycle (Black & Rogaway 2002, "Ciphers with arbitrary finite domains", section 3).
    """
    num_bits = max(1, (num_rows - 1).bit_length())
    mask = 2**num_bits - 1
    constants = jax.random.bits(key, (NUM_ROUNDS, 2))
    shift = max(1, num_bits // 2)

    def mix(x: Array) -> Array:
        for factor, offset in constants:
            x = (x * (factor | 1) + offset) & jnp.uint32(mask)
            x ^= x >> shift
        return x

    places: Array = mix(jnp.arange(num_rows, dtype=jnp.uint32))
    if num_rows <= mask:
        outside = lambda x: x >= num_rows
        places = jax.lax.while_loop(lambda x: outside(x).any(), lambda x: jnp.where(outside(x), mix(x), x), places)
    return places.astype(jnp.int32)


def validate(num_rows: int, num_minibatches: int, num_shards: int = 1, sequence_length: int | None = None) -> None:
    """Raise ValueError if a shard's rows of an update do not divide into minibatches; the error names near numbers.

    With a `sequence_length`, the rows are sequences.
    """
    if num_rows % num_minibatches == 0:
        return
    below = next(n for n in range(min(num_minibatches, num_rows), 0, -1) if num_rows % n == 0)
    larger = range(num_minibatches, min(2 * num_minibatches, num_rows) + 1)
    above = next((n for n in larger if num_rows % n == 0), below)
    near = " or ".join(map(str, sorted({below, above})))
    where = f" on each of {num_shards} devices" if num_shards > 1 else ""
    rows = "steps" if sequence_length is None else f"sequences of {sequence_length} steps"
    raise ValueError(
        f"num_minibatches: must divide the {num_rows} {rows} per update{where}, got {num_minibatches}; use {near}"
    )


def assign(key: Key, num_rows: int, num_minibatches: int) -> Array:
    """Return the row numbers of each minibatch of an epoch, int32 [num_minibatches, B]."""
    return shuffle(key, num_rows).reshape(num_minibatches, -1)


def gather_rows(rows: PyTree, numbers: Array) -> PyTree:
    """Return the rows [...] of [num_rows, ...] with these numbers, which must all be different."""
    return jax.tree.map(lambda x: x.at[numbers].get(mode="promise_in_bounds", unique_indices=True), rows)


def flatten(steps: PyTree, sequence_length: int | None = None) -> PyTree:
    """Return steps [T, N, ...] as rows [T * N, ...], or as sequences of L steps, [T / L * N, L, ...]."""
    if sequence_length is None:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
    return flatten(jax.tree.map(partial(cut, sequence_length), steps))


def cut(length: int, x: Array) -> Array:
    """Return steps [T, N, ...] as parts of L steps, [T / L, N, L, ...]."""
    return x.reshape(-1, length, *x.shape[1:]).swapaxes(1, 2)


def accumulate_grads(function: Callable[[PyTree, PyTree], PyTree], params: PyTree, rows: PyTree) -> PyTree:
    """Return the sum of function(params, part) over parts of the rows [B, ...], small enough for a CPU's cache.

    The function must be a sum over rows, such as the gradient of a weighted loss. On other devices than a CPU, all
    rows are one part.
    """
    parts = _parts(rows)
    if len(jax.tree.leaves(parts)[0]) == 1:
        return function(params, rows)
    first, rest = jax.tree.map(lambda x: x[0], parts), jax.tree.map(lambda x: x[1:], parts)
    add = lambda total, part: (jax.tree.map(jnp.add, total, function(params, part)), None)
    return jax.lax.scan(add, function(params, first), rest)[0]


def map_chunks(function: Callable[[PyTree], PyTree], rows: PyTree) -> PyTree:
    """Return function(rows [B, ...]), [B, ...], computed by parts as in `accumulate_grads`.

    The function must treat each row independently of the others.
    """
    parts = _parts(rows)
    if len(jax.tree.leaves(parts)[0]) == 1:
        return function(rows)
    return flatten(jax.lax.map(function, parts))


def _parts(rows: PyTree) -> PyTree:
    """Return rows [B, ...] as [parts, B / parts, ...]."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    sizes = (size for size in range(min(MAX_ROWS, num_rows), MIN_ROWS - 1, -1) if num_rows % size == 0)
    num_parts = num_rows // next(sizes, num_rows) if target.platform() == "cpu" else 1
    return jax.tree.map(lambda x: x.reshape(num_parts, num_rows // num_parts, *x.shape[1:]), rows)
