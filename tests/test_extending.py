"""Build three custom agents from parts of the package, in a few dozen lines each, and train them on probes.

They are an off-policy actor-critic with twin critics, an agent with memory, and one with action masks. None of them
needs a change of the package. Then train with the torso, the memory, the wrapper and the value head of
docs/extending/parts.md.
"""

import json
import re
import shlex
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast import agents, loop, networks, replay
from jaxrl_fast import train as train_command
from jaxrl_fast.networks.ensemble import ensemble
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import distributions, heads, off_policy
from jaxrl_fast.runs import files
from jaxrl_fast.training import evaluator
from jaxrl_fast.types import Agent, Decision, Discrete, Env, EnvSpec, PolicyInput, PyTree, TimeStep
from tests.helpers import probes

GAMMA = probes.GAMMA


def train(env, agent, num_updates, seed=0):
    """Return the agent's state after `num_updates` updates."""
    run = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)[0].agent)
    return run(jax.random.key(seed))


def greedy_return(env, agent, state, num_episodes=4):
    """Return the mean return of the greedy policy."""
    play = jax.jit(partial(evaluator.evaluate_policy, env, agent, num_episodes))
    return float(play(state, jnp.uint32(0), jnp.int32(0)).score.mean())


class OffPolicy(NamedTuple):
    """The state of an actor-critic that learns from a replay."""

    actor: PyTree
    critics: PyTree  # [2, ...]
    target: PyTree  # the critics' moving average
    optimizer: PyTree
    replay: PyTree
    counts: off_policy.Counts
    num_updates: jax.Array


