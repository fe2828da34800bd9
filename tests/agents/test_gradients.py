"""One update of an agent whose numbers are worked out by hand: the sizes of gradients, and metrics."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.agents import actor_critic, dqn, ppo, pqn, sac
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import normalize, off_policy
from jaxrl_fast.types import Discrete, EnvSpec, Parallelism, PolicyInput, Rollout, Transition
from tests.helpers import actor_critics, probes
from tests.helpers.agents import network_of

TABLE = network_of(lambda key: jnp.zeros(2), lambda table, obs, noise=(): obs @ table[None], lambda key, shape: ())


def test_dqn_step_has_mean_gradient_of_batch():
    """All four rows have reward 3 for action 1, whose value is 0: the gradient of the mean loss is -3.

    With a large epsilon, Adam's first step is the rate times the gradient over epsilon.
    """
    spec = EnvSpec("test", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), 1)
    options = dict(rollout_length=4, size=64, batch_size=4, learning_starts=0, replay_ratio=0.25, n_step=1, gamma=0.0)
    options |= dict(learning_rate=0.5, schedule="constant", optimizer=dict(epsilon=1e3, max_grad_norm=0.0))
    agent = dqn.make(configure(dqn.Config, **options, loss="squared", rewards="raw"), spec, 10)
    context = agent.update.args[0]._replace(network=TABLE)
    ones = jnp.ones((4, 1))
    steps = Transition(
        ones[..., None], jnp.ones((4, 1), jnp.int32), 3 * ones, ones, jnp.zeros((4, 1), bool), ones > 0, ()
    )
    state = dqn.init(context, jax.random.key(0))._replace(num_updates=jnp.int32(1))
    state, metrics = jax.jit(partial(dqn.update, context))(state, Rollout(steps, ones, ()), jax.random.key(1))
    assert metrics["gradient_steps"] == 1
    np.testing.assert_allclose(state.learner.params, [0, 0.5 * 3 / 1e3], rtol=1e-2)


@pytest.mark.parametrize("module", [dqn, pqn])
def test_epsilon_falls_within_a_rollout(module):
    """From 1 to 0 in 16 environment steps: 1, 3/4, 1/2 and 1/4 at the steps of 4 environments, 2 on each of 2 shards.

    The first number of each decision is 0.6, so the first two are random and take action 0; the others are greedy.
    """
    spec = EnvSpec("test", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), 2)
    options = dict(rollout_length=4, explore=dict(start=1.0, end=0.0, steps=16), hidden_sizes=(4,))
    options |= dict(size=64, batch_size=4, learning_starts=0) if module is dqn else dict(num_minibatches=1)
    agent = module.make(configure(module.Config, **options), spec, 10, Parallelism(num_shards=2))
    context, params = agent.explore.args[0]._replace(network=TABLE), jnp.float32([0, 1])
    state = jax.eval_shape(agent.init, jax.random.key(0))
    state = state._replace(num_updates=jnp.int32(0), **({"params": params} if module is pqn else {}))
    if module is dqn:
        state = state._replace(learner=state.learner._replace(params=params))
    noise = agent.sample_noise(jax.random.key(0), 4, 2)
    uniform = jnp.broadcast_to(jnp.float32([[0.6], [0.0]]), (4, 2, 2))
    noise = (
        noise._replace(explore=noise.explore._replace(uniform=uniform))
        if module is dqn
        else noise._replace(uniform=uniform)
    )
    act = lambda noise: module.explore(context, state, PolicyInput(jnp.ones((2, 1))), (), noise).action
    np.testing.assert_array_equal(jax.vmap(act)(noise), [[0, 0], [0, 0], [1, 1], [1, 1]])


@pytest.mark.slow
def test_sac_metrics_of_delayed_policy_are_means_over_its_own_steps():
    """Every second of four steps moves the policy. Half of its reported rows are 0, so the others count twice."""
    context = actor_critics.tables_of("sac", policy_delay=2, learning_rate=0.0, critic_learning_rate=0.0, gamma=0.0)
    critic = actor_critics.critic_tables([[4, 4], [4, 4]])
    learner = actor_critics.learner_of(context, np.zeros((2, 2)), critic, log_temperature=jnp.float32(-30))
    zeros, ones = np.zeros(8), np.ones(8)
    buffer = actor_critics.buffer_of(context, [0.0, 1.0] * 4, zeros, zeros, ones, zeros, ones)
    counts, total = off_policy.init(), 0.0
    step = jax.jit(partial(sac.gradient_step, context))
    for i in range(4):
        keys = jax.random.split(jax.random.key(i), 2)
        learner, buffer, counts, metrics = step(buffer, jnp.int32(0), keys, learner, counts)
        total += float(metrics["policy_loss"].sum() / metrics["weight"].sum())
    assert total / 4 == pytest.approx(-4, rel=1e-3)


def test_both_observations_of_sampled_transitions_are_normalized():
    """Observations are 0 to 7, one after another. With mean 2 and variance 4, they are seen as -1, -1/2 and so on."""
    context = actor_critics.tables_of("td3", normalize_observations=True, n_step=1)
    zeros, ones = np.zeros(8), np.ones(8)
    buffer = actor_critics.buffer_of(context, np.arange(8.0), zeros, zeros, ones, zeros, ones)
    learner = actor_critics.learner_of(context, np.zeros((2, 1)), actor_critics.critic_tables([[0], [0]]))
    stats = normalize.init(context.spec.obs)._replace(mean=jnp.float32([2]), var=jnp.float32([4]))
    learner = learner._replace(observations=stats)
    sample = jax.jit(partial(actor_critic.sample, context))
    rows = sample(learner, buffer, jax.random.key(0), jnp.int32(0)).rows
    number = np.asarray(rows.obs) * 2 + 2
    assert len(np.unique(number.round(3))) > 2 and number.min() > -0.01 and number.max() < 6.01
    np.testing.assert_allclose(rows.next_obs, (number + 1 - 2) / 2, atol=1e-5)


def test_adaptive_rate_changes_in_second_gradient_step_of_an_update():
    """Each of two updates has two gradient steps. The KL of the second exceeds its target: 0.01 / 1.5, then / 1.5^2."""
    env = probes.best_action(4)
    options = dict(rollout_length=4, num_minibatches=1, num_epochs=2, hidden_sizes=(4,), learning_rate=0.01)
    config = configure(ppo.Config, **options, schedule=dict(kind="kl", target=1e-9), normalize_advantage=False)
    agent = ppo.make(config, env.spec, 10)
    state = agent.init(jax.random.key(0))
    rollout, update = probes.experience(env, agent, state), jax.jit(agent.update)
    for number in (1, 2):
        state, metrics = update(state, rollout, jax.random.key(number))
        assert float(metrics["learning_rate"]) == pytest.approx(0.01 / 1.5**number, rel=1e-5)
