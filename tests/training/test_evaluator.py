"""Test evaluation: scores of the first episodes of each environment, against values computed by hand."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.training import evaluator as playing
from jaxrl_fast.training.eval_limits import Limits
from jaxrl_fast.types import Agent, Decision, Discrete, Env, EnvSpec, EpisodeScore, TimeStep
from jaxrl_fast.types.host import HostEnv
from jaxrl_fast.utils.random import key_of_seed


def toy_env(num_envs, lives=False):
    """Episodes of environment i have i + 1 steps; action 1 has reward 1. With `lives`, two episodes are one game."""

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
        game = EpisodeScore(10 * reward, last & (num_ended % 2 == 0)) if lives else None
        return TimeStep(jnp.float32(time)[:, None], reward, jnp.ones(num_envs), last, game)

    return Env(reset, step, EnvSpec("toy_env", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), num_envs))


def toy_agent(num_envs):
    """Explore with action 0; exploit with the action equal to the agent's state."""
    act = lambda state, inputs, carry, noise: Decision(jnp.full(num_envs, state, jnp.int32))
    return Agent(
        init=lambda key: jnp.int32(1),
        explore=lambda *_: Decision(jnp.zeros(num_envs, jnp.int32)),
        exploit=act,
        update=lambda state, rollout, key: (state, {}),
        sample_noise=lambda key, num_steps, num_envs: jax.random.uniform(key, (num_steps, num_envs)),
        rollout_length=4,
    )


def evaluate(env, num_episodes, state=1, seed=0, index=0):
    agent = toy_agent(env.spec.num_envs)
    run = jax.jit(partial(playing.evaluate_policy, env, agent, num_episodes))
    return jax.device_get(run(jnp.int32(state), jnp.int32(seed), jnp.int32(index)))


def test_each_environment_contributes_same_number_of_episodes():
    """Environment i has return i + 1. Most of the first 8 episodes to end would be those of environment 0."""
    episodes = evaluate(toy_env(4), num_episodes=2)
    np.testing.assert_array_equal(episodes.score, [[1, 1], [2, 2], [3, 3], [4, 4]])
    np.testing.assert_array_equal(episodes.length, [[1, 1], [2, 2], [3, 3], [4, 4]])
    assert (episodes.finished >= 2).all()


def test_episode_longer_than_block_is_scored_completely():
    env = toy_env(2 * playing.BLOCK + 5)
    episodes = evaluate(env, num_episodes=1)
    np.testing.assert_array_equal(episodes.score[:, 0], np.arange(env.spec.num_envs) + 1)


def test_evaluation_uses_each_prng_key_once(strict_keys):
    """The last environment's episode is longer than a block."""
    evaluate(toy_env(playing.BLOCK + 1), num_episodes=1)


def test_evaluation_uses_exploit_policy():
    assert evaluate(toy_env(3), 1, state=0).score.sum() == 0
    assert evaluate(toy_env(3), 1, state=1).score.sum() == 1 + 2 + 3


def test_score_and_length_are_those_of_whole_games():
    """A game has two episodes, and its score is ten times the learner's reward."""
    episodes = evaluate(toy_env(3, lives=True), num_episodes=1)
    np.testing.assert_array_equal(episodes.score[:, 0], [20, 40, 60])
    np.testing.assert_array_equal(episodes.length[:, 0], [2, 4, 6])


def test_evaluation_scores_unfinished_episode_at_step_limit(monkeypatch):
    """Each environment has MAX_STEPS steps; a longer episode counts with its return at that step."""
    monkeypatch.setattr(playing, "MAX_STEPS", playing.BLOCK)
    env = toy_env(playing.BLOCK + 3)
    episodes = evaluate(env, num_episodes=1)
    as_it_stands = np.minimum(np.arange(env.spec.num_envs) + 1, playing.BLOCK)
    np.testing.assert_array_equal(episodes.finished >= 1, True)
    np.testing.assert_array_equal(episodes.score[:, 0], as_it_stands)
    np.testing.assert_array_equal(episodes.length[:, 0], as_it_stands)


def test_unfinished_episode_below_step_limit_is_ignored_when_budget_ends(monkeypatch):
    """Each environment has a budget of 2 x 64 steps for two episodes of i + 1 steps.

    Two episodes of at most 64 steps fit. With 65 to 128 steps, the second has at most 63 steps and does not count.
    With more than 128 steps, the first uses the whole budget and counts with its return after 64 steps.
    """
    monkeypatch.setattr(playing, "MAX_STEPS", 64)
    env = toy_env(131)
    episodes = evaluate(env, num_episodes=2)
    long = np.arange(env.spec.num_envs) + 1
    np.testing.assert_array_equal(np.minimum(episodes.finished, 2), np.where(long <= 64, 2, 1))
    np.testing.assert_array_equal(episodes.score[:, 0], np.where(long <= 128, long, 64))
    np.testing.assert_array_equal(episodes.score[:, 1], np.where(long <= 64, long, 0))


