"""Start the run of a group from the saved state of other members: the step between two stages of a search."""

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from jaxrl_fast.config.paths import CHECKPOINTS, CONFIG, METRICS
from jaxrl_fast.config.presets import read_meta
from jaxrl_fast.config.settings import to_mapping
from jaxrl_fast.runs import checkpoint, directory
from jaxrl_fast.sweep.grid import Group
from jaxrl_fast.utils import files

LEDGER = "ledger/"  # begins the names of arrays with the updates of a record that is not complete
OF_MEMBERS = ("solved", "diverged", "valid_steps", "quarantined", "windows")  # of the tracker: a value for each member


def start_from(source: Path, target: Path, group: Group, places: Sequence[int], notes: Mapping[str, str] = {}) -> None:
    """Create the run folder `target`, at the newest checkpoint of the run in `source`, with other members.

    Args:
        source: The folder of a run that was stopped; its checkpoints are deleted once `target` exists.
        target: A folder that does not exist.
        group: The members of the new run, and their settings.
        places: For each of them, the place in the old run of the member whose state it gets. A second member with the
            same place gets other random numbers.
        notes: Further files of the new folder, by name.
    """
    saved, _ = directory.checkpoint_to_resume(source)
    assert saved is not None, "the run was saved when it was stopped"
    aside = target.with_name(f"{files.ASIDE}{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    meta = read_meta(source / CONFIG) | {"id": secrets.token_hex(4), "members": [m.label for m in group.members]}
    env = yaml.safe_load((source / CONFIG).read_text(encoding="utf-8"))["env"]  # in Python it may be an object
    settings = to_mapping(group.settings) | {"env": env}
    files.replace(aside / CONFIG, yaml.safe_dump(settings | {"meta": meta}, sort_keys=False))
    for name, text in notes.items():
        files.replace(aside / name, text)
    (aside / METRICS).touch()
    (aside / checkpoint.SAVED).touch()
    arrays, manifest = selected(saved, places)
    manifest["config"] = json.loads(json.dumps(to_mapping(group.settings)))
    checkpoint.write(aside / CHECKPOINTS / saved.folder.name, arrays, manifest)
    aside.rename(target)
    files.sync(target.parent)
    shutil.rmtree(source / CHECKPOINTS, ignore_errors=True)


def selected(saved: checkpoint.Checkpoint, places: Sequence[int]) -> tuple[checkpoint.Arrays, dict[str, Any]]:
    """Return the arrays and the manifest of a checkpoint with the members at these places, which may repeat."""
    tracked = saved.manifest["host"]["scores"]
    one_before, one_after = len(tracked["windows"]) == 1, len(places) == 1
    copies = [list(places[:i]).count(place) for i, place in enumerate(places)]
    kinds, arrays = {}, {}
    for name, array in saved.arrays.items():
        kind = saved.manifest["arrays"].get(name)
        rows = array[None] if kind and one_before else array
        rows = rows[np.asarray(places)]
        if kind and "key" in kind:
            rows = _with_other_keys(rows, copies, kind["key"])
        arrays[name] = np.array(rows[0] if kind and one_after else rows, order="C")
        if kind:
            kinds[name] = kind | {"shape": list(arrays[name].shape)}
    scores = tracked | {name: [tracked[name][place] for place in places] for name in OF_MEMBERS}
    host = saved.manifest["host"]
    others = host["others"] | {"metrics_size": 0}
    return arrays, {**saved.manifest, "arrays": kinds, "host": host | {"scores": scores, "others": others}}


def _with_other_keys(keys: np.ndarray, copies: Sequence[int], implementation: str) -> np.ndarray:
    """Return the data of PRNG keys [members, ...] where each further copy of a member has other keys."""
    numbers = np.asarray(copies, np.int32).reshape(-1, *(1,) * (keys.ndim - 1))
    return np.where(numbers > 0, _folded(keys, np.broadcast_to(numbers[..., 0], keys.shape[:-1]), implementation), keys)


@partial(jax.jit, static_argnums=2)
def _folded(keys: np.ndarray, numbers: np.ndarray, implementation: str) -> jax.Array:
    """Return the data of PRNG keys [..., W] into which numbers [...] are folded."""
    typed = jax.random.wrap_key_data(jnp.asarray(keys).reshape(-1, keys.shape[-1]), impl=implementation)
    folded = jax.vmap(jax.random.fold_in)(typed, numbers.reshape(-1))
    return jax.random.key_data(folded).reshape(keys.shape)
