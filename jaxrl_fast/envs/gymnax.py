"""gymnax's environments, and any object with gymnax's interface, as `types.Env`.

gymnax's own `step` resets within the last step. We build on its parts `reset_env`, `step_env` and
`is_truncated`, and reset on the step after (see `types.TimeStep`), so that no true successor is lost.

What an agent meets is made uniform: observations are float32, bool (MinAtar's boards) or uint8; a state
index becomes a one-hot vector; a scalar becomes a vector of one. Rewards are float32. Continuous actions
in [-1, 1] are scaled to the true bounds. No action, NaN included, can leave the action space.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces

from jaxrl_fast import types
from jaxrl_fast.envs import nearest
from jaxrl_fast.types import Env, EnvSpec, Key, PyTree, TimeStep

INTERFACE = ("default_params", "reset_env", "step_env", "is_truncated", "action_space")
REFUSED = {"MNISTBandit-bsuite": "it downloads its images from the internet while it is made"}


class Single(NamedTuple):
    """One gymnax environment, ready to be driven."""

    env: Any
    params: Any
    state: PyTree  # avals of its state, the same after reset and after step
    low: np.ndarray | None  # bounds of continuous actions
    high: np.ndarray | None
    spec: EnvSpec


class Episode(NamedTuple):
    """N episodes, or one, at their beginning."""

    env: PyTree  # [N, ...] gymnax's own state
    obs: PyTree  # [N, ...]
    key: Key  # [N] of all that is random in the steps that follow


class Stock(NamedTuple):
    """For each environment the beginning of its next episode, drawn in advance."""

    episode: Episode  # [N]
    used: jax.Array  # [N] bool: this one has been played and must be drawn anew before it is wanted
    key: Key  # [N] where the episodes after it come from


class State(NamedTuple):
    """N environments under way, and for each the beginning of its next episode, drawn in advance."""

    env: PyTree  # [N, ...] gymnax's own state
    key: Key  # [N] of this episode's steps
    last: jax.Array  # [N] bool: the next step begins an episode
    count: jax.Array  # uint32: steps so far; wraps, but no episode lasts 2^32 steps
    stock: Stock


def registered() -> tuple[str, ...]:
    return tuple(gymnax.registered_envs)


def make(name: str, num_envs: int, options: Mapping[str, Any]) -> Env:
    """An environment of gymnax's registry, by gymnax's name for it."""
    env_id = f"gymnax/{name}"
    if name in REFUSED:
        raise ValueError(f"{env_id} cannot be used: {REFUSED[name]}")
    default, _ = gymnax.make(name)
    return adapt(type(default), num_envs, options, env_id, functools.partial(gymnax.make, name))


def adapt(
    source: Any,
    num_envs: int,
    options: Mapping[str, Any] | None = None,
    env_id: str = "",
    construct: Callable[..., Any] | None = None,
) -> Env:
    """N environments from a class, a factory, an instance, or a pair of an instance and its parameters."""
    options = dict(options or {})
    if not env_id:
        named = source[0] if isinstance(source, tuple) else source
        named = named if hasattr(named, "__qualname__") else type(named)
        env_id = f"{named.__module__}:{named.__qualname__}"
    arguments = _arguments(source)
    built = source
    if construct or callable(source) and not hasattr(source, "reset_env") or inspect.isclass(source):
        given = {k: _coerce(env_id, k, v, arguments[k]) for k, v in options.items() if k in arguments}
        try:
            built = (construct or source)(**given)
        except Exception as error:
            said = f" with {given}" if given else ""
            raise ValueError(f"{env_id} cannot be made{said}: {_one_line(error)}") from error
        options = {k: v for k, v in options.items() if k not in arguments}
    else:
        arguments = {}
    env, params = built if isinstance(built, tuple) else (built, None)
    missing = [name for name in INTERFACE if not hasattr(env, name)]
    if missing:
        raise ValueError(f"{env_id} has not gymnax's interface: {', '.join(missing)} missing")
    params = _with_options(env_id, env.default_params if params is None else params, options, arguments)
    single = _inspect(env_id, env, params, num_envs)
    return Env(functools.partial(reset, single), functools.partial(step, single), single.spec)


def reset(single: Single, key: Key) -> tuple[State, TimeStep]:
    """The first observations of N episodes."""
    num_envs = single.spec.num_envs
    episode, key = _draw(single, jax.random.split(key, num_envs))
    last = jnp.zeros(num_envs, bool)
    stock = Stock(episode, jnp.ones(num_envs, bool), key)
    state = State(episode.env, episode.key, last, jnp.uint32(0), stock)
    timestep = TimeStep(episode.obs, jnp.zeros(num_envs, jnp.float32), jnp.ones(num_envs, jnp.float32), last)
    return state, timestep


def step(single: Single, state: State, action: jax.Array) -> tuple[State, TimeStep]:
    """One step of all; where the last one ended an episode, the first row of the next."""
    _check_action(single.spec, action)
    key = jax.vmap(jax.random.fold_in, (0, None))(state.key, state.count)
    env_state, timestep = jax.vmap(functools.partial(step_one, single))(key, state.env, action)
    begins = state.last
    stock = refill(single, state.stock, begins)
    env_state, key, obs = _where(
        begins,
        (stock.episode.env, stock.episode.key, stock.episode.obs),
        (env_state, state.key, timestep.obs),
    )
    last = timestep.last & ~begins
    stock = stock._replace(used=stock.used | begins)
    reward = jnp.where(begins, 0.0, timestep.reward)
    discount = jnp.where(begins, 1.0, timestep.discount)
    return State(env_state, key, last, state.count + 1, stock), TimeStep(obs, reward, discount, last)


def refill(single: Single, stock: Stock, wanted: jax.Array) -> Stock:
    """The stock with a fresh episode wherever one is wanted.

    Drawing N episodes costs more than stepping them, and nearly every step some episode begins. So
    nothing is drawn until a used one is wanted, and then all used ones are. When that happens changes
    no value: each environment's episodes follow from its own key.
    """
    return jax.lax.cond((stock.used & wanted).any(), functools.partial(_refill, single), lambda same: same, stock)


def _refill(single: Single, stock: Stock) -> Stock:
    episode, key = _draw(single, stock.key)
    episode, key = _where(stock.used, (episode, key), (stock.episode, stock.key))
    return Stock(episode, jnp.zeros_like(stock.used), key)


def _draw(single: Single, key: Key) -> tuple[Episode, Key]:
    """The beginning of an episode for each key, and the keys of those after it."""
    keys = jax.vmap(functools.partial(jax.random.split, num=3))(key)  # [N, 3]
    env_state, obs = jax.vmap(functools.partial(reset_one, single))(keys[:, 0])
    return Episode(env_state, obs, keys[:, 1]), keys[:, 2]


def reset_one(single: Single, key: Key) -> tuple[PyTree, PyTree]:
    obs, env_state = single.env.reset_env(key, single.params)
    return _strong(single.state, env_state), encode(single, obs)


def step_one(single: Single, key: Key, env_state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
    """One environment's step, without a thought of reset."""
    action = to_env_action(single, action)
    obs, env_state, reward, terminated, _ = single.env.step_env(key, env_state, action, single.params)
    terminated = jnp.asarray(terminated, bool).reshape(())
    truncated = jnp.asarray(single.env.is_truncated(env_state, single.params), bool).reshape(())
    timestep = TimeStep(
        obs=encode(single, obs),
        reward=jnp.asarray(reward, jnp.float32).reshape(()),
        discount=1.0 - terminated.astype(jnp.float32),
        last=terminated | truncated,
    )
    return _strong(single.state, env_state), timestep


