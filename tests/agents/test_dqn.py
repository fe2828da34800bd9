"""DQN: targets and losses against rlax and hand calculation, gradient steps, and learned values."""

import re
from fractions import Fraction
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import ShapeDtypeStruct

from jaxrl_fast import loop, replay
from jaxrl_fast.agents import dqn
from jaxrl_fast.metrics import records
from jaxrl_fast.options.declare import configure
from jaxrl_fast.replay import ring as replay_ring
from jaxrl_fast.replay import sum_tree
from jaxrl_fast.rl import distributions, off_policy, value_distributions
from jaxrl_fast.types import Box, Discrete, EnvSpec, Parallelism, PolicyInput, Rollout, Transition
from tests.helpers import probes
from tests.helpers.agents import RATIOS, network_of
from tests.helpers.trees import equations

NUM_STATES = 6
TABLE = network_of(  # a lookup table: its parameters [NUM_STATES, A, ...] are indexed by the observation
    init=lambda key: jnp.zeros((NUM_STATES, 2)),
    apply=lambda table, obs, noise=(): table[obs[..., 0].astype(jnp.int32)],
    noise=lambda key, shape: (),
)


def make(num_actions=2, num_envs=1, frame_stack=0, num_shards=1, action=None, num_updates=100, **config):
    obs = ShapeDtypeStruct((max(frame_stack, 1),), jnp.float32)
    spec = EnvSpec("test", obs, action or Discrete(num_actions), num_envs, frame_stack)
    defaults = dict(rollout_length=4, size=10**9, batch_size=4, learning_starts=0, hidden_sizes=(8,))
    return dqn.make(configure(dqn.Config, **defaults | config), spec, num_updates, Parallelism(num_shards=num_shards))


def context_of(**config):
    """The context that `make` builds, with a lookup table as network."""
    return make(**config).update.args[0]._replace(network=TABLE)


def learner_of(params, target):
    return dqn.Learner(jnp.float32(params), jnp.float32(target), ())


def sample_of(obs, action, reward, discount, next_obs):
    column = lambda x: jnp.float32(x)[:, None]
    return replay.Sample(column(obs), jnp.int32(action), jnp.float32(reward), jnp.float32(discount), column(next_obs))


def problem(*outputs, num_rows=16, seed=0):
    """Two random tables with these outputs for each state, and a batch of random transitions; 1 in 4 is terminal."""
    rng = np.random.default_rng(seed)
    params, target = 2 * rng.normal(size=(2, NUM_STATES, *outputs))
    obs, next_obs = rng.integers(0, NUM_STATES, (2, num_rows))
    discount = 0.9 * (rng.random(num_rows) < 0.75)
    batch = sample_of(obs, rng.integers(0, outputs[0], num_rows), rng.normal(size=num_rows), discount, next_obs)
    return learner_of(params, target), batch


def values_at(table, obs):
    return TABLE.apply(table, obs)


def loss_of(context, learner, batch):
    """The mean loss, the errors for priorities, and metrics. The target is computed by the same learner."""
    goal = dqn.td_target(context, learner, batch, (), ())
    weight = jnp.full(batch.reward.shape, 1 / batch.reward.size)
    loss, (errors, metrics) = dqn.loss(context, learner.params, batch, goal, weight, ())
    return loss, errors, metrics


# Targets and losses


