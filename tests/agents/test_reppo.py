"""REPPO: a whole update against a plain program, targets and losses by hand calculation, and learning on probes.

The plain program follows Voelcker et al. 2025. Its networks, losses, returns and optimizer are written anew; only
random draws, the assignment of rows to minibatches and gradients of its losses come from the libraries.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax import ShapeDtypeStruct

from jaxrl_fast import loop
from jaxrl_fast.agents import reppo
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import minibatch, value_distributions
from jaxrl_fast.rl.distributions import TanhGaussian
from jaxrl_fast.types import Box, Discrete, EnvSpec, PolicyInput
from tests.helpers import probes
from tests.helpers.actor_critics import Adam, rollout_of

LITTLE = dict(rollout_length=4, num_minibatches=2, num_epochs=2, hidden_sizes=(8,), critic_width=4)
LITTLE |= dict(value=dict(kind="hl_gauss", atoms=7, v_min=-3.0, v_max=3.0), gamma=0.9, return_lambda=0.8)
OBS, TWO = ShapeDtypeStruct((3,), jnp.float32), Box((2,))


def make(action=TWO, num_envs=3, **options):
    return reppo.make(configure(reppo.Config, **LITTLE | options), EnvSpec("test", OBS, action, num_envs), 10)


def context_of(agent):
    return agent.explore.args[0]


# The plain program


def layer_norm(layer, x):
    mean = x.mean(-1, keepdims=True)
    y = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
    return jnp.maximum(y * layer["scale"][None] + layer["bias"][None], 0)


def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"][None]


def actor(params, obs):
    """Means and log standard deviations [B, 2] before the tanh."""
    own = params["network"]["params"]
    hidden = own["torso"]["mlp"]
    x = layer_norm(hidden["LayerNorm_0"], dense(hidden["Dense_0"], obs))
    output = dense(own["heads_0"], x)
    return output[:, :2], output[:, 2:]


def critic(params, obs, action):
    """Logits [B, 7], the embedding [B, 4], and the predicted reward and embedding [B, 5]."""
    own = params["params"]
    hidden = own["torso"]["mlp"]
    x = layer_norm(hidden["LayerNorm_0"], dense(hidden["Dense_0"], jnp.concatenate([obs, action], 1)))
    embedding = dense(own["embedding"], x)
    x = jnp.maximum(embedding, 0)
    heads = [
        layer_norm(own[f"{name}_hidden_norm"], dense(own[f"{name}_hidden"], x)) for name in ("value", "prediction")
    ]
    return dense(own["value"], heads[0]) + 40 * own["offset"][None], embedding, dense(own["prediction"], heads[1])


def log_density(mean, log_std, x):
    """Log-densities [B] of the actions tanh(x)."""
    z = (x - mean) / jnp.exp(log_std)
    return (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi) - 2 * (np.log(2) - x - jax.nn.softplus(-2 * x))).sum(-1)


def divergence(mean, log_std, other_mean, other_log_std):
    """KL of two normal distributions, summed over dimensions [B]."""
    variance, other = jnp.exp(2 * log_std), jnp.exp(2 * other_log_std)
    return (other_log_std - log_std + (variance + (mean - other_mean) ** 2) / (2 * other) - 0.5).sum(-1)


ATOMS = np.linspace(-3, 3, 7)


def expectation(logits):
    return (jax.nn.softmax(logits) * jnp.float32(ATOMS)[None]).sum(-1)


def soft_returns(steps, value, cost, gamma=0.9, lambda_=0.8):
    """Returns [T, N] by a plain loop, from Q(s', a') and alpha log pi(a'|s') of the true next states."""
    found = np.zeros(np.shape(value))
    num_steps, num_envs = found.shape
    for n in range(num_envs):
        later = value[-1][n]
        for t in reversed(range(num_steps)):
            keeps = 0.0 if steps.last[t, n] or t == num_steps - 1 else lambda_
            follows = (1 - keeps) * value[t][n] + keeps * later - cost[t][n]
            later = found[t, n] = steps.reward[t, n] + gamma * steps.discount[t, n] * follows
    return found


def clipped(gradient, bound=0.5):
    norm = np.sqrt(sum((np.asarray(x, float) ** 2).sum() for x in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda x: np.asarray(x, float) * min(1, bound / norm), gradient)


def plain_update(state, rollout, key):
    """Two epochs of two minibatches: the parameters afterwards."""
    params, steps = state.params, rollout.steps
    key_noise, key = jax.random.split(key)
    noise = jax.random.normal(key_noise, (4, 3, 3, 2))
    flat = lambda x: jnp.asarray(x).reshape(12, *np.shape(x)[2:])
    following = jnp.concatenate([steps.obs[1:], rollout.next_obs[None]])
    mean, log_std = actor(params.actor, flat(following))
    x = mean + jnp.exp(log_std) * flat(noise[:, :, 0])
    logits, embedding, _ = critic(params.critic, flat(following), jnp.tanh(x))
    cost = 0.01 * log_density(mean, log_std, x)
    target = flat(soft_returns(steps, *(np.asarray(x).reshape(4, 3) for x in (expectation(logits), cost))))
    old, obs, action, valid = (
        actor(params.actor, flat(steps.obs)),
        flat(steps.obs),
        flat(steps.action),
        flat(steps.valid),
    )
    ends = np.linspace(-3.5, 3.5, 8)
    below = scipy.stats.norm.cdf((ends[None] - np.clip(target, -3, 3)[:, None]) / 0.75)
    wanted = jnp.float32(np.diff(below) / (below[:, -1:] - below[:, :1]))
    adams = [Adam(x, 0.01, 1e-3) for x in params]

    @jax.jit
    @jax.grad
    def critic_error(critic_params, rows, weight):
        logits, _, predicted = critic(critic_params, obs[rows], action[rows])
        entropy = -(wanted[rows] * jax.nn.log_softmax(logits)).sum(-1)
        goal = jnp.concatenate([flat(steps.reward)[rows][:, None], embedding[rows]], axis=1)
        return (weight * (entropy + flat(steps.discount)[rows] * ((predicted - goal) ** 2).mean(-1))).sum()

    @jax.jit
    @jax.grad
    def actor_error(actor_params, critic_params, rows, weight, noise):
        mean, log_std = actor(actor_params, obs[rows])
        x = mean + jnp.exp(log_std) * noise
        log_pi, kl = log_density(mean, log_std, x), divergence(old[0][rows], old[1][rows], mean, log_std)
        alpha, beta = jnp.exp(actor_params["log_temperature"]), jnp.exp(actor_params["log_multiplier"])
        fixed = jax.lax.stop_gradient
        q = expectation(critic(critic_params, obs[rows], jnp.tanh(x))[0])
        loss = jnp.where(kl < 0.1, fixed(alpha) * log_pi - q, fixed(beta) * kl)
        loss += alpha * fixed(-log_pi + 1.0) - beta * fixed(kl - 0.1)
        return (weight * loss).sum()

    actor_params, critic_params = params
    for epoch, key_epoch in enumerate(jax.random.split(key, 2)):
        for rows in np.asarray(minibatch.assign(key_epoch, 12, 2)):
            weight = jnp.float32(valid[rows]) / max(np.sum(valid[rows]), 1)
            critic_params = adams[1].step(critic_params, clipped(critic_error(critic_params, rows, weight)))
            drawn = flat(noise[:, :, 1 + epoch])[rows]
            gradient = actor_error(actor_params, critic_params, rows, weight, drawn)
            actor_params = adams[0].step(actor_params, clipped(gradient))
    return actor_params, critic_params


def test_update_matches_plain_program():
    agent = make(learning_rate=0.01, optimizer=dict(epsilon=1e-3), normalize_observations=False)
    state, rollout, key = jax.jit(agent.init)(jax.random.key(0)), rollout_of(4, 3, 3, 2), jax.random.key(1)
    assert not rollout.steps.valid.all() and (rollout.steps.discount == 0).any()
    after, metrics = jax.jit(agent.update)(state, rollout, key)
    expected = plain_update(state, rollout, key)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, tuple(after.params), expected)
    assert all(np.isfinite(x) for x in metrics.values())


# Targets


def targets_of(rewards, discounts, lasts, **options):
    """The targets [T] of one environment, and Q(s', a') and alpha log pi(a'|s') [T] that they are made of."""
    agent = make(num_envs=1, num_minibatches=1, normalize_observations=False, **options)
    context, state = context_of(agent), jax.jit(agent.init)(jax.random.key(0))
    rollout = rollout_of(4, 1, 3, 2)
    column = lambda x: jnp.float32(x)[:, None]
    valid = np.concatenate([[True], ~np.array(lasts[:-1], bool)])
    steps = rollout.steps._replace(
        reward=column(rewards), discount=column(discounts), last=column(lasts) > 0, valid=jnp.asarray(valid)[:, None],
        extras=jax.random.normal(jax.random.key(2), (4, 1, 3, 2)),
    )  # fmt: skip
    rows = reppo.prepare(context, state, rollout._replace(steps=steps)).rows
    following = jnp.concatenate([steps.obs[1:], rollout.next_obs[None]])[:, 0]
    _, value, cost, _ = reppo.look_ahead(context, state.params, (following, following, steps.extras[:, 0, 0]))
    return np.asarray(rows.target), np.asarray(value), np.asarray(cost), rows


def test_terminal_step_has_neither_next_value_nor_entropy():
    """The authors' code subtracts the next entropy's cost also where the episode terminates."""
    target, *_, rows = targets_of([1, 2, 0, 1], [1, 0, 1, 1], [0, 1, 0, 0], temperature=5.0)
    np.testing.assert_allclose(target[1], 2, rtol=1e-6)
    np.testing.assert_array_equal(rows.weight, [1, 1, 0, 1])


def test_truncated_step_bootstraps_from_true_successor_and_is_learned_from():
    """The authors' code excludes it from the loss, since its environments replace the successor by the next reset."""
    target, value, cost, rows = targets_of([1, 2, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], temperature=0.5)
    np.testing.assert_allclose(target[1], 2 + 0.9 * (value[1] - cost[1]), rtol=1e-5)
    np.testing.assert_allclose(target[0], 1 + 0.9 * (0.2 * value[0] + 0.8 * target[1] - cost[0]), rtol=1e-5)
    assert rows.weight[1] == 1


