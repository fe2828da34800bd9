"""actor_critic: what SAC, TD3 and DDPG share: actions, gradient step counts, optimizers, learning, rejected options."""

from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple

import gymnax.environments.spaces as gymnax_spaces
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_fast import envs, loop
from jaxrl_fast.agents import actor_critic
from jaxrl_fast.kernels import build
from jaxrl_fast.options.declare import configure
from jaxrl_fast.parallel import program
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.rl import off_policy
from jaxrl_fast.rl.distributions import TanhGaussian
from jaxrl_fast.types import Box, Discrete, Parallelism, PolicyInput
from tests.helpers import probes, slow
from tests.helpers.actor_critics import (
    MODULES,
    RULES,
    agent_of,
    agent_with,
    buffer_of,
    context_of,
    critic_tables,
    learner_of,
    make,
    rollout_of,
    state_of,
    tables_of,
)
from tests.helpers.agents import network_of
from tests.helpers.trees import same_bits

each_algorithm = pytest.mark.parametrize("algo", MODULES)
each_rule = pytest.mark.parametrize("algo", ["sac", "td3"])  # DDPG is a setting of TD3
LOUD = {"sac": {}, "td3": dict(std=1.0), "ddpg": dict(std=1.0)}


# Actions


def constant_network(outputs):
    """A policy network with the same outputs everywhere."""
    outputs = jnp.float32(outputs)
    answer = lambda params, obs, noise=(): jnp.broadcast_to(outputs, (*obs.shape[:-1], len(outputs)))
    return network_of(lambda key: (), answer, lambda key, shape: ())


def outputs_of(algo, mean, log_std):
    return (*mean, *[log_std] * len(mean)) if algo == "sac" else mean


def actor_of(algo, mean=(0.0,), log_std=0.0, num_envs=1, **config):
    """Return an agent whose policy has this mean before the tanh for all observations, and a learner to act with."""
    context = tables_of(algo, num_envs=num_envs, num_actions=len(mean), **LOUD[algo] | config)
    context = context._replace(actor=constant_network(outputs_of(algo, mean, log_std)))
    learner = learner_of(context, (), critic_tables([[0.0]]))
    return agent_with(algo, context), learner


@each_algorithm
def test_greedy_action_is_tanh_of_policy_mean(algo):
    agent, learner = actor_of(algo, (0.5, -3.0), num_envs=2)
    decision = agent.exploit(state_of(learner), PolicyInput(jnp.zeros((2, 1))), (), None)
    np.testing.assert_allclose(decision.action, np.tanh([[0.5, -3]] * 2), rtol=1e-6)


