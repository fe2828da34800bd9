"""Provide pgx's environments, with their masks of legal actions.

The agent is player 0. In an environment for several players, all others take uniformly random legal actions; pgx draws
the first player. The reward of a step includes the agent's rewards during the moves of the others. Terminal
observations are shown from the agent's view.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pgx

from jaxrl_fast.envs.gymnax.adapter import adapt
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.types import Discrete, Env, Key

AGENT = 0  # its number among the players
NO_LIMIT = 2**30  # steps; most environments of pgx end by themselves


class Params(NamedTuple):
    """Parameters of every environment of pgx."""

    max_steps_in_episode: int = NO_LIMIT


class State(NamedTuple):
    """The state of one environment in which the agent acts next, or a terminal one."""

    env: Any  # pgx's own state
    num_steps: jax.Array  # int32 []: actions of the agent in this episode
    early_reward: jax.Array  # f32 []: rewards of the agent before its first action, added to that action's reward


class PgxEnv:
    """One environment of pgx, with gymnax's interface."""

    default_params = Params()

    def __init__(self, name: str):
        self.env = pgx.make(name)

    def reset_env(self, key: Key, params: Params) -> tuple[jax.Array, State]:
        """Start an episode; others may act before the agent."""
        key_init, key_others = jax.random.split(key)
        state, reward = self._until_agent_acts(self.env.init(key_init), key_others)
        return self._observation(state), State(state, jnp.int32(0), reward)

    def step_env(self, key: Key, state: State, action: jax.Array, params: Params) -> tuple[Any, ...]:
        """Apply an action of the agent, then actions of the others, without a reset."""
        key_step, key_others = jax.random.split(key)
        after = self.env.step(state.env, action, key_step)
        reward = state.early_reward + after.rewards[AGENT]
        after, reward_of_others = self._until_agent_acts(after, key_others)
        state = State(after, state.num_steps + 1, jnp.float32(0))
        return self._observation(after), state, reward + reward_of_others, after.terminated, {}

    def is_truncated(self, state: State, params: Params) -> jax.Array:
        """Return whether the time limit is reached."""
        return state.env.truncated | (state.num_steps >= params.max_steps_in_episode)

    def action_mask(self, state: State, params: Params) -> jax.Array:
        """Return which actions are legal."""
        return state.env.legal_action_mask

    def action_space(self, params: Params) -> Discrete:
        """Return the space of pgx's actions, of which some are illegal."""
        return Discrete(self.env.num_actions)

    def _observation(self, state: Any) -> jax.Array:
        return self.env._observe(state, jnp.int32(AGENT))  # `observe` with a player is deprecated

    def _until_agent_acts(self, state: Any, key: Key) -> tuple[Any, jax.Array]:
        """Return the state in which the agent acts next, and the sum of its rewards until then."""
        if self.env.num_players == 1:
            return state, jnp.float32(0)

        def others_act(carry: tuple[Any, jax.Array, jax.Array]) -> jax.Array:
            state, _, _ = carry
            return (state.current_player != AGENT) & ~state.terminated & ~state.truncated

        def act(carry: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
            state, reward, num_moves = carry
            key_action, key_step = jax.random.split(jax.random.fold_in(key, num_moves))
            logits = jnp.where(state.legal_action_mask, 0.0, -jnp.inf)
            state = self.env.step(state, jax.random.categorical(key_action, logits), key_step)
            return state, reward + state.rewards[AGENT], num_moves + 1

        state, reward, _ = jax.lax.while_loop(others_act, act, (state, jnp.float32(0), jnp.int32(0)))
        return state, reward


def registered() -> tuple[str, ...]:
    """Return the names of all environments that `pgx.make` accepts."""
    return pgx.available_envs()


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by pgx's name for them; `host_config` does not concern the device."""
    del host_config
    make_one = functools.partial(PgxEnv, name)
    return adapt(make_one, num_envs, options, f"pgx/{name}", make_one)
