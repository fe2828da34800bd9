"""SAC: targets, losses, temperature and REDQ subsets by hand calculation, whole updates by a plain implementation."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxrl_fast.agents import actor_critic, sac
from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.sac import SAC
from jaxrl_fast.rl import off_policy
from tests.helpers import actor_critics, slow
from tests.helpers.actor_critics import (
    Adam,
    assert_close,
    buffer_of,
    context_of,
    critic_tables,
    learner_of,
    make,
    outputs,
    read,
    rollout_of,
    sample_of,
    tables_of,
    td_target,
    with_priorities,
)

FIXED = dict(learn_temperature=False)
LOG_PI_0 = -0.5 * np.log(2 * np.pi)  # log-density of the action 0 = tanh(0) where x is standard normal: -.918939


def log_density(mean, log_std, x):
    """Log density of the action tanh(x) in float64: log N(x) minus log d tanh / dx (appendix C)."""
    mean, log_std, x = (np.asarray(y, float) for y in (mean, log_std, x))
    return scipy.stats.norm(mean, np.exp(log_std)).logpdf(x) - np.log1p(-(np.tanh(x) ** 2))


# The policy


@pytest.mark.parametrize(("mean", "log_std"), [(0.3, -1.0), (0.0, 0.5), (4.0, -0.5), (-5.0, -2.0)])
def test_log_prob_matches_density_of_sampled_actions(mean, log_std):
    """The oracle is p(a) = phi(z) dz / da on a grid of noise z, also for |a| > 0.999. The density integrates to 1."""
    context, params = tables_of("sac"), actor_critic.Params(jnp.float32([[mean, log_std]]), None)
    z = np.linspace(-6, 6, 4001)
    obs, noise = jnp.zeros((4001, 1)), jnp.float32(z)[:, None]
    pi = sac.policy(context, params.actor, obs)
    action = sac.explore(context, params, obs, noise)[:, 0]
    exact = np.tanh(mean + np.exp(log_std) * z)
    np.testing.assert_allclose(action, exact, rtol=1e-5, atol=1e-6)
    density = scipy.stats.norm.pdf(z) / np.gradient(exact, z, edge_order=2)
    found = np.asarray(pi.log_prob(pi.sample_from(noise)), float)
    np.testing.assert_allclose(found, np.log(density), atol=2e-3)
    np.testing.assert_allclose(np.trapezoid(np.exp(found), exact), 1, atol=1e-3)
    assert (np.abs(exact) > 0.999).any() == (abs(mean) >= 4 or log_std > 0)


def test_log_prob_sums_over_action_dimensions():
    context = tables_of("sac", num_actions=2)
    table = jnp.float32([[0.5, -1.0, 0.2, -0.7]])  # two means, then two logarithms of standard deviations
    pi = sac.policy(context, table, jnp.zeros((1, 1)))
    expected = log_density(0.5, 0.2, 0.1) + log_density(-1.0, -0.7, -2.0)
    np.testing.assert_allclose(pi.log_prob(jnp.float32([[0.1, -2.0]])), [expected], rtol=1e-5)


def test_policy_clips_log_std():
    context = tables_of("sac")
    pi = sac.policy(context, jnp.float32([[0, 50], [0, -50], [0, 1]]), jnp.arange(3.0)[:, None])
    np.testing.assert_allclose(pi.sample_from(jnp.ones((3, 1)))[:, 0], [np.exp(2), np.exp(-20), np.e], rtol=1e-5)


# Targets


def target_of(context, learner, batch, noise):
    return jax.jit(partial(td_target, "sac", context))(learner, batch, jnp.float32(noise)[:, None], jax.random.key(0))


def learner_with(context, value, target_value=None, slope=0.0, actor=None, log_temperature=None):
    """Without `actor`, the policy before the tanh is standard normal in all states."""
    critic = critic_tables(value, slope)
    num_states = critic["value"].shape[1]
    actor = np.zeros((num_states, 2)) if actor is None else actor
    target = None if target_value is None else critic_tables(target_value, slope)
    return learner_of(context, actor, critic, target_critic=target, log_temperature=log_temperature)


@pytest.mark.parametrize("learned", [True, False])
def test_target_equals_hand_calculation(learned):
    # noise 0: a' = 0, log pi = -.918939; min(3, 2) + .5 * .918939 = 2.459469; .5 + .9 * 2.459469 = 2.713522
    # noise 1: x = 1, log pi = -.918939 - .5 - log(1 - tanh(1)^2) = -.551377; .5 + .9 * (2 + .275689) = 2.548120
    # discount 0: the reward alone, and no entropy
    context = tables_of("sac", learn_temperature=learned, temperature=0.9 if learned else 0.5)
    log_temperature = jnp.log(jnp.float32(0.5)) if learned else None
    learner = learner_with(context, [[0, 99], [0, 99]], [[0, 3], [0, 2]], log_temperature=log_temperature)
    batch = sample_of([0] * 3, [0] * 3, [0.5] * 3, [0.9, 0.9, 0], [1] * 3)
    found = target_of(context, learner, batch, [0, 1, 0])
    np.testing.assert_allclose(found, [2.713522, 2.548120, 0.5], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("terminates", [False, True])
def test_three_step_target_includes_entropy_of_last_state_only(terminates):
    # gamma .5, Q'(s, .) = 2 s, so that V'(s) = 2 s + .918939 at temperature 1; rewards 1 2 3 4; the fourth step ends
    # row 0: 2.75 + .125 V'(3);  row 2: 5 + .25 V'(4) if truncated;  row 3: 4 + .5 V'(4)
    context = tables_of("sac", n_step=3, rollout_length=6, size=12, batch_size=1, gamma=0.5, **FIXED)
    ring = buffer_of(
        context, range(6), [0] * 6, [1, 2, 3, 4, 0, 9], [1, 1, 1, 1 - terminates, 1, 1], [0, 0, 0, 1, 0, 0],
        [1, 1, 1, 1, 0, 1],
    )  # fmt: skip
    learner = learner_with(context, [2.0 * np.arange(6)] * 2)
    found = target_of(context, learner, read(context, ring, [0, 2, 3]), [0, 0, 0])
    value = lambda s: 2 * s - LOG_PI_0
    expected = [2.75 + value(3) / 8, 5, 4] if terminates else [2.75 + value(3) / 8, 5 + value(4) / 4, 4 + value(4) / 2]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_target_samples_next_actions_from_current_policy():
    # a' = tanh(.5 + e^-1 * 2) = .84; Q' = 1 + 2 a'
    context = tables_of("sac", **FIXED, temperature=1e-9)
    learner = learner_with(context, [[1.0], [1.0]], slope=2.0, actor=[[0.5, -1.0]])
    found = target_of(context, learner, sample_of([0], [0], [0], [1], [0]), [2])
    np.testing.assert_allclose(found, [1 + 2 * np.tanh(0.5 + 2 / np.e)], rtol=1e-5)


# Ensembles (Chen et al. 2021)


@pytest.mark.parametrize("num_target_critics", [1, 2, 4])
def test_redq_target_is_minimum_over_random_critic_subset(num_target_critics):
    """A batch shares one subset. Each subset of that size occurs about equally often, and no other occurs."""
    context = tables_of("sac", num_critics=4, num_target_critics=num_target_critics, temperature=1e-9, **FIXED)
    learner = learner_with(context, np.full((4, 4), 9.0), 1 - np.eye(4))  # at state c only critic c has value 0
    batch = sample_of([0] * 4, [0] * 4, [0] * 4, [1] * 4, range(4))
    target = lambda key: td_target("sac", context, learner, batch, jnp.zeros((4, 1)), key)
    found = np.asarray(jax.jit(jax.vmap(target))(jax.random.split(jax.random.key(0), 600)))
    subset, count = np.unique(np.round(found, 5) == 0, axis=0, return_counts=True)
    assert (subset.sum(1) == num_target_critics).all() and len(subset) == math.comb(4, num_target_critics)
    assert scipy.stats.chisquare(count).pvalue > 1e-3 if len(subset) > 1 else count == 600


@pytest.mark.parametrize(("num_target_critics", "value", "slope"), [(None, 1.0, 4.0), (2, 2.0, 2.0)])
def test_policy_loss_uses_minimum_of_critics_or_mean_for_redq(num_target_critics, value, slope):
    # Q = 1 + 4 a, 2 - a, 3 + 3 a at a = 0: the least is the first; the mean is 2 + 2 a.
    # d/dx of alpha log pi(tanh x) - Q with x = mean + noise 0: log pi grows by 2 tanh(0) = 0, so it is -slope.
    context = tables_of("sac", num_critics=3, num_target_critics=num_target_critics, temperature=0.5, **FIXED)
    learner = learner_with(context, [[1], [2], [3]], slope=[[[4.0]], [[-1]], [[3]]])
    loss = partial(sac.policy_loss, context, learner, jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.ones(1))
    (found, _), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(learner.params.actor)
    np.testing.assert_allclose(found, 0.5 * LOG_PI_0 - value, rtol=1e-5)
    np.testing.assert_allclose(gradient[0, 0], -slope, rtol=1e-5)


# Losses


def test_policy_loss_equals_hand_calculation():
    # row 0: noise 0, temperature .5: .5 * -.918939 - min(1, 2) = -1.459469, weight 1
    # row 1: noise 1: .5 * -.551377 - (1 + 0) = -1.275688, weight 0: not counted
    context = tables_of("sac", target_entropy=-2.0)
    learner = learner_with(context, [[1.0], [2.0]], log_temperature=jnp.log(jnp.float32(0.5)))
    arguments = jnp.zeros((2, 1)), jnp.float32([[0], [1]]), jnp.float32([1, 0])
    loss, (excess, metrics, _) = jax.jit(partial(sac.policy_loss, context))(learner, *arguments, learner.params.actor)
    np.testing.assert_allclose(loss, -1.459469, rtol=1e-5)
    np.testing.assert_allclose(excess, 0.918939 + 2, rtol=1e-5)
    np.testing.assert_allclose(metrics["policy_loss"], [-1.459469, -1.275688], rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], [0.918939, 0.551377], rtol=1e-5)


def test_policy_gradient_flows_through_sampled_action():
    """The oracle is finite differences in float64 of alpha log pi(tanh(m + e^l z)) - Q(tanh(m + e^l z))."""
    context = tables_of("sac", temperature=0.3, **FIXED)
    m, log_std, z = 0.4, -0.3, 1.3
    learner = learner_with(context, [[1.0], [9.0]], slope=2.0, actor=[[m, log_std]])
    loss = partial(sac.policy_loss, context, learner, jnp.zeros((1, 1)), jnp.float32([[z]]), jnp.ones(1))
    found = jax.jit(jax.grad(loss, has_aux=True))(learner.params.actor)[0]

    def plain(m, log_std):
        x = m + np.exp(log_std) * z
        return 0.3 * log_density(m, log_std, x) - (1 + 2 * np.tanh(x))

    step = 1e-5
    expected = [
        (plain(m + step, log_std) - plain(m - step, log_std)) / (2 * step),
        (plain(m, log_std + step) - plain(m, log_std - step)) / (2 * step),
    ]
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)


@pytest.mark.slow
def test_default_target_entropy_is_minus_number_of_action_dimensions():
    for num_actions in (1, 3):
        context = tables_of("sac", num_actions=num_actions)
        critic = critic_tables([[0.0], [0.0]], num_actions=num_actions)
        learner = learner_of(context, np.zeros((1, 2 * num_actions)), critic, log_temperature=jnp.float32(0))
        noise = jnp.zeros((1, num_actions))
        _, (excess, *_) = sac.policy_loss(context, learner, jnp.zeros((1, 1)), noise, jnp.ones(1), learner.params.actor)
        np.testing.assert_allclose(excess, num_actions * (1 - LOG_PI_0), rtol=1e-5)


# Gradient steps


def keys_of(seed):
    return jax.random.split(jax.random.key(seed))


def fill_buffer(context):
    """A replay buffer with four steps of one environment, of which three can be read."""
    return buffer_of(context, range(4), [0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4], [1] * 4, [0] * 4, [1] * 4)


@pytest.mark.slow
def test_temperature_falls_above_target_entropy_and_rises_below_it():
    """Adam's first step changes the log temperature by its learning rate. No entropy here exceeds 100 in size.

    The gradient is the entropy minus its target, for any temperature.
    """
    context = tables_of("sac", learning_rate=0.01)

    @jax.jit
    def learn(target, log_temperature):
        changed = context._replace(config=replace(context.config, target_entropy=target))
        learner = learner_with(changed, np.zeros((2, 4)), log_temperature=log_temperature)
        return sac.gradient_step(changed, fill_buffer(changed), jnp.int32(0), keys_of(0), learner, off_policy.init())

    for temperature in (0.01, 10.0):
        for target, sign in ((-100.0, -1), (100.0, 1)):
            before = np.log(temperature)
            after, _, _, metrics = learn(jnp.float32(target), jnp.float32(before))
            np.testing.assert_allclose(after.params.log_temperature, before + sign * 0.01, rtol=1e-4)
            entropy = metrics["entropy"].sum() / metrics["weight"].sum()
            moment = after.optimizer.log_temperature[-2].mu[0]
            np.testing.assert_allclose(10 * moment, entropy - target, rtol=1e-4)
            found = metrics["temperature"].sum() / metrics["weight"].sum()
            np.testing.assert_allclose(found, temperature, rtol=1e-4)


@pytest.mark.parametrize("learned", [True, False])
def test_init_uses_temperature_option(learned):
    context = tables_of("sac", temperature=0.3, learn_temperature=learned)
    context = context._replace(critic=context.critic._replace(init=lambda key: critic_tables([[0.0]])))
    learner = sac.init(context, jax.random.key(0))
    np.testing.assert_allclose(sac.temperature(context, learner.params), 0.3, rtol=1e-6)
    assert (learner.params.log_temperature is not None) == learned
    assert learner.target_params.actor is learner.target_params.log_temperature is None


@pytest.mark.slow
def test_importance_weights_apply_to_critic_loss_only():
    """Priorities 1 and 4 with final exponent 1 give weights 1/16 and 1/64 for the critics, 1/16 for the others.

    Two of four rows can be sampled. There Q is 1 and -1, the action is 0, and rewards are 2 and -16.
    The errors are 1 and 3, and 17 and 15.
    """
    config = dict(replay=dict(kind="prioritized", size=16, alpha=0.5, beta=1.0), batch_size=16)
    context = tables_of("sac", target_entropy=-3.0, **config)
    buffer = buffer_of(context, range(4), [0] * 4, [1, 2, 3, -16], [1, 0, 1, 0], [0, 1, 0, 1], [1] * 4)
    keys = keys_of(1)
    buffer, count = with_priorities(buffer, keys, [1, 4], 16)
    assert count[1] + count[3] == 16 and 3 <= count[1] <= 4
    value = np.broadcast_to([[1.0], [-1.0]], (2, 4))
    actor = np.tile([0.0, -20.0], (4, 1))  # a tiny standard deviation, so that actions are 0
    learner = learner_with(context, value, slope=2.0, actor=actor, log_temperature=jnp.log(jnp.float32(1e-6)))
    after, buffer, _, metrics = jax.jit(partial(sac.gradient_step, context))(
        buffer, jnp.int32(100), keys, learner, off_policy.init()
    )
    first_moment = lambda part, *shape: 10 * np.asarray(part[-2].mu).reshape(shape)
    of_critics = first_moment(after.optimizer.critic, 2, 2, 4)[1]  # slopes, then values, as their names are sorted
    weight = np.array([count[1], count[3] / 4]) / 16
    np.testing.assert_allclose(of_critics[:, [1, 3]], weight * [[-1, 17], [-3, 15]], rtol=1e-4)
    of_mean = first_moment(after.optimizer.actor, 4, 2)[:, 0]
    np.testing.assert_allclose(of_mean, -2 * np.array([0, count[1], 0, count[3]]) / 16, rtol=1e-3, atol=1e-5)
    # each entropy is log(2 pi) / 2 + 1/2 z^2 - 20, and the tanh adds little
    entropies = np.asarray(metrics["entropy"]) / np.asarray(metrics["weight"])
    np.testing.assert_allclose(first_moment(after.optimizer.log_temperature, 1), entropies.mean() + 3, rtol=1e-4)
    np.testing.assert_allclose(buffer.priorities.levels[0][:4], [0, np.sqrt(2), 0, 4], rtol=1e-4)  # means 2 and 16


# A whole update


def plain_update(context, state, rollout, all_keys, learned, moves):
    """Algorithm 1 of Haarnoja et al. 2018 (second paper), step by step. Only random draws come from the agent."""
    config, size = context.config, context.config.batch_size
    buffer = jax.jit(context.replay.add)(state.replay, rollout.steps)
    actor, critic, log_alpha = state.learner.params
    target = state.learner.target_params.critic
    log_alpha = log_alpha if learned else np.log(np.float32(config.temperature))
    rates = config.learning_rate, config.critic_learning_rate, config.learning_rate
    optimizers = [Adam(x, rate, config.optimizer.epsilon) for x, rate in zip((actor, critic, log_alpha), rates)]

    def act(actor, obs, noise):
        """Actions [B, D] and their log-probabilities [B] (equation 26 of the first paper)."""
        mean, log_std = outputs(actor, obs)[:, :2], outputs(actor, obs)[:, 2:]
        u = mean + jnp.exp(log_std) * noise
        normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
        return jnp.tanh(u), (normal - jnp.log(1 - jnp.tanh(u) ** 2)).sum(-1)

    @jax.jit
    def drawn(buffer, keys):
        batch, found, _ = context.replay.sample(buffer, keys[0], size, config.gamma, 1.0)
        key_noise, _ = jax.random.split(keys[1])
        return batch, found, actor_critic.sample_normal(context, key_noise, 2)

    @jax.jit
    def td_target_of(actor, target, log_alpha, batch, noise):
        action, log_pi = act(actor, batch.next_obs, noise)
        value = actor_critics.values(target, batch.next_obs, action)
        return batch.reward + batch.discount * (jnp.minimum(value[0], value[1]) - jnp.exp(log_alpha) * log_pi)

    @jax.jit
    @jax.grad
    def gradient_of_error(critic, batch, weight, goal):
        return (weight[None] * (actor_critics.values(critic, batch.obs, batch.action) - goal[None]) ** 2).sum() / 2

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient_of_loss(actor, critic, log_alpha, batch, weight, noise):
        action, log_pi = act(actor, batch.obs, noise)
        value = actor_critics.values(critic, batch.obs, action)
        loss = jnp.exp(log_alpha) * log_pi - jnp.minimum(value[0], value[1])
        return (weight * loss).sum(), (weight * (-log_pi - config.target_entropy)).sum() if learned else 0.0

    for number, keys in enumerate(all_keys, start=1):
        batch, found, (noise_target, noise_policy) = drawn(buffer, keys)
        weight = found / size
        goal = td_target_of(actor, target, log_alpha, batch, noise_target)
        critic = optimizers[1].step(critic, gradient_of_error(critic, batch, weight, goal))
        if number % config.policy_delay == 0:
            gradient, excess = gradient_of_loss(actor, critic, log_alpha, batch, weight, noise_policy)
            actor = optimizers[0].step(actor, gradient)
            if learned:
                log_alpha = optimizers[2].step(log_alpha, excess)  # entropy above its target: alpha falls
        if number in moves:
            target = actor_critics.average(critic, target, config.target.tau)
    return (actor, critic, log_alpha), target


@pytest.mark.parametrize(
    ("learned", "delay", "interval", "moves"),
    [(True, 2, 1, (1, 2, 3)), slow(False, 2, 4, (2,))],
)
def test_update_matches_plain_implementation(learned, delay, interval, moves):
    """Three gradient steps, one per two environment steps. Target critics differ from the critics at the start."""
    config = dict(target_entropy=-1.5) if learned else FIXED
    agent = make(
        "sac", num_envs=3, num_obs=3, num_actions=2, tau=0.3, gamma=0.9, learning_rate=0.03, replay_ratio=0.5,
        critic_learning_rate=0.02, optimizer=dict(epsilon=1e-3), temperature=0.4, interval=interval,
        policy_delay=delay, **config,
    )  # fmt: skip
    state, rollout, key = jax.jit(agent.init)(jax.random.key(0)), rollout_of(4, 3, 3, 2), jax.random.key(1)
    apart = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), state.learner.target_params)
    params = state.learner.params
    params = params._replace(actor=jax.tree.map(lambda x: 0.3 * x, params.actor))  # for the oracle's log(1 - tanh^2)
    state = state._replace(learner=state.learner._replace(params=params, target_params=apart))
    after, metrics = jax.jit(agent.update)(state, rollout, key)
    assert int(metrics["gradient_steps"]) == 3  # (4 * 3 - 2 * 3) / 2
    keys = jax.random.split(key, (off_policy.max_grad_steps(context_of(agent).ratio), 2))
    params, target = plain_update(context_of(agent), state, rollout, keys[:3], learned, moves)
    assert_close(after.learner.params[:2], params[:2])
    assert_close(after.learner.target_params.critic, target)
    if learned:
        assert_close(after.learner.params.log_temperature, params[2])
        assert abs(params[2] - np.log(0.4)) > 0.02
    else:
        assert after.learner.params.log_temperature is after.learner.optimizer.log_temperature is None
        np.testing.assert_allclose(metrics["temperature_sum"], 3 * 0.4, rtol=1e-5)
    assert after.learner.target_params.actor is None


# Rejected options and warnings


@pytest.mark.parametrize(("num_critics", "num_target_critics"), [(2, 3), (1, 2)])
def test_make_rejects_more_target_critics_than_critics(num_critics, num_target_critics):
    words = rf"^num_target_critics: must be at most num_critics \({num_critics}\), got {num_target_critics}; use more "
    with pytest.raises(ValueError, match=words):
        make("sac", num_critics=num_critics, num_target_critics=num_target_critics)


def test_config_warns_about_positive_target_entropy():
    (line,) = SAC(target_entropy=3.0).warnings(8)
    assert line.startswith("target_entropy: ") and "got 3" in line and line.endswith("use a negative number")
    assert SAC(target_entropy=-3.0).warnings(8) == SAC().warnings(8) == ()


def test_config_warns_about_tau_of_1_with_short_target_update_interval():
    (line,) = configure(SAC, tau=1.0).warnings(8)
    assert line.startswith("target.interval: ")
    assert configure(SAC, tau=1.0, interval=1000).warnings(8) == ()
