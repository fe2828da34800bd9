"""Self-play with a stub in place of the learner: which snapshots are kept, and which of them play."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.players import self_play
from jaxrl_fast.types import Agent, Decision, Discrete, EnvSpec, Learning, Parallelism, PolicyInput, Rollout, Transition

POOL, GAMES = 3, 2


def act(sign):
    """Return a policy whose action is its parameters, with the player's number and noise behind the point."""
    return lambda state, inputs, carry, noise: Decision(
        sign * (state["params"] + 0.1 * inputs.obs[1] @ jnp.arange(2.0) + 0.01 * noise), carry
    )


def make(num_updates):
    """Return self-play whose learner counts its updates as parameters, and the sums of what it learned from."""

    def make_inner(config, spec):
        update = lambda state, rollout, key: (
            {"params": state["params"] + 1, "seen": rollout.steps.reward, "restarts": state["restarts"]},
            {"next_sum": rollout.next_obs[0].sum()},
        )
        init = lambda key: {"params": jnp.float32(0), "seen": jnp.zeros((1, GAMES)), "restarts": jnp.int32(0)}
        restart = lambda state: state | {"restarts": state["restarts"] + 1}
        noise = lambda key, num_steps, num_envs: jnp.broadcast_to(
            jax.random.key_data(key)[0] % 7, (num_steps, num_envs)
        )
        policy_state = lambda state: {"params": state["params"]}
        learning = Learning(on_env_restart=restart)
        return Agent(init, act(1), act(-1), update, 1, noise, policy_state=policy_state, learning=learning)

    spec = EnvSpec("test", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), 2 * GAMES, players=("left", "right"))
    return self_play.make(make_inner, SimpleNamespace(), spec, Parallelism(), num_updates, POOL)


def rollout():
    """A rollout of one step in which row i has reward i, and the observation after it is 10 * i."""
    rows = jnp.arange(2.0 * GAMES)
    flags = jnp.zeros((1, 2 * GAMES), bool)
    obs = jnp.zeros((1, 2 * GAMES, 1)), jnp.zeros((1, 2 * GAMES, 2))
    steps = Transition(obs, flags, rows[None], 1.0 - flags, flags, ~flags, ())
    return Rollout(steps, 10 * rows[:, None], (), jnp.zeros((2 * GAMES, 1)))


def play(num_updates, seed=0):
    """Return the agent, its last state, and the states after each update, [U, ...]."""
    agent = make(num_updates)

    def once(state, key):
        state, metrics = agent.update(state, rollout(), key)
        return state, (state, metrics)

    keys = jax.random.split(jax.random.key(seed), num_updates)
    return agent, *jax.jit(lambda: jax.lax.scan(once, agent.init(jax.random.key(0)), keys))()


def test_every_snapshot_plays_about_equally_often():
    """Of 600 draws, each of three has 200 with standard deviation 11.5; five of these are allowed."""
    _, _, (states, _) = play(600)
    count = np.bincount(np.asarray(states.opponent), minlength=POOL)
    assert count.sum() == 600 and len(count) == POOL and np.abs(count - 200).max() < 58


def test_pool_holds_newest_snapshots_of_a_quarter_of_the_run():
    """The pool covers a quarter of 60 updates with 3 snapshots, so one is added in every fifth update."""
    _, _, (states, _) = play(60)
    pools = np.sort(np.asarray(states.pool["params"]), axis=1)
    expected, pool = [], [0.0] * POOL
    for number in range(1, 61):
        pool = [*pool[1:], float(number)] if number % 5 == 0 else pool
        expected.append(pool)
    np.testing.assert_array_equal(pools, np.sort(expected, axis=1))
    assert set(states.pool) == {"params"}, "of the state that acts, not of the whole learner"


def test_learner_sees_its_rows_of_rollout_and_of_observation_after_it():
    """The learner is row 0 of game 0 and row 3 of game 1. Row i has reward i, and 10 * i is observed after it."""
    _, last, (_, metrics) = play(1)
    np.testing.assert_array_equal(last.learner["seen"], [[0, 3]])
    assert metrics["next_sum"] == 30


def test_snapshot_plays_against_learner_in_training_and_learner_against_itself_in_evaluation():
    agent = make(10)
    state = agent.init(jax.random.key(0))
    state = state._replace(learner=state.learner | {"params": jnp.float32(50)}, opponent=jnp.int32(2))
    state = state._replace(pool={"params": jnp.float32([10, 20, 30])})
    noise = jnp.float32([1, 2]), jnp.float32([3, 4])  # of the learner, of the opponent
    inputs = PolicyInput(jnp.zeros((4, 1)))
    found = agent.explore(state, inputs, (), noise).action
    np.testing.assert_allclose(found, [50.01, 30.04, 30.13, 50.12], rtol=1e-6)
    np.testing.assert_allclose(
        agent.exploit(state, inputs, (), noise).action, [-50.01, -50.04, -50.13, -50.12], rtol=1e-6
    )
    one, other = agent.sample_noise(jax.random.key(3), 1, 4)
    assert one.shape == other.shape == (1, GAMES) and not np.isclose(one, other).any()


@pytest.mark.parametrize("player", [0, 1])
def test_agent_of_player_acts_with_learner_as_that_player(player):
    agent = make(10)
    state = agent.init(jax.random.key(0))
    state = state._replace(learner=state.learner | {"params": jnp.float32(50)})
    own = agent.players.of_player(player)
    for policy, sign in ((own.explore, 1), (own.exploit, -1)):
        found = policy(state, PolicyInput(jnp.zeros((3, 1))), (), jnp.zeros(3)).action
        np.testing.assert_allclose(found, [sign * (50 + 0.1 * player)] * 3, rtol=1e-6)


def test_restart_of_environments_reaches_learner():
    agent = make(10)
    state = agent.learning.on_env_restart(agent.init(jax.random.key(0)))
    assert state.learner["restarts"] == 1