def test_values_begin_near_zero():
    """The initial bias of the logits is that of a value of 0, far from the middle of these atoms."""
    agent = make(value=dict(kind="hl_gauss", atoms=151, v_min=0.0, v_max=150.0))
    context, state = context_of(agent), jax.jit(agent.init)(jax.random.key(0))
    output = context.critic.apply(state.params.critic, (jnp.ones((5, 3)), jnp.zeros((5, 2)))).value
    assert np.abs(value_distributions.mean(context.value_head, output)).max() < 2


def test_initial_bias_moves_40_times_as_far_as_other_parameters():
    """Adam's first step moves each number by the learning rate, so the biases of logits by 40 times as much."""
    agent = make(learning_rate=0.001, num_minibatches=1, num_epochs=1, normalize_observations=False)
    context, state = context_of(agent), jax.jit(agent.init)(jax.random.key(0))
    after, _ = jax.jit(agent.update)(state, rollout_of(4, 3, 3, 2), jax.random.key(1))

    def bias(params):
        """Logits of a critic whose last layer is 0."""
        own = params.critic["params"]
        plain = {**own, "value": jax.tree.map(jnp.zeros_like, own["value"])}
        return context.critic.apply({"params": plain}, (jnp.ones((1, 3)), jnp.zeros((1, 2)))).value[0]

    before, moved = bias(state.params), bias(after.params) - bias(state.params)
    below = scipy.stats.norm.cdf((np.linspace(-3.5, 3.5, 8)) / 0.75)
    np.testing.assert_allclose(before, 40 * np.diff(below) / (below[-1] - below[0]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.abs(moved), 0.04, rtol=0.01)


# The policy's loss


def rows_with(context, params, mean_shift, num=4):
    """Rows whose acting policy has means that are shifted from those of the policy."""
    obs = jax.random.normal(jax.random.key(3), (num, 3))
    pi = reppo.policy(context, params.actor, obs)
    zeros = jnp.zeros(num)
    return reppo.Batch(
        obs, jnp.zeros((num, 2)), zeros, zeros, zeros, jnp.zeros((num, 2)), jnp.full(num, 1 / num), jnp.zeros((num, 4)),
        TanhGaussian(pi.mean + mean_shift * jnp.exp(pi.log_std), pi.log_std),
    )  # fmt: skip


@pytest.mark.parametrize(("shift", "beyond"), [(0.3, False), (0.4, True)])
def test_row_beyond_kl_bound_only_moves_back(shift, beyond):
    """A shift of both means by s standard deviations has a divergence of s^2: 0.09 and 0.16; the bound is 0.1.

    Beyond it, the loss is the multiplier times the divergence. The multiplier's gradient is beta (bound - D), so that
    it rises beyond the bound, and that of the temperature is alpha (entropy - target).
    """
    agent = make(kl_multiplier=0.5, temperature=0.2)
    context, state = context_of(agent), jax.jit(agent.init)(jax.random.key(0))
    batch = rows_with(context, state.params, shift)
    of = partial(reppo.actor_loss, context, state.params.critic)
    gradient, metrics = jax.jit(jax.grad(of, has_aux=True))(state.params.actor, batch)
    np.testing.assert_allclose(metrics["kl"], shift**2, rtol=1e-4)
    if beyond:
        np.testing.assert_allclose(metrics["policy_loss"], 0.5 * shift**2, rtol=1e-4)
    np.testing.assert_allclose(gradient["log_multiplier"], 0.5 * (0.1 - shift**2), rtol=1e-3)
    np.testing.assert_allclose(gradient["log_temperature"], 0.2 * (metrics["entropy"] + 1), rtol=1e-4)


# Learning


@pytest.mark.slow
def test_learns_action_of_observation():
    """A probe whose best action is half of the observation, with value 1."""
    env, num_updates = probes.continuous_action_of_observation(16), 150
    config = configure(
        reppo.Config, rollout_length=8, num_minibatches=4, num_epochs=4, hidden_sizes=(32,), critic_width=32,
        learning_rate=3e-3, gamma=probes.GAMMA, value=dict(kind="hl_gauss", atoms=51, v_min=-5.0, v_max=5.0),
        target_entropy=-2.0,
    )  # fmt: skip
    agent = reppo.make(config, env.spec, num_updates)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)
    state, metrics = jax.jit(run, compiler_options=probes.QUICK)(jax.random.key(0))
    greedy = agent.exploit(state.agent, PolicyInput(jnp.float32([[-1], [1]])), (), None).action
    np.testing.assert_allclose(greedy, [[-0.5], [0.5]], atol=0.15)
    assert metrics["kl"][-20:].max() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mean", "hl_gauss"])
