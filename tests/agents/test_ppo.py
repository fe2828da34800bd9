"""PPO: loss against a numpy oracle, masks, and learned values and actions on environments with known answers."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_fast import envs, loop, types
from jaxrl_fast.agents import ppo
from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.optimizer import AdaptiveKL, Linear
from jaxrl_fast.rl import distributions, normalize, optim, sgd, value_distributions
from jaxrl_fast.types import Parallelism, PolicyInput, Rollout, Transition
from jaxrl_fast.utils import target
from tests.helpers import probes


def learn(env, num_updates, seed=0, **config):
    """The agent and its state after training."""
    defaults = dict(
        rollout_length=32, num_minibatches=4, num_epochs=4, learning_rate=3e-3, gamma=probes.GAMMA, hidden_sizes=(32,),
        entropy_coef=0.0, value=dict(clip_vloss=False),
    )  # fmt: skip
    agent = ppo.make(configure(ppo.Config, **defaults | config), env.spec, num_updates)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)
    state, metrics = jax.jit(run, compiler_options=probes.QUICK)(jax.random.key(seed))
    return agent, state.agent, jax.device_get(metrics)


def value(agent, state, obs):
    context = agent.explore.args[0]
    obs = normalize.apply(state.observations, jnp.asarray(obs, jnp.float32))
    output = context.policy.network.critic(state.params["network"], obs)
    return np.asarray(value_distributions.mean(context.value_head, output))


def greedy_action(agent, state, obs):
    return np.asarray(agent.exploit(state, PolicyInput(jnp.asarray(obs, jnp.float32)), (), None).action)


@pytest.mark.slow
def test_truncation_bootstraps_value():
    """Reward 1 forever has value 10. A value of 6.5 would mean that truncation counts as termination."""
    agent, state, _ = learn(probes.constant_reward(16), 300)
    np.testing.assert_allclose(value(agent, state, [[1.0]]), 10, atol=0.1)


@pytest.mark.slow
def test_termination_does_not_bootstrap():
    agent, state, _ = learn(probes.constant_reward_terminal(16), 300)
    expected = [(1 - 0.9 ** (10 - t)) / 0.1 for t in range(10)]
    np.testing.assert_allclose(value(agent, state, np.eye(10)), expected, atol=0.1)


@pytest.mark.slow
def test_critic_learns_known_values():
    agent, state, _ = learn(probes.delayed_cue(16), 200)
    found = value(agent, state, [[-1, 0], [1, 0], [-1, 1], [1, 1]])
    np.testing.assert_allclose(found, [-0.9, 0.9, -1, 1], atol=0.1)


def test_policy_learns_action_with_best_delayed_consequence():
    agent, state, _ = learn(probes.delayed_consequence(16), 100)
    np.testing.assert_array_equal(greedy_action(agent, state, [[0, 0]]), [1])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["gaussian", "tanh"])
def test_policy_learns_best_continuous_actions(policy):
    agent, state, _ = learn(probes.continuous_action_of_observation(32), 300, policy=policy, log_std_init=-0.5)
    np.testing.assert_allclose(greedy_action(agent, state, [[-1.0], [1.0]])[:, 0], [-0.5, 0.5], atol=0.1)


@pytest.mark.slow
def test_policy_learns_delayed_goal_with_observation_and_reward_normalization():
    """The chain returns 5 per episode if every action is right. Rewards are rescaled, so values are not compared."""
    agent, state, metrics = learn(
        probes.chain(32), 150, normalize_observations=True, rewards="normalized", entropy_coef=0.01
    )
    np.testing.assert_array_equal(greedy_action(agent, state, np.eye(5)[:4]), 1)
    last = slice(-10, None)
    assert metrics["return_sum"][last].sum() / metrics["episodes"][last].sum() > 4.5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in envs.registered() if name != "gymnax/MNISTBandit-bsuite"])
@pytest.mark.usefixtures("any_ranks")  # for Swimmer
def test_train_step_can_be_traced_for_every_gymnax_environment(name):
    """Trace a whole train step, with the observations and actions of each environment that gymnax registers."""
    env = envs.make(name, 8)
    agent = ppo.make(configure(ppo.Config, rollout_length=8), env.spec, 2)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), 2)
    _, metrics = jax.eval_shape(run, jax.random.key(0))
    assert metrics["policy_loss"].shape == (2,)


def random_batch(num_actions=3, num_rows=12, seed=0):
    rng = np.random.default_rng(seed)
    f32 = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    weight = jnp.asarray(rng.integers(0, 2, num_rows) / num_rows, jnp.float32)
    action = jnp.asarray(rng.integers(0, num_actions, num_rows))
    policy = distributions.Categorical(f32(num_rows, num_actions))
    acted = action, policy, policy.log_prob(action)
    return ppo.Batch(f32(num_rows, 4), *acted, f32(num_rows), f32(num_rows), f32(num_rows), weight)


THREE_ACTIONS = types.Discrete(3)


def built(action=THREE_ACTIONS, num_envs=4, parallelism=Parallelism(), **config):
    """An agent and the context that `make` built for it."""
    obs = jax.ShapeDtypeStruct((4,), jnp.float32)
    spec = types.EnvSpec("test", obs, action, num_envs)
    config = dict(rollout_length=8, hidden_sizes=(8,)) | config
    agent = ppo.make(configure(ppo.Config, **config), spec, 10, parallelism)
    return agent, agent.explore.args[0]


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_loss_matches_equation_9(clip_vloss):
    """The oracle is a plain Python loop over rows, from the network's outputs."""
    agent, context = built(clip_vloss=clip_vloss)
    state, batch = jax.jit(agent.init)(jax.random.key(0)), random_batch()
    total, metrics = jax.jit(partial(ppo.loss, context))(state.params, batch)
    logits, values = map(np.asarray, context.policy.network.both(state.params["network"], batch.obs))
    expected = dict(policy_loss=0.0, value_loss=0.0, entropy=0.0, approx_kl=0.0, clip_fraction=0.0)
    for b, weight in enumerate(np.asarray(batch.weight)):
        new = np.exp(logits[b]) / np.exp(logits[b]).sum()
        old = np.exp(batch.policy.logits[b]) / np.exp(batch.policy.logits[b]).sum()
        ratio = new[batch.action[b]] / old[batch.action[b]]
        advantage, target, before = (float(x[b]) for x in (batch.advantage, batch.target, batch.value))
        expected["policy_loss"] -= weight * min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        errors = [(values[b] - target) ** 2]
        if clip_vloss:
            errors.append((before + min(max(values[b] - before, -0.2), 0.2) - target) ** 2)
        expected["value_loss"] += weight * 0.5 * max(errors)
        expected["entropy"] -= weight * (new * np.log(new)).sum()
        expected["approx_kl"] += weight * (ratio - 1 - np.log(ratio))
        expected["clip_fraction"] += weight * (abs(ratio - 1) > 0.2)
    for name, x in expected.items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-4, atol=1e-6, err_msg=name)
    whole = expected["policy_loss"] + 0.5 * expected["value_loss"] - 0.01 * expected["entropy"]
    np.testing.assert_allclose(total, whole, rtol=1e-4)


