"""Test the training loop: chunks, seeds, valid rows and scores, on probes with known results."""

import re
from functools import partial
from types import SimpleNamespace

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental import checkify, io_callback

from jaxrl_fast import agents, async_rollout, loop
from jaxrl_fast.agents.ppo import Config, make
from jaxrl_fast.envs.wrappers import wrapper
from jaxrl_fast.metrics.records import SCORES, summarize
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure
from jaxrl_fast.parallel import program
from jaxrl_fast.rollout import Scores, scores_of
from jaxrl_fast.training import build
from jaxrl_fast.types import Agent, Decision, GradientSteps, Learning, Parallelism
from tests.helpers import probes, slow
from tests.helpers.agents import LITTLE, SHORT
from tests.helpers.trees import same_bits


def agent_of(env, num_updates=8, **config):
    config = dict(rollout_length=16, num_minibatches=2, num_epochs=2, hidden_sizes=(16,)) | config
    return make(configure(Config, **config), env.spec, num_updates, env.parallelism)


def constant_agent(env, rollout_length=25) -> Agent:
    """Return an agent that always takes action 0, learns nothing and counts the steps of an episode in its carry."""
    num_envs = env.spec.num_envs
    act = lambda state, inputs, carry, noise: Decision(jnp.zeros(num_envs, jnp.int32), carry + 1, carry)
    return Agent(
        init=lambda key: (),
        explore=act,
        exploit=act,
        update=lambda state, rollout, key: (state, {}),
        rollout_length=rollout_length,
        initial_carry=jnp.int32(0),
    )


@pytest.fixture(scope="module")
def chunks():
    """Return a state, a function that trains it for n updates, and its result for 8. Each n is compiled."""
    env = probes.delayed_consequence(8)
    agent = agent_of(env)
    start = jax.jit(partial(loop.init, env, agent))(jax.random.key(0))
    run = jax.jit(lambda state, n: loop.train(env, agent, state, n), static_argnums=1)
    return start, run, run(start, 8)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1,) * 8, slow((3, 5))])
def test_chunk_lengths_do_not_change_results(lengths, chunks):
    start, run, (whole, whole_metrics) = chunks
    state, parts = start, []
    for length in lengths:
        state, metrics = run(state, length)
        parts.append(metrics)
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    assert same_bits(state, whole)
    assert same_bits(joined, whole_metrics)
    assert state.num_updates == 8


@pytest.mark.slow
def test_seeds_give_different_parameters_and_keys():
    env = probes.best_action_of_observation(8)
    agent = agent_of(env)
    run = jax.vmap(lambda seed: loop.train(env, agent, loop.init(env, agent, jax.random.key(seed)), 2)[0])
    state = jax.jit(run)(jnp.arange(16))
    for leaf in [*jax.tree.leaves(state.agent.params), jax.random.key_data(state.key)]:
        leaf = np.asarray(leaf).reshape(16, -1)
        if leaf.std() > 0:
            assert len(np.unique(leaf, axis=0)) == 16


def test_scores_lengths_and_valid_steps_match_hand_computation():
    """An episode takes 10 steps and a reset row: in 25 rows of 3 environments, 2 episodes each end with return 10."""
    env = probes.constant_reward(3)
    agent = constant_agent(env)
    state, scores = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), 1))(jax.random.key(0))
    expected = dict(
        episodes=6, return_sum=60, return_min=10, return_max=10, length_sum=60, valid_steps=3 * 23, longest_episode=10
    )
    assert {name: float(x[0]) for name, x in scores.items()} == expected
    np.testing.assert_array_equal(state.actors.score, 3)  # 25 rows: 10, reset, 10, reset, 3
    np.testing.assert_array_equal(state.actors.length, 3)


def test_length_sum_does_not_overflow_int32():
    """65,536 episodes of 40,000 steps end in the same row: the sum is 2.6e9."""
    over, length = np.ones(2**16, bool), np.full(2**16, 40_000)
    found = scores_of(over, Scores(jnp.array(over), jnp.zeros(2**16), jnp.array(length, jnp.int32), None))
    assert float(found["length_sum"]) == pytest.approx(length.sum(dtype=np.int64), rel=1e-6)


def test_scores_without_finished_episode_have_infinite_minimum_return():
    env = probes.constant_reward(3)
    agent = constant_agent(env, rollout_length=5)
    _, scores = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), 1))(jax.random.key(0))
    assert scores["episodes"][0] == 0 and scores["return_min"][0] == np.inf


