"""Distillation in SAC: the divergence against numpy, the teacher's inputs, and a student that becomes the teacher."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.agents import actor_critic, distillation, sac
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import normalize
from jaxrl_fast.rl.distributions import Gaussian, TanhGaussian
from jaxrl_fast.types import MultiDiscrete, PolicyInput
from tests.helpers import probes
from tests.helpers.agents import LITTLE

WEIGHTS, LOG_STD = np.float32([[0.6]]), np.float32([-0.7])
STATS = normalize.Stats(np.float32([1]), np.zeros(1, np.float32), np.float32([4]), np.float32(9))  # mean 1, variance 4


def teacher(inputs):
    """A mean that is a function of observations as they are, and one standard deviation for all of them."""
    return TanhGaussian(inputs.obs @ jnp.asarray(WEIGHTS), jnp.asarray(LOG_STD))


def made(teacher=teacher, env=None, **options):
    env = env or probes.continuous_action_of_observation(2)
    bonus = dict(kind="distill", data=teacher) | options.pop("bonus", {})
    return env, sac.make(configure(sac.Config, **LITTLE | options, bonus=bonus), env.spec, 10)


def test_divergences_of_weighted_rows_equal_those_of_numpy():
    """Between Gaussians: ln(s / t) + (t^2 + (m - n)^2) / (2 s^2) - 1/2, of a teacher with mean n and deviation t.

    After 16 updates of 4 steps in 2 environments, 128 of 512 steps are made: the weight is 3/4 of 0.5.
    """
    _, agent = made(bonus=dict(weight=0.5, anneal=512))
    context, rng = agent.update.args[0], np.random.default_rng(0)
    given, weight = rng.normal(size=(5, 1)).astype("f4"), np.float32([0.25, 0, 0.25, 0.25, 0.25])
    learner = agent.init(jax.random.key(0)).learner._replace(observations=STATS)
    obs = normalize.apply(STATS, given)
    rows = given, obs, jnp.asarray(weight), jnp.int32(16)
    total, metrics = distillation.of_rows(context, learner, *rows, sac.policy)(learner.params.actor)
    mean, log_std = np.split(np.float64(context.actor.apply(learner.params.actor, obs)), 2, axis=-1)
    s, t, n = np.exp(log_std), np.exp(float(LOG_STD[0])), given @ WEIGHTS
    kl = (np.log(s / t) + (t**2 + (mean - n) ** 2) / (2 * s**2) - 0.5).sum(-1)
    np.testing.assert_allclose(metrics["distill_kl"], kl, rtol=1e-4)
    np.testing.assert_allclose(total, 0.375 * (weight * kl).sum(), rtol=1e-4)


@pytest.mark.parametrize("normalize_observations", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_student_becomes_the_teacher(normalize_observations):
    """With a large weight, means and deviations are the teacher's, who sees the observations 1 and -1 as they are.

    The statistics are those of many rows with mean 1 and variance 4, so that the student sees 0 and -1.
    """
    options = dict(replay_ratio=1, learning_starts=16, batch_size=16, size=512, learning_rate=0.01, hidden_sizes=(16,))
    options |= dict(normalize_observations=normalize_observations, bonus={"weight": 100.0})
    env, agent = made(env=probes.continuous_action_of_observation(8), **options)
    state, update = jax.jit(agent.init)(jax.random.key(0)), jax.jit(agent.update)
    if normalize_observations:
        state = state._replace(learner=state.learner._replace(observations=STATS._replace(num_rows=jnp.float32(1e6))))
    experience = probes.experience(env, agent, state)
    for i in range(12):
        state, metrics = update(state, experience, jax.random.key(i))
    assert metrics["distill_kl_sum"] / metrics["gradient_steps"] < 0.02
    given = jnp.float32([[1], [-1]])
    obs = normalize.apply(state.learner.observations, given)
    found = sac.policy(agent.update.args[0], actor_critic.acting(state.learner).actor, obs)
    np.testing.assert_allclose(found.mean, given @ WEIGHTS, atol=0.1)
    np.testing.assert_allclose(found.log_std, np.broadcast_to(LOG_STD, (2, 1)), atol=0.2)


def test_policy_of_sac_is_a_teacher():
    """Its distributions are those from which the agent samples: tanh(mean + deviation * noise)."""
    env, agent = made(normalize_observations=True)
    state = jax.jit(agent.init)(jax.random.key(1))
    state = state._replace(learner=state.learner._replace(observations=STATS), num_updates=jnp.int32(100))
    inputs = PolicyInput(jnp.float32([[0.3], [-2.0]]))
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(0), 1, 2))
    found = sac.distribution_of(agent.update.args[0].config, env.spec)(state, inputs)
    expected = jnp.tanh(found.mean + jnp.exp(found.log_std) * noise.normal)
    np.testing.assert_allclose(agent.explore(state, inputs, (), noise).action, expected, rtol=1e-5)
    assert sac.distribution_of(agent.update.args[0].config, probes.best_action(2).spec) is None


def test_teachers_and_actions_that_do_not_fit_are_refused():
    normal = lambda inputs: Gaussian(inputs.obs, inputs.obs)
    with pytest.raises(ValueError, match=r"^bonus\.run: must have a policy of the kind TanhGaussian, got Gaussian"):
        made(normal)
    env = probes.best_action_of_observation(2)
    for action in (env.spec.action, MultiDiscrete((2, 3))):
        with pytest.raises(ValueError, match=r"^bonus: distill requires continuous actions in sac, got .*; use bc"):
            made(env=env._replace(spec=env.spec._replace(action=action)))
