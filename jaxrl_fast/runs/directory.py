"""A run's folder: chosen, refused, made and claimed; and what is in that of a run that goes on."""

import re
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from jaxrl_fast.config import paths
from jaxrl_fast.config.options import Options
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.runs import files
from jaxrl_fast.utils import locks
from jaxrl_fast.utils.files import is_folder_name, path_of

if TYPE_CHECKING:
    from jaxrl_fast.runs.checkpoint import Checkpoint
    from jaxrl_fast.types import Env


def chosen(options: Options) -> Path | None:
    """What the user asked for. ValueError where it cannot be, or exists."""
    if options.run_dir and options.name:
        said = f"--run-dir {options.run_dir}"
        raise ValueError(f"--name {options.name} does not go with {said}, which has the name in it")
    if options.run_dir:
        folder = path_of(options.run_dir, "--run-dir")
    elif not is_folder_name(options.name):
        raise ValueError(f"--name {options.name}: a name is wanted, without folders; --run-dir takes a path")
    elif options.name:
        folder = paths.RUNS / options.name
    else:
        return None
    if is_taken(folder):
        raise ValueError(_there_already(folder))
    return folder


def make(settings: Settings, env: "Env") -> Path:
    """The run's own folder, new and empty. A name of our own gives way to one that is taken."""
    options = settings.options
    env_name = "_".join(filter(None, [name_of_env(env.spec.id), env.protocol]))
    ours = paths.RUNS / f"{settings.algo_name}_{env_name}_s{options.seed}_{datetime.now():%Y%m%d-%H%M%S}"
    asked = chosen(options)
    for folder in [asked] if asked else [ours, *(ours.with_name(f"{ours.name}-{i}") for i in range(2, 100))]:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if folder == asked and not is_taken(folder):
                return folder
        except OSError as error:
            reason = f"cannot be made ({error.strerror})"
            raise ValueError(f"the run folder {folder} {reason}; choose another --run-dir") from error
    raise ValueError(_there_already(folder))


def name_of_env(env_id: str) -> str:
    """Its own name, as a part of a folder's."""
    return re.sub(r"[^\w.-]+", "-", env_id.rpartition("/")[2].rpartition(":")[2])[:40].strip("-")


def claim(folder: Path) -> locks.Lock:
    """A run's folder for us alone."""
    try:
        return locks.Lock(folder)
    except BlockingIOError:
        raise ValueError(f"another process is writing to the run {folder}") from None
    except OSError as error:
        raise ValueError(f"the run folder {folder} cannot be written to ({error.strerror})") from error


def check_free(folder: Path, lock: locks.Lock) -> None:
    """ValueError, without the lock, where another run has been in the folder since we looked."""
    if is_taken(folder):
        lock.release()
        raise ValueError(_there_already(folder))


def is_taken(folder: Path) -> bool:
    """Whether there is something in it, but for a lock. ValueError where there can be no such folder."""
    try:
        return folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= {locks.LOCK})
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be made ({error.strerror}); choose another") from error


def saved_in(folder: Path) -> "tuple[Checkpoint | None, tuple[str, ...]]":
    """What a run goes on from, and what is wrong with newer checkpoints. ValueError where going on would lose lines.

    None: it was killed or failed before its first checkpoint, and begins again.
    """
    from jaxrl_fast.config.paths import CHECKPOINTS
    from jaxrl_fast.runs import checkpoint

    saved, damaged = checkpoint.newest(folder / CHECKPOINTS)
    if saved is not None:
        _check_metrics(folder, saved)
    elif damaged:  # beginning again would write over metrics that took long to get
        raise ValueError(f"--resume {folder}: none of its {len(damaged)} checkpoints is intact ({damaged[0]})")
    else:
        check_nothing_is_lost(folder)
    return saved, (*damaged,)


def check_nothing_is_lost(folder: Path) -> None:
    """A run without a checkpoint begins again, over its metrics, unless they are of one that was saved or ended.

    Those of a run that was killed or failed before its first checkpoint come again, and so do those of one that was
    stopped by then, where a stop saves nothing (`--exact-resume`).
    """
    from jaxrl_fast.runs import checkpoint

    metrics, summary = folder / paths.METRICS, files.summary_if_any(folder)
    ended = bool(summary) and (summary["status"] in ("done", "diverged") or summary["checkpoints"] > 0)
    known = ended or (folder / checkpoint.SAVED).exists()
    if known and metrics.is_file() and metrics.stat().st_size > 0:
        raise ValueError(
            f"--resume {folder}: there is no checkpoint, and to begin again would write over its {paths.METRICS}; "
            f"begin a new run with --config {folder / paths.CONFIG}"
        )


def _check_metrics(folder: Path, saved: "Checkpoint") -> None:
    """A run goes on behind the lines that there were at its checkpoint."""
    path, size = folder / paths.METRICS, saved.manifest["host"]["others"]["metrics_size"]
    there = path.stat().st_size if path.is_file() else 0
    if there < size:
        raise ValueError(
            f"--resume {folder}: {paths.METRICS} has {there} bytes, of {size} when {saved.folder} was saved"
        )


def _there_already(folder: Path) -> str:
    """A sentence about a run's folder that exists."""
    on = f", or go on with it by --resume {quote(str(folder))}" if (folder / paths.CONFIG).is_file() else ""
    return f"the run folder {folder} exists already; choose another --run-dir or --name{on}"