@pytest.mark.slow
@each_rule
@settings(max_examples=10)
@given(st.integers(0, 70), st.sampled_from([1, 3, 7]), st.integers(1, 3))
def test_actions_are_random_before_first_gradient_step(algo, learning_starts, length, n_step):
    """Each step is checked, also if the first gradient step falls within a rollout. The policy's action is 1/4."""
    num_envs = 3
    config = dict(learning_starts=learning_starts, rollout_length=length, n_step=n_step, size=1000)
    config |= dict(noise="ou") if algo == "sac" else dict(std=0.0)
    agent, learner = actor_of(algo, (np.arctanh(0.25),), log_std=-20.0, num_envs=num_envs, **config)
    first = max(learning_starts, (n_step + 1) * num_envs)
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_envs, 1)), agent.initial_carry)
    noise = agent.sample_noise(jax.random.key(0), 7, num_envs)  # of which `length` are used
    act = lambda update, noise: agent.explore(
        state_of(learner, update), PolicyInput(jnp.zeros((num_envs, 1))), carry, noise
    )
    for update in (0, first // (length * num_envs), first // (length * num_envs) + 1):
        action = jax.vmap(partial(act, update))(noise).action[:length, :, 0]
        steps_before = np.repeat((update * length + np.arange(length)) * num_envs, num_envs).reshape(length, num_envs)
        np.testing.assert_array_equal(np.abs(action - 0.25) < 1e-6, steps_before >= first)


@each_rule
def test_learning_starts_counts_environment_steps_of_all_shards(algo):
    """Two environments on each of 4 shards take 8 environment steps at once; 20 precede the first gradient step."""
    noise = {} if algo == "sac" else dict(std=0.0)
    config = dict(num_envs=2, num_shards=4, learning_starts=20, batch_size=8, log_std=-20.0)
    agent, learner = actor_of(algo, (np.arctanh(0.25),), **config | noise)
    noise = agent.sample_noise(jax.random.key(0), 4, 2)
    act = lambda noise: agent.explore(state_of(learner), PolicyInput(jnp.zeros((2, 1))), (), noise).action
    by_policy = np.abs(jax.vmap(act)(noise)[..., 0] - 0.25) < 1e-6
    np.testing.assert_array_equal(by_policy.all(1), [False, False, False, True])  # after 0, 8, 16, 24
    np.testing.assert_array_equal(by_policy.any(1), by_policy.all(1))


@cache
def rollout_with_noise(algo, theta, warm_up, num_envs=200, num_steps=33, **config):
    """Return a rollout of episodes with 10 steps and a reset row each, and its noise.

    With `warm_up` all actions are random, without it none.
    """
    env = with_continuous_actions(probes.constant_reward(num_envs))
    noise = {} if theta == 1.0 else dict(noise=dict(kind="ou", theta=theta))
    config = noise | dict(size=10**6, learning_starts=10**6 if warm_up else 0, n_step=1) | config
    agent, learner = actor_of(algo, num_envs=num_envs, **config)
    state = state_of(learner, num_updates=100)
    noise = agent.sample_noise(jax.random.key(2), num_steps, num_envs)
    return probes.experience(env, agent, state, seed=1, num_steps=num_steps).steps, noise.normal


def with_continuous_actions(env):
    """Give a probe a continuous action space. Its rewards must not depend on the action."""
    return env._replace(spec=env.spec._replace(action=Box((1,))))


@pytest.mark.parametrize("theta", [1.0, 0.15])
@each_rule
def test_warm_up_actions_are_uniform_and_uncorrelated(algo, theta):
    """At the first step of an episode and at all others, for white and for correlated exploration noise."""
    action = np.asarray(rollout_with_noise(algo, theta, warm_up=True)[0].action, float)[..., 0]
    for rows in (action, action[:1], action[11:12]):
        assert scipy.stats.kstest(rows.ravel(), "uniform", args=(-1, 2)).pvalue > 1e-3
    correlation = np.corrcoef(action[1:].ravel(), action[:-1].ravel())[0, 1]
    assert abs(correlation) < 4 / np.sqrt(action.size)


@pytest.mark.parametrize("theta", [1.0, 0.15])
@each_rule
def test_exploration_noise_process_resets_at_episode_start(algo, theta):
    """The oracle is a numpy loop: x = 0 at episode start, then x' = (1 - theta) x + sqrt(theta (2 - theta)) n."""
    steps, normal = rollout_with_noise(algo, theta, warm_up=False, num_envs=3)
    x, expected, before = np.zeros((3, 1)), [], np.zeros(3, bool)
    for n, last in zip(np.asarray(normal, float), np.asarray(steps.last)):
        x = (1 - theta) * x + np.sqrt(theta * (2 - theta)) * n
        expected.append(np.tanh(x) if algo == "sac" else np.clip(x, -1, 1))
        x[before] = 0  # the action of a reset is ignored, and an episode begins after it
        before = last
    assert steps.last.sum() == 9
    np.testing.assert_allclose(steps.action, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("warm_up", [True, False])
@each_algorithm
def test_actions_are_within_action_bounds(algo, warm_up):
    noise = {} if algo == "sac" else dict(std=5.0)
    agent, learner = actor_of(algo, (2.0,), 2.0, 500, learning_starts=10**4 * warm_up, size=10**4, **noise)
    noise = agent.sample_noise(jax.random.key(0), 1, 500)
    state, inputs = state_of(learner, 2), PolicyInput(jnp.zeros((500, 1)))
    action = np.asarray(agent.explore(state, inputs, (), jax.tree.map(lambda x: x[0], noise)).action)
    assert np.abs(action).max() <= 1 and action.dtype == np.float32
    assert (action == 1).any() != warm_up and action.std() > 0.4


class AsymmetricBounds:
    """A gymnax environment with action bounds [-1, 3] and [0, 10]. The observation is the last action."""

    class Params(NamedTuple):
        max_steps_in_episode: int = 5

    default_params = Params()

    def action_space(self, params):
        return gymnax_spaces.Box(np.float32([-1, 0]), np.float32([3, 10]), (2,))

    def reset_env(self, key, params):
        return jnp.zeros(2), {"time": 0}

    def step_env(self, key, state, action, params):
        time = state["time"] + 1
        return action, {"time": time}, 1.0, False, {}

    def is_truncated(self, state, params):
        return state["time"] >= params.max_steps_in_episode


@pytest.mark.parametrize("num_updates", [0, 100], ids=["random", "by the policy"])
@each_rule
def test_env_gets_scaled_actions_and_replay_buffer_stores_normalized_actions(algo, num_updates):
    env = envs.make(AsymmetricBounds(), 16)
    assert env.spec.action == Box((2,))
    config = dict(num_envs=16, rollout_length=8, size=256, learning_starts=256)
    agent, learner = actor_of(algo, (1.0, -1.0), **config)
    steps = probes.experience(env, agent, state_of(learner, num_updates)).steps
    action, given = np.asarray(steps.action[:-1], float), np.asarray(steps.obs[1:])
    low, high = np.array([-1, 0]), np.array([3, 10])
    followed = np.asarray(steps.valid[:-1])
    np.testing.assert_allclose(given[followed], (low + (action + 1) / 2 * (high - low))[followed], rtol=1e-5, atol=1e-5)
    assert np.abs(action).max() <= 1 and action.min() < -0.9 and action.max() > 0.9
    buffer = context_of(make(algo, num_obs=2, num_actions=2, **config)).replay
    stored = buffer.add(buffer.init(), steps).action
    np.testing.assert_array_equal(stored[:8], steps.action)


# Gradient step counts and training data


class Counter(NamedTuple):
    count: jax.Array


@pytest.mark.parametrize(("num_envs", "ratio"), [(7, 0.3), (256, 2)])
def test_number_of_gradient_steps_follows_replay_ratio(num_envs, ratio):
    """After each update the total is floor(ratio (steps - first)). A stub counts gradient steps."""
    context = tables_of(
        "td3", num_envs=num_envs, rollout_length=2, learning_starts=3 * num_envs + 1, replay_ratio=ratio,
        size=8 * num_envs,
    )  # fmt: skip

    def gradient_step(context, buffer, num_updates, keys, learner, counts):
        count = Counter(learner.optimizer.critic[-1].count + 1)
        optimizer = learner.optimizer._replace(critic=(count,))
        return learner._replace(optimizer=optimizer), buffer, counts, {"weight": jnp.ones(1)}

    optimizer = actor_critic.Params(None, (Counter(jnp.int32(0)),))
    init = lambda context, key: actor_critic.Learner(None, None, optimizer)
    agent = actor_critic.make_agent(context, init, None, None, gradient_step)
    update, state, made = jax.jit(agent.update), agent.init(jax.random.key(0)), []
    for u in range(6):
        state, metrics = update(state, rollout_of(2, num_envs, 1, 1), jax.random.key(u))
        made.append(int(state.learner.optimizer.critic[-1].count))
        assert int(metrics["gradient_steps"]) == made[-1] - (made[-2] if u else 0)
    steps = 2 * num_envs * np.arange(1, 7)
    first = 3 * num_envs + 1
    assert made == [int(Fraction(str(ratio)) * max(0, int(s) - first)) for s in steps]


class Compiled(NamedTuple):
    """Compiled functions of an agent with four environments."""

    init: object
    update: object
    context: actor_critic.Context


@cache
def compiled(algo, kind="uniform"):
    agent = make(
        algo, num_envs=4, num_obs=3, num_actions=2, learning_rate=0.01, critic_learning_rate=0.01, n_step=2,
        replay=kind, num_critics=3, replay_ratio=0.125, num_updates=3,
    )  # fmt: skip
    return Compiled(jax.jit(agent.init), jax.jit(agent.update), context_of(agent))


def learn_rollouts(algo, kind="uniform", poison=None, seed=0):
    """Return state and metrics after updates of 0, 2 and 2 gradient steps. `poison` overwrites the reset rows."""
    made = compiled(algo, kind)
    state, metrics, ignored = made.init(jax.random.key(seed)), [], 0
    for u in range(3):
        rollout = rollout_of(4, 4, 3, 2, seed=u)
        steps = rollout.steps
        if poison is not None:
            spoil = lambda x, steps=steps: jnp.where(steps.valid.reshape(4, 4, *(1,) * (x.ndim - 2)), x, poison)
            rollout = rollout._replace(steps=steps._replace(action=spoil(steps.action), reward=spoil(steps.reward)))
        state, more = made.update(state, rollout, jax.random.key(u))
        metrics.append(more)
        ignored += int((~steps.valid).sum())
    assert ignored >= 4 and sum(int(more["gradient_steps"]) for more in metrics) == 4  # floor((48 - 3 * 4) / 8)
    return state, metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "kind", "poison"), [("td3", "uniform", np.nan), ("td3", "uniform", 1e6), ("sac", "prioritized", np.nan)]
)
def test_reset_rows_do_not_affect_learning(algo, kind, poison):
    """Actions and rewards of reset rows are overwritten. Learner, priorities and metrics stay bit-identical."""
    clean, spoiled = (learn_rollouts(algo, kind, x) for x in (None, poison))
    learned = lambda of: (of[0].learner, of[0].replay[1:] if kind == "prioritized" else (), of[1])
    assert same_bits(learned(clean), learned(spoiled))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(learned(clean)))