HL_GAUSS = dict(value=dict(kind="hl_gauss", atoms=21, v_min=-2.0, v_max=12.0))


def test_value_loss_of_hl_gauss_is_cross_entropy():
    """The oracle is a plain loop over rows. The policy's part of the loss does not change."""
    agent, context = built(**HL_GAUSS)
    state, batch = jax.jit(agent.init)(jax.random.key(0)), random_batch()
    _, metrics = jax.jit(partial(ppo.loss, context))(state.params, batch)
    _, outputs = context.policy.network.both(state.params["network"], batch.obs)
    expected, ends = 0.0, np.linspace(-2.35, 12.35, 22)
    for b, weight in enumerate(np.asarray(batch.weight)):
        below = scipy.stats.norm.cdf(ends, np.clip(batch.target[b], -2, 12), 0.75 * 0.7)
        wanted = np.diff(below) / (below[-1] - below[0])
        logits = np.asarray(outputs[b], float)
        expected -= weight * (wanted * (logits - np.log(np.exp(logits).sum()))).sum()
    np.testing.assert_allclose(metrics["value_loss"], expected, rtol=1e-4)


@pytest.mark.parametrize("num_outputs", [3, 30])
def test_accelerator_computes_same_values_of_hl_gauss(num_outputs):
    """There, actor and critic are a batch of two networks, whose heads get the width of the wider one."""
    _, context = built(types.Discrete(num_outputs), **HL_GAUSS)
    network, obs = context.policy.network, jax.random.normal(jax.random.key(1), (5, 4))
    params = jax.jit(network.init)(jax.random.key(0))
    expected = network.both(params, obs)
    with target.tracing_for("gpu"):
        found = network.both(params, obs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)
    assert found[0].shape == (5, num_outputs) and found[1].shape == (5, 21)


@pytest.mark.slow
def test_hl_gauss_learns_known_values():
    agent, state, _ = learn(probes.constant_reward_terminal(16), 300, **HL_GAUSS)
    expected = [(1 - 0.9 ** (10 - t)) / 0.1 for t in range(10)]
    np.testing.assert_allclose(value(agent, state, np.eye(10)), expected, atol=0.2)


