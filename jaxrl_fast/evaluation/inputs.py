"""Read what an environment returns, an observation and an action mask, as the input of a trained policy."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs import nested, spaces
from jaxrl_fast.types import Box, Env, PolicyInput, PyTree
from jaxrl_fast.types.spaces import mask_size
from jaxrl_fast.utils.importing import describe


def seen(env: Env, given: PolicyInput) -> PolicyInput:
    """Return an input [B, ...] as agents see it, from an observation and a mask as the environment returns them."""
    mask = given.action_mask
    if env.view.raw_mask:
        mask = env.view.raw_mask(given.obs)
    elif env.spec.has_action_mask:
        assert mask is not None and not isinstance(env.spec.action, Box), "`as_batch` has checked it"
        mask = spaces.allowed(env.spec.action, mask)
    return PolicyInput(env.view.encode_obs(plain(given.obs, raw_obs(env))), mask)


def raw_obs(env: Env) -> PyTree:
    """Return shapes and dtypes of one observation as the environment returns it, with None for parts such as text."""
    return env.spec.obs if env.view.raw_obs is None else env.view.raw_obs


def arrays_of(env: Env) -> PyTree:
    """Return `raw_obs` without the parts of dictionaries that are None."""
    return without_none(raw_obs(env))


def without_none(tree: PyTree) -> PyTree:
    """Return a tree in which dictionaries lose the parts that are None."""
    if isinstance(tree, dict):
        return {name: without_none(part) for name, part in tree.items() if part is not None}
    return tuple(map(without_none, tree)) if type(tree) is tuple else tree


def takes_mask(env: Env) -> bool:
    """Return whether a policy takes the action mask apart from the observation."""
    return env.spec.has_action_mask and env.view.raw_mask is None


def as_batch(env: Env, obs: PyTree, mask: Any = None) -> tuple[PolicyInput, bool]:
    """Return the raw input [B, ...] in the environment's dtypes, and whether it was a single one without axis B.

    Raises:
        ValueError: If structure, shapes or dtypes do not match what the environment returns.
    """
    env_id, like = env.spec.id, raw_obs(env)
    structure: Any = jax.tree.structure(like)
    try:
        leaves = [array(x) for x in structure.flatten_up_to(plain(obs, like))]
    except ValueError:  # the structures differ
        leaves = []
    extra = {x.ndim - part.ndim if _fits(x, part) else None for x, part in zip(leaves, jax.tree.leaves(like))}
    if extra not in ({0}, {1}):
        is_array = lambda x: isinstance(x, (list, tuple)) and not isinstance(like, tuple)
        shown = jax.tree.map(array, plain(obs, like), is_leaf=is_array)
        expected, found = (jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree) for tree in (like, shown))
        is_index = lambda x, part: part.ndim == 1 and part.dtype.kind == "f" and x.dtype.kind in "iu" and x.ndim < 2
        has_index = any(is_index(x, part) for x, part in zip(leaves, jax.tree.leaves(like)))
        remedy = "pass one observation or a batch with a leading axis" + has_index * ", a one-hot vector for an index"
        raise ValueError(f"obs: {env_id} observes {expected}, got {found}; {remedy}")
    cast = lambda x, part: jnp.asarray(x if extra == {1} else x[None], part.dtype)
    batch = jax.tree.map(cast, structure.unflatten(leaves), like)
    return PolicyInput(batch, _as_masks(env, mask, None if extra == {0} else num_rows(batch))), extra == {0}


def _as_masks(env: Env, mask: Any, size: int | None) -> Any:
    """Return masks as bool [B, mask_size], or None if observations have them; `size` None: one without axis B."""
    if not takes_mask(env):
        if mask is not None:
            which = "its action masks in its observations" if env.view.raw_mask else "no action masks"
            raise ValueError(f"mask: {env.spec.id} has {which}, got a mask; leave it out")
        return None
    num = mask_size(env.spec.action)
    if isinstance(mask, Mapping) or isinstance(mask, tuple) and any(isinstance(x, Mapping | tuple) for x in mask):
        mask = tuple(part for part in nested.parts(mask) if part is not None)  # of a Dict or Tuple space
    if mask is None:
        use = f"mask, one bool for each of {num} actions" if env.on_device else 'mask=info["action_mask"]'
        raise ValueError(f"mask: {env.spec.id} forbids some actions, got no mask; pass {use}")
    rows = 1 if size is None else size
    flat = lambda part: jnp.asarray(part, bool).reshape(rows, -1)
    is_parts = isinstance(mask, tuple) or size is None and isinstance(mask, list) and np.ndim(mask[:1]) > 1
    try:
        found = jnp.concatenate([flat(part) for part in mask], axis=1) if is_parts else flat(mask)
    except (TypeError, ValueError):
        found = None
    if found is None or found.shape != (rows, num):
        got = describe(mask) if found is None else f"{found.shape[1]} for {rows}"
        raise ValueError(
            f"mask: must have {num} entries for each observation of {env.spec.id}, got {got}; pass one for each action"
        )
    return found


def array(x: Any) -> Any:
    """Return a numpy array; a traced array is returned as it is, so that policies can be used under jit and vmap."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def plain(obs: PyTree, like: PyTree = ()) -> PyTree:
    """Return an observation with every mapping converted to a dictionary, and None where `like` is None."""
    if isinstance(obs, Mapping):
        parts = like if isinstance(like, Mapping) else {}
        absent = {name: None for name, part in parts.items() if part is None}
        return {name: plain(part, parts.get(name, part)) for name, part in obs.items()} | absent
    if type(obs) is tuple and type(like) is tuple and len(obs) == len(like):
        return tuple(None if part is None else plain(x, part) for x, part in zip(obs, like))
    return obs


def _fits(x: np.ndarray, like: jax.ShapeDtypeStruct) -> bool:
    """Return whether `x` has the shape, except for a batch axis, and a safe dtype; boolean boards take any numbers.

    Bytes are refused where the environment returns floats: they have perhaps not been scaled.
    """
    same_shape = x.shape[max(x.ndim - like.ndim, 0) :] == like.shape
    is_safe = np.can_cast(x.dtype, like.dtype, "same_kind") and (x.dtype != np.uint8 or like.dtype.kind != "f")
    return same_shape and (like.dtype == bool or is_safe)


def num_rows(batch: PyTree) -> int:
    """Return B for arrays [B, ...]."""
    return len(jax.tree.leaves(batch)[0])