@pytest.mark.slow
def test_observation_statistics_exclude_reset_rows(algo="td3"):
    """The oracle is an agent without normalization that learns from observations normalized with numpy."""
    options = dict(num_envs=4, num_obs=3, num_actions=2, replay_ratio=0.5)
    normalizing, plain = (make(algo, **options, normalize_observations=on) for on in (True, False))
    rollout = rollout_of(4, 4, 3, 2)
    obs, valid = 5 * np.asarray(rollout.steps.obs) + [3, -2, 100], np.asarray(rollout.steps.valid)
    mean, var = obs[valid].mean(0), obs[valid].var(0)
    by_numpy = np.float32(np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10))

    def after(agent, obs):
        steps = rollout.steps._replace(obs=jnp.float32(obs))
        return jax.jit(lambda: agent.update(agent.init(jax.random.key(0)), rollout._replace(steps=steps), key)[0])()

    key = jax.random.key(1)
    state, wanted = after(normalizing, obs), after(plain, by_numpy)
    np.testing.assert_allclose(state.learner.observations.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(state.learner.observations.var, var, rtol=1e-4)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, state.learner.params, wanted.learner.params)
    act = lambda agent, state, obs: agent.exploit(state, PolicyInput(jnp.float32(obs[0])), (), None).action
    close(act(normalizing, state, obs), act(plain, wanted, by_numpy))