@pytest.mark.parametrize(
    ("double", "loss", "target", "expected"),
    [
        # q'(s', .) = (1, 3): .5 + .9 * 3 = 3.2;  d = 3.2 - 2 = 1.2;  d^2 / 2 = .72
        (False, "squared", 3.2, 0.72),
        # Huber: 1.2 - .5
        (False, "huber", 3.2, 0.7),
        # q(s', .) = (4, 0) chooses action 0, which q' gives 1: .5 + .9 * 1 = 1.4;  d = -.6;  d^2 / 2 = .18
        (True, "squared", 1.4, 0.18),
        (True, "huber", 1.4, 0.18),
    ],
)
def test_one_step_target_and_loss_equal_hand_calculation(double, loss, target, expected):
    learner = learner_of([[2, 5], [4, 0]], [[-7, -7], [1, 3]])
    batch = sample_of([0], [0], [0.5], [0.9], [1])
    context = context_of(double=double, loss=loss)
    goal = dqn.td_target(context, learner, batch, (), ())
    np.testing.assert_allclose(goal.atom, [[target]], rtol=1e-6)
    np.testing.assert_allclose(goal.weight, [[1]])
    value, errors, metrics = loss_of(context, learner, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(errors, [abs(target - 2)], rtol=1e-5)
    np.testing.assert_allclose(metrics["q_value"], 2)


def test_loss_has_no_gradient_through_target():
    """The gradient of (target - q)^2 / 2 is -d at (s, a) and 0 elsewhere, also if s' = s."""
    learner, batch = learner_of([[2, 5], [4, 0]], [[2, 5], [4, 0]]), sample_of([0], [0], [0.5], [0.9], [0])
    context = context_of(double=True)
    goal = dqn.td_target(context, learner, batch, (), ())
    gradient = jax.grad(lambda params: dqn.loss(context, params, batch, goal, jnp.ones(1), ())[0])(learner.params)
    np.testing.assert_allclose(gradient, [[-3, 0], [0, 0]], rtol=1e-6)  # d = .5 + .9 * 5 - 2 = 3


def replay_config(context):
    """The ReplayConfig of the buffer that `make` built."""
    return context.replay.add.args[0]


def buffer_of(context, obs, reward, discount, last, valid):
    """A replay buffer that holds one rollout of one environment."""
    column = lambda x, dtype: jnp.asarray(x, dtype)[:, None]
    steps = Transition(
        column(obs, jnp.float32)[..., None], column(np.zeros(len(obs)), jnp.int32), column(reward, jnp.float32),
        column(discount, jnp.float32), column(last, bool), column(valid, bool), (),
    )  # fmt: skip
    return context.replay.add(context.replay.init(), steps)


def targets_at(context, ring, learner, rows):
    rows = jnp.int32(rows)
    batch = replay_ring.read(replay_config(context), ring, rows, jnp.zeros_like(rows), context.config.gamma)
    return dqn.td_target(context, learner, batch, (), ()).atom[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("terminates", [False, True])
def test_three_step_targets_equal_hand_calculation(terminates):
    # gamma .5, best values 2 s, rewards 1 2 3 4; the episode ends with the fourth step, and row 4 is its reset.
    # row 0: 1 + .5 * 2 + .25 * 3 = 2.75, then .125 * 2 * 3 = .75 of state 3
    # row 2: 3 + .5 * 4 = 5, then .25 * 2 * 4 = 2 of state 4 if truncated
    # row 3: 4, then .5 * 2 * 4 = 4
    context = context_of(n_step=3, rollout_length=6, size=12, gamma=0.5)
    ring = buffer_of(
        context, range(6), [1, 2, 3, 4, 0, 9], [1, 1, 1, 1 - terminates, 1, 1], [0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 1]
    )
    learner = learner_of(np.zeros((6, 2)), [[s, 2 * s] for s in range(6)])
    expected = [3.5, 5, 4] if terminates else [3.5, 7, 8]
    np.testing.assert_allclose(targets_at(context, ring, learner, [0, 2, 3]), expected, rtol=1e-6)


@pytest.mark.parametrize("n_step", [1, 5])
def test_n_step_targets_match_rlax(rlax, n_step):
    """All episodes end in a terminal state, whose discount of 0 excludes later rows from rlax's returns."""
    rng = np.random.default_rng(n_step)
    length = 16
    context = context_of(n_step=n_step, rollout_length=length, size=2 * length, gamma=0.9)
    obs, reward = rng.integers(0, NUM_STATES, length), rng.normal(size=length)
    discount = (rng.random(length) < 0.8).astype(float)
    learner = learner_of(np.zeros((6, 2)), rng.normal(size=(6, 2)))
    ring = buffer_of(context, obs, reward, discount, discount == 0, np.ones(length))
    best = np.asarray(learner.target_params).max(-1)[np.append(obs[1:], 0)]
    expected = rlax.n_step_bootstrapped_returns(*map(jnp.float32, (reward, 0.9 * discount, best)), n_step)
    rows = np.arange(length - n_step)
    np.testing.assert_allclose(targets_at(context, ring, learner, rows), expected[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Rlax:PendingDeprecationWarning")
@pytest.mark.parametrize("double", [False, True])
def test_c51_loss_matches_rlax(rlax, double):
    learner, batch = problem(3, 11)
    context = context_of(num_actions=3, value="c51", atoms=11, v_min=-2.0, v_max=2.0, double=double)
    support = value_distributions.support(context.rule.head)
    now, following = values_at(learner.params, batch.obs), values_at(learner.target_params, batch.next_obs)
    shared = support, now, batch.action, batch.reward, batch.discount, support, following
    if double:
        chooser = value_distributions.mean(context.rule.head, values_at(learner.params, batch.next_obs))
        axes = None, 0, 0, 0, 0, None, 0, 0
        expected = jax.vmap(rlax.categorical_double_q_learning, axes)(*shared, chooser)
    else:
        expected = jax.vmap(rlax.categorical_q_learning, (None, 0, 0, 0, 0, None, 0))(*shared)
    loss, errors, _ = loss_of(context, learner, batch)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    # the error for priorities is the KL divergence: cross entropy minus entropy of the target distribution
    wanted = np.asarray(value_distributions.project(dqn.td_target(context, learner, batch, (), ()), support), float)
    entropy = -np.where(wanted > 0, wanted * np.log(np.where(wanted > 0, wanted, 1)), 0).sum(-1)
    np.testing.assert_allclose(errors, expected - entropy, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
def test_quantile_loss_matches_rlax(rlax, double):
    learner, batch = problem(3, 5)
    context = context_of(num_actions=3, value="quantile", atoms=5, loss="huber", double=double)
    swap = lambda x: jnp.swapaxes(x, -1, -2)  # rlax: [quantiles, actions]
    now, following = swap(values_at(learner.params, batch.obs)), swap(values_at(learner.target_params, batch.next_obs))
    chooser = swap(values_at(learner.params, batch.next_obs)) if double else following
    level = (jnp.arange(5) + 0.5) / 5
    expected = jax.vmap(rlax.quantile_q_learning, (0, None, 0, 0, 0, 0, 0, None))(
        now, level, batch.action, batch.reward, batch.discount, chooser, following, 1.0
    )
    loss, _, _ = loss_of(context, learner, batch)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)


MUNCHAUSEN = dict(bonus=dict(kind="munchausen", alpha=0.5, temperature=1.0))


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
def test_value_rescaling_matches_rlax_transformed_td(rlax, double):
    context = context_of(rescaling=True, double=double)
    learner, batch = problem(2, num_rows=64)
    learner = jax.tree.map(lambda x: 20 * x, learner)  # returns of hundreds
    loss, errors, metrics = loss_of(context, learner, batch)
    now, following = (values_at(learner.params, obs) for obs in (batch.obs, batch.next_obs))
    target = values_at(learner.target_params, batch.next_obs)
    best = jnp.argmax(following if double else target, axis=-1)
    learn = partial(rlax.transformed_n_step_q_learning, n=1, tx_pair=rlax.SIGNED_HYPERBOLIC_PAIR)
    row = lambda *x: learn(*(x[None] for x in x))[0]
    expected = jax.jit(jax.vmap(row))(now, batch.action, target, best, batch.reward, batch.discount)
    np.testing.assert_allclose(errors, jnp.abs(expected), rtol=2e-3, atol=1e-3)
    assert loss == pytest.approx(0.5 * float((expected**2).mean()), rel=1e-3)
    chosen = np.take_along_axis(np.asarray(now), np.asarray(batch.action)[:, None], 1)[:, 0]
    np.testing.assert_allclose(metrics["q_value"].sum(), rlax.signed_parabolic(chosen).mean(), rtol=1e-3)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("distribution", ["mean", "c51", "quantile"])
def test_munchausen_target_matches_equation_1(distribution, double):
    """The oracle is a float64 loop over rows that uses the means of the value distributions."""
    temperature, alpha, clip = 0.3, 0.7, -0.5
    context = context_of(
        num_actions=3, value={"kind": distribution} | ({} if distribution == "mean" else {"atoms": 5}), double=double,
        bonus=dict(kind="munchausen", temperature=temperature, alpha=alpha, clip=clip),
    )  # fmt: skip
    learner, batch = problem(3) if distribution == "mean" else problem(3, 5)
    look = lambda table, obs: np.asarray(value_distributions.mean(context.rule.head, values_at(table, obs)), float)
    now, following = look(learner.target_params, batch.obs), look(learner.target_params, batch.next_obs)
    chooser = look(learner.params, batch.next_obs) if double else following
    goal = dqn.td_target(context, learner, batch, (), ())
    np.testing.assert_allclose(goal.weight.sum(-1), 1, rtol=1e-5)
    log_policy = lambda q: q / temperature - np.log(np.exp(q / temperature).sum())
    for b, mean in enumerate((goal.atom * goal.weight).sum(-1)):
        bonus = max(clip, temperature * log_policy(now[b])[batch.action[b]])
        log_pi = log_policy(chooser[b])
        soft = sum(np.exp(log_pi[a]) * (following[b, a] - temperature * log_pi[a]) for a in range(3))
        expected = float(batch.reward[b]) + alpha * bonus + float(batch.discount[b]) * soft
        np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("double", [False, True])
def test_td_target_ignores_masked_actions(double):
    # The greedy action, 1, is masked at state 1: .5 + .9 * 1 = 1.4
    learner = learner_of([[2, 5], [0, 4]], [[-7, -7], [1, 3]])
    mask = jnp.array([[True, False]])
    batch = sample_of([0], [0], [0.5], [0.9], [1])._replace(action_mask=~mask, next_action_mask=mask)
    goal = dqn.td_target(context_of(double=double), learner, batch, (), ())
    np.testing.assert_allclose(goal.atom, [[1.4]], rtol=1e-6)


def test_munchausen_target_ignores_masked_actions():
    """The oracle is a problem without the third action, which is masked and has the largest value."""
    learner, batch = problem(3)
    learner = learner._replace(target_params=learner.target_params.at[:, 2].set(50.0))
    batch = batch._replace(action=batch.action % 2)
    mask = jnp.broadcast_to(jnp.array([True, True, False]), (16, 3))
    without = jax.tree.map(lambda table: table[:, :2], learner)
    expected = dqn.td_target(context_of(**MUNCHAUSEN), without, batch, (), ())
    masked = batch._replace(action_mask=mask, next_action_mask=mask)
    goal = dqn.td_target(context_of(**MUNCHAUSEN, num_actions=3), learner, masked, (), ())
    np.testing.assert_allclose(goal.weight[:, 2], 0)
    np.testing.assert_allclose(goal.mean, expected.mean, rtol=1e-5)


def test_masked_actions_get_lowest_value_and_are_not_chosen():
    context, obs = context_of(num_actions=3), jnp.zeros((2, 1))
    params, mask = jnp.float32([[1, 2, 3]]), jnp.array([[True, False, True], [True, True, False]])
    value, _ = dqn.action_values(context, params, PolicyInput(obs, mask), ())
    np.testing.assert_array_equal(value, [[1, distributions.FORBIDDEN, 3], [1, 2, distributions.FORBIDDEN]])
    state = off_policy.State(dqn.Learner(params, (), ()), (), (), jnp.int32(0))
    np.testing.assert_array_equal(dqn.exploit(context, state, PolicyInput(obs, mask), (), ()).action, [2, 1])


def test_importance_exponent_rises_linearly_to_one():
    options = configure(dqn.Config, replay="prioritized", beta=0.4).replay
    exponents = [replay.importance_exponent(options, 100, jnp.int32(u)) for u in (0, 50, 100, 1000)]
    np.testing.assert_allclose(exponents, [0.4, 0.7, 1, 1], rtol=1e-6)


# Step counts


@pytest.mark.parametrize(
    ("num_envs", "num_shards"), [(1, 1), (3, 1), (10, 1), (64, 1), (1000, 1), (4096, 1), (5, 2), (1024, 4)]
)
@settings(max_examples=12)
@given(RATIOS, st.integers(1, 9), st.integers(0, 60_000), st.integers(1, 3))
def test_make_counts_environment_steps_of_all_shards(
    num_envs, num_shards, ratio, rollout_length, learning_starts, n_step
):
    """For any number of shards. tests/rl/test_off_policy.py tests the counts that follow from the ReplayRatio."""
    config = dict(replay_ratio=ratio, rollout_length=rollout_length, learning_starts=learning_starts, n_step=n_step)
    context = make(num_envs=num_envs, num_shards=num_shards, **config).update.args[0]
    num_envs *= num_shards
    first = max(learning_starts, (n_step + 1) * num_envs)
    assert context.ratio == off_policy.ReplayRatio(Fraction(str(ratio)), first, rollout_length, num_envs)


@pytest.mark.slow
def test_number_of_gradient_steps_follows_replay_ratio():
    """Adam's own count after training: floor(.3 * (11 * 2 * 3 - 8 * 3 - 1))."""
    env = probes.best_action(3)
    config = configure(
        dqn.Config, rollout_length=2, size=124, batch_size=4, replay_ratio=0.3, hidden_sizes=(4,), learning_starts=25
    )
    agent = dqn.make(config, env.spec, 11)
    state, metrics = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), 11))(jax.random.key(0))
    assert int(state.agent.learner.optimizer[-1].count) == int(metrics["gradient_steps"].sum()) == 12


# Gradient steps on sampled rows


def least_capacity(num_envs, rollout_length, n_step, frame_stack):
    """The smallest valid replay.size, read from the error message."""
    with pytest.raises(ValueError) as refusal:
        make(
            num_envs=num_envs, rollout_length=rollout_length, n_step=n_step, frame_stack=frame_stack, size=1,
            batch_size=1,
        )  # fmt: skip
    return int(re.search(r"^replay.size: must be at least (\d+) for", str(refusal.value))[1])


def keys_of(seed):
    """The two keys of a gradient step."""
    return jax.random.split(jax.random.key(seed))


def four_steps(context, priorities):
    """A prioritized buffer of four steps, of which rows 1 and 3 have priorities."""
    buffer = buffer_of(context, range(4), [1, 2, 3, -16], [1, 0, 1, 0], [0, 1, 0, 1], [1] * 4)
    tree = sum_tree.update(sum_tree.init(16), jnp.int32([1, 3]), jnp.float32(priorities))
    return buffer._replace(priorities=tree)


def step(context, buffer, num_updates, keys, params):
    """The result of one gradient step that starts with target parameters equal to the parameters."""
    learner = dqn.Learner(params, params, context.optimizer.init(params))
    return jax.jit(partial(dqn.gradient_step, context))(
        buffer, jnp.int32(num_updates), keys, learner, off_policy.init()
    )


@pytest.mark.slow
def test_gradient_step_sets_priorities_from_td_errors():
    # Only rows 1 and 3 can be drawn. gamma 1/2, values 0: errors |2|, |-16|; to the power 1/2: 1.41421 and 4.
    context = context_of(replay="prioritized", alpha=0.5, gamma=0.5, size=16, batch_size=16)
    buffer = four_steps(context, [1, 1])
    learner, buffer, _, metrics = step(context, buffer, 0, keys_of(0), jnp.zeros((NUM_STATES, 2)))
    np.testing.assert_allclose(buffer.priorities.levels[0], [0, np.sqrt(2), 0, 4] + [0] * 12, rtol=1e-5)
    np.testing.assert_allclose(buffer.max_priority, 4, rtol=1e-5)
    np.testing.assert_allclose(metrics["td_error_abs"].sum(), 9, rtol=1e-5)  # (2 + 16) / 2: half of the strata each
    moved = np.asarray(learner.params) != 0
    assert moved[[1, 3], 0].all() and moved.sum() == 2


@pytest.mark.slow
def test_gradient_step_changes_nothing_if_all_priorities_are_zero():
    # All priorities are 0. A sampled row must keep priority 0, or the next step could sample it.
    context = context_of(replay="prioritized", size=16, batch_size=16)
    params, buffer = jnp.ones((NUM_STATES, 2)), four_steps(context, [0, 0])
    learner, after, _, _ = step(context, buffer, 0, keys_of(0), params)
    jax.tree.map(np.testing.assert_array_equal, (learner.params, after), (params, buffer))
    assert after.max_priority == 1


@pytest.mark.slow
@pytest.mark.parametrize(("beta", "num_updates"), [(1.0, 0), (0.4, 100)])
def test_gradient_step_applies_importance_weights(beta, num_updates):
    # Priorities 1 and 4, exponent beta at first and 1 at the end: 16 strata of 5 sample row 1 three or four times, and
    # row 3 the rest. Weights are 1 and 1/4 over 16; the gradient towards q is weight * (q - target) = -weight * reward.
    config = dict(beta=beta, max_grad_norm=0.0)
    context = context_of(replay="prioritized", gamma=0.5, size=16, batch_size=16, **config)
    buffer, keys = four_steps(context, [1, 4]), keys_of(1)
    after, *_ = step(context, buffer, num_updates, keys, jnp.zeros((NUM_STATES, 2)))
    item, _ = sum_tree.draw(buffer.priorities, keys[0], 16)
    count = np.bincount(np.asarray(item), minlength=4)
    assert count[1] in (3, 4) and count[1] + count[3] == 16
    gradient = np.asarray(after.optimizer[-2].mu).reshape(NUM_STATES, 2)[[1, 3], 0] / 0.1  # Adam's first moment
    np.testing.assert_allclose(gradient, [-2 * count[1] / 16, 16 * count[3] / 16 / 4], rtol=1e-5)


def rollouts_of(env, agent, num_rollouts, seed=1):
    """Rollouts of the untrained agent, [num_rollouts, T, N, ...]."""
    state = jax.jit(agent.init)(jax.random.key(seed))
    experience = probes.experience(env, agent, state, seed + 1, num_rollouts * agent.rollout_length)
    cut = lambda x: x.reshape(num_rollouts, agent.rollout_length, *x.shape[1:])
    return experience._replace(steps=jax.tree.map(cut, experience.steps))


@pytest.mark.parametrize(("kind", "num_steps"), [("uniform", 3), ("prioritized", 1)])
@pytest.mark.slow
def test_two_shards_learn_same_parameters_as_one_device(kind, num_steps, monkeypatch):
    """Two shards of 2 environments match one device with 4. Each shard samples its part of the same batch.

    Priorities are equal before the only prioritized gradient step, so importance weights do not depend on the shard.
    """

    def first_rows_of_each_environment(size):
        env = jnp.arange(size) % (size // 4)
        return env * 0 + jnp.arange(size) // (size // 4), env, jnp.ones(size, bool)

    def first_items(_, key, size):
        row, env, found = first_rows_of_each_environment(size)
        return row * (size // 4) + env, found.astype(jnp.float32)

    monkeypatch.setattr(replay_ring, "draw", lambda config, ring, key, size, own: first_rows_of_each_environment(size))
    monkeypatch.setattr(sum_tree, "draw", first_items)
    env = probes.best_action_of_observation(4)
    config = dict(rollout_length=8, size=256, batch_size=16, replay_ratio=num_steps / 32, learning_starts=0)
    config |= dict(replay=kind, n_step=2, apex_alpha=7.0, interval=1)
    config |= dict(tau=0.1, loss="squared")
    config |= dict(optimizer=dict(epsilon=1.0))  # large, so that the scale of gradients affects the step
    half = env._replace(spec=env.spec._replace(num_envs=2), parallelism=Parallelism("devices", 2))
    whole, part = agent_of(env, 10, **config), agent_of(half, 10, **config)
    experience = probes.experience(env, whole, jax.jit(whole.init)(jax.random.key(0)))
    steps = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(8, 2, 2, *x.shape[2:]), 1, 0), experience.steps)

    def learn(agent, steps):
        state = agent.init(jax.random.key(0))._replace(num_updates=jnp.int32(1))  # all steps count
        state, metrics = agent.update(state, experience._replace(steps=steps), jax.random.key(1))
        learner = state.learner._replace(optimizer=state.learner.optimizer[-1].count)
        max_priority = state.replay.max_priority if kind == "prioritized" else jnp.float32(0)
        return state._replace(learner=learner, replay=()), metrics, max_priority

    expected, expected_metrics, expected_priority = jax.jit(partial(learn, whole))(experience.steps)
    found, metrics, max_priority = jax.jit(jax.vmap(partial(learn, part), axis_name="devices"))(steps)
    assert expected_metrics["gradient_steps"] == num_steps and expected_metrics["td_loss_sum"] > 0
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for i in range(2):
        at = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree)
        jax.tree.map(close, at(found), expected)
        jax.tree.map(close, at(metrics), expected_metrics)
    close(max_priority.max(), expected_priority)  # shards share their maximum when they add the next rows


