"""Hold parameters as vectors during the gradient steps of an update, so that few kernels change them.

An accelerator launches a kernel for each array that a step changes, and at these sizes a launch costs more than the
work. A CPU keeps the arrays, since it would copy each of them out of the vector. Networks accept both.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.kernels import rows
from jaxrl_fast.types import PyTree
from jaxrl_fast.utils import target

MAX_SIZE = 2**22  # numbers of a vector: with more, the copies of its parts take longer than launches


@partial(jax.tree_util.register_dataclass, data_fields=["vector"], meta_fields=["shapes", "structure"])
@dataclass(frozen=True)
class Flat:
    """The arrays of a tree as one vector [P], in the order of its leaves."""

    vector: Array
    shapes: tuple[tuple[int, ...], ...]
    structure: Any


def pack(tree: PyTree) -> PyTree:
    """Return a tree in which each dictionary, the parameters of a network, is a `Flat`; on a CPU the tree itself."""
    if target.platform() == "cpu":
        return tree
    return jax.tree.map(lambda x: _pack(x) if isinstance(x, dict) else x, tree, is_leaf=lambda x: isinstance(x, dict))


def unpack(tree: PyTree) -> PyTree:
    """Return the tree that `pack` was given."""
    return jax.tree.map(lambda x: _unpack(x) if isinstance(x, Flat) else x, tree, is_leaf=lambda x: isinstance(x, Flat))


def like(tree: PyTree, other: PyTree) -> PyTree:
    """Return a dictionary of parameters in the form of another: packed if that is a `Flat`."""
    return _pack(tree) if isinstance(other, Flat) else tree


def is_packed(tree: PyTree) -> bool:
    """Return whether a part of the tree is a `Flat`."""
    return any(isinstance(x, Flat) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Flat)))


class Numbers(NamedTuple):
    """A tree whose arrays of one number are packed by dtype, so that one kernel selects or copies all of them."""

    arrays: list[Array]  # the others
    packed: rows.Packed

    @classmethod
    def of(cls, tree: PyTree) -> "Numbers":
        """Return the tree in this form."""
        leaves = jax.tree.leaves(tree)
        return cls([x for x in leaves if x.size != 1], rows.pack([x for x in leaves if x.size == 1]))

    def tree(self, like: PyTree) -> PyTree:
        """Return the tree, which has the structure and shapes of `like`."""
        leaves, structure = jax.tree.flatten(like)
        arrays, numbers = iter(self.arrays), iter(rows.unpack(self.packed, [x for x in leaves if x.size == 1]))
        return jax.tree.unflatten(structure, [next(numbers if x.size == 1 else arrays) for x in leaves])


def _pack(params: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(params)
    if len({x.dtype for x in leaves}) != 1 or sum(x.size for x in leaves) > MAX_SIZE:
        return params
    return Flat(jnp.concatenate([x.ravel() for x in leaves]), tuple(x.shape for x in leaves), structure)


def _unpack(params: Flat) -> PyTree:
    stops = np.cumsum([math.prod(shape) for shape in params.shapes])[:-1]
    parts = jnp.split(params.vector, stops)
    return jax.tree.unflatten(params.structure, [x.reshape(shape) for x, shape in zip(parts, params.shapes)])
