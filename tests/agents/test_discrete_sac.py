"""SAC with discrete actions: targets and losses by hand, whole updates by a numpy program, and known optima."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import loop, replay
from jaxrl_fast.agents import actor_critic, discrete_sac, sac
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import off_policy
from jaxrl_fast.rl.distributions import chosen
from jaxrl_fast.types import Box, Discrete, EnvSpec, MultiDiscrete, Parallelism, PolicyInput, Rollout, Transition
from tests.helpers import actor_critics, probes
from tests.helpers.actor_critics import Adam, assert_close, context_of, learner_of
from tests.helpers.agents import network_of

NUM_STATES = 4
FIXED = dict(learn_temperature=False)


def make(num_actions=3, num_envs=1, num_updates=100, has_mask=False, action=None, **options):
    """Return an agent whose observations are the index of a state."""
    obs = jax.ShapeDtypeStruct((1,), jnp.float32)
    spec = EnvSpec("test", obs, action or Discrete(num_actions), num_envs, has_action_mask=has_mask)
    return sac.make(configure(sac.Config, **actor_critics.LITTLE | options), spec, num_updates)


def _values(table, inputs, noise=()):
    """Return the values of all actions, or of one, from a table [C, S, A (, M)]."""
    output = table["value"][:, inputs[0][..., 0].astype(jnp.int32)]
    return output if inputs[1] is None else jax.vmap(chosen, (0, None))(output, inputs[1])


CRITIC = network_of(lambda key: (), _values, lambda key, shape: ())


def tables_of(**options):
    """Return the context that `make` builds, with tables in place of its networks."""
    return context_of(make(**options))._replace(actor=actor_critics.ACTOR, critic=CRITIC)


def learner_with(context, logits, value, target_value=None, log_temperature=None):
    table = lambda x: None if x is None else {"value": jnp.float32(x)}
    target = table(target_value)
    return learner_of(context, logits, table(value), target_critic=target, log_temperature=log_temperature)


def batch_of(obs, action, reward, discount, next_obs, mask=None, next_mask=None):
    column = lambda x: jnp.float32(x)[:, None]
    reward, discount = jnp.float32(reward), jnp.float32(discount)
    return replay.Sample(column(obs), jnp.int32(action), reward, discount, column(next_obs), mask, next_mask)


def target_of(context, learner, batch, key=0):
    action, target = discrete_sac.td_target(context, learner, batch, None, jax.random.key(key))
    assert action is None
    return target(context.critic.apply(learner.target_params.critic, (batch.next_obs, None)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Targets


def test_target_is_expectation_over_actions():
    """pi(s') = (1/5, 3/10, 1/2), min Q = (1, 2, 3) and temperature 1/2: E[Q] + H / 2 = 2.3 + .514826 = 2.814826."""
    context = tables_of(temperature=0.5, **FIXED)
    logits = np.log([[0.2, 0.3, 0.5]])
    learner = learner_with(context, logits, np.zeros((2, 1, 3)), [[[1, 2, 7]], [[5, 4, 3]]])
    found = target_of(context, learner, batch_of([0] * 2, [0] * 2, [0.5] * 2, [0.9, 0], [0] * 2)).mean
    np.testing.assert_allclose(found, [0.5 + 0.9 * 2.814826, 0.5], rtol=1e-5)


def test_target_ignores_masked_actions():
    """Without the third action pi = (2/5, 3/5): 1.6 + .673012 / 2."""
    context = tables_of(temperature=0.5, has_mask=True, **FIXED)
    learner = learner_with(context, np.log([[0.2, 0.3, 0.5]]), [[[1, 2, 1e6]], [[5, 4, 1e6]]])
    mask = jnp.array([[True, True, False]])
    found = target_of(context, learner, batch_of([0], [2], [0], [1], [0], ~mask, mask)).mean
    np.testing.assert_allclose(found, [1.6 + 0.673012 / 2], rtol=1e-5)


def test_c51_target_has_atoms_of_better_critic_for_each_action():
    """Action 0: the first critic's mean is less, action 1: the second's. Temperature 1: atoms move by -log pi."""
    context = tables_of(num_actions=2, temperature=1.0, value=dict(kind="c51", atoms=2, v_min=0.0, v_max=1.0), **FIXED)
    low, high = np.log([0.9, 0.1]), np.log([0.3, 0.7])
    learner = learner_with(context, np.log([[0.25, 0.75]]), [[[low, high]], [[high, low]]])
    found = target_of(context, learner, batch_of([0], [0], [0.5], [0.9], [0]))
    cost = np.log([0.25, 0.75])
    atom = [0.5 + 0.9 * (z - c) for c in cost for z in (0, 1)]
    np.testing.assert_allclose(found.atom[0], atom, rtol=1e-5)
    np.testing.assert_allclose(found.weight[0], [0.25 * 0.9, 0.25 * 0.1, 0.75 * 0.9, 0.75 * 0.1], rtol=1e-5)


def test_quantile_target_pools_quantiles_of_each_action():
    """Of the pooled quantiles 0 1 2 9 and 3 4 5 6, each critic drops one: 0 1 and 3 4."""
    context = tables_of(num_actions=2, temperature=1e-9, value=dict(kind="quantile", atoms=2, drop=1), **FIXED)
    learner = learner_with(context, [[0, 0]], [[[[0, 9], [6, 3]]], [[[2, 1], [4, 5]]]])
    found = target_of(context, learner, batch_of([0], [0], [0], [1], [0]))
    np.testing.assert_allclose(found.atom, [[0, 1, 3, 4]], atol=1e-6)
    np.testing.assert_allclose(found.weight, [[0.25] * 4])


def test_redq_target_is_minimum_over_random_subset():
    context = tables_of(num_critics=3, num_target_critics=1, temperature=1e-9, **FIXED)
    learner = learner_with(context, [[0, 0, 0]], np.broadcast_to(np.arange(3.0)[:, None, None], (3, 1, 3)))
    batch = batch_of([0], [0], [0], [1], [0])
    assert {round(float(target_of(context, learner, batch, key).mean[0]), 3) for key in range(20)} == {0, 1, 2}


# The policy


@pytest.mark.parametrize("mask", [None, [True, True, False]])
def test_policy_loss_and_gradient_match_numpy(mask):
    """d/dz_j of sum pi (alpha log pi - Q) = pi_j (f_j - sum pi f), with f = alpha log pi - Q over allowed actions."""
    rng = np.random.default_rng(0)
    logits, q = rng.normal(size=(1, 3)), rng.normal(size=(2, 1, 3))
    context = tables_of(temperature=0.3, has_mask=mask is not None, **FIXED)
    rows = None if mask is None else jnp.array([mask])
    batch = batch_of([0], [0], [0], [0], [0], rows, rows)
    learner = learner_with(context, logits, q)
    loss = jax.value_and_grad(
        partial(discrete_sac.policy_loss, context, learner, batch, jnp.float32([2.0])), has_aux=True
    )
    (total, (excess, metrics, _)), gradient = loss(learner.params.actor)
    allowed = np.array(mask or [True] * 3)
    p = softmax(logits[0, allowed])
    f = 0.3 * np.log(p) - q.min(0)[0, allowed]
    np.testing.assert_allclose(total, 2 * (p * f).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient[0][allowed], 2 * p * (f - (p * f).sum()), rtol=1e-4)
    np.testing.assert_array_equal(gradient[0][~allowed], 0)
    entropy = -(p * np.log(p)).sum()
    np.testing.assert_allclose(metrics["entropy"], [entropy], rtol=1e-5)
    np.testing.assert_allclose(excess, 2 * (entropy - 0.89 * np.log(allowed.sum())), rtol=1e-4)


@pytest.mark.parametrize(("share", "expected"), [(None, 0.89), (0.98, 0.98), (0.0, 0.0)])
def test_target_entropy_is_share_of_largest(share, expected):
    context = tables_of(num_actions=6, target_entropy_share=share)
    learner = learner_with(context, np.zeros((1, 6)), np.zeros((2, 1, 6)), log_temperature=jnp.float32(0))
    batch = batch_of([0], [0], [0], [0], [0])
    _, (excess, *_) = discrete_sac.policy_loss(context, learner, batch, jnp.ones(1), learner.params.actor)
    np.testing.assert_allclose(excess, (1 - expected) * np.log(6), rtol=1e-5)


def test_single_allowed_action_asks_for_no_entropy():
    context = tables_of(has_mask=True)
    learner = learner_with(context, [[1, 2, 3]], np.zeros((2, 1, 3)), log_temperature=jnp.float32(0))
    batch = batch_of([0], [0], [0], [0], [0], jnp.array([[False, True, False]]))
    _, (excess, *_) = discrete_sac.policy_loss(context, learner, batch, jnp.ones(1), learner.params.actor)
    np.testing.assert_allclose(excess, 0, atol=1e-6)


@pytest.mark.parametrize("learns", [False, True])
def test_actions_are_uniform_until_first_gradient_step_and_then_of_policy(learns):
    num = 20_000
    agent = make(num_envs=num, has_mask=True, learning_starts=0, rollout_length=1, size=4 * num)
    context = context_of(agent)._replace(actor=actor_critics.ACTOR, critic=CRITIC)
    learner = learner_with(context, np.log([[0.1, 0.2, 0.7]]), np.zeros((2, 1, 3)))
    state = off_policy.State(learner, (), off_policy.init(), jnp.int32(10 if learns else 0))
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(0), 1, num))
    mask = jnp.broadcast_to(jnp.array([True, False, True]), (num, 3))
    action = discrete_sac.explore(context, state, PolicyInput(jnp.zeros((num, 1)), mask), (), noise).action
    assert action.dtype == jnp.int32
    share = np.bincount(action, minlength=3) / num
    np.testing.assert_allclose(share, [1 / 8, 0, 7 / 8] if learns else [0.5, 0, 0.5], atol=0.01)


