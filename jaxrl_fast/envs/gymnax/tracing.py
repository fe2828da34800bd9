"""Trace one environment with gymnax's interface, and refuse it in one sentence if it cannot be trained in.

Shapes and dtypes are those that its functions return, because declared spaces may be wrong.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces

from jaxrl_fast import types
from jaxrl_fast.envs import nested
from jaxrl_fast.envs.gymnax.single import Single, encode, env_action, is_discrete, unwrapped
from jaxrl_fast.envs.spaces import Interval, of_parts, true_bounds
from jaxrl_fast.types import EnvSpec, Key, PyTree
from jaxrl_fast.types.spaces import mask_size
from jaxrl_fast.utils.errors import place, why
from jaxrl_fast.utils.random import key_of_seed


def traced(env_id: str, env: Any, params: Any, num_envs: int) -> Single:
    """Return the environment with traced shapes, since declared spaces may be wrong. Raise ValueError for a bad one."""
    action, bounds, tree = action_of(env_id, _try(env_id, env.action_space, params))
    players = _players(env_id, unwrapped(env))
    spec = EnvSpec(env_id, None, action, num_envs, players=players)  # type: ignore[arg-type]  # obs is traced below
    single = Single(env, params, _observation_space(env, params), None, bounds, spec, tree)
    key = jax.eval_shape(lambda: key_of_seed(0))
    one_action = jax.ShapeDtypeStruct((*single.players, *action.shape), jnp.float32 if bounds else jnp.int32)
    obs, state = _shapes(env_id, functools.partial(_raw_reset, single), key)
    before = _attributes(env)
    _check_attributes(env_id, {}, before)
    while True:  # until no step widens a dtype: a state may become float only after several steps
        next_obs, next_state, *ends = _shapes(env_id, functools.partial(_raw_step, single), key, state, one_action)
        _check_same(env_id, "state", state, next_state)
        _check_same(env_id, "observation", obs, next_obs)
        joined = [jax.tree.map(_joined, *both) for both in ((state, next_state), (obs, next_obs))]
        if jax.tree.leaves(joined) == jax.tree.leaves([state, obs]):  # a state's class may define ==
            break
        state, obs = joined
    if not jax.tree.leaves(obs):
        raise ValueError(f"{env_id}: its observation is empty, got {obs}")
    for part in jax.tree.leaves(obs):
        if not part.size:
            raise ValueError(f"{env_id}: a part of its observation is empty, got shape {part.shape}")
        if players and (part.ndim < 2 or part.shape[0] != len(players)):
            raise ValueError(
                f"{env_id}: each part of its observation must have the shape [{len(players)} players, ...], got "
                f"{list(part.shape)}"
            )
    _check_attributes(env_id, before, _attributes(env))
    raw_obs = jax.eval_shape(lambda key: env.reset_env(key, params)[0], key)
    has_mask = hasattr(env, "action_mask") and not isinstance(action, types.Box)
    spec = spec._replace(obs=obs, has_action_mask=has_mask)
    single = single._replace(state=state, spec=spec, raw_obs=raw_obs, ends=max((end.shape for end in ends), key=len))
    if has_mask:
        num = mask_size(action) * max(len(players), 1)
        _try(env_id, _check_mask, num, jax.eval_shape(lambda state: env.action_mask(state, params), state))
    return single


def _players(env_id: str, env: Any) -> tuple[str, ...]:
    """Return the names of an environment's players, or ()."""
    players = getattr(env, "players", ())
    is_names = isinstance(players, tuple) and all(isinstance(name, str) and name for name in players)
    if not is_names or len({*players}) < len(players) or len(players) == 1:
        raise ValueError(f"{env_id}: its players must be a tuple of 2 or more different names, got {players!r}")
    return players


def _observation_space(env: Any, params: Any) -> Any:
    try:
        return env.observation_space(params)
    except Exception:  # optional, because observations are traced
        return None


class _Unusable(ValueError):
    """The error for an environment that returns something unsupported."""


def _try(env_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except _Unusable as error:
        raise ValueError(f"{env_id}: {error}") from None
    except Exception as error:  # environments may raise anything
        raise ValueError(f"{env_id}: tracing it failed with {why(error)}{place(error)}") from error


def _shapes(env_id: str, function: Callable[..., Any], *arguments: PyTree) -> Any:
    """Return shapes and dtypes of a function's result, without weak types, traced under `vmap` as training does it."""
    batched = lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
    result = _try(env_id, jax.eval_shape, jax.vmap(function), *jax.tree.map(batched, arguments))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), result)


