"""Behavior cloning: the loss against scipy's formulas by hand, which rows are drawn, and the weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import loop
from jaxrl_fast.agents import ppo
from jaxrl_fast.options.bonus import BC
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import normalize
from jaxrl_fast.rl.bonuses import annealed, bc
from jaxrl_fast.rl.distributions import Categorical, Gaussian, MultiCategorical, TanhGaussian
from jaxrl_fast.rl.product import Product
from jaxrl_fast.types import PolicyInput
from tests.helpers import probes

SMALL = dict(rollout_length=8, hidden_sizes=(8,), num_minibatches=1, num_epochs=1, max_grad_norm=0.0)
RNG = np.random.default_rng(0)


def gaussian(x, mean, log_std):
    return (-((x - mean) ** 2) / (2 * np.exp(2 * log_std)) - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)


def of_logits(logits, action):
    return logits[np.arange(len(action)), action] - np.log(np.exp(logits).sum(-1))


def test_log_probabilities_equal_those_of_numpy():
    """A tanh-Gaussian's density is that of x = artanh(a) times da/dx = 1 - a^2, in float64."""
    mean, log_std, action = RNG.normal(size=(5, 3)), 0.3 * RNG.normal(size=(5, 3)), RNG.uniform(-0.9, 0.9, (5, 3))
    logits, choice = RNG.normal(size=(5, 4)), RNG.integers(0, 4, 5)
    squashed = gaussian(np.arctanh(action), mean, log_std) - np.log(1 - action**2).sum(-1)
    f = jnp.float32
    np.testing.assert_allclose(
        bc.log_prob(Gaussian(f(mean), f(log_std)), f(action)), gaussian(action, mean, log_std), rtol=1e-5
    )
    np.testing.assert_allclose(bc.log_prob(TanhGaussian(f(mean), f(log_std)), f(action)), squashed, rtol=1e-4)
    np.testing.assert_allclose(bc.log_prob(Categorical(f(logits)), choice), of_logits(logits, choice), rtol=1e-5)
    several = MultiCategorical(f(np.concatenate([logits, logits[:, :2]], axis=1)), (4, 2))
    both = of_logits(logits, choice) + of_logits(logits[:, :2], choice % 2)
    np.testing.assert_allclose(bc.log_prob(several, np.stack([choice, choice % 2], 1)), both, rtol=1e-5)
    mixed = Product(several, TanhGaussian(f(mean), f(log_std)))
    given = f(np.concatenate([np.stack([choice, choice % 2], 1), action], axis=1))
    np.testing.assert_allclose(bc.log_prob(mixed, given), both + squashed, rtol=1e-4)


def test_actions_at_the_bounds_have_finite_costs_and_gradients():
    cost = lambda mean: bc.log_prob(TanhGaussian(mean, jnp.zeros((2, 1))), jnp.float32([[1], [-1]])).sum()
    value, slope = jax.value_and_grad(cost)(jnp.zeros((2, 1)))
    assert np.isfinite(value)
    np.testing.assert_allclose(slope, [[6.1], [-6.1]], atol=0.1)  # artanh(1 - 1e-5) = 6.1


@pytest.mark.parametrize(("steps", "expected"), [(0, 0.5), (250, 0.375), (999, 0.0005), (1000, 0), (2**30, 0)])
def test_weight_falls_linearly_to_zero(steps, expected):
    np.testing.assert_allclose(annealed.weight_at(BC(weight=0.5, anneal=1000), jnp.int32(steps)), expected, atol=1e-6)
    assert annealed.weight_at(BC(weight=0.5), jnp.int32(steps)) == 0.5


def test_every_step_is_drawn_about_equally_often():
    data = bc.Demonstrations(jnp.zeros((7, 1)), jnp.arange(7))
    numbers = bc.draw(data, jax.random.key(0), (7000,))
    counts = np.bincount(numbers, minlength=7)
    assert len(counts) == 7 and np.abs(counts - 1000).max() < 120  # 4 standard deviations


def data_of(env, num=64):
    """Random steps of an environment with a discrete action."""
    rng = np.random.default_rng(1)
    return bc.Demonstrations(3 + 2 * rng.normal(size=(num, *env.spec.obs.shape)).astype("f4"), rng.integers(0, 2, num))


def updated(env, data, num_updates=1, **config):
    """Return the state and the metrics of each update on the same rollout, and the agent's context."""
    bonus = dict(kind="bc", data=data) | config.pop("bonus", {})
    agent = ppo.make(configure(ppo.Config, **SMALL | config | {"bonus": bonus}), env.spec, 10)
    state = jax.jit(agent.init)(jax.random.key(0))
    experience, update, seen = probes.experience(env, agent, state), jax.jit(agent.update), []
    for i in range(num_updates):
        before = state
        state, metrics = update(state, experience, jax.random.key(i))
        seen.append((before, state, metrics))
    return seen, agent.explore.args[0], experience


