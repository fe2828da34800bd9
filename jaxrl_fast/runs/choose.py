"""Choose the checkpoint of a run that is read to act, or to start another run: the best or the newest one."""

from pathlib import Path
from shlex import quote
from typing import Literal

from jaxrl_fast.config import paths
from jaxrl_fast.config.paths import CHECKPOINTS
from jaxrl_fast.config.sources import PROGRAM
from jaxrl_fast.runs import checkpoint, files
from jaxrl_fast.utils import warnings
from jaxrl_fast.utils.formatting import counted

Which = Literal["best", "last"]


def choose_checkpoint(folder: Path, which: Which, unneeded: checkpoint.Unneeded) -> checkpoint.Checkpoint:
    """Return the best or the newest checkpoint; if it is corrupt, warn and return the newest intact one.

    Raises:
        ValueError: If the run has no checkpoint, or none is intact.
    """
    parent = folder / CHECKPOINTS
    if not checkpoint.folders(parent):
        raise ValueError(f"{folder} has no checkpoint; {_checkpoint_hint(folder)}")
    best = checkpoint.best(parent) if which == "best" else None
    problems = []
    if best is not None:
        try:
            return checkpoint.read(best, unneeded)
        except ValueError as error:
            problems = [str(error)]
    newest, newer_problems = checkpoint.newest(parent, unneeded)
    problems += [line for line in newer_problems if line not in problems]
    if newest is None:
        got = f"got {counted(len(problems), 'damaged checkpoint')} ({problems[0]})"
        again = f"{PROGRAM} --config {quote(str(folder / paths.CONFIG))}"
        raise ValueError(f"{folder}: needs an intact checkpoint, {got}; train again with {again}")
    for line in problems:
        warnings.warn(f"{line}; using {newest.folder.name} instead")
    return newest


def _checkpoint_hint(folder: Path) -> str:
    """Return the end of an error message: how to make a checkpoint of this run."""
    if files.summary_if_any(folder).get("status") == "diverged":
        return "it diverged before the first checkpoint"
    return f"wait if the run is in progress, else resume it with {files.resume_command(folder)}"
