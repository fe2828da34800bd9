"""Behavior cloning in SAC, TD3 and DDPG: the added loss, its rows and weight, all kinds of actions, and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import agents
from jaxrl_fast.agents import actor_critic, demonstrations, discrete_sac, sac, td3
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl.bonuses import bc
from jaxrl_fast.types import Discrete, MultiDiscrete, PolicyInput
from tests.helpers import probes
from tests.helpers.agents import LITTLE

RNG = np.random.default_rng(0)


def data_of(env, num=32):
    obs = RNG.normal(size=(num, *env.spec.obs.shape)).astype("f4")
    if isinstance(env.spec.action, Discrete):
        return bc.Demonstrations(obs, RNG.integers(0, env.spec.action.num, num))
    return bc.Demonstrations(obs, RNG.uniform(-1, 1, (num, *env.spec.action.shape)).astype("f4"))


def agent_of(algo, env, data, num_updates=10, **options):
    bonus = dict(kind="bc", data=data) | options.pop("bonus", {})
    return agents.load(algo).make(configure(ALGORITHMS[algo], **LITTLE | options, bonus=bonus), env.spec, num_updates)


def context_of(agent):
    """The context of SAC and TD3, which all their functions share."""
    return agent.update.args[0]


@pytest.mark.parametrize("algo", ["sac", "td3", "ddpg"])
def test_cost_of_actions_equals_that_of_numpy(algo):
    """SAC: -log of the density of x = artanh(a), times 1 / (1 - a^2). TD3: the mean squared error of tanh(output)."""
    env = probes.continuous_action_of_observation(2)
    data = data_of(env)
    context = context_of(agent_of(algo, env, data))
    params = actor_critic.init_params(context, jax.random.key(0)).actor
    output = np.asarray(context.actor.apply(params, data.obs), np.float64)
    a = data.action.astype(float)
    if algo == "sac":
        mean, log_std = np.split(output, 2, axis=-1)
        log_std = np.clip(log_std, *sac.LOG_STD)
        score = (np.arctanh(a) - mean) / np.exp(log_std)
        expected = (0.5 * score**2 + log_std + 0.5 * np.log(2 * np.pi) + np.log(1 - a**2)).sum(-1)
        found = sac.cloning_costs(context, params, data)
    else:
        expected, found = ((np.tanh(output) - a) ** 2).mean(-1), td3.cloning_costs(context, params, data)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_discrete_cost_is_that_of_allowed_actions():
    env = probes.best_action_of_observation(2)
    context = context_of(agent_of("sac", env, data_of(env)))
    params = actor_critic.init_params(context, jax.random.key(0)).actor
    rows = bc.Demonstrations(jnp.ones((2, 1)), jnp.array([1, 1]), jnp.array([[True, True], [False, True]]))
    logits = np.asarray(context.actor.apply(params, rows.obs))[0]
    found = discrete_sac.cloning_costs(context, params, rows)
    np.testing.assert_allclose(found, [np.log(np.exp(logits).sum()) - logits[1], 0], atol=1e-5)


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_drawn_steps_add_their_weighted_mean_cost(algo):
    """After 16 updates of 4 steps in 2 environments, 128 of 512 steps are made: the weight is 3/4 of 0.5."""
    env = probes.continuous_action_of_observation(2)
    data = data_of(env)
    agent = agent_of(algo, env, data, bonus=dict(weight=0.5, anneal=512))
    context, key = context_of(agent), jax.random.key(3)
    learner = agent.init(jax.random.key(0)).learner
    cost = lambda actor, rows: rows.obs[:, 0] + actor
    total, each = demonstrations.draw(context, learner, jax.random.split(key), jnp.int32(16), cost)(jnp.float32(2))
    numbers = np.asarray(
        bc.draw(data, jax.random.fold_in(jax.random.split(key)[1], demonstrations.FOLD), (context.config.batch_size,))
    )
    np.testing.assert_allclose(each["bc_loss"], data.obs[numbers, 0] + 2, rtol=1e-6)
    np.testing.assert_allclose(total, 0.375 * (data.obs[numbers, 0] + 2).mean(), rtol=1e-5)


def test_without_bonus_nothing_is_drawn():
    env = probes.continuous_action(2)
    context = context_of(agent_of("sac", env, data_of(env)))
    context = context._replace(config=configure(ALGORITHMS["sac"], **LITTLE))
    assert demonstrations.draw(context, None, None, None, None) is None
    loss = lambda params: 0
    assert demonstrations.with_costs(loss, None) is loss


CASES = {
    "sac": (probes.continuous_action_of_observation, {}),
    "sac of discrete actions": (probes.best_action_of_observation, {}),
    "sac with statistics of layers": (probes.continuous_action_of_observation, {"network": "flash"}),
    "td3": (probes.continuous_action_of_observation, {"normalize_observations": True}),
    "ddpg": (probes.continuous_action_of_observation, {"target": "none"}),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in ("sac", "td3"))) for c in CASES])
def test_policy_imitates_a_constant_action(case):
    """With a large weight, the policy takes the action of the dataset, 0.5 or the second, whatever the reward is."""
    make, options = CASES[case]
    env, algo = make(8), case.split()[0]
    is_discrete = isinstance(env.spec.action, Discrete)
    obs = np.float32(RNG.choice([-1, 1], (64, 1)))
    data = bc.Demonstrations(obs, np.ones(64, int) if is_discrete else np.full((64, 1), 0.5, np.float32))
    options = dict(replay_ratio=1, learning_starts=16, batch_size=16, size=512, learning_rate=0.01) | options
    agent = agent_of(algo, env, data, 60, bonus={"weight": 100.0}, **options)
    state, update = jax.jit(agent.init)(jax.random.key(0)), jax.jit(agent.update)
    experience = probes.experience(env, agent, state)
    for i in range(12):
        state, metrics = update(state, experience, jax.random.key(i))
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(0), 1, 8))
    inputs = PolicyInput(jnp.float32([[1], [-1]] * 4))
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *jnp.shape(x))), agent.initial_carry)
    action = jax.jit(agent.exploit)(state, inputs, carry, noise).action
    np.testing.assert_allclose(action, 1 if is_discrete else 0.5, atol=0.1)
    assert metrics["gradient_steps"] == 32 and np.isfinite(metrics["bc_loss_sum"])


def test_choices_are_joined_for_sac(monkeypatch):
    """Of choices among 2 and 3, (1, 2) is combination 5; a mask forbids combinations of a forbidden option."""
    masks = np.array([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]], bool)
    data = bc.Demonstrations(np.zeros((2, 1)), np.array([[1, 2], [0, 1]]), masks)
    seen, make = [], actor_critic.make_context
    monkeypatch.setattr(
        actor_critic, "make_context", lambda config, *args, **kw: seen.append(config) or make(config, *args, **kw)
    )
    spec = probes.best_action(2).spec._replace(action=MultiDiscrete((2, 3)))
    sac.make(configure(ALGORITHMS["sac"], **LITTLE, bonus=dict(kind="bc", data=data)), spec, 10)
    found = seen[0].bonus.data
    assert found.action.tolist() == [5, 1]
    np.testing.assert_array_equal(found.action_mask, [[1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]])