@pytest.mark.slow
def test_reset_rows_do_not_affect_learning():
    """Actions and rewards of reset rows are overwritten. Parameters and metrics stay bit-identical."""
    env = probes.constant_reward(4)
    agent = ppo.make(configure(ppo.Config, rollout_length=32, hidden_sizes=(8,)), env.spec, 10)
    state = jax.jit(agent.init)(jax.random.key(0))
    experience = probes.experience(env, agent, state)
    steps = experience.steps
    assert (~steps.valid).any()
    disturbed = steps._replace(
        action=jnp.where(steps.valid, steps.action, 1 - steps.action),
        reward=jnp.where(steps.valid, steps.reward, 1e3),
    )
    update = jax.jit(agent.update)
    after, metrics = update(state, experience, jax.random.key(2))
    other, other_metrics = update(state, experience._replace(steps=disturbed), jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, (after.params, metrics), (other.params, other_metrics))


def test_advantages_bootstrap_from_observation_after_rollout():
    """The oracle is equation 11 of Schulman et al. 2016 in a loop that starts with the value of `next_obs`."""
    env, gamma, lambda_ = envs.make("CartPole-v1", 3), 0.9, 0.8
    agent = ppo.make(
        configure(ppo.Config, rollout_length=16, hidden_sizes=(8,), gamma=gamma, gae_lambda=lambda_), env.spec, 10
    )
    state = jax.jit(agent.init)(jax.random.key(0))
    experience = probes.experience(env, agent, state)
    rows = jax.jit(lambda *given: ppo.prepare(agent.explore.args[0], *given).rows)(state, experience)
    steps = jax.device_get(experience.steps)
    of_all = value(agent, state, np.concatenate([steps.obs, experience.next_obs[None]]))
    advantage, following = np.zeros((17, 3)), of_all[1:]
    for t in reversed(range(16)):
        error = steps.reward[t] + gamma * steps.discount[t] * following[t] - of_all[t]
        advantage[t] = error + gamma * steps.discount[t] * lambda_ * ~steps.last[t] * advantage[t + 1]
    np.testing.assert_allclose(np.reshape(rows.advantage, (16, 3)), advantage[:16], rtol=1e-4, atol=1e-4)
    assert np.abs(of_all[16] - of_all[15]).min() > 1e-4  # otherwise the value of the last row would pass too


def test_observation_statistics_exclude_reset_rows():
    """A reset row has the final observation of an episode, and its action is ignored."""
    env = probes.constant_reward_terminal(4)
    agent = ppo.make(
        configure(ppo.Config, rollout_length=32, hidden_sizes=(8,), normalize_observations=True), env.spec, 10
    )
    state = jax.jit(agent.init)(jax.random.key(0))
    experience = probes.experience(env, agent, state)
    steps = jax.device_get(experience.steps)
    assert (~steps.valid).any()
    after, _ = jax.jit(agent.update)(state, experience, jax.random.key(2))
    np.testing.assert_allclose(after.observations.mean, steps.obs[steps.valid].mean(0), atol=1e-3)
    assert np.abs(steps.obs[steps.valid].mean(0) - steps.obs.mean((0, 1))).max() > 5e-3


@cache
def standardized(num_shards):
    """Return a function of advantages and weights [shards, R].

    It returns advantages before and after, and weights, of each minibatch of two epochs, [shards, 2, 3, B].
    """

    def run(advantage, weight):
        rows = ppo.Batch((), (), (), (), advantage, advantage, (), weight)  # `value` keeps the advantages from before
        look = lambda learner, batch: (learner, (batch.value, batch.advantage, batch.weight))
        how, batch = sgd.Epochs(2, 3, "shards", 1, None, look, None, "advantage"), sgd.UpdateBatch((), rows)
        plan, _ = sgd._plan(how, batch, jax.random.key(0))
        return jax.vmap(lambda plan: sgd._train_on(how, batch, (), plan)[1])(plan)

    return jax.jit(jax.vmap(run, axis_name="shards"))


