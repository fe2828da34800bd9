"""Choose, create and lock a run's folder, and read the checkpoint of a run to resume."""

import re
import secrets
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from jaxrl_fast.config import paths
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.options.run import Options
from jaxrl_fast.parallel import team
from jaxrl_fast.runs import files
from jaxrl_fast.utils import locks
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.formatting import counted

if TYPE_CHECKING:
    from jaxrl_fast.runs.checkpoint import Checkpoint
    from jaxrl_fast.types import Env

TOKEN = ".processes"  # a file that process 0 writes and the others read


def chosen(options: Options) -> Path | None:
    """Return the folder that the user chose, or None. Raise ValueError if it is not valid or exists."""
    if not options.run_dir:
        return None
    folder = path_of(options.run_dir, "run_dir")
    if is_taken(folder):
        raise ValueError(_exists_message(folder, "run_dir"))
    return folder


def make(requested: Path | None, default: Path, start: Path, option: str = "run_dir") -> Path:
    """Create the folder of a run or a sweep. A default name that exists gets a number.

    Args:
        requested: The folder that the user chose by `option`, if any: new or empty.
        default: The folder if the user chose none.
        start: The absolute directory that a relative folder is in; environments may have changed the current one.
        option: The option, for messages.

    Returns:
        The folder, relative to `start` unless the user gave an absolute one.

    Raises:
        ValueError: If the folder exists or cannot be created.
    """
    numbered = (default.with_name(f"{default.name}-{i}") for i in range(2, 100))
    for folder in [requested] if requested else [default, *numbered]:
        try:
            (start / folder).mkdir(parents=True)
            return folder
        except FileExistsError:
            if folder == requested and not is_taken(start / folder):
                return folder
        except OSError as error:
            problem = f"cannot create the folder {folder} ({error.strerror})"
            raise ValueError(f"{option}: {problem}; choose another") from error
    raise ValueError(_exists_message(start / folder, option))


def default(settings: Settings, env: "Env") -> Path:
    """Return the folder of a run for which the user chose none."""
    env_name = "_".join(filter(None, [name_of_env(env.spec.id), env.protocol]))
    return paths.RUNS / f"{settings.algo_name}_{env_name}_s{settings.options.seed}_{datetime.now():%Y%m%d-%H%M%S}"


def name_of_env(env_id: str) -> str:
    """Return an environment's name in a form that is valid in a folder's name."""
    return re.sub(r"[^\w.-]+", "-", env_id.rpartition("/")[2].rpartition(":")[2])[:40].strip("-")


def claim(folder: Path, option: str = "resume") -> locks.Lock:
    """Lock a run's folder, chosen by `option`, for this process. Raise ValueError if another process has it."""
    try:
        return locks.Lock(folder)
    except BlockingIOError:
        raise ValueError(f"{option}: another process is writing to the run, got {folder}; wait for its end") from None
    except OSError as error:
        problem = f"the folder cannot be written ({error.strerror})"
        raise ValueError(f"{option}: {problem}, got {folder}; change its permissions") from error


def claim_new(folder: Path, option: str = "run_dir") -> locks.Lock:
    """Lock a new folder. Raise ValueError if another process has used it since it was chosen by `option`."""
    lock = claim(folder, option)
    if is_taken(folder):
        lock.release()
        raise ValueError(_exists_message(folder, option))
    return lock


def check_shared(folder: Path, option: str) -> None:
    """Raise ValueError unless all processes of the run see the folder, chosen by `option`."""
    processes = team.current()
    if processes.count == 1:
        return
    token, path = processes.decide(lambda: secrets.token_hex(8)), folder / TOKEN
    if processes.leads:
        path.write_text(token, encoding="ascii")
    processes.decide(lambda: None)
    sees = path.is_file() and path.read_text(encoding="ascii") == token
    each = processes.gather(sees)
    if processes.leads:
        path.unlink(missing_ok=True)
    if blind := ", ".join(str(i) for i, sees in enumerate(each) if not sees):
        remedy = "use a folder that all hosts share, and start all processes in the same directory"
        raise ValueError(f"{option}: process {blind} does not see the folder, got {folder}; {remedy}")


