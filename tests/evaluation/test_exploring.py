"""Exploring policies and streamed episodes: each row and each step has random numbers of its own."""

from itertools import islice
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.evaluation import policy
from jaxrl_fast.training import evaluator
from jaxrl_fast.types import Agent, Decision, Discrete, Env, EnvSpec, PolicyInput, TimeStep


def act(state, inputs, carry, noise):
    """Take the noise as the action, and count steps."""
    return Decision(noise, carry + 1)


def sample_noise(key, num_steps, num_envs):
    """Return the number of the environment, and a random fraction."""
    return jnp.arange(float(num_envs))[None] + jax.random.uniform(key, (num_steps, num_envs), maxval=0.9)


AGENT = Agent(None, act, act, None, 1, sample_noise)


def test_rows_of_a_batch_explore_like_environments_each_with_own_noise():
    """Five observations in environments of two: row i acts like environment i % 2. Carries belong to their rows."""
    inputs = PolicyInput(jnp.zeros((5, 1)))
    action, carry = policy.exploring(AGENT, 2, None, inputs, 10 * jnp.arange(5), jax.random.key(0))
    np.testing.assert_array_equal(np.floor(action), [0, 1, 0, 1, 0])
    assert len(np.unique(action)) == 5
    np.testing.assert_array_equal(carry, [1, 11, 21, 31, 41])
    other, _ = policy.exploring(AGENT, 2, None, inputs, 10 * jnp.arange(5), jax.random.key(1))
    assert not np.isclose(action, other).any()


def echo():
    """Return one environment that observes and rewards its last action. An episode is truncated after three steps."""
    one, spec = jnp.ones(1), EnvSpec("test", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2**20), 1)

    def reset(key):
        return jnp.zeros(1, jnp.int32), TimeStep(-one[None], 0 * one, one, one < 0)

    def step(time, action):
        begins = time == 3
        time, action = jnp.where(begins, 0, time + 1), jnp.where(begins, -1.0, action.astype(jnp.float32))
        return time, TimeStep(action[None], jnp.where(begins, 0.0, action), one, time == 3)

    return Env(reset, step, spec)


def test_streamed_episodes_draw_new_noise_in_every_step():
    """A game shows its reset, three steps and the next reset. Scores add up, and 9 random actions all differ."""
    draw = lambda key, num_steps, num_envs: jax.random.randint(key, (num_steps, num_envs), 0, 2**20)
    choose = lambda state, inputs, carry, noise: Decision(noise, carry)
    frames = list(islice(evaluator.stream_episodes(echo(), Agent(None, None, choose, None, 1, draw), None, 5), 12))
    seen = np.array([float(frame.obs[0]) for frame in frames]).reshape(3, 4)
    assert (seen[:, 0] == -1).all() and len(np.unique(seen[:, 1:])) == 9
    np.testing.assert_array_equal([frame.over for frame in frames], [False, False, False, True] * 3)
    np.testing.assert_array_equal([frame.length for frame in frames], [0, 1, 2, 3] * 3)
    scores = np.array([frame.score for frame in frames]).reshape(3, 4)
    np.testing.assert_allclose(scores[:, 1:], np.cumsum(seen[:, 1:], axis=1))


@pytest.mark.parametrize(("kind", "num_envs"), [("shared", 12), ("independent", 6), ("self-play", 6)])
def test_policies_of_players_explore_together_as_in_training(kind, num_envs, monkeypatch):
    """Six games of two players: a shared policy acted in 12 rows, the others in 6."""
    spec = EnvSpec("test", None, Discrete(2), 2, players=("left", "right"))
    options = SimpleNamespace(num_envs=6, players=SimpleNamespace(kind=kind), host=SimpleNamespace(async_pools=0))
    settings = SimpleNamespace(options=options, algo="ppo")
    agent = AGENT._replace(players=SimpleNamespace(of_player=lambda player: f"agent {player}"))
    saved = SimpleNamespace(
        env=SimpleNamespace(spec=spec),
        learners=(),
        settings=settings,
        seeds=[3],
        agent=agent,
        checkpoint=None,
        env_steps=0,
    )
    monkeypatch.setattr(policy, "open_env", lambda folder, env: (settings, saved.env))
    monkeypatch.setattr(policy, "read_run", lambda *given: saved)
    monkeypatch.setattr(policy, "select_seed", lambda saved, seed: saved)
    monkeypatch.setattr(policy, "policy_of", lambda env, num_envs, state, agent: (num_envs, agent))
    found = policy.load("somewhere").policies
    assert found == {"left": (num_envs, "agent 0"), "right": (num_envs, "agent 1")}
