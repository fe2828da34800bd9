"""Draw items in proportion to their priorities with a tree of sums, in O(log n) for each.

The tree is that of Schaul et al. 2016, "Prioritized experience replay", appendix B.2.1, except that each node has
BRANCHES children instead of two: fewer levels need fewer kernels. A node is always recomputed from its children, never
changed by a difference, so that rounding errors do not accumulate.

Beyond MAX_SINGLE items, float32 is too coarse for a place in the running sum. A large tree is therefore searched with
pairs of float32, a number and its rounding error, down to nodes of MAX_LEAVES items.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.types import Key

BRANCHES = 8
MAX_SINGLE = 2**24  # items of a tree that is searched in float32 alone
MAX_LEAVES = BRANCHES**5  # items below a node that is searched in float32, in a larger tree
HALF_BITS = 12  # a float32 has 24 bits; products of two halves are exact


class Tree(NamedTuple):
    """The priorities, and at each higher level the sums of groups of BRANCHES nodes, f32."""

    levels: tuple[Array, ...]  # the leaves first; each padded to a multiple of BRANCHES; the last has BRANCHES nodes


def init(num_items: int) -> Tree:
    """Return a tree with all priorities 0, from which nothing can be drawn."""
    levels: list[Array] = []
    while not levels or num_items > BRANCHES or levels[-1].size > BRANCHES:
        num_groups = -(-num_items // BRANCHES)
        levels.append(jnp.zeros(num_groups * BRANCHES))
        num_items = num_groups
    return Tree(tuple(levels))


def update(tree: Tree, item: Array, priority: Array) -> Tree:
    """Set the priorities [M] of items [M]. If an item occurs twice, one of its priorities is used."""
    levels = []
    for level in tree.levels:
        levels.append(level.at[item].set(priority, mode="promise_in_bounds"))
        item = item // BRANCHES
        priority = levels[-1].reshape(-1, BRANCHES).at[item].get(mode="promise_in_bounds").sum(-1)
    return Tree(tuple(levels))


def total(tree: Tree) -> Array:
    """Return the sum of all priorities, f32 []."""
    return tree.levels[-1].sum()


def draw(tree: Tree, key: Key, num_draws: int) -> tuple[Array, Array]:
    """Return items [B] int32 and their priorities [B], drawn in proportion to priorities.

    The draws are stratified: one from each B-th of the total. If all priorities are 0, items and priorities are 0 too.
    """
    if is_large(tree):
        return find_in_large(tree, *_strata_in_pairs(tree, key, num_draws))
    strata = (jnp.arange(num_draws) + jax.random.uniform(key, (num_draws,))) / num_draws
    return find(tree, strata * total(tree))


def is_large(tree: Tree) -> bool:
    """Return whether a tree has too many items to be searched in float32 alone."""
    return tree.levels[0].size > MAX_SINGLE


def find(tree: Tree, mass: Array) -> tuple[Array, Array]:
    """Return the items [B] at which the running sum of priorities exceeds mass [B], and their priorities [B]."""
    return _descend(tree.levels, jnp.zeros(mass.shape, jnp.int32), mass)


def find_in_large(tree: Tree, mass: Array, rest: Array) -> tuple[Array, Array]:
    """Return as `find` for the places mass + rest [B], where rest is less than the rounding error of mass."""
    num_single = next((i for i in range(len(tree.levels)) if BRANCHES**i > MAX_LEAVES), len(tree.levels))
    node, node_sum = jnp.zeros(mass.shape, jnp.int32), None
    for level in reversed(tree.levels[num_single:]):
        children = level.reshape(-1, BRANCHES).at[node].get(mode="promise_in_bounds")  # [B, BRANCHES]
        upto, upto_rest = _running_sums(children)
        if node_sum is not None:  # a node is the rounded sum of its children
            error = ((upto[:, -1] - node_sum) + upto_rest[:, -1]) / jnp.where(node_sum > 0, node_sum, 1)
            mass, rest = two_sum(mass, rest + mass * error)
        beyond = (upto > mass[:, None]) | ((upto == mass[:, None]) & (upto_rest > rest[:, None]))
        last = jnp.argmax(jnp.where(children > 0, jnp.arange(BRANCHES)[None], -1), axis=-1)
        found = beyond & (children > 0)
        child = jnp.where(found.any(-1), jnp.argmax(found, axis=-1), last).astype(jnp.int32)
        before = lambda sums, child=child: jnp.where(child > 0, _at(sums, jnp.maximum(child - 1, 0)), 0)
        mass, error = two_sum(mass, -before(upto))
        mass, rest = two_sum(mass, error + (rest - before(upto_rest)))
        mass, rest = jnp.maximum(mass, 0), jnp.where(mass > 0, rest, 0)
        node, node_sum = node * BRANCHES + child, _at(children, child)
    return _descend(tree.levels[:num_single], node, mass)


def _descend(levels: Sequence[Array], node: Array, mass: Array) -> tuple[Array, Array]:
    """Return the leaves [B] at these places below nodes [B] of the level above `levels`, and their priorities [B]."""
    priority = jnp.zeros(mass.shape)
    for level in reversed(levels):
        children = level.reshape(-1, BRANCHES).at[node].get(mode="promise_in_bounds")  # [B, BRANCHES]
        upto = jnp.where(children > 0, jnp.cumsum(children, axis=-1), 0)  # a node of priority 0 is never found
        # Rounding may make the mass equal to the total or larger. A cumsum in another order may even decrease.
        mass = jnp.minimum(mass, jnp.nextafter(upto.max(-1), jnp.float32(0)))
        child = jnp.argmax(upto > mass[:, None], axis=-1).astype(jnp.int32)
        upto, priority = _at(upto, child), _at(children, child)
        mass = jnp.maximum(mass - (upto - priority), 0)
        node = node * BRANCHES + child
    return node, priority


def _at(values: Array, index: Array) -> Array:
    """Return the value [B] of each row of values [B, BRANCHES] at index [B]."""
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]


def _strata_in_pairs(tree: Tree, key: Key, num_draws: int) -> tuple[Array, Array]:
    """Return a random place in each B-th of the total, as pairs [B].

    Stratum i of width w begins at i w. A place in it is (j + u) w / 2^HALF_BITS, for a random whole number j and a
    random u in [0, 1). Whole numbers and w are halved, so that their products are exact, however they are compiled.
    """
    key_part, key_rest = jax.random.split(key)
    sums, rests = _running_sums(tree.levels[-1][None])
    width = sums[0, -1] / num_draws
    halves = _halves(width)
    width_rest = ((sums[0, -1] - halves[0] * num_draws) - halves[1] * num_draws + rests[0, -1]) / num_draws
    stratum = jnp.arange(num_draws)
    part = jax.random.randint(key_part, (num_draws,), 0, 2**HALF_BITS)
    low = 2**HALF_BITS - 1
    numbers = ((stratum & ~low).astype(jnp.float32), (stratum & low).astype(jnp.float32), part / 2**HALF_BITS)
    place, rest = jnp.zeros(num_draws), jnp.zeros(num_draws)
    for number in numbers:
        for half in halves:
            place, error = two_sum(place, number * half)
            rest = rest + error
    rest = rest + stratum * width_rest + jax.random.uniform(key_rest, (num_draws,)) * (width / 2**HALF_BITS)
    return two_sum(place, rest)


def _halves(x: Array) -> tuple[Array, Array]:
    """Return the upper and the lower half of the bits of x, two numbers whose sum is x."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = jax.lax.bitcast_convert_type(bits & jnp.uint32(2**32 - 2**HALF_BITS), jnp.float32)
    return upper, x - upper


def _running_sums(children: Array) -> tuple[Array, Array]:
    """Return the running sums of children [B, BRANCHES] as pairs."""
    total, rest = jnp.zeros(len(children)), jnp.zeros(len(children))
    sums = []
    for i in range(BRANCHES):
        total, error = two_sum(total, children[:, i])
        total, rest = two_sum(total, rest + error)
        sums.append((total, rest))
    upto, rests = zip(*sums, strict=True)
    return jnp.stack(upto, -1), jnp.stack(rests, -1)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a + b rounded, and the rounding error (Knuth 1969, "The art of computer programming 2", 4.2.2)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)