def test_loss_of_ppo_gains_the_mean_cost():
    """The oracle of value and gradient is a plain mean over the steps drawn for the valid rows of the rollout."""
    env = probes.best_action_of_observation(4)
    data = data_of(env)
    [(before, _, metrics)], context, experience = updated(env, data, bonus={"weight": 0.25})
    numbers = bc.draw(data, jax.random.split(before.bonus.key)[0], experience.steps.reward.shape)
    chosen = np.asarray(numbers)[np.asarray(experience.steps.valid)]
    assert len(chosen) < 32  # the rollout has resets

    def cost(params):
        logits = context.policy.network.unroll(params["network"], data.obs, (), None)[0][0]
        each = -jax.nn.log_softmax(logits)[jnp.arange(len(data.action)), data.action]
        return 0.25 * each[chosen].mean()

    rows = jax.jit(lambda *given: ppo.prepare(context, *given).rows)(before, experience)
    rows = rows._replace(weight=rows.weight / rows.weight.sum())
    added = lambda params: context.objective(context, params, rows)[0] - ppo.loss(context, params, rows)[0]
    found, expected = (jax.jit(jax.value_and_grad(function))(before.params) for function in (added, cost))
    np.testing.assert_allclose(4 * expected[0], metrics["bc_loss"], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)


def test_weight_is_counted_in_environment_steps():
    """An update has 8 steps in 4 environments: of 64 steps, the weight is 1 at first and 0.5 before the next."""
    env = probes.best_action_of_observation(4)
    seen, _, _ = updated(env, data_of(env), num_updates=4, num_epochs=3, bonus={"anneal": 64})
    assert [float(metrics["bc_weight"]) for _, _, metrics in seen] == [1, 0.5, 0, 0]
    keys = {jax.random.key_data(state.bonus.key).tobytes() for state, _, _ in seen}
    assert len(keys) == 4  # each update draws other steps


def test_observations_are_normalized_by_the_statistics_of_the_agent():
    """The statistics are those of the rollouts before, not of the dataset, whose mean is 3."""
    env = probes.best_action_of_observation(4)
    data = data_of(env)
    seen, context, experience = updated(env, data, num_updates=2, normalize_observations=True)
    before = seen[1][0]
    assert float(before.observations.num_rows) > 0
    added = context.bonus.prepare(before, experience, jnp.zeros(experience.steps.reward.shape))
    rows, _ = added.rows
    key = jax.random.split(before.bonus.key)[0]
    numbers = bc.draw(data, key, experience.steps.reward.shape)
    stats = jax.tree.map(np.asarray, before.observations)
    expected = (data.obs[np.asarray(numbers)] - stats.mean) / np.sqrt(stats.var + 1e-8)
    np.testing.assert_allclose(rows.obs, np.clip(expected, -10, 10), rtol=1e-4)
    np.testing.assert_array_equal(rows.action, data.action[np.asarray(numbers)])
    assert normalize.CLIP == 10


def test_memory_is_refused():
    env = probes.best_action_of_observation(4)
    config = configure(ppo.Config, **SMALL, memory="gru", bonus={"kind": "bc"})
    with pytest.raises(ValueError, match=r"^bonus: bc requires a policy without memory, got memory gru; use none$"):
        ppo.make(config, env.spec, 10)


def test_evaluation_needs_no_data():
    """An agent without the data has the same state, and acts."""
    env = probes.best_action_of_observation(4)
    make = lambda **bonus: ppo.make(configure(ppo.Config, **SMALL, bonus=dict(kind="bc", **bonus)), env.spec, 10)
    states = [jax.eval_shape(agent.init, jax.random.key(0)) for agent in (make(), make(data=data_of(env)))]
    assert str(states[0]) == str(states[1])
    agent = make()
    probes.experience(env, agent, jax.jit(agent.init)(jax.random.key(0)))


CODE = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0])


def lock(num_envs):
    """Only an episode whose 14 actions are CODE has a reward, 1 at its end: one random episode in 16384."""
    code = jnp.asarray(CODE)
    keeps = lambda time, cue, action: cue * (action == code[jnp.minimum(time, 13)])
    rules = probes.Rules(
        len(CODE), True,
        draw=lambda key, shape: jnp.ones(shape, jnp.float32),
        observe=lambda time, cue: jax.nn.one_hot(time, len(CODE), dtype=jnp.float32),
        reward=lambda time, cue, action: (time == 13) * keeps(time, cue, action),
        advance=keeps,
    )  # fmt: skip
    return probes._env("lock", num_envs, rules)


def test_demonstrations_show_what_random_actions_do_not_find():
    """The weight of 20 demonstrations falls to 0 in the middle, and the policy keeps the code. PPO has no reward.

    The steps of each demonstration are one-hot times.
    """
    env = lock(8)
    data = bc.Demonstrations(np.tile(np.eye(14, dtype=np.float32), (20, 1)), np.tile(CODE, 20))
    options = dict(rollout_length=30, num_minibatches=4, num_epochs=2, hidden_sizes=(16,), learning_rate=3e-3)
    found = {}
    for kind in ("none", "bc"):
        bonus = dict(kind="bc", data=data, anneal=240 * 30) if kind == "bc" else "none"
        agent = ppo.make(configure(ppo.Config, **options, bonus=bonus), env.spec, 60)
        train = jax.jit(lambda key, agent=agent: loop.train(env, agent, loop.init(env, agent, key), 60))
        state, metrics = train(jax.random.key(0))
        inputs = PolicyInput(jnp.eye(14))
        found[kind] = np.asarray(jax.jit(agent.exploit)(state.agent, inputs, (), None).action), metrics
    assert found["none"][1]["return_sum"].sum() == 0 and (found["none"][0] != CODE).any()
    np.testing.assert_array_equal(found["bc"][0], CODE)
    returns, weight = found["bc"][1]["return_sum"], found["bc"][1]["bc_weight"]
    assert (weight[30:] == 0).all() and returns[-10:].sum() > 0.9 * found["bc"][1]["episodes"][-10:].sum()