@pytest.mark.slow
def test_observations_in_replay_are_normalized_by_current_statistics(algo="sac"):
    """No gradient step follows the first of two rollouts. The oracle is an agent that is given normalized ones."""
    options = dict(num_envs=4, num_obs=3, num_actions=2, replay_ratio=0.5, learning_starts=16)
    normalizing, plain = (make(algo, **options, normalize_observations=on) for on in (True, False))
    rollouts = [rollout_of(4, 4, 3, 2, seed) for seed in (0, 1)]
    obs = np.stack([5 * np.asarray(rollout.steps.obs) + shift for rollout, shift in zip(rollouts, (0, 20))])
    seen = obs[np.stack([rollout.steps.valid for rollout in rollouts])]
    by_numpy = np.clip((obs - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), -10, 10)

    def after(agent, obs):
        state, update = jax.jit(agent.init)(jax.random.key(0)), jax.jit(agent.update)
        for i, rollout in enumerate(rollouts):
            steps = rollout.steps._replace(obs=jnp.float32(obs[i]))
            state, metrics = update(state, rollout._replace(steps=steps), jax.random.key(i))
            assert (metrics["gradient_steps"] > 0) == (i == 1)
        return state.learner.params

    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), after(normalizing, obs), after(plain, by_numpy)
    )


def kernels(params):
    return [x for path, x in jax.tree.leaves_with_path(params) if "kernel" in jax.tree_util.keystr(path)]


