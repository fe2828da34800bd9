"""What an environment is given, actions and options, and what it ends in: made right alike for every backend."""

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
NESTED = (tuple, list, dict)
UNREADABLE = 1e9  # so large that squares of many such numbers are far from float32's end still


def check_action(spec: EnvSpec, action: jax.Array) -> None:
    """While tracing: actions are int32 [N] or float32 [N, *shape]. Else ValueError."""
    discrete = isinstance(spec.action, Discrete)
    shape = (spec.num_envs, *getattr(spec.action, "shape", ()))
    if action.shape != shape or not jnp.issubdtype(action.dtype, jnp.integer if discrete else jnp.floating):
        wanted = f"{'int32' if discrete else 'float32'}{list(shape)}"
        raise ValueError(f"{spec.id} wants actions {wanted}, not {action.dtype}{list(action.shape)}")


def to_env_action(spec: EnvSpec, bounds: Bounds, action: jax.Array) -> jax.Array:
    """Agents' actions [..., *shape] as the environment wants them: in range whatever was given; NaN is the middle."""
    if isinstance(spec.action, Discrete):
        wide = action if action.dtype.itemsize >= 4 else action.astype(jnp.int32)  # int8 cannot hold a bound of 200
        return jnp.clip(wide, 0, spec.action.num - 1).astype(jnp.int32)
    unit = jnp.where(jnp.isnan(action), 0.0, jnp.clip(action, -1.0, 1.0)).astype(jnp.float32)
    unit = unit.reshape(*action.shape[: action.ndim - len(spec.action.shape)], *bounds[0].shape)
    low, high = (jnp.broadcast_to(bound, unit.shape) for bound in bounds)
    return jnp.clip(0.5 * (low + high) + 0.5 * (high - low) * unit, low, high)


def readable(died: jax.Array, obs: PyTree) -> PyTree:
    """0 for NaN, infinity and what is near it in observations [..., *shape] that an episode `died` [...] in.

    Their value counts for nothing, but NaN times 0 is NaN, and so is 0 times a square that float32 cannot hold.
    """

    def one(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.where(died.reshape(died.shape + (1,) * (x.ndim - died.ndim)) & ~(jnp.abs(x) < UNREADABLE), 0, x)

    return jax.tree.map(one, obs)


def true_bounds(refused: str, low: Any, high: Any, shape: tuple[int, ...]) -> Bounds:
    """float32 bounds of continuous actions. ValueError, beginning with `refused`, where they are none."""
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
        low, high = (np.broadcast_to(np.asarray(bound, np.float32), shape) for bound in (low, high))
    if np.any(low > high):
        raise ValueError(f"{refused}, whose lower bounds are not below the upper ones")
    if not np.all(np.abs([low, high]) < 1e30):
        raise ValueError(f"{refused}, whose bounds are not finite, so that [-1, 1] cannot be scaled to them")
    return low, high


def refuse_option(env_id: str, name: str, known: tuple[str, ...]) -> NoReturn:
    """ValueError for an option that the environment does not have."""
    hint = nearest(name, known) or f"; it has {', '.join(known) or 'none'}"
    raise ValueError(f"{env_id} has no option {name!r}{hint}")


def coerce(env_id: str, name: str, value: Any, default: Any) -> Any:
    """An option's value as the type that its default has, from a number, a string or a list."""
    try:
        return _as_type_of(default, value)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        if isinstance(default, (np.ndarray, jax.Array)):
            wanted = f"an array of shape {list(default.shape)} is wanted, such as {default.tolist()}"
        else:
            wanted = f"{type(default).__name__} is wanted, such as {default!r}"
        raise ValueError(f"{name}={value!r} for {env_id}: {wanted}") from error


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
        if isinstance(value, (bool, *NESTED)):
            raise ValueError
        return str(value)
    if isinstance(value, str):  # for None, or nothing, as in f(size): what it looks like
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    wanted = dict if isinstance(default, dict) else (tuple, list) if isinstance(default, NESTED) else object
    if value is not None and not isinstance(value, wanted):
        raise ValueError
    return tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