def test_carry_is_reset_at_start_of_each_episode():
    """The carry counts decisions. That of the reset row does not count, so each episode has 0, 1, ... 9."""
    env = probes.constant_reward(2)
    agent = constant_agent(env)
    experience = probes.experience(env, agent, ())
    seen = np.asarray(experience.steps.extras)[:, 0]
    valid = np.asarray(experience.steps.valid)[:, 0]
    np.testing.assert_array_equal(seen[valid], [*range(10), *range(10), *range(3)])


def test_only_reset_rows_are_invalid_and_their_reward_is_0():
    env = probes.constant_reward(2)
    agent = constant_agent(env)
    experience = probes.experience(env, agent, ())
    np.testing.assert_array_equal(np.flatnonzero(~experience.steps.valid[:, 1]), [10, 21])
    np.testing.assert_array_equal(experience.steps.reward[~experience.steps.valid], 0)


each_algorithm = pytest.mark.parametrize(
    ("algo", "options"),
    [("ppo", SHORT), ("pqn", SHORT), ("dqn", LITTLE | dict(noisy=True, replay="prioritized", n_step=3))],
)


def training_of(algo, options, num_updates, change=lambda env: env):
    env = change(probes.best_action(4))
    agent = agents.load(algo).make(configure(ALGORITHMS[algo], **options), env.spec, num_updates)
    return lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)


OVERLAPPING = [
    ("ppo", SHORT | dict(normalize_observations=True, rewards="normalized")),
    ("ppo", SHORT | dict(num_epochs=3, target_kl=1e-4, learning_rate=0.03)),
    ("pqn", SHORT),
]


@pytest.mark.parametrize(("algo", "options"), OVERLAPPING)
@pytest.mark.slow
def test_gradient_steps_in_two_parts_equal_whole_update(algo, options):
    """Check all positions between gradient steps."""
    env = probes.best_action_of_observation(4)
    agent = agents.load(algo).make(configure(ALGORITHMS[algo], **options), env.spec, 3)
    state = jax.jit(agent.init)(jax.random.key(0))
    rollout, key, learning = probes.experience(env, agent, state), jax.random.key(1), agent.learning.gradient_steps
    assert learning.num == options["num_epochs"] * options["num_minibatches"]

    @jax.jit
    def in_parts(cut):
        update = learning.step(learning.prepare(state, rollout, key), 0, cut)
        return learning.finalize(learning.step(update, cut, learning.num))

    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6, equal_nan=False)
    whole = jax.jit(agent.update)(state, rollout, key)
    for cut in range(learning.num + 1):
        jax.tree.map(close, in_parts(cut), whole)


@pytest.mark.parametrize(
    ("algo", "options", "num_shards"),
    [(*OVERLAPPING[0], 1), (*OVERLAPPING[2], 1), slow(*OVERLAPPING[1], 1), *(slow(*case, 2) for case in OVERLAPPING)],
)
@pytest.mark.slow
def test_overlap_learns_from_previous_rollout(algo, options, num_shards):
    """The oracle collects with the parameters before the last update, then makes whole updates on the last rollout."""
    num_updates, options = 4, options | dict(rollout_length=12)  # gradient steps cannot be split evenly over 12
    env, spread = probes.pooled(probes.delayed_consequence(4), overlap=True), lambda run: run
    if num_shards > 1:
        env = env._replace(parallelism=Parallelism("shards", num_shards))
        spread = partial(jax.vmap, in_axes=None, axis_size=num_shards, axis_name="shards")
    agent = agents.load(algo).make(configure(ALGORITHMS[algo], **options), env.spec, num_updates, env.parallelism)
    of_shard = partial(loop.key_of_shard, env)

    def sequential(key):
        start = loop.init(env, agent, key)
        learner, actors, key, rollout, metrics = start.agent, start.actors, start.key, start.rollout, []
        for _ in range(num_updates):
            key_noise, key_update, key = jax.random.split(key, 3)
            actors, played, scores = loop.act(env, agent, learner, actors, of_shard(key_noise))
            if metrics:
                learner, losses = agent.update(learner, rollout, of_shard(key_update))
            else:  # there is no rollout to learn from yet
                losses = agent.update(learner, rollout, of_shard(key_update))[1]
                learner = learner._replace(num_updates=1) if algo == "pqn" else learner
            rollout = played
            metrics.append({**(scores if num_shards == 1 else {}), **losses})
        return (learner, actors.pending, rollout), jax.tree.map(lambda *x: jnp.stack(x), *metrics), start.rollout

    def overlapped(key):
        end, metrics = loop.train(env, agent, loop.init(env, agent, key), num_updates)
        return (end.agent, end.actors.pending, end.rollout), metrics

    expected, expected_metrics, before = jax.jit(spread(sequential))(jax.random.key(0))
    assert not before.steps.valid.any()
    end, metrics = jax.jit(spread(overlapped))(jax.random.key(0))
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5, equal_nan=False)
    jax.tree.map(close, end, expected)
    num = agent.learning.gradient_steps.num
    for name, x in expected_metrics.items():
        learned = name not in SCORES
        close(metrics[f"{name}_sum" if learned else name][..., 1:], x[..., 1:] * (num if learned else 1), err_msg=name)
    np.testing.assert_array_equal(
        np.reshape(metrics["gradient_steps"], (-1, num_updates)), [[0, *[num] * 3]] * num_shards
    )
    records = summarize({name: np.reshape(x, (num_shards, -1))[:, :1] for name, x in metrics.items()})
    assert all(records[0][name] is None for name in expected_metrics if name not in SCORES)
    assert end[2].steps.valid.any()


