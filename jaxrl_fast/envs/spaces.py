"""Convert actions, observations and options between users, agents and environments; shared by all backends."""

import contextlib
import json
from enum import Enum
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.types import Discrete, EnvSpec, PyTree
from jaxrl_fast.utils.parsing import MAX_FLOAT, WORDS, nearest, parse_float

Bounds = Any  # the true (low, high) of continuous actions; () for discrete ones
NESTED_TYPES = (tuple, list, dict)
MAX_OBS_MAGNITUDE = 1e9  # sums of many squares of such numbers still fit float32


def check_action(spec: EnvSpec, action: jax.Array) -> None:
    """Raise ValueError while tracing unless actions are integers [N] or floats [N, *shape]."""
    discrete = isinstance(spec.action, Discrete)
    shape = (spec.num_envs, *getattr(spec.action, "shape", ()))
    if action.shape != shape or not jnp.issubdtype(action.dtype, jnp.integer if discrete else jnp.floating):
        expected = f"{'int32' if discrete else 'float32'}{list(shape)}"
        raise ValueError(f"{spec.id}: actions must be {expected}, got {action.dtype}{list(action.shape)}")


def to_env_action(spec: EnvSpec, bounds: Bounds, action: jax.Array) -> jax.Array:
    """Return agents' actions [..., *shape] within the environment's bounds; NaN becomes the middle."""
    if isinstance(spec.action, Discrete):
        wide = action if action.dtype.itemsize >= 4 else action.astype(jnp.int32)  # int8 cannot hold a bound of 200
        return jnp.clip(wide, 0, spec.action.num - 1).astype(jnp.int32)
    unit = jnp.where(jnp.isnan(action), 0.0, jnp.clip(action, -1.0, 1.0)).astype(jnp.float32)
    unit = unit.reshape(*action.shape[: action.ndim - len(spec.action.shape)], *bounds[0].shape)
    low, high = (jnp.broadcast_to(bound, unit.shape) for bound in bounds)
    return jnp.clip(0.5 * (low + high) + 0.5 * (high - low) * unit, low, high)


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


def true_bounds(unsupported: str, low: Any, high: Any, shape: tuple[int, ...]) -> Bounds:
    """Return float32 bounds of continuous actions. Raise ValueError, with `unsupported` first, if they are unusable."""
    with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
        low, high = (np.broadcast_to(np.asarray(bound, np.float32), shape) for bound in (low, high))
    if np.any(low > high):
        raise ValueError(f"{unsupported}; its lower bounds must not exceed the upper ones")
    if not np.all(np.abs([low, high]) < 1e30):
        raise ValueError(f"{unsupported}; its bounds must be finite, because [-1, 1] is scaled to them")
    return low, high


def refuse_option(env_id: str, name: str, known: tuple[str, ...]) -> NoReturn:
    """Raise ValueError for an option that the environment does not have."""
    hint = nearest(name, known) or f"; it has {', '.join(known) or 'none'}"
    raise ValueError(f"{env_id} has no option {name!r}{hint}")


def coerce(env_id: str, name: str, value: Any, default: Any) -> Any:
    """Return an option's value, given as a number, a string or a list, with the type of its default."""
    try:
        return _as_type_of(default, value)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        if isinstance(default, (np.ndarray, jax.Array)):
            expected, example = f"an array of shape {list(default.shape)}", default.tolist()
        else:
            expected, example = type(default).__name__, repr(default)
        raise ValueError(f"{name}: must be {expected} for {env_id}, got {value!r}; for example {example}") from error


def _as_type_of(default: Any, value: Any) -> Any:
    default = default.item() if isinstance(default, np.generic) else default
    if isinstance(default, bool):
        return ({"1": True, "0": False} | WORDS)[str(value).lower()]
    if isinstance(default, Enum):
        return value if isinstance(value, type(default)) else type(default)[str(value)]
    if isinstance(default, (int, float)):
        number = parse_float(str(value))
        if isinstance(value, bool) or abs(number) > MAX_FLOAT or isinstance(default, int) and number != int(number):
            raise ValueError
        return type(default)(number)
    if isinstance(default, (np.ndarray, jax.Array)):
        value = json.loads(value) if isinstance(value, str) else value
        array = np.asarray(value, dtype=default.dtype)
        if array.shape != default.shape or not np.all(np.isfinite(array)):
            raise ValueError
        return jnp.asarray(array)
    if isinstance(default, str) and value is not None:
        if isinstance(value, (bool, *NESTED_TYPES)):
            raise ValueError
        return str(value)
    if isinstance(value, str):  # the default is None or absent, so the text decides the type
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    expected = dict if isinstance(default, dict) else (tuple, list) if isinstance(default, NESTED_TYPES) else object
    if value is not None and not isinstance(value, expected):
        raise ValueError
    return tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value


def narrow_dtype(dtype: Any) -> Any:
    """Return the dtype of at most 32 bits that replaces this one."""
    return {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}.get(np.dtype(dtype).name, dtype)
