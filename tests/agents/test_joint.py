"""Several choices as one action: exact conversions, and the same learning as with one choice among all combinations."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import agents, loop
from jaxrl_fast.agents import joint
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure
from jaxrl_fast.types import Discrete, MultiDiscrete, PolicyInput
from tests.helpers import probes, slow
from tests.helpers.agents import LITTLE, SHORT

NUMS = 2, 3
OPTIONS = {"dqn": LITTLE, "pqn": SHORT, "sac": LITTLE}


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.integers(0, 2**32 - 1))
def test_conversions_follow_unravel_index(nums, seed):
    combinations = list(itertools.product(*map(range, nums)))
    action = jnp.arange(len(combinations))
    np.testing.assert_array_equal(joint.split(nums, action), combinations)
    np.testing.assert_array_equal(joint.join(nums, jnp.asarray(combinations)), action)
    parts = [np.random.default_rng(seed).random(num) < 0.6 for num in nums]
    mask = joint.join_mask(nums, jnp.asarray(np.concatenate(parts))[None])
    assert mask[0].tolist() == [all(part[i] for part, i in zip(parts, one, strict=True)) for one in combinations]


def envs_of():
    """Return a task of two choices, and the same task with one choice of six; masks forbid the first option of each."""
    single = probes.best_action(4)
    spec = single.spec._replace(action=MultiDiscrete(NUMS), has_action_mask=True)
    pays = lambda index: jnp.where(index == 5, 1, 0)
    rows = lambda mask: jnp.broadcast_to(jnp.array(mask), (4, len(mask)))
    masks = {"many": rows([True, True, False, True, True])}
    masks["one"] = joint.join_mask(NUMS, masks["many"])

    def env_of(name, index, spec):
        seen = lambda timestep: timestep._replace(action_mask=masks[name])

        def step(state, action):
            state, timestep = single.step(state, pays(index(action)))
            return state, seen(timestep)

        def reset(key):
            state, timestep = single.reset(key)
            return state, seen(timestep)

        return single._replace(reset=reset, step=step, spec=spec)

    many = env_of("many", lambda action: joint.join(NUMS, action), spec)
    return many, env_of("one", lambda action: action, spec._replace(action=Discrete(6)))


@pytest.mark.parametrize("algo", ["pqn", slow("dqn"), slow("sac")])
def test_choices_learn_like_one_choice_among_combinations(algo):
    """Two programs round alike only nearly."""
    results = []
    for env in envs_of():
        agent = agents.load(algo).make(configure(ALGORITHMS[algo], **OPTIONS[algo]), env.spec, 6)
        run = lambda key, env=env, agent=agent: loop.train(env, agent, loop.init(env, agent, key), 6)
        state, metrics = jax.jit(run)(jax.random.key(0))
        learned = state.agent.params if algo == "pqn" else state.agent.learner
        results.append((learned, dict(metrics)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), *results)


@pytest.mark.slow
@pytest.mark.parametrize("algo", OPTIONS)
def test_agent_learns_best_combination(algo):
    env, _ = envs_of()
    config = dict(rollout_length=16, learning_rate=1e-2, hidden_sizes=(16,), gamma=0.9)
    config |= {} if algo == "pqn" else dict(size=512, batch_size=32, replay_ratio=0.5, learning_starts=64)
    config |= (
        dict(learn_temperature=False, temperature=0.05) if algo == "sac" else dict(explore=dict(start=1.0, end=0.2))
    )
    agent = agents.load(algo).make(configure(ALGORITHMS[algo], **config), env.spec, 60)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), 60)[0]
    state = jax.jit(run)(jax.random.key(0))
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(1), 1, 4))
    inputs = PolicyInput(jnp.ones((4, 1)), envs_of()[0].reset(jax.random.key(0))[1].action_mask)
    action = agent.exploit(state.agent, inputs, (), noise).action
    np.testing.assert_array_equal(action, [[1, 2]] * 4)


@pytest.mark.parametrize("algo", OPTIONS)
def test_make_rejects_too_many_combinations(algo):
    spec = probes.best_action(4).spec._replace(action=MultiDiscrete((17,) * 3))
    words = rf"^{algo}: needs a value of each combination of choices, at most 4,096, got 4,913 of probes/.*; try ppo$"
    with pytest.raises(ValueError, match=words):
        agents.load(algo).make(configure(ALGORITHMS[algo], **OPTIONS[algo]), spec, 6)