@pytest.mark.slow
def test_each_gradient_step_gets_unique_random_keys(monkeypatch):
    env, seen, descend = probes.best_action(4), [], dqn.gradient_step

    def record_keys(context, buffer, num_updates, keys, *rest):
        if not isinstance(keys, jax.core.Tracer):  # skip calls that eval_shape traces
            seen.extend(map(tuple, np.asarray(jax.random.key_data(keys)).tolist()))
        return descend(context, buffer, num_updates, keys, *rest)

    agent = agent_of(env, 6, learning_starts=0)
    state, experience = jax.jit(agent.init)(jax.random.key(0)), rollouts_of(env, agent, 1)
    first = experience._replace(steps=jax.tree.map(lambda x: x[0], experience.steps))
    monkeypatch.setattr(dqn, "gradient_step", record_keys)
    with jax.disable_jit():
        agent.update(state, first, jax.random.key(1))
    assert len(set(seen)) == len(seen) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "poison", "kind"),
    [(probes.constant_reward_terminal, np.nan, "uniform"), (probes.best_action, 1e6, "prioritized")],
)
def test_reset_rows_do_not_affect_learning(probe, poison, kind):
    """Actions and rewards of reset rows are overwritten. Learner, priorities and metrics stay bit-identical.

    In best_action half the rows are reset rows, so some draws find no valid row and have weight 0.
    A NaN would show there.
    """
    env = probe(4)
    config = configure(
        dqn.Config, rollout_length=8, replay=dict(kind=kind, size=256, n_step=3), batch_size=16, replay_ratio=0.25,
        learning_starts=0, hidden_sizes=(8,), interval=8,
    )  # fmt: skip
    agent = dqn.make(config, env.spec, 6)
    experience = rollouts_of(env, agent, 6)

    @jax.jit
    def learn(poison):
        steps = experience.steps
        steps = steps._replace(
            reward=jnp.where(steps.valid, steps.reward, poison),
            action=jnp.where(steps.valid | (poison == 0), steps.action, 1 - steps.action),
        )
        update = lambda state, x: agent.update(state, experience._replace(steps=x[0]), x[1])
        keys = jax.random.split(jax.random.key(0), 6)
        state, metrics = jax.lax.scan(update, agent.init(jax.random.key(1)), (steps, keys))
        priorities = (state.replay.priorities, state.replay.max_priority) if kind == "prioritized" else ()
        return (state.learner, priorities), metrics

    assert not experience.steps.valid.all()
    clean, disturbed = learn(0.0), learn(poison)
    assert np.isfinite(clean[1]["td_loss_sum"]).all() and clean[1]["gradient_steps"].sum() > 0
    jax.tree.map(np.testing.assert_array_equal, clean, disturbed)


