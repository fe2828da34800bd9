"""Define the settings with which environments are made."""

from typing import Any, NamedTuple

from jaxrl_fast.options.wrap import Wrappers as Wrappers
from jaxrl_fast.types.host import AtariProtocol


class Shard(NamedTuple):
    """A shard among `num` with equally many environments. Seeds do not depend on the split."""

    rank: int = 0
    num: int = 1


class Workers(NamedTuple):
    """The processes that step a pool of Python environments."""

    num: int | str = "auto"  # 0: this process steps them
    timeout: float = 0.0  # seconds after which a process counts as stuck; 0: never


class HostEnvConfig(NamedTuple):
    """The settings of host environments.

    Device environments use only `wrappers` and `render`: their random numbers come from PRNG keys.
    """

    seed: tuple[int, ...] = (0,)  # the run's seed, then numbers that distinguish training, evaluation and restarts
    protocol: AtariProtocol = ""
    bridge: str = "auto"  # how a compiled program calls a pool: "ffi", "callback", or "auto" for the fastest that works
    num_async_pools: int = 0  # pools in each shard that step while the policy acts for the others; 0: synchronous
    overlap: bool = False  # pools collect a whole rollout during the update before it
    shard: Shard = Shard()
    workers: Workers = Workers()
    wrappers: Wrappers = Wrappers()
    render: bool = False  # images will be asked for
    episodes: tuple[Any, ...] = ()  # how the first episodes of Python environments begin: (seed, options of reset) each