@given(seed=st.integers(0, 2**32 - 1), num_shards=st.sampled_from([1, 2]))
def test_advantages_are_standardized_in_each_minibatch(seed, num_shards):
    """Mean and standard deviation are over the valid rows of all shards. NaN in other rows has no effect."""
    rng = np.random.default_rng(seed)
    counts = rng.random((num_shards, 24)) < 0.7
    counts[:, ::2] = True
    advantage = np.float32(rng.normal(rng.choice([0, -5, 30]), rng.choice([0.1, 1, 20]), counts.shape))
    before, after, weight = jax.device_get(standardized(num_shards)(advantage, np.float32(counts)))
    for epoch, k in np.ndindex(2, 3):
        of_all = lambda x: np.concatenate(x[:, epoch, k])  # noqa: B023
        rows, found, share = of_all(before), of_all(after), of_all(weight)
        rows = np.float64(rows[share > 0])
        np.testing.assert_allclose(found[share > 0], (rows - rows.mean()) / rows.std(), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(share[share > 0], 1 / len(rows), rtol=1e-5)
    other = standardized(num_shards)(np.where(counts, advantage, np.nan), np.float32(counts))[1]
    np.testing.assert_array_equal(np.where(weight > 0, after, 0), np.where(weight > 0, other, 0))


@pytest.mark.slow
@pytest.mark.parametrize("normalize_advantage", [True, False])
def test_normalize_advantage_option_standardizes_advantages(normalize_advantage):
    """With the option, mean 0 and mean square 1; without it, those of the rollout, which is one minibatch."""

    def look(context, params, batch):
        mean = lambda x: jnp.sum(batch.weight * x)
        zero = 0 * sum(x.sum() for x in jax.tree.leaves(params))
        return zero, {"mean": mean(batch.advantage), "square": mean(batch.advantage**2)}

    env = probes.chain(4)
    options = dict(normalize_advantage=normalize_advantage, num_minibatches=1, num_epochs=1)
    agent = ppo.make(
        configure(ppo.Config, rollout_length=16, hidden_sizes=(8,), **options), env.spec, 10, objective=look
    )
    state = jax.jit(agent.init)(jax.random.key(0))
    experience = probes.experience(env, agent, state)

    @jax.jit
    def update(state, experience):
        rows = ppo.prepare(agent.explore.args[0], state, experience).rows
        return rows, agent.update(state, experience, jax.random.key(1))[1]

    rows, metrics = update(state, experience)
    advantage = np.float64(rows.advantage[rows.weight > 0])
    expected = (0, 1) if normalize_advantage else (advantage.mean(), (advantage**2).mean())
    np.testing.assert_allclose((metrics["mean"], metrics["square"]), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("slope", "noise", "explained"), [(0.5, 0.0, 0.75), (1.0, 1.0, None)])
def test_explained_variance_covers_valid_rows_of_all_shards(slope, noise, explained):
    """Values explain half of the target, or have noise in the second environment, with higher targets.

    With gamma 0 a target is a reward. The value of the invalid row is far off.
    """
    agent, context = built(gamma=0.0)
    context = context._replace(
        policy=context.policy._replace(network=context.policy.network._replace(critic=lambda params, obs: obs[..., 0])),
        parallelism=Parallelism("shards", 2),
    )
    rng = np.random.default_rng(0)
    reward, valid = rng.normal([0, 5], size=(8, 2)), np.ones((8, 2), bool)
    value = slope * reward + 3 + noise * rng.normal(size=(8, 2)) * [0, 1]
    valid[3, 1], value[3, 1] = False, 1e3
    expected = 1 - (reward - value)[valid].var() / reward[valid].var()
    assert explained in (None, pytest.approx(expected))
    numbers = jnp.float32(value)[..., None], jnp.zeros((8, 2), int), jnp.float32(reward), jnp.ones((8, 2))
    acted = distributions.Categorical(jnp.zeros((8, 2, 2)))
    steps = Transition(*numbers, jnp.zeros((8, 2), bool), jnp.asarray(valid), acted)
    state = jax.jit(agent.init)(jax.random.key(0))

    def report(steps):
        batch = ppo.prepare(context, state, Rollout(steps, steps.obs[0], ()))
        epochs = sgd.epochs_of(context.config, context.parallelism, (None, None, None))
        _, moments = sgd._plan(epochs, batch, jax.random.key(0))
        return ppo.finalize(context, batch, batch.learner, ({}, jnp.float32(1)), moments)[1]["explained_variance"]

    deal = lambda x: x.reshape(8, 2, -1, *x.shape[2:])
    found = jax.vmap(report, in_axes=1, axis_name="shards")(jax.tree.map(deal, steps))
    np.testing.assert_allclose(found, [expected] * 2, atol=1e-5)


def test_reward_scale_excludes_reset_rows():
    """One row in 11 is a reset row. Its discounted sum must not enter the statistics."""
    env = probes.constant_reward(4)
    agent = ppo.make(
        configure(ppo.Config, rollout_length=32, hidden_sizes=(8,), rewards="normalized", gamma=0.9), env.spec, 10
    )
    state = jax.jit(agent.init)(jax.random.key(0))
    experience = probes.experience(env, agent, state)
    steps, sums, total = jax.device_get(experience.steps), [], np.zeros(4)
    assert (~steps.valid).any()
    for t in range(32):
        total = 0.9 * total + steps.reward[t]
        sums += list(total[steps.valid[t]])
        total = np.where(steps.last[t] | ~steps.valid[t], 0, total)
    after = jax.jit(lambda *given: ppo.prepare(agent.explore.args[0], *given).state)(state, experience)
    np.testing.assert_allclose(
        (after.rewards.stats.mean, after.rewards.stats.var), (np.mean(sums), np.var(sums)), rtol=1e-3
    )


@pytest.mark.parametrize("log_std", [-1.3, 0.0, 0.7])
def test_initial_policy_has_log_std_of_option(log_std):
    """The density of the mode of D independent Gaussians is (2 pi)^(-D / 2) times the product of 1 / std."""
    spec = types.EnvSpec("test", jax.ShapeDtypeStruct((4,), jnp.float32), types.Box((3,)), 2)
    agent = ppo.make(configure(ppo.Config, rollout_length=8, hidden_sizes=(8,), log_std_init=log_std), spec, 10)
    state = jax.jit(agent.init)(jax.random.key(0))
    pi = agent.explore(state, PolicyInput(jnp.ones((2, 4))), (), jnp.zeros((2, 3))).extras
    np.testing.assert_allclose(pi.log_prob(pi.mode()), -3 * (log_std + 0.5 * np.log(2 * np.pi)), rtol=1e-5)
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(1), 1, 20_000))
    inputs = PolicyInput(jnp.ones((20_000, 4)))
    actions = agent.explore(state, inputs, (), noise).action - agent.exploit(state, inputs, (), None).action
    np.testing.assert_allclose(actions.std(0), np.exp(log_std), rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("action", [types.Discrete(5), types.Box((2,))], ids=["discrete", "continuous"])
def test_explore_and_exploit_normalize_observations(action):
    """The oracle is an agent without normalization on (obs - mean) / std."""
    spec = types.EnvSpec("test", jax.ShapeDtypeStruct((4,), jnp.float32), action, 64)
    make = lambda normalize: ppo.make(
        configure(ppo.Config, rollout_length=8, hidden_sizes=(16,), normalize_observations=normalize), spec, 10
    )
    normalizing, plain = make(True), make(False)
    state = jax.jit(normalizing.init)(jax.random.key(0))
    state = state._replace(params=jax.tree.map(lambda x: 30 * x, state.params))  # so that actions differ
    stats = state.observations._replace(mean=jnp.full(4, 100.0), var=jnp.full(4, 4.0), num_rows=jnp.float32(1000))
    state, without = state._replace(observations=stats), state._replace(observations=None)
    standardized = jnp.asarray(np.random.default_rng(0).normal(size=(64, 4)), jnp.float32)
    raw = 100 + 2 * standardized
    noise = jax.tree.map(lambda x: x[0], normalizing.sample_noise(jax.random.key(1), 1, 64))
    for name in ("explore", "exploit"):
        act = lambda agent, state, obs: getattr(agent, name)(state, PolicyInput(obs), (), noise).action  # noqa: B023
        expected = act(plain, without, standardized)
        np.testing.assert_allclose(act(normalizing, state, raw), expected, rtol=1e-3, atol=1e-3, err_msg=name)
        assert not np.allclose(act(plain, without, raw), expected, atol=1e-2), name


@pytest.mark.slow
def test_target_kl_stops_update_early():
    """Without a target, all 16 gradient steps are made; with a tiny one, fewer than 4."""
    env = probes.best_action_of_observation(16)
    moved = []
    for target_kl in (None, 1e-9):
        config = configure(ppo.Config, rollout_length=16, hidden_sizes=(8,), learning_rate=1e-2, target_kl=target_kl)
        agent = ppo.make(config, env.spec, 10)
        state = jax.jit(agent.init)(jax.random.key(0))
        after, _ = jax.jit(agent.update)(state, probes.experience(env, agent, state), jax.random.key(1))
        moved.append(count_adam_steps(after.optimizer))
        assert int(after.optimizer[-1].count) == 16
    assert moved[0] == 16 and 1 <= moved[1] < 4


def count_adam_steps(optimizer):
    """The number of steps that Adam has taken: the count of its state, not of the schedule."""
    return int(optimizer[2].count)


@pytest.mark.parametrize(
    ("approx_kl", "scale", "expected"),
    [
        (0.03, 1.0, 1 / 1.5),  # more than twice the target
        (0.02, 1.0, 1.0),
        (0.005, 1.0, 1.0),
        (0.004, 1.0, 1.5),
        (0.03, 0.011, 0.01),  # 1e-3 times this is the least learning rate, 1e-5
        (0.004, 9.0, 10.0),  # and the largest, 1e-2
        (0.0, 2.0, 3.0),
    ],
)
def test_adapt_lr_changes_learning_rate_scale_by_measured_kl(approx_kl, scale, expected):
    found = optim.adapt_lr(AdaptiveKL(target=0.01), 1e-3, jnp.float32(scale), jnp.float32(approx_kl))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_adaptive_kl_keeps_kl_near_target():
    """Start from a learning rate that is far too large and from one that is far too small."""
    env, found = probes.continuous_action_of_observation(32), {}
    for learning_rate in (1e-2, 1e-5):
        config = configure(
            ppo.Config,
            rollout_length=16,
            hidden_sizes=(8,),
            learning_rate=learning_rate,
            schedule=dict(kind="kl", target=0.01),
        )
        agent = ppo.make(config, env.spec, 60)
        train = jax.jit(lambda key, agent=agent: loop.train(env, agent, loop.init(env, agent, key), 60))
        state, metrics = train(jax.random.key(0))
        found[learning_rate] = float(np.median(metrics["approx_kl"][30:])), float(metrics["learning_rate"][-1])
        np.testing.assert_allclose(metrics["learning_rate"][-1], learning_rate * state.agent.lr_scale, rtol=1e-5)
    assert all(0.003 < kl < 0.03 for kl, _ in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(("target", "scale"), [(1e-12, 1 / 1.5), (10.0, 1.5)])
def test_schedule_kl_compares_divergence_with_its_target(target, scale):
    """The second of two gradient steps adapts the rate: it falls for a tiny target, and rises for a large one."""
    env = probes.best_action_of_observation(16)
    options = dict(num_epochs=2, num_minibatches=1, learning_rate=1e-3, schedule=dict(kind="kl", target=target))
    agent = ppo.make(configure(ppo.Config, rollout_length=16, hidden_sizes=(8,), **options), env.spec, 10)
    state = agent.init(jax.random.key(0))
    after, metrics = jax.jit(agent.update)(state, probes.experience(env, agent, state), jax.random.key(1))
    np.testing.assert_allclose([after.lr_scale, metrics["learning_rate"]], [scale, scale * 1e-3], rtol=1e-6)


@pytest.mark.slow
def test_adaptive_kl_ignores_steps_after_early_stop():
    """A tiny target_kl stops at the second of 40 steps, the first at which the rate rises."""
    env = probes.best_action_of_observation(16)
    options = dict(num_epochs=10, num_minibatches=4, target_kl=1e-9, schedule=dict(kind="kl", target=0.01))
    config = configure(ppo.Config, rollout_length=16, hidden_sizes=(8,), learning_rate=1e-3, **options)
    agent = ppo.make(config, env.spec, 10)
    state = agent.init(jax.random.key(0))
    after, _ = jax.jit(agent.update)(state, probes.experience(env, agent, state), jax.random.key(1))
    np.testing.assert_allclose(after.lr_scale, 1.5, rtol=1e-6)


@pytest.mark.slow
def test_adaptive_kl_ignores_first_step_of_an_update():
    """Before it the policy is unchanged, so its divergence is rounding. The learning rate is above the usual range."""
    env = probes.continuous_action_of_observation(32)
    options = dict(num_epochs=1, num_minibatches=1, schedule=dict(kind="kl", target=0.01), hidden_sizes=(64, 64))
    agent = ppo.make(configure(ppo.Config, rollout_length=16, learning_rate=0.05, **options), env.spec, 20)
    train = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), 20))
    assert train(jax.random.key(0))[0].agent.lr_scale == 1


