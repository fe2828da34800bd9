"""Write checkpoints in a thread while training continues, and remove old ones."""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_fast.parallel import team
from jaxrl_fast.runs.checkpoint import (
    PREFIX,
    RESOURCES,
    SAVED,
    Arrays,
    best,
    discard,
    finish,
    folders,
    kept_resources,
    mark_best,
    prepare,
    remove,
    step_of,
    write_arrays,
)
from jaxrl_fast.runs.parts import WHOLE, Division, describe, name_of
from jaxrl_fast.types.host import HostResource
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.files import ASIDE

TOPIC = "checkpoint"  # of the threads that write


class Writer:
    """A writer of checkpoints, one at a time and in a thread, that keeps the newest `keep` and the best one.

    If writing fails, older checkpoints stay and `wait` returns the error message.
    """

    def __init__(self, parent: Path, keep: int, resources: Sequence[HostResource] = ()):
        self.parent, self.keep, self.resources, self.team = parent, keep, resources, team.current()
        self.thread: threading.Thread | None = None
        self.problem = ""
        self.num_written = 0
        self.last: Path | None = None

    def remove_leftovers(self) -> None:
        """Delete what a killed process has left half written. The run's lock must be held."""
        if not self.team.leads:
            return
        for leftover in self.parent.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)

    def folder(self, env_steps: int) -> Path:
        """Return the folder of the checkpoint at these environment steps."""
        return self.parent / f"{PREFIX}{env_steps:012d}"

    def save(
        self,
        folder: Path,
        arrays: Arrays,
        manifest: Mapping[str, Any],
        score: float | None,
        division: Division = WHOLE,
    ) -> None:
        """Start to write a checkpoint; with a `score`, mark it as the best so far.

        Of several processes, each writes its `arrays`.
        """
        assert self.thread is None, "wait for the previous checkpoint first"
        resources = {resource.name: resource.save() for resource in self.resources}
        problem = self.team.decide(lambda: _problem_of(prepare, folder))
        arguments = folder, arrays, manifest, division, resources, score, problem
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
        if self.team.leads:
            self._try("best.json could not be written", mark_best, folder, score)

    def prune(self, newest: Mapping[str, Any] = {}) -> None:
        """Delete the files of resources that no checkpoint names, apart from those of the `newest`.

        A disk that hosts share may not yet show a checkpoint that process 0 has completed.
        """
        if not self.resources:
            return
        kept = [*kept_resources(self.parent), newest]
        for resource in self.resources:
            resource.prune([each[resource.name] for each in kept if resource.name in each])

    def _write(
        self,
        folder: Path,
        arrays: Arrays,
        manifest: Mapping[str, Any],
        division: Division,
        resources: Mapping[str, Callable[[], dict[str, Any]]],
        score: float | None,
        problem: str,
    ) -> None:
        """Write a checkpoint and remove old ones; record any error for `wait`. Process 0 completes it."""
        own: dict[str, Any] = {"blocks": division.blocks, RESOURCES: {}, "sha256": ""}
        try:
            if not problem:
                own[RESOURCES] = {name: save() for name, save in resources.items()}
                own["sha256"] = write_arrays(folder, arrays, name_of(self.team.index))
        except Exception as error:
            problem = why(error)
        each = self.team.gather(own | {"problem": problem}, TOPIC)
        complete = lambda: _problem_of(_complete, folder, division, manifest, each)
        if problem := self.team.decide(complete, TOPIC):
            previous = f"the last one is {self.last}" if self.last else "none has been saved yet"
            self.problem = f"a checkpoint could not be written ({problem}); {previous}"
            return
        self.last, self.num_written = folder, self.num_written + 1
        if self.team.leads:
            if score is not None:
                self.mark(folder, score)
            self._try(f"{SAVED} could not be written", (self.parent.parent / SAVED).touch)
            self._try("older checkpoints could not be removed", self._remove_old, folder)
        self._try("files of older checkpoints could not be removed", self.prune, own[RESOURCES])

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


def _problem_of(act: Callable[..., None], *arguments: Any) -> str:
    """Call `act` and return its error in words, or ""."""
    try:
        act(*arguments)
    except Exception as error:
        return why(error)
    return ""


def _complete(folder: Path, division: Division, manifest: Mapping[str, Any], each: Sequence[Mapping[str, Any]]) -> None:
    """Complete a checkpoint from what each process has written. Raises OSError, and nothing is left behind then."""
    for i, written in enumerate(each):
        if problem := written["problem"]:
            discard(folder)
            raise OSError(0, f"process {i}: {problem}" if i else problem)
    resources = {name: saved for written in each for name, saved in written[RESOURCES].items()}
    arrays = describe(manifest.get("arrays", {}), division.once, [written["blocks"] for written in each])
    files = {name_of(i): written["sha256"] for i, written in enumerate(each)}
    finish(folder, files, {**manifest, "arrays": arrays} | ({RESOURCES: resources} if resources else {}))
