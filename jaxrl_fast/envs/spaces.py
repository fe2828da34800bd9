"""Convert actions and observations between users, agents and environments; shared by all backends."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs import nested
from jaxrl_fast.networks import reading
from jaxrl_fast.types import Box, Discrete, EnvSpec, MultiDiscrete, PyTree, Space
from jaxrl_fast.types.spaces import Hybrid
from jaxrl_fast.utils import formatting

Bounds = Any  # the true (low, high) of continuous actions; () for discrete ones
MAX_BYTE = 255
MAX_OBS_MAGNITUDE = 1e9  # sums of many squares of such numbers still fit float32


class Interval(NamedTuple):
    """A space of continuous actions with its true bounds, as an adapter declares it."""

    low: np.ndarray  # [*shape] f32
    high: np.ndarray  # [*shape] f32


def check_action(spec: EnvSpec, action: jax.Array) -> None:
    """Raise ValueError while tracing unless actions are integers [N] or [N, k], or floats [N, *shape]."""
    discrete = not isinstance(spec.action, Box | Hybrid)
    shape = (spec.num_envs, *spec.action.shape)
    if action.shape != shape or not jnp.issubdtype(action.dtype, jnp.integer if discrete else jnp.floating):
        expected = f"{'int32' if discrete else 'float32'}{list(shape)}"
        raise ValueError(f"{spec.id}: actions must be {expected}, got {action.dtype}{list(action.shape)}")


def to_env_action(spec: EnvSpec, bounds: Bounds, action: jax.Array) -> jax.Array:
    """Return agents' actions [..., *shape] within the environment's bounds; NaN becomes the middle.

    The bounds of a Hybrid space are those of its numbers.
    """
    if isinstance(spec.action, Hybrid):
        num = len(spec.action.nums)
        whole = spec._replace(action=MultiDiscrete(spec.action.nums)), (), jnp.nan_to_num(action[..., :num])
        numbers = spec._replace(action=Box((spec.action.size,))), bounds, action[..., num:]
        parts = [to_env_action(*whole).astype(jnp.float32), to_env_action(*numbers)]
        return jnp.concatenate(parts, axis=-1)
    if not isinstance(spec.action, Box):
        wide = action if action.dtype.itemsize >= 4 else action.astype(jnp.int32)  # int8 cannot hold a bound of 200
        nums = spec.action.num if isinstance(spec.action, Discrete) else spec.action.nums
        last = np.broadcast_to(
            np.asarray(nums, wide.dtype) - 1, wide.shape
        )  # in the wider dtype, since uint32 must not wrap
        return jnp.clip(wide, 0, last).astype(jnp.int32)
    unit = jnp.where(jnp.isnan(action), 0.0, jnp.clip(action, -1.0, 1.0)).astype(jnp.float32)
    unit = unit.reshape(*action.shape[: action.ndim - len(spec.action.shape)], *bounds[0].shape)
    low, high = (jnp.broadcast_to(bound, unit.shape) for bound in bounds)
    return jnp.clip(0.5 * (low + high) + 0.5 * (high - low) * unit, low, high)


def allowed(action: Discrete | MultiDiscrete | Hybrid, mask: jax.Array) -> jax.Array:
    """Return an environment's action mask as bool [n, mask_size].

    If no action is allowed, as in many terminal states, all become allowed: a distribution needs at least one.
    """
    flat = mask.reshape(mask.shape[0], -1).astype(bool)
    nums = (action.num,) if isinstance(action, Discrete) else action.nums
    parts = jnp.split(flat, np.cumsum(nums)[:-1], axis=1)
    return jnp.concatenate([part | ~part.any(axis=1, keepdims=True) for part in parts], axis=1)


def as_array(x: jax.Array, high: Any, num_leading: int = 1) -> jax.Array:
    """Return a part of an observation [..., *shape] as agents see it, at least a vector.

    Whole numbers become float32; bytes of a vector whose space ends at 255 (text or memory) become [0, 1). Images and
    boards [H, W], uint8 or bool, get a channel and keep their dtype. Bytes of the size of an image whose space ends
    below 255 are not shades: they become bool if it ends at 1, else float32.

    Args:
        x: The array.
        high: The upper bounds of its space; None if they are unknown.
        num_leading: Axes before those of one observation.
    """
    ndim = x.ndim - num_leading
    x = x[..., None] if ndim == 0 or ndim == 2 and x.dtype in (jnp.uint8, jnp.bool_) else x
    if x.dtype == jnp.bool_:
        return x
    has_bytes = x.dtype == jnp.uint8 and (ndim > 1 if high is None else np.max(high) == MAX_BYTE)
    if x.dtype == jnp.uint8 and ndim > 1:
        is_picture = min(x.shape[num_leading : num_leading + 2]) >= reading.MIN_PICTURE_SIDE
        if has_bytes or not is_picture:
            return x
        return x.astype(jnp.bool_ if np.max(high) <= 1 else jnp.float32)
    return x.astype(jnp.float32) / (MAX_BYTE + 1 if has_bytes else 1)


def without_mask(raw: dict[str, Any]) -> PyTree:
    """Return the parts of a dictionary except its `action_mask`; a single part without its name."""
    rest = {name: part for name, part in raw.items() if name != "action_mask"}
    return rest if len(rest) > 1 else next(iter(rest.values()))


def readable(terminated: jax.Array, obs: PyTree) -> PyTree:
    """Return observations [..., *shape] with 0 for NaN, infinite and huge numbers where `terminated` [...].

    The value of a terminal observation is multiplied by 0, but 0 times NaN or infinity is NaN.
    """

    def one(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        mask = terminated.reshape(terminated.shape + (1,) * (x.ndim - terminated.ndim))
        return jnp.where(mask & ~(jnp.abs(x) < MAX_OBS_MAGNITUDE), 0, x)

    return jax.tree.map(one, obs)


def raw_spec(raw: PyTree, obs: PyTree) -> PyTree:
    """Return `View.raw_obs`: None if agents see observations as the environment returns them.

    Args:
        raw: ShapeDtypeStruct of the observation that the environment itself returns.
        obs: The same as agents see it.
    """
    narrow = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, narrow_dtype(x.dtype)), raw)
    return None if jax.tree.flatten(narrow) == jax.tree.flatten(obs) else narrow


def true_bounds(unsupported: str, low: Any, high: Any, shape: tuple[int, ...]) -> Bounds:
    """Return float32 bounds of continuous actions. Raise ValueError, with `unsupported` first, if they are unusable."""
    low, high = (np.broadcast_to(bound, shape) for bound in _narrow_bounds(low, high))
    if np.any(low > high):
        raise ValueError(f"{unsupported}; its lower bounds must not exceed the upper ones")
    is_finite = np.all(np.abs([low, high]) < 1e30, axis=0).ravel()
    if not is_finite.all():
        first = int(np.argmin(is_finite))
        got = f"got {low.ravel()[first]:g} to {high.ravel()[first]:g} for number {first} of an action"
        why = "its bounds must be finite, because [-1, 1] is scaled to them"
        raise ValueError(f"{unsupported}; {why}, {got}; declare the range that matters")
    return low, high


def of_parts(unsupported: str, tree: Any) -> tuple[Space, Bounds, Any]:
    """Return the space for agents, the bounds of its numbers, and the tree of an action's parts with their places.

    Raise ValueError, with `unsupported` first, if there are no parts or bounds are unusable.
    """
    tree = nested.placed(tree)
    parts = list(nested.parts(tree))
    nums = tuple(num for part in parts if part.is_choice for num in part.nums)
    boxes = [true_bounds(unsupported, part.low, part.high, part.shape) for part in parts if not part.is_choice]
    bounds = tuple(np.concatenate([bound.reshape(-1) for bound in side]) for side in zip(*boxes)) if boxes else ()
    size = bounds[0].size if bounds else 0
    if not nums and not size:
        raise ValueError(f"{unsupported}; it must have at least one part")
    space = Hybrid(nums, size) if nums and size else MultiDiscrete(nums) if nums else Box((size,))
    return space, bounds, tree


def split_action(tree: Any, action: jax.Array) -> Any:
    """Return the parts of the environment's actions [..., k + D], in at most 32 bits; without a tree, the actions."""
    return action if tree is None else nested.split(tree, action, narrow_dtype)


