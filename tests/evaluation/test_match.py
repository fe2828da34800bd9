"""A match of two runs: which policy acts for which player, and whose return is reported."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.evaluation import match
from jaxrl_fast.types import Agent, AgentPlayers, Decision, Discrete
from tests.helpers import slow


class Witness:
    """A game of two steps in which the left player is paid 100 * left + right action, the right one the negative."""

    players = ("left", "right")
    default_params = SimpleNamespace()

    def reset_env(self, key, params):
        return jnp.zeros((2, 1)), jnp.int32(0)

    def step_env(self, key, state, action, params):
        paid = (100 * action[0] + action[1]).astype(jnp.float32)
        return jnp.zeros((2, 1)), state + 1, jnp.stack([paid, -paid]), state == 1, {}

    def is_truncated(self, state, params):
        return jnp.bool_(False)

    def action_space(self, params):
        return Discrete(64)


def run_of(number):
    """Return an agent whose action is 10 * its run's number + 1 as the left player, + 2 as the right one."""

    def of_player(player):
        act = lambda state, inputs, carry, noise: Decision(
            jnp.broadcast_to(10 * state + player + 1, inputs.obs.shape[:1]).astype(jnp.int32), carry
        )
        return Agent(None, act, act, None, 1)

    return Agent(None, None, None, None, 1, players=AgentPlayers(of_player)), jnp.float32(number)


def saved(agent, learners, seeds):
    return SimpleNamespace(env=envs.make(Witness, 2), agent=agent, learners=learners, seeds=seeds)


@pytest.mark.parametrize("seeds", [slow([0]), [0, 1]])
def test_each_policy_acts_as_the_player_whose_side_it_is_on(seeds):
    """Run 3 (and 4) against run 5: as left, 31 (41) meets 52; as right, 51 meets 32 (42). A game pays twice."""
    agent, one = run_of(3)
    other, theirs = run_of(5)
    learners = one if len(seeds) == 1 else jnp.stack([one, one + 1])
    mine, options = saved(agent, learners, seeds), SimpleNamespace(episodes=2, play_seed=0)
    paid = {0: [2 * 3152, 2 * 4152], 1: [-2 * 5132, -2 * 5142]}
    for player, expected in paid.items():
        score, length, ended = match.against_run(mine, saved(other, theirs, [0]), player, options)
        np.testing.assert_array_equal(score, np.repeat(np.array(expected)[: len(seeds), None], score.shape[1], 1))
        assert (length == 2).all() and ended.all() and score.shape[0] == len(seeds)


def test_result_of_match_has_each_player_and_counts_games_won(monkeypatch):
    """As left, two of four games are won (a draw is none), and one has not ended; as right, none is."""
    found = [np.array([[1.0, 2.0, 0.0, -1.0, 5.0]]), np.array([[-1.0] * 5])]
    ended = [np.array([[True] * 4 + [False]]), np.ones((1, 5), bool)]

    def against(saved, opponent, player, options):
        assert opponent == ("of left", "of right")[player]
        return found[player], np.full((1, 5), 7), ended[player]

    monkeypatch.setattr(match, "against_run", against)
    spec = SimpleNamespace(players=("left", "right"), id="test")
    options = SimpleNamespace(compile_cache="none")
    run = SimpleNamespace(
        env=SimpleNamespace(spec=spec), opponents=["of left", "of right"], env_steps=9, seeds=[0],
        checkpoint=SimpleNamespace(name="last"), settings=SimpleNamespace(algo="ppo", options=options),
    )  # fmt: skip
    how = SimpleNamespace(against="elsewhere", play_seed=4)
    result = match.play(run, how, lambda score, length, ended: {"mean": float(score[ended].mean())})
    assert result["sides"] == {"left": {"mean": 0.5, "won": 0.5}, "right": {"mean": -1.0, "won": 0.0}}
    assert (result["against"], result["play_seed"], result["env_steps"]) == ("elsewhere", 4, 9)
