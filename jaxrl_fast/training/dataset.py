"""Read the steps of a dataset in the form of a run's agents: an .npz file, or a dataset of Minari.

FILE.npz    arrays observations [B, ...] and actions [B, ...] in the environment's own form; of a Dict or a Tuple one
            for each part: "observations/position". Optional: action_masks, and valid, bool [B], where False marks a
            step that only resets. Other arrays are not read.
minari:ID   a dataset that Minari has downloaded or made
FOLDER      the folder of such a dataset. Its episodes have one observation more than actions: the last is left out.
"""

import contextlib
import zipfile
from collections.abc import Collection
from importlib import util
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_fast.envs import raw_form
from jaxrl_fast.envs.spaces import describe_action
from jaxrl_fast.options.bonus import MINARI
from jaxrl_fast.rl.bonuses.bc import Demonstrations
from jaxrl_fast.types import Discrete, Env, PyTree
from jaxrl_fast.types.spaces import mask_size
from jaxrl_fast.utils import files
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.importing import install
from jaxrl_fast.utils.memory import format_bytes, host_free_bytes
from jaxrl_fast.utils.parsing import nearest

ORIGIN = "bonus.dataset"
OBS, ACTIONS, MASKS, VALID = "observations", "actions", "action_masks", "valid"

Arrays = dict[str, np.ndarray]


def load(name: str, env: Env) -> Demonstrations:
    """Return the steps of a dataset as agents of these environments see them.

    Raises:
        ValueError: If it cannot be read, or an array is missing, empty or not finite, has another shape or dtype, or
            has actions that the environment does not have. The message names the array.
    """
    arrays, is_raw = read(name)
    num_rows = _num_rows(arrays, name)
    valid = _array(arrays, VALID, (num_rows,), "b", name) if VALID in arrays else np.ones(num_rows, bool)
    if not valid.any():
        raise ValueError(f"{ORIGIN}: {name} must have a step, got none; use another file")
    if not valid.all():
        arrays = {key: x[valid] for key, x in arrays.items() if len(x) == num_rows}
    num = int(valid.sum())
    obs, masks = _observations(arrays, num, env, name, is_raw)
    action = _actions(arrays, num, env, name)
    if env.spec.has_action_mask and masks is None:
        masks = _array(arrays, MASKS, (num, mask_size(env.spec.action)), "b", name)
    if masks is not None:
        _check_allowed(masks, action, env.spec.action, name)
    record: Any = Demonstrations  # of numpy arrays, which the program of a run gets as arguments
    found: Demonstrations = record(obs, action, masks)
    return found


def read(name: str) -> tuple[Arrays, bool]:
    """Return the arrays of a dataset by name, and whether observations are in the environment's own form.

    Otherwise `evaluate --collect` has written them as agents see them.
    """
    if not name:
        raise ValueError(f"{ORIGIN}: must be a file or {MINARI}ID, got none; write one with evaluate --collect")
    path = Path() if name.startswith(MINARI) else files.path_of(name, ORIGIN)
    if name.startswith(MINARI) or path.is_dir():
        return _of_minari(name, path), True
    if not path.exists():
        raise ValueError(f"{ORIGIN}: {name} does not exist, got no file; give an .npz file or {MINARI}ID")
    try:
        with np.load(path, allow_pickle=False) as found:
            _check_names(found.files, name)
            _check_memory(name, path)
            wanted = [key for key in found.files if _first(key) in (OBS, ACTIONS, MASKS, VALID)]
            return {key: np.atleast_1d(found[key]) for key in wanted}, _is_raw(found)
    except Exception as error:  # numpy and zipfile may raise anything for a damaged file
        if str(error).startswith(ORIGIN):
            raise
        raise ValueError(f"{ORIGIN}: {name} cannot be read ({why(error)}), got no .npz file; use another") from error