@pytest.mark.slow
@pytest.mark.parametrize("target_kl", [None, 3e-4])
def test_learning_rate_anneals_to_zero_with_and_without_early_stopping(target_kl):
    """After update u of U, the learning rate is (1 - u / U) times the initial one."""
    env, num_updates = probes.best_action_of_observation(16), 20
    config = configure(ppo.Config, rollout_length=16, hidden_sizes=(8,), learning_rate=1e-3, target_kl=target_kl)
    agent = ppo.make(config, env.spec, num_updates)
    state, update = jax.jit(agent.init)(jax.random.key(0)), jax.jit(agent.update)
    for u in range(1, num_updates + 1):
        experience = probes.experience(env, agent, state)
        state, metrics = update(state, experience, jax.random.key(u))
        np.testing.assert_allclose(metrics["learning_rate"], 1e-3 * (1 - u / num_updates), rtol=1e-5, atol=1e-10)
    stopped = count_adam_steps(state.optimizer) < num_updates * 16
    assert stopped == (target_kl is not None)


@pytest.mark.slow
def test_metrics_are_means_over_gradient_steps_before_early_stop():
    """A tiny target_kl stops at the second minibatch. The oracle is one epoch of two minibatches without it."""
    env = probes.best_action_of_observation(16)
    found = []
    for options in (dict(num_epochs=1), dict(num_epochs=3, target_kl=1e-9)):
        config = configure(
            ppo.Config, rollout_length=16, hidden_sizes=(8,), learning_rate=1e-2, num_minibatches=2, **options
        )
        agent = ppo.make(config, env.spec, 10)
        state = jax.jit(agent.init)(jax.random.key(0))
        experience = probes.experience(env, agent, state)
        found.append(jax.jit(agent.update)(state, experience, jax.random.key(1))[1])
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl"):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_ratio_is_one_before_first_gradient_step():
    """With one epoch of one minibatch, log_prob of rollout and learner agree, so approx_kl is 0."""
    env = probes.chain(8)
    for is_normalized in (False, True):
        config = configure(
            ppo.Config, rollout_length=16, num_epochs=1, num_minibatches=1, normalize_observations=is_normalized
        )
        agent = ppo.make(config, env.spec, 10)
        state, update = jax.jit(agent.init)(jax.random.key(0)), jax.jit(agent.update)
        for key in jax.random.split(jax.random.key(1), 2):
            state, metrics = update(state, probes.experience(env, agent, state), key)
            np.testing.assert_allclose(metrics["approx_kl"], 0, atol=1e-6)