# Learning


def agent_of(env, num_updates, **config):
    defaults = dict(
        rollout_length=4, size=2048, batch_size=32, replay_ratio=0.25, learning_starts=64, interval=40,
        learning_rate=3e-3, gamma=probes.GAMMA, hidden_sizes=(16,), explore=dict(start=0.5, end=0.5),
    )  # fmt: skip
    return dqn.make(configure(dqn.Config, **defaults | config), env.spec, num_updates, env.parallelism)


def learn(env, num_updates=200, seed=0, **config):
    """Expected returns [B, A] and greedy actions [B] of observations, after training in 8 environments."""
    agent = agent_of(env, num_updates, **config)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)
    state, metrics = jax.jit(run, compiler_options=probes.QUICK)(jax.random.key(seed))
    assert np.isfinite(metrics["td_loss_sum"]).all()
    context = agent.update.args[0]

    def answer(obs):
        obs = jnp.float32(obs)
        value = value_distributions.mean(context.rule.head, context.network.apply(state.agent.learner.params, obs))
        return np.asarray(value), np.asarray(agent.exploit(state.agent, PolicyInput(obs), (), None).action)

    return answer


NOISY = dict(noisy=True, explore=dict(start=0.0, end=0.0))
C51 = dict(value="c51", atoms=21, v_min=-2.0, v_max=2.0)
RAINBOW = NOISY | C51 | dict(double=True, dueling=True, n_step=3, replay="prioritized")
SWITCHES = {
    "plain": {},
    "double": dict(double=True),
    "dueling": dict(dueling=True),
    "n_step": dict(n_step=3),
    "prioritized": dict(replay="prioritized"),
    "noisy": NOISY,
    "c51": C51,
    "quantile": dict(value="quantile", atoms=11),
    "munchausen": dict(bonus="munchausen"),
    "huber": dict(loss="huber"),
    "layer_norm": dict(layer_norm=True),
    "apex_alpha": dict(apex_alpha=3.0),
    "average": dict(interval=1, tau=0.05),
    "rainbow": RAINBOW,
    "rainbow_munchausen": RAINBOW | dict(bonus="munchausen"),
}


