"""Step N environments with gymnax's interface as `types.Env`.

gymnax's own `step` resets within the last step, which hides the terminal observation. This file calls `reset_env`,
`step_env` and `is_truncated` instead (see `single`) and resets on the step after the last one (see `types.TimeStep`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.envs import schedules, spaces
from jaxrl_fast.envs.gymnax import scheduled, starts
from jaxrl_fast.envs.gymnax.single import Single, action_masks, encode, step_one
from jaxrl_fast.envs.gymnax.starts import where
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.wrappers import players
from jaxrl_fast.envs.wrappers import ranges as drawn
from jaxrl_fast.types import Env, EpisodeScore, Key, PyTree, TimeStep, View


class State(NamedTuple):
    """The state of N environments."""

    env: PyTree  # [N, ...] gymnax's own state
    key: Key  # [N] for the steps of this episode
    last: jax.Array  # [N] bool: the next step resets; [N, P], if players have separate ends: once all are True
    num_steps: jax.Array  # [N] uint32: steps so far; it may wrap, because no episode lasts 2^32 steps
    resets: starts.ResetBuffer
    options: scheduled.Options | None = None  # None: no parameter is scheduled


def batch(single: Single, num_envs: int, host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments like one that has been traced.

    Parameters follow their schedules where `host_config` says so; the rest of it does not concern the device.
    """
    resize = functools.partial(batch, single)
    follows = host_config is not None and host_config.schedules
    num_total = num_envs * (host_config.shard.num if host_config else 1)
    single = single._replace(
        spec=single.spec._replace(num_envs=num_envs), schedules=single.schedules if follows else ()
    )
    of_player = single._replace(spec=single.spec._replace(players=()))  # an observation is that of one player
    view = View(
        to_env_action=jax.vmap(functools.partial(spaces.to_env_action, single.spec, single.bounds)),
        action_tree=single.action_tree,
        raw_obs=spaces.raw_spec(single.raw_obs, single.spec.obs),
        encode_obs=jax.vmap(functools.partial(encode, of_player)),
        info=(
            *_unscaled(single),
            *([single.env.info] if isinstance(single.env, drawn.Drawn) else []),
            *schedules.info(dict(single.schedules)),
        ),
        resize=resize,
    )
    begin = functools.partial(reset, single, num_total=num_total)
    env = Env(begin, functools.partial(step, single), single.spec, view=view)
    return players.as_rows(env) if single.players else env


def _unscaled(single: Single) -> tuple[str, ...]:
    """Return a line about images whose dtype does not say that their numbers are shades."""
    space, obs = single.obs_space, single.spec.obs
    is_image = getattr(obs, "ndim", 0) in (2, 3) and jnp.issubdtype(obs.dtype, jnp.floating)
    high = getattr(space, "high", None)
    if not is_image or high is None or float(jnp.max(jnp.asarray(high))) != 255:
        return ()
    return ("observations are floats from 0 to 255: network.observations image divides them by 255",)


def reset(single: Single, key: Key, num_total: int) -> tuple[State, TimeStep]:
    """Start N episodes. `num_total` environments are trained together, in all shards."""
    num_envs = single.spec.num_envs
    options = scheduled.init(single.schedules, num_total)
    now = scheduled.values(options)
    of_start = {name: jnp.broadcast_to(x, num_envs) for name, x in now.items()} or None
    episode, key_data = starts.draw(single, jax.random.split(key, num_envs), of_start)
    zeros = functools.partial(jnp.zeros, num_envs)
    copied = jax.tree.map(jnp.copy, episode)  # so that all can be donated
    resets = starts.ResetBuffer(copied, ~zeros(bool), key_data, of_start)
    last = jnp.zeros((num_envs, *single.ends), bool)
    state = State(episode.env, _wrap(key, episode.key_data), last, zeros(jnp.uint32), resets, options)
    mask = action_masks(scheduled.with_values(single, now), episode.env)
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
    now = scheduled.values(state.options)
    start, resets = starts.take(single, jax.random.key_impl(state.key), state.resets, begins, now)
    single = scheduled.with_values(single, now)
    running = where(begins, start.env, state.env)
    env_state, timestep = jax.vmap(functools.partial(step_one, single))(step_keys(state), running, action)
    obs = spaces.readable(ended, timestep.obs) if single.ends else timestep.obs  # players who wait may see NaN
    current = starts.Episode(env_state, obs, jax.random.key_data(state.key))
    episode = where(begins, start, current)
    reward = where(ended, jnp.zeros_like(timestep.reward), timestep.reward)
    last = (timestep.last | ended) & ~begins[:, None] if single.ends else timestep.last & ~begins
    timestep = TimeStep(
        obs=episode.obs,
        reward=reward,
        discount=jnp.where(ended, 1.0, timestep.discount),
        last=last,
        score=_score_of_players(reward, last) if single.ends else None,
        action_mask=action_masks(single, episode.env),
    )
    key = _wrap(state.key, episode.key_data)
    options = scheduled.advance(state.options)
    return State(episode.env, key, timestep.last, state.num_steps + 1, resets, options), timestep


def _score_of_players(reward: jax.Array, last: jax.Array) -> EpisodeScore:
    """Return scores of players [N, P] that are complete when the last player's episode ends."""
    return EpisodeScore(reward, jnp.broadcast_to(last.all(axis=-1, keepdims=True), last.shape))


def step_keys(state: State) -> Key:
    """Return the key for each environment's next `step_env`. [N]"""
    return jax.vmap(jax.random.fold_in)(state.key, state.num_steps)


def _wrap(like: Key, key_data: jax.Array) -> Key:
    return jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(like))