@pytest.mark.slow
def test_learning_rate_reaches_0_with_overlap():
    """With overlap, the first update makes no gradient steps."""
    env = probes.pooled(probes.constant_reward(4), overlap=True)
    agent = build.make_agent(configure(Config, **SHORT), agents.load("ppo"), env, 4)
    _, metrics = jax.jit(lambda: loop.train(env, agent, loop.init(env, agent, jax.random.key(0)), 4))()
    rates = metrics["learning_rate_sum"] / agent.learning.gradient_steps.num
    np.testing.assert_allclose(rates[1:], np.array([2, 1, 0]) / 3 * 2.5e-4, atol=1e-9)


def test_overlap_makes_gradient_steps_between_send_and_receive():
    """Record the order of calls at run time. Host environments step between `send` and `receive`."""
    happened = []

    def record_call(what, x):
        return io_callback(lambda x: happened.append(what) or x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    env = probes.pooled(probes.constant_reward(2), overlap=True)
    begin, pools = env.reset, env.pools

    def reset(key):
        state, first = begin(key)
        return (state, jnp.int32(0)), first  # with a handle that orders the calls

    def receive(i, state):
        handle = record_call("receive", state[1])
        state, row = pools.receive(i, state[0])
        return (state, handle), row

    send = lambda i, state, action: (pools.send(i, state[0], action), record_call("send", state[1]))
    env = env._replace(reset=reset, host=wrapper.with_pools(env.host, send=send, receive=receive))
    learning = GradientSteps(
        num=6,
        prepare=lambda state, rollout, key: jnp.zeros(6),
        step=lambda update, i, j: jax.lax.fori_loop(i, j, lambda k, x: record_call("learn", x.at[k].set(1.0)), update),
        finalize=lambda update: ((), {"taken": update.sum()}),
    )
    agent = constant_agent(env, rollout_length=3)._replace(learning=Learning(gradient_steps=learning))
    start = jax.block_until_ready(jax.jit(lambda key: loop.init(env, agent, key))(jax.random.key(0)))
    happened.clear()
    _, metrics = jax.jit(lambda state: loop.train(env, agent, state, 2))(start)
    assert metrics["taken_sum"].tolist() == [0, 6 * 6] and metrics["gradient_steps"].tolist() == [0, 6]
    assert happened == ["receive", "send"] * 3 + ["receive", "send", "learn", "learn"] * 3


def test_only_after_keeps_data_dependency_in_compiled_program():
    """Without the dependency, XLA may move the gradient steps before the calls of the host environment."""
    handle = jax.ShapeDtypeStruct((8,), jnp.uint8)
    compiled = (
        jax.jit(async_rollout._only_after).lower((handle, jax.ShapeDtypeStruct((4,), bool)), jnp.int32(3)).compile()
    )
    body = compiled.as_text().partition("ENTRY")[2]
    name = re.search(r"(%\S+) = u8\[8\]\S* parameter\(", body)
    assert name and body.count(name.group(1)) > 1, "the handle is used"
    assert compiled((jnp.arange(8, dtype=jnp.uint8), jnp.ones(4, bool)), jnp.int32(3)) == 3


@pytest.mark.slow
@settings(max_examples=10)  # each is compiled
@given(num_steps=st.integers(1, 20), num_gradient_steps=st.integers(1, 40))
def test_overlap_makes_each_gradient_step_once_and_evenly_over_rollout(num_steps, num_gradient_steps):
    """The update is the rollout step at which each of K gradient steps was made, [K], and the number of calls."""

    def step(update, first, end):
        (when, t), number = update, jnp.arange(num_gradient_steps)
        taken = (number >= first) & (number < end)
        return jnp.where(taken, jnp.where(when < 0, t, -2), when), t + 1  # -2: it was already made

    learning = GradientSteps(
        num_gradient_steps,
        prepare=lambda state, rollout, key: (jnp.full(num_gradient_steps, -1), jnp.int32(0)),
        step=step,
        finalize=lambda update: ((), {"when": update[0], "calls": update[1]}),
    )
    env = probes.pooled(probes.constant_reward(2), overlap=True)
    agent = constant_agent(env, num_steps)._replace(learning=Learning(gradient_steps=learning))
    metrics = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), 3)[1])(jax.random.key(0))
    assert metrics["calls_sum"].tolist() == [0, *[num_steps * num_gradient_steps] * 2]
    for when in np.asarray(metrics["when_sum"][1:]) // num_gradient_steps:
        assert (np.diff(when) >= 0).all() and when.min() >= 0
        counts = np.bincount(when, minlength=num_steps)
        assert counts.max() - counts.min() <= 1


