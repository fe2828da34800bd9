"""Define the spaces of actions, as agents see them."""

import math
from dataclasses import dataclass

import jax
from jax import Array


@dataclass(frozen=True)  # not a tuple: spaces of different kinds are never equal
class Discrete:
    """A space of `num` actions: int32 [] in [0, num)."""

    num: int

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def num_outputs(self) -> int:
        """Return the number of network outputs that a distribution over the space requires."""
        return self.num

    def zeros(self, *batch: int) -> Array:
        """Return int32 zeros [*batch]."""
        return jax.numpy.zeros(batch, jax.numpy.int32)


@dataclass(frozen=True)
class MultiDiscrete:
    """A space of k independent choices: int32 [k], entry i in [0, nums[i])."""

    nums: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nums),)

    @property
    def num_outputs(self) -> int:
        return sum(self.nums)

    def zeros(self, *batch: int) -> Array:
        """Return int32 zeros [*batch, k]."""
        return jax.numpy.zeros((*batch, *self.shape), jax.numpy.int32)


@dataclass(frozen=True)
class Box:
    """A space of arrays: float32 [*shape] in [-1, 1]; the adapter scales them to the environment's own bounds."""

    shape: tuple[int, ...]

    @property
    def num_outputs(self) -> int:
        return math.prod(self.shape)

    def zeros(self, *batch: int) -> Array:
        """Return float32 zeros [*batch, *shape]."""
        return jax.numpy.zeros((*batch, *self.shape), jax.numpy.float32)


@dataclass(frozen=True)
class Hybrid:
    """A space of k independent choices and D numbers: float32 [k + D].

    Entry i < k is a whole number in [0, nums[i]), and the others are in [-1, 1]. Adapters make such arrays of actions
    in several parts (`envs.nested`).
    """

    nums: tuple[int, ...]
    size: int  # D

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nums) + self.size,)

    @property
    def num_outputs(self) -> int:
        return sum(self.nums) + self.size

    def zeros(self, *batch: int) -> Array:
        """Return float32 zeros [*batch, k + D]."""
        return jax.numpy.zeros((*batch, *self.shape), jax.numpy.float32)


Space = Discrete | MultiDiscrete | Box | Hybrid


def mask_size(space: Space) -> int:
    """Return the entries of an action mask: the options of all choices; 0 for a Box."""
    if isinstance(space, Discrete):
        return space.num
    return 0 if isinstance(space, Box) else sum(space.nums)
