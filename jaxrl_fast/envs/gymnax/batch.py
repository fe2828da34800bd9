"""gymnax's environments, and any object with gymnax's interface, as `types.Env`.

gymnax's own `step` resets within the last step. We build on its parts `reset_env`, `step_env` and
`is_truncated` (`gymnax_single`), and reset on the step after (see `types.TimeStep`), so that no true successor is
lost.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.envs import spaces
from jaxrl_fast.envs.gymnax.single import Single, reset_one, step_one, traced
from jaxrl_fast.types import Env, Key, PyTree, TimeStep
from jaxrl_fast.utils import importing
from jaxrl_fast.utils.errors import why

INTERFACE = ("default_params", "reset_env", "step_env", "is_truncated", "action_space")
REFUSED = {"MNISTBandit-bsuite": "it downloads its images from the internet while it is made"}


class Episode(NamedTuple):
    """The beginnings of N episodes."""

    env: PyTree  # [N, ...] gymnax's own state
    obs: PyTree  # [N, ...]
    key_data: jax.Array  # [N, ...] of all that is random in the steps that follow


class Stock(NamedTuple):
    """For each environment the beginning of its next episode, drawn in advance.

    Its keys are bare data, because JAX's check for keys used twice cannot follow a choice among keys.
    """

    episode: Episode  # [N]
    used: jax.Array  # [N] bool: it has been played, and must be drawn anew before it is wanted again
    key_data: jax.Array  # [N, ...] where all episodes after it come from


class State(NamedTuple):
    """N environments under way."""

    env: PyTree  # [N, ...] gymnax's own state
    key: Key  # [N] of this episode's steps
    last: jax.Array  # [N] bool: the next step begins an episode
    num_steps: jax.Array  # uint32: steps so far; wraps, but no episode lasts 2^32 steps
    stock: Stock


def adapt(
    source: Any,
    num_envs: int,
    options: Mapping[str, Any],
    env_id: str = "",
    construct: Callable[..., Any] | None = None,
) -> Env:
    """N environments from a class, a factory, an instance, or a pair of an instance and its parameters.

    `construct`, if given, is called in the place of the class. What is known by its name alone may come from a preset
    or a run's config.yaml, which must not call what they like: only a class with the interface is called.
    """
    if env_id and not construct and _is_factory(source):
        _check_class(env_id, source)
    env_id = env_id or importing.name_of(source)
    arguments = _arguments(source)
    given = {name: spaces.coerce(env_id, name, options[name], arguments[name]) for name in options if name in arguments}
    env = _call(env_id, construct or source, given) if _is_factory(source) else source
    env, params = env if isinstance(env, tuple) else (env, None)
    _check_interface(env_id, env)
    params = env.default_params if params is None else params
    rest = {name: value for name, value in options.items() if name not in given}
    params = _with_options(env_id, params, rest, arguments)
    single = traced(env_id, env, params, num_envs)
    to_env_action = jax.vmap(functools.partial(spaces.to_env_action, single.spec, single.bounds))
    return Env(
        functools.partial(reset, single), functools.partial(step, single), single.spec, to_env_action=to_env_action
    )


def reset(single: Single, key: Key) -> tuple[State, TimeStep]:
    """The first observations of N episodes."""
    num_envs = single.spec.num_envs
    episode, key_data = draw(single, jax.random.split(key, num_envs))
    zeros = functools.partial(jnp.zeros, num_envs)
    stock = Stock(jax.tree.map(jnp.copy, episode), ~zeros(bool), key_data)  # a copy, so that all may be donated
    state = State(episode.env, _wrap(key, episode.key_data), zeros(bool), jnp.uint32(0), stock)
    return state, TimeStep(episode.obs, zeros(jnp.float32), jnp.ones(num_envs, jnp.float32), zeros(bool))


def step(single: Single, state: State, action: jax.Array) -> tuple[State, TimeStep]:
    """One step of all; where the last one ended an episode, the first row of the next."""
    spaces.check_action(single.spec, action)
    keys = step_keys(state)
    env_state, timestep = jax.vmap(functools.partial(step_one, single))(keys, state.env, action)
    begins = state.last
    stock = refill(single, jax.random.key_impl(state.key), state.stock, begins)
    going = Episode(env_state, timestep.obs, jax.random.key_data(state.key))
    episode = _where(begins, stock.episode, going)
    timestep = TimeStep(
        obs=episode.obs,
        reward=jnp.where(begins, 0.0, timestep.reward),
        discount=jnp.where(begins, 1.0, timestep.discount),
        last=timestep.last & ~begins,
    )
    stock = stock._replace(used=stock.used | begins)
    key = _wrap(state.key, episode.key_data)
    return State(episode.env, key, timestep.last, state.num_steps + 1, stock), timestep


def step_keys(state: State) -> Key:
    """The key that each environment's `step_env` is given next. [N]"""
    return jax.vmap(jax.random.fold_in, (0, None))(state.key, state.num_steps)


def draw(single: Single, key: Key) -> tuple[Episode, jax.Array]:
    """The beginning of an episode for each key [N], and the data of the keys of those after it."""
    keys = jax.vmap(functools.partial(jax.random.split, num=3))(key)  # [N, 3]
    env_state, obs = jax.vmap(functools.partial(reset_one, single))(keys[:, 0])
    return Episode(env_state, obs, jax.random.key_data(keys[:, 1])), jax.random.key_data(keys[:, 2])