@pytest.mark.slow
def test_restart_envs_ends_episodes_of_rollout_to_be_learned_from():
    """Otherwise the reward totals of reward normalization would continue into the new episodes."""
    env = probes.pooled(probes.constant_reward(4), overlap=True)
    agent = agent_of(env, rewards="normalized", gamma=0.9, rollout_length=7)
    run = jax.jit(lambda state: loop.train(env, agent, state, 1)[0])
    state = run(run(jax.jit(lambda key: loop.init(env, agent, key))(jax.random.key(0))))
    anew = jax.jit(partial(program.restart_envs, env, lambda values: agent))(state, {})
    for name in ("obs", "reward", "discount", "valid"):
        np.testing.assert_array_equal(getattr(anew.rollout.steps, name), getattr(state.rollout.steps, name))
    assert not state.rollout.steps.last[-1].any() and state.agent.rewards.total.all()
    np.testing.assert_array_equal(anew.agent.rewards.total, state.agent.rewards.total)
    assert run(state).agent.rewards.total.all() and not run(anew).agent.rewards.total.any()


@each_algorithm
@pytest.mark.slow
def test_no_key_is_used_twice(algo, options, strict_keys):
    jax.jit(training_of(algo, options, 3), compiler_options=probes.QUICK)(jax.random.key(0))


@pytest.mark.parametrize("algo", ["ppo", "pqn"])
@pytest.mark.slow
def test_no_key_is_used_twice_with_overlap(algo, strict_keys):
    overlapping = lambda env: probes.pooled(env, overlap=True)
    jax.jit(training_of(algo, SHORT, 3, overlapping), compiler_options=probes.QUICK)(jax.random.key(0))


@each_algorithm
@pytest.mark.slow
def test_no_index_is_out_of_bounds(algo, options):
    """Check indices at run time; DQN fills its replay buffer twice. XLA would silently clamp or drop such indices."""
    checked = checkify.checkify(training_of(algo, options, 9), errors=checkify.index_checks)
    error, _ = jax.jit(checked, compiler_options=probes.QUICK)(jax.random.key(0))
    error.throw()


def test_scores_of_shards_are_added_or_their_extremes_taken():
    """Two shards; the metrics of the agent are equal on both already."""
    env = SimpleNamespace(parallelism=Parallelism("shards", 2))
    scores = dict(episodes=[2, 3], return_sum=[10.0, -4.0], return_min=[1.0, -3.0], return_max=[7.0, 2.0])
    scores |= dict(longest_episode=[9, 4], length_sum=[11.0, 6.0], valid_steps=[8, 8])
    scores = {name: jnp.asarray(x) for name, x in scores.items()}
    found = jax.vmap(partial(loop.combine_shards, env), axis_name="shards")(scores, {"loss": jnp.float32([2, 2])})
    expected = dict(episodes=5, return_sum=6, return_min=-3, return_max=7, longest_episode=9, length_sum=17)
    expected |= dict(valid_steps=16, loss=2)
    assert {name: x.tolist() for name, x in found.items()} == {name: [x, x] for name, x in expected.items()}