@pytest.mark.slow
@pytest.mark.parametrize("switch", SWITCHES)
def test_each_option_learns_delayed_consequence(switch):
    """Compare the values of both actions at the start and in both second states.

    Noisy networks soon stop trying the worse action, so only the values of their best actions are compared.
    """
    config = SWITCHES[switch]
    value, action = learn(probes.delayed_consequence(8), **config)([[0, 0], [-1, 1], [1, 1]])
    assert action[0] == 1
    if "munchausen" in switch:  # its values are soft and contain the log policy
        assert value[0, 1] - value[0, 0] > 0.5
        return
    np.testing.assert_allclose(value.max(-1)[[0, 2]], [0.9, 1], atol=0.1)
    if "noisy" not in config:
        np.testing.assert_allclose(value, [[-0.9, 0.9], [-1, -1], [1, 1]], atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("n_step", [1, 3])
def test_truncation_bootstraps_value(n_step):
    """Reward 1 forever has value 10. A value of 6.5 would mean that truncation counts as termination."""
    value, _ = learn(probes.constant_reward(8), 300, n_step=n_step, learning_rate=1e-2, schedule="linear")([[1.0]])
    np.testing.assert_allclose(value, 10, atol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("n_step", [1, 3])
def test_termination_does_not_bootstrap(n_step):
    value, _ = learn(probes.constant_reward_terminal(8), 300, n_step=n_step, learning_rate=1e-2, schedule="linear")(
        np.eye(10)
    )
    expected = [(1 - 0.9 ** (10 - t)) / 0.1 for t in range(10)]
    np.testing.assert_allclose(value, np.repeat(expected, 2).reshape(10, 2), atol=0.3)


# Seeds


@pytest.mark.slow
def test_vmapped_seeds_equal_single_seed_runs_and_differ():
    """Equal to rounding over the first 20 gradient steps; later, rounding may change which rows are sampled."""
    env = probes.best_action_of_observation(4)
    agent = agent_of(env, 6, learning_starts=16, replay="prioritized", dueling=True)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), 6)
    keys = jax.random.split(jax.random.key(0), 3)
    together, metrics = jax.jit(jax.vmap(run), compiler_options=probes.QUICK)(keys)
    alone = jax.jit(run, compiler_options=probes.QUICK)
    assert (metrics["gradient_steps"].sum(1) == 20).all()  # .25 * (6 * 16 - 16)
    for i in (0, 2):
        state, _ = alone(keys[i])
        one = jax.tree.map(lambda x, i=i: x[i], together.agent)
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(close, one.learner.params, state.agent.learner.params)
        np.testing.assert_array_equal(one.replay.ring.action, state.agent.replay.ring.action)
    kernels = [leaf for leaf in jax.tree.leaves(together.agent.learner.params) if leaf.ndim == 3]
    assert all(np.abs(leaf[i] - leaf[j]).max() > 1e-3 for leaf in kernels for i, j in ((0, 1), (1, 2), (0, 2)))


