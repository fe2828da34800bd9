"""The critics of SAC, TD3 and DDPG: distributions of values, and CrossQ, against worked examples and plain programs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxrl_fast.agents import actor_critic, critics, sac, td3
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import off_policy
from jaxrl_fast.rl.value_distributions import Atoms
from jaxrl_fast.types import PolicyInput
from tests.helpers import actor_critics
from tests.helpers.actor_critics import (
    Adam,
    assert_close,
    context_of,
    critic_tables,
    learner_of,
    make,
    outputs,
    rollout_of,
    sample_of,
    tables_of,
)
from tests.helpers.trees import same_bits

C51 = dict(value="c51", atoms=3, v_min=0.0, v_max=2.0)
QUANTILE = dict(value="quantile", atoms=3, drop=1)
LOG_PI_0 = -0.5 * np.log(2 * np.pi)  # log-density of the action tanh(0) of a standard normal


def target_of(algo, output, **options):
    """The target of one row with reward 1/2 and discount 0.9, from the critics' outputs [C, M] at (s', 0)."""
    context = tables_of(algo, num_critics=len(output), **options)
    actor = np.zeros((1, 2 if algo == "sac" else 1))
    learner = learner_of(context, actor, critic_tables([[0.0]] * len(output)), None if algo == "sac" else actor)
    batch = sample_of([0], [0], [0.5], [0.9], [0])
    keys = (jax.random.key(0),) if algo == "sac" else ()
    rule = {"sac": sac, "td3": td3}[algo]
    action, target = rule.td_target(context, learner, batch, jnp.zeros((1, 1)), *keys)
    np.testing.assert_array_equal(action, [[0]])
    return jax.tree.map(lambda x: np.asarray(x)[0], target(jnp.float32(output)[:, None]))


# Distributions


def test_c51_target_is_distribution_of_critic_with_least_mean():
    # Weights (.2, .3, .5) have the mean 1.3, and (.4, .5, .1) the mean .7. Atoms 0 1 2: .5 + .9 z = .5, 1.4, 2.3
    atom, weight = target_of("td3", np.log([[0.2, 0.3, 0.5], [0.4, 0.5, 0.1]]), **C51)
    np.testing.assert_allclose(atom, [0.5, 1.4, 2.3], rtol=1e-5)
    np.testing.assert_allclose(weight, [0.4, 0.5, 0.1], rtol=1e-5)


@pytest.mark.slow
def test_c51_loss_is_cross_entropy_with_projected_target(rlax):
    # Atoms .5, 1.4, 2.3 of weights .4, .5, .1 on 0 1 2: .2 | .2 + .3 | .2 + .1. The critic's logits are 0: log 3 each
    context = tables_of("td3", **C51)
    target = Atoms(jnp.float32([[0.5, 1.4, 2.3]]), jnp.float32([[0.4, 0.5, 0.1]]))
    logits = jnp.float32([[[0.0, 0, 0]], [[1.0, 2, 0]]])  # [2, 1, 3]
    wanted = [0.2, 0.5, 0.3]
    projected = rlax.categorical_l2_project(target.atom[0], target.weight[0], jnp.float32([0, 1, 2]))
    np.testing.assert_allclose(projected, wanted, rtol=1e-5)
    loss, (errors, metrics) = critics.loss_of_outputs(context, logits, target, jnp.float32([0.5]))
    log_prob = np.array([[-np.log(3)] * 3, [1, 2, 0] - np.log(np.exp([1, 2, 0]).sum())])
    cross_entropy = -(log_prob * wanted).sum(1)
    np.testing.assert_allclose(loss, 0.5 * cross_entropy.sum(), rtol=1e-5)
    np.testing.assert_allclose(errors, [(cross_entropy + (wanted * np.log(wanted)).sum()).mean()], rtol=1e-4)
    means = [1, (np.exp(log_prob[1]) * [0, 1, 2]).sum()]
    np.testing.assert_allclose(metrics["q_value"], [0.5 * np.mean(means)], rtol=1e-5)
    gradient = jax.grad(lambda x: critics.loss_of_outputs(context, x, target, jnp.ones(1))[0])(logits)
    np.testing.assert_allclose(gradient[:, 0], np.exp(log_prob) - wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("num_dropped", "kept"), [(0, [-1, 0, 1, 2, 3, 9]), (1, [-1, 0, 1, 2]), (2, [-1, 0])])
def test_quantile_target_pools_lower_quantiles_of_all_critics(num_dropped, kept):
    options = QUANTILE | {"drop": num_dropped}
    atom, weight = target_of("td3", [[3, 0, 9], [-1, 1, 2]], **options)
    np.testing.assert_allclose(atom, 0.5 + 0.9 * np.array(kept), rtol=1e-5)
    np.testing.assert_allclose(weight, 1 / len(kept), rtol=1e-6)


@pytest.mark.parametrize("options", [C51, QUANTILE])
def test_distributional_sac_target_includes_entropy_in_each_atom(options):
    fixed = dict(learn_temperature=False, temperature=0.5)
    output = [[0, 1, 2], [2, 1, 0]]
    soft, plain = target_of("sac", output, **options, **fixed).atom, target_of("td3", output, **options).atom
    np.testing.assert_allclose(soft - plain, -0.9 * 0.5 * LOG_PI_0, rtol=1e-4)


@pytest.mark.slow
def test_quantile_loss_matches_rlax(rlax):
    """Each critic regresses to all atoms of the target, with Huber's loss."""
    context, rng = tables_of("td3", **QUANTILE), np.random.default_rng(0)
    quantile, atom = jnp.float32(rng.normal(size=(2, 5, 3))), jnp.float32(2 * rng.normal(size=(5, 4)))
    target = Atoms(atom, jnp.full((5, 4), 0.25))
    weight = jnp.float32(rng.random(5))
    loss, (errors, _) = critics.loss_of_outputs(context, quantile, target, weight)
    tau = jnp.float32([1 / 6, 1 / 2, 5 / 6])
    one = jax.vmap(lambda q, z: rlax.quantile_regression_loss(q, tau, z, huber_param=1.0))
    np.testing.assert_allclose(loss, (weight * (one(quantile[0], atom) + one(quantile[1], atom))).sum(), rtol=1e-5)
    expected = np.abs(np.asarray(atom).mean(1) - np.asarray(quantile).mean(-1)).mean(0)
    np.testing.assert_allclose(errors, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("algo", "options", "value"), [
    ("td3", C51, 1.4), ("td3", QUANTILE, 3), ("sac", C51, 0.6), ("sac", QUANTILE, 2),
])  # fmt: skip
def test_policy_gradient_uses_means_of_distributions(algo, options, value):
    """TD3's the first critic's; SAC's the least, and that of all quantiles."""
    outputs = {"c51": np.log([[0.1, 0.4, 0.5], [0.5, 0.4, 0.1]]), "quantile": np.array([[0, 1, 8], [2, 1, 0.0]])}
    answer = jnp.float32(outputs[options["value"]])[:, None]  # [2, 1, 3] for any action
    context = tables_of(algo, **options, **(dict(learn_temperature=False, temperature=0.5) if algo == "sac" else {}))
    context = context._replace(critic=context.critic._replace(apply=lambda *_: answer))
    learner = learner_of(context, np.zeros((1, 2 if algo == "sac" else 1)), critic_tables([[0.0]]))
    if algo == "td3":
        found = td3.policy_loss(context, learner, jnp.zeros((1, 1)), jnp.ones(1), learner.params.actor)
    else:
        arguments = jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.ones(1), learner.params.actor
        found = sac.policy_loss(context, learner, *arguments)[0] - 0.5 * LOG_PI_0
    np.testing.assert_allclose(found, -value, rtol=1e-5)


