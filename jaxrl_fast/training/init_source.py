"""Read what a run may start from: another run, a checkpoint, an exported policy, or a file of arrays.

RUN         a run's folder: its best checkpoint, or the newest one if none is marked
CHECKPOINT  a folder in RUN/checkpoints
EXPORT      the folder of an exported policy: the actor and its normalizer
FILE        .npz or .safetensors with arrays by the names of a checkpoint, of which the beginning may be left out
...:PIECE   one piece of these: network, actor, critic, torso ... (`networks.pieces`), and the normalizer
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import safetensors.numpy

from jaxrl_fast.config import paths, resume
from jaxrl_fast.config.population import LABEL
from jaxrl_fast.config.presets import read_meta
from jaxrl_fast.runs import checkpoint, choose
from jaxrl_fast.utils import files
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.formatting import short_number

ORIGIN = "init_from"
WEIGHTS, CARD = "weights.safetensors", "policy.json"  # of an exported policy
FILES = (checkpoint.ARRAYS, checkpoint.MANIFEST, CARD, WEIGHTS, "policy.npz", "policy.onnx", "policy.stablehlo")
AGENT = "agent/"  # begins the names of an agent's arrays in a checkpoint

Arrays = Mapping[str, np.ndarray]


class Source(NamedTuple):
    """The arrays of another run or of a file."""

    kind: Literal["run", "export", "file"]  # it must have all parameters, those of the actor, or any
    name: str  # for messages
    arrays: Arrays  # by name; of a run with S seeds [S, ...]
    piece: str = ""  # which piece to load; "": all
    seeds: tuple[int, ...] = ()  # of the arrays' first axis; (): they have no such axis


def read(text: str) -> Source:
    """Return the arrays that an `init_from` names. Raise ValueError if there are none."""
    path, piece = files.path_of(text, ORIGIN), ""
    if not path.exists() and ":" in text:
        text, _, piece = text.rpartition(":")
        path = files.path_of(text, ORIGIN)
    if path.name in FILES and any((path.parent / name).is_file() for name in (CARD, checkpoint.MANIFEST)):
        path = path.parent
    if path.is_dir() and (path / CARD).is_file():
        if not (path / WEIGHTS).is_file():
            raise ValueError(f"{ORIGIN}: {path} needs {WEIGHTS}, got none; export the policy again")
        return Source("export", text, _named_arrays(path / WEIGHTS), piece)
    if path.is_file():
        return Source("file", text, _named_arrays(path), piece)
    return read_run(text, path, ORIGIN, piece)


def read_run(text: str, path: Path, origin: str, piece: str = "") -> Source:
    """Return the arrays of a run, or of one of its checkpoints. Raise ValueError, with the option, if there is none."""
    if (path / checkpoint.MANIFEST).is_file():
        return _of_checkpoint(text, piece, checkpoint.read(path, _unneeded), origin)
    resume.file_of_run(path, f"{origin} {text}")
    return _of_checkpoint(text, piece, choose.choose_checkpoint(path, "best", _unneeded), origin)


def _named_arrays(path: Path) -> Arrays:
    """Return the arrays in a file by name."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as found:
                return {name: np.asarray(found[name]) for name in found.files}
        if path.suffix == ".safetensors":
            return safetensors.numpy.load_file(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        raise ValueError(f"{ORIGIN}: {path} cannot be read ({why(error)}); use another file") from error
    problem = f"must be a run, an exported policy or an .npz or .safetensors file, got {path}"
    raise ValueError(f"{ORIGIN}: {problem}; use one of these")


def _unneeded(name: str) -> bool:
    """Return whether an array of a checkpoint is certainly not a parameter or a statistic."""
    return not name.startswith(AGENT) or "/replay/" in name or "/optimizer/" in name


def _of_checkpoint(text: str, piece: str, saved: checkpoint.Checkpoint, origin: str) -> Source:
    """Return the source that a checkpoint is, without the axis of shards."""
    options = saved.manifest["config"]
    config = saved.folder.parents[1] / paths.CONFIG
    labels = read_meta(config).get("members") if config.is_file() else None
    labels = labels or [{"seed": options["seed"] + i} for i in range(options["num_seeds"])]
    varied = sorted({name for label in labels for name in label if label[name] != labels[0].get(name)} - {"seed"})
    if varied:
        names = ", ".join(name.removeprefix(LABEL) for name in varied)
        problem = f"members of {text} must differ only in the seed, got {names}"
        remedy = "export one of them and start from the export" if origin == ORIGIN else "use another run"
        raise ValueError(f"{origin}: {problem}; {remedy}")
    several = len(labels) > 1
    first = (slice(None),) * several + (0,) if saved.manifest["num_shards"] > 1 else ()
    arrays = {name: x[first] for name, x in saved.arrays.items()}
    name = f"{text} at step {short_number(saved.manifest['env_steps'])}"
    return Source("run", name, arrays, piece, tuple(label["seed"] for label in labels) if several else ())
