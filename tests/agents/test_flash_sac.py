"""SAC with the parts of FlashSAC: whole updates against a plain program, constraints, statistics and rejected options.

The plain program follows Kim et al. 2026 and the order of ours: critics, policy, temperature, targets. Its networks,
losses and optimizer are written anew; only random draws and gradients of its losses come from the libraries.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import loop
from jaxrl_fast.agents import actor_critic
from jaxrl_fast.rl import off_policy
from jaxrl_fast.types import PolicyInput
from tests.helpers import actor_critics, probes
from tests.helpers.actor_critics import Adam, average, context_of, make, rollout_of
from tests.helpers.trees import same_bits

ATOMS = dict(kind="c51", atoms=5, v_min=-2.0, v_max=2.0)
FLASH = dict(
    network=dict(kind="flash", hidden_sizes=(4,)), value=ATOMS, rewards="scaled", target_sigma=0.15, temperature=0.01,
    std_bounds="tanh", noise="held", tau=0.3, policy_delay=2, schedule=dict(kind="cosine", final=0.5),
)  # fmt: skip
SIZES = dict(num_envs=3, num_obs=3, num_actions=2, gamma=0.9, learning_rate=0.03, critic_learning_rate=0.03)
SIZES |= dict(replay_ratio=0.5, optimizer=dict(epsilon=1e-3))


def flash(**options):
    return make("sac", **SIZES | FLASH | options)


# The plain program


def normalize(layer, stats, x, training):
    """Batch normalization of rows [B, F], and its running statistics afterwards."""
    mean, var = stats["mean"], stats["var"]
    if training:
        mean, var = x.sum(0) / len(x), ((x - x.sum(0)[None] / len(x)) ** 2).sum(0) / len(x)
        unbiased = ((x - mean[None]) ** 2).sum(0) / (len(x) - 1)
        stats = {"mean": 0.99 * stats["mean"] + 0.01 * mean, "var": 0.99 * stats["var"] + 0.01 * unbiased}
    return (x - mean[None]) / jnp.sqrt(var + 1e-5)[None] * layer["scale"][None] + layer["bias"][None], stats


def forward(params, stats, x, training):
    """One block: outputs [B, K], and running statistics."""
    layers, stats, after = params["params"]["torso"]["mlp"], stats["torso"]["mlp"], {}

    def norm(i, x):
        y, after[f"BatchNorm_{i}"] = normalize(layers[f"BatchNorm_{i}"], stats[f"BatchNorm_{i}"], x, training)
        return y

    x = norm(0, x) @ layers["Linear_0"]["kernel"]
    y = jnp.maximum(norm(1, x @ layers["Linear_1"]["kernel"]), 0)
    x = x + jnp.maximum(norm(2, y @ layers["Linear_2"]["kernel"]), 0)
    x = x / jnp.sqrt((x**2).sum(1)[:, None] / x.shape[1] + 1e-6) * layers["RMSNorm_0"]["scale"][None]
    head = params["params"]["heads_0"]
    return x @ head["kernel"] + head["bias"][None], {"torso": {"mlp": after}}


def unit(params):
    """The parameters with weights of norm 1 for each output, in numpy."""
    found = jax.tree.map(np.array, params)
    layers = found["params"]["torso"]["mlp"]
    for layer in [*layers.values(), found["params"]["heads_0"]]:
        if "kernel" in layer:
            layer["kernel"] /= np.linalg.norm(layer["kernel"], axis=-2, keepdims=True)
        else:
            squares = sum((x**2).sum(-1, keepdims=True) for x in layer.values())
            for name in layer:
                layer[name] = layer[name] * np.sqrt(layer[name].shape[-1] / squares)
    return found


def act(output, noise):
    """Actions [B, D] and their log-probabilities [B]; log standard deviations lie between -10 and 2."""
    mean, log_std = output[:, :2], -10 + 6 * (1 + jnp.tanh(output[:, 2:]))
    u = mean + jnp.exp(log_std) * noise
    normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    return jnp.tanh(u), (normal - 2 * (np.log(2) - u - jax.nn.softplus(-2 * u))).sum(-1)


SUPPORT = np.linspace(-2, 2, 5)


def project(atom, weight):
    """Probabilities [B, 5] of weighted atoms [B, 5], each split between its neighbors (Bellemare et al. 2017)."""
    found = np.zeros(atom.shape)
    for row, (places, shares) in enumerate(zip(np.clip(atom, -2, 2), weight)):
        for place, share in zip(places + 2, shares):  # the step between atoms is 1
            low = min(int(np.floor(place)), 3)
            found[row, low] += share * (low + 1 - place)
            found[row, low + 1] += share * (place - low)
    return found


def plain_update(context, state, rollout, all_keys):
    """Return parameters, target parameters and statistics after some gradient steps."""
    config, size, one = context.config, context.config.batch_size, lambda tree, i: jax.tree.map(lambda x: x[i], tree)
    buffer, learner = jax.jit(context.replay.add)(state.replay, rollout.steps), state.learner
    (actor, critic, log_alpha), target = learner.params, learner.target_params.critic
    of_actor, of_critic, of_target = learner.actor_stats, learner.batch_stats, learner.target_stats
    adams = [Adam(x, None, config.optimizer.epsilon) for x in (actor, critic, log_alpha)]
    rate = lambda step, steps: 0.03 * (0.5 + 0.25 * (1 + np.cos(np.pi * step / steps)))
    steps = off_policy.num_gradient_steps(context.ratio, context.num_updates)
    entropy = 2 * 0.5 * np.log(2 * np.pi * np.e * 0.15**2)
    divisor = scale_of(rollout, config.gamma)

    @jax.jit
    def drawn(buffer, keys):
        batch, found, _ = context.replay.sample(buffer, keys[0], size, config.gamma, 1.0)
        key_noise, _ = jax.random.split(keys[1])
        return batch, found, actor_critic.sample_normal(context, key_noise, 2)

    @jax.jit
    def look_ahead(actor, of_actor, target, of_target, batch, noise):
        next_action, log_pi = act(forward(actor, of_actor, batch.next_obs, False)[0], noise)
        rows = [jnp.concatenate(x, 1) for x in ((batch.obs, batch.action), (batch.next_obs, next_action))]
        inputs = jnp.concatenate(rows)
        each = [forward(one(target, i), one(of_target, i), inputs, True) for i in range(2)]
        stats = jax.tree.map(lambda *x: jnp.stack(x), *(after for _, after in each))
        return inputs, log_pi, jnp.stack([jax.nn.softmax(x[size:]) for x, _ in each]), stats

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def critic_error(critic, stats, inputs, wanted, weight):
        found = [forward(one(critic, i), one(stats, i), inputs, True) for i in range(2)]
        losses = sum(-(wanted * jax.nn.log_softmax(output[:size])).sum(-1) for output, _ in found)
        return (weight * losses).sum(), jax.tree.map(lambda *x: jnp.stack(x), *(after for _, after in found))

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def policy_error(actor, stats, critic, critic_stats, log_alpha, batch, weight, noise):
        output, after = forward(actor, stats, jnp.concatenate([batch.obs, batch.next_obs]), True)
        action, log_pi = act(output[:size], noise)
        inputs = jnp.concatenate([batch.obs, action], 1)
        each = [forward(one(critic, i), one(critic_stats, i), inputs, False)[0] for i in range(2)]
        value = jnp.minimum(*((jax.nn.softmax(x) * jnp.float32(SUPPORT)[None]).sum(-1) for x in each))
        return (weight * (jnp.exp(log_alpha) * log_pi - value)).sum(), (after, (weight * (-log_pi - entropy)).sum())

    for number, keys in enumerate(all_keys, start=1):
        batch, found, (noise_target, noise_policy) = drawn(buffer, keys)
        weight = found / size
        inputs, log_pi, chance, of_target = look_ahead(actor, of_actor, target, of_target, batch, noise_target)
        chance = np.asarray(chance)
        least = (chance @ SUPPORT).argmin(0)
        soft = SUPPORT[None] - float(np.exp(log_alpha)) * np.asarray(log_pi)[:, None]
        atom = np.asarray(batch.reward)[:, None] / divisor + np.asarray(batch.discount)[:, None] * soft
        wanted = jnp.float32(project(atom, chance[least, np.arange(size)]))
        gradient, of_critic = critic_error(critic, of_critic, inputs, wanted, weight)
        adams[1].rate = rate(number - 1, steps)
        critic = unit(adams[1].step(critic, gradient))
        if number % 2 == 0:
            arguments = of_actor, critic, of_critic, log_alpha, batch, weight, noise_policy
            gradient, (of_actor, excess) = policy_error(actor, *arguments)
            adams[0].rate = adams[2].rate = rate(2 * (number // 2 - 1), steps)
            actor, log_alpha = unit(adams[0].step(actor, gradient)), adams[2].step(log_alpha, excess)
        target = average(critic, target, 0.3)
    return (actor, critic, log_alpha), target, (of_actor, of_critic, of_target)


def scale_of(rollout, gamma):
    """The divisor of rewards: from the discounted sums of valid steps, in a plain loop."""
    steps, sums = rollout.steps, []
    for n in range(steps.reward.shape[1]):
        total = 0.0
        for t in range(steps.reward.shape[0]):
            if steps.valid[t, n]:
                total = gamma * total + float(steps.reward[t, n])
                sums.append(total)
            total = 0.0 if steps.last[t, n] else total
    return max(np.std(sums), np.abs(sums).max() / 2)  # v_max is 2


def test_update_matches_plain_program():
    """Three gradient steps, one per two environment steps; the policy moves in the second. Targets differ at first."""
    agent = flash()
    state, rollout, key = jax.jit(agent.init)(jax.random.key(0)), rollout_of(4, 3, 3, 2), jax.random.key(1)
    apart = lambda tree, size: jax.tree.map(lambda x: x + size * jnp.sin(jnp.arange(x.size)).reshape(x.shape), tree)
    learner = state.learner
    learner = learner._replace(
        target_params=apart(learner.target_params, 0.1),
        target_stats=jax.tree.map(jnp.abs, apart(learner.target_stats, 0.2)),
        actor_stats=jax.tree.map(jnp.abs, apart(learner.actor_stats, 0.2)),
    )
    state = state._replace(learner=learner)
    after, metrics = jax.jit(agent.update)(state, rollout, key)
    assert int(metrics["gradient_steps"]) == 3
    keys = jax.random.split(key, (off_policy.max_grad_steps(context_of(agent).ratio), 2))
    params, target, stats = plain_update(context_of(agent), state, rollout, keys[:3])
    close = partial(jax.tree.map, lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5))
    close(tuple(after.learner.params), params)
    close(after.learner.target_params.critic, target)
    close((after.learner.actor_stats, after.learner.batch_stats, after.learner.target_stats), stats)


def test_all_networks_keep_their_constraint():
    """After an update, but for the target critics, which average constrained parameters."""
    agent = flash(replay_ratio=1)
    state = jax.jit(agent.init)(jax.random.key(0))
    after, _ = jax.jit(agent.update)(state, rollout_of(4, 3, 3, 2), jax.random.key(1))
    for before, part in zip(state.learner.params[:2], after.learner.params[:2]):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), unit(part), part)
        assert not same_bits(before, part)


def test_policy_acts_with_running_statistics():
    """An observation has the same action alone and in a batch, and other statistics give another action."""
    agent = flash()
    state, obs = jax.jit(agent.init)(jax.random.key(0)), jax.random.normal(jax.random.key(1), (5, 3))
    act = lambda state, obs: agent.exploit(agent.policy_state(state), PolicyInput(obs), (), None).action
    alone = jnp.concatenate([act(state, obs[i : i + 1]) for i in range(5)])
    np.testing.assert_allclose(act(state, obs), alone, rtol=1e-5, atol=1e-6)
    moved = jax.tree.map(lambda x: x + 1, state.learner.actor_stats)
    other = state._replace(learner=state.learner._replace(actor_stats=moved))
    assert np.abs(act(other, obs) - alone).max() > 1e-3


@pytest.mark.slow
def test_vmapped_seeds_equal_seeds_alone():
    agent = flash()
    keys, rollout = jax.random.split(jax.random.key(0), 2), rollout_of(4, 3, 3, 2)
    run = lambda key: agent.update(agent.init(key), rollout, key)[0].learner
    together = jax.jit(jax.vmap(run))(keys)
    for i in range(2):
        alone = jax.jit(run)(keys[i])
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-3, atol=1e-4), together, alone)


def test_held_noise_ends_with_episode():
    """The carry of a new episode draws noise anew; within an episode the sample's noise repeats."""
    agent = flash(learning_starts=0)
    carry = agent.initial_carry
    assert int(carry.num_left) == 0 and carry.noise.shape == (2,)
    assert agent.sample_noise(jax.random.key(0), 4, 3).normal.shape == (4, 3, 3)


