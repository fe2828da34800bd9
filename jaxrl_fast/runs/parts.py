"""Write a checkpoint by several processes: each one writes the rows that it holds, and process 0 the rest.

    RUN/checkpoints/step-000000501760/state.safetensors      of process 0
                                      state-1.safetensors    of process 1
                                      manifest.json          which file holds which rows

Arrays that are equal in all shards, such as parameters, are written once. A reader without other processes joins the
rows, so that every process, and any number of them, can read the checkpoint.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from jaxrl_fast.parallel.arrays import Index, local_index
from jaxrl_fast.parallel.team import Team

ARRAYS = "state.safetensors"
MAX_COMPARED = 2**26  # bytes of an array up to which it is compared between shards: parameters, but not a replay
ONCE, BLOCKS = "once", "blocks"  # in the manifest's entry of an array


class Division(NamedTuple):
    """How several processes divide a checkpoint's arrays."""

    blocks: Mapping[str, Index] = {}  # where this process's rows lie in arrays of which it has a part
    once: frozenset[str] = frozenset()  # arrays that are equal in all shards; process 0 has one row of each


WHOLE = Division()  # one process has all arrays


def name_of(index: int) -> str:
    """Return the name of the file of a process."""
    return f"state-{index}.safetensors" if index else ARRAYS


def divide(
    arrays: Mapping[str, np.ndarray], whole: Mapping[str, Array], num_seeds: int, team: Team
) -> tuple[dict[str, np.ndarray], Division]:
    """Return what this process writes of the arrays that all have together. All processes must call this.

    Args:
        arrays: This process's rows of each array.
        whole: The same arrays on the devices of all processes.
        num_seeds: With one seed, the first axis is that of shards.
        team: The processes.
    """
    prints = {name: _fingerprint(rows) for name, rows in arrays.items()} if num_seeds == 1 else {}
    each = team.gather(prints)
    once = frozenset(name for name, own in prints.items() if own and all(other[name] == own for other in each))
    found, blocks = {}, {}
    for name, rows in arrays.items():
        if name in once:
            if team.leads:
                found[name] = rows[:1]
        else:
            found[name], blocks[name] = rows, local_index(whole[name])
    return found, Division(blocks, once)


def _fingerprint(rows: np.ndarray) -> str:
    """Return a checksum of the first row if all rows are the same bits, else ""."""
    if not rows.size or rows.nbytes > MAX_COMPARED:
        return ""
    first, *others = (row.tobytes() for row in rows)
    return "" if any(row != first for row in others) else hashlib.blake2b(first, digest_size=16).hexdigest()


def describe(
    kinds: Mapping[str, dict[str, Any]], once: frozenset[str], blocks: Sequence[Mapping[str, Index]]
) -> dict[str, dict[str, Any]]:
    """Return the manifest's entries of arrays, with the file of each block; `blocks` are those of each process."""
    found = {name: {**kind, ONCE: True} if name in once else dict(kind) for name, kind in kinds.items()}
    for process, of_process in enumerate(blocks):
        for name, index in of_process.items():
            found[name].setdefault(BLOCKS, {})[name_of(process)] = index
    return found


def join(
    files: Mapping[str, Mapping[str, np.ndarray]], kinds: Mapping[str, Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """Return whole arrays by name from those of each file. Files may lack arrays, which are then missing."""
    arrays: dict[str, np.ndarray] = {}
    for file, found in files.items():
        for name, rows in found.items():
            kind = kinds.get(name, {})
            if BLOCKS in kind:
                whole = arrays.setdefault(name, np.empty(kind["shape"], rows.dtype))
                whole[tuple(slice(first, end) for first, end in kind[BLOCKS][file])] = rows
            elif ONCE in kind:
                arrays[name] = np.broadcast_to(rows, kind["shape"])
            else:
                arrays[name] = rows
    return arrays