def twin_critics(spec: EnvSpec, rollout_length=4, batch_size=64) -> Agent:
    """Deterministic policy gradient with clipped double Q-learning (Fujimoto et al. 2018, algorithm 1)."""
    steps = rollout_length * spec.num_envs
    buffer = replay.uniform(replay.ReplayConfig(512 // spec.num_envs, spec.num_envs), spec)
    ratio = off_policy.ReplayRatio(Fraction(1, 2), 64, steps)
    actor = networks.network(spec.obs, spec.action.num_outputs, networks.Options(hidden=(32,)))
    action_like = ShapeDtypeStruct(spec.action.shape, jnp.float32)
    critics = ensemble(networks.network((spec.obs, action_like), 1, networks.Options(hidden=(32,))), 2)
    optimizer = optax.adam(3e-3)
    act = lambda params, obs: jnp.tanh(actor.apply(params, obs))
    value = lambda params, obs, action: critics.apply(params, (obs, action))[..., 0]  # [2, B]

    def init(key):
        key_actor, key_critics = jax.random.split(key)
        params = actor.init(key_actor), critics.init(key_critics)
        counts = off_policy.init()
        return OffPolicy(*params, params[1], optimizer.init(params), buffer.init(), counts, jnp.int32(0))

    def explore(state, inputs, carry, key):
        action = act(state.actor, inputs.obs)
        return Decision(jnp.clip(action + 0.3 * jax.random.normal(key, action.shape), -1, 1))

    def loss(params, target, batch):
        following = act(params[0], batch.next_obs)
        goal = batch.reward + batch.discount * value(target, batch.next_obs, following).min(0)
        error = value(params[1], batch.obs, batch.action) - jax.lax.stop_gradient(goal)[None]
        frozen = jax.lax.stop_gradient(params[1])
        return (error**2).mean() - value(frozen, batch.obs, act(params[0], batch.obs))[0].mean()

    def update(state, rollout, key):
        rows = buffer.add(state.replay, rollout.steps)
        due, counts = off_policy.num_grad_steps_due(ratio, state.counts, state.num_updates * steps)

        def step(i, learner, keys):
            params, target, optimizer_state = learner
            batch, _, _ = buffer.sample(rows, keys[0], batch_size, GAMMA)
            change, optimizer_state = optimizer.update(jax.grad(loss)(params, target, batch), optimizer_state)
            params = optax.apply_updates(params, change)
            target = optax.incremental_update(params[1], target, 0.05)
            return (params, target, optimizer_state), {}

        learner = (state.actor, state.critics), state.target, state.optimizer
        learner, _ = off_policy.gradient_steps(due, off_policy.max_grad_steps(ratio), step, learner, key)
        (actor_params, critic_params), target, optimizer_state = learner
        state = OffPolicy(actor_params, critic_params, target, optimizer_state, rows, counts, state.num_updates + 1)
        return state, {"gradient_steps": due}

    exploit = lambda state, inputs, carry, key: Decision(act(state.actor, inputs.obs))
    return Agent(init, explore, exploit, update, rollout_length, policy_state=lambda s: s._replace(replay=()))


@pytest.mark.slow
def test_off_policy_agent_with_twin_critics_learns():
    env = probes.continuous_action_of_observation(8)
    agent = twin_critics(env.spec)
    state = train(env, agent, 200)
    assert greedy_return(env, agent, state) > 0.98  # 1 is the maximum, 0.75 the return of action 0
    action = agent.exploit(state, PolicyInput(jnp.float32([[-1], [1]])), (), None).action
    np.testing.assert_allclose(action, [[-0.5], [0.5]], atol=0.15)


def recurrent_agent(spec: EnvSpec, rollout_length=12) -> Agent:
    """Policy gradient with a GRU that is unrolled from the carry at the start of the rollout."""
    network = networks.network(
        spec.obs, spec.action.num_outputs, networks.Options(memory="gru", memory_size=16, hidden=(16,))
    )
    optimizer = optax.adam(1e-2)

    def act(decide, state, inputs, carry, key):
        logits, carry = network.step(state[0], inputs.obs, carry)
        pi = distributions.Categorical(logits)
        return Decision(pi.sample(key) if decide else pi.mode(), carry)

    def loss(params, rollout):
        steps = rollout.steps
        logits, _ = network.unroll(params, steps.obs.swapaxes(0, 1), rollout.carry, ~steps.valid.T)
        pi = distributions.Categorical(logits.swapaxes(0, 1))
        to_go = jax.lax.scan(  # undiscounted returns within the episode
            lambda total, row: (row[0] + total * ~row[1],) * 2,
            jnp.zeros(spec.num_envs), (steps.reward, steps.last), reverse=True,
        )[1]  # fmt: skip
        return -(steps.valid * (pi.log_prob(steps.action) * to_go + 0.01 * pi.entropy())).mean()

    def update(state, rollout, key):
        params, optimizer_state = state
        change, optimizer_state = optimizer.update(jax.grad(loss)(params, rollout), optimizer_state)
        return (optax.apply_updates(params, change), optimizer_state), {}

    def init(key):
        params = network.init(key)
        return params, optimizer.init(params)

    return Agent(
        init, partial(act, True), partial(act, False), update, rollout_length, initial_carry=network.initial_carry
    )


@pytest.mark.slow
def test_recurrent_agent_solves_memory_probe():
    env = probes.remember(32)
    agent = recurrent_agent(env.spec)
    assert greedy_return(env, agent, train(env, agent, 200)) == 1.0  # 0 without memory


@pytest.mark.slow
def test_unroll_equals_stepwise_outputs_of_acting_policy():
    """The outputs of an unroll equal those of the policy while acting, also at episode starts."""
    env = probes.remember(4)
    agent = recurrent_agent(env.spec)
    network = networks.network(env.spec.obs, 2, networks.Options(memory="gru", memory_size=16, hidden=(16,)))
    state = jax.jit(agent.init)(jax.random.key(0))
    told = lambda state, inputs, carry, key: Decision(
        *agent.explore(state, inputs, carry, key)[:2], extras=network.step(state[0], inputs.obs, carry)[0]
    )
    rollout = probes.experience(env, agent._replace(explore=told), state)
    obs, reset = rollout.steps.obs.swapaxes(0, 1), ~rollout.steps.valid.T
    outputs, _ = network.unroll(state[0], obs, rollout.carry, reset)
    np.testing.assert_allclose(outputs.swapaxes(0, 1), rollout.steps.extras, atol=1e-6)
    assert not rollout.steps.valid.all()


def forbidden(num_envs: int) -> Env:
    """Episodes have one step. One random action of 3 is masked and gives -10; the first allowed action gives 1."""
    spec = EnvSpec("forbidden", ShapeDtypeStruct((3,), jnp.float32), Discrete(3), num_envs, has_action_mask=True)

    def timestep(key, reward, last):
        banned = jax.random.randint(key, (num_envs,), 0, 3)
        obs = jax.nn.one_hot(banned, 3)
        return TimeStep(obs, reward, 1.0 - last, last, action_mask=obs == 0)

    def reset(key):
        key, now = jax.random.split(key)
        first = timestep(now, jnp.zeros(num_envs), jnp.zeros(num_envs, bool))
        return (key, first), first

    def step(state, action):
        key, before = state
        key_next, now = jax.random.split(key)
        allowed = jnp.take_along_axis(before.action_mask, action[:, None], axis=1)[:, 0]
        best = action == jnp.argmax(before.action_mask, axis=1)
        reward = jnp.where(before.last, 0.0, jnp.where(allowed, 1.0 * best, -10.0))
        after = timestep(now, reward, ~before.last)
        return (key_next, after), after

    return Env(reset, step, spec)


def masked_agent(spec: EnvSpec, rollout_length=8) -> Agent:
    """Policy gradient on masked logits."""
    head = heads.head(spec.action)
    network = networks.network(spec.obs, head.num_outputs, networks.Options(hidden=(16,)))
    optimizer = optax.adam(1e-2)

    def act(sample, state, inputs, carry, key):
        pi = head.make(network.apply(state[0], inputs.obs), (), inputs.action_mask)
        return Decision(pi.sample(key) if sample else pi.mode())

    def loss(params, steps):
        pi = head.make(network.apply(params, steps.obs), (), steps.action_mask)
        return -(steps.valid * pi.log_prob(steps.action) * (steps.reward - 0.5)).mean()

    def update(state, rollout, key):
        params, optimizer_state = state
        change, optimizer_state = optimizer.update(jax.grad(loss)(params, rollout.steps), optimizer_state)
        lowest = jnp.where(rollout.steps.valid, rollout.steps.reward, 0.0).min()
        return (optax.apply_updates(params, change), optimizer_state), {"reward_min": lowest}

    def init(key):
        params = network.init(key)
        return params, optimizer.init(params)

    return Agent(init, partial(act, True), partial(act, False), update, rollout_length)


@pytest.mark.slow
def test_masked_agent_never_takes_masked_action():
    env = forbidden(16)
    agent = masked_agent(env.spec)
    run = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), 100))
    state, metrics = run(jax.random.key(0))
    assert metrics["reward_min"].min() >= 0
    assert greedy_return(env, agent, state.agent) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "dqn", "pqn"])
