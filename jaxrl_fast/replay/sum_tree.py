"""Draw items in proportion to their priorities with a tree of sums, in O(log n) for each.

The tree is that of Schaul et al. 2016, "Prioritized experience replay", appendix B.2.1, except that each node has
BRANCHES children instead of two: fewer levels need fewer kernels. A node is always recomputed from its children, never
changed by a difference, so that rounding errors do not accumulate.

Beyond MAX_PRIORITIES items, float32 is too coarse for a place in the running sum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.rl.off_policy import MAX_PRIORITIES
from jaxrl_fast.types import Key

BRANCHES = 8


class Tree(NamedTuple):
    """The priorities, and at each higher level the sums of groups of BRANCHES nodes, f32."""

    levels: tuple[Array, ...]  # the leaves first; each padded to a multiple of BRANCHES; the last has BRANCHES nodes


def init(num_items: int) -> Tree:
    """Return a tree with all priorities 0, from which nothing can be drawn."""
    assert num_items <= MAX_PRIORITIES, num_items
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
    strata = (jnp.arange(num_draws) + jax.random.uniform(key, (num_draws,))) / num_draws
    return find(tree, strata * total(tree))


def find(tree: Tree, mass: Array) -> tuple[Array, Array]:
    """Return the items [B] at which the running sum of priorities exceeds mass [B], and their priorities [B]."""
    node, priority = jnp.zeros(mass.shape, jnp.int32), jnp.zeros(mass.shape)
    for level in reversed(tree.levels):
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
