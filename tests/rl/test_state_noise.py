"""gSDE in PPO: its actions and their density against a plain loop, with and without memory, and its gradients."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs, rollout, types
from jaxrl_fast.agents import ppo
from jaxrl_fast.envs.spaces import Interval
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import state_noise

N, T, WIDTH, SIZE = 3, 24, 4, 2  # environments, steps, features, numbers of an action
SAMPLE_FREQ = {"none": 3, "gru": None}  # by the agent's memory


class Walk:
    """A random walk whose episodes end at random."""

    default_params = ()

    def reset_env(self, key, params):
        place = jax.random.normal(key, (3,))
        return place, place

    def step_env(self, key, place, action, params):
        place = jnp.clip(place + 0.3 * jax.random.normal(key, (3,)) + 0.01 * action.sum(), -3, 3)
        return place, place, action[0], jax.random.bernoulli(key, 0.15), {}

    def is_truncated(self, place, params):
        return False

    def action_space(self, params):
        return Interval(-np.ones(SIZE, np.float32), np.ones(SIZE, np.float32))


@cache
def played(memory):
    """An agent and its state, what it saw and did in T steps, [T, N, ...] each, and the rollout of these."""
    env = envs.make(Walk, N)
    of_memory = {} if memory == "none" else dict(memory=dict(kind=memory, size=WIDTH, sequence_length=8))
    of_policy = dict(policy="gsde", sample_freq=SAMPLE_FREQ[memory])
    config = configure(ppo.Config, rollout_length=T, num_minibatches=1, hidden_sizes=(WIDTH,), **of_policy, **of_memory)
    agent = ppo.make(config, env.spec, 10)
    state = jax.jit(agent.init)(jax.random.key(0))
    log_sigma = 0.5 * jax.random.normal(jax.random.key(1), (WIDTH, SIZE))
    state = state._replace(params=state.params | {"log_std": log_sigma})

    def step(actors, noise):
        decision = agent.explore(state, rollout.policy_input(actors.timestep), actors.carry, noise)
        log_prob = decision.extras.log_prob(decision.action)
        seen = actors.timestep.obs, actors.timestep.last, decision.action, decision.carry[1].matrix, log_prob
        after, (row, _) = rollout.follow(agent, actors, decision, *env.step(actors.env, decision.action))
        return after, (seen, row)

    def play():
        actors = rollout.reset(env, agent, jax.random.key(2))
        end, (seen, steps) = jax.lax.scan(step, actors, agent.sample_noise(jax.random.key(3), T, N))
        return seen, rollout.as_rollout(steps, None, actors.carry, actors.timestep, end.timestep)

    seen, experience = jax.jit(play)()
    return agent, state, jax.tree.map(np.asarray, seen), experience


@pytest.mark.slow
@pytest.mark.parametrize("memory", SAMPLE_FREQ)
def test_gsde_actions_and_densities_match_plain_loop(memory):
    agent, state, (obs, ignored, action, matrix, log_prob), _ = played(memory)
    sample_freq = SAMPLE_FREQ[memory]
    network, params = agent.explore.args[0].policy.network, state.params["network"]
    policy = jax.jit(lambda obs, carry: network.act(params, obs[None], carry))
    sigma = np.exp(np.asarray(state.params["log_std"], float))
    assert ignored.sum() > 3
    for n in range(N):
        age, carry, before = 0, jax.tree.map(lambda x: x[None], network.initial_carry), None
        for t in range(T):
            output, carry = policy(obs[t, n], carry)
            mean, z = np.split(np.asarray(output[0], float), [SIZE])
            is_drawn = age == 0 or (sample_freq is not None and age % sample_freq == 0)
            assert (matrix[t, n] == before).all() != is_drawn
            noise = [sum(sigma[f, d] * matrix[t, n, f, d] * z[f] for f in range(WIDTH)) for d in range(SIZE)]
            np.testing.assert_allclose(action[t, n], mean + noise, rtol=1e-3, atol=1e-5)
            variance = np.array([sum((sigma[f, d] * z[f]) ** 2 for f in range(WIDTH)) + 1e-6 for d in range(SIZE)])
            density = np.exp(-((action[t, n] - mean) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)
            np.testing.assert_allclose(log_prob[t, n], np.log(density.prod()), rtol=1e-3, atol=1e-3)
            age, before = age + 1, matrix[t, n]
            if ignored[t, n]:  # the next row is the first of an episode
                age, carry = 0, jax.tree.map(lambda x: x[None], network.initial_carry)


@pytest.mark.slow
def test_gsde_features_are_inputs_of_last_layer():
    agent, state, (obs, *_), _ = played("none")
    layers = jax.device_get(state.params["network"]["params"])
    first, head = layers["torso"]["mlp"]["Dense_0"], layers["actor_head"]
    z = np.tanh(obs[0] @ first["kernel"] + first["bias"])
    output, _ = agent.explore.args[0].policy.network.act(state.params["network"], obs[0], ())
    np.testing.assert_allclose(output, np.hstack([z @ head["kernel"] + head["bias"], z]), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("memory", SAMPLE_FREQ)
def test_update_recomputes_densities_of_rollout(memory):
    agent, state, *_, experience = played(memory)
    context = agent.explore.args[0]
    rows = jax.jit(lambda state, rollout: ppo.prepare(context, state, rollout).rows)(state, experience)
    _, metrics = jax.jit(lambda params, rows: ppo.loss(context, params, rows))(state.params, rows)
    assert float(metrics["approx_kl"]) == pytest.approx(0, abs=1e-4) and float(metrics["clip_fraction"]) == 0


def test_gsde_matrices_are_standard_normal_and_differ_between_environments():
    carry = state_noise.Carry(jnp.zeros((2000, 3, 2)), jnp.zeros(2000, jnp.int32))
    matrix, age = state_noise.renew(carry, None, jax.random.key(0))
    np.testing.assert_allclose(matrix.mean(0), 0, atol=0.1)
    np.testing.assert_allclose(matrix.std(0), 1, atol=0.06)
    kept, _ = state_noise.renew(state_noise.Carry(matrix, age.at[7].set(0)), None, jax.random.key(1))
    assert np.flatnonzero((kept != matrix).any((1, 2))).tolist() == [7]


def test_no_gradient_flows_from_standard_deviation_into_features():
    head = state_noise.Head(types.Box((SIZE,)), False, WIDTH)
    spread = lambda output, sigma: head.make(output, sigma).log_std.sum()
    of_output, of_sigma = jax.grad(spread, argnums=(0, 1))(jnp.ones((5, SIZE + WIDTH)), head.init(-0.5))
    assert not of_output.any() and (of_sigma > 0).all()