def test_built_in_algorithms_never_take_masked_action(algo):
    """Also check random exploration, and value targets, which must not use masked actions."""
    options = {
        "ppo": dict(rollout_length=8, num_minibatches=2, learning_rate=1e-2),
        "dqn": dict(rollout_length=1, learning_starts=64, replay={"size": 1024}, batch_size=32, learning_rate=1e-2),
        "pqn": dict(rollout_length=8, num_minibatches=2, learning_rate=1e-2, explore={"steps": 1000}),
    }[algo]
    env = forbidden(16)
    config = configure(ALGORITHMS[algo], **options, network={"hidden_sizes": (16,)})
    agent = agents.load(algo).make(config, env.spec, 60)
    run = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), 60))
    state, metrics = run(jax.random.key(0))
    assert metrics["return_min"].min() >= 0
    assert greedy_return(env, agent, agent.policy_state(state.agent)) >= 0


# The parts of docs/extending/parts.md

PAGE = (Path(__file__).parent.parent / "docs" / "extending" / "parts.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
BRIEF = "--total-steps 1024 --num-envs 4 --eval-episodes 4 --devices 1 --loggers none --log-level quiet --run-dir ./run"


@pytest.fixture
def train_section(tmp_path, monkeypatch):
    """Return a function that writes the file of a section, trains by its command, and returns summary and shapes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def train_by(heading, *more):
        (module,) = re.findall(r"```python\n(.*?)```", SECTIONS[heading], re.DOTALL)
        name = re.match(r"# (\w+)\.py\n", module)[1]
        Path(f"{name}.py").write_text(module, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
        (line,) = re.findall(r"^python -m jaxrl_fast\.train (.*)$", SECTIONS[heading], re.MULTILINE)
        assert train_command.main([*shlex.split(line), *BRIEF.split(), *more]) == 0
        summary = files.read_summary(Path("run"))
        assert summary["env_steps"] >= 1024
        manifest = Path("run", "checkpoints", summary["last_checkpoint"], "manifest.json")
        arrays = json.loads(manifest.read_text(encoding="utf-8"))["arrays"]
        return summary, {name: tuple(array["shape"]) for name, array in arrays.items()}

    return train_by


def test_every_section_of_parts_is_tested():
    assert [*SECTIONS] == ["A torso", "A memory", "A wrapper", "A value head"]


@pytest.mark.slow
def test_documented_torso_is_part_of_network(train_section):
    _, shapes = train_section("A torso", "--rollout-length", "32")
    assert shapes["agent/params/network/params/torso/module/Dense_0/kernel"] == (4, 32)
    assert shapes["agent/params/network/params/actor_head/kernel"] == (64, 2), "sines and cosines"


@pytest.mark.slow
def test_documented_memory_is_part_of_network(train_section):
    _, shapes = train_section("A memory", "--rollout-length", "32")
    memory = {name.rpartition("/memory/")[2]: shape for name, shape in shapes.items() if "params/memory/" in name}
    assert memory == {"input_kernel": (64, 32), "input_bias": (32,), "hidden_kernel": (32, 32)}


@pytest.mark.slow
def test_documented_wrapper_halves_returns(train_section):
    """Without the wrapper, an episode of CartPole has a return of 1 for each step."""
    summary, _ = train_section("A wrapper", "--rollout-length", "32", "--log-every", "128")
    assert summary["eval_return_mean"] == summary["eval_length_mean"] / 2
    records = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ended = [record for record in records if record["episodes"]]
    assert ended and all(record["return_mean"] == record["episode_length_mean"] / 2 for record in ended)


@pytest.mark.slow
def test_documented_value_head_decides_outputs(train_section):
    _, shapes = train_section("A value head", "--learning-starts", "200", "--size", "1000")
    assert shapes["agent/learner/params/params/heads_0/kernel"][1] == 2 * 2, "2 actions, a mean and a deviation each"