def test_exploit_takes_most_probable_allowed_action():
    context = tables_of(has_mask=True)
    state = actor_critics.state_of(learner_with(context, [[1, 2, 3]], np.zeros((2, 1, 3))))
    inputs = PolicyInput(jnp.zeros((2, 1)), jnp.array([[True] * 3, [True, True, False]]))
    np.testing.assert_array_equal(discrete_sac.exploit(context, state, inputs, (), None).action, [2, 1])


# A whole update


def numpy_update(context, tables, rollout_rows, draws):
    """Make gradient steps in numpy (Christodoulou 2019, algorithm 1). Only the drawn rows come from the agent."""
    config = context.config
    actor, critic, target, log_alpha = tables
    rates = config.learning_rate, config.critic_learning_rate, config.learning_rate
    optimizers = [Adam(x, rate, config.optimizer.epsilon) for x, rate in zip((actor, critic, log_alpha), rates)]
    obs, action, reward, discount, after, mask = rollout_rows
    for rows in draws:
        size, alpha = len(rows), np.exp(log_alpha)
        s, a, t = obs[rows], action[rows], after[rows]
        p = softmax(np.where(mask[t], actor[t], -np.inf))
        log_p = np.log(np.where(p > 0, p, 1))
        goal = reward[rows] + discount[rows] * (p * (target[:, t].min(0) - alpha * log_p)).sum(1)
        gradient = np.zeros(critic.shape)
        for c in range(len(critic)):
            np.add.at(gradient[c], (s, a), (critic[c, s, a] - goal) / size)
        critic = optimizers[1].step(critic, gradient)
        p = softmax(np.where(mask[s], actor[s], -np.inf))
        log_p = np.log(np.where(p > 0, p, 1))
        f = alpha * log_p - critic[:, s].min(0)
        gradient = np.zeros(actor.shape)
        np.add.at(gradient, s, p * (f - (p * f).sum(1, keepdims=True)) / size)
        excess = (-(p * log_p).sum(1) - config.target_entropy_share * np.log(mask[s].sum(1))).mean()
        actor, log_alpha = optimizers[0].step(actor, gradient), optimizers[2].step(log_alpha, excess)
        target = actor_critics.average(critic, target, config.target.tau)
    return actor, critic, target, log_alpha