@pytest.mark.slow
@each_rule
def test_each_critic_is_trained_and_critics_differ(algo):
    learner = learn_rollouts(algo)[0].learner
    before = compiled(algo).init(jax.random.key(0)).learner
    for now, then in zip(kernels(learner.params.critic), kernels(before.params.critic)):
        for i, j in ((0, 1), (1, 2), (0, 2)):
            assert np.abs(now[i] - now[j]).max() > 0.05
            assert np.abs((now - then)[i] - (now - then)[j]).max() > 1e-3
        assert (np.abs(now - then).max((1, 2)) > 1e-3).all()


@each_rule
def test_init_copies_parameters_to_target_networks(algo):
    learner = compiled(algo).init(jax.random.key(0)).learner
    assert same_bits(learner.params.critic, learner.target_params.critic)
    assert same_bits(learner.params.actor if algo == "td3" else None, learner.target_params.actor)


@pytest.mark.slow
@each_rule
def test_training_is_bitwise_reproducible_and_depends_on_seed(algo):
    assert same_bits(learn_rollouts(algo), learn_rollouts(algo))
    one, other = (learn_rollouts(algo, seed=i)[0].learner.params for i in (0, 1))
    assert all(np.abs(x - y).max() > 0.1 for x, y in zip(kernels(one), kernels(other)))


# Optimizers


@pytest.mark.parametrize("part", ["actor", "critic", "log_temperature"])
@each_rule
def test_gradient_transform_runs_before_clipping_and_adam(algo, part):
    """Adam's first moment is a tenth of the gradient (3, 4). Scaled by 5, it is clipped to norm 10: (6, 8)."""
    optimizer = lambda transform: getattr(
        context_of(make(algo, transform=transform, max_grad_norm=10.0)).optimizer, part
    )
    for transform, expected in ((None, [0.3, 0.4]), (optax.scale(0.0), [0, 0]), (optax.scale(5.0), [0.6, 0.8])):
        rule, tree = optimizer(transform), {"a": jnp.float32([3.0]), "b": jnp.float32([4.0])}
        change, state = rule.update(tree, rule.init(tree), tree)
        np.testing.assert_allclose(optax.tree_utils.tree_get(state, "mu"), expected, rtol=1e-5)
        assert all((x == 0).all() for x in jax.tree.leaves(change)) == (expected[0] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("algo", [slow("sac"), "td3"])
def test_zeroing_transform_leaves_all_parameters_unchanged(algo):
    delay = {} if algo == "sac" else dict(policy_delay=1)
    context = tables_of(algo, transform=optax.scale(0.0), **delay)
    actor = np.full((4, 2 if algo == "sac" else 1), 0.3)
    temperature = jnp.float32(0.5) if algo == "sac" else None
    critic = critic_tables(np.ones((2, 4)), 2.0)
    targets = None if algo == "sac" else actor
    learner = learner_of(context, actor, critic, targets, log_temperature=temperature)
    buffer = buffer_of(context, range(4), [0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4], [1] * 4, [0] * 4, [1] * 4)
    step = jax.jit(partial(RULES[algo].gradient_step, context))
    after, _, _, metrics = step(buffer, jnp.int32(0), jax.random.split(jax.random.key(0)), learner, off_policy.init())
    assert same_bits(after.params, learner.params) and metrics["td_loss"].sum() > 0
    assert int(after.optimizer.critic[-1].count) == int(after.optimizer.actor[-1].count) == 1


@pytest.mark.parametrize("part", ["actor", "critic", "log_temperature"])
@pytest.mark.parametrize("delay", [1, 3])
def test_annealed_learning_rates_reach_zero_at_last_gradient_step(part, delay):
    """96 gradient steps: (100 updates * 4 steps - 16) / 4. For a constant gradient Adam's step is the learning rate."""
    config = dict(schedule="linear", learning_rate=0.5, critic_learning_rate=0.25, learning_starts=16)
    context = context_of(make("sac", policy_delay=delay, **config))
    rule, rate = getattr(context.optimizer, part), 0.25 if part == "critic" else 0.5
    gradient, steps = jnp.ones(1), 96 // (1 if part == "critic" else delay)

    def once(state, _):
        change, state = rule.update(gradient, state, gradient)
        return state, -change[0]

    found = jax.lax.scan(once, rule.init(gradient), length=steps + 1)[1]
    np.testing.assert_allclose(found, rate * (1 - np.arange(steps + 1) / steps), rtol=1e-4, atol=1e-6)


@each_algorithm
def test_make_counts_gradient_steps_of_whole_run(algo):
    assert off_policy.num_gradient_steps(context_of(make(algo, learning_starts=16)).ratio, 100) == 96


# Learning


def trained(algo, env, num_updates, seed=0, **config):
    """Train; return functions for greedy actions of obs [B, D] and the critics' values of (obs, action [B, 1])."""
    defaults = dict(
        size=4096, batch_size=32, replay_ratio=0.5, learning_starts=256, hidden_sizes=(32,), tau=0.05,
        gamma=probes.GAMMA, learning_rate=3e-3, critic_learning_rate=1e-2,
    )  # fmt: skip
    defaults |= {} if algo == "sac" else dict(std=0.3)
    agent = agent_of(algo, env, num_updates, **defaults | config)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)
    state, metrics = jax.jit(run, compiler_options=probes.QUICK)(jax.random.key(seed))
    assert all(np.isfinite(x).all() for name, x in metrics.items() if name not in ("return_min", "return_max"))
    params = state.agent.learner.params
    greedy = lambda obs: agent.exploit(state.agent, PolicyInput(jnp.float32(obs)), (), None).action
    return greedy, lambda *inputs: context_of(agent).critic.apply(params.critic, tuple(map(jnp.float32, inputs)))