def _is_raw(found: Any) -> bool:
    """Return whether the metadata of a file do not say that observations are as agents see them."""
    with contextlib.suppress(KeyError, ValueError):  # metadata of others may be objects
        return f'"{OBS}": "{raw_form.SEEN}"' not in str(found[raw_form.METADATA])
    return True


def _first(key: str) -> str:
    """Return the name of an array without those of its parts."""
    return key.partition(raw_form.SEPARATOR)[0]


def _check_names(keys: Collection[str], name: str) -> None:
    """Raise ValueError unless there are arrays of observations and actions."""
    for needed in (OBS, ACTIONS):
        if not any(_first(key) == needed for key in keys):
            near = nearest(needed, [key for key in keys if _first(key) not in (OBS, ACTIONS)])
            hint = near or f"; it has {', '.join(keys) or 'no array'}"
            raise ValueError(f"{ORIGIN}: needs an array {needed}, got none in {name}{hint}")


def _check_memory(name: str, path: Path) -> None:
    """Raise ValueError if the observations and actions of a file do not fit into memory."""
    size, free = 0, host_free_bytes()
    with zipfile.ZipFile(path) as members:
        size = sum(x.file_size for x in members.infolist() if x.filename.startswith((OBS, ACTIONS, MASKS)))
    if free is not None and 2 * size > free:  # a copy has the form of agents
        needed = f"{format_bytes(2 * size)}, of which {format_bytes(free)} are free"
        raise ValueError(f"{ORIGIN}: {name} does not fit into memory, got {needed}; use a part of it")


def _of_minari(name: str, path: Path) -> Arrays:
    """Return the steps of a dataset of Minari, by its id or in a folder, without the last observation of an episode."""
    if util.find_spec("minari") is None:
        raise ValueError(f"{ORIGIN}: minari is not installed, got {name}; {install('minari')}")
    import minari

    try:
        if name.startswith(MINARI):
            found = minari.load_dataset(name.removeprefix(MINARI), download=False)
        else:
            found = minari.MinariDataset(path / "data" if (path / "data").is_dir() else path)
    except Exception as error:  # its readers may raise anything
        remedy = "give the folder of a dataset, or download it with `minari download`"
        raise ValueError(f"{ORIGIN}: {name} cannot be read ({why(error)}), got no dataset; {remedy}") from error
    parts: dict[str, list[np.ndarray]] = {}
    for episode in found.iterate_episodes():
        rows = raw_form.named(OBS, _plain(episode.observations)) | raw_form.named(ACTIONS, _plain(episode.actions))
        for key, x in rows.items():
            parts.setdefault(key, []).append(x[: len(episode.rewards)])
    _check_names(parts, name)
    return {key: np.concatenate(x) for key, x in parts.items()}


def _plain(tree: Any) -> PyTree:
    """Return dictionaries and tuples of arrays as such, with sorted names."""
    if isinstance(tree, dict):
        return {name: _plain(tree[name]) for name in sorted(tree)}
    return tuple(map(_plain, tree)) if isinstance(tree, tuple) else np.asarray(tree)


def _num_rows(arrays: Arrays, name: str) -> int:
    """Return the number of steps. Raise ValueError unless there are some, and as many actions as observations."""
    (first, num), *others = ((key, len(x)) for key, x in arrays.items() if _first(key) in (OBS, ACTIONS))
    for other, wrong in others:
        if wrong != num:
            problem = f"{other} must have as many steps as {first} ({num}), got {wrong} in {name}"
            raise ValueError(f"{ORIGIN}: {problem}; leave out the last observation of each episode")
    if not num:
        raise ValueError(f"{ORIGIN}: {first} must have a step, got none in {name}; use another file")
    return num