@pytest.mark.parametrize(("kind", "squash"), [(k, s) for k in ("state_dependent", "gsde") for s in (False, True)])
def test_policy_option_chooses_distribution_of_actions(kind, squash):
    """A standard deviation is an output of the network, or a function of the 8 features that end its output."""
    agent, context = built(types.Box((2,)), policy=dict(kind=kind, squash=squash, log_std_init=-0.5))
    params = agent.init(jax.random.key(0)).params
    output = context.policy.network.act(params["network"], jnp.ones((4, 4)), ())[0]
    found = context.policy.head.make(output, params.get("log_std"))
    assert type(found) is (distributions.TanhGaussian if squash else distributions.Gaussian)
    more = np.asarray(output, float)[:, 2:]
    assert more.shape == (4, 2 if kind == "state_dependent" else 8)
    spread = more if kind == "state_dependent" else 0.5 * np.log((more**2).sum(-1, keepdims=True)) + np.zeros(2)
    np.testing.assert_allclose(found.log_std, spread - 0.5, rtol=1e-4)


@pytest.mark.parametrize(("policy", "kind"), [("gaussian", "Gaussian"), ("tanh", "TanhGaussian")])
def test_standard_deviation_of_simple_policies_is_parameter(policy, kind):
    agent, context = built(types.Box((2,)), policy=policy, log_std_init=-0.5)
    params = agent.init(jax.random.key(0)).params
    np.testing.assert_array_equal(params["log_std"], [-0.5, -0.5])
    assert type(context.policy.head.make(jnp.zeros((4, 2)), params["log_std"])) is getattr(distributions, kind)


