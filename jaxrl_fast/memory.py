"""What a run will keep in memory, told before it is taken."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast import in_flight, loop, replay
from jaxrl_fast.placement import ALONE, Placement
from jaxrl_fast.priorities import Tree
from jaxrl_fast.types import Agent, Array, Env, PyTree

GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of both versions of Linux's control groups: limit, use, and what of the use is files that can be read again
MEMORY_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class Need(NamedTuple):
    """Bytes that stay while training. What is needed in between is known only when it is compiled."""

    parameters: int  # optimiser, normalisers and all
    replay: int
    environments: int  # and what was played in them and is still to be learnt from
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


def need(env: Env, agent: Agent, placement: Placement = ALONE) -> Need:
    """What trainings of all environments, so many and on so many devices, need together. Nothing is compiled."""
    state = jax.eval_shape(lambda: loop.init(in_flight.on_paper(env), agent, jax.random.key(0)))
    kept = jax.tree.leaves(state.agent, is_leaf=is_replay)
    of_replay = sum(size(part) for part in kept if is_replay(part))
    parameters = size(state.agent) - of_replay
    copies = 2 if jax.local_devices()[0].platform == "cpu" else 1
    of_envs = size((state.actors, state.rollout))
    times = placement.num_trained * placement.num_hands
    parameters, of_replay, of_envs = (times * part for part in (parameters, of_replay, of_envs))
    return Need(parameters, of_replay, of_envs, free(placement.num_devices), copies)


def in_between(env: Env, agent: Agent) -> int:
    """Bytes that an update of one training takes at least: its rollout, and that again as minibatches."""
    env = in_flight.on_paper(env)
    state = jax.eval_shape(lambda: loop.init(env, agent, jax.random.key(0)))
    act = lambda state: loop.act(env, agent, state.agent, state.actors, jax.random.key(0))[1]
    return 2 * size(jax.eval_shape(act, state))


def check(needed: Need, capacity: int | None, steps_per_update: int = 1, resumed: bool = False) -> None:
    """ValueError where it does not fit; it names the largest capacity of a replay that does, in whole updates.

    A run that goes on can have no other, and one copy of it has been read into the host's memory already.
    """
    copies = 1 if resumed else needed.copies
    others = needed.parameters + needed.environments
    if needed.free is None or copies * (others + needed.replay) <= needed.free:
        return
    rest = needed.free - copies * others
    if resumed:
        raise ValueError(f"this run does not fit into memory here ({needed})")
    if capacity is None or rest <= 0:
        raise ValueError(f"this does not fit into memory ({needed}); fewer environments or seeds need less")
    held = max(capacity // steps_per_update, 1) * steps_per_update
    fits = math.floor(rest / (copies * needed.replay / held))
    unit = 10 ** max(len(str(fits)) - 3, 0)
    twice = ", twice while saving" if copies > 1 else ""
    raise ValueError(
        f"capacity {capacity}: the replay needs {readable(needed.replay)}{twice}, and {readable(rest)} are free for "
        f"it; the largest capacity that fits is {fits // unit * unit}"
    )


def free(num_devices: int = 1) -> int | None:
    """Bytes that so many devices, evenly used, could still give; on CPUs, the machine or what we are confined to."""
    devices = jax.local_devices()[:num_devices]
    if devices[0].platform == "cpu":
        available = _available()
        return min([*_left_in_groups(), *([] if available is None else [available])], default=None)
    stats = [device.memory_stats() or {} for device in devices]
    left = [each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats if "bytes_limit" in each]
    return num_devices * min(left) if left else None


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


def replay_names(state: PyTree) -> set[str]:
    """The paths of a replay's arrays in a tree of states, joined by /, as a checkpoint names them."""
    mark = lambda part: jax.tree.map(lambda _: is_replay(part), part)
    named = jax.tree_util.tree_leaves_with_path(jax.tree.map(mark, state, is_leaf=is_replay))
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, of_replay in named if of_replay}


def without_replay(learner: PyTree, keep: Callable[[Array], Array] = lambda x: x, empty: tuple = (0,)) -> PyTree:
    """An agent's state in which arrays of shape `empty` stand for a replay's; `keep` is done to all others."""
    blank = lambda part: jax.tree.map(lambda x: jnp.zeros(empty, x.dtype), part)
    return jax.tree.map(lambda part: blank(part) if is_replay(part) else keep(part), learner, is_leaf=is_replay)


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


def _left_in_groups() -> Iterator[int]:
    """What each control group that we are in may still take: a container or a job may have less than its machine.

    Where a container sees its own group as the root, the path that Linux tells leads nowhere, and the root is read.
    """
    try:
        lines = OWN_GROUP.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in MEMORY_FILES:
            own = Path(path.lstrip("/"))
            for group in {GROUPS / controllers / part for part in (own, *own.parents)}:
                yield from _left_in_group(group, *MEMORY_FILES[controllers])


def _left_in_group(group: Path, limit: str, use: str, files: str) -> Iterator[int]:
    """Nothing where there is no such group, or no limit."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield int((group / limit).read_text()) - int((group / use).read_text()) + int(stat[files])
    except (OSError, ValueError, KeyError):
        return