def _raw_reset(single: Single, key: Key) -> tuple[PyTree, PyTree]:
    outcome = single.env.reset_env(key, single.params)
    _check_length("reset_env", outcome, "(obs, state)", 2)
    obs, state = outcome
    return encode(single, obs), state


def _raw_step(single: Single, key: Key, state: PyTree, action: jax.Array) -> tuple[PyTree, ...]:
    """Return observation, state, `terminated` and `is_truncated`, the last two of shape [P] or []."""
    outcome = single.env.step_env(key, state, env_action(single, action), single.params)
    _check_length("step_env", outcome, "(obs, state, reward, terminated, info)", 5)
    obs, state, reward, terminated, _ = outcome
    truncated = single.env.is_truncated(state, single.params)
    if single.players and getattr(reward, "shape", ()) == single.players:
        reward = reward[0]
    elif single.players:
        got = f"shape {list(reward.shape)}" if hasattr(reward, "shape") else _type_of(reward)
        raise _Unusable(f"its reward must be one number for each of {single.players[0]} players, got {got}")
    _check_scalar("reward", reward)
    ends = (_end(single, name, x) for name, x in {"terminated": terminated, "is_truncated": truncated}.items())
    return encode(single, obs), state, *ends


def _end(single: Single, name: str, value: Any) -> jax.Array:
    """Return an episode's end, of shape [P] if each player has one, or []. Raise _Unusable for anything else."""
    if single.players and getattr(value, "shape", ()) == single.players:
        _check_scalar(name, value[0])
        return jnp.asarray(value)
    _check_scalar(name, value, f", or one for each of {single.players[0]} players" if single.players else "")
    return jnp.asarray(value).reshape(())


def _check_length(function: str, outcome: Any, expected: str, length: int) -> None:
    if not isinstance(outcome, tuple | list) or len(outcome) != length:
        got = f"{len(outcome)} values" if isinstance(outcome, tuple | list) else _type_of(outcome)
        raise _Unusable(f"{function} must return {expected}, got {got}")


def _check_mask(num_entries: int, mask: Any) -> None:
    """Raise _Unusable unless a mask has one entry for each action, of each player."""
    if getattr(mask, "size", None) != num_entries:
        got = f"shape {mask.shape}" if hasattr(mask, "shape") else _type_of(mask)
        raise _Unusable(f"its action_mask must have {num_entries} entries, got {got}")


def _check_scalar(name: str, value: Any, alternative: str = "") -> None:
    """Raise _Unusable unless a reward or an episode's end is one real number. The message ends with `alternative`."""
    is_array = hasattr(value, "dtype") or isinstance(value, bool | int | float | complex)
    if not is_array:
        raise _Unusable(f"its {name} must be one number{alternative}, got {_type_of(value)}")
    value = jnp.asarray(value)
    if value.size != 1:
        remedy = "; add them up with weights" if name == "reward" and not alternative else ""
        raise _Unusable(f"its {name} must be one number{alternative}, got shape {value.shape}{remedy}")
    if not (
        value.dtype == bool or jnp.issubdtype(value.dtype, jnp.integer) or jnp.issubdtype(value.dtype, jnp.floating)
    ):
        raise _Unusable(f"its {name} must be a real number, got {value.dtype}")


def _type_of(value: Any) -> str:
    return "None; return it" if value is None else f"a {type(value).__name__}"


