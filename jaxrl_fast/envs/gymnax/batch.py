"""Step N environments with gymnax's interface as `types.Env`.

gymnax's own `step` resets within the last step, which hides the terminal observation. This file calls `reset_env`,
`step_env` and `is_truncated` instead (see `single`) and resets on the step after the last one (see `types.TimeStep`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.envs import spaces
from jaxrl_fast.envs.gymnax.single import Single, action_masks, encode, reset_one, step_one
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.wrappers import players
from jaxrl_fast.envs.wrappers import ranges as drawn
from jaxrl_fast.types import Env, EpisodeScore, Key, PyTree, TimeStep, View


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
    score = _score_of_players(jnp.copy(reward), last) if single.ends else None
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
        score=_score_of_players(reward, last) if single.ends else None,
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
