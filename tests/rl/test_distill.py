"""Distillation: the divergence against numpy, the teacher's inputs, and a student that becomes the teacher."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.agents import ppo
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl.distributions import Categorical, Gaussian
from jaxrl_fast.types import PolicyInput
from tests.helpers import probes

SMALL = dict(rollout_length=8, hidden_sizes=(8,), num_minibatches=2, num_epochs=2)
WEIGHTS = np.float32([[1.5, -0.5]])


def teacher(inputs):
    """Logits that are a function of observations as they are."""
    return Categorical(inputs.obs @ jnp.asarray(WEIGHTS))


def made(teacher=teacher, env=None, **config):
    env = env or probes.best_action_of_observation(4)
    bonus = dict(kind="distill", data=teacher) | config.pop("bonus", {})
    agent = ppo.make(configure(ppo.Config, **SMALL | config, bonus=bonus), env.spec, 20)
    return env, agent, jax.jit(agent.init)(jax.random.key(0))


@pytest.mark.parametrize("options", [{}, {"memory": {"kind": "gru", "size": 4}}], ids=["plain", "memory"])
def test_loss_gains_the_mean_divergence_from_the_teacher(options):
    """The oracle is sum_a p_teacher(a) (log p_teacher(a) - log p(a)), weighted by 0.5, over the valid rows."""
    env, agent, state = made(bonus={"weight": 0.5}, **options)
    context, experience = agent.explore.args[0], probes.experience(env, agent, state)
    rows = jax.jit(lambda *given: ppo.prepare(context, *given).rows)(state, experience)
    weight = np.asarray(rows.weight)
    rows = rows._replace(weight=rows.weight / rows.weight.sum())
    objective = jax.jit(lambda params: (context.objective(context, params, rows), ppo.loss(context, params, rows)))
    (total, metrics), (own, _) = objective(state.params)
    logits = np.asarray(ppo.policies.outputs(context.policy, state.params, rows)[0].logits, np.float64)
    theirs = np.asarray(rows.obs, np.float64) @ WEIGHTS
    log = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))
    kl = (np.exp(log(theirs)) * (log(theirs) - log(logits))).sum(-1)
    expected = (weight * kl).sum() / weight.sum()
    np.testing.assert_allclose([total - own, metrics["distill_kl"]], [0.5 * expected, expected], rtol=1e-3)


def test_teacher_sees_observations_as_they_are():
    """The student's statistics differ from those of the teacher, which normalizes by itself."""
    env, agent, state = made(normalize_observations=True)
    update = jax.jit(agent.update)
    experience = probes.experience(env, agent, state)
    state, _ = update(state, experience, jax.random.key(0))
    context = agent.explore.args[0]
    found, weight = context.bonus.prepare(state, experience, jnp.zeros((8, 4))).rows
    np.testing.assert_allclose(found.logits, np.asarray(experience.steps.obs) @ WEIGHTS, rtol=1e-5)
    assert weight.shape == (8, 4)


def test_student_becomes_the_teacher():
    """With a large weight, the student has the teacher's probabilities although another action is rewarded."""
    env, agent, state = made(bonus={"weight": 50.0}, learning_rate=0.02, hidden_sizes=(16,), schedule="constant")
    update, experience = jax.jit(agent.update), None
    for i in range(40):
        experience = probes.experience(env, agent, state, seed=i) if i % 20 == 0 else experience
        state, metrics = update(state, experience, jax.random.key(i))
    assert metrics["distill_kl"] < 2e-3
    inputs = PolicyInput(jnp.float32([[1], [-1], [1], [-1]]))
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(0), 1, 4))
    found = agent.explore(state, inputs, (), noise).extras.probs()
    np.testing.assert_allclose(found, Categorical(np.asarray(inputs.obs) @ WEIGHTS).probs(), atol=0.05)


def test_teacher_of_another_kind_is_refused():
    normal = lambda inputs: Gaussian(inputs.obs, inputs.obs)
    message = "^bonus.run: must have a policy of the kind Categorical, got Gaussian; use the same policy$"
    with pytest.raises(ValueError, match=message):
        made(normal)


def test_teacher_sees_whole_stacks_of_frames():
    """A rollout keeps the newest frame, here the time. The stack of time t is (t - 1, t), and (0, 0) at the start."""
    rules = probes.Rules(
        5, True, probes._no_cue,
        observe=lambda time, cue: jnp.stack([jnp.maximum(time - 1, 0), time], axis=-1).astype(jnp.float32),
        reward=probes._one,
    )  # fmt: skip
    env = probes._env("stacks", 4, rules)
    env = env._replace(spec=env.spec._replace(frame_stack=2))
    env, agent, state = made(lambda inputs: Categorical(inputs.obs), env)
    experience = probes.experience(env, agent, state)
    prepare = jax.jit(lambda *given: agent.explore.args[0].bonus.prepare(*given).rows[0].logits)
    time = np.asarray(experience.steps.obs.newest[..., 0])
    assert sorted({*time.ravel()}) == [0, 1, 2, 3, 4, 5]
    expected = np.stack([np.maximum(time - 1, 0), time], axis=-1)
    np.testing.assert_array_equal(prepare(state, experience, jnp.zeros((8, 4))), expected)