# CrossQ


def renormalized(params, x, layer, stats):
    """Batch normalization of rows [B, F], corrected once the running statistics are warm: a plain program."""
    layer = params["params"]["torso"]["mlp"][layer]
    mean, var = x.mean(0), ((x - x.mean(0)[None]) ** 2).mean(0)
    old_mean, old_var = stats
    r = jax.lax.stop_gradient(jnp.sqrt((var + 1e-3) / (old_var + 1e-3)))
    d = jax.lax.stop_gradient((mean - old_mean) / jnp.sqrt(old_var + 1e-3))
    r, d = jnp.maximum(1 / 3, jnp.minimum(3, r)), jnp.maximum(-5, jnp.minimum(5, d))
    y = (x - mean[None]) / jnp.sqrt(var + 1e-3)[None] * r[None] + d[None]
    after = 0.9 * old_mean + 0.1 * mean, 0.9 * old_var + 0.1 * var
    return y * layer["scale"][None] + layer["bias"][None], after


def crossq_critic(params, inputs, stats):
    """One critic of one hidden layer: values [B] and the statistics of both layers after the batch."""
    own = params["params"]
    x, first = renormalized(params, inputs, "BatchRenorm_0", stats[0])
    hidden = own["torso"]["mlp"]["Dense_0"]
    x = jnp.maximum(x @ hidden["kernel"] + hidden["bias"][None], 0)
    x, second = renormalized(params, x, "BatchRenorm_1", stats[1])
    return (x @ own["heads_0"]["kernel"] + own["heads_0"]["bias"][None])[:, 0], (first, second)


