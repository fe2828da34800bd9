"""Evaluation: the first episodes of each environment, scored by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast import play as playing
from jaxrl_fast.types import Agent, Decision, Discrete, Env, EnvSpec, Game, TimeStep


def clock(num_envs, lives=False):
    """Environment i's episodes last i + 1 steps; each step pays 1 for action 1. With lives, two episodes are a game."""

    def reset(key):
        time = jnp.zeros(num_envs, jnp.int32)
        return (time, jnp.zeros(num_envs, bool), time), _timestep(
            time, jnp.zeros(num_envs), jnp.zeros(num_envs, bool), time
        )

    def step(state, action):
        time, last, num_ended = state
        reward = jnp.where(last, 0.0, jnp.float32(action == 1))
        time = jnp.where(last, 0, time + 1)
        last = time == jnp.arange(num_envs) + 1
        num_ended = num_ended + last
        return (time, last, num_ended), _timestep(time, reward, last, num_ended)

    def _timestep(time, reward, last, num_ended):
        game = Game(10 * reward, last & (num_ended % 2 == 0)) if lives else ()
        return TimeStep(jnp.float32(time)[:, None], reward, jnp.ones(num_envs), last, game)

    return Env(reset, step, EnvSpec("clock", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), num_envs))


def player(num_envs):
    """Explores with action 0 and exploits with the action that is its state."""
    act = lambda state, obs, memory, noise: Decision(jnp.full(num_envs, state, jnp.int32))
    return Agent(
        init=lambda key: jnp.int32(1),
        explore=lambda *_: Decision(jnp.zeros(num_envs, jnp.int32)),
        exploit=act,
        update=lambda state, rollout, key: (state, {}),
        noise=lambda key, num_steps, num_envs: jax.random.uniform(key, (num_steps, num_envs)),
        rollout_length=4,
    )


def play(env, num_episodes, state=1, seed=0, index=0):
    agent = player(env.spec.num_envs)
    run = jax.jit(partial(playing.play, env, agent, num_episodes))
    return jax.device_get(run(jnp.int32(state), jnp.int32(seed), jnp.int32(index)))


def test_each_environment_plays_as_many_episodes_however_long_they_are():
    """Environment i returns i + 1. Of the first 8 episodes to end, most would be those of environment 0."""
    episodes = play(clock(4), num_episodes=2)
    np.testing.assert_array_equal(episodes.score, [[1, 1], [2, 2], [3, 3], [4, 4]])
    np.testing.assert_array_equal(episodes.length, [[1, 1], [2, 2], [3, 3], [4, 4]])
    assert (episodes.finished >= 2).all()


def test_episodes_longer_than_a_block_are_whole():
    env = clock(2 * playing.BLOCK + 5)
    episodes = play(env, num_episodes=1)
    np.testing.assert_array_equal(episodes.score[:, 0], np.arange(env.spec.num_envs) + 1)


def test_the_policy_exploits():
    assert play(clock(3), 1, state=0).score.sum() == 0
    assert play(clock(3), 1, state=1).score.sum() == 1 + 2 + 3


def test_scores_are_those_of_whole_games():
    """A game is two episodes, and pays ten times what the learner sees."""
    episodes = play(clock(3, lives=True), num_episodes=1)
    np.testing.assert_array_equal(episodes.score[:, 0], [20, 40, 60])
    np.testing.assert_array_equal(episodes.length[:, 0], [2, 4, 6])


def test_an_endless_episode_is_not_counted(monkeypatch):
    monkeypatch.setattr(playing, "MOST_STEPS", playing.BLOCK)
    env = clock(playing.BLOCK + 2)
    episodes = play(env, num_episodes=1)
    np.testing.assert_array_equal(episodes.finished > 0, np.arange(env.spec.num_envs) < playing.BLOCK)


def test_seeds_side_by_side_play_as_alone():
    env, agent = clock(3), player(3)
    together = jax.vmap(partial(playing.play, env, agent, 2), in_axes=(0, 0, None))
    both = jax.device_get(jax.jit(together)(jnp.array([0, 1]), jnp.array([5, 6]), jnp.int32(0)))
    for i, (state, seed) in enumerate([(0, 5), (1, 6)]):
        np.testing.assert_array_equal(both.score[i], play(env, 2, state, seed).score)


def test_evaluations_and_seeds_start_differently():
    """What an environment draws at its reset, read from the only place where it shows."""
    drawn = []

    def reset(key):
        jax.debug.callback(lambda data: drawn.append(tuple(data.tolist())), jax.random.key_data(key))
        return clock(1).reset(key)

    env = clock(1)._replace(reset=reset)
    for seed, index in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        play(env, 1, seed=seed, index=index)
    jax.effects_barrier()
    assert len(set(drawn)) == 3 and drawn[0] == drawn[3]
