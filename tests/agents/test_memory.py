"""PPO and PQN with memory: against a plain Python loop per environment, and on a task that requires memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import loop
from jaxrl_fast.agents import dqn, ppo, pqn
from jaxrl_fast.options.declare import configure
from jaxrl_fast.training import evaluator
from jaxrl_fast.types import Parallelism
from tests.helpers import probes, slow
from tests.helpers.trees import same_bits

SMALL = dict(rollout_length=12, num_minibatches=2, num_epochs=2, hidden_sizes=(8,), gamma=probes.GAMMA)


def make_agent(module, env, num_updates=10, **options):
    options = SMALL | dict(memory=dict(kind="gru", size=4)) | options
    return module.make(configure(module.Config, **options), env.spec, num_updates, Parallelism())


def state_and_rollout(agent, env, seed=0):
    """The initial state of an agent, and a rollout in which episodes end."""
    state = jax.jit(agent.init)(jax.random.key(seed))
    return state, probes.experience(env, agent, state)


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 3])
def test_ppo_advantages_values_and_loss_match_loop_per_environment(length):
    """Episodes have 5 steps and rollouts 12, so that episodes end at each position of a sequence."""
    env = probes.remember(4, length=5)
    agent = make_agent(ppo, env, sequence_length=length, normalize_advantage=False, entropy_coef=0.1)
    context = agent.explore.args[0]
    state, rollout = state_and_rollout(agent, env)
    params, unroll = state.params["network"], jax.jit(context.policy.network.unroll)
    update = jax.jit(partial(ppo.prepare, context))(state, rollout)
    steps, num_steps, num_envs = rollout.steps, *rollout.steps.reward.shape
    values, logits = np.zeros((num_steps + 1, num_envs)), np.zeros((num_steps, num_envs, 2))
    for n in range(num_envs):
        carry = jax.tree.map(lambda x, n=n: x[None, n], rollout.carry)
        for t in range(num_steps + 1):
            obs = rollout.next_obs[None, n] if t == num_steps else steps.obs[None, t, n]
            (out, value), carry = unroll(params, obs[:, None], carry, jnp.zeros((1, 1), bool))
            values[t, n] = value[0, 0]
            if t < num_steps:
                logits[t, n] = out[0, 0]
                carry = carry if steps.valid[t, n] else jax.tree.map(jnp.zeros_like, carry)
    advantage = np.zeros((num_steps + 1, num_envs))  # GAE by definition
    config, discount = context.config, np.float64(context.config.gamma * steps.discount)
    for t in reversed(range(num_steps)):
        delta = steps.reward[t] + discount[t] * values[t + 1] - values[t]
        advantage[t] = delta + discount[t] * config.gae_lambda * ~np.asarray(steps.last[t]) * advantage[t + 1]
    size = length or num_steps
    order = lambda x: np.asarray(x).reshape(-1, size, num_envs).swapaxes(1, 2).reshape(-1, size)
    np.testing.assert_allclose(update.rows.advantage, order(advantage[:-1]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(update.rows.value, order(values[:-1]), rtol=1e-4, atol=1e-5)
    log_prob = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_prob, np.asarray(steps.action)[..., None], -1)[..., 0]
    np.testing.assert_allclose(update.rows.log_prob, order(chosen), rtol=1e-4, atol=1e-5)
    # Before the first gradient step the ratio is 1 and the values equal those of the rollout.
    entropy = -(np.exp(log_prob) * log_prob).sum(-1)
    valid = np.asarray(steps.valid)
    total = -advantage[:-1] + config.value_coef * 0.5 * advantage[:-1] ** 2 - 0.1 * entropy
    found, _ = jax.jit(partial(ppo.loss, context))(state.params, update.rows)
    np.testing.assert_allclose(found, (valid * total).sum(), rtol=1e-3)
    assert not valid.all() and np.asarray(steps.last).sum(0).min() > 1


@pytest.mark.slow
def test_pqn_targets_match_loop_per_environment():
    env = probes.remember(4, length=5)
    agent = make_agent(pqn, env, sequence_length=4, burn_in=1, q_lambda=0.5)
    context = agent.explore.args[0]
    state, rollout = state_and_rollout(agent, env)
    rows, _ = jax.jit(partial(pqn.rows_of, context))(state.params, rollout)
    steps, num_steps, step = rollout.steps, 12, jax.jit(context.network.step)
    expected = np.zeros((num_steps, 4))
    for n in range(4):
        carry, best = jax.tree.map(lambda x, n=n: x[None, n], rollout.carry), []
        for t in range(num_steps + 1):
            obs = rollout.next_obs[None, n] if t == num_steps else steps.obs[None, t, n]
            value, carry = step(state.params, obs, carry)
            best.append(float(value.max()))
            carry = carry if t == num_steps or steps.valid[t, n] else jax.tree.map(jnp.zeros_like, carry)
        following = best[num_steps]
        for t in reversed(range(num_steps)):
            trace = 0.0 if steps.last[t, n] else 0.5
            mixed = (1 - trace) * best[t + 1] + trace * following
            following = expected[t, n] = steps.reward[t, n] + probes.GAMMA * steps.discount[t, n] * mixed
    order = lambda x: np.asarray(x).reshape(-1, 4, 4).swapaxes(1, 2).reshape(-1, 4)
    np.testing.assert_allclose(rows.target, order(expected), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(rows.weight, order(steps.valid) * [0, 1, 1, 1])


@pytest.mark.slow
def test_ppo_loss_does_not_depend_on_sequence_length():
    """Each sequence starts with the carry of the rollout, so only the length of backpropagation differs."""
    env = probes.remember(4, length=5)
    losses = []
    for length in (12, 3, 1):
        agent = make_agent(ppo, env, sequence_length=length, normalize_advantage=False)
        context = agent.explore.args[0]
        state, rollout = state_and_rollout(agent, env)
        update = jax.jit(partial(ppo.prepare, context))(state, rollout)
        losses.append(jax.jit(partial(ppo.loss, context))(state.params, update.rows)[0])
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (ppo, dict(memory=dict(kind="gru"), learning_rate=1e-2)),
        (pqn, dict(memory=dict(kind="lstm", sequence_length=6), learning_rate=1e-2, explore=dict(start=0.2, end=0.2))),
        (ppo, dict(memory=dict(kind="lru", sequence_length=12), learning_rate=1e-2)),
    ],
)
def test_memory_solves_task_that_is_unsolvable_without_memory(module, options):
    """The first observation determines the correct last action. Without memory the best expected return is 0."""
    env = probes.remember(16, length=6)
    score = {}
    for kind in (options["memory"]["kind"], "none"):
        memory = options["memory"] | {"size": 16} if kind != "none" else kind
        agent = make_agent(module, env, 150, **options | dict(rollout_length=24, memory=memory))
        state = jax.jit(lambda key, agent=agent: loop.train(env, agent, loop.init(env, agent, key), 150)[0].agent)(
            jax.random.key(0)
        )
        play = jax.jit(partial(evaluator.evaluate_policy, env, agent, 4))
        score[kind] = float(play(state, jnp.uint32(0), jnp.int32(0)).score.mean())
    assert score[options["memory"]["kind"]] == 1.0 and abs(score["none"]) < 0.7, score


@pytest.mark.slow
def test_run_with_memory_resumes_exactly_and_loads_stateful_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = dict(
        env="CartPole-v1",
        num_envs=4,
        memory=dict(kind="lstm", size=8),
        rollout_length=8,
        num_minibatches=2,
        schedule="constant",
    )
    whole = jaxrl_fast.fit(algo="ppo", total_steps=256, run_dir="whole", eval_every=0, **options)
    jaxrl_fast.fit(algo="ppo", total_steps=128, run_dir="part", eval_every=0, **options)
    part = jaxrl_fast.fit(resume="runs/part", total_steps=256)
    trained = jaxrl_fast.load(part, which="last")
    assert same_bits(jaxrl_fast.load(whole, which="last").agent_state.params, trained.agent_state.params)
    policy = trained.policy
    memory = policy.initial_memory()
    one, batch = [], []
    memories = policy.initial_memory(3)
    for i in range(4):
        obs = np.full(4, 0.1 * i, np.float32)
        action, memory = policy(obs, memory)
        actions, memories = policy(np.stack([obs] * 3), memories)
        one.append(int(action))
        batch.append(actions)
        for every, single in zip(jax.tree.leaves(memories), jax.tree.leaves(memory), strict=True):
            np.testing.assert_allclose(every[1], single, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.stack(batch), np.array(one)[:, None].repeat(3, 1))
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(memory))
    with pytest.raises(ValueError, match=r"policy: memory must have the shapes .*; pass policy.initial_memory"):
        policy(np.zeros((3, 4)), memory)


@pytest.mark.parametrize("memory", [slow("none"), dict(kind="gru", size=2)])
def test_all_observations_of_ppo_rollout_are_normalized_by_same_statistics(memory):
    """Raw observations give the targets of those normalized by numpy, for which statistics have mean 0 and variance 1.

    With lambda 0, the target of the last step is its reward and the value of the observation after the rollout.
    """
    env = probes.remember(3, length=5)
    agent = make_agent(
        ppo, env, memory=memory, num_minibatches=1, rollout_length=4, gae_lambda=0.0, normalize_observations=True
    )
    state, rollout = state_and_rollout(agent, env)
    mean, var = np.float32([0.3, -2.0]), np.float32([0.25, 4.0])
    by_numpy = lambda obs: jnp.float32((np.asarray(obs) - mean) / np.sqrt(var))
    next_obs, steps = by_numpy(rollout.next_obs), rollout.steps._replace(obs=by_numpy(rollout.steps.obs))
    prepare = jax.jit(partial(ppo.prepare, agent.explore.args[0]))
    expected = prepare(state, rollout._replace(next_obs=next_obs, steps=steps)).rows.target
    stats = state.observations._replace(mean=jnp.asarray(mean), var=jnp.asarray(var))
    np.testing.assert_allclose(prepare(state._replace(observations=stats), rollout).rows.target, expected, atol=1e-5)
    assert np.abs(next_obs - rollout.next_obs).min() > 0.1


def test_update_of_dqn_with_memory_keeps_shapes_of_its_state():
    """The update is traced only; its numbers are those of a loop in tests/replay/test_sequences.py."""
    env = probes.remember(2, length=5)
    options = dict(rollout_length=4, replay=dict(size=64), batch_size=4, learning_starts=0, hidden_sizes=(4,))
    options |= dict(memory=dict(kind="gru", size=2, sequence_length=8, burn_in=2), double=True)
    agent = dqn.make(configure(dqn.Config, **options), env.spec, 10, Parallelism())
    state = jax.eval_shape(agent.init, jax.random.key(0))
    rollout = jax.eval_shape(lambda: probes.experience(env, agent, agent.init(jax.random.key(0))))
    after, metrics = jax.eval_shape(agent.update, state, rollout, jax.random.key(1))
    like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert like(after) == like(state) and metrics["td_loss_sum"].shape == ()