def to_env_action(single: Single, action: jax.Array) -> jax.Array:
    """An agent's action as the environment wants it: in range whatever was given; NaN is the middle."""
    if isinstance(single.spec.action, types.Discrete):
        return jnp.clip(action, 0, single.spec.action.num - 1)
    unit = jnp.where(jnp.isnan(action), 0.0, jnp.clip(action, -1.0, 1.0)).reshape(single.low.shape)
    scaled = single.low + (unit + 1.0) * (0.5 * (single.high - single.low))
    return jnp.clip(scaled, single.low, single.high)


def encode(single: Single, obs: PyTree) -> PyTree:
    bits = type(single.env).__module__.startswith("gymnax.environments.minatar.")
    return _encode(obs, _observation_space(single.env, single.params), bits)


def _encode(obs: PyTree, space: Any, bits: bool) -> PyTree:
    if isinstance(obs, Mapping):
        inner = space.spaces if isinstance(space, spaces.Dict) else {}
        return {name: _encode(part, inner.get(name), bits) for name, part in obs.items()}
    return jax.tree.map(lambda leaf: _encode_leaf(jnp.asarray(leaf), space, bits), obs)


def _encode_leaf(leaf: jax.Array, space: Any, bits: bool) -> jax.Array:
    if bits:
        return leaf.astype(bool)
    if leaf.ndim == 0 and isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(leaf, space.n, dtype=jnp.float32)
    leaf = jnp.atleast_1d(leaf)
    return leaf if leaf.dtype in (jnp.bool_, jnp.uint8) else leaf.astype(jnp.float32)


