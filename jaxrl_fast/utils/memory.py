"""Measure free memory and the size of arrays, and format bytes."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_fast.utils import target

if TYPE_CHECKING:
    from jaxrl_fast.types import PyTree


def peak_memory_mb() -> float:
    """Return the peak memory in MiB: of the device if it is known, else of this process."""
    import jax

    on_device = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return round(on_device / 2**20 if on_device else _peak_resident_kib() / 2**10, 1)


def _peak_resident_kib() -> int:
    """Return the peak resident memory in KiB. `getrusage` alone would include the memory of the parent process."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 2**10 if sys.platform == "darwin" else peak  # macOS counts bytes


GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Files of both versions of Linux control groups: limit, usage, and the part of it that is reclaimable file cache
MEMORY_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_bytes(num_devices: int = 1) -> int | None:
    """Return the free bytes of the first devices together, used evenly; on CPUs, of the machine or control group.

    Returns:
        The number of bytes, or None if it is unknown.
    """
    import jax

    if other := target.machine():
        return num_devices * other.memory
    devices = jax.local_devices()[:num_devices]
    if devices[0].platform == "cpu":
        return host_free_bytes()
    stats = [device.memory_stats() or {} for device in devices]
    left = [each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats if "bytes_limit" in each]
    return num_devices * min(left) if left else None


def host_free_bytes() -> int | None:
    """Return the free bytes of the machine or of the control group, or None if they are unknown."""
    available = _available()
    return min([*_left_in_groups(), *([] if available is None else [available])], default=None)


def nbytes(tree: "PyTree") -> int:
    """Return the bytes of the arrays, or ShapeDtypeStructs, of a tree."""
    import jax

    return sum(_size(leaf) for leaf in jax.tree.leaves(tree))


def format_bytes(count: int) -> str:
    """Return a number of bytes as "512 B", "1.5 MB" or "7.1 GB", in powers of 1000."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count} B"


def _size(leaf: Any) -> int:
    """Return the bytes of an array or of PRNG keys."""
    import jax

    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return leaf.size * leaf.dtype.itemsize


def _available() -> int | None:
    """Return the bytes available without swapping, or None if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


def _left_in_groups() -> Iterator[int]:
    """Yield the free bytes of each control group of this process: a container or a job may have a limit.

    Some containers see their own group as the root. Then the reported path does not exist, and the root is read.
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
    """Yield the free bytes of a control group; nothing if it does not exist or has no limit."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield int((group / limit).read_text()) - int((group / use).read_text()) + int(stat[files])
    except (OSError, ValueError, KeyError):
        return
