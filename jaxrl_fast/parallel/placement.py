"""Place the seeds of a training and their shards on devices."""

import math
from typing import NamedTuple

from jaxrl_fast.kernels import build
from jaxrl_fast.parallel import team
from jaxrl_fast.types import SHARED_MEMORY_AXIS
from jaxrl_fast.utils import devices, target

CORE_SHARE = {"processes": 1}  # processes of jaxrl_fast that use these cores at the same time


def max_grad_workers() -> int:
    """Return the cores per process for gradient workers, at least 1; 1 if the C all-reduce is unavailable.

    Processes of one run do not share memory, so they have none.
    """
    number = devices.num_cores() // CORE_SHARE["processes"] if team.current().count == 1 else 1
    return number if number > 1 and build.is_available("allreduce") else 1


def share_cores(num_processes: int) -> None:
    """Set the number of jaxrl_fast processes that use these cores."""
    CORE_SHARE["processes"] = num_processes


SHARDS, SEEDS = "shards", "seeds"  # names of axes, in addition to SHARED_MEMORY_AXIS


class Placement(NamedTuple):
    """The assignment of seeds, each in `num_shards` shards, to JAX's devices.

    Each shard has a separate device if there are enough devices and one seed advances at a time. Otherwise a device
    computes all shards of a seed by `vmap`. Seeds on the same device also advance by `vmap`, or one after another with
    `sequential_seeds`.

    A single seed without shards may have gradient workers: cores that repeat all work, but split gradient steps.
    """

    num_seeds: int = 1
    num_shards: int = 1
    sequential_seeds: bool = False
    num_grad_workers: int = 1
    axis_name: str = SHARDS  # axis of shards on separate devices; SHARED_MEMORY_AXIS for cores of one CPU

    @property
    def sharded(self) -> bool:
        """Return whether each shard of a seed has a separate device."""
        return 1 < self.num_shards <= len(target.devices()) and (self.sequential_seeds or self.num_seeds == 1)

    @property
    def grad_axes(self) -> dict[str, int]:
        """Return the name and length of the device axis over which gradients are summed; empty for one device."""
        if self.sharded:
            return {self.axis_name: self.num_shards}
        return {SHARED_MEMORY_AXIS: self.num_grad_workers} if self.num_grad_workers > 1 else {}

    @property
    def seeds_per_device(self) -> int:
        """Return the number of seeds on each device, together or one after another: the fewest possible."""
        at_once = len(target.devices()) // (self.num_shards if self.sharded else 1)
        return -(-self.num_seeds // at_once)

    @property
    def num_groups(self) -> int:
        """Return the fewest groups of devices that hold all seeds with `seeds_per_device` in each group.

        A group is one device, or one device per shard.
        """
        return -(-self.num_seeds // self.seeds_per_device)

    @property
    def num_devices(self) -> int:
        """Return the number of devices that hold states, equally many on each."""
        return self.num_groups * math.prod(self.grad_axes.values())

    @property
    def num_padded_seeds(self) -> int:
        """Return the number of seeds that are computed: the last is repeated if seeds do not divide into groups."""
        return self.seeds_per_device * self.num_groups


SINGLE_DEVICE = Placement()  # one seed on one device


def check_processes(placement: Placement) -> None:
    """Raise ValueError unless all devices of all processes of a run hold equally much of it."""
    processes, total = team.current().count, len(target.devices())
    if processes == 1:
        return
    of_all = f"the {total} devices of {processes} processes"
    if placement.num_seeds == 1:
        if placement.num_shards != total:
            problem = f"must be {total}, {of_all}"
            raise ValueError(f"devices: {problem}, got {placement.num_shards}; start another number of processes")
    elif placement.num_padded_seeds != placement.num_seeds or placement.num_devices != total:
        each = total // (placement.num_shards if placement.sharded else 1)
        raise ValueError(f"num_seeds: must be a multiple of {each} for {of_all}, got {placement.num_seeds}; use {each}")