def _observation_space(env: Any, params: Any) -> Any:
    try:
        return env.observation_space(params)
    except Exception:  # a convenience: an environment may say nothing of its observations
        return None


def _where(mask: jax.Array, first: PyTree, second: PyTree) -> PyTree:
    """Of two trees [N, ...], the rows of the first where `mask` [N], else those of the second."""
    return jax.tree.map(lambda a, b: jnp.where(mask.reshape(mask.shape + (1,) * (a.ndim - 1)), a, b), first, second)


def _strong(avals: PyTree, tree: PyTree) -> PyTree:
    """The same values with the dtypes of `avals` and no weak types, so that no second lowering follows."""
    return jax.tree.map(lambda aval, x: _strong_leaf(aval, jnp.asarray(x)), avals, tree)


def _strong_leaf(aval: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else jax.lax.convert_element_type(x, aval.dtype)


def _check_action(spec: EnvSpec, action: jax.Array) -> None:
    discrete = isinstance(spec.action, types.Discrete)
    shape = (spec.num_envs,) if discrete else (spec.num_envs, *spec.action.shape)
    kind = jnp.integer if discrete else jnp.floating
    if action.shape != shape or not jnp.issubdtype(action.dtype, kind):
        raise ValueError(
            f"{spec.id} wants actions {'int32' if discrete else 'float32'}{list(shape)}, not {action.dtype}{list(action.shape)}"
        )


def _inspect(env_id: str, env: Any, params: Any, num_envs: int) -> Single:
    """What the environment's own functions say of themselves when traced; its spaces may err."""
    action, low, high = _action(env_id, env.action_space(params))
    spec = EnvSpec(env_id, None, action, num_envs)
    single = Single(env, params, None, low, high, spec)
    key = jax.eval_shape(lambda: jax.random.key(0))
    shape, dtype = ((), jnp.int32) if low is None else (action.shape, jnp.float32)
    to_step = functools.partial(_raw_step, single)
    try:
        obs, state = jax.eval_shape(functools.partial(_raw_reset, single), key)
        next_obs, next_state, reward, ends = jax.eval_shape(to_step, key, state, jax.ShapeDtypeStruct(shape, dtype))
    except Exception as error:  # whatever its functions raise
        raise ValueError(f"{env_id} cannot be driven: {_one_line(error)}") from error
    _check_same(env_id, "state", state, next_state)
    _check_same(env_id, "observation", obs, next_obs)
    for name, value in {"reward": reward, "terminated": ends[0], "truncated": ends[1]}.items():
        if value.size != 1:
            raise ValueError(f"{env_id} cannot be driven: {name} has shape {value.shape}, one number is wanted")
    return single._replace(state=jax.tree.map(_joined, state, next_state), spec=spec._replace(obs=obs))


def _raw_reset(single: Single, key: Key) -> tuple[PyTree, PyTree]:
    obs, state = single.env.reset_env(key, single.params)
    return encode(single, obs), state


def _raw_step(single: Single, key: Key, state: PyTree, action: jax.Array) -> tuple:
    outcome = single.env.step_env(key, state, to_env_action(single, action), single.params)
    if len(outcome) != 5:
        raise ValueError(f"step_env returns {len(outcome)} values, not (obs, state, reward, terminated, info)")
    obs, state, reward, terminated, _ = outcome
    truncated = single.env.is_truncated(state, single.params)
    return encode(single, obs), state, jnp.asarray(reward), (jnp.asarray(terminated), jnp.asarray(truncated))


def _joined(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return a if a.dtype == b.dtype else jax.ShapeDtypeStruct(a.shape, jnp.promote_types(a.dtype, b.dtype))


def _check_same(env_id: str, what: str, first: PyTree, after: PyTree) -> None:
    if jax.tree.structure(first) != jax.tree.structure(after):
        raise ValueError(f"{env_id} cannot be driven: the structure of its {what} changes between reset and step")
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(first)[0], jax.tree.leaves(after)):
        if a.shape != b.shape:
            name = what + jax.tree_util.keystr(path)
            raise ValueError(f"{env_id} cannot be driven: its {name} has shape {a.shape} after reset and {b.shape} after step")


def _action(env_id: str, space: Any) -> tuple[types.Discrete | types.Box, np.ndarray | None, np.ndarray | None]:
    """The action space for agents, and the true bounds of a continuous one."""
    if isinstance(space, spaces.Discrete):
        return types.Discrete(int(space.n)), None, None
    if not isinstance(space, spaces.Box) or not jnp.issubdtype(space.dtype, jnp.floating):
        raise ValueError(f"{env_id} cannot be driven: its action space is {space}; one Discrete or one Box of floats is wanted")
    low = np.broadcast_to(np.asarray(space.low, np.float32), space.shape)
    high = np.broadcast_to(np.asarray(space.high, np.float32), space.shape)
    if not (np.abs(low).max(initial=0) < 1e30 and np.abs(high).max(initial=0) < 1e30 and (low < high).all()):
        raise ValueError(f"{env_id} cannot be driven: its actions have no finite bounds ({space}), so [-1, 1] cannot be scaled to them")
    return types.Box(tuple(space.shape) or (1,)), low, high


def _arguments(source: Any) -> dict[str, Any]:
    """Names and defaults of what a class or a factory can be called with."""
    if not callable(source) or not (inspect.isclass(source) or inspect.isroutine(source) or isinstance(source, functools.partial)):
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default for p in inspect.signature(source).parameters.values() if p.kind in named}


