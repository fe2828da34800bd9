"""TD3 and DDPG: targets and losses by hand calculation, policy delay, whole updates by a plain implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.agents import actor_critic, critics, td3
from jaxrl_fast.options.td3 import DDPG, TD3
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
from tests.helpers.trees import equations, same_bits

HALF = float(np.arctanh(0.5))  # the policy's output before the tanh for an action of 1/2


# Targets


def target_of(algo="td3", noise=(0.0,), value=((0.0, 3.0), (0.0, 2.0)), slope=0.0, next_action=0.0, **config):
    """Targets of a transition from state 0 to 1 with reward 1/2 and discount 0.9, one for each noise value."""
    num = len(noise)
    context = tables_of(algo, num_critics=len(value), **config)
    online = critic_tables(np.full_like(np.array(value), 100.0))
    actor = np.array([[-9.0], [np.arctanh(next_action)]])
    learner = learner_of(context, -actor, online, actor, critic_tables(value, slope))
    batch = sample_of([0] * num, [0.3] * num, [0.5] * num, [0.9] * num, [1] * num)
    return jax.jit(partial(td_target, "td3", context))(learner, batch, jnp.float32(noise)[:, None])


def test_target_uses_minimum_of_target_critics():
    # .5 + .9 * min(3, 2) = 2.3; the online critics and policy have no effect
    np.testing.assert_allclose(target_of(), [2.3], rtol=1e-6)


def test_ddpg_target_uses_single_critic_without_noise():
    # Q'(s', a') = 3 + a' with a' = 1/2: .5 + .9 * 3.5 = 3.65, for any noise
    found = target_of("ddpg", noise=(0, 1, -9), value=[[0, 3.0]], slope=1.0, next_action=0.5)
    np.testing.assert_allclose(found, [3.65] * 3, rtol=1e-6)


def test_target_does_not_bootstrap_from_terminal_state():
    context = tables_of("td3")
    critic = critic_tables([[0, 3.0], [0, 2.0]])
    learner = learner_of(context, np.zeros((2, 1)), critic, np.zeros((2, 1)))
    batch = sample_of([0, 0], [0, 0], [0.5, -1], [0, 0.9], [1, 1])
    np.testing.assert_allclose(td_target("td3", context, learner, batch, jnp.zeros((2, 1))), [0.5, 0.8], rtol=1e-6)


def test_target_noise_and_noisy_action_are_clipped():
    # Q'(s', a') = a', target action .8, noise std .2 clipped at .5: .2 -> 1;  10 -> .5 -> 1.3, clipped to 1;
    # -1 -> -.2 -> .6;  -10 -> -.5 -> .3.   r + g a' = .5 + .9 a'
    found = target_of(noise=(0, 1, 10, -1, -10), value=[[0, 0.0]] * 2, slope=1.0, next_action=0.8)
    np.testing.assert_allclose(found, 0.5 + 0.9 * np.array([0.8, 1, 1, 0.6, 0.3]), rtol=1e-5)


@pytest.mark.parametrize(("std", "clip"), [(0.1, 0.05), (3.0, 0.4), (0.3, 0.0)])
def test_target_noise_follows_std_and_clip_options(std, clip):
    noise = np.linspace(-3, 3, 13)
    found = target_of(
        noise=noise, value=[[0, 0.0]] * 2, slope=1.0, next_action=-0.2, target_noise=std, target_noise_clip=clip
    )
    expected = np.clip(-0.2 + np.clip(std * noise, -clip, clip), -1, 1)
    np.testing.assert_allclose((found - 0.5) / 0.9, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("terminates", [False, True])
def test_three_step_targets_equal_hand_calculation(terminates):
    # gamma .5, Q'(s, .) = 2 s, rewards 1 2 3 4; the episode ends with the fourth step, and row 4 is its reset.
    # row 0: 1 + .5 * 2 + .25 * 3 = 2.75, then .125 * 2 * 3 = .75 of state 3
    # row 2: 3 + .5 * 4 = 5, then .25 * 2 * 4 = 2 of state 4 if truncated
    # row 3: 4, then .5 * 2 * 4 = 4
    context = tables_of("td3", n_step=3, rollout_length=6, size=12, batch_size=1, gamma=0.5)
    ring = buffer_of(
        context, range(6), [0] * 6, [1, 2, 3, 4, 0, 9], [1, 1, 1, 1 - terminates, 1, 1], [0, 0, 0, 1, 0, 0],
        [1, 1, 1, 1, 0, 1],
    )  # fmt: skip
    critic = critic_tables([2.0 * np.arange(6)] * 2)
    learner = learner_of(context, np.zeros((6, 1)), critic, np.zeros((6, 1)))
    batch = read(context, ring, [0, 2, 3])
    expected = [3.5, 5, 4] if terminates else [3.5, 7, 8]
    np.testing.assert_allclose(td_target("td3", context, learner, batch, jnp.zeros((3, 1))), expected, rtol=1e-6)


# Losses


def test_critic_loss_is_half_squared_error_of_each_critic():
    # Q = (1 + .5 * .2, 3) = (1.1, 3), target 2: (.81 + 1) / 2 = .905; errors of .9 and 1: .95
    critic = critic_tables([[1.0], [3.0]], [[[0.5]], [[0.0]]])
    batch = sample_of([0], [0.2], [0], [0], [0])
    arguments = batch, actor_critics.means([2.0]), jnp.float32([0.25])
    loss, (errors, metrics, _) = critics.loss(tables_of("td3"), *arguments, critic)
    np.testing.assert_allclose(loss, 0.25 * 0.905, rtol=1e-5)
    np.testing.assert_allclose(errors, [0.95], rtol=1e-5)
    np.testing.assert_allclose(metrics["q_value"], 0.25 * 2.05, rtol=1e-5)


def test_policy_loss_uses_first_critic_only():
    # J = w Q_1(s, tanh x), dJ/dx = w slope_1 (1 - tanh(x)^2); x = atanh .5: .75 slope
    critic = critic_tables([[0, 0], [9, 9.0]], [[[2.0], [-1.0]], [[7.0], [7.0]]])
    context, actor = tables_of("td3"), jnp.float32([[HALF], [HALF]])
    learner = learner_of(context, actor, critic, actor)
    loss = partial(td3.policy_loss, context, learner, jnp.float32([[0], [1]]), jnp.float32([0.5, 1.0]))
    np.testing.assert_allclose(loss(actor), -(0.5 * 2 * 0.5 + 1 * -1 * 0.5), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(loss)(actor), [[-0.5 * 2 * 0.75], [0.75]], rtol=1e-5)


# Actions


def test_exploration_noise_is_added_and_action_is_clipped():
    # .5 + .1 n for n = 1, -2, 50
    context = tables_of("td3", std=0.1)
    params = actor_critic.Params(jnp.float32([[HALF]]), None)
    found = td3.explore(context, params, jnp.zeros((3, 1)), jnp.float32([[1], [-2], [50]]))
    np.testing.assert_allclose(found, [[0.6], [0.3], [1]], rtol=1e-5)


# Gradient steps


def keys_of(seed):
    return jax.random.split(jax.random.key(seed))


def fill_buffer(context, num_rollouts=2):
    """A replay buffer with two rollouts, for four environments."""
    add, buffer = jax.jit(context.replay.add), context.replay.init()
    for u in range(num_rollouts):
        buffer = add(buffer, rollout_of(4, 4, 3, 2, seed=u).steps)
    return buffer


@pytest.mark.slow
def test_policy_and_targets_update_every_policy_delay_gradient_steps():
    """Three seeds in one program. Parameters move by tau when due and stay bit-identical between."""
    delay = 3
    agent = make("td3", num_envs=4, num_obs=3, num_actions=2, policy_delay=delay, tau=0.25, critic_learning_rate=0.01)
    context = context_of(agent)
    learners = jax.jit(jax.vmap(lambda key: td3.init(context, key)))(jax.random.split(jax.random.key(0), 3))
    buffer = fill_buffer(context)
    once = lambda keys, learner: td3.gradient_step(context, buffer, jnp.int32(0), keys, learner, off_policy.init())[0]
    step = jax.jit(jax.vmap(once))
    for g in range(1, 8):
        before, learners = learners, step(jax.vmap(keys_of)(10 * g + jnp.arange(3)), learners)
        assert not same_bits(before.params.critic, learners.params.critic)
        due = g % delay == 0
        still = same_bits((before.params.actor, before.target_params), (learners.params.actor, learners.target_params))
        assert still != due
        assert (learners.optimizer.actor[-1].count == g // delay).all()
        if due:
            expected = jax.tree.map(lambda new, old: 0.25 * new + 0.75 * old, learners.params, before.target_params)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), learners.target_params, expected)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(tuple(range(1, x.ndim))), before, learners).params.critic
    assert all((x > 0).all() for x in jax.tree.leaves(moved))


@pytest.mark.slow
def test_policy_delay_counts_gradient_steps_across_updates():
    """Three seeds with three gradient steps per update. The policy has made floor(g / 2) steps after g = 1, 4, 7 ..."""
    agent = make("td3", num_envs=4, num_obs=3, num_actions=2, replay_ratio=0.1875, policy_delay=2)
    init, update = jax.jit(jax.vmap(agent.init)), jax.jit(jax.vmap(agent.update, (0, None, 0)))
    states, made = init(jax.random.split(jax.random.key(0), 3)), []
    for u in range(6):
        before, keys = states.learner, jax.random.split(jax.random.key(u), 3)
        states, metrics = update(states, rollout_of(4, 4, 3, 2, seed=u), keys)
        counts = states.learner.optimizer
        made.append(int(counts.critic[-1].count[0]))
        assert (counts.critic[-1].count == made[-1]).all() and (counts.actor[-1].count == made[-1] // 2).all()
        moves = made[-1] // 2 - (made[-2] // 2 if u else 0)
        assert same_bits(before.target_params, states.learner.target_params) == (moves == 0)
        assert np.isfinite(metrics["policy_loss_sum"]).all()
    assert made == [1, 4, 7, 10, 13, 16]  # floor(3/16 (16 (u + 1) - 8))


def test_vmapped_seeds_share_condition_of_policy_delay():
    """Under vmap, a batched condition would become a select that computes both branches."""
    agent = make("td3", num_envs=4, num_obs=3, num_actions=2)
    states = jax.eval_shape(jax.vmap(agent.init), jax.random.split(jax.random.key(0), 3))
    update = jax.vmap(agent.update, (0, None, 0))
    found = jax.make_jaxpr(update)(states, rollout_of(4, 4, 3, 2), jax.random.split(jax.random.key(0), 3))
    conditions = [e.invars[0].aval.shape for e in equations(found) if e.primitive.name == "cond"]
    assert conditions == [()]


def test_importance_weights_apply_to_critic_loss_only():
    """Priorities 1 and 4 with final exponent 1 give weights 1/16 and 1/64 for the critics, 1/16 for the policy.

    Two of four rows can be sampled. There Q is 0 for the action 0, and rewards are 2 and -16.
    """
    config = dict(replay=dict(kind="prioritized", size=16, alpha=0.5, beta=1.0), batch_size=16)
    context = tables_of("td3", policy_delay=1, gamma=0.5, **config)
    buffer = buffer_of(context, range(4), [0] * 4, [1, 2, 3, -16], [1, 0, 1, 0], [0, 1, 0, 1], [1] * 4)
    keys = keys_of(1)
    buffer, count = with_priorities(buffer, keys, [1, 4], 16)
    critic = critic_tables(np.zeros((2, 4)), np.full((2, 4, 1), 2.0))
    learner = learner_of(context, np.zeros((4, 1)), critic, np.zeros((4, 1)))
    after, buffer, _, _ = jax.jit(partial(td3.gradient_step, context))(
        buffer, jnp.int32(100), keys, learner, off_policy.init()
    )
    assert count[1] + count[3] == 16 and 3 <= count[1] <= 4
    first_moment = lambda part, *shape: 10 * np.asarray(part[-2].mu).reshape(shape)
    of_critics = first_moment(after.optimizer.critic, 2, 2, 4)[1]  # slopes, then values, as their names are sorted
    gradient = [-2 * count[1] / 16, 16 * count[3] / 16 / 4]
    np.testing.assert_allclose(of_critics[:, [1, 3]], [gradient] * 2, rtol=1e-5)
    of_policy = first_moment(after.optimizer.actor, 4)
    np.testing.assert_allclose(of_policy, -2 * np.array([0, count[1], 0, count[3]]) / 16, rtol=1e-4)
    np.testing.assert_allclose(buffer.priorities.levels[0][:4], [0, np.sqrt(2), 0, 4], rtol=1e-4)  # |error|^.5


# A whole update


def plain_update(context, state, rollout, all_keys, delay, num_critics, std, clip):
    """Algorithm 1 of Fujimoto et al. 2018, step by step. Only random draws come from the agent."""
    config, size = context.config, context.config.batch_size
    buffer = jax.jit(context.replay.add)(state.replay, rollout.steps)
    params, target = state.learner.params, state.learner.target_params
    actor, critic, target_actor, target_critic = params.actor, params.critic, target.actor, target.critic
    rates = config.learning_rate, config.critic_learning_rate
    optimizers = [Adam(x, rate, config.optimizer.epsilon) for x, rate in zip((actor, critic), rates)]

    @jax.jit
    @jax.grad
    def gradient_of_error(critic, batch, weight, goal):
        return (weight[None] * (actor_critics.values(critic, batch.obs, batch.action) - goal[None]) ** 2).sum() / 2

    @jax.jit
    def td_target_of(actor, critic, batch, noise):
        action = jnp.tanh(outputs(actor, batch.next_obs)) + jnp.maximum(-clip, jnp.minimum(clip, std * noise))
        value = actor_critics.values(critic, batch.next_obs, jnp.maximum(-1, jnp.minimum(1, action)))
        return batch.reward + batch.discount * (value[0] if num_critics == 1 else jnp.minimum(value[0], value[1]))

    @jax.jit
    @jax.grad
    def gradient_of_loss(actor, critic, batch, weight):
        return -(weight * actor_critics.values(critic, batch.obs, jnp.tanh(outputs(actor, batch.obs)))[0]).sum()

    @jax.jit
    def drawn(buffer, keys):
        batch, found, _ = context.replay.sample(buffer, keys[0], size, config.gamma, 1.0)
        return batch, found, actor_critic.sample_normal(context, keys[1], 1)

    for step, keys in enumerate(all_keys, start=1):
        batch, found, (noise,) = drawn(buffer, keys)
        weight = found / size
        goal = td_target_of(target_actor, target_critic, batch, noise)
        critic = optimizers[1].step(critic, gradient_of_error(critic, batch, weight, goal))
        if step % delay == 0:
            actor = optimizers[0].step(actor, gradient_of_loss(actor, critic, batch, weight))
            target_actor = actor_critics.average(actor, target_actor, config.target.tau)
            target_critic = actor_critics.average(critic, target_critic, config.target.tau)
    return (actor, critic), (target_actor, target_critic)


@pytest.mark.parametrize(
    ("algo", "delay", "num_critics", "std"),
    [pytest.param("td3", 2, 2, 0.4, id="td3"), slow("ddpg", 1, 1, 0.0, id="ddpg")],
)
def test_update_matches_plain_implementation(algo, delay, num_critics, std):
    """Three gradient steps with three environments. Target parameters differ from the parameters at the start."""
    noise = dict(target_noise=std, target_noise_clip=0.5) if algo == "td3" else {}
    agent = make(
        algo, num_envs=3, num_obs=3, num_actions=2, tau=0.3, gamma=0.9, learning_rate=0.03, replay_ratio=0.5,
        critic_learning_rate=0.02, optimizer=dict(epsilon=1e-3), **noise,
    )  # fmt: skip
    state, rollout, key = jax.jit(agent.init)(jax.random.key(0)), rollout_of(4, 3, 3, 2), jax.random.key(1)
    apart = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), state.learner.target_params)
    state = state._replace(learner=state.learner._replace(target_params=apart))
    after, metrics = jax.jit(agent.update)(state, rollout, key)
    assert int(metrics["gradient_steps"]) == 3  # (4 * 3 - 2 * 3) / 2
    keys = jax.random.split(key, (off_policy.max_grad_steps(context_of(agent).ratio), 2))
    assert len(keys) == 6
    expected = plain_update(context_of(agent), state, rollout, keys[:3], delay, num_critics, std, 0.5)
    learner = after.learner
    assert_close((learner.params[:2], learner.target_params[:2]), expected)
    assert learner.params.log_temperature is learner.target_params.log_temperature is None
    if algo == "td3":
        assert int(learner.optimizer.actor[-1].count) == 1


def test_ddpg_is_td3_with_other_defaults():
    assert DDPG() != TD3() and issubclass(DDPG, TD3)
    differing = {name for name in vars(TD3()) if getattr(TD3(), name) != getattr(DDPG(), name)}
    assert differing == {"num_critics", "policy_delay", "target_noise"}