@pytest.mark.slow
def test_vmapped_seeds_share_one_loop_and_one_condition():
    """Under vmap, a batched condition would compute both branches and a batched loop would wait for all seeds."""
    batch = (2, 3)  # seeds of several shards
    env = probes.best_action(4)
    agent = agent_of(env, 6)
    over_all = lambda function: reduce(lambda f, _: jax.vmap(f), batch, function)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    states = jax.eval_shape(over_all(agent.init), keys)
    experience = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], rollouts_of(env, agent, 1).steps))
    more = lambda x: ShapeDtypeStruct((*batch, *x.shape), x.dtype)
    rollout = jax.tree.map(more, Rollout(experience, ShapeDtypeStruct((4, 1), jnp.float32), ()))
    found = list(equations(jax.make_jaxpr(over_all(agent.update))(states, rollout, keys)))
    conditions = [e for e in found if e.primitive.name == "cond"]
    assert [e.invars[0].aval.shape for e in conditions] == [()]
    names = lambda jaxpr: {e.primitive.name for e in equations(jaxpr)}
    loops = [e for e in found if e.primitive.name == "while" and "cond" in names(e.params["body_jaxpr"])]
    assert len(loops) == 1 and "reduce_or" not in names(loops[0].params["cond_jaxpr"])


# Rejected options


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            dict(rescaling=True, bonus="munchausen"),
            "^value.rescaling: cannot be combined with bonus munchausen, got both",
        ),
        (dict(action=Box((2,))), r"dqn: requires discrete actions, got Box\(shape=\(2,\)\) of test; try ppo"),
        (dict(num_shards=3, batch_size=64), r"^batch_size: must be a multiple of 3, .* got 64; use 66$"),
        (dict(size=64, batch_size=65), r"^replay.size: must hold one batch of 65, got 64;"),
        (dict(size=64, learning_starts=65), r"^learning_starts: must be at most replay.size \(64\), got 65;"),
        (
            dict(size=2**24 + 4, replay="prioritized"),
            r"^replay.size: must be at most 16777216 with replay prioritized, got 16777220; use 16777216, or ",
        ),
        (dict(size=8, n_step=4), r"^replay.size: must be at least 12 for n_step 4 .* got 8; use 12 or more$"),
        (dict(value="c51", atoms=1), "^value.atoms: a distribution requires 2 or more, got 1;"),
        (dict(value="quantile", atoms=1), "^value.atoms: a distribution requires 2 or more, got 1;"),
        (dict(value="c51", v_min=1.0, v_max=1.0), r"^value.v_min: must be less than v_max \(1.0\), got 1.0;"),
        (dict(replay_ratio=1 / 3), r"cannot be counted exactly .*; use 0\.33333328125$"),
        (dict(replay_ratio=4e-11), r"cannot be counted exactly .*; use 9\.5367431640625e-10$"),
        (
            dict(replay_ratio=1.5, interval=2**29),
            r"cannot be counted .* target.interval 536870912, got 1\.5; use (1|2)\.0$",
        ),
        (dict(replay_ratio=0.3333333333, interval=2**29), r"; use 0\.4$"),
        (dict(num_updates=2**31, replay_ratio=4), "gradient steps, got"),
    ],
)
def test_make_rejects_invalid_options(config, words):
    with pytest.raises(ValueError, match=words):
        make(**config)