@pytest.mark.slow
def test_learns_action_of_observation():
    """A probe whose best action is half of the observation."""
    env, num_updates = probes.continuous_action_of_observation(8), 150
    options = dict(network=dict(kind="flash", hidden_sizes=(16,)), value=dict(kind="c51", atoms=51, v_min=-5, v_max=5))
    agent = actor_critics.agent_of(
        "sac", env, num_updates, size=4096, batch_size=64, replay_ratio=0.5, learning_starts=256, gamma=probes.GAMMA,
        **{k: x for k, x in (FLASH | options).items() if k != "tau"}, tau=0.05, learning_rate=1e-2,
        critic_learning_rate=1e-2,
    )  # fmt: skip
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)[0].agent
    state = jax.jit(run, compiler_options=probes.QUICK)(jax.random.key(0))
    greedy = agent.exploit(state, PolicyInput(jnp.float32([[-1], [1]])), (), None).action
    np.testing.assert_allclose(greedy, [[-0.5], [0.5]], atol=0.15)


# Rejected options


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (dict(target_entropy=-1.0), "target_sigma: cannot be combined with target_entropy, got both; drop one"),
        (dict(value=ATOMS | dict(v_max=0.0)), "value.v_max: must be positive with rewards scaled, got 0.0; use 5"),
        (dict(target=dict(kind="none"), tau=None), "target: network flash normalizes its layers already, got none"),
        (dict(num_shards=2), "network: flash normalizes a batch on one device, got 2 devices; set devices to 1"),
        (dict(critic_layer_norm=True), "critic_layer_norm: network flash normalizes its layers already, got true"),
    ],
    ids=["sigma", "bound", "crossq", "devices", "layer_norm"],
)
def test_make_rejects_options(options, line):
    options = {**FLASH, **options}
    if options["tau"] is None:
        del options["tau"]
    with pytest.raises(ValueError, match=f"^{line}"):
        make("sac", **SIZES | options)
