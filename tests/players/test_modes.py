"""Independent and shared players with a stub in place of the learner: its rows, keys, metrics and rollouts."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.players import independent, shared
from jaxrl_fast.types import Agent, Decision, Discrete, EnvSpec, Learning, Parallelism, PolicyInput, Rollout, Transition

PLAYERS, GAMES = ("a", "b", "c"), 2
ROWS = len(PLAYERS) * GAMES
SPEC = EnvSpec("test", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), ROWS, players=PLAYERS)


@dataclass(frozen=True)
class Config:
    rollout_length: int | str = "auto"

    def length(self, num_envs):
        """Return the steps of a rollout for a number of environments."""
        return 24 // num_envs if self.rollout_length == "auto" else self.rollout_length


def numbers(key):
    """Return a number that identifies a key."""
    return jax.random.key_data(key).sum(dtype=jnp.uint32)


def make_inner(config, spec):
    """Return a learner that keeps what it is given."""

    def update(state, rollout, key):
        state = state | {"key": numbers(key), "rewards": rollout.steps.reward}
        metrics = {"loss": rollout.steps.reward.mean(), "td_sum": rollout.steps.reward.sum(), "gradient_steps": 4}
        last = jax.tree.leaves(rollout.next_obs)
        return state | {
            "next": last[0].sum(),
            "first": jax.tree.leaves(rollout.first_obs)[0].sum(),
            "parts": len(last),
        }, metrics

    init = lambda key: {"number": numbers(key)}
    act = lambda state, inputs, carry, noise: Decision(jax.tree.leaves(inputs.obs)[0][:, 0] + noise, carry)
    noise = lambda key, num_steps, num_envs: jax.random.uniform(key, (num_steps, num_envs))
    restart = lambda state: state | {"number": state["number"] + 1}
    return Agent(init, act, act, update, config.length(spec.num_envs), noise, learning=Learning(on_env_restart=restart))


def rollout():
    """Row r has reward r, is first at 100 r, and is followed by 10 r."""
    rows = jnp.arange(float(ROWS))
    none = jnp.zeros((1, ROWS), bool)
    steps = Transition(rows[None, :, None], none, rows[None], 1.0 - none, none, ~none, ())
    return Rollout(steps, 10 * rows[:, None], (), 100 * rows[:, None])


class TestIndependent:
    agent = independent.make(make_inner, Config(), SPEC, Parallelism(), 10)

    def learned(self):
        state = self.agent.init(jax.random.key(0))
        state = jax.tree.map(lambda x: x, state)
        return self.agent.update(state, rollout(), jax.random.key(1))

    def test_each_learner_gets_its_rows_and_a_key_of_its_own(self):
        state, _ = self.learned()
        np.testing.assert_array_equal(state["rewards"], [[[0, 1]], [[2, 3]], [[4, 5]]])
        np.testing.assert_array_equal(state["next"], [10, 50, 90])
        np.testing.assert_array_equal(state["first"], [100, 500, 900])
        assert len(np.unique(state["key"])) == len(np.unique(state["number"])) == 3

    def test_metrics_are_of_each_player_and_their_mean(self):
        """The mean rewards are 0.5, 2.5 and 4.5, the sums 1, 5 and 9; all make the same number of gradient steps."""
        _, metrics = self.learned()
        expected = {"loss": 2.5, "loss/a": 0.5, "loss/b": 2.5, "loss/c": 4.5, "td_sum": 5.0}
        expected |= {"td/a_sum": 1.0, "td/b_sum": 5.0, "td/c_sum": 9.0, "gradient_steps": 4.0}
        assert {name: float(x) for name, x in metrics.items()} == expected

    def test_each_player_acts_by_its_noise(self):
        noise = self.agent.sample_noise(jax.random.key(2), 2, ROWS)
        assert noise.shape == (2, 3, GAMES) and len(np.unique(noise)) == 12
        state, obs = self.agent.init(jax.random.key(0)), 10 * jnp.arange(float(ROWS))[:, None]
        found = self.agent.explore(state, PolicyInput(obs), (), noise[0]).action
        np.testing.assert_allclose(found, 10 * np.arange(ROWS) + noise[0].reshape(-1), rtol=1e-6)

    def test_rollout_length_is_that_of_games_and_restart_reaches_each_learner(self):
        assert self.agent.rollout_length == 24 // GAMES
        state = self.agent.init(jax.random.key(0))
        after = self.agent.learning.on_env_restart(state)
        np.testing.assert_array_equal(after["number"], state["number"] + 1)


class TestShared:
    agent = shared.make(make_inner, Config(), SPEC, Parallelism(num_shards=2), 10)

    def test_rollout_length_is_that_of_games_on_all_shards(self):
        assert self.agent.rollout_length == 24 // (GAMES * 2)

    def test_learner_gets_all_rows_with_marked_observations_at_both_ends(self):
        state, _ = self.agent.update(self.agent.init(jax.random.key(0)), rollout(), jax.random.key(1))
        np.testing.assert_array_equal(state["rewards"], [np.arange(ROWS)])
        assert (state["next"], state["first"], state["parts"]) == (150, 1500, 2)

    @pytest.mark.parametrize("player", [0, 2])
    def test_agent_of_player_sees_its_number_in_any_number_of_rows(self, player):
        seen = []

        def watching(config, spec):
            act = lambda state, inputs, carry, noise: seen.append(inputs.obs[1]) or Decision(inputs.obs[0], carry)
            return make_inner(config, spec)._replace(explore=act, exploit=act)

        own = shared.make(watching, Config(), SPEC, Parallelism(), 10).players.of_player(player)
        own.explore((), PolicyInput(jnp.zeros((5, 1))), (), ())
        own.exploit((), PolicyInput(jnp.zeros((4, 1))), (), ())
        for one_hot, num_rows in zip(seen, (5, 4), strict=True):
            np.testing.assert_array_equal(one_hot, [np.eye(3)[player]] * num_rows)