def _array(
    arrays: Arrays, key: str, shape: tuple[int, ...], kinds: str, name: str, by_size: bool = False
) -> np.ndarray:
    """Return an array of this shape, or with `by_size` of as many numbers, whose dtype is of one of these kinds."""
    expected = f"{ {'b': 'bool', 'iu': 'int', 'fiu': 'float'}[kinds] }{list(shape)}"
    if key not in arrays:
        raise ValueError(f"{ORIGIN}: needs an array {key} {expected}, got none in {name}; add it")
    x = arrays[key]
    fits = x.shape == shape or by_size and x.shape[:1] == shape[:1] and x.size == np.prod(shape)
    if not fits or x.dtype.kind not in kinds:
        got = f"{x.dtype}{list(x.shape)} in {name}"
        raise ValueError(f"{ORIGIN}: {key} must be {expected}, got {got}; use data of this environment")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        row = int(np.argmin(np.isfinite(x).reshape(len(x), -1).all(axis=1)))
        raise ValueError(f"{ORIGIN}: {key} must be finite, got NaN or infinity in step {row} of {name}; leave it out")
    return x


def _observations(arrays: Arrays, num: int, env: Env, name: str, is_raw: bool) -> tuple[PyTree, np.ndarray | None]:
    """Return observations as agents see them, and the action masks in raw ones, if there are any."""
    like, leaves = raw_form.spec_of(env) if is_raw else env.spec.obs, []
    for key, part in raw_form.named(OBS, like).items():
        x = _array(arrays, key, (num, *part.shape), {"f": "fiu", "b": "b"}.get(part.dtype.kind, "iu"), name)
        if part.dtype.kind == "f" and x.dtype == np.uint8:
            problem = f"{key} must be float{list(x.shape)}, got uint8 in {name}"
            raise ValueError(f"{ORIGIN}: {problem}; scale it as the environment does")
        with np.errstate(over="ignore"):
            found = x.astype(part.dtype)
        if not (np.isfinite(found).all() if part.dtype.kind == "f" else (found == x).all()):
            problem = f"{key} must fit into {part.dtype}, got {x.min()} to {x.max()} in {name}"
            raise ValueError(f"{ORIGIN}: {problem}; use data of this environment")
        leaves.append(found)
    structure: Any = jax.tree.structure(like)
    obs = structure.unflatten(leaves)
    if not is_raw:
        return obs, None
    masks = None if env.view.raw_mask is None else np.asarray(env.view.raw_mask(obs))
    return raw_form.encoded(env, obs), masks


def _actions(arrays: Arrays, num: int, env: Env, name: str) -> np.ndarray:
    """Return actions as agents take them: choices from 0, and numbers in [-1, 1]."""
    parts: list[np.ndarray] = []
    keys: list[str] = []
    for part, shape, is_whole in raw_form.action_parts(env):
        keys.append(raw_form.SEPARATOR.join(filter(None, [ACTIONS, part])))
        parts.append(_array(arrays, keys[-1], (num, *shape), "iu" if is_whole else "fiu", name, by_size=True))
    action, outside = raw_form.from_env_actions(env, parts)
    for key, wrong, x in zip(keys, outside, parts, strict=True):
        if wrong.any():
            row = int(np.argmax(wrong))
            problem = f"{key} must be within the action space of {env.spec.id} ({describe_action(env.spec.action)})"
            shown = np.array2string(x[row], precision=4, threshold=8)
            raise ValueError(f"{ORIGIN}: {problem}, got {shown} in step {row} of {name}; use data of this environment")
    return action


def _check_allowed(masks: np.ndarray, action: np.ndarray, space: Any, name: str) -> None:
    """Raise ValueError if an action mask [B, entries] forbids the action of its step."""
    nums = (space.num,) if isinstance(space, Discrete) else space.nums
    first = np.cumsum((0, *nums[:-1]))
    chosen = action.reshape(len(action), -1)[:, : len(nums)].astype(int) + first
    allowed = np.take_along_axis(masks, chosen, axis=1).all(axis=1)
    if not allowed.all():
        problem = f"{MASKS} must allow each action, got a forbidden one in step {int(np.argmin(allowed))} of {name}"
        raise ValueError(f"{ORIGIN}: {problem}; use data of this environment")
