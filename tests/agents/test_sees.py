"""Test critics that see more than the actor: golden values in numpy, and probes whose answer depends on it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import agents, loop, players
from jaxrl_fast.agents import critics, td3
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.run import Players, SelfPlay
from jaxrl_fast.replay import Sample
from jaxrl_fast.rl.value_distributions import Atoms
from jaxrl_fast.types import Box, Discrete, Env, PolicyInput
from tests.helpers import probes, slow
from tests.helpers.agents import CONTINUOUS, LITTLE, SHORT

SMALL = {"ppo": SHORT} | dict.fromkeys(CONTINUOUS, LITTLE)
SEES = dict(actor=dict(sees=["seen"]), critic=dict(sees=["all"]))
BLIND = dict(actor=dict(sees=["seen"]), critic=dict(sees=["seen"]))


def as_parts(env: Env) -> Env:
    """Return a probe that observes [cue, time] as {"hidden": cue, "seen": time}."""
    split = lambda timestep: timestep._replace(obs={"hidden": timestep.obs[:, :1], "seen": timestep.obs[:, 1:]})

    def step(state, action):
        state, timestep = env.step(state, action)
        return state, split(timestep)

    def reset(key):
        state, timestep = env.reset(key)
        return state, split(timestep)

    parts = {name: jax.ShapeDtypeStruct((1,), jnp.float32) for name in ("hidden", "seen")}
    return env._replace(reset=reset, step=step, spec=env.spec._replace(obs=parts))


def hidden_cue(num_envs: int, action=None) -> Env:
    """Episodes have two steps; the second has the cue, -1 or +1, as its reward, whatever the actions are.

    The value is 0.9 cue, then cue, for a critic that sees the cue, else 0.
    """
    env = as_parts(probes.delayed_cue(num_envs))
    return env._replace(spec=env.spec._replace(action=action or env.spec.action))


def hidden_answer(num_envs: int, action=probes.TWO_ACTIONS) -> Env:
    """Episodes have one step. The reward is 1 if the action has the sign of the hidden cue, else -1.

    An actor that does not see the cue earns 0, whatever its critic sees; one that sees it earns 1.
    """
    sign = lambda action: jnp.where(action == 1, 1.0, -1.0) if action.ndim == 1 else jnp.sign(action[:, 0])
    rules = probes.Rules(
        1,
        True,
        probes._sign,
        probes._show_and_time,
        lambda time, cue, action: jnp.where(sign(action) == cue, 1.0, -1.0),
    )
    return as_parts(probes._env("hidden_answer", num_envs, rules, action))


def agent_of(algo, env, num_updates=50, **options):
    config = configure(ALGORITHMS[algo], **{**SMALL[algo], **options})
    return agents.load(algo).make(config, env.spec, num_updates)


def trained(env, algo, num_updates, **options):
    """Return an agent and its state after training."""
    agent = agent_of(algo, env, num_updates, **options)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)[0]
    return agent, jax.jit(run)(jax.random.key(0)).agent


def obs_of(cue, time):
    """Return observations of all cues and times, each [B, 1]."""
    return {"hidden": jnp.float32(cue)[:, None], "seen": jnp.float32(time)[:, None]}


CORNERS = obs_of([-1, 1, -1, 1], [0, 0, 1, 1])
QUICK = dict(hidden_sizes=(16,), learning_rate=1e-2, gamma=probes.GAMMA)
ON = dict(rollout_length=8, num_minibatches=2, num_epochs=4, schedule="constant", clip_vloss=False, **QUICK)
OFF = dict(size=4096, batch_size=64, replay_ratio=0.25, learning_starts=64, critic_learning_rate=1e-2, **QUICK)


@pytest.mark.parametrize("memory", ["none", slow("gru")])
def test_values_of_ppo_know_what_the_critic_alone_sees(memory):
    env = hidden_cue(16)
    given = ON | dict(memory=memory if memory == "none" else dict(kind=memory, size=8))
    read = {}
    for name, sees in (("all", SEES), ("seen", BLIND)):
        agent, state = trained(env, "ppo", 60, **given, **sees)
        network = agent.explore.args[0].policy.network
        sequences = jax.tree.map(lambda x: x.reshape(2, 2, 1).swapaxes(0, 1), CORNERS)  # [cue, time, 1]
        carry = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), network.initial_carry)
        (_, value), _ = network.unroll(state.params["network"], sequences, carry, jnp.zeros((2, 2), bool))
        read[name] = value
    np.testing.assert_allclose(read["all"], [[-0.9, -1], [0.9, 1]], atol=0.15)
    np.testing.assert_allclose(read["seen"], np.zeros((2, 2)), atol=0.3)


@pytest.mark.parametrize("algo", ["td3", slow("sac"), slow("ddpg")])
def test_values_of_critics_know_what_they_alone_see(algo):
    env = hidden_cue(16, Box((1,)))
    more = dict(learn_temperature=False, temperature=1e-6) if algo == "sac" else {}
    read = {}
    for name, sees in (("all", SEES), ("seen", BLIND)):
        agent, state = trained(env, algo, 300, **OFF, **more, **sees)
        context = agent.update.args[0]
        read[name] = context.critic.apply(state.learner.params.critic, (CORNERS, jnp.zeros((4, 1)))).mean(0)
    np.testing.assert_allclose(read["all"], [-0.9, 0.9, -1, 1], atol=0.2)
    np.testing.assert_allclose(read["seen"], np.zeros(4), atol=0.4)


@pytest.mark.parametrize("algo", ["ppo", slow("sac"), slow("td3")])
def test_actor_does_not_use_what_only_its_critic_sees(algo):
    action = Discrete(2) if algo == "ppo" else Box((1,))
    env = hidden_answer(32, action)
    earned = {}
    for name, sees in (("seen", SEES), ("all", {})):
        agent, state = trained(env, algo, 40 if algo == "ppo" else 150, **(ON if algo == "ppo" else OFF), **sees)
        cue = jnp.where(jnp.arange(64) % 2 == 0, -1.0, 1.0)
        inputs = PolicyInput(obs_of(cue, jnp.zeros(64)))
        carry = jax.tree.map(lambda x: jnp.zeros((64, *x.shape), x.dtype), agent.initial_carry)
        noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(1), 1, 64))
        chosen = agent.exploit(state, inputs, carry, noise).action
        sign = jnp.where(chosen == 1, 1.0, -1.0) if algo == "ppo" else jnp.sign(chosen[:, 0])
        earned[name] = float(jnp.where(sign == cue, 1.0, -1.0).mean())
    assert earned == {"seen": 0.0, "all": 1.0}


@pytest.mark.parametrize("algo", SMALL)
def test_action_has_no_gradient_with_respect_to_hidden_parts(algo):
    """The gradient is exactly 0, with normalized observations, while acting and exploring."""
    env = hidden_answer(4, Discrete(2) if algo == "ppo" else Box((1,)))
    agent = agent_of(algo, env._replace(spec=env.spec._replace(action=Box((1,)))), normalize_observations=True, **SEES)
    state = agent.init(jax.random.key(0))
    obs = obs_of([0.3, -0.2, 1.0, 2.0], [0.1, 0.2, 0.3, -0.5])
    carry = jax.tree.map(lambda x: jnp.zeros((4, *x.shape), x.dtype), agent.initial_carry)
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(1), 1, 4))
    if algo != "ppo":
        noise = noise._replace(step=noise.step + 10_000)  # after the uniformly random actions
    for act in (agent.exploit, agent.explore):
        gradient = jax.grad(lambda obs, act=act: act(state, PolicyInput(obs), carry, noise).action.sum())(obs)
        assert not np.asarray(gradient["hidden"]).any() and np.asarray(gradient["seen"]).any()


@pytest.mark.parametrize("algo", ["ppo", slow("sac"), slow("td3"), slow("ddpg")])
def test_parts_that_none_sees_change_nothing(algo):
    """With hidden parts for both, an agent learns the same as one in an environment without them."""
    env = hidden_cue(4, None if algo == "ppo" else Box((1,)))
    alone = env._replace(
        reset=lambda key: _only_seen(env.reset(key)),
        step=lambda state, action: _only_seen(env.step(state, action)),
        spec=env.spec._replace(obs={"seen": env.spec.obs["seen"]}),
    )
    states = []
    for one, sees in ((env, BLIND), (alone, {})):
        agent = agent_of(algo, one, 6, **sees)
        state, _ = loop.train(one, agent, loop.init(one, agent, jax.random.key(0)), 6)
        learned = state.agent.learner if algo != "ppo" else state.agent
        states.append(learned)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8), *states)


def _only_seen(pair):
    state, timestep = pair
    return state, timestep._replace(obs={"seen": timestep.obs["seen"]})


def test_several_seeds_in_one_program_equal_each_alone():
    env = hidden_cue(4)
    agent = agent_of("ppo", env, 4, **SEES)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), 4)[0].agent.params
    keys = jax.random.split(jax.random.key(3), 2)
    together = jax.jit(jax.vmap(run))(keys)
    for i in range(2):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, atol=1e-5), together, jax.jit(run)(keys[i]))


def test_replay_stores_each_part_once():
    env = hidden_cue(4, Box((1,)))
    sizes = []
    for sees in (SEES, {}):
        buffer = jax.eval_shape(agent_of("sac", env, **sees).init, jax.random.key(0)).replay
        sizes.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(buffer)))
    assert sizes[0] == sizes[1]


def test_normalizer_has_statistics_of_all_parts():
    env = hidden_cue(8)
    _, state = trained(env, "ppo", 6, normalize_observations=True, **SEES)
    assert (
        float(state.observations["hidden"].num_rows) > 0 and abs(float(state.observations["hidden"].var[0]) - 1) < 0.3
    )


# An independent program in numpy: one hidden layer of rectified units, by hand


def layers(params, i=None):
    """Return kernel and bias of the hidden layer and of the head of a network, or of critic i."""
    tree = params["params"]
    of = lambda layer: [
        np.asarray(layer[name] if i is None else layer[name][i], np.float64) for name in ("kernel", "bias")
    ]
    return [*of(tree["torso"]["mlp"]["Dense_0"]), *of(tree["heads_0"])]


def forward(weights, x):
    w1, b1, w2, b2 = weights
    hidden = np.maximum(x @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2


def backward(weights, x, hidden, of_output):
    """Return the gradients of the layers and of the input, from those of the outputs [B, K]."""
    w1, _, w2, _ = weights
    of_hidden = (of_output @ w2.T) * (hidden > 0)
    return [x.T @ of_hidden, of_hidden.sum(0), hidden.T @ of_output, of_output.sum(0)], of_hidden @ w1.T


def test_losses_of_td3_equal_program_in_numpy():
    """The target, the critics' gradient and the policy's gradient, with 1 seen and 2 hidden numbers."""
    parts = {"hidden": jax.ShapeDtypeStruct((2,), jnp.float32), "seen": jax.ShapeDtypeStruct((1,), jnp.float32)}
    env = hidden_cue(4, Box((1,)))
    agent = agent_of("td3", env._replace(spec=env.spec._replace(obs=parts)), gamma=0.9, **SEES)
    context, rng, num = agent.update.args[0], np.random.default_rng(0), 5
    learner = agent.init(jax.random.key(0)).learner
    other = agent.init(jax.random.key(1)).learner.params
    learner = learner._replace(target_params=other)
    draw = lambda *shape: rng.normal(size=(num, *shape)).astype(np.float32)
    obs, next_obs = ({"hidden": draw(2), "seen": draw(1)} for _ in range(2))
    action, reward, discount, noise = np.tanh(draw(1)), draw(), np.float32([0.9, 0, 0.9, 0.9, 0.9]), draw(1)
    batch = Sample(obs, action, reward, discount, next_obs)
    weight = jnp.full(num, 1 / num)

    of_critic = lambda obs, action: np.concatenate([obs["hidden"], obs["seen"], action], 1).astype(np.float64)
    pi = np.tanh(forward(layers(other.actor), next_obs["seen"])[1])
    pi = np.clip(pi + np.clip(0.2 * noise, -0.5, 0.5), -1, 1)
    values = [forward(layers(other.critic, i), of_critic(next_obs, pi))[1][:, 0] for i in range(2)]
    target = reward + discount * np.minimum(*values)
    next_action, target_of = td3.td_target(context, learner, batch, jnp.asarray(noise))
    found = target_of(context.critic.apply(other.critic, (next_obs, next_action)))
    np.testing.assert_allclose(next_action, pi, rtol=1e-5)
    np.testing.assert_allclose(found.mean, target, rtol=1e-4)

    objective = partial(critics.loss, context, batch, Atoms(jnp.float32(target)[:, None], jnp.ones((num, 1))), weight)
    gradient = jax.grad(objective, has_aux=True)(learner.params.critic)[0]
    for i in range(2):
        weights, x = layers(learner.params.critic, i), of_critic(obs, action)
        hidden, q = forward(weights, x)
        wanted, _ = backward(weights, x, hidden, (q - target[:, None]) / num)
        for mine, theirs in zip(wanted, layers(gradient, i), strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=1e-3, atol=1e-6)

    gradient = jax.grad(partial(td3.policy_loss, context, learner, obs, weight))(learner.params.actor)
    actor, critic = layers(learner.params.actor), layers(learner.params.critic, 0)
    hidden_actor, output = forward(actor, obs["seen"].astype(np.float64))
    x = of_critic(obs, np.tanh(output))
    hidden_critic, _ = forward(critic, x)
    _, of_input = backward(critic, x, hidden_critic, np.full((num, 1), -1 / num))
    wanted, _ = backward(actor, obs["seen"], hidden_actor, of_input[:, 3:] * (1 - np.tanh(output) ** 2))
    for mine, theirs in zip(wanted, layers(gradient), strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-3, atol=1e-6)


def test_values_and_policy_of_ppo_equal_program_in_numpy():
    env = hidden_cue(4)
    agent = agent_of("ppo", env, activation="relu", **SEES)
    params, obs = agent.init(jax.random.key(0)).params, obs_of([0.5, -1, 2], [0, 1, 0])
    network = agent.explore.args[0].policy.network
    tree = params["network"]["params"]
    rename = lambda torso, head: {"params": {"torso": tree[torso], "heads_0": tree[head]}}
    logits, value = network.both(params["network"], obs)
    seen = np.asarray(obs["seen"])
    everything = np.concatenate([obs["hidden"], obs["seen"]], 1)
    np.testing.assert_allclose(forward(layers(rename("torso", "actor_head")), seen)[1], logits, rtol=1e-5)
    of_critic = forward(layers(rename("critic_torso", "critic_head")), everything)[1][:, 0]
    np.testing.assert_allclose(of_critic, value, rtol=1e-5)


# Players


@pytest.mark.parametrize("mode", ["shared", "independent", "self-play"])
def test_players_see_their_number_in_addition(mode):
    spec = hidden_cue(4).spec._replace(players=("left", "right"))
    chosen = SelfPlay(kind=mode) if mode == "self-play" else Players(kind=mode)
    config = configure(ALGORITHMS["ppo"], **SHORT, **SEES)
    agent = players.learning(agents.load("ppo"), chosen).make(config, spec, 10)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    params = (state.learner if mode == "self-play" else state).params["network"]["params"]
    sizes = [params[torso]["mlp"]["Dense_0"]["kernel"].shape[-2] for torso in ("torso", "critic_torso")]
    assert sizes == ([1, 2] if mode == "independent" else [1 + 2, 2 + 2])
    wrong = configure(ALGORITHMS["ppo"], **SHORT, actor=dict(sees=["sen"]))
    with pytest.raises(ValueError, match=r"actor.sees: .* which are hidden, seen, got sen; did you mean seen"):
        players.learning(agents.load("ppo"), chosen).make(wrong, spec, 10)
