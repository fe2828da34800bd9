"""Place the seeds of a training and their shards on devices."""

import math
from typing import NamedTuple

import jax

from jaxrl_fast.kernels import build
from jaxrl_fast.types import SHARED_MEMORY_AXIS
from jaxrl_fast.utils import devices

CORE_SHARE = {"processes": 1}  # of ours that use these cores at the same time


def max_grad_workers() -> int:
    """Cores that may sum together: 1 where they cannot, or are few to each of the processes that share them."""
    number = devices.num_cores() // CORE_SHARE["processes"]
    return number if number > 1 and build.is_available("allreduce") else 1


def share_cores(num_processes: int) -> None:
    """So many processes of ours use these cores."""
    CORE_SHARE["processes"] = num_processes


SHARDS, SEEDS = "shards", "seeds"  # names of axes, beside CORES


class Placement(NamedTuple):
    """So many seeds, each in so many shards, on the devices that JAX has.

    Shards have devices of their own if there are enough and a seed has them to itself at a time; else a device computes
    all of a seed's shards side by side. Seeds that share a device advance side by side too, or one after another if
    `sequential_seeds`.

    A single seed that is not in shards may have several hands: cores that all do the same, but share gradient steps.
    """

    num_seeds: int = 1
    num_shards: int = 1
    sequential_seeds: bool = False
    num_grad_workers: int = 1
    axis_name: str = SHARDS  # of shards that are apart; CORES where these sum in the memory that they share

    @property
    def sharded(self) -> bool:
        """Whether the shards of a seed have devices of their own."""
        return 1 < self.num_shards <= jax.local_device_count() and (self.sequential_seeds or self.num_seeds == 1)

    @property
    def grad_axes(self) -> dict[str, int]:
        """The axis of devices that gradients are summed over, and how many they are; nothing for a device alone."""
        if self.sharded:
            return {self.axis_name: self.num_shards}
        return {SHARED_MEMORY_AXIS: self.num_grad_workers} if self.num_grad_workers > 1 else {}

    @property
    def seeds_per_device(self) -> int:
        """How many seeds one after another, or side by side, a device has: as few as can be."""
        at_once = jax.local_device_count() // (self.num_shards if self.sharded else 1)
        return -(-self.num_seeds // at_once)

    @property
    def num_groups(self) -> int:
        """The fewest groups of devices with which it takes no more rounds: of one, or of one for each shard."""
        return -(-self.num_seeds // self.seeds_per_device)

    @property
    def num_devices(self) -> int:
        """How many devices hold the seeds' states, each as much as another."""
        return self.num_groups * math.prod(self.grad_axes.values())

    @property
    def num_padded_seeds(self) -> int:
        """How many seeds are trained for so many: where they cannot be dealt evenly, the last one more than once."""
        return self.seeds_per_device * self.num_groups


SINGLE_DEVICE = Placement()  # one seed on one device