def frozen(params, inputs, stats):
    """The same with running statistics."""
    own = params["params"]
    layers = own["torso"]["mlp"]

    def normalized(x, name, mean, var):
        return (x - mean[None]) / jnp.sqrt(var + 1e-3)[None] * layers[name]["scale"][None] + layers[name]["bias"][None]

    x = normalized(inputs, "BatchRenorm_0", *stats[0])
    x = jnp.maximum(x @ layers["Dense_0"]["kernel"] + layers["Dense_0"]["bias"][None], 0)
    x = normalized(x, "BatchRenorm_1", *stats[1])
    return (x @ own["heads_0"]["kernel"] + own["heads_0"]["bias"][None])[:, 0]


def plain_update(context, state, rollout, all_keys):
    """Bhatt et al. 2024 on TD3 with a delay of 2: no targets, one pass for both actions of the critics."""
    config, size = context.config, context.config.batch_size
    buffer = jax.jit(context.replay.add)(state.replay, rollout.steps)
    actor, critic, _ = state.learner.params
    stats = [[(jnp.zeros(n), jnp.ones(n)) for n in (5, 8)] for _ in range(2)]
    optimizers = Adam(actor, config.learning_rate, 1e-8), Adam(critic, config.critic_learning_rate, 1e-8)
    one = lambda tree, i: jax.tree.map(lambda x: x[i], tree)

    @jax.jit
    def drawn(buffer, keys):
        batch, found, _ = context.replay.sample(buffer, keys[0], size, config.gamma, 1.0)
        return batch, found / size, actor_critic.sample_normal(context, keys[1], 1)[0]

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def error(critic, actor, stats, batch, weight, noise):
        noise = jnp.maximum(-0.5, jnp.minimum(0.5, 0.2 * noise))
        action = jnp.maximum(-1, jnp.minimum(1, jnp.tanh(outputs(actor, batch.next_obs)) + noise))
        rows = [jnp.concatenate([batch.obs, batch.action], 1), jnp.concatenate([batch.next_obs, action], 1)]
        found = [crossq_critic(one(critic, i), jnp.concatenate(rows), stats[i]) for i in range(2)]
        least = jnp.minimum(*(value[size:] for value, _ in found))
        goal = jax.lax.stop_gradient(batch.reward + batch.discount * least)
        loss = sum((weight * (value[:size] - goal) ** 2).sum() / 2 for value, _ in found)
        return loss, [after for _, after in found]

    @jax.jit
    @jax.grad
    def loss(actor, critic, stats, batch, weight):
        inputs = jnp.concatenate([batch.obs, jnp.tanh(outputs(actor, batch.obs))], 1)
        return -(weight * frozen(one(critic, 0), inputs, stats[0])).sum()

    for number, keys in enumerate(all_keys, start=1):
        batch, weight, noise = drawn(buffer, keys)
        gradient, stats = error(critic, actor, stats, batch, weight, noise)
        critic = optimizers[1].step(critic, gradient)
        if number % 2 == 0:
            actor = optimizers[0].step(actor, loss(actor, critic, stats, batch, weight))
    return actor, critic, stats


def crossq(algo="td3", **options):
    config = dict(num_envs=3, num_obs=3, num_actions=2, gamma=0.9, learning_rate=0.03, critic_learning_rate=0.02)
    config |= dict(replay_ratio=0.5, target=dict(kind="none", momentum=0.9, warmup=0))
    return make(algo, **config | options)


@pytest.mark.slow
def test_crossq_update_matches_plain_program():
    agent = crossq()
    state, rollout, key = jax.jit(agent.init)(jax.random.key(0)), rollout_of(4, 3, 3, 2), jax.random.key(1)
    after, metrics = jax.jit(agent.update)(state, rollout, key)
    assert int(metrics["gradient_steps"]) == 3  # (4 * 3 - 2 * 3) / 2
    keys = jax.random.split(key, (off_policy.max_grad_steps(context_of(agent).ratio), 2))
    actor, critic, stats = plain_update(context_of(agent), state, rollout, keys[:3])
    assert_close(after.learner.params[:2], (actor, critic))
    layers = after.learner.batch_stats["torso"]["mlp"]
    for i in range(2):
        found = [(layers[f"BatchRenorm_{j}"]["mean"][i], layers[f"BatchRenorm_{j}"]["var"][i]) for j in range(2)]
        assert_close(found, list(stats[i]))
    assert after.learner.target_params == actor_critic.Params(None, None)