def test_step_limit_applies_within_block(monkeypatch):
    """Each environment has 3 x 7 steps, whatever the others need."""
    monkeypatch.setattr(playing, "MAX_STEPS", 7)
    episodes = evaluate(toy_env(30), num_episodes=3)
    long = np.arange(30) + 1
    fit = np.minimum(21 // long, 3)
    stands = 21 - fit * long >= 7  # the last unfinished episode has at least 7 steps
    np.testing.assert_array_equal(np.minimum(episodes.finished, 3), np.where(long <= 7, 3, fit + stands))
    np.testing.assert_array_equal(episodes.score[:, 0], np.where(long <= 21, long, 7))
    np.testing.assert_array_equal(episodes.length, episodes.score)


def test_endless_episode_has_same_score_for_any_number_of_episodes(monkeypatch):
    monkeypatch.setattr(playing, "MAX_STEPS", 20)
    endless = toy_env(1000)
    for num_episodes in (1, 2, 5):
        episodes = evaluate(endless, num_episodes)
        assert (episodes.score[-1, 0], episodes.length[-1, 0], episodes.finished[-1]) == (20, 20, 1)


def test_every_evaluation_step_uses_noise_of_first_rollout_row():
    """The noise is the index of the row in a rollout; evaluation steps must all have row 0."""
    env = toy_env(2)
    noise = lambda key, num_steps, num_envs: jnp.arange(num_steps)
    agent = toy_agent(2)._replace(
        sample_noise=noise, exploit=lambda state, inputs, carry, row: Decision(jnp.full(2, row == 0, jnp.int32))
    )
    episodes = jax.jit(partial(playing.evaluate_policy, env, agent, 8))(jnp.int32(1), jnp.int32(0), jnp.int32(0))
    np.testing.assert_array_equal(episodes.score, [[1] * 8, [2] * 8])


def test_reset_row_between_lives_does_not_count_as_step(monkeypatch):
    """A game has two lives of i + 1 steps with a reset row between them, and a score of 10 per step."""
    monkeypatch.setattr(playing, "MAX_STEPS", 64)
    episodes = evaluate(toy_env(40, lives=True), num_episodes=1)
    steps = np.minimum(2 * (np.arange(40) + 1), 64)
    np.testing.assert_array_equal(episodes.length[:, 0], steps)
    np.testing.assert_array_equal(episodes.score[:, 0], 10 * steps)


def test_host_evaluation_equals_device_evaluation(monkeypatch):
    """When the budget ends, the last of 65 environments is still in its second episode of 65 steps."""
    monkeypatch.setattr(playing, "MAX_STEPS", playing.BLOCK)
    size = playing.BLOCK + 1
    device, host = (
        playing.Evaluator(
            toy_env(size)._replace(host=None if on_device else HostEnv()), toy_agent(size), [0], 2 * size
        )(jnp.int32(1), 0)
        for on_device in (True, False)
    )
    assert device == host and device[1]["eval_truncated"] == 1


def test_host_evaluation_scores_unfinished_episode_at_step_limit(monkeypatch):
    monkeypatch.setattr(playing, "MAX_STEPS", playing.BLOCK)
    env = toy_env(playing.BLOCK + 1)._replace(host=HostEnv())
    _, total = playing.Evaluator(env, toy_agent(env.spec.num_envs), [0], env.spec.num_envs)(jnp.int32(1), 0)
    assert (total["eval_return_max"], total["eval_truncated"]) == (playing.BLOCK, 0)


def test_total_statistics_exclude_diverged_seeds():
    """In three environments, seed 0 has return 0, and seed 1 has returns 1, 2 and 3."""
    evaluator = playing.Evaluator(toy_env(3), toy_agent(3), [5, 6], num_episodes=3)
    learners = jnp.array([0, 1])
    for lost, mean, episodes in (((), 1.0, 6), ([0], 2.0, 3), ([1], 0.0, 3), ([0, 1], None, 0)):
        each, total = evaluator(learners, 0, diverged=lost)
        assert [seed["eval_return_mean"] for seed in each] == [0.0, 2.0]
        assert (total["eval_return_mean"], total["eval_episodes"]) == (mean, episodes)
        assert total["eval_truncated"] == 0


def test_vectorized_seeds_have_scores_of_single_seeds():
    env, agent = toy_env(3), toy_agent(3)
    together = jax.vmap(partial(playing.evaluate_policy, env, agent, 2), in_axes=(0, 0, None))
    both = jax.device_get(jax.jit(together)(jnp.array([0, 1]), jnp.array([5, 6]), jnp.int32(0)))
    for i, (state, seed) in enumerate([(0, 5), (1, 6)]):
        np.testing.assert_array_equal(both.score[i], evaluate(env, 2, state, seed).score)


def test_evaluations_and_seeds_have_different_reset_keys():
    """Record the reset keys with a debug callback."""
    drawn = []

    def reset(key):
        jax.debug.callback(lambda data: drawn.append(tuple(data.tolist())), jax.random.key_data(key))
        return toy_env(1).reset(key)

    env = toy_env(1)._replace(reset=reset)
    for seed, index in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        evaluate(env, 1, seed=seed, index=index)
    jax.effects_barrier()
    assert len(set(drawn)) == 3 and drawn[0] == drawn[3]


def test_evaluation_key_is_none_of_keys_split_from_seed():
    """`fold_in` with a small number returns the same key as a part of `split`."""
    for seed in (0, 7):
        key = key_of_seed(seed)
        split = np.asarray(jax.random.key_data(jax.random.split(key, 4096)))
        small, evaluation = (
            np.asarray(jax.random.key_data(jax.random.fold_in(key, n))) for n in (64, playing.EVAL_FOLD)
        )
        assert (split == small).all(1).any() and not (split == evaluation).all(1).any()


@pytest.mark.parametrize(
    ("finished", "num_steps", "running"),
    [([1, 2], [9, 9], True), ([2, 2], [9, 9], False), ([1, 3], [playing.max_steps(2), 9], False)],
)
def test_evaluation_runs_while_episodes_and_steps_are_left(finished, num_steps, running):
    """Each of two environments runs two episodes."""
    now = playing.start(toy_env(2), toy_agent(2), 2, jax.random.key(0))
    episodes = now.episodes._replace(finished=jnp.int32(finished))
    assert bool(playing.is_running(now._replace(episodes=episodes, num_steps=jnp.int32(num_steps)))) == running


def test_evaluator_has_taken_no_time_before_first_evaluation():
    evaluator = playing.Evaluator(toy_env(3), toy_agent(3), [0], 3)
    assert (evaluator.compile_time, evaluator.time) == (0, 0)
    evaluator(jnp.int32(1), 0)
    assert evaluator.compile_time > 0 and evaluator.time > 0


def limited(num_envs, limits, num_episodes=99):
    env = toy_env(num_envs)._replace(host=HostEnv())
    return playing.Evaluator(env, toy_agent(num_envs), [0], num_episodes)(jnp.int32(1), 0, limits=limits)[1]


@pytest.mark.parametrize(
    ("num_steps", "num_episodes"),
    [
        (0, 3 * 16),  # an environment has 64 steps at once, and the last one resets after each of its 16 episodes
        (3 * 65, 3 * 32),
        (3 * 640, 99),  # all that were asked for
    ],
)
def test_all_environments_have_equally_many_episodes_within_limits(num_steps, num_episodes):
    """Environment i has episodes of i + 1 steps and as much return, so the mean over equally many is 2."""
    total = limited(3, Limits(num_steps, 1000))
    assert (total["eval_episodes"], total["eval_truncated"], total["eval_return_mean"]) == (num_episodes, 0, 2.0)


def test_limited_evaluation_has_least_number_of_episodes():
    """Two of 200 environments need three and four blocks of 64 steps for an episode of 129 to 200 steps."""
    total = limited(200, Limits(0, 1000), 400)
    assert (total["eval_episodes"], total["eval_return_mean"]) == (200, 100.5)


def test_limited_episode_counts_with_its_return_at_its_limit():
    """An environment has 70 steps for one episode. The last ones would need up to 100."""
    total = limited(100, Limits(0, 70), 300)
    expected = np.minimum(np.arange(100) + 1, 70)
    assert (total["eval_episodes"], total["eval_return_mean"]) == (100, expected.mean())


def test_limited_evaluation_ends_once_the_rest_of_the_environments_is_cut():
    """Both environments would have 10 episodes; the second one has no end, and is cut after 100 of 128 steps."""
    env, reports = toy_env(2)._replace(host=HostEnv()), []

    def reset(key):
        (time, *others), timestep = env.reset(key)
        return (time + jnp.array([0, 5]), *others), timestep  # beyond its end

    evaluator = playing.Evaluator(env._replace(reset=reset), toy_agent(2), [0], 20)
    evaluator.report = lambda *numbers: reports.append(numbers)
    _, total = evaluator(jnp.int32(1), 0, limits=Limits(0, 100, 20))
    assert [num_ended for num_ended, *_ in reports] == [0, 10, 10]
    assert (total["eval_episodes"], total["eval_return_min"], total["eval_return_max"]) == (2, 1, 100)


def test_evaluation_of_host_environments_reports_its_progress():
    env = toy_env(3)._replace(host=HostEnv())
    evaluator, told = playing.Evaluator(env, toy_agent(3), [0], 99), []
    evaluator.report = lambda *numbers: told.append(numbers)
    evaluator(jnp.int32(1), 0)
    assert [num for num, _, _ in told] == [0, 32 + 21 + 16, 33 + 33 + 32] and {num for _, num, _ in told} == {99}
    assert sorted(seconds for *_, seconds in told) == [seconds for *_, seconds in told]


def test_long_evaluation_on_the_device_is_reported(monkeypatch):
    monkeypatch.setattr(playing, "REPORT_S", 0.0)
    evaluator, told = playing.Evaluator(toy_env(3), toy_agent(3), [0], 3), []
    evaluator.report = lambda *numbers: told.append(numbers)
    evaluator(jnp.int32(1), 0)
    for _ in range(100):
        if told:
            break
        time.sleep(0.01)
    assert told == [(None, 3, 0.0)]