CALM = {"sac": dict(learn_temperature=False, temperature=0.02), "td3": {}, "ddpg": {}}


@each_algorithm
@pytest.mark.slow
def test_agent_learns_continuous_action(algo):
    greedy, value = trained(algo, probes.continuous_action(8), 150, **CALM[algo])
    np.testing.assert_allclose(greedy([[1]]), [[0.5]], atol=0.1)
    np.testing.assert_allclose(value([[1], [1]], [[0.5], [0]])[0], [1, 0.75], atol=0.1)


@pytest.mark.slow
@each_algorithm
def test_agent_learns_continuous_action_that_depends_on_observation(algo):
    """SAC's target entropy of -1 is about the entropy at a standard deviation of 0.1."""
    greedy, _ = trained(algo, probes.continuous_action_of_observation(8), 150)
    np.testing.assert_allclose(greedy([[-1], [1]]), [[-0.5], [0.5]], atol=0.15)


STEADY = {"sac": dict(learn_temperature=False, temperature=1e-4), "td3": {}, "ddpg": {}}


@pytest.mark.parametrize("n_step", [1, 3])
@each_algorithm
@pytest.mark.slow
def test_truncation_bootstraps_value(algo, n_step):
    """Reward 1 forever has value 10. A value of 6.5 would mean that truncation counts as termination."""
    env = with_continuous_actions(probes.constant_reward(8))
    _, value = trained(algo, env, 300, n_step=n_step, schedule="linear", **STEADY[algo])
    np.testing.assert_allclose(value([[1], [1]], [[0.5], [-0.5]]), 10, atol=0.3)


@pytest.mark.parametrize("n_step", [1, 3])
@each_algorithm
@pytest.mark.slow
def test_termination_does_not_bootstrap(algo, n_step):
    env = with_continuous_actions(probes.constant_reward_terminal(8))
    _, value = trained(algo, env, 300, n_step=n_step, schedule="linear", **STEADY[algo])
    expected = [(1 - 0.9 ** (10 - t)) / 0.1 for t in range(10)]
    np.testing.assert_allclose(value(np.eye(10), np.zeros((10, 1)))[0], expected, atol=0.4)


@each_rule
@pytest.mark.slow
def test_vmapped_seeds_equal_single_seed_runs_and_differ(algo):
    """Equal to rounding over the first 20 gradient steps; later, rounding may change which rows are sampled."""
    env = probes.continuous_action_of_observation(4)
    agent = agent_of(algo, env, 6, learning_starts=16)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), 6)
    keys = jax.random.split(jax.random.key(0), 3)
    together, metrics = jax.jit(jax.vmap(run), compiler_options=probes.QUICK)(keys)
    alone = jax.jit(run, compiler_options=probes.QUICK)
    assert (metrics["gradient_steps"].sum(1) == 20).all()  # (6 * 16 - 16) / 4
    for i in (0, 2):
        state, _ = alone(keys[i])
        one = jax.tree.map(lambda x, i=i: x[i], together.agent)
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), one.learner.params, state.agent.learner.params
        )
    learned = kernels(together.agent.learner.params)
    assert all(np.abs(x[i] - x[j]).max() > 0.1 for x in learned for i, j in ((0, 1), (1, 2), (0, 2)))