@pytest.mark.slow
def test_vmapped_seeds_have_separate_crossq_statistics():
    """Several seeds in one program: each with the statistics that it has alone, and with policies that move."""
    agent = crossq("sac", **C51, policy_delay=3)
    init, update, keys = jax.jit(jax.vmap(agent.init)), jax.jit(jax.vmap(agent.update, (0, None, 0))), jax.random.split
    states = before = init(keys(jax.random.key(0), 2))
    for u in range(2):
        states, metrics = update(states, rollout_of(4, 3, 3, 2, seed=u), keys(jax.random.key(u), 2))
    stats = states.learner.batch_stats
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((states.learner, metrics)))
    assert not any(np.array_equal(x[0], x[1]) for x in jax.tree.leaves(states.learner.params.actor) if x.ndim > 2)
    assert not same_bits(before.learner.params.actor, states.learner.params.actor)
    mean = stats["torso"]["mlp"]["BatchRenorm_0"]["mean"]  # [seeds, critics, features]
    np.testing.assert_array_equal(mean[:, 0], mean[:, 1])
    assert np.abs(mean[0] - mean[1]).max() > 1e-3


def test_policy_does_not_depend_on_crossq_statistics():
    """So an exported policy has none of them."""
    agent = crossq("sac")
    state = jax.jit(agent.init)(jax.random.key(0))
    jaxpr = jax.make_jaxpr(lambda state, obs: agent.exploit(state, PolicyInput(obs), (), None).action)(
        agent.policy_state(state), jnp.zeros((1, 3))
    )
    used = {id(v) for e in jaxpr.eqns for v in e.invars}
    paths = [path for path, _ in jax.tree.leaves_with_path((agent.policy_state(state), jnp.zeros((1, 3))))]
    names = [jax.tree_util.keystr(p) for p, v in zip(paths, jaxpr.jaxpr.invars) if id(v) in used]
    assert names and not any("batch_stats" in name for name in names)


# The other options


@pytest.mark.slow
def test_sac_policy_delay_updates_policy_every_third_step():
    agent = make("sac", num_envs=4, num_obs=3, num_actions=2, policy_delay=3, replay_ratio=0.25)
    state = jax.jit(agent.init)(jax.random.key(0))
    update, moved = jax.jit(agent.update), []
    for u in range(5):
        before = state
        state, metrics = update(state, rollout_of(4, 4, 3, 2, seed=u), jax.random.key(u))
        count = int(state.learner.optimizer.critic[-1].count)
        moved.append(int(state.learner.optimizer.actor[-1].count))
        assert moved[-1] == count // 3 == int(state.learner.optimizer.log_temperature[-1].count)
        same = same_bits(before.learner.params.actor, state.learner.params.actor)
        assert same == (moved[-1] == (moved[-2] if u else 0))
        assert not same_bits(before.learner.params.critic, state.learner.params.critic) or count == 0
        assert np.isfinite(metrics["policy_loss_sum"])
    assert moved[-1] == 6  # (5 * 16 - 8) / 4 gradient steps


@pytest.mark.parametrize("algo", ["sac", "td3", "ddpg"])
def test_critic_hidden_sizes_set_widths_of_critics(algo):
    context = context_of(make(algo, hidden_sizes=(8,), critic_hidden_sizes=(6, 5), optimizer=dict(beta1=0.5)))
    params = jax.eval_shape(lambda key: actor_critic.init_params(context, key), jax.random.key(0))
    kernels = lambda tree: [layer["kernel"].shape[-1] for layer in tree["params"]["torso"]["mlp"].values()]
    assert kernels(params.actor) == [8] and kernels(params.critic) == [6, 5]
    gradient = {"x": jnp.float32([2.0])}
    _, state = context.optimizer.critic.update(gradient, context.optimizer.critic.init(gradient), gradient)
    np.testing.assert_allclose(ravel_pytree(state[-2].mu)[0], [1.0])  # (1 - .5) * 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            dict(QUANTILE, drop=3),
            r"^value.drop: must be less than value.atoms \(3\), got 3; use 1$",
        ),
        (dict(C51, v_min=2.0), r"^value.v_min: must be less than v_max \(2.0\), got 2.0; use a lower value$"),
        (
            dict(target="none", num_shards=2),
            r"^target: none normalizes a batch on one device, got 2 devices; set devices to 1$",
        ),
    ],
)
def test_make_rejects_invalid_critic_options(config, words):
    with pytest.raises(ValueError, match=words):
        make("sac", **config)


def test_crossq_runs_on_one_device():
    config = actor_critics.MODULES["sac"].Config
    assert configure(config, target="none").sequence() == 256 and config().sequence() is None