def test_update_matches_numpy_program():
    """Three gradient steps on 12 steps with masks. Target critics differ from the critics at the start."""
    rng = np.random.default_rng(0)
    agent = make(
        num_envs=1, has_mask=True, rollout_length=12, size=24, replay_ratio=0.25, tau=0.3, gamma=0.9,
        learning_rate=0.03, critic_learning_rate=0.02, optimizer=dict(epsilon=1e-3), temperature=0.4,
        target_entropy_share=0.6,
    )  # fmt: skip
    context = context_of(agent)._replace(actor=actor_critics.ACTOR, critic=CRITIC)
    state_mask = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 1]], bool)
    actor, critic = rng.normal(size=(NUM_STATES, 3)), rng.normal(size=(2, NUM_STATES, 3))
    target, log_alpha = rng.normal(size=critic.shape), np.log(0.4)
    obs, reward = rng.integers(NUM_STATES, size=12), rng.normal(size=12)
    action = np.array([rng.choice(np.flatnonzero(state_mask[s])) for s in obs])
    discount = np.where(np.arange(12) == 5, 0.0, 1.0)
    column = lambda x, dtype: jnp.asarray(x, dtype)[:, None]
    steps = Transition(
        column(obs, jnp.float32)[..., None], column(action, jnp.int32), column(reward, jnp.float32),
        column(discount, jnp.float32), column(np.arange(12) == 5, bool), column(np.arange(12) != 6, bool), (),
        jnp.asarray(state_mask[obs])[:, None],
    )  # fmt: skip
    learner = learner_with(context, actor, critic, target, jnp.float32(log_alpha))
    before = off_policy.init_state(learner, context.replay.init())
    rollout, key = Rollout(steps, jnp.zeros((1, 1)), ()), jax.random.key(1)
    update = partial(actor_critic.update, context, sac.gradient_step)
    after, metrics = jax.jit(update)(before, rollout, key)
    num = int(metrics["gradient_steps"])
    keys = jax.random.split(key, (off_policy.max_grad_steps(context.ratio), 2))[:num]
    indexed = rollout._replace(steps=steps._replace(reward=column(np.arange(12.0), jnp.float32)))  # names rows
    ring = jax.jit(context.replay.add)(context.replay.init(), indexed.steps)
    draws = [np.asarray(context.replay.sample(ring, k[0], 8, 0.9, 1.0).rows.reward, int) for k in keys]
    rows = obs, action, reward, 0.9 * discount, np.append(obs[1:], 0), state_mask
    wanted = numpy_update(context, (actor, critic, target, log_alpha), rows, draws)
    found, of_target = after.learner.params, after.learner.target_params.critic
    assert num == 2 and abs(wanted[3] - log_alpha) > 0.02
    assert_close((found.actor, found.critic["value"], of_target["value"], found.log_temperature), wanted)


