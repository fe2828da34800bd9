"""Checkpoints on disk: whole or not there, and checked to the last bit when they are read.

    RUN/checkpoints/step-000000501760/state.safetensors    the arrays by name
                                      manifest.json        what they are, and the host's numbers
                                      manifest.sha256      of the manifest, which holds the arrays'
    RUN/checkpoints/best.json                              which one evaluated best
    RUN/.saved                                             an empty file: there has been a checkpoint

A checkpoint is written in a folder of another name, synced and renamed, so that one under its own name was complete
when it got it. Reading verifies SHA-256 sums; the newest that verifies is what is loaded. Nothing in a checkpoint is
executed: arrays are bytes with a shape, and the rest is JSON.
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
from jaxrl_fast.types import PyTree
from jaxrl_fast.utils.files import ASIDE, replace, sync

ARRAYS, MANIFEST, SUM, BEST = "state.safetensors", "manifest.json", "manifest.sha256", "best.json"
SAVED = ".saved"
PREFIX = "step-"
AS_BITS = {1: np.uint8, 2: np.uint16}  # how safetensors holds what numpy has no name for, such as bfloat16

Arrays = dict[str, np.ndarray]
Unneeded = Callable[[str], bool]  # of the name of an array


class Checkpoint(NamedTuple):
    """What was read."""

    folder: Path
    arrays: Arrays
    manifest: dict[str, Any]


def flatten(tree: PyTree, most: int | None = None) -> tuple[Arrays, dict[str, Any]]:
    """Copies of a tree's arrays on the host by their path, and what each is: shape, dtype, a key's implementation.

    Copies, for the device may be given the tree's own memory for the next chunk before they are written. Of each array
    the first `most` are copied, or all.
    """
    arrays, kinds = {}, {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name, kind = jax.tree_util.keystr(path, simple=True, separator="/"), {}
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            kind["key"] = str(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        x = x if most is None else np.asarray(x)[:most]
        array = np.array(x, order="C")
        kinds[name] = kind | {"shape": list(array.shape), "dtype": str(array.dtype)}
        assert name not in arrays, f"two leaves are called {name}"
        arrays[name] = array if array.dtype.isbuiltin == 1 else array.view(AS_BITS[array.itemsize])
    return arrays, kinds


def names(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their path, joined by "/"."""
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def unflatten(like: PyTree, saved: Checkpoint, part: Callable[[PyTree], PyTree] = lambda tree: tree) -> PyTree:
    """Return a saved tree, or a `part` of it, as numpy arrays and typed keys.

    Raises ValueError if the saved tree is not like `like` (ShapeDtypeStructs).
    """
    kinds = saved.manifest["arrays"]
    wanted = names(like)
    if different := sorted(wanted.keys() ^ kinds.keys()):
        has = "has no" if different[0] in wanted else "still has"
        raise ValueError(f"{saved.folder} {has} {different[0]}; {_origin(saved)}")
    leaves, like = [], part(like)
    for name, x in names(like).items():
        kind, array = kinds[name], saved.arrays[name]
        array = array if str(array.dtype) == kind["dtype"] else array.view(jax.numpy.dtype(kind["dtype"]))
        leaf = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=kind["key"]) if "key" in kind else array
        if (leaf.shape, leaf.dtype) != (x.shape, x.dtype):
            held, now = (f"{y.dtype}{list(y.shape)}" for y in (leaf, x))
            raise ValueError(f"{saved.folder}: {name} is {held}, and now {now} is wanted; {_origin(saved)}")
        leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def write(folder: Path, arrays: Arrays, manifest: Mapping[str, Any]) -> None:
    """Whole or not at all, and on the disk when it returns. OSError where there is no room or no right to."""
    aside = folder.with_name(f"{ASIDE}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        with _as_oserror():
            safetensors.numpy.save_file(arrays, aside / ARRAYS)
        content = {**manifest, "format": FORMAT, "files": {ARRAYS: _digest(aside / ARRAYS)}}
        (aside / MANIFEST).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        (aside / SUM).write_text(_digest(aside / MANIFEST) + "\n", encoding="ascii")
        (aside / ARRAYS).chmod((aside / MANIFEST).stat().st_mode)  # safetensors lets only the owner read
        for path in (*aside.iterdir(), aside):
            sync(path)
        gone = _set_aside(folder) if folder.exists() else None
        try:
            aside.rename(folder)
        except OSError:
            if gone is not None:
                gone.rename(folder)
            raise
        for path in (folder.parent, folder.parent.parent):
            sync(path)
        if gone is not None:
            shutil.rmtree(gone, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def read(folder: Path, unneeded: Unneeded = lambda name: False) -> Checkpoint:
    """A checkpoint that is intact, but for `unneeded` arrays. ValueError says what is wrong with it."""
    try:
        content = (folder / MANIFEST).read_bytes()
        if hashlib.sha256(content).hexdigest() + "\n" != (folder / SUM).read_bytes().decode("ascii", "replace"):
            raise ValueError(f"{folder}: {MANIFEST} is not what was written")
        manifest = json.loads(content)
        check_format(manifest["format"], folder)
        if manifest["files"] != {ARRAYS: _digest(folder / ARRAYS)}:
            raise ValueError(f"{folder}: {ARRAYS} is not what was written")
        with safetensors.safe_open(folder / ARRAYS, framework="numpy") as file:
            names = file.keys()  # it is no dictionary
            arrays = {name: file.get_tensor(name) for name in names if not unneeded(name)}
        return Checkpoint(folder, arrays, manifest)
    except OSError as error:
        raise ValueError(
            f"{folder}: {Path(error.filename or folder).name} cannot be read ({error.strerror})"
        ) from error
    except (safetensors.SafetensorError, json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder} is no checkpoint of ours ({type(error).__name__})") from error


def newest(parent: Path, unneeded: Unneeded = lambda name: False) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint, but for `unneeded` arrays, and what is wrong with each newer one."""
    wrong: list[str] = []
    for folder in reversed(folders(parent)):
        try:
            return read(folder, unneeded), wrong
        except ValueError as error:
            wrong.append(str(error))
    return None, wrong


def folders(parent: Path) -> list[Path]:
    """All checkpoints, the oldest first. A copy that someone put beside them has another name and is none."""
    found = [f for f in parent.iterdir() if _is_checkpoint(f.name)] if parent.is_dir() else []
    return sorted(found, key=step_of)


def _is_checkpoint(name: str) -> bool:
    return name.startswith(PREFIX) and name.removeprefix(PREFIX).isdecimal()


def best(parent: Path) -> Path | None:
    """The one that evaluated best, as far as that is known."""
    known = marked(parent)
    return known and known[0]


def mark_best(folder: Path, score: float) -> None:
    """Says that this one is the best so far, unless one that is there was better: so said a run before it went on."""
    known = marked(folder.parent)
    if known is None or known[0] == folder or known[1] < score:
        content = {"checkpoint": folder.name, "eval_return_mean": score}
        replace(folder.parent / BEST, json.dumps(content, allow_nan=False) + "\n")


def marked(parent: Path) -> tuple[Path, float] | None:
    """The one that was said to be the best, if it is still there, and its score."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        said = json.loads((parent / BEST).read_text(encoding="utf-8"))
        found = (folder for folder in folders(parent) if folder.name == said["checkpoint"])
        return next(((folder, float(said["eval_return_mean"])) for folder in found), None)
    return None


def env_steps(folder: Path) -> int:
    """When it was made, as its name says."""
    return int(folder.name.removeprefix(PREFIX))


def remove(folder: Path) -> None:
    """A folder that is half removed must not look like a checkpoint."""
    shutil.rmtree(_set_aside(folder), ignore_errors=True)


def step_of(folder: Path) -> tuple[int, str]:
    """Among the others: as its number has it."""
    return len(folder.name), folder.name


def _set_aside(folder: Path) -> Path:
    """Takes its name from it, at once."""
    gone = folder.with_name(f"{ASIDE}{folder.name}-old")
    shutil.rmtree(gone, ignore_errors=True)
    return folder.rename(gone)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _origin(saved: Checkpoint) -> str:
    """Which version wrote it, for a sentence about what cannot be read."""
    version = saved.manifest.get("meta", {}).get("versions", {}).get("jaxrl_fast", "of unknown version")
    if version == __version__:
        return "it was written with other settings, or another program, than those that read it"
    return f"jaxrl_fast {version} wrote it, and this is {__version__}: go on with the program that wrote it"


@contextlib.contextmanager
def _as_oserror() -> Iterator[None]:
    """safetensors reports a full disk in its own way."""
    try:
        yield
    except safetensors.SafetensorError as error:
        raise OSError(0, str(error)) from error