WORKERS = {
    "sac": ("sac", {}),
    "td3": ("td3", {}),
    "redq": ("sac", dict(replay="prioritized", num_critics=3, num_target_critics=2, n_step=3)),
    "sac of scaled rewards": ("sac", dict(rewards="scaled", noise="held", policy_delay=2)),
    "td3 by priority": ("td3", dict(replay="prioritized")),
    "sac with a teacher": (
        "sac",
        dict(bonus=dict(kind="distill", data=lambda inputs: TanhGaussian(inputs.obs, -jnp.ones(1)))),
    ),
}


@pytest.mark.parametrize("variant", WORKERS)
@pytest.mark.skipif(not build.is_available("allreduce"), reason="no C compiler here")
@pytest.mark.slow
def test_gradient_workers_learn_same_parameters_as_one_device(variant):
    """Two gradient workers match one device to rounding, and each other bit for bit.

    Two shards collect different data and have bit-identical learners.
    """
    algo, options = WORKERS[variant]

    def learn(placement):
        axis_name = placement.axis_name if placement.num_shards > 1 else None
        env = probes.continuous_action_of_observation(4 // placement.num_shards)
        env = env._replace(parallelism=Parallelism(axis_name, placement.num_shards, placement.num_grad_workers))
        agent = agent_of(algo, env, 4, rollout_length=16, size=256, learning_starts=32, **options)
        built = program.build(env, agent, 4, placement)
        state, metrics = built.chunk(built.init(np.int32(3)), np.int32(4))
        parts = lambda i: jax.tree.map(lambda x: np.asarray(x.addressable_shards[i].data), state.agent.learner)
        return [parts(i) for i in range(placement.num_devices)], jax.device_get(metrics)

    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    (alone,), expected = learn(Placement())
    (one, other), metrics = learn(Placement(num_grad_workers=2))
    assert same_bits(one, other)
    jax.tree.map(close, (one, metrics), (alone, expected))
    (one, other), metrics = learn(Placement(num_shards=2))
    assert same_bits(one, other) and int(metrics["gradient_steps"].sum()) == 56  # (4 * 64 - 32) / 4
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(one))


# Rejected options


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            dict(action=Discrete(2)),
            r": requires continuous actions, got Discrete\(num=2\) of test; try dqn, ppo or sac$",
        ),
        (dict(action=Box((2, 2))), r": requires actions of shape \[D\], got \[2, 2\] of test; flatten them$"),
        (dict(batch_size=65), r"^replay.size: must hold one batch of 65, got 64; use a larger buffer or a smaller "),
        (dict(learning_starts=65), r"^learning_starts: must be at most replay.size \(64\), got 65; use 64 or fewer$"),
        (dict(num_envs=8, n_step=9), r"^replay.size: must be at least 128 for n_step 9 .* got 64; use 128 or more$"),
        (dict(replay_ratio=4e-11), r"^replay_ratio: cannot be counted exactly .*; use 9\.5367431640625e-10$"),
        (dict(num_updates=2**31, replay_ratio=4), "gradient steps, got"),
    ],
)
def test_make_rejects_invalid_options_in_one_line(config, words):
    with pytest.raises(ValueError, match=words) as refusal:
        make("td3", **config)
    assert "\n" not in str(refusal.value)


@each_algorithm
def test_default_options_match_papers(algo):
    config = MODULES[algo].Config()
    papers = dict(size=1_000_000, batch_size=256, tau=0.005, gamma=0.99, learning_rate=3e-4, replay_ratio=1.0)
    assert configure(MODULES[algo].Config, **papers) == config
    assert config.critic_learning_rate == 3e-4 and config.network.hidden_sizes == (256, 256)
    assert config.network.activation == "relu"
    own = {
        "sac": dict(num_critics=2, interval=1, learn_temperature=True, target_entropy=None),
        "td3": dict(num_critics=2, policy_delay=2, target_noise=0.2, target_noise_clip=0.5, std=0.1),
        "ddpg": dict(num_critics=1, policy_delay=1, target_noise=0.0, std=0.1),
    }[algo]
    assert configure(MODULES[algo].Config, **own) == config
