"""How good a policy is: the first episodes of fresh environments, played with `exploit`."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast import loop
from jaxrl_fast.types import Agent, Array, Env, Game, PyTree

BLOCK = 64  # steps between looks at whether all have finished
MOST_STEPS = 27_000  # of an episode: half an hour of Atari; what goes on for longer is not counted
DOMAIN = 2**32 - 1  # sets evaluation's keys apart from training's, which are the first splits of the same key


class Episodes(NamedTuple):
    """The first K episodes of each of N environments. Which K matters: the first K to end would be the short ones."""

    score: Array  # [N, K] f32
    length: Array  # [N, K] int32
    finished: Array  # [N] int32: how many of them have ended


def play(env: Env, agent: Agent, num_episodes: int, state: PyTree, seed: Array, index: Array) -> Episodes:
    """`num_episodes` in each environment, by the agent's state, until all have ended.

    `index` tells evaluations of one run apart: each plays episodes of its own.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), DOMAIN), index)
    key_reset, key = jax.random.split(key)
    policy = partial(agent.exploit, state)
    most_blocks = -(-MOST_STEPS * num_episodes // BLOCK)

    def under_way(carry):
        _, episodes, num_blocks = carry
        return (num_blocks < most_blocks) & (episodes.finished < num_episodes).any()

    def block(carry):
        actors, episodes, num_blocks = carry
        noise = agent.noise(jax.random.fold_in(key, num_blocks), BLOCK, env.spec.num_envs)
        (actors, episodes), _ = jax.lax.scan(partial(step, env, agent, policy), (actors, episodes), noise)
        return actors, episodes, num_blocks + 1

    shape = env.spec.num_envs, num_episodes
    none = Episodes(jnp.zeros(shape), jnp.zeros(shape, jnp.int32), jnp.zeros(shape[0], jnp.int32))
    return jax.lax.while_loop(under_way, block, (loop.reset(env, agent, key_reset), none, jnp.int32(0)))[1]


def step(
    env: Env, agent: Agent, policy: loop.Policy, carry: tuple[loop.Actors, Episodes], noise: PyTree
) -> tuple[tuple[loop.Actors, Episodes], None]:
    """One step of all; whose game is over gets its score written down."""
    before, episodes = carry
    actors, _, _ = loop.rollout(env, agent, policy, before, jax.tree.map(lambda x: x[None], noise))
    game = actors.timestep.game or Game(actors.timestep.reward, actors.timestep.last)
    score, length = before.score + game.reward, before.length + ~before.timestep.last
    place = game.over[:, None] & (jnp.arange(episodes.score.shape[1]) == episodes.finished[:, None])
    write = lambda old, new: jnp.where(place, new[:, None], old)
    after = Episodes(write(episodes.score, score), write(episodes.length, length), episodes.finished + game.over)
    return (actors, after), None