# Learning


def learn(env, num_updates=500, num_seeds=2, **options):
    """Values [S, 2, B, A] and greedy actions [S, B] of observations after training, by several seeds in one program."""
    defaults = dict(
        rollout_length=4, size=2048, batch_size=32, replay_ratio=0.25, learning_starts=64, hidden_sizes=(16,),
        gamma=0.9, learning_rate=3e-3, critic_learning_rate=1e-2, tau=0.05, temperature=0.01, **FIXED,
    )  # fmt: skip
    agent = sac.make(configure(sac.Config, **defaults | options), env.spec, num_updates, Parallelism())
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)[0].agent
    keys = jax.random.split(jax.random.key(0), num_seeds)
    states = jax.jit(jax.vmap(run), compiler_options=probes.QUICK)(keys)

    def answer(obs):
        obs = jnp.float32(obs)
        context = agent.update.args[0]
        critics = jax.vmap(lambda state: context.critic.apply(state.learner.params.critic, (obs, None)))(states)
        act = jax.vmap(lambda state: agent.exploit(state, PolicyInput(obs), (), None).action)
        return np.asarray(critics), np.asarray(act(states))

    return answer


def test_agent_learns_best_action_of_observation():
    value, action = learn(probes.best_action_of_observation(8))([[-1], [1]])
    np.testing.assert_array_equal(action, [[0, 1]] * 2)
    np.testing.assert_allclose(value, np.broadcast_to([[1, -1], [-1, 1]], value.shape), atol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["mean", dict(kind="c51", v_min=-2.0, v_max=2.0), "quantile"])
def test_agent_learns_delayed_consequence(value):
    """With heads of distributions, the learned means have the same known values."""
    env = probes.delayed_consequence(8)
    found, action = learn(env, 1500, value=value)([[0, 0], [-1, 1], [1, 1]])
    assert (action[:, 0] == 1).all()
    if value == "mean":  # the other action becomes rare
        np.testing.assert_allclose(found[:, :, 0, 1], 0.9, atol=0.1)
        assert (found[:, :, 0, 0] < -0.3).all()


@pytest.mark.slow
def test_learned_temperature_holds_target_entropy():
    """One step, action 1 pays 1, else -1. With an entropy of 0.6 log 2, p solves H(p) = 0.6 log 2: p = .146."""
    env = probes.best_action(8)
    options = dict(learn_temperature=True, target_entropy_share=0.6, learning_rate=1e-2)
    agent = sac.make(
        configure(sac.Config, **actor_critics.LITTLE | options | dict(batch_size=32, size=1024, replay_ratio=1.0)),
        env.spec, 300, Parallelism(),
    )  # fmt: skip
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), 300)[0].agent
    state = jax.jit(run)(jax.random.key(0))
    context = agent.update.args[0]
    p = np.exp(discrete_sac.policy(context, state.learner.params.actor, jnp.ones((1, 1)), None).log_probs())[0, 0]
    np.testing.assert_allclose(p, 0.146, atol=0.03)
    np.testing.assert_allclose(
        float(jnp.exp(state.learner.params.log_temperature)), 2 / math.log(0.854 / 0.146), rtol=0.2
    )


# Rejected options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            dict(action=Box((1,)), target_entropy_share=0.5),
            r"^target_entropy_share: test has continuous actions.*use tar",
        ),
        (dict(target_entropy=0.5), r"^target_entropy: test has discrete actions, got 0.5; use target_entropy_share$"),
        (dict(noise="ou"), r"^noise: test has discrete actions, got ou; leave it out$"),
        (
            dict(target="none"),
            r"^target: none requires continuous actions, got Discrete\(num=3\) of test; use average$",
        ),
        (dict(action=MultiDiscrete((9,) * 5)), r"^sac: needs a value .* at most 4,096, got 59,049 of test; try ppo$"),
    ],
)
def test_make_rejects_options_of_other_actions_in_one_line(options, words):
    with pytest.raises(ValueError, match=words) as refusal:
        make(**options)
    assert "\n" not in str(refusal.value)
