"""Define the settings with which environments are made."""

from typing import Any, NamedTuple

from jaxrl_fast.options.host import RAY
from jaxrl_fast.options.wrap import Wrappers as Wrappers
from jaxrl_fast.types.host import AtariProtocol

MAX_AHEAD = 32  # workers that "auto" chooses for environments that step ahead of the learner


class Shard(NamedTuple):
    """A shard among `num` with equally many environments. Seeds do not depend on the split."""

    rank: int = 0
    num: int = 1


class Workers(NamedTuple):
    """The processes that step a pool of Python environments."""

    num: int | str = "auto"  # 0: this process steps them
    timeout: float = 0.0  # seconds after which a process counts as stuck; 0: never
    ray: bool = False  # Ray actors, on this or other machines, and not processes of this one

    def __str__(self) -> str:
        """Return the option's value: "4", "ray:4"."""
        return f"{RAY if self.ray else ''}{self.num}"


def workers_of(value: int | str, timeout: float) -> Workers:
    """Return the workers that the option host.workers asks for: "auto", a number, or "ray:4"."""
    text = str(value)
    if text.startswith(RAY):
        return Workers(int(text.removeprefix(RAY)), timeout, ray=True)
    return Workers(value, timeout)


def num_workers_ahead(num_envs: int, workers: Workers) -> int:
    """Return the number of workers that step ahead of the learner, each as a pool by itself.

    It does not depend on the time that a step takes. Raises ValueError if there are none or they do not divide.
    """
    divisors = [number for number in range(1, num_envs + 1) if num_envs % number == 0]
    if workers.num == "auto":
        return max(number for number in divisors if number <= MAX_AHEAD)
    number = min(int(workers.num), num_envs)
    if number not in divisors:
        most = max(divisor for divisor in [0, *divisors] if divisor <= number)
        problem = f"must divide {num_envs} environments" if number else "must be 1 or more"
        raise ValueError(f"host.workers: {problem} with host.ahead, got {workers}; use {most or max(divisors)}")
    return number


class HostEnvConfig(NamedTuple):
    """The settings of host environments.

    Device environments use only `wrappers`, `render` and `schedules`: their random numbers come from PRNG keys.
    """

    seed: tuple[int, ...] = (0,)  # the run's seed, then numbers that distinguish training, evaluation and restarts
    protocol: AtariProtocol = ""
    bridge: str = "auto"  # how a compiled program calls a pool: "ffi", "callback", or "auto" for the fastest that works
    num_async_pools: int = 0  # pools in each shard that step while the policy acts for the others; 0: synchronous
    overlap: bool = False  # pools collect a whole rollout during the update before it
    ahead: int = 0  # rollouts that a pool may be ahead of the learner
    shard: Shard = Shard()
    workers: Workers = Workers()
    wrappers: Wrappers = Wrappers()
    render: bool = False  # images will be asked for
    schedules: bool = False  # options follow their schedules; otherwise each has its last value
    episodes: tuple[Any, ...] = ()  # how the first episodes of Python environments begin: (seed, options of reset) each