def refill(single: Single, impl: Any, stock: Stock, wanted: jax.Array) -> Stock:
    """The stock with a fresh episode wherever one is wanted [N].

    Drawing N episodes costs more than stepping them, and nearly every step some episode begins. So
    nothing is drawn until a used one is wanted, and then all used ones are. When that happens changes
    no value: each environment's episodes follow from its own key. Hence a batch of seeds may share one
    condition, where `vmap` by itself would draw at every step.
    """
    shared = jax.custom_batching.custom_vmap(functools.partial(_refill_if_wanted, single, impl))
    shared.def_vmap(functools.partial(_refill_seeds, single, impl))
    return shared(stock, wanted)


def _refill_if_wanted(single: Single, impl: Any, stock: Stock, wanted: jax.Array) -> Stock:
    draw_used = functools.partial(_draw_used, single, impl)
    return jax.lax.cond((stock.used & wanted).any(), draw_used, lambda same: same, stock)


def _draw_used(single: Single, impl: Any, stock: Stock) -> Stock:
    fresh = draw(single, jax.random.wrap_key_data(stock.key_data, impl=impl))
    episode, key_data = _where(stock.used, fresh, (stock.episode, stock.key_data))
    return Stock(episode, jnp.zeros_like(stock.used), key_data)


def _refill_seeds(
    single: Single, impl: Any, num_seeds: int, batched: Any, stock: Stock, wanted: jax.Array
) -> tuple[Stock, PyTree]:
    """`refill` of [S, N] as one of [S * N]."""

    def flat(x, is_batched):
        x = x if is_batched else jnp.broadcast_to(x, (num_seeds, *x.shape))
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # also of no elements

    filled = refill(single, impl, *jax.tree.map(flat, (stock, wanted), tuple(batched)))
    filled = jax.tree.map(lambda x: x.reshape(num_seeds, len(x) // num_seeds, *x.shape[1:]), filled)
    return filled, jax.tree.map(lambda _: True, filled)


def _where(mask: jax.Array, first: PyTree, second: PyTree) -> PyTree:
    """The rows of the first tree [N, ...] where `mask` [N], else those of the second."""
    return jax.tree.map(lambda a, b: jnp.where(mask.reshape(mask.shape + (1,) * (a.ndim - 1)), a, b), first, second)


def _wrap(like: Key, key_data: jax.Array) -> Key:
    return jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(like))


def _check_interface(env_id: str, env: Any) -> None:
    wanted = INTERFACE[1:] if inspect.isclass(env) else INTERFACE  # parameters may come with an instance
    missing = [name for name in wanted if inspect.getattr_static(env, name, inspect) is inspect]
    if missing:
        raise ValueError(
            f"{env_id} lacks {', '.join(missing)} of gymnax's interface; a wrapper of `reset` and `step` is not enough"
        )


def _check_class(env_id: str, source: Any) -> None:
    if not inspect.isclass(source):
        raise ValueError(
            f"{env_id} is a {type(source).__name__}; by name a class or an instance with gymnax's interface is wanted, "
            "and what makes one is for Python: fit(env=make_env)"
        )
    _check_interface(env_id, source)


def _is_factory(source: Any) -> bool:
    return inspect.isclass(source) or callable(source) and not hasattr(source, "step_env")


def _arguments(source: Any) -> dict[str, Any]:
    """Names and defaults of what a class or a factory can be called with."""
    if not _is_factory(source):
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(source).parameters
    except ValueError as error:  # one of Python's own, such as dict
        raise ValueError(f"env: {source!r} has not gymnax's interface, and is nothing that makes one") from error
    return {p.name: p.default for p in parameters.values() if p.kind in named}


def _call(env_id: str, construct: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return construct(**arguments)
    except Exception as error:  # whatever a constructor raises at a value it does not like
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        missing = isinstance(error, TypeError) and " missing " in str(error)
        hint = ", which an option of the environment can give" if missing else ""
        raise ValueError(f"{env_id} cannot be made{given and ' with '}{given}: {why(error)}{hint}") from error


def _with_options(env_id: str, params: Any, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """The environment's parameters with the user's values."""
    fields = _fields(params)
    known = (*fields, *arguments)
    for name in options:
        if name not in fields:
            spaces.refuse_option(env_id, name, known)
    values = {name: spaces.coerce(env_id, name, value, fields[name]) for name, value in options.items()}
    if not 1 <= values.get("max_steps_in_episode", 1) < 2**31:
        given = f"max_steps_in_episode={options['max_steps_in_episode']!r}"
        raise ValueError(f"{given} for {env_id}: at least 1 and less than 2^31 is wanted")
    if not values:
        return params
    return params._replace(**values) if hasattr(params, "_replace") else dataclasses.replace(params, **values)


def _fields(params: Any) -> dict[str, Any]:
    if hasattr(params, "_asdict"):
        return params._asdict()
    named = dataclasses.fields(params) if dataclasses.is_dataclass(params) else ()
    return {field.name: getattr(params, field.name) for field in named}
