"""Bonuses of PPO: what a bonus adds reaches the advantages, the loss, the state and the metrics, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.agents import ppo
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import bonuses
from jaxrl_fast.rl.bonuses.record import Added, Bonus
from tests.helpers import probes


def drift(config, spec, policy, num_updates, parallelism):
    """A bonus that doubles advantages, counts updates, and whose loss moves one number by a slope of 3."""
    init = lambda key: ({"x": jnp.zeros(())}, jnp.int32(0))
    row = lambda rollout: jnp.full(rollout.steps.reward.shape, 3.0)
    prepare = lambda state, rollout, advantage: Added(
        state.bonus + 1, 2 * advantage, row(rollout), {"counted": state.bonus}
    )
    loss = lambda params, batch: (batch.bonus * params["bonus"]["x"], {"slope": batch.bonus})
    return Bonus(init, prepare, loss)


def updated(env, **config):
    """The context, the state before and after an update, the rows and the metrics."""
    config = dict(rollout_length=8, hidden_sizes=(8,), num_minibatches=1, num_epochs=1, max_grad_norm=0.0) | config
    agent = ppo.make(configure(ppo.Config, **config), env.spec, 10)
    state = jax.jit(agent.init)(jax.random.key(0))
    experience = probes.experience(env, agent, state)
    rows = jax.jit(lambda *given: ppo.prepare(agent.explore.args[0], *given).rows)(state, experience)
    return state, rows, *jax.jit(agent.update)(state, experience, jax.random.key(1))


@pytest.fixture(scope="module")
def plain():
    return updated(envs.make("CartPole-v1", 4), normalize_advantage=False)


def test_what_a_bonus_adds_reaches_its_places(plain, monkeypatch):
    """Adam's first step moves `x` against its slope by the learning rate; the policy's own loss is not changed."""
    monkeypatch.setitem(bonuses.MAKERS, "none", drift)
    before, rows, after, metrics = updated(envs.make("CartPole-v1", 4), normalize_advantage=False)
    np.testing.assert_array_equal(rows.advantage, 2 * plain[1].advantage)
    np.testing.assert_array_equal(rows.target, plain[1].target)
    jax.tree.map(np.testing.assert_array_equal, before.params["network"], plain[0].params["network"])
    np.testing.assert_allclose(after.params["bonus"]["x"], -2.5e-4, rtol=1e-3)
    assert (int(after.bonus), float(metrics["counted"])) == (1, 0)
    np.testing.assert_allclose(metrics["slope"], 3, rtol=1e-6)
    assert metrics.keys() - plain[3].keys() == {"counted", "slope"}


def test_custom_objective_gets_the_loss_of_a_bonus(monkeypatch):
    monkeypatch.setitem(bonuses.MAKERS, "none", drift)
    objective = lambda context, params, batch: ((batch.weight * batch.advantage).sum() * 0, {})
    env = envs.make("CartPole-v1", 4)
    config = configure(ppo.Config, rollout_length=8, hidden_sizes=(8,), num_minibatches=1, num_epochs=1)
    agent = ppo.make(config, env.spec, 10, objective=objective)
    state = jax.jit(agent.init)(jax.random.key(0))
    after, _ = jax.jit(agent.update)(state, probes.experience(env, agent, state), jax.random.key(1))
    assert after.params["bonus"]["x"] < 0
    jax.tree.map(np.testing.assert_array_equal, after.params["network"], state.params["network"])


def test_without_a_bonus_nothing_is_kept(plain):
    before, rows, after, _ = plain
    assert (before.bonus, rows.bonus, after.bonus) == (None, None, None)
    assert "bonus" not in after.params
