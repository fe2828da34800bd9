"""Step N environments with gymnax's interface as `types.Env`.

gymnax's own `step` resets within the last step, which hides the terminal observation. This file calls `reset_env`,
`step_env` and `is_truncated` instead (see `single`) and resets on the step after the last one (see `types.TimeStep`).
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.envs import spaces
from jaxrl_fast.envs.construct import OFFERED, arguments, call, is_factory
from jaxrl_fast.envs.gymnax.single import Single, action_masks, encode, reset_one, step_one
from jaxrl_fast.envs.gymnax.tracing import traced
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.wrappers import frame_skip, players
from jaxrl_fast.envs.wrappers import ranges as drawn
from jaxrl_fast.types import Env, EpisodeScore, Key, PyTree, TimeStep, View
from jaxrl_fast.utils import importing
from jaxrl_fast.utils.arguments import coerce, refuse_option
from jaxrl_fast.utils.errors import where, why

REQUIRED_ATTRIBUTES = ("default_params", "reset_env", "step_env", "is_truncated", "action_space")
UNSUPPORTED = {"MNISTBandit-bsuite": "it downloads its images from the internet when it is made"}


class Episode(NamedTuple):
    """The first states of N episodes."""

    env: PyTree  # [N, ...] gymnax's own state
    obs: PyTree  # [N, ...]
    key_data: jax.Array  # [N, ...] for randomness in the steps that follow


class ResetBuffer(NamedTuple):
    """The start of each environment's next episode, computed in advance.

    Keys are stored as raw data, because JAX's check for reused keys cannot follow a choice among keys.
    """

    episode: Episode  # [N]
    used: jax.Array  # [N] bool: this start was used and must be replaced before the next reset
    key_data: jax.Array  # [N, ...] for all later episodes


class State(NamedTuple):
    """The state of N environments."""

    env: PyTree  # [N, ...] gymnax's own state
    key: Key  # [N] for the steps of this episode
    last: jax.Array  # [N] bool: the next step resets; [N, P], if players have separate ends: once all are True
    num_steps: jax.Array  # uint32: steps so far; it may wrap, because no episode lasts 2^32 steps
    resets: ResetBuffer


def adapt(
    source: Any,
    num_envs: int,
    options: Mapping[str, Any],
    env_id: str = "",
    construct: Callable[..., Any] | None = None,
) -> Env:
    """Return N environments from a class, a factory, an instance, or a pair of an instance and its parameters.

    `construct`, if given, is called instead of the class. An object given by its name alone may come from a preset or
    config.yaml, which must not call arbitrary functions: it is called only if it is a class with gymnax's interface.
    """
    if env_id and not construct and is_factory(source):
        _check_class(env_id, source)
    env_id = env_id or importing.name_of(source)
    known, given = arguments(source), _given(env_id, source, options)
    env = call(env_id, construct or source, given) if is_factory(source) else source
    env, params = env if isinstance(env, tuple) else (env, None)
    _check_interface(env_id, env)
    params = _default_params(env_id, env) if params is None else params
    rest = {name: value for name, value in options.items() if name not in given}
    rest, num_skip = frame_skip.take(env_id, rest, _fields(params))
    env = frame_skip.FrameSkip(env, num_skip) if num_skip > 1 else env
    ranges = drawn.ranges(env_id, rest, _fields(params))
    params = _with_options(env_id, params, {name: x for name, x in rest.items() if name not in ranges}, known)
    single = traced(env_id, env, params, num_envs)
    frame_skip.check(env_id, single.spec.has_action_mask, num_skip)
    return batch(_drawing(single, {name: rest[name] for name in ranges}, ranges) if ranges else single, num_envs)


def _drawing(single: Single, given: Mapping[str, str], ranges: Mapping[str, drawn.Range]) -> Single:
    """Return the environment with parameters drawn at each reset."""
    spec, env = single.spec, drawn.Drawn(single.env, ranges)
    try:
        return traced(spec.id, env, single.params, spec.num_envs)
    except ValueError as error:  # with fixed parameters, tracing has worked
        written = ", ".join(f"{name}={value}" for name, value in given.items())
        remedy = "a parameter that decides a shape or a branch in Python must be one value"
        raise ValueError(f"{spec.id} cannot be made with {written}: {why(error)}; {remedy}") from error


def made(source: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return the environment that a factory makes from the options that are its arguments."""
    env_id = importing.name_of(source)
    return call(env_id, source, _given(env_id, source, options))