def test_prepare_keeps_pre_tanh_sample_of_squashed_action():
    env = probes.continuous_action_of_observation(8)
    agent = ppo.make(configure(ppo.Config, rollout_length=16, policy="tanh", log_std_init=1.0), env.spec, 10)
    state = jax.jit(agent.init)(jax.random.key(0))
    experience = probes.experience(env, agent, state)
    rows = jax.jit(lambda *given: ppo.prepare(agent.explore.args[0], *given).rows)(state, experience)
    sample, action = np.asarray(rows.action), np.reshape(experience.steps.action, (-1, 1))
    np.testing.assert_allclose(np.tanh(sample), action, atol=1e-6)
    assert np.abs(sample - action).max() > 1


@pytest.mark.slow
def test_kl_of_squashed_actions_is_accurate_when_tanh_rounds_to_one():
    """With mean 12 before the tanh, each action rounds to 1. KL(old || new) is still (shift / std)^2 / 2."""
    num_rows, std, shift = 4096, 0.1, 0.02
    agent, context = built(types.Box((1,)), num_envs=num_rows, rollout_length=1, num_minibatches=1, policy="tanh")
    actor = lambda params, obs: jnp.full((len(obs), 1), params)
    step = lambda params, obs, carry: (actor(params, obs), carry)
    unroll = lambda params, obs, carry, reset: ((actor(params, obs), jnp.zeros(len(obs))), carry)
    network = context.policy.network._replace(step=step, act=step, unroll=unroll)
    context = context._replace(policy=context.policy._replace(network=network))
    obs, log_std = jnp.zeros((num_rows, 4)), jnp.full(1, np.log(std), jnp.float32)
    state = jax.jit(agent.init)(jax.random.key(0))._replace(params={"network": jnp.float32(12), "log_std": log_std})
    decision = ppo.explore(context, state, PolicyInput(obs), (), agent.sample_noise(jax.random.key(1), 1, num_rows)[0])
    np.testing.assert_allclose(decision.action, 1, atol=2e-7)  # the nearest float32, or that after it
    each = jnp.full(num_rows, 1 / num_rows)
    pi, sample = decision.extras
    batch = ppo.Batch(obs, sample, pi, pi.log_prob(sample), 0 * each, 0 * each + 1, 0 * each, each)
    moved = state.params | {"network": jnp.float32(12 - shift)}
    gradient, metrics = jax.grad(partial(ppo.loss, context), has_aux=True)(moved, batch)
    np.testing.assert_allclose(metrics["approx_kl"], (shift / std) ** 2 / 2, rtol=0.15)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    np.testing.assert_allclose(
        ppo.exploit(context, state, PolicyInput(obs), (), 0 * decision.action).action, 1, atol=2e-7
    )


