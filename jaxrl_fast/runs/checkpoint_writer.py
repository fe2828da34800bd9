"""Write checkpoints in a thread while training continues, and remove old ones."""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_fast.runs.checkpoint import (
    PREFIX,
    RESOURCES,
    SAVED,
    Arrays,
    best,
    folders,
    kept_resources,
    mark_best,
    remove,
    step_of,
    write,
)
from jaxrl_fast.types.host import HostResource
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.files import ASIDE


class Writer:
    """A writer of checkpoints, one at a time and in a thread, that keeps the newest `keep` and the best one.

    If writing fails, older checkpoints stay and `wait` returns the error message.
    """

    def __init__(self, parent: Path, keep: int, resources: Sequence[HostResource] = ()):
        self.parent, self.keep, self.resources = parent, keep, resources
        self.thread: threading.Thread | None = None
        self.problem = ""
        self.num_written = 0
        self.last: Path | None = None

    def remove_leftovers(self) -> None:
        """Delete what a killed process has left half written. The run's lock must be held."""
        for leftover in self.parent.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)

    def folder(self, env_steps: int) -> Path:
        """Return the folder of the checkpoint at these environment steps."""
        return self.parent / f"{PREFIX}{env_steps:012d}"

    def save(self, folder: Path, arrays: Arrays, manifest: Mapping[str, Any], score: float | None) -> None:
        """Start to write a checkpoint; with a `score`, mark it as the best so far."""
        assert self.thread is None, "wait for the previous checkpoint first"
        parts = {resource.name: resource.save() for resource in self.resources}
        arguments = folder, arrays, manifest, parts, score
        self.thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self.thread.start()

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is being written."""
        return self.thread is not None and self.thread.is_alive()

    def wait(self) -> str:
        """Wait until the checkpoint is on the disk. Return the error message, once; "" without an error."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        problem, self.problem = self.problem, ""
        return problem

    def mark(self, folder: Path, score: float) -> None:
        """Mark an existing checkpoint as the best."""
        self._try("best.json could not be written", mark_best, folder, score)

    def prune(self) -> None:
        """Delete the files of resources that no checkpoint names."""
        if not self.resources:
            return
        kept = kept_resources(self.parent)
        for resource in self.resources:
            resource.prune([each[resource.name] for each in kept if resource.name in each])

    def _write(
        self,
        folder: Path,
        arrays: Arrays,
        manifest: Mapping[str, Any],
        parts: Mapping[str, Callable[[], dict[str, Any]]],
        score: float | None,
    ) -> None:
        """Write a checkpoint and remove old ones; record any error for `wait`."""
        try:
            saved = {RESOURCES: {name: part() for name, part in parts.items()}} if parts else {}
            write(folder, arrays, {**manifest, **saved})
        except Exception as error:
            previous = f"the last one is {self.last}" if self.last else "none has been saved yet"
            self.problem = f"a checkpoint could not be written ({why(error)}); {previous}"
            return
        self.last, self.num_written = folder, self.num_written + 1
        if score is not None:
            self.mark(folder, score)
        self._try(f"{SAVED} could not be written", (self.parent.parent / SAVED).touch)
        self._try("older checkpoints could not be removed", self._remove_old, folder)
        self._try("files of older checkpoints could not be removed", self.prune)

    def _try(self, what: str, act: Callable[..., None], *arguments: Any) -> None:
        """Call `act` and append its error, if any, to the recorded ones."""
        try:
            act(*arguments)
        except Exception as error:
            self.problem = "; ".join(filter(None, (self.problem, f"{what} ({why(error)})")))

    def _remove_old(self, newest: Path) -> None:
        """Remove checkpoints older than the newest `keep`, except the best."""
        older = [folder for folder in folders(self.parent) if step_of(folder) < step_of(newest)]
        for folder in older[: max(len(older) - self.keep + 1, 0)]:
            if folder != best(self.parent):
                remove(folder)