def _with_options(env_id: str, params: Any, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    fields = _fields(params)
    for name in options:
        if name not in fields:
            known = (*fields, *arguments)
            hint = nearest(name, known) or (f"; it has {', '.join(known)}" if known else "; it has none")
            raise ValueError(f"{env_id} has no option {name!r}{hint}")
    values = {name: _coerce(env_id, name, value, fields[name]) for name, value in options.items()}
    if not 1 <= values.get("max_steps_in_episode", 1) < 2**31:
        raise ValueError(f"max_steps_in_episode={options['max_steps_in_episode']!r} for {env_id}: must be at least 1 and below 2^31")
    return params._replace(**values) if hasattr(params, "_replace") else dataclasses.replace(params, **values) if values else params


def _fields(params: Any) -> dict[str, Any]:
    if hasattr(params, "_asdict"):
        return params._asdict()
    return {f.name: getattr(params, f.name) for f in dataclasses.fields(params)} if dataclasses.is_dataclass(params) else {}


def _coerce(env_id: str, name: str, value: Any, default: Any) -> Any:
    """The value as the type that the default has, from a number, a string or a list."""
    try:
        return _as_type_of(default, value)
    except (TypeError, ValueError) as error:
        wanted = type(default).__name__ if isinstance(default, (bool, int, float, str)) else f"array of shape {np.shape(default)}"
        raise ValueError(f"{name}={value!r} for {env_id}: {wanted} is wanted, such as {default!r}") from error


def _as_type_of(default: Any, value: Any) -> Any:
    if isinstance(default, bool):
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if str(value).lower() not in words:
            raise ValueError
        return words[str(value).lower()]
    if isinstance(default, (int, float)):
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if not np.isfinite(number) or isinstance(default, int) and number != int(number):
            raise ValueError
        return type(default)(number)
    if isinstance(default, (np.ndarray, jax.Array)):
        array = jnp.asarray(np.asarray(value, dtype=default.dtype))
        if array.shape != default.shape:
            raise ValueError
        return array
    return value


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
