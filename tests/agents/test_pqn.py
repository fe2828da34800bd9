"""PQN: targets against rlax and hand calculation, masks, shards, and learned values where the answer is known."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast import loop
from jaxrl_fast.agents import pqn
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import sgd
from jaxrl_fast.types import Box, Discrete, EnvSpec, Parallelism, PolicyInput, Rollout, Transition
from tests.helpers import probes
from tests.helpers.agents import network_of

TABLE = network_of(  # a lookup table: its parameters [states, A] are indexed by the observation
    init=lambda key: jnp.zeros((8, 2)),
    apply=lambda table, obs, noise=(): table[obs[..., 0].astype(jnp.int32)],
    noise=lambda key, shape: (),
)


def make(num_envs=1, action=None, **config):
    spec = EnvSpec("test", ShapeDtypeStruct((1,), jnp.float32), action or Discrete(2), num_envs)
    options = dict(rollout_length=4, num_minibatches=1, hidden_sizes=(8,)) | config
    return pqn.make(configure(pqn.Config, **options), spec, 10)


def epochs_of(context):
    """The training that `make` builds for a context."""
    functions = (partial(part, context) for part in (pqn.prepare, pqn.gradient_step, pqn.finalize))
    return sgd.epochs_of(context.config, context.parallelism, functions)


def context_of(**config):
    """The context that `make` builds, with a lookup table as network."""
    return make(**config).explore.args[0]._replace(network=TABLE)


def rollout_of(table, obs, action, reward, discount, last, valid):
    """A rollout of arrays [T, N] and observations [T + 1, N]. Its extras are the largest action values."""
    best = jnp.float32(table)[np.asarray(obs, int)].max(-1)
    obs = jnp.float32(obs)[..., None]
    rows = jnp.int32(action), jnp.float32(reward), jnp.float32(discount), jnp.asarray(last), jnp.asarray(valid)
    return Rollout(Transition(obs[:-1], *rows, best[:-1]), obs[-1], ())


@pytest.mark.parametrize(
    ("last", "terminal", "expected"),
    [
        # gamma = lambda = 1/2, rewards 1 2 4, best next values 2 4 8
        # 4 + 1/2 * 8 = 8;  2 + 1/2 (4/2 + 8/2) = 5;  1 + 1/2 (2/2 + 5/2) = 2.75
        (False, False, [2.75, 5, 8]),
        # truncated after the second step: 2 + 1/2 * 4 = 4;  1 + 1/2 (2/2 + 4/2) = 2.5
        (True, False, [2.5, 4, 8]),
        # or terminated: 2;  1 + 1/2 (2/2 + 2/2) = 2
        (True, True, [2, 2, 8]),
    ],
)
def test_targets_equal_hand_calculation(last, terminal, expected):
    table = jnp.float32([[9, 9], [2, 1], [0, 4], [8, -8]])
    rollout = rollout_of(
        table, np.arange(4)[:, None], np.zeros((3, 1)), [[1], [2], [4]], [[1], [1 - terminal], [1]],
        [[False], [last], [False]], [[True], [True], [not last]],
    )  # fmt: skip
    context = context_of(rollout_length=3, gamma=0.5, q_lambda=0.5)
    rows, _ = pqn.rows_of(context, table, rollout)
    np.testing.assert_allclose(rows.target, expected, rtol=1e-6)
    np.testing.assert_array_equal(rows.weight, [1, 1, not last])


@pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
def test_targets_match_rlax(rlax, q_lambda):
    """rlax indexes a reward by the step that receives it, so its q_t belongs to the reward at t - 1 here.

    rlax.q_lambda does not support truncation, so the oracle for it is rlax.lambda_returns with lambda 0 at each end.
    """
    rng = np.random.default_rng(0)
    num_steps, num_envs = 12, 3
    context = context_of(num_envs=num_envs, rollout_length=num_steps, gamma=0.9, q_lambda=q_lambda)
    table = jnp.float32(rng.normal(size=(8, 2)))
    obs, action = rng.integers(0, 8, (num_steps + 1, num_envs)), rng.integers(0, 2, (num_steps, num_envs))
    reward, last = rng.normal(size=(num_steps, num_envs)), rng.random((num_steps, num_envs)) < 0.3
    discount = 1.0 - (last & (rng.random(last.shape) < 0.5))
    for ends in (last, np.zeros_like(last)):
        rows, _ = pqn.rows_of(context, table, rollout_of(table, obs, action, reward, discount, ends, ~ends))
        target = rows.target.reshape(num_steps, num_envs)
        for n in range(num_envs):
            q = table[obs[:, n]]
            pays = jnp.float32(reward[:, n]), jnp.float32(0.9 * discount[:, n])
            expected = rlax.lambda_returns(*pays, q[1:].max(-1), jnp.float32(q_lambda * ~ends[:, n]))
            np.testing.assert_allclose(target[:, n], expected, rtol=1e-5, atol=1e-5)
            if not ends.any():
                error = rlax.q_lambda(q[:-1], action[:, n], *pays, q[1:], q_lambda)
                chosen = np.asarray(q)[np.arange(num_steps), action[:, n]]
                np.testing.assert_allclose(target[:, n] - chosen, error, rtol=1e-4, atol=1e-5)


def test_loss_equals_hand_calculation():
    # weights 1/2, 1/2, 0;  d = 3 - 2 = 1 and 1 - 5 = -4:  (1/2 + 16/2) / 2 = 4.25, and its gradient is -w d
    batch = pqn.Batch(
        jnp.float32([[0], [0], [1]]), jnp.int32([0, 1, 0]), jnp.float32([3, 1, 99]), jnp.float32([1, 1, 0]) / 2
    )
    table = jnp.float32([[2, 5], [7, 7]])
    gradient, metrics = jax.grad(partial(pqn.loss, context_of()), has_aux=True)(table, batch)
    found = [float(metrics[name]) for name in ("td_loss", "q_value", "td_error_abs")]
    np.testing.assert_allclose(found, [4.25, 3.5, 2.5], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-0.5, 2], [0, 0]], rtol=1e-6)


def agent_of(env, num_updates, **config):
    defaults = dict(
        rollout_length=16, num_minibatches=2, num_epochs=2, learning_rate=5e-3, gamma=probes.GAMMA, hidden_sizes=(16,),
        explore=dict(start=0.5, end=0.5),
    )  # fmt: skip
    return pqn.make(configure(pqn.Config, **defaults | config), env.spec, num_updates, env.parallelism)


def learn(env, num_updates=200, **config):
    """Values [B, A] and greedy actions [B] of observations, after training."""
    agent = agent_of(env, num_updates, **config)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)[0].agent
    state = jax.jit(run, compiler_options=probes.QUICK)(jax.random.key(0))

    def answer(obs):
        obs = jnp.float32(obs)
        value = agent.explore.args[0].network.apply(state.params, obs)
        return np.asarray(value), np.asarray(agent.exploit(state, PolicyInput(obs), (), None).action)

    return answer


def test_explore_stores_largest_action_value_for_bootstrapping():
    """Epsilon is 1, so all actions are random. The stored value is still the largest one of each row."""
    context = context_of(num_envs=64, explore=dict(start=1.0, end=1.0))
    state = pqn.State(jnp.float32(np.random.default_rng(0).normal(size=(8, 2))), (), jnp.int32(0))
    obs = jnp.float32(np.arange(64) % 8)[:, None]
    noise = jax.tree.map(lambda x: x[0], make(num_envs=64).sample_noise(jax.random.key(0), 1, 64))
    decision = pqn.explore(context, state, PolicyInput(obs), (), noise)
    values = np.asarray(state.params)[np.arange(64) % 8]
    np.testing.assert_array_equal(decision.extras, values.max(-1))
    assert (np.asarray(decision.action) != values.argmax(-1)).any()


@pytest.mark.slow
def test_agent_learns_delayed_consequence():
    value, action = learn(probes.delayed_consequence(8))([[0, 0], [-1, 1], [1, 1]])
    assert action[0] == 1
    np.testing.assert_allclose(value, [[-0.9, 0.9], [-1, -1], [1, 1]], atol=0.1)


@pytest.mark.slow
def test_agent_learns_action_that_depends_on_observation():
    """Like the delayed consequence, with one step per episode."""
    value, action = learn(probes.best_action_of_observation(8), 100)([[-1], [1]])
    np.testing.assert_array_equal(action, [0, 1])
    np.testing.assert_allclose(value, [[1, -1], [-1, 1]], atol=0.1)


@pytest.mark.slow
def test_truncation_bootstraps_value():
    """Reward 1 forever has value 10. A value of 6.5 would mean that truncation counts as termination."""
    value, _ = learn(probes.constant_reward(8), 300, learning_rate=1e-2)([[1.0]])
    np.testing.assert_allclose(value, 10, atol=0.2)


@pytest.mark.slow
def test_termination_does_not_bootstrap():
    value, _ = learn(probes.constant_reward_terminal(8), 300, learning_rate=1e-2)(np.eye(10))
    expected = [(1 - 0.9 ** (10 - t)) / 0.1 for t in range(10)]
    np.testing.assert_allclose(value, np.repeat(expected, 2).reshape(10, 2), atol=0.3)


@pytest.mark.slow
def test_reset_rows_do_not_affect_learning():
    """Actions and rewards of reset rows are overwritten. State and metrics stay bit-identical."""
    env = probes.best_action(4)
    agent = agent_of(env, 10)
    state = jax.jit(agent.init)(jax.random.key(0))
    experience = probes.experience(env, agent, state)
    steps = experience.steps
    assert (~steps.valid).any()
    disturbed = steps._replace(
        action=jnp.where(steps.valid, steps.action, 1 - steps.action),
        reward=jnp.where(steps.valid, steps.reward, 1e6),
    )
    update = jax.jit(agent.update)
    one = update(state, experience, jax.random.key(2))
    other = update(state, experience._replace(steps=disturbed), jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert int(one[0].optimizer[-1].count) == 4  # 2 epochs of 2 minibatches


@pytest.mark.slow
def test_two_shards_learn_same_parameters_as_one_device():
    """Two shards of 3 environments match one device with 6. With one minibatch the order of rows has no effect."""
    config = dict(num_minibatches=1, num_epochs=3, apex_alpha=7.0)
    env = probes.best_action_of_observation(6)
    half = env._replace(spec=env.spec._replace(num_envs=3), parallelism=Parallelism("devices", 2))
    whole, shard = agent_of(env, 10, **config), agent_of(half, 10, **config)
    state = jax.jit(whole.init)(jax.random.key(0))
    experience = probes.experience(env, whole, state)
    divide = lambda x, axis: jnp.moveaxis(x.reshape(*x.shape[:axis], 2, 3, *x.shape[axis + 1 :]), axis, 0)
    halves = Rollout(
        jax.tree.map(lambda x: divide(x, 1), experience.steps),
        jax.tree.map(lambda x: divide(x, 0), experience.next_obs),
        (),
    )
    key = jax.random.key(3)
    expected, expected_metrics = jax.jit(whole.update)(state, experience, key)
    update = jax.vmap(lambda rollout: shard.update(state, rollout, key), axis_name="devices")
    found, metrics = jax.jit(update)(halves)
    for i in range(2):
        at = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree)
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(close, at(found.params), expected.params)
        jax.tree.map(close, at(metrics), expected_metrics)


@pytest.mark.slow
def test_vmapped_seeds_equal_single_seed_runs_and_differ():
    env = probes.best_action_of_observation(4)
    agent = agent_of(env, 3)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), 3)[0].agent.params
    keys = jax.random.split(jax.random.key(0), 3)
    quick = partial(jax.jit, compiler_options=probes.QUICK)
    together, alone = quick(jax.vmap(run))(keys), quick(run)
    for i in (0, 2):
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        jax.tree.map(close, jax.tree.map(lambda x, i=i: x[i], together), alone(keys[i]))
    kernels = [leaf for leaf in jax.tree.leaves(together) if leaf.ndim == 3]
    assert all(np.abs(leaf[i] - leaf[j]).max() > 1e-3 for leaf in kernels for i, j in ((0, 1), (1, 2), (0, 2)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(action=Box((2,))), r"pqn: requires discrete actions, got Box\(shape=\(2,\)\) of test; try ppo"),
        (
            dict(num_envs=256, rollout_length=8, num_minibatches=3),
            "^num_minibatches: .* 2048 steps .* got 3; use 2 or 4$",
        ),
    ],
)
def test_make_rejects_invalid_options(config, words):
    with pytest.raises(ValueError, match=words):
        make(**config)


def test_update_reports_epsilon_and_learning_rate_of_next_update():
    """An update has 3 of the 12 environment steps until epsilon is 0.

    It has 2 of the 20 gradient steps until the learning rate is 0.
    """
    context = context_of(
        rollout_length=3, num_epochs=2, explore=dict(start=1.0, end=0.0, steps=12), learning_rate=0.1,
        schedule="linear",
    )  # fmt: skip
    rollout = rollout_of(
        np.zeros((8, 2)), np.arange(4)[:, None], np.zeros((3, 1)), np.ones((3, 1)), np.ones((3, 1)),
        np.zeros((3, 1), bool), np.ones((3, 1), bool),
    )  # fmt: skip
    state = pqn.init(context, jax.random.key(0))
    update = jax.jit(partial(sgd.update, epochs_of(context)))
    for number in (1, 2, 3):
        state, metrics = update(state, rollout, jax.random.key(number))
        assert int(state.num_updates) == number
        np.testing.assert_allclose(metrics["epsilon"], 1 - 3 * number / 12, rtol=1e-6)
        np.testing.assert_allclose(metrics["learning_rate"], 0.1 * (1 - 2 * number / 20), rtol=1e-5)
        np.testing.assert_allclose(pqn.epsilons(context, state), [1 - 3 * number / 12], rtol=1e-6)


def test_metrics_are_means_over_gradient_steps_and_rows():
    """Episodes end at once with rewards 1 2 3 4, and values stay 0: td_loss is (1 + 4 + 9 + 16) / 8."""
    context = context_of(rollout_length=4, num_epochs=3, num_minibatches=2, learning_rate=1e-12)
    rollout = rollout_of(
        np.zeros((8, 2)), np.arange(5)[:, None], np.zeros((4, 1)), [[1], [2], [3], [4]], np.zeros((4, 1)),
        np.zeros((4, 1), bool), np.ones((4, 1), bool),
    )  # fmt: skip
    state = pqn.init(context, jax.random.key(0))
    _, metrics = jax.jit(partial(sgd.update, epochs_of(context)))(state, rollout, jax.random.key(1))
    found = [float(metrics[name]) for name in ("td_loss", "td_error_abs", "q_value")]
    np.testing.assert_allclose(found, [3.75, 2.5, 0], rtol=1e-5, atol=1e-9)