def _joined(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape and common dtype of the results of reset and step, without weak types."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype if a.dtype == b.dtype else jnp.promote_types(a.dtype, b.dtype))


def _check_same(env_id: str, what: str, first: PyTree, after: PyTree) -> None:
    at_reset, at_step = dict(_named_leaves(what, first)), dict(_named_leaves(what, after))
    for name in sorted(at_reset.keys() ^ at_step.keys()):
        when = "reset" if name in at_reset else "step"
        raise ValueError(
            f"{env_id}: its {what} must have the same parts after reset and step, got {name} only after {when}"
        )
    for name, leaf in at_reset.items():
        if leaf.shape != at_step[name].shape:
            shapes = f"{leaf.shape} after reset and {at_step[name].shape} after step"
            raise ValueError(f"{env_id}: the shape of its {name} must not change, got {shapes}")
    containers = [_containers(tree) for tree in (first, after)]  # as text, this may hold addresses of objects
    structures: list[Any] = [jax.tree.structure(tree) for tree in (first, after)]
    if structures[0] != structures[1] and containers[0] != containers[1]:
        got = f"{containers[0]} after reset and {containers[1]} after step"
        raise ValueError(f"{env_id}: the containers of its {what} must not change, got {got}")


def _attributes(env: Any) -> dict[str, Any]:
    """Return the attributes of an environment that are numbers, or hold values of a trace."""
    is_traced = lambda value: any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
    attributes = getattr(unwrapped(env), "__dict__", {})
    return {name: x for name, x in attributes.items() if isinstance(x, bool | int | float) or is_traced(x)}


def _check_attributes(env_id: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise ValueError if a step has changed the environment object, since compiled steps would not change it."""
    for name, value in after.items():
        is_number = isinstance(value, bool | int | float)
        if not is_number or name in before and before[name] is not value and before[name] != value:
            raise ValueError(f"{env_id}: its attribute {name} changes in reset_env or step_env; keep it in the state")


def _containers(tree: PyTree) -> str:
    """Return the structure of a tree as text, such as {'x': *, 'y': (*, *)}."""
    return str(jax.tree.structure(tree)).removeprefix("PyTreeDef(").removesuffix(")")


def _named_leaves(what: str, tree: PyTree) -> list[tuple[str, Any]]:
    return [(what + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def action_of(env_id: str, space: Any) -> tuple[types.Space, Any, Any]:
    """Return the action space for agents, the true bounds of continuous actions, and the tree of parts of a nested one.

    A whole-number Box is a tree of one part, since its smallest number need not be 0.
    """
    if isinstance(space, Interval) or not isinstance(space, _CONTAINERS):
        unsupported = f"{env_id}: unsupported action space, got {space}"
    else:
        unsupported = f"{env_id}: unsupported action space, got a {type(space).__name__}"
    if isinstance(space, types.Discrete | types.MultiDiscrete):
        return space, (), None
    if isinstance(space, Interval):
        return types.Box(space.low.shape), true_bounds(unsupported, *space, space.low.shape), None
    if is_discrete(space) and space.n < 1:
        raise ValueError(f"{env_id}: its action space must have at least 1 action, got {space.n}")
    if is_discrete(space):
        return types.Discrete(int(space.n)), (), None
    tree = _parts(unsupported, space)
    if isinstance(tree, nested.Part) and not tree.is_choice:
        bounds = true_bounds(unsupported, space.low, space.high, space.shape)
        return types.Box((math.prod(space.shape),)), bounds, None
    return of_parts(unsupported, tree)


_CONTAINERS = (spaces.Dict, spaces.Tuple, dict, tuple)


def _parts(unsupported: str, space: Any) -> Any:
    """Return the tree of parts of an action space: gymnax's spaces, dictionaries and tuples of them."""
    if isinstance(space, _CONTAINERS) and not isinstance(space, Interval):
        inner = getattr(space, "spaces", space)
        if isinstance(inner, Mapping):
            return {name: _parts(unsupported, part) for name, part in inner.items()}
        return tuple(_parts(unsupported, part) for part in inner)
    if isinstance(space, types.MultiDiscrete):
        return nested.choices(space.shape, np.int32, 0, space.nums)
    if isinstance(space, types.Discrete) or is_discrete(space):
        return nested.choices((), np.int32, 0, space.num if isinstance(space, types.Discrete) else space.n)
    if not isinstance(space, spaces.Box | Interval):
        kinds = "gymnax's Discrete or Box, or a Dict or Tuple of them"
        raise ValueError(f"{unsupported}; it must be {kinds}, got {type(space).__name__}")
    dtype = np.dtype(getattr(space, "dtype", np.float32))
    shape = space.low.shape if isinstance(space, Interval) else tuple(space.shape)
    low, high = (np.broadcast_to(np.asarray(bound), shape) for bound in (space.low, space.high))
    if dtype.kind not in "iu":
        return nested.Part(shape, dtype, low, high, is_choice=False)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(f"{unsupported}; the bounds of whole numbers must be finite, got {low.min()} to {high.max()}")
    return nested.whole_numbers(unsupported, dtype, low.astype(np.int64), high.astype(np.int64))
