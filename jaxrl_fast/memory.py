"""What a run will keep in memory, told before it is taken."""

import math
import os
from typing import Any, NamedTuple

import jax

from jaxrl_fast import loop, replay
from jaxrl_fast.priorities import Tree
from jaxrl_fast.types import Agent, Env, PyTree


class Need(NamedTuple):
    """Bytes that stay while training. What is needed in between is known only when it is compiled."""

    parameters: int  # optimiser, normalisers and all
    replay: int
    environments: int
    free: int | None  # None: unknown
    copies: int = 1  # of all of it in the same memory: a checkpoint makes one on the host, which a CPU shares

    @property
    def total(self) -> int:
        """All of it, and its copy."""
        return self.copies * (self.parameters + self.replay + self.environments)

    def __str__(self) -> str:
        parts = [("parameters", self.parameters), ("replay", self.replay), ("environments", self.environments)]
        listed = " · ".join(f"{name} {readable(size)}" for name, size in parts if size)
        listed += " · twice while saving" if self.copies > 1 else ""
        return listed + ("" if self.free is None else f" · {readable(self.free)} free")


def need(env: Env, agent: Agent, num_seeds: int) -> Need:
    """Of so many trainings of all environments together. Nothing is computed or compiled."""
    state = jax.eval_shape(lambda: loop.init(loop.on_paper(env), agent, jax.random.key(0)))
    kept = jax.tree.leaves(state.agent, is_leaf=is_replay)
    of_replay = sum(size(part) for part in kept if is_replay(part))
    parameters = size(state.agent) - of_replay
    copies = 2 if jax.local_devices()[0].platform == "cpu" else 1
    return Need(num_seeds * parameters, num_seeds * of_replay, num_seeds * size(state.actors), free(), copies)


def in_between(env: Env, agent: Agent) -> int:
    """Bytes that an update of one training takes at least: its rollout, and that again as minibatches."""
    env = loop.on_paper(env)
    state = jax.eval_shape(lambda: loop.init(env, agent, jax.random.key(0)))
    act = lambda state: loop.act(env, agent, state.agent, state.actors, jax.random.key(0))[1]
    return 2 * size(jax.eval_shape(act, state))


def check(needed: Need, capacity: int | None) -> None:
    """ValueError where it does not fit; it names the largest capacity of a replay that does."""
    if needed.free is None or needed.total <= needed.free:
        return
    rest = needed.free // needed.copies - (needed.total // needed.copies - needed.replay)
    if capacity is None or rest <= 0:
        raise ValueError(f"this does not fit into memory ({needed}); fewer environments or seeds need less")
    fits = math.floor(rest / (needed.replay / capacity))
    unit = 10 ** max(len(str(fits)) - 2, 0)
    raise ValueError(
        f"capacity {capacity}: the replay needs {readable(needed.replay)}, of which {readable(rest)} are free; "
        f"the largest capacity that fits is {fits // unit * unit}"
    )


def free() -> int | None:
    """Bytes that the first device could still give; on a CPU, this machine or the group that we are confined to."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return limit - stats.get("bytes_in_use", 0) if limit else None
    known = [x for x in (_available(), _left_in_group()) if x is not None]
    return min(known, default=None)


def size(tree: PyTree) -> int:
    """Bytes of arrays, or of their shapes."""
    return sum(_size(leaf) for leaf in jax.tree.leaves(tree))


def readable(count: int) -> str:
    """512 B, 1.5 MB, 7.1 GB: in powers of 1000."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count} B"


def is_replay(x: Any) -> bool:
    """A part of an agent's state that only learning needs."""
    return isinstance(x, (replay.Ring, Tree))


def _size(leaf: Any) -> int:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return leaf.size * leaf.dtype.itemsize


def _available() -> int | None:
    """What Linux says that programs can have without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


def _left_in_group() -> int | None:
    """A container may have less than its machine."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as most, open("/sys/fs/cgroup/memory.current") as now:
            return int(most.read()) - int(now.read())
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return None
