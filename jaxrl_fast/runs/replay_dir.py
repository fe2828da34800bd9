"""Keep the files of a replay buffer in another folder than the run's, and delete them when the run is done.

RUN/replay is then a link to DIR/replay. DIR/replay-of.txt holds the path of the run, so that no other run uses them.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from jaxrl_fast.config.paths import CONFIG
from jaxrl_fast.options.run import Options
from jaxrl_fast.utils.files import REPLAY, REPLAY_ENDING, path_of
from jaxrl_fast.utils.locks import LOCK

OWNER, OPTION = "replay-of.txt", "replay_dir"


def chosen(options: Options) -> Path | None:
    """Return the folder of replay_dir, or None. Raise ValueError if a new run cannot have its files there."""
    if not options.replay_dir:
        return None
    folder = path_of(options.replay_dir, OPTION).absolute()
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{OPTION}: must be a folder, got the file {folder}; choose another")
        owner = _owner(folder)
        there = {path.name for path in folder.iterdir()} - {LOCK} if folder.exists() else set()
    except OSError as error:
        raise ValueError(f"{OPTION}: {folder} cannot be read ({error.strerror}); choose another") from error
    if owner:
        raise ValueError(f"{OPTION}: has the replay of another run, {owner}, got {folder}; choose a new folder")
    if there:
        raise ValueError(f"{OPTION}: must be new or empty, got {folder}; choose another")
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{OPTION}: {existing} cannot be written, got {folder}; choose another")
    return folder


def link(run: Path, folder: Path | None, names: Sequence[str]) -> None:
    """Create the folders `names` of a new run in `folder`, if given, and link to them. Raise ValueError on failure."""
    if folder is None or not names:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / OWNER).open("x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{run.resolve()}\n")
        for name in names:
            (folder / name).mkdir()
            (run / name).symlink_to(folder / name)
    except FileExistsError:
        raise ValueError(f"{OPTION}: another run has taken {folder}; choose another") from None
    except OSError as error:
        raise ValueError(f"{OPTION}: {folder} cannot be written ({error.strerror}); choose another") from error


def links(run: Path) -> list[Path]:
    """Return the links of a run to the folders of its replay."""
    return [path for path in sorted(run.glob(f"{REPLAY}*")) if path.is_symlink()]


def check_links(run: Path) -> None:
    """Raise ValueError if a run to be resumed lacks its linked files, or if they are another run's: it is a copy."""
    for path in links(run):
        folder = path.readlink().parent
        if not path.is_dir():
            raise ValueError(f"resume {run}: there is no {folder / path.name}; move the files back")
        owner = _owner(folder)
        if owner and owner != run.resolve() and (owner / CONFIG).is_file():
            raise ValueError(f"resume {run}: {folder} has the replay of another run, {owner}; resume that one")


def size(folder: Path) -> int:
    """Return the bytes that the files of a run's replay take, in its folder or in that of replay_dir."""
    return sum(path.stat().st_size for path in folder.glob(f"{REPLAY}*/*{REPLAY_ENDING}"))


def delete(run: Path, names: Sequence[str]) -> int:
    """Delete the files of a run's replay, and the folders that become empty. Return the number of bytes."""
    num_bytes = size(run)
    for path in (run / name for name in names):
        folder = path.resolve()
        for file in folder.glob(f"*{REPLAY_ENDING}"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder has other files, from the user
            folder.rmdir()
            if path.is_symlink():
                path.unlink()
                (folder.parent / OWNER).unlink(missing_ok=True)
    return num_bytes


def _owner(folder: Path) -> Path | None:
    """Return the run whose replay lies in a folder, if it is known."""
    with contextlib.suppress(FileNotFoundError):
        return Path((folder / OWNER).read_text(encoding="utf-8", errors="surrogateescape").removesuffix("\n"))
    return None
