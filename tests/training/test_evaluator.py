"""Evaluation: the first episodes of each environment, scored by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.training import evaluator as playing
from jaxrl_fast.types import Agent, Decision, Discrete, Env, EnvSpec, EpisodeScore, TimeStep


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
        game = EpisodeScore(10 * reward, last & (num_ended % 2 == 0)) if lives else ()
        return TimeStep(jnp.float32(time)[:, None], reward, jnp.ones(num_envs), last, game)

    return Env(reset, step, EnvSpec("clock", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), num_envs))


def player(num_envs):
    """Explores with action 0 and exploits with the action that is its state."""
    act = lambda state, inputs, carry, noise: Decision(jnp.full(num_envs, state, jnp.int32))
    return Agent(
        init=lambda key: jnp.int32(1),
        explore=lambda *_: Decision(jnp.zeros(num_envs, jnp.int32)),
        exploit=act,
        update=lambda state, rollout, key: (state, {}),
        sample_noise=lambda key, num_steps, num_envs: jax.random.uniform(key, (num_steps, num_envs)),
        rollout_length=4,
    )


def play(env, num_episodes, state=1, seed=0, index=0):
    agent = player(env.spec.num_envs)
    run = jax.jit(partial(playing.evaluate_policy, env, agent, num_episodes))
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


def test_no_key_is_used_twice(strict_keys):
    """In what lasts longer than a block, too."""
    play(clock(playing.BLOCK + 1), num_episodes=1)


def test_the_policy_exploits():
    assert play(clock(3), 1, state=0).score.sum() == 0
    assert play(clock(3), 1, state=1).score.sum() == 1 + 2 + 3


def test_scores_are_those_of_whole_games():
    """A game is two episodes, and pays ten times what the learner sees."""
    episodes = play(clock(3, lives=True), num_episodes=1)
    np.testing.assert_array_equal(episodes.score[:, 0], [20, 40, 60])
    np.testing.assert_array_equal(episodes.length[:, 0], [2, 4, 6])


def test_a_game_that_goes_on_when_time_is_up_counts_as_it_stands(monkeypatch):
    """Each environment has time for one of MOST_STEPS; all that is longer is worth what it was then."""
    monkeypatch.setattr(playing, "MAX_STEPS", playing.BLOCK)
    env = clock(playing.BLOCK + 3)
    episodes = play(env, num_episodes=1)
    as_it_stands = np.minimum(np.arange(env.spec.num_envs) + 1, playing.BLOCK)
    np.testing.assert_array_equal(episodes.finished >= 1, True)
    np.testing.assert_array_equal(episodes.score[:, 0], as_it_stands)
    np.testing.assert_array_equal(episodes.length[:, 0], as_it_stands)


def test_a_game_that_began_late_does_not_count_when_time_is_up(monkeypatch):
    """Of 2 x 64 steps the first game of i + 1 takes as many, and leaves the second the rest.

    So 64 steps fit twice; of 65 to 127 the second has had 63 or less; of more, the first has had all 128, and counts as
    it stood after 64.
    """
    monkeypatch.setattr(playing, "MAX_STEPS", 64)
    env = clock(131)
    episodes = play(env, num_episodes=2)
    long = np.arange(env.spec.num_envs) + 1
    np.testing.assert_array_equal(np.minimum(episodes.finished, 2), np.where(long <= 64, 2, 1))
    np.testing.assert_array_equal(episodes.score[:, 0], np.where(long <= 128, long, 64))
    np.testing.assert_array_equal(episodes.score[:, 1], np.where(long <= 64, long, 0))


def test_time_is_up_within_a_block_too(monkeypatch):
    """Each environment has 3 x 7 steps, however many others take."""
    monkeypatch.setattr(playing, "MAX_STEPS", 7)
    episodes = play(clock(30), num_episodes=3)
    long = np.arange(30) + 1
    fit = np.minimum(21 // long, 3)
    stands = 21 - fit * long >= 7  # where the third or second had begun early enough
    np.testing.assert_array_equal(np.minimum(episodes.finished, 3), np.where(long <= 7, 3, fit + stands))
    np.testing.assert_array_equal(episodes.score[:, 0], np.where(long <= 21, long, 7))
    np.testing.assert_array_equal(episodes.length, episodes.score)


def test_a_game_without_end_is_worth_the_same_however_many_are_asked_for(monkeypatch):
    monkeypatch.setattr(playing, "MAX_STEPS", 20)
    endless = clock(1000)
    for num_episodes in (1, 2, 5):
        episodes = play(endless, num_episodes)
        assert (episodes.score[-1, 0], episodes.length[-1, 0], episodes.finished[-1]) == (20, 20, 1)


def test_what_explores_less_from_row_to_row_does_so_in_training_alone():
    """Its noise says at which row of a rollout it acts; each step of an evaluation is a first one."""
    env = clock(2)
    noise = lambda key, num_steps, num_envs: jnp.arange(num_steps)
    agent = player(2)._replace(
        sample_noise=noise, exploit=lambda state, inputs, carry, row: Decision(jnp.full(2, row == 0, jnp.int32))
    )
    episodes = jax.jit(partial(playing.evaluate_policy, env, agent, 8))(jnp.int32(1), jnp.int32(0), jnp.int32(0))
    np.testing.assert_array_equal(episodes.score, [[1] * 8, [2] * 8])


def test_lives_that_are_lost_take_no_time(monkeypatch):
    """A game is two lives of i + 1 steps, with a row between them that only begins the second; it pays 10 a step."""
    monkeypatch.setattr(playing, "MAX_STEPS", 64)
    episodes = play(clock(40, lives=True), num_episodes=1)
    steps = np.minimum(2 * (np.arange(40) + 1), 64)
    np.testing.assert_array_equal(episodes.length[:, 0], steps)
    np.testing.assert_array_equal(episodes.score[:, 0], 10 * steps)


def test_games_on_the_host_count_as_those_on_the_device(monkeypatch):
    """Of 65 environments the last is still in its second game of 65 steps when time is up."""
    monkeypatch.setattr(playing, "MAX_STEPS", playing.BLOCK)
    size = playing.BLOCK + 1
    device, host = (
        playing.Evaluator(clock(size)._replace(on_device=on_device), player(size), [0], 2 * size)(jnp.int32(1), 0)
        for on_device in (True, False)
    )
    assert device == host and device[1]["eval_truncated"] == 1


def test_a_single_game_on_the_host_counts_as_it_stands(monkeypatch):
    monkeypatch.setattr(playing, "MAX_STEPS", playing.BLOCK)
    env = clock(playing.BLOCK + 1)._replace(on_device=False)
    _, total = playing.Evaluator(env, player(env.spec.num_envs), [0], env.spec.num_envs)(jnp.int32(1), 0)
    assert (total["eval_return_max"], total["eval_truncated"]) == (playing.BLOCK, 0)


def test_seeds_that_are_lost_count_for_themselves_alone():
    """Of three environments seed 0 earns nothing, and seed 1 earns 1, 2 and 3."""
    evaluator = playing.Evaluator(clock(3), player(3), [5, 6], num_episodes=3)
    learners = jnp.array([0, 1])
    for lost, mean, episodes in (((), 1.0, 6), ([0], 2.0, 3), ([1], 0.0, 3), ([0, 1], None, 0)):
        each, total = evaluator(learners, 0, diverged=lost)
        assert [seed["eval_return_mean"] for seed in each] == [0.0, 2.0]
        assert (total["eval_return_mean"], total["eval_episodes"]) == (mean, episodes)
        assert total["eval_truncated"] == 0


def test_seeds_side_by_side_play_as_alone():
    env, agent = clock(3), player(3)
    together = jax.vmap(partial(playing.evaluate_policy, env, agent, 2), in_axes=(0, 0, None))
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
