"""Convert actions and observations between the form of agents and the form in which an environment has them.

Datasets of other programs have the environment's own form. `types.View` has the functions that agents need: from raw
observations, and to the environment's actions. This module has their inverses.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs import nested
from jaxrl_fast.envs.spaces import MAX_BYTE
from jaxrl_fast.types import Env, PyTree

ROWS = 4096  # that are converted at once
TOLERANCE = 1e-5  # of the range of an action's number, by which rounding may leave the bounds
MOST = 2**30  # a choice beyond all options, which becomes the last one
SEPARATOR = "/"  # between the names of parts
METADATA = "metadata"  # of a dataset: JSON text, whose "observations" is the form of these
RAW, SEEN = "raw", "as agents see them"  # forms of observations


def spec_of(env: Env) -> PyTree:
    """Return shapes and dtypes of one raw observation, with None for parts such as text."""
    return env.spec.obs if env.view.raw_obs is None else env.view.raw_obs


def named(name: str, tree: PyTree) -> dict[str, Any]:
    """Return the arrays of a tree by name: "observations", or "observations/position" of a dictionary or a tuple."""
    ending = lambda path: jax.tree_util.keystr(path, simple=True, separator=SEPARATOR)
    return {SEPARATOR.join([name, *filter(None, [ending(path)])]): x for path, x in jax.tree.leaves_with_path(tree)}


def encoded(env: Env, obs: PyTree) -> PyTree:
    """Return raw observations [B, ...] as agents see them, on the host."""
    return _in_parts(env.view.encode_obs, obs)


def decoded(env: Env, obs: PyTree) -> PyTree | None:
    """Return observations of agents [B, ...] in the raw form, or None if agents do not see all of it.

    The result is checked: encoded again, it has the same bits.
    """
    if env.view.raw_obs is None:
        return obs
    like = jax.tree.leaves(spec_of(env))
    structure: Any = jax.tree.structure(spec_of(env))
    leaves = jax.tree.leaves(obs)
    if len(like) != len(leaves):
        return None
    for scale in (MAX_BYTE + 1, 1):  # bytes that agents see in [0, 1), or as they are
        found = [_decoded(x, one, scale) for x, one in zip(leaves, like)]
        if all(x is not None for x in found) and _is_same(env, structure.unflatten(found), leaves):
            return structure.unflatten(found)
    return None


def _decoded(x: np.ndarray, like: jax.ShapeDtypeStruct, scale: int) -> np.ndarray | None:
    """Return a part [B, ...] in the shape and dtype of a raw one, or None."""
    if not like.shape and x.ndim == 2 and x.shape[1] > 1:  # a one-hot vector
        x = x.argmax(axis=1)
    if x.ndim == 4 and x.shape[1:] != like.shape and (x.shape[3], *x.shape[1:3]) == like.shape:
        x = np.moveaxis(x, 3, 1)
    if x[0].size != np.prod(like.shape, dtype=int):
        return None
    if like.dtype == np.uint8 and x.dtype.kind == "f":
        x = scale * x
    with np.errstate(invalid="ignore"):
        return x.reshape(len(x), *like.shape).astype(like.dtype)


def _is_same(env: Env, raw: PyTree, leaves: list[np.ndarray]) -> bool:
    """Return whether raw observations are seen as these by agents."""
    again = jax.tree.leaves(encoded(env, raw))
    same = lambda x, y: x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()
    return len(again) == len(leaves) and all(map(same, again, leaves))


def _in_parts(function: Any, rows: PyTree) -> PyTree:
    """Return function(rows [B, ...]) as numpy arrays, computed by parts."""
    num = len(jax.tree.leaves(rows)[0])
    part = lambda first: jax.tree.map(lambda x: x[first : first + ROWS], rows)
    parts = [jax.tree.map(np.asarray, function(part(first))) for first in range(0, num, ROWS)]
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def to_env_actions(env: Env, action: np.ndarray) -> PyTree:
    """Return agents' actions [B, ...] as the environment takes them: an array, or a tree for a Dict or a Tuple."""
    scaled = _in_parts(env.view.to_env_action, action)
    return scaled if env.view.action_tree is None else nested.split(env.view.action_tree, scaled, np.dtype)


def action_parts(env: Env) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return the name, the shape and whether it is of whole numbers, of each array of an environment's action."""
    if env.view.action_tree is None:
        like = jax.eval_shape(env.view.to_env_action, env.spec.action.zeros(1))
        return [("", like.shape[1:], like.dtype.kind in "iu")]
    return [(name, part.shape, part.is_choice) for name, part in nested.named(env.view.action_tree)]


def from_env_actions(env: Env, parts: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return an environment's actions as agents take them, and for each part which rows are outside its bounds [B].

    `parts` are the arrays of `action_parts`. Rounding may exceed the bounds of a number by TOLERANCE of their range.
    """
    space, tree = env.spec.action, env.view.action_tree
    if tree is None:
        places, rows = [slice(None)], parts[0].reshape(len(parts[0]), -1).astype(float)
        is_whole = np.full(rows.shape[1], action_parts(env)[0][2])
    else:
        found = list(nested.parts(tree))
        places = [slice(part.first, part.first + part.size) for part in found]
        is_whole = np.arange(sum(part.size for part in found)) < sum(part.size for part in found if part.is_choice)
        rows = np.empty((len(parts[0]), len(is_whole)))
        for part, place, x in zip(found, places, parts, strict=True):
            rows[:, place] = x.reshape(len(x), -1) - (part.low.reshape(-1) if part.is_choice else 0)
    low, high = (_bound(env, np.where(is_whole, *values)) for values in ((0, -1), (MOST, 1)))
    slack, length = np.where(is_whole, 0, TOLERANCE * (high - low)), np.where(high > low, high - low, 1)
    wrong: np.ndarray = ~((rows >= low - slack) & (rows <= high + slack))
    unit = np.where(high > low, np.clip(2 * (rows - low) / length - 1, -1, 1), 0)
    with np.errstate(invalid="ignore"):  # those that are outside
        action = np.where(is_whole, rows - low, unit).astype(space.zeros().dtype)
    return action.reshape(len(rows), *space.shape), [np.any(wrong[:, place], axis=1) for place in places]


def _bound(env: Env, entries: np.ndarray) -> np.ndarray:
    """Return the numbers [k + D] that an environment gets for an action of agents with these entries."""
    like = env.spec.action.zeros(1)
    action = jnp.asarray(entries.reshape(like.shape), like.dtype)
    return np.asarray(env.view.to_env_action(action), float).reshape(-1)
