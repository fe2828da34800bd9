"""Estimate the disk space of a run before it starts."""

import math
import shutil
from pathlib import Path
from typing import NamedTuple

from jaxrl_fast.options.run import Options
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.replay.host.blocks import file_bytes
from jaxrl_fast.replay.host.buffer import BLOCK
from jaxrl_fast.training import schedule
from jaxrl_fast.training.memory import MemoryEstimate
from jaxrl_fast.utils.memory import format_bytes
from jaxrl_fast.utils.parsing import parse_period

NUM_RECORDS = 500  # lines of metrics.jsonl for each seed by default
RECORD_BYTES = 700  # of a line of metrics.jsonl
EVENT_BYTES = 1500  # of the same numbers as TensorBoard events


class ReplayFiles(NamedTuple):
    """The files with the observations of a replay that is stored in the host's memory or on disk.

    Each checkpoint holds those of its rows. Checkpoints share files, unless all rows are new since the last one.
    """

    options: Options
    on_disk: bool
    raw: float  # bytes of a transition's observation
    kept: float  # the same, compressed

    def num_bytes(self, size: int) -> float:
        """Return the most bytes at any time of a replay of `size` transitions: of all kept checkpoints together."""
        options, keep = self.options, self.options.keep_checkpoints
        group = BLOCK * options.num_envs
        whole, new, file = (size + group) * self.kept, self._steps_between_saves() * self.kept, 0
        if self.on_disk:  # rows begin within a file, and a new file may have its full length at once
            file = file_bytes(-(-size // group) + 1, int(group * self.raw))
            old: float = file
        else:  # each save makes a file, and the oldest one has rows that have left the buffer
            old = 0 if size * self.kept <= new < math.inf else min(new, whole)
        newest = whole + keep * min(new, whole + file) + old + file
        best = (whole + old) * bool(options.eval_every)
        newest_rows = (keep + 2) * group * self.kept  # each checkpoint has its own
        return min(newest + best, options.total_steps * self.kept + file) + newest_rows

    def _steps_between_saves(self) -> float:
        """Return the most environment steps between checkpoints; infinity if only the clock or a stop decides."""
        steps, _ = parse_period(str(self.options.save_every))
        return steps or math.inf


class DiskEstimate(NamedTuple):
    """The bytes that a run writes at most, but for the curve and other small files."""

    checkpoint: int
    num_checkpoints: int  # the newest ones, the best one, and one that is being written
    has_replay: bool  # in each checkpoint
    metrics: int
    free: int | None  # None: unknown
    replay: int = 0  # `ReplayFiles`, unless they are on another disk

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return self.checkpoint * self.num_checkpoints + self.metrics + self.replay

    def __str__(self) -> str:
        with_replay = " with the replay" if self.has_replay else ""
        checkpoints = f"checkpoints {format_bytes(self.checkpoint)}{with_replay}, at most {self.num_checkpoints}"
        checkpoints += f" · replay at most {format_bytes(self.replay)}" if self.replay else ""
        metrics = f"metrics about {format_bytes(self.metrics)}"
        return f"{checkpoints} · {metrics}" + ("" if self.free is None else f" · {format_bytes(self.free)} free")


def record_length(options: Options, num_updates: int, steps_per_update: int) -> int:
    """Return the updates of a record."""
    return schedule.to_updates(options.log_every, steps_per_update) or -(-num_updates // NUM_RECORDS)


def estimate(
    needs: MemoryEstimate, placement: Placement, options: Options, num_updates: int, steps_per_update: int, folder: Path
) -> DiskEstimate:
    """Return the disk space of a run with this memory: a checkpoint holds what one worker of each seed holds."""
    copies = placement.num_grad_workers * placement.num_padded_seeds
    state = (needs.parameters + needs.replay + needs.environments) * placement.num_seeds // copies
    num_records = -(-num_updates // record_length(options, num_updates, steps_per_update)) * placement.num_seeds
    return DiskEstimate(
        checkpoint=state,
        num_checkpoints=options.keep_checkpoints + 2,
        has_replay=needs.replay > 0,
        metrics=num_records * (RECORD_BYTES + EVENT_BYTES * ("tensorboard" in options.loggers)),
        free=free_bytes(folder),
        replay=0 if options.replay_dir else needs.files,
    )


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    try:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        return shutil.disk_usage(existing).free
    except (OSError, StopIteration):
        return None
