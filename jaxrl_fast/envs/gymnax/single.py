"""Reset and step one environment with gymnax's interface.

Agents see observations as float32, bool (MinAtar's boards) or uint8; a state index becomes a one-hot vector, and a
scalar becomes a vector of one. Rewards are float32. Continuous actions in [-1, 1] are scaled to the true bounds. No
action, including NaN, can leave the action space.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces

from jaxrl_fast.envs.schedules import Schedule
from jaxrl_fast.envs.spaces import allowed, as_array, readable, split_action, to_env_action
from jaxrl_fast.envs.wrappers.frame_skip import FrameSkip
from jaxrl_fast.envs.wrappers.ranges import Drawn
from jaxrl_fast.types import EnvSpec, Key, PyTree, TimeStep


class Single(NamedTuple):
    """One environment and the properties found by tracing it."""

    env: Any
    params: Any
    obs_space: Any  # used only to distinguish a state index from a number
    state: PyTree  # shapes and dtypes of its state, after reset and after step
    bounds: Any  # the true (low, high) of continuous actions, else ()
    spec: EnvSpec
    action_tree: Any = None  # the parts of an action; see `types.View`
    raw_obs: PyTree = ()  # shapes and dtypes of the observation that the environment itself returns
    ends: tuple[int, ...] = ()  # (P,) if players have separate ends, else ()
    schedules: tuple[tuple[str, Schedule], ...] = ()  # of parameters by name, whose last values `params` has

    @property
    def players(self) -> tuple[int, ...]:
        """Return (P,) for an environment with P players, the leading axis of observation, action and reward, or ()."""
        return (len(self.spec.players),) if self.spec.players else ()


def reset_one(single: Single, key: Key) -> tuple[PyTree, PyTree]:
    """Return the state and observation at the start of an episode."""
    obs, env_state = single.env.reset_env(key, single.params)
    return _strong(single.state, env_state), _strong(single.spec.obs, encode(single, obs))


def step_one(single: Single, key: Key, env_state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
    """Step one environment without a reset."""
    outcome = single.env.step_env(key, env_state, env_action(single, action), single.params)
    obs, env_state, reward, terminated, _ = outcome
    terminated = _flag(single, terminated)
    truncated = _flag(single, single.env.is_truncated(env_state, single.params))
    obs = readable(terminated, encode(single, obs))
    timestep = TimeStep(
        obs=_strong(single.spec.obs, obs),
        reward=jnp.asarray(reward, jnp.float32).reshape(single.players),
        discount=1.0 - terminated.astype(jnp.float32),
        last=terminated | truncated,
    )
    return _strong(single.state, env_state), timestep


def env_action(single: Single, action: jax.Array) -> PyTree:
    """Return an agent's action [*shape], or those of P players [P, *shape], as the environment takes it."""
    return split_action(single.action_tree, to_env_action(single.spec, single.bounds, action))


def _flag(single: Single, value: Any) -> jax.Array:
    """Return whether an episode has ended, bool [] or, if players have separate ends, [P]."""
    value = jnp.asarray(value, bool)
    return value if value.shape == single.ends else jnp.broadcast_to(value.reshape(()), single.ends)


def action_masks(single: Single, env_state: PyTree) -> PyTree:
    """Return which actions are allowed in N states, bool [N, mask_size], or None if the environment has no masks."""
    if not single.spec.has_action_mask:
        return None
    masks = jax.vmap(lambda state: single.env.action_mask(state, single.params))(env_state)
    if single.players:  # [N, P, num_outputs]
        return jax.vmap(functools.partial(allowed, single.spec.action))(masks)  # type: ignore[arg-type]
    return allowed(single.spec.action, masks)  # type: ignore[arg-type]  # a Box has no mask


def encode(single: Single, obs: PyTree) -> PyTree:
    """Return an observation as agents see it."""
    as_seen = functools.partial(_encode_leaf, _is_minatar(single.env), len(single.players))
    return _encode(obs, single.obs_space, as_seen)


def _encode(obs: PyTree, space: Any, as_seen: Callable[[Any, jax.Array], jax.Array]) -> PyTree:
    if isinstance(obs, Mapping):
        inner = space.spaces if isinstance(space, spaces.Dict) else {}
        return {name: _encode(part, inner.get(name), as_seen) for name, part in obs.items()}
    if isinstance(obs, tuple) and isinstance(space, spaces.Tuple) and len(obs) == len(space.spaces):
        parts = [_encode(part, inner, as_seen) for part, inner in zip(obs, space.spaces)]
        return type(obs)(*parts) if hasattr(obs, "_fields") else tuple(parts)
    return jax.tree.map(lambda leaf: as_seen(space, jnp.asarray(leaf)), obs)


def _encode_leaf(is_board: bool, num_leading: int, space: Any, leaf: jax.Array) -> jax.Array:
    if is_board:
        return leaf.astype(bool)
    if leaf.ndim == 0 and is_discrete(space):
        return jax.nn.one_hot(leaf, space.n, dtype=jnp.float32)
    return as_array(leaf, getattr(space, "high", None), num_leading)


def is_discrete(space: Any) -> bool:
    """Return whether a space has the numbers 0 to n - 1: gymnax's Discrete, or a class like it of another library."""
    if isinstance(space, spaces.Discrete):
        return True
    is_number = getattr(space, "shape", None) in ((), None) and getattr(space, "start", 0) == 0
    return is_number and isinstance(getattr(space, "n", None), int | np.integer)


def unwrapped(env: Any) -> Any:
    """Return the environment itself."""
    while isinstance(env, Drawn | FrameSkip):
        env = env.wrapped
    return env


def _is_minatar(env: Any) -> bool:
    return type(unwrapped(env)).__module__.startswith("gymnax.environments.minatar.")


def _strong(avals: PyTree, tree: PyTree) -> PyTree:
    """Return a tree with the dtypes of `avals` and no weak types, which avoids a second lowering."""
    return jax.tree.map(lambda aval, x: _strong_leaf(aval, jnp.asarray(x)), avals, tree)


def _strong_leaf(aval: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else jax.lax.convert_element_type(x, aval.dtype)