def _narrow_bounds(low: Any, high: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds in float32: rounded to within the true ones, unless no float32 lies between these."""
    true = np.asarray(low, np.float64), np.asarray(high, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # bounds beyond float32 become infinite
        low, high = (bound.astype(np.float32) for bound in true)
        inner_low = np.where(low < true[0], np.nextafter(low, np.float32(np.inf)), low)
        inner_high = np.where(high > true[1], np.nextafter(high, -np.float32(np.inf)), high)
    is_between = inner_low <= inner_high
    return np.where(is_between, inner_low, low), np.where(is_between, inner_high, high)


def narrow_dtype(dtype: Any) -> Any:
    """Return the dtype of at most 32 bits, in the byte order of this machine, that replaces this one.

    It is numpy's own object for it: JAX keeps the first equal one that it sees, and checkpoints ask it `isbuiltin`.
    """
    wide = np.dtype(dtype)
    if wide.kind in "fiu" and wide.itemsize > 4:
        return np.dtype(f"{wide.kind}4")
    return np.dtype(wide.newbyteorder("=").str) if wide.kind in "biuf" else wide


def describe_obs(obs: Any) -> str:
    """Return dtype and shape, "float32[4]", of each part."""
    if hasattr(obs, "shape"):
        return f"{obs.dtype}{list(obs.shape)}"
    parts = obs.items() if isinstance(obs, dict) else enumerate(obs)
    return " ".join(f"{name} {describe_obs(part)}" for name, part in parts)


def describe_action(space: Any) -> str:
    """Return a description of an action space."""
    if hasattr(space, "num"):
        return formatting.counted(space.num, "action")
    if hasattr(space, "nums"):
        numbers = f" and {formatting.counted(space.size, 'number')}" if isinstance(space, Hybrid) else ""
        return f"{formatting.counted(len(space.nums), 'choice')} among {', '.join(map(str, space.nums))}{numbers}"
    return f"{' x '.join(map(str, space.shape))} number{'s' * (space.shape != (1,))}"