def test_truncation_bootstraps_value(kind):
    """Reward 1 forever has value 10. A value of 6.5 would mean that truncation counts as termination."""
    env, num_updates = probes.constant_reward(16), 200
    env = env._replace(spec=env.spec._replace(action=Box((1,))))
    value = dict(kind=kind) | (dict(atoms=51, v_min=0.0, v_max=20.0) if kind == "hl_gauss" else {})
    config = configure(
        reppo.Config, rollout_length=16, num_minibatches=4, num_epochs=4, hidden_sizes=(32,), critic_width=32,
        learning_rate=3e-3, gamma=probes.GAMMA, value=value, temperature=1e-4, kl_bound=1.0,
    )  # fmt: skip
    agent = reppo.make(config, env.spec, num_updates)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)[1]
    metrics = jax.jit(run, compiler_options=probes.QUICK)(jax.random.key(0))
    np.testing.assert_allclose(metrics["q_value"][-20:].mean(), 10, atol=0.5)


# Rejected options


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (dict(action=Discrete(2)), "reppo: requires continuous actions, got Discrete"),
        (dict(num_minibatches=5), "num_minibatches: must divide the 12 steps per update, got 5; use 4 or 6"),
        (dict(value=dict(v_min=9.0, v_max=3.0)), r"value.v_min: must be less than v_max \(3.0\), got 9.0"),
    ],
    ids=["discrete", "minibatches", "bounds"],
)
def test_make_rejects_options(options, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        make(**options)