def is_taken(folder: Path) -> bool:
    """Return whether a folder holds anything but a lock. Raise ValueError if no such folder can exist."""
    try:
        return folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= {locks.LOCK})
    except OSError as error:
        raise ValueError(f"cannot create the folder {folder} ({error.strerror}); choose another") from error


def checkpoint_to_resume(folder: Path) -> "tuple[Checkpoint | None, tuple[str, ...]]":
    """Return the checkpoint to resume from, and a sentence for each newer one that is damaged.

    Without a checkpoint (None), the run was killed or failed before its first one, and starts again.

    Raises:
        ValueError: If all checkpoints are corrupt, or resuming would lose lines of metrics.jsonl.
    """
    from jaxrl_fast.config.paths import CHECKPOINTS
    from jaxrl_fast.runs import checkpoint

    saved, problems = checkpoint.newest(folder / CHECKPOINTS, whole=True, processes=team.current())
    if saved is not None:
        _check_metrics(folder, saved)
    elif problems:  # starting again would overwrite the metrics
        remedy = f"start a new run with config {quote(str(folder / paths.CONFIG))}"
        got = f"got {counted(len(problems), 'damaged checkpoint')} ({problems[0]})"
        raise ValueError(f"resume {folder}: needs an intact checkpoint, {got}; {remedy}")
    else:
        check_restart(folder)
    return saved, tuple(f"{problem}; using the previous one" for problem in problems)


def check_restart(folder: Path) -> None:
    """Raise ValueError if starting a run again would overwrite metrics that it would not reproduce.

    A run without a checkpoint starts again and overwrites metrics.jsonl. A run that was killed, failed or stopped
    before its first checkpoint writes the same lines again. A run that has ended or saved a checkpoint is rejected.
    """
    from jaxrl_fast.runs import checkpoint

    metrics, summary = folder / paths.METRICS, files.summary_if_any(folder)
    begun = summary.get("status") in ("running", "stopped", "failed") and summary.get("num_checkpoints") == 0
    ended = bool(summary) and not begun  # also if the file was edited
    known = ended or (folder / checkpoint.SAVED).exists()
    if known and metrics.is_file() and metrics.stat().st_size > 0:
        raise ValueError(
            f"resume {folder}: the run has no checkpoint, and starting again would overwrite its {paths.METRICS}; "
            f"start a new run with config {folder / paths.CONFIG}"
        )


def _check_metrics(folder: Path, saved: "Checkpoint") -> None:
    """Raise ValueError if metrics.jsonl is shorter than it was at the checkpoint."""
    path, size = folder / paths.METRICS, saved.manifest["host"]["others"]["metrics_size"]
    size_now = path.stat().st_size if path.is_file() else 0
    if size_now < size:
        problem = f"{paths.METRICS} has {size_now} bytes, but had {size} when {saved.folder} was saved"
        raise ValueError(f"resume {folder}: {problem}; restore the file")
    if not size:  # it was saved before the first record, and the file may be missing
        return
    with path.open("rb") as file:
        known = file.read(size)
    if b"\r" in known or known[-1:] not in (b"", b"\n"):  # to continue after `size` bytes would cut a line
        remedy = f"restore it, or convert its line ends: sed -i 's/\\r$//' {quote(str(path))}"
        raise ValueError(f"resume {folder}: {paths.METRICS} was changed after {saved.folder.name}; {remedy}")


def _exists_message(folder: Path, option: str) -> str:
    """Return the error message for a folder that exists."""
    hint = f", or resume it with {files.resume_command(folder)}" if (folder / paths.CONFIG).is_file() else ""
    return f"{option}: must be a new or empty folder, got {folder}; choose another{hint}"
