"""Priorities: a tree of sums that draws items in proportion to a number, in O(log n) for each.

Schaul et al. 2016, "Prioritized experience replay", appendix B.2.1; but each node has BRANCHES children instead of
two, which means fewer levels and so fewer kernels. A node is always recomputed from its children, never changed by a
difference, so that rounding does not pile up.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.types import Key

BRANCHES = 8


class Tree(NamedTuple):
    """Sums of groups of groups ... of priorities, f32."""

    levels: tuple[Array, ...]  # the leaves first; each padded to a multiple of BRANCHES; the last has BRANCHES nodes


def init(num_items: int) -> Tree:
    """All priorities 0: nothing can be drawn."""
    levels: list[Array] = []
    while not levels or num_items > BRANCHES or levels[-1].size > BRANCHES:
        num_groups = -(-num_items // BRANCHES)
        levels.append(jnp.zeros(num_groups * BRANCHES))
        num_items = num_groups
    return Tree(tuple(levels))


def update(tree: Tree, item: Array, priority: Array) -> Tree:
    """Sets the priorities [M] of items [M]; of equal items one wins."""
    levels = []
    for level in tree.levels:
        levels.append(level.at[item].set(priority, mode="promise_in_bounds"))
        item = item // BRANCHES
        priority = levels[-1].reshape(-1, BRANCHES).at[item].get(mode="promise_in_bounds").sum(-1)
    return Tree(tuple(levels))


def total(tree: Tree) -> Array:
    """f32: the sum of all priorities."""
    return tree.levels[-1].sum()


def draw(tree: Tree, key: Key, num_draws: int) -> tuple[Array, Array]:
    """Items [B] int32 and their priorities [B]: proportional and stratified, one draw from each B-th of the total.

    Where all priorities are 0, so is what is returned.
    """
    strata = (jnp.arange(num_draws) + jax.random.uniform(key, (num_draws,))) / num_draws
    return find(tree, strata * total(tree))


def find(tree: Tree, mass: Array) -> tuple[Array, Array]:
    """The items [B] where the running sum of priorities passes mass [B], and their priorities [B]."""
    node = jnp.zeros(mass.shape, jnp.int32)
    for level in reversed(tree.levels):
        children = level.reshape(-1, BRANCHES).at[node].get(mode="promise_in_bounds")  # [B, BRANCHES]
        upto = jnp.where(children > 0, jnp.cumsum(children, axis=-1), 0)  # who has nothing is never found
        # Rounding may leave as much mass as there is, or more, and sums in another order than one by one may even fall.
        mass = jnp.minimum(mass, jnp.nextafter(upto.max(-1), jnp.float32(0)))
        child = jnp.argmax(upto > mass[:, None], axis=-1).astype(jnp.int32)
        upto, priority = (jnp.take_along_axis(x, child[:, None], axis=-1)[:, 0] for x in (upto, children))
        mass = jnp.maximum(mass - (upto - priority), 0)
        node = node * BRANCHES + child
    return node, priority