def _given(env_id: str, source: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are arguments of a class or a factory, with the types of their defaults."""
    known = arguments(source)
    return {name: coerce(env_id, name, options[name], known[name]) for name in options if name in known}


def batch(single: Single, num_envs: int, host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments like one that has been traced; `host_config` does not concern the device."""
    single = single._replace(spec=single.spec._replace(num_envs=num_envs))
    of_player = single._replace(spec=single.spec._replace(players=()))  # an observation is that of one player
    view = View(
        to_env_action=jax.vmap(functools.partial(spaces.to_env_action, single.spec, single.bounds)),
        raw_obs=spaces.raw_spec(single.raw_obs, single.spec.obs),
        encode_obs=jax.vmap(functools.partial(encode, of_player)),
        info=(*_unscaled(single), *([single.env.info] if isinstance(single.env, drawn.Drawn) else [])),
        resize=functools.partial(batch, single),
    )
    env = Env(functools.partial(reset, single), functools.partial(step, single), single.spec, view=view)
    return players.as_rows(env) if single.players else env


def _unscaled(single: Single) -> tuple[str, ...]:
    """Return a line about images whose dtype does not say that their numbers are shades."""
    space, obs = single.obs_space, single.spec.obs
    is_image = getattr(obs, "ndim", 0) in (2, 3) and jnp.issubdtype(obs.dtype, jnp.floating)
    high = getattr(space, "high", None)
    if not is_image or high is None or float(jnp.max(jnp.asarray(high))) != 255:
        return ()
    return ("observations are floats from 0 to 255: network.observations image divides them by 255",)


def reset(single: Single, key: Key) -> tuple[State, TimeStep]:
    """Start N episodes."""
    num_envs = single.spec.num_envs
    episode, key_data = draw(single, jax.random.split(key, num_envs))
    zeros = functools.partial(jnp.zeros, num_envs)
    resets = ResetBuffer(jax.tree.map(jnp.copy, episode), ~zeros(bool), key_data)  # a copy, so that all can be donated
    last = jnp.zeros((num_envs, *single.ends), bool)
    state = State(episode.env, _wrap(key, episode.key_data), last, jnp.uint32(0), resets)
    mask = action_masks(single, episode.env)
    reward = jnp.zeros((num_envs, *single.players), jnp.float32)
    score = _score_of_players(jnp.copy(reward), last) if single.ends else ()
    return state, TimeStep(episode.obs, reward, jnp.ones(last.shape, jnp.float32), jnp.copy(last), score, mask)


def step(single: Single, state: State, action: jax.Array) -> tuple[State, TimeStep]:
    """Step all N environments, or reset them if their last step ended an episode.

    An environment that resets is stepped too, from the start of its next episode, and the result is discarded:
    `step_env` need not be defined on the state after an episode's end. A player whose episode has ended waits, with
    `last` True, until the episodes of all players have ended.
    """
    if not single.players:  # else `players` has checked it
        spaces.check_action(single.spec, action)
    ended = state.last  # of each player, or of the environment
    begins = ended.all(axis=-1) if single.ends else ended
    resets = refill(single, jax.random.key_impl(state.key), state.resets, begins)
    running = _where(begins, resets.episode.env, state.env)
    env_state, timestep = jax.vmap(functools.partial(step_one, single))(step_keys(state), running, action)
    obs = spaces.readable(ended, timestep.obs) if single.ends else timestep.obs  # players who wait may see NaN
    current = Episode(env_state, obs, jax.random.key_data(state.key))
    episode = _where(begins, resets.episode, current)
    reward = _where(ended, jnp.zeros_like(timestep.reward), timestep.reward)
    last = (timestep.last | ended) & ~begins[:, None] if single.ends else timestep.last & ~begins
    timestep = TimeStep(
        obs=episode.obs,
        reward=reward,
        discount=jnp.where(ended, 1.0, timestep.discount),
        last=last,
        score=_score_of_players(reward, last) if single.ends else (),
        action_mask=action_masks(single, episode.env),
    )
    resets = resets._replace(used=resets.used | begins)
    key = _wrap(state.key, episode.key_data)
    return State(episode.env, key, timestep.last, state.num_steps + 1, resets), timestep


def _score_of_players(reward: jax.Array, last: jax.Array) -> EpisodeScore:
    """Return scores of players [N, P] that are complete when the last player's episode ends."""
    return EpisodeScore(reward, jnp.broadcast_to(last.all(axis=-1, keepdims=True), last.shape))


def step_keys(state: State) -> Key:
    """Return the key for each environment's next `step_env`. [N]"""
    return jax.vmap(jax.random.fold_in, (0, None))(state.key, state.num_steps)


def draw(single: Single, key: Key) -> tuple[Episode, jax.Array]:
    """Return the start of an episode for each key [N], and key data [N, ...] for later episodes."""
    keys = jax.vmap(functools.partial(jax.random.split, num=3))(key)  # [N, 3]
    env_state, obs = jax.vmap(functools.partial(reset_one, single))(keys[:, 0])
    return Episode(env_state, obs, jax.random.key_data(keys[:, 1])), jax.random.key_data(keys[:, 2])


def refill(single: Single, impl: Any, resets: ResetBuffer, needed: jax.Array) -> ResetBuffer:
    """Return the buffer with an unused start for every environment that needs one [N].

    Resetting N environments costs more than stepping them, and some episode starts at nearly every step. So all used
    starts are replaced only once an environment needs another one. The time of replacement does not affect values,
    because each environment's episodes follow from its own key. A batch of seeds can therefore share one condition;
    under a plain `vmap`, each step would reset.
    """
    shared = jax.custom_batching.custom_vmap(functools.partial(_refill_if_needed, single, impl))
    shared.def_vmap(functools.partial(_refill_seeds, single, impl))
    return shared(resets, needed)


def _refill_if_needed(single: Single, impl: Any, resets: ResetBuffer, needed: jax.Array) -> ResetBuffer:
    replace_used = functools.partial(_replace_used, single, impl)
    return jax.lax.cond((resets.used & needed).any(), replace_used, lambda same: same, resets)


def _replace_used(single: Single, impl: Any, resets: ResetBuffer) -> ResetBuffer:
    fresh = draw(single, jax.random.wrap_key_data(resets.key_data, impl=impl))
    episode, key_data = _where(resets.used, fresh, (resets.episode, resets.key_data))
    return ResetBuffer(episode, jnp.zeros_like(resets.used), key_data)


def _refill_seeds(
    single: Single, impl: Any, num_seeds: int, batched: Any, resets: ResetBuffer, needed: jax.Array
) -> tuple[ResetBuffer, PyTree]:
    """Apply `refill` to [S, N] as to [S * N]."""

    def flat(x, is_batched):
        x = x if is_batched else jnp.broadcast_to(x, (num_seeds, *x.shape))
        return x.reshape(
            x.shape[0] * x.shape[1], *x.shape[2:]
        )  # with explicit sizes, because -1 fails for arrays without elements

    filled = refill(single, impl, *jax.tree.map(flat, (resets, needed), tuple(batched)))
    filled = jax.tree.map(lambda x: x.reshape(num_seeds, len(x) // num_seeds, *x.shape[1:]), filled)
    return filled, jax.tree.map(lambda _: True, filled)


def _where(mask: jax.Array, first: PyTree, second: PyTree) -> PyTree:
    """Return rows of the first tree [N, ...] where `mask` [N] or [N, P] is True, else rows of the second."""
    mask_of = lambda a: mask.reshape(mask.shape + (1,) * (a.ndim - mask.ndim))
    return jax.tree.map(lambda a, b: jnp.where(mask_of(a), a, b), first, second)


def _wrap(like: Key, key_data: jax.Array) -> Key:
    return jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(like))


def _check_interface(env_id: str, env: Any) -> None:
    required = (
        REQUIRED_ATTRIBUTES[1:] if inspect.isclass(env) else REQUIRED_ATTRIBUTES
    )  # an instance may come with its parameters
    missing = [name for name in required if inspect.getattr_static(env, name, inspect) is inspect]
    if missing == ["is_truncated"]:
        raise ValueError(
            f"{env_id} lacks is_truncated(state, params) of gymnax's interface; add it in a subclass to return whether "
            "the time limit is reached (False without one)"
        )
    if missing:
        raise ValueError(
            f"{env_id} lacks {', '.join(missing)} of gymnax's interface; wrapping `reset` and `step` is not enough"
        )


def _check_class(env_id: str, source: Any) -> None:
    if not inspect.isclass(source):
        raise ValueError(
            f"env: {env_id} must be a class or an instance with gymnax's interface, got a {type(source).__name__}; "
            "pass a factory from Python: fit(env=make_env)"
        )
    _check_interface(env_id, source)


def _default_params(env_id: str, env: Any) -> Any:
    try:
        return env.default_params
    except Exception as error:  # environments may raise anything
        raise ValueError(f"{env_id}: its default_params failed with {why(error)}{where(error)}") from error


def _with_options(env_id: str, params: Any, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Return the environment's parameters with the user's values."""
    fields = _fields(params)
    known = (*fields, *arguments)
    for name in options:
        if name not in fields:
            refuse_option(env_id, name, known, OFFERED)
    values = {name: coerce(env_id, name, value, fields[name]) for name, value in options.items()}
    if not 1 <= values.get("max_steps_in_episode", 1) < 2**31:
        given = options["max_steps_in_episode"]
        raise ValueError(f"max_steps_in_episode: must be at least 1 and less than 2^31 for {env_id}, got {given!r}")
    return drawn.replace(params, values)


def _fields(params: Any) -> dict[str, Any]:
    if hasattr(params, "_asdict"):
        return params._asdict()
    named = dataclasses.fields(params) if dataclasses.is_dataclass(params) else ()
    return {field.name: getattr(params, field.name) for field in named}