@pytest.mark.parametrize(
    "config",
    [
        dict(replay_ratio=1 / 3),
        dict(replay_ratio=4e-11),
        dict(replay_ratio=3.33333e-7),
        dict(replay_ratio=1.23456, interval=2**22),
    ],
)
def test_replay_ratio_suggested_by_error_message_is_accepted(config):
    with pytest.raises(ValueError, match=r"^replay_ratio: cannot be counted exactly") as refusal:
        make(**config)
    make(**config | dict(replay_ratio=float(str(refusal.value).split()[-1])))


@settings(max_examples=50)
@given(st.integers(1, 100), st.integers(1, 20), st.integers(1, 12), st.sampled_from([0, 1, 4]))
def test_smallest_buffer_size_is_accepted_and_one_less_is_rejected(num_envs, rollout_length, n_step, frame_stack):
    """Of a full buffer at least one row has its stacked frames and its n-step successors.

    The rows of one rollout can change priority without overlap.
    """
    shape = dict(num_envs=num_envs, rollout_length=rollout_length, n_step=n_step, frame_stack=frame_stack)
    least = least_capacity(**shape)
    config = replay_config(make(**shape, size=least, batch_size=1).update.args[0])
    assert config == replay.ReplayConfig(least // num_envs, num_envs, n_step, frame_stack)
    assert config.num_rows * num_envs == least and config.num_rows % rollout_length == 0
    lost = max(frame_stack - 1, 0)
    assert config.num_rows - n_step - lost >= 1
    assert n_step + rollout_length + lost <= config.num_rows
    with pytest.raises(ValueError, match=f"at least {least}"):
        make(**shape, size=least - 1, batch_size=1)


# Actions and metrics


def test_noisy_network_explores_and_evaluation_uses_no_noise():
    """Epsilon is 0. Environments with equal observations explore with separate noise, and all exploit alike."""
    agent = make(num_envs=200, noisy=True, explore=dict(start=0.0, end=0.0), hidden_sizes=(16,), size=2000)
    state, obs = jax.jit(agent.init)(jax.random.key(0)), jnp.ones((200, 1))
    noise = agent.sample_noise(jax.random.key(1), 2, 200)
    decide = jax.jit(lambda i: agent.explore(state, PolicyInput(obs), (), jax.tree.map(lambda x: x[i], noise)).action)
    first, second = np.asarray(decide(0)), np.asarray(decide(1))
    assert set(first) == {0, 1} and (first != second).any()
    assert len(set(np.asarray(agent.exploit(state, PolicyInput(obs), (), None).action))) == 1


def test_records_divide_sums_by_number_of_gradient_steps():
    """The mean is None if there was no gradient step."""
    rows = {name: np.zeros((2, 3)) for name in records.SCORES}
    rows |= {
        "gradient_steps": np.array([[0, 2, 6], [0, 0, 0]]),
        "td_loss_sum": np.array([[0, 4.0, 8.0], [0, 0, 0]]),
        "epsilon": np.array([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]]),
    }
    one, other = records.summarize(rows)
    assert (one["td_loss"], one["gradient_steps"], one["epsilon"]) == (1.5, 8, 0.5)  # (4 + 8) / (2 + 6)
    assert (other["td_loss"], other["gradient_steps"], other["epsilon"]) == (None, 0, 0.5)
    assert not any(name in record for record in (one, other) for name in ("td_loss_sum", "return_sum", "length_sum"))


@pytest.mark.parametrize(("learning_starts", "ratio"), [(0, 0.25), (40, 0.25), (40, 0.5), (10**6, 0.25)])
def test_annealed_learning_rate_reaches_zero_at_last_gradient_step(learning_starts, ratio):
    """The oracle counts gradient steps over 10 updates of 4 steps in each of 2 environments."""
    agent = make(num_envs=2, num_updates=10, learning_starts=learning_starts, replay_ratio=ratio, schedule="linear")
    context, counts, made = agent.update.args[0], off_policy.init(), 0
    for update in range(10):
        due, counts = off_policy.num_grad_steps_due(context.ratio, counts, jnp.int32(8 * update))
        made += int(due)
    made = max(made, 1)  # a run without gradient steps also has a schedule
    rates = [float(context.learning_rate(count)) for count in (0, made - 1, made)]
    expected = [context.config.learning_rate * (1 - n / made) for n in (0, made - 1, made)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
