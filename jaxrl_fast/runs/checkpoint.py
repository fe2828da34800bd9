"""Write checkpoints atomically and verify them when they are read.

    RUN/checkpoints/step-000000501760/state.safetensors    the arrays by name
                                      manifest.json        shapes and dtypes of the arrays, and the host's state
                                      manifest.sha256      checksum of the manifest, which holds that of the arrays
    RUN/checkpoints/best.json                              name and score of the best checkpoint
    RUN/.saved                                             an empty file: the run has saved a checkpoint
    RUN/replay/                                            files that checkpoints name: replay.host.journal

A checkpoint is written to a temporary folder, synced and then renamed, so it is complete once it has its final name.
Reading verifies SHA-256 checksums, and the newest checkpoint that is intact is loaded. Reading executes nothing: arrays
are bytes with a shape, and the rest is JSON. Some of the bytes may be pickled Python environments, which are unpickled
when the run is resumed, and only then (`training.checkpoint_manager`).
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy

from jaxrl_fast import __version__
from jaxrl_fast.config.paths import FORMAT, check_format
from jaxrl_fast.parallel.arrays import local_rows, whole_shape
from jaxrl_fast.parallel.team import ALONE, Team
from jaxrl_fast.runs import parts
from jaxrl_fast.runs.parts import ARRAYS
from jaxrl_fast.types import PyTree
from jaxrl_fast.utils.files import ASIDE, replace, sync

MANIFEST, SUM, BEST = "manifest.json", "manifest.sha256", "best.json"
RESOURCES = "resources"  # in the manifest: the saved state of each `types.HostResource`, by its name
SAVED = ".saved"
PREFIX = "step-"
AS_BITS = {1: np.uint8, 2: np.uint16}  # by bytes: how dtypes that numpy does not know, such as bfloat16, are stored

Arrays = dict[str, np.ndarray]
Unneeded = Callable[[str], bool]  # from the name of an array


class Checkpoint(NamedTuple):
    """A checkpoint that has been read and verified."""

    folder: Path
    arrays: Arrays
    manifest: dict[str, Any]


def flatten(tree: PyTree, max_rows: int | None = None) -> tuple[Arrays, dict[str, Any]]:
    """Copy a tree's arrays to the host; of several processes, each copies the part that it holds.

    The arrays are copied because the device may reuse their memory for the next chunk before they are written.

    Args:
        tree: Arrays and PRNG keys.
        max_rows: Copy only the first rows of each array; None copies all.

    Returns:
        The arrays by their path, joined by "/", and for each its shape, dtype and, for a key, its implementation.
    """
    arrays, kinds = {}, {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name, kind = jax.tree_util.keystr(path, simple=True, separator="/"), {}
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            kind["key"] = str(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        array = np.array(local_rows(x)[:max_rows] if max_rows is not None else local_rows(x), order="C")
        kinds[name] = kind | {"shape": list(whole_shape(x, array)), "dtype": str(array.dtype)}
        assert name not in arrays, f"duplicate leaf name {name}"
        arrays[name] = array if array.dtype.isbuiltin == 1 else array.view(AS_BITS[array.itemsize])
    return arrays, kinds


def names(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their path, joined by "/"."""
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def unflatten(like: PyTree, saved: Checkpoint, part: Callable[[PyTree], PyTree] = lambda tree: tree) -> PyTree:
    """Return a saved tree, or a `part` of it, as numpy arrays and typed PRNG keys.

    Args:
        like: The structure, shapes and dtypes of the whole tree (ShapeDtypeStructs).
        saved: The checkpoint.
        part: Selects the part of the tree to return.

    Raises:
        ValueError: If the saved tree has another structure, shape or dtype.
    """
    kinds = saved.manifest["arrays"]
    expected = names(like)
    if different := sorted(expected.keys() ^ kinds.keys()):
        problem = "has no" if different[0] in expected else "has an unknown"
        raise ValueError(f"{saved.folder} {problem} array {different[0]}; {_origin(saved)}")
    leaves, like = [], part(like)
    for name, x in names(like).items():
        kind, array = kinds[name], saved.arrays[name]
        array = array if str(array.dtype) == kind["dtype"] else array.view(jax.numpy.dtype(kind["dtype"]))
        leaf = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=kind["key"]) if "key" in kind else array
        if (leaf.shape, leaf.dtype) != (x.shape, x.dtype):
            found, needed = (f"{y.dtype}{list(y.shape)}" for y in (leaf, x))
            raise ValueError(f"{saved.folder}: {name} must be {needed}, got {found}; {_origin(saved)}")
        leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def prepare(folder: Path) -> None:
    """Create the empty folder in which a checkpoint is written, under another name. Raises OSError."""
    aside = _unfinished(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def write_arrays(folder: Path, arrays: Arrays, file: str = ARRAYS) -> str:
    """Write arrays to a file of a checkpoint that was prepared, and return its checksum. Raises OSError."""
    path = _unfinished(folder) / file
    with _as_oserror():
        safetensors.numpy.save_file(arrays, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes the file readable by its owner only
    sync(path)
    return _digest(path)


def discard(folder: Path) -> None:
    """Remove what was written of a checkpoint that is not finished."""
    shutil.rmtree(_unfinished(folder), ignore_errors=True)


def write(folder: Path, arrays: Arrays, manifest: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically; it is on the disk when this returns.

    Raises:
        OSError: If the disk is full or not writable; nothing is left behind then.
    """
    try:
        prepare(folder)
        finish(folder, {ARRAYS: write_arrays(folder, arrays)}, manifest)
    except BaseException:
        discard(folder)
        raise


def finish(folder: Path, files: Mapping[str, str], manifest: Mapping[str, Any]) -> None:
    """Write the manifest and give the checkpoint its name: it is complete then. `files` has their checksums.

    Raises:
        OSError: If the disk is full or not writable; nothing is left behind then.
    """
    aside = _unfinished(folder)
    try:
        content = {**manifest, "format": FORMAT, "files": files}
        (aside / MANIFEST).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        (aside / SUM).write_text(_digest(aside / MANIFEST) + "\n", encoding="ascii")
        for path in (aside / MANIFEST, aside / SUM, aside):
            sync(path)
        replaced = _set_aside(folder) if folder.exists() else None
        try:
            aside.rename(folder)
        except OSError:
            if replaced is not None:
                replaced.rename(folder)
            raise
        for path in (folder.parent, folder.parent.parent):
            sync(path)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        discard(folder)
        raise


def _unfinished(folder: Path) -> Path:
    """Return the folder in which a checkpoint is written."""
    return folder.with_name(f"{ASIDE}{folder.name}")


def read(folder: Path, unneeded: Unneeded = lambda name: False, processes: Team = ALONE) -> Checkpoint:
    """Read and verify a checkpoint, without the arrays for whose names `unneeded` returns True.

    Of as many processes as have written it, each reads its own rows; other rows of its arrays are undefined.

    Raises:
        ValueError: If it is corrupt, unreadable or of another format.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        if hashlib.sha256(content).hexdigest() + "\n" != (folder / SUM).read_bytes().decode("ascii", "replace"):
            raise ValueError(f"{folder}: {MANIFEST} does not match its checksum")
        manifest = json.loads(content)
        check_format(manifest["format"], folder)
        digests = {**manifest["files"]}
        if [*digests] != [parts.name_of(i) for i in range(len(digests))] or not digests:
            raise ValueError(f"{folder}: {MANIFEST} names other files than those of processes")
        if len(digests) == processes.count:
            own = parts.name_of(processes.index)
            digests = {ARRAYS: digests[ARRAYS], own: digests[own]}
        for name, digest in digests.items():
            if _digest(folder / name) != digest:
                raise ValueError(f"{folder}: {name} does not match its checksum")
        found = {}
        for name in digests:
            with safetensors.safe_open(folder / name, framework="numpy") as file:
                names = file.keys()  # the file itself is not iterable
                found[name] = {name: file.get_tensor(name) for name in names if not unneeded(name)}
        return Checkpoint(folder, parts.join(found, manifest.get("arrays", {})), manifest)
    except OSError as error:
        raise ValueError(
            f"{folder}: {Path(error.filename or folder).name} cannot be read ({error.strerror})"
        ) from error
    except (safetensors.SafetensorError, json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder} is not a valid checkpoint ({type(error).__name__})") from error


def damaged_resource(saved: Checkpoint, processes: Team = ALONE) -> str:
    """Return a sentence about the first damaged file that a checkpoint names in the run's folder, or "".

    Of several processes, each looks at the files of its shards.
    """
    parent, resources = saved.folder.parents[1], [*saved.manifest.get(RESOURCES, {}).items()]
    for name, part in (resources[i] for i in processes.share(len(resources))):
        for file in part["files"]:
            path = parent / name / file["name"]
            try:
                if _digest(path, file["bytes"]) != file["sha256"]:
                    return f"{saved.folder}: {name}/{path.name} does not match its checksum"
            except OSError as error:
                return f"{saved.folder}: {name}/{path.name} cannot be read ({error.strerror})"
    return ""


def kept_resources(parent: Path) -> list[dict[str, Any]]:
    """Return the entries of resources in the manifests of all checkpoints, except unreadable ones."""
    found = []
    for folder in folders(parent):
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
            found.append(json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get(RESOURCES, {}))
    return found


def newest(
    parent: Path, unneeded: Unneeded = lambda name: False, whole: bool = False, processes: Team = ALONE
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint without `unneeded` arrays, or None; and the problem of each newer one.

    With `whole`, the files that it names outside of its folder must be intact as well: see `damaged_resource`. Of
    several processes, each calls this, and they return the same checkpoint.
    """
    problems: list[str] = []
    for name in processes.decide(lambda: [folder.name for folder in reversed(folders(parent))]):
        saved, wrong = None, ""
        try:
            saved = read(parent / name, unneeded, processes)
            wrong = damaged_resource(saved, processes) if whole else ""
        except ValueError as error:
            wrong = str(error)
        if found := next(filter(None, processes.gather(wrong)), ""):
            problems.append(found)
        else:
            return saved, problems
    return None, problems


def folders(parent: Path) -> list[Path]:
    """Return all checkpoints, the oldest first. Folders with other names, such as copies, are ignored."""
    found = [f for f in parent.iterdir() if _is_checkpoint(f.name)] if parent.is_dir() else []
    return sorted(found, key=step_of)


def _is_checkpoint(name: str) -> bool:
    """Return whether a folder's name is that of a checkpoint."""
    return name.startswith(PREFIX) and name.removeprefix(PREFIX).isdecimal()


def best(parent: Path) -> Path | None:
    """Return the best checkpoint, or None if it is unknown."""
    best_so_far = marked(parent)
    return best_so_far and best_so_far[0]


def mark_best(folder: Path, score: float) -> None:
    """Mark a checkpoint as the best, unless another one with a higher score is marked, as before a run was resumed."""
    best_so_far = marked(folder.parent)
    if best_so_far is None or best_so_far[0] == folder or best_so_far[1] < score:
        content = {"checkpoint": folder.name, "eval_return_mean": score}
        replace(folder.parent / BEST, json.dumps(content, allow_nan=False) + "\n")


def marked(parent: Path) -> tuple[Path, float] | None:
    """Return the checkpoint that is marked as the best and its score, or None if it no longer exists."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        content = json.loads((parent / BEST).read_text(encoding="utf-8"))
        found = (folder for folder in folders(parent) if folder.name == content["checkpoint"])
        return next(((folder, float(content["eval_return_mean"])) for folder in found), None)
    return None


def env_steps(folder: Path) -> int:
    """Return the environment steps in a checkpoint's name."""
    return int(folder.name.removeprefix(PREFIX))


def remove(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a partly removed folder is not taken for one."""
    shutil.rmtree(_set_aside(folder), ignore_errors=True)


def step_of(folder: Path) -> tuple[int, str]:
    """Return a sort key that orders checkpoints by their steps."""
    return len(folder.name), folder.name


def _set_aside(folder: Path) -> Path:
    """Rename a checkpoint so that it no longer counts as one; return the new path."""
    aside = folder.with_name(f"{ASIDE}{folder.name}-old")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def _digest(path: Path, num_bytes: int | None = None) -> str:
    """Return the SHA-256 checksum of a file, or of its first bytes."""
    with path.open("rb") as file:
        if num_bytes is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while num_bytes > 0 and (part := file.read(min(num_bytes, 2**20))):
            digest.update(part)
            num_bytes -= len(part)
        return digest.hexdigest()


def _origin(saved: Checkpoint) -> str:
    """Return the end of an error message: which version wrote the checkpoint."""
    version = saved.manifest.get("meta", {}).get("versions", {}).get("jaxrl_fast", "of unknown version")
    if version == __version__:
        return "it was written with different settings or a different algorithm"
    return f"jaxrl_fast {version} wrote it and this is {__version__}; use the version that wrote it"


@contextlib.contextmanager
def _as_oserror() -> Iterator[None]:
    """Raise OSError instead of the error with which safetensors reports a full disk."""
    try:
        yield
    except safetensors.SafetensorError as error:
        raise OSError(0, str(error)) from error