@pytest.mark.slow
def test_dict_observation_has_separate_statistics_for_each_part():
    """The observation is a dict of the cue and of its sign as a bool. The agent still learns the best actions."""
    env = probes.best_action_of_observation(16)
    both = lambda timestep: timestep._replace(obs={"cue": timestep.obs, "bit": timestep.obs > 0})
    spec = env.spec._replace(obs={"cue": env.spec.obs, "bit": jax.ShapeDtypeStruct((1,), jnp.bool_)})
    dressed = env._replace(
        reset=lambda key: (lambda state, timestep: (state, both(timestep)))(*env.reset(key)),
        step=lambda state, action: (lambda state, timestep: (state, both(timestep)))(*env.step(state, action)),
        spec=spec,
    )
    agent, state, _ = learn(dressed, 60, normalize_observations=True)
    obs = {"cue": jnp.float32([[-1], [1]]), "bit": jnp.array([[False], [True]])}
    np.testing.assert_array_equal(agent.exploit(state, PolicyInput(obs), (), None).action, [0, 1])
    np.testing.assert_allclose(state.observations["bit"].mean, 0.5, atol=0.05)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(action=types.Box((2, 3))), r"^action: requires shape \[D\], got \[2, 3\]$"),
        (
            dict(num_envs=256, num_minibatches=3),
            "^num_minibatches: must divide the 2048 steps per update, got 3; use 2 or 4$",
        ),
        (
            dict(num_envs=2, parallelism=Parallelism(num_shards=2), num_minibatches=32),
            "^num_minibatches: must divide the 16 steps per update on each of 2 devices, got 32; use 16$",
        ),
    ],
)
def test_make_rejects_invalid_options(config, words):
    with pytest.raises(ValueError, match=words):
        built(**config)


def test_config_values_may_be_traced():
    """vmap over learning rates of a function that makes and trains the agent."""
    env = probes.best_action(8)

    def run(learning_rate):
        config = configure(ppo.Config, rollout_length=8, hidden_sizes=(8,), learning_rate=learning_rate)
        agent = ppo.make(config, env.spec, 10)
        return loop.train(env, agent, loop.init(env, agent, jax.random.key(0)), 2)[1]["learning_rate"][0]

    rates = jnp.float32([1e-4, 1e-3])
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(rates), 0.9 * rates, rtol=1e-5)  # after the first of ten updates


@pytest.mark.slow
def test_custom_objective_replaces_loss():
    """An objective of values only changes the critic's parameters and not the actor's."""

    def objective(context, params, batch):
        error = context.policy.network.critic(params["network"], batch.obs) - batch.target
        return (batch.weight * error**2).sum(), {"value_error": (batch.weight * jnp.abs(error)).sum()}

    env, config = probes.delayed_reward(4), configure(ppo.Config, rollout_length=8, hidden_sizes=(8,))
    agent = ppo.make(config, env.spec, 3, objective=objective)
    before = jax.jit(partial(loop.init, env, agent))(jax.random.key(0))
    after, metrics = jax.jit(lambda state: loop.train(env, agent, state, 3))(before)
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), before.agent.params, after.agent.params)["network"][
        "params"
    ]
    assert any(jax.tree.leaves(moved["critic_torso"])) and any(jax.tree.leaves(moved["critic_head"]))
    assert not any(jax.tree.leaves(moved["torso"])) and not any(jax.tree.leaves(moved["actor_head"]))
    assert "value_error" in metrics and "policy_loss" not in metrics


@pytest.mark.parametrize("num_steps", [3, 320, 2_400, 9_765])
def test_annealed_learning_rate_is_never_negative(num_steps):
    """Compiled as in training, 1 - count / num_steps rounds to less than 0 for these numbers of steps."""
    as_in_training = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    schedule = jax.jit(optim.schedule_of(2.5e-4, Linear(), num_steps), compiler_options=as_in_training)
    assert 0 <= schedule(jnp.int32(num_steps)) < 1e-10
    assert schedule(jnp.int32(num_steps - 1)) == pytest.approx(2.5e-4 / num_steps, rel=1e-3)
