"""Write checkpoints in a thread while the training continues."""

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_fast.runs.checkpoint import (
    PREFIX,
    SAVED,
    Arrays,
    best,
    folders,
    mark_best,
    remove,
    step_of,
    write,
)
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.files import ASIDE


class Saver:
    """Writes checkpoints while training goes on, one at a time, and keeps the newest `keep` and the best.

    What goes wrong while one is written is kept for `wait`, in a sentence; the older ones stay.
    """

    def __init__(self, parent: Path, keep: int):
        self.parent, self.keep = parent, keep
        self.thread: threading.Thread | None = None
        self.problem = ""
        self.num_written = 0
        self.last: Path | None = None
        for leftover in parent.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)

    def folder(self, env_steps: int) -> Path:
        """Where the checkpoint of this moment lies."""
        return self.parent / f"{PREFIX}{env_steps:012d}"

    def save(self, folder: Path, arrays: Arrays, manifest: Mapping[str, Any], score: float | None) -> None:
        """Begins to write. `score`: of its evaluation, where that is the best so far."""
        assert self.thread is None, "wait for the one before"
        self.thread = threading.Thread(target=self._write, args=(folder, arrays, manifest, score), name="checkpoint")
        self.thread.start()

    @property
    def busy(self) -> bool:
        """One is being written."""
        return self.thread is not None and self.thread.is_alive()

    def wait(self) -> str:
        """Until it is on the disk. What went wrong, once; "" where nothing did."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        problem, self.problem = self.problem, ""
        return problem

    def mark(self, folder: Path, score: float) -> None:
        """Says that one that is there already is the best."""
        self._try("which checkpoint is the best could not be written", mark_best, folder, score)

    def _write(self, folder: Path, arrays: Arrays, manifest: Mapping[str, Any], score: float | None) -> None:
        """Whatever goes wrong, the thread that waits must hear of it."""
        try:
            write(folder, arrays, manifest)
        except Exception as error:
            kept = f"the last one is {self.last}" if self.last else "there is none yet"
            self.problem = f"a checkpoint could not be written ({why(error)}); {kept}"
            return
        self.last, self.num_written = folder, self.num_written + 1
        if score is not None:
            self.mark(folder, score)
        self._try(f"{SAVED} could not be written", (self.parent.parent / SAVED).touch)
        self._try("older checkpoints could not be removed", self._tidy, folder)

    def _try(self, what: str, act: Callable[..., None], *arguments: Any) -> None:
        """What goes wrong is told after what went wrong before."""
        try:
            act(*arguments)
        except Exception as error:
            self.problem = "; ".join(filter(None, (self.problem, f"{what} ({why(error)})")))

    def _tidy(self, newest: Path) -> None:
        older = [folder for folder in folders(self.parent) if step_of(folder) < step_of(newest)]
        for folder in older[: max(len(older) - self.keep + 1, 0)]:
            if folder != best(self.parent):
                remove(folder)
