"""DQN: targets and losses against rlax and by hand, what is counted against whole numbers, and what it learns."""

from fractions import Fraction
from functools import partial, reduce
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import ShapeDtypeStruct

from jaxrl_fast import loop, networks
from jaxrl_fast.agents import dqn
from jaxrl_fast.metrics import records
from jaxrl_fast.replay import ring as replay_ring
from jaxrl_fast.replay import sum_tree
from jaxrl_fast.rl import value_distributions
from jaxrl_fast.types import Box, Discrete, EnvSpec, Rollout, Transition
from tests.helpers import probes
from tests.helpers.trees import equations

NUM_STATES = 6
TABLE = networks.Network(  # its parameters [NUM_STATES, A, ...] are what it answers to the number of a state
    init=lambda key: jnp.zeros((NUM_STATES, 2)),
    apply=lambda table, obs, noise=(): table[obs[..., 0].astype(jnp.int32)],
    noise=lambda key, shape: (),
)


def make(num_actions=2, num_envs=1, frame_stack=0, num_shards=1, action=None, num_updates=100, **config):
    obs = ShapeDtypeStruct((max(frame_stack, 1),), jnp.float32)
    spec = EnvSpec("test", obs, action or Discrete(num_actions), num_envs, frame_stack, num_shards=num_shards)
    defaults = dict(rollout_length=4, capacity=10**9, batch_size=4, learning_starts=0, hidden=(8,))
    return dqn.make(dqn.Config(**defaults | config), spec, num_updates)


def parts_of(**config):
    """What `make` builds, with a table in the network's place."""
    return make(**config).update.args[0]._replace(network=TABLE)


def learner_of(params, target):
    return dqn.Learner(jnp.float32(params), jnp.float32(target), (), (), jnp.float32(1), jnp.int32(0))


def sample_of(obs, action, reward, discount, next_obs):
    column = lambda x: jnp.float32(x)[:, None]
    return replay_ring.Sample(
        column(obs), jnp.int32(action), jnp.float32(reward), jnp.float32(discount), column(next_obs)
    )


def problem(*outputs, num_rows=16, seed=0):
    """Two random tables with these outputs for each state, and a batch of random transitions; 1 in 4 is terminal."""
    rng = np.random.default_rng(seed)
    params, target = 2 * rng.normal(size=(2, NUM_STATES, *outputs))
    obs, next_obs = rng.integers(0, NUM_STATES, (2, num_rows))
    discount = 0.9 * (rng.random(num_rows) < 0.75)
    batch = sample_of(obs, rng.integers(0, outputs[0], num_rows), rng.normal(size=num_rows), discount, next_obs)
    return learner_of(params, target), batch


def values_at(table, obs):
    return TABLE.apply(table, obs)


def loss_of(parts, learner, batch):
    """The mean loss, what priorities go by, and metrics; towards the target of the same learner."""
    goal = dqn.target(parts, learner, batch, (), ())
    weight = jnp.full(batch.reward.shape, 1 / batch.reward.size)
    loss, (errors, metrics) = dqn.loss(parts, learner.params, batch, goal, weight, ())
    return loss, errors, metrics


# Targets and losses


@pytest.mark.parametrize(
    ("double", "loss", "target", "expected"),
    [
        # q'(s', .) = (1, 3): .5 + .9 * 3 = 3.2;  d = 3.2 - 2 = 1.2;  d^2 / 2 = .72
        (False, "squared", 3.2, 0.72),
        # Huber: 1.2 - .5
        (False, "huber", 3.2, 0.7),
        # q(s', .) = (4, 0) chooses action 0, which q' gives 1: .5 + .9 * 1 = 1.4;  d = -.6;  d^2 / 2 = .18
        (True, "squared", 1.4, 0.18),
        (True, "huber", 1.4, 0.18),
    ],
)
def test_one_step_worked_by_hand(double, loss, target, expected):
    learner = learner_of([[2, 5], [4, 0]], [[-7, -7], [1, 3]])
    batch = sample_of([0], [0], [0.5], [0.9], [1])
    parts = parts_of(double=double, loss=loss)
    goal = dqn.target(parts, learner, batch, (), ())
    np.testing.assert_allclose(goal.atom, [[target]], rtol=1e-6)
    np.testing.assert_allclose(goal.weight, [[1]])
    value, errors, metrics = loss_of(parts, learner, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(errors, [abs(target - 2)], rtol=1e-5)
    np.testing.assert_allclose(metrics["q_value"], 2)


@pytest.mark.parametrize("double", [False, True])
def test_one_step_is_that_of_rlax(rlax, double):
    learner, batch = problem(3)
    now, following = values_at(learner.params, batch.obs), values_at(learner.target, batch.next_obs)
    if double:
        chooser = values_at(learner.params, batch.next_obs)
        oracle, arguments = rlax.double_q_learning, (following, chooser)
    else:
        oracle, arguments = rlax.q_learning, (following,)
    difference = jax.vmap(oracle)(now, batch.action, batch.reward, batch.discount, *arguments)
    loss, errors, _ = loss_of(parts_of(double=double, num_actions=3), learner, batch)
    np.testing.assert_allclose(errors, jnp.abs(difference), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, 0.5 * (difference**2).mean(), rtol=1e-5)


def test_no_gradient_goes_through_the_target():
    """d/dq of (target - q)^2 / 2 is -d at (s, a) and 0 elsewhere, also where s' is s."""
    learner, batch = learner_of([[2, 5], [4, 0]], [[2, 5], [4, 0]]), sample_of([0], [0], [0.5], [0.9], [0])
    parts = parts_of(double=True)
    goal = dqn.target(parts, learner, batch, (), ())
    gradient = jax.grad(lambda params: dqn.loss(parts, params, batch, goal, jnp.ones(1), ())[0])(learner.params)
    np.testing.assert_allclose(gradient, [[-3, 0], [0, 0]], rtol=1e-6)  # d = .5 + .9 * 5 - 2 = 3


def ring_of(parts, obs, reward, discount, last, valid):
    """A ring that holds one rollout of one environment."""
    column = lambda x, dtype: jnp.asarray(x, dtype)[:, None]
    steps = Transition(
        column(obs, jnp.float32)[..., None], column(np.zeros(len(obs)), jnp.int32), column(reward, jnp.float32),
        column(discount, jnp.float32), column(last, bool), column(valid, bool), (),
    )  # fmt: skip
    return replay_ring.add(parts.layout, replay_ring.init(parts.layout, parts.spec.obs, parts.spec.action), steps)


def targets_at(parts, ring, learner, rows):
    rows = jnp.int32(rows)
    batch = replay_ring.read(parts.layout, ring, rows, jnp.zeros_like(rows), parts.config.gamma)
    return dqn.target(parts, learner, batch, (), ()).atom[:, 0]


@pytest.mark.parametrize("terminates", [False, True])
def test_three_steps_worked_by_hand(terminates):
    # gamma .5, best values 2 s, rewards 1 2 3 4; the episode ends with the fourth step, and row 4 is its reset.
    # row 0: 1 + .5 * 2 + .25 * 3 = 2.75, then .125 * 2 * 3 = .75 of state 3
    # row 2: 3 + .5 * 4 = 5, then .25 * 2 * 4 = 2 of state 4 where time ran out
    # row 3: 4, then .5 * 2 * 4 = 4
    parts = parts_of(n_step=3, rollout_length=6, capacity=12, gamma=0.5)
    ring = ring_of(
        parts, range(6), [1, 2, 3, 4, 0, 9], [1, 1, 1, 1 - terminates, 1, 1], [0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 1]
    )
    learner = learner_of(np.zeros((6, 2)), [[s, 2 * s] for s in range(6)])
    expected = [3.5, 5, 4] if terminates else [3.5, 7, 8]
    np.testing.assert_allclose(targets_at(parts, ring, learner, [0, 2, 3]), expected, rtol=1e-6)


@pytest.mark.parametrize("n_step", [1, 2, 5])
def test_n_steps_are_those_of_rlax(rlax, n_step):
    """Where an episode ends as a terminal state, its discount of 0 keeps rlax from what follows."""
    rng = np.random.default_rng(n_step)
    length = 16
    parts = parts_of(n_step=n_step, rollout_length=length, capacity=2 * length, gamma=0.9)
    obs, reward = rng.integers(0, NUM_STATES, length), rng.normal(size=length)
    discount = (rng.random(length) < 0.8).astype(float)
    learner = learner_of(np.zeros((6, 2)), rng.normal(size=(6, 2)))
    ring = ring_of(parts, obs, reward, discount, discount == 0, np.ones(length))
    best = np.asarray(learner.target).max(-1)[np.append(obs[1:], 0)]
    expected = rlax.n_step_bootstrapped_returns(*map(jnp.float32, (reward, 0.9 * discount, best)), n_step)
    rows = np.arange(length - n_step)
    np.testing.assert_allclose(targets_at(parts, ring, learner, rows), expected[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Rlax:PendingDeprecationWarning")
@pytest.mark.parametrize("double", [False, True])
def test_c51_is_that_of_rlax(rlax, double):
    learner, batch = problem(3, 11)
    parts = parts_of(num_actions=3, distribution="c51", num_atoms=11, v_min=-2.0, v_max=2.0, double=double)
    support = value_distributions.support(parts.form)
    now, following = values_at(learner.params, batch.obs), values_at(learner.target, batch.next_obs)
    shared = support, now, batch.action, batch.reward, batch.discount, support, following
    if double:
        chooser = value_distributions.mean(parts.form, values_at(learner.params, batch.next_obs))
        axes = None, 0, 0, 0, 0, None, 0, 0
        expected = jax.vmap(rlax.categorical_double_q_learning, axes)(*shared, chooser)
    else:
        expected = jax.vmap(rlax.categorical_q_learning, (None, 0, 0, 0, 0, None, 0))(*shared)
    loss, errors, _ = loss_of(parts, learner, batch)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    # what priorities go by is the divergence: the cross entropy less the entropy of what was wanted
    wanted = np.asarray(value_distributions.project(dqn.target(parts, learner, batch, (), ()), support), float)
    entropy = -np.where(wanted > 0, wanted * np.log(np.where(wanted > 0, wanted, 1)), 0).sum(-1)
    np.testing.assert_allclose(errors, expected - entropy, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("double", [False, True])
def test_quantile_learning_is_that_of_rlax(rlax, double):
    learner, batch = problem(3, 5)
    parts = parts_of(num_actions=3, distribution="quantile", num_atoms=5, loss="huber", double=double)
    swap = lambda x: jnp.swapaxes(x, -1, -2)  # rlax: [quantiles, actions]
    now, following = swap(values_at(learner.params, batch.obs)), swap(values_at(learner.target, batch.next_obs))
    chooser = swap(values_at(learner.params, batch.next_obs)) if double else following
    level = (jnp.arange(5) + 0.5) / 5
    expected = jax.vmap(rlax.quantile_q_learning, (0, None, 0, 0, 0, 0, 0, None))(
        now, level, batch.action, batch.reward, batch.discount, chooser, following, 1.0
    )
    loss, _, _ = loss_of(parts, learner, batch)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)


MUNCHAUSEN = dict(munchausen=True, munchausen_alpha=0.5, munchausen_temperature=1.0)


def test_munchausen_worked_by_hand():
    # temperature 1, alpha 1/2.  q'(s) = (0, 0): log pi = -log 2.
    # q'(s') = (log 3, 0): pi = (3/4, 1/4), and its soft value is log(3 + 1) = 2 log 2.
    # 1 - 1/2 log 2 + 1/2 * 2 log 2 = 1 + 1/2 log 2
    # q'(s) = (0, 10): log pi(0) = -10.00005 counts for -1:  1 - 1/2 + log 2
    learner = learner_of(np.zeros((3, 2)), [[0, 0], [np.log(3), 0], [0, 10]])
    batch = sample_of([0, 2], [0, 0], [1, 1], [0.5, 0.5], [1, 1])
    goal = dqn.target(parts_of(**MUNCHAUSEN), learner, batch, (), ())
    np.testing.assert_allclose(goal.weight, [[0.75, 0.25]] * 2, rtol=1e-6)
    means = (goal.atom * goal.weight).sum(-1)
    np.testing.assert_allclose(means, [1 + 0.5 * np.log(2), 0.5 + np.log(2)], rtol=1e-6)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("distribution", ["none", "c51", "quantile"])
def test_munchausen_is_equation_1(distribution, double):
    """Row by row in float64, from the mean of whatever is learned about a value."""
    temperature, alpha, clip = 0.3, 0.7, -0.5
    parts = parts_of(
        num_actions=3, distribution=distribution, num_atoms=5, double=double, munchausen=True,
        munchausen_temperature=temperature, munchausen_alpha=alpha, munchausen_clip=clip,
    )  # fmt: skip
    learner, batch = problem(3) if distribution == "none" else problem(3, 5)
    look = lambda table, obs: np.asarray(value_distributions.mean(parts.form, values_at(table, obs)), float)
    now, following = look(learner.target, batch.obs), look(learner.target, batch.next_obs)
    chooser = look(learner.params, batch.next_obs) if double else following
    goal = dqn.target(parts, learner, batch, (), ())
    np.testing.assert_allclose(goal.weight.sum(-1), 1, rtol=1e-5)
    log_policy = lambda q: q / temperature - np.log(np.exp(q / temperature).sum())
    for b, mean in enumerate((goal.atom * goal.weight).sum(-1)):
        bonus = max(clip, temperature * log_policy(now[b])[batch.action[b]])
        log_pi = log_policy(chooser[b])
        soft = sum(np.exp(log_pi[a]) * (following[b, a] - temperature * log_pi[a]) for a in range(3))
        expected = float(batch.reward[b]) + alpha * bonus + float(batch.discount[b]) * soft
        np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-5)


def test_importance_worked_by_hand():
    # the least is 1: (1/1)^.5, (1/4)^.5, nothing, (1/16)^.5
    np.testing.assert_allclose(dqn.importance(jnp.float32([1, 4, 0, 16]), 0.5), [1, 0.5, 0, 0.25], rtol=1e-6)
    np.testing.assert_array_equal(dqn.importance(jnp.zeros(3), 0.5), 0)


def test_importance_is_over_the_largest_of_all_devices():
    """Of which one has nothing to draw."""
    chance = jnp.float32([[1, 4], [16, 64], [0, 0]])
    found = jax.vmap(partial(dqn.importance, exponent=0.5, axis_name="shards"), axis_name="shards")(chance)
    np.testing.assert_allclose(found, dqn.importance(chance.reshape(-1), 0.5).reshape(3, 2), rtol=1e-6)


def test_importance_is_that_of_the_paper():
    """(1 / (N P))^beta over the largest of the batch, whatever N."""
    priority = np.random.default_rng(0).random(8)
    chance = priority / 17.0
    expected = (1 / (1000 * chance)) ** 0.6
    np.testing.assert_allclose(dqn.importance(jnp.float32(priority), 0.6), expected / expected.max(), rtol=1e-5)


def test_the_importance_exponent_rises_to_one():
    parts = parts_of(importance_exponent=0.4, num_updates=100)
    exponents = [dqn.exponent_now(parts, jnp.int32(u)) for u in (0, 50, 100, 1000)]
    np.testing.assert_allclose(exponents, [0.4, 0.7, 1, 1], rtol=1e-6)


# What is counted

RATIOS = st.one_of(
    st.sampled_from([0.001, 0.003, 0.1, 0.25, 1, 1.5, 4, 0.0625]), st.integers(1, 4000).map(lambda x: x / 1000)
)


def counted(parts, num_updates):
    """Gradient steps made after each update."""
    state, made = dqn.State((), (), jnp.int32(0), jnp.int32(0)), []
    for _ in range(num_updates):
        num_steps, owed = dqn.num_grad_steps_due(parts, state)
        made.append(int(num_steps))
        state = state._replace(num_updates=state.num_updates + 1, owed=owed)
    return np.cumsum(made)


@pytest.mark.parametrize(
    ("num_envs", "num_shards"), [(1, 1), (3, 1), (10, 1), (64, 1), (1000, 1), (4096, 1), (5, 2), (1024, 4)]
)
@settings(max_examples=12)
@given(RATIOS, st.integers(1, 9), st.integers(0, 60_000), st.integers(1, 3))
@example(0.1, 1, 0, 1)
@example(0.003, 7, 1, 1)
def test_the_replay_ratio_holds_exactly(num_envs, num_shards, ratio, rollout_length, learning_starts, n_step):
    """Of all environments, on however many devices."""
    config = dict(replay_ratio=ratio, rollout_length=rollout_length, learning_starts=learning_starts, n_step=n_step)
    parts = parts_of(num_envs=num_envs, num_shards=num_shards, **config)
    num_envs *= num_shards
    first = max(learning_starts, (n_step + 1) * num_envs)
    steps = [(u + 1) * rollout_length * num_envs for u in range(25)]
    expected = [int(Fraction(str(ratio)) * max(0, s - first)) for s in steps]  # positive: int is floor
    np.testing.assert_array_equal(counted(parts, 25), expected)


@pytest.mark.parametrize("num_updates", [2**20, 2**31 - 2])
def test_the_replay_ratio_holds_beyond_what_int32_counts(num_updates):
    """2.5 gradient steps an update: 2 and 3 in turns, however many environment steps there have been."""
    parts = parts_of(num_envs=1000, rollout_length=1, replay_ratio=0.0025)
    state = dqn.State((), (), jnp.int32(num_updates), jnp.int32(0))
    num_steps, owed = dqn.num_grad_steps_due(parts, state)
    assert (int(num_steps), int(dqn.num_grad_steps_due(parts, state._replace(owed=owed))[0])) == (2, 3)


@pytest.mark.parametrize(
    "num_envs", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(10, marks=pytest.mark.slow)]
)
def test_so_many_gradient_steps_are_made(num_envs):
    """Adam's own count after training: floor(.3 * (11 * 2 * N - 8 N - 1))."""
    env = probes.best_action(num_envs)
    config = dqn.Config(
        rollout_length=2, capacity=8 * num_envs + 100, batch_size=4, replay_ratio=0.3, hidden=(4,),
        learning_starts=8 * num_envs + 1,
    )  # fmt: skip
    agent = dqn.make(config, env.spec, 11)
    state, metrics = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), 11))(jax.random.key(0))
    expected = int(Fraction("0.3") * (14 * num_envs - 1))
    assert int(state.agent.learner.optimizer[-1].count) == int(metrics["gradient_steps"].sum()) == expected


@jax.jit
def moves(numerator, denominator, target_period):
    """[200] the gradient step whose parameters are the target's, after each of so many steps. One program for all."""
    ratio = SimpleNamespace(numerator=numerator, denominator=denominator)
    config = SimpleNamespace(ratio=ratio, target_period=target_period, target_step_size=1.0)

    def step(learner, count):
        learner = dqn.move_target(config, learner._replace(params=count))
        return learner, learner.target

    return jax.lax.scan(step, learner_of(0, 0), jnp.arange(1, 201, dtype=jnp.float32))[1]


@settings(max_examples=100)
@given(RATIOS, st.integers(1, 3000))
@example(0.1, 10)
@example(0.1, 25)
@example(0.003, 300)
@example(4, 1)
@example(1.5, 500)
def test_the_target_moves_whenever_a_period_of_environment_steps_has_passed(ratio, target_period):
    """Step g is worth g / ratio environment steps: floor(g / ratio / period) moves, or one at each step if it takes
    more than a period.
    """
    ratio = Fraction(str(ratio))
    found = np.asarray(moves(ratio.numerator, ratio.denominator, target_period))
    periods = [int(g / ratio / target_period) for g in range(201)]
    often = 1 / ratio > target_period
    expected, latest = [], 0
    for g in range(1, 201):
        latest = g if often or periods[g] > periods[g - 1] else latest
        expected.append(latest)
    np.testing.assert_array_equal(found, expected)
    num_moves = int((np.diff(found, prepend=0) > 0).sum())
    assert num_moves == (200 if often else periods[200])


def test_a_step_size_makes_the_target_an_average():
    # 3/4 * 8 + 1/4 * 4 = 7, then 3/4 * 7 + 1/4 * 4 = 6.25
    config = dqn.Config(target_period=1, target_step_size=0.25, replay_ratio=1)
    once = dqn.move_target(config, learner_of(4, 8))
    assert (float(once.target), float(dqn.move_target(config, once).target)) == (7, 6.25)


# What is drawn


def filled(parts, num_rollouts, seed=0):
    """Rings after each of so many rollouts of random rows, of which a third is invalid."""
    layout, spec = parts.layout, parts.spec
    ring, rng = replay_ring.init(layout, spec.obs, spec.action), np.random.default_rng(seed)
    add = jax.jit(partial(replay_ring.add, layout))
    for _ in range(num_rollouts):
        shape = parts.rollout_length, spec.num_envs
        flags = [jnp.asarray(rng.random(shape) < chance) for chance in (0.2, 0.67)]
        numbers = [jnp.asarray(rng.normal(size=(*shape, *more)), jnp.float32) for more in (spec.obs.shape, (), ())]
        obs, reward, discount = numbers
        ring = add(ring, Transition(obs, jnp.zeros(shape, jnp.int32), reward, discount, *flags, ()))
        yield ring


def least_capacity(num_envs, rollout_length, n_step, frame_stack):
    """From the words of the refusal."""
    with pytest.raises(ValueError, match="must be at least") as refusal:
        make(
            num_envs=num_envs, rollout_length=rollout_length, n_step=n_step, frame_stack=frame_stack, capacity=1,
            batch_size=1,
        )  # fmt: skip
    return int(str(refusal.value).split()[-1])


@pytest.mark.parametrize(
    ("num_envs", "rollout_length", "n_step", "frame_stack"), [(3, 4, 1, 0), (2, 1, 3, 0), (1, 5, 2, 4), (2, 3, 3, 3)]
)
def test_what_cannot_be_read_has_no_priority_and_what_is_new_the_largest(num_envs, rollout_length, n_step, frame_stack):
    """In the smallest replay that is allowed, before it is full and after: with every rollout the largest is another
    number, so the tree tells when each row became readable.
    """
    shape = dict(num_envs=num_envs, rollout_length=rollout_length, n_step=n_step, frame_stack=frame_stack)
    capacity = least_capacity(**shape)
    parts = parts_of(**shape, capacity=capacity, batch_size=1, prioritized=True)
    num_rows = parts.layout.num_rows
    assert num_rows * num_envs == capacity
    prioritize = jax.jit(partial(dqn.set_priorities, parts))
    learner = learner_of(0, 0)._replace(priorities=sum_tree.init(capacity))
    since = {}  # row, counted from the start: the rollout that made it readable
    for i, ring in enumerate(filled(parts, 5 * num_rows // rollout_length), start=1):
        learner = prioritize(learner._replace(largest=jnp.float32(i)), ring)
        written = i * rollout_length
        lost = max(frame_stack - 1, 0) if written >= num_rows else 0
        expected = np.zeros((num_rows, num_envs))
        for row in range(max(written - num_rows, 0) + lost, written - n_step):
            since.setdefault(row, i)
            expected[row % num_rows] = since[row] * np.asarray(ring.valid)[row % num_rows]
        leaves = np.asarray(learner.priorities.levels[0])
        np.testing.assert_array_equal(leaves[:capacity].reshape(num_rows, num_envs), expected)
        np.testing.assert_array_equal(leaves[capacity:], 0)
        assert written < (n_step + 1) or expected.shape and int(replay_ring.num_readable(parts.layout, ring)) > 0


def keys_of(seed):
    """The two that a gradient step takes."""
    return jax.random.split(jax.random.key(seed))


def test_what_was_drawn_gets_its_error_as_priority():
    # Only rows 1 and 3 can be drawn. gamma 1/2, values 0: errors |2|, |-16|; to the power 1/2: 1.41421 and 4.
    parts = parts_of(prioritized=True, priority_exponent=0.5, gamma=0.5, capacity=16, batch_size=16)
    ring = ring_of(parts, range(4), [1, 2, 3, -16], [1, 0, 1, 0], [0, 1, 0, 1], [1] * 4)
    tree = sum_tree.update(sum_tree.init(16), jnp.int32([1, 3]), jnp.float32([1, 1]))
    params = jnp.zeros((NUM_STATES, 2))
    learner = dqn.Learner(params, params, parts.optimizer.init(params), tree, jnp.float32(1), jnp.int32(0))
    learner, metrics = jax.jit(partial(dqn.gradient_step, parts, ring))(jnp.int32(0), keys_of(0), learner)
    np.testing.assert_allclose(learner.priorities.levels[0], [0, np.sqrt(2), 0, 4] + [0] * 12, rtol=1e-5)
    np.testing.assert_allclose(learner.largest, 4, rtol=1e-5)
    np.testing.assert_allclose(metrics["td_error"].sum(), 9, rtol=1e-5)  # (2 + 16) / 2: half of the strata each
    moved = np.asarray(learner.params) != 0
    assert moved[[1, 3], 0].all() and moved.sum() == 2


def test_where_nothing_can_be_drawn_nothing_changes():
    # All priorities are 0: what the draw comes up with gets none, or it could be drawn next time.
    parts = parts_of(prioritized=True, capacity=16, batch_size=16)
    ring = ring_of(parts, range(4), [1, 2, 3, -16], [1, 0, 1, 0], [0, 1, 0, 1], [1] * 4)
    params = jnp.ones((NUM_STATES, 2))
    tree = sum_tree.init(16)
    before = dqn.Learner(params, params, parts.optimizer.init(params), tree, jnp.float32(1), jnp.int32(0))
    after, _ = jax.jit(partial(dqn.gradient_step, parts, ring))(jnp.int32(0), keys_of(0), before)
    jax.tree.map(np.testing.assert_array_equal, (after.priorities, after.params), (tree, params))
    assert after.largest == 1


def test_a_gradient_step_weighs_by_importance():
    # Priorities 1 and 4, exponent 1 at the end: 16 strata of 5 draw row 1 three or four times, row 3 the rest.
    # Weights are 1 and 1/4 over 16; the gradient towards q is weight * (q - target) = -weight * reward.
    config = dict(importance_exponent=1.0, max_grad_norm=0.0)
    parts = parts_of(prioritized=True, gamma=0.5, capacity=16, batch_size=16, **config)
    ring = ring_of(parts, range(4), [1, 2, 3, -16], [1, 0, 1, 0], [0, 1, 0, 1], [1] * 4)
    tree = sum_tree.update(sum_tree.init(16), jnp.int32([1, 3]), jnp.float32([1, 4]))
    params = jnp.zeros((NUM_STATES, 2))
    learner = dqn.Learner(params, params, parts.optimizer.init(params), tree, jnp.float32(4), jnp.int32(0))
    keys = keys_of(1)
    after, _ = jax.jit(partial(dqn.gradient_step, parts, ring))(jnp.int32(100), keys, learner)
    item, _ = sum_tree.draw(tree, keys[0], 16)
    count = np.bincount(np.asarray(item), minlength=4)
    assert count[1] in (3, 4) and count[1] + count[3] == 16
    gradient = np.asarray(after.optimizer[-2].mu).reshape(NUM_STATES, 2)[[1, 3], 0] / 0.1  # Adam's first moment
    np.testing.assert_allclose(gradient, [-2 * count[1] / 16, 16 * count[3] / 16 / 4], rtol=1e-5)


def rollouts_of(env, agent, num_rollouts, seed=1):
    """By the untrained agent, [num_rollouts, T, N, ...]."""
    state = jax.jit(agent.init)(jax.random.key(seed))
    experience = probes.experience(env, agent, state, seed + 1, num_rollouts * agent.rollout_length)
    cut = lambda x: x.reshape(num_rollouts, agent.rollout_length, *x.shape[1:])
    return experience._replace(steps=jax.tree.map(cut, experience.steps))


@pytest.mark.parametrize(("prioritized", "num_steps"), [(False, 3), (True, 1)])
def test_shards_learn_what_one_device_does(prioritized, num_steps, monkeypatch):
    """Two devices of 2 environments are 4, where each draws its part of the same batch.

    Priorities are equal before the only gradient step, so that what is drawn matters as much in part as in all.
    """

    def the_first_row_of_each(size):
        env = jnp.arange(size) % (size // 4)
        return env * 0 + jnp.arange(size) // (size // 4), env, jnp.ones(size, bool)

    def first_items(_, key, size):
        row, env, found = the_first_row_of_each(size)
        return row * (size // 4) + env, found.astype(jnp.float32)

    monkeypatch.setattr(dqn.replay, "draw", lambda layout, ring, key, size, own: the_first_row_of_each(size))
    monkeypatch.setattr(dqn.priorities, "draw", first_items)
    env = probes.best_action_of_observation(4)
    config = dict(rollout_length=8, capacity=256, batch_size=16, replay_ratio=num_steps / 32, learning_starts=0)
    config |= dict(prioritized=prioritized, n_step=2, epsilon_ladder=7.0, target_period=1)
    config |= dict(
        target_step_size=0.1, loss="squared", adam_epsilon=1.0
    )  # so large that the scale of gradients counts
    half = env.spec._replace(num_envs=2, axis_name="devices", num_shards=2)
    whole, part = agent_of(env, 10, **config), agent_of(env._replace(spec=half), 10, **config)
    experience = probes.experience(env, whole, jax.jit(whole.init)(jax.random.key(0)))
    steps = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(8, 2, 2, *x.shape[2:]), 1, 0), experience.steps)

    def learn(agent, steps):
        state = agent.init(jax.random.key(0))._replace(num_updates=jnp.int32(1))  # all that is played is learned from
        state, metrics = agent.update(state, experience._replace(steps=steps), jax.random.key(1))
        learner = state.learner._replace(priorities=(), optimizer=state.learner.optimizer[-1].count)
        return state._replace(learner=learner, replay=()), metrics

    expected, expected_metrics = jax.jit(partial(learn, whole))(experience.steps)
    found, metrics = jax.jit(jax.vmap(partial(learn, part), axis_name="devices"))(steps)
    assert expected_metrics["gradient_steps"] == num_steps and expected_metrics["loss_sum"] > 0
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for i in range(2):
        at = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree)
        jax.tree.map(close, at(found), expected)
        jax.tree.map(close, at(metrics), expected_metrics)


@pytest.mark.slow
def test_each_gradient_step_draws_a_batch_of_its_own(monkeypatch):
    """Each of an update has other keys."""
    env, seen, descend = probes.best_action(4), [], dqn.gradient_step

    def note(parts, ring, num_updates, keys, learner):
        seen.extend(map(tuple, np.asarray(jax.random.key_data(keys)).tolist()))
        return descend(parts, ring, num_updates, keys, learner)

    agent = agent_of(env, 6, learning_starts=0)
    state, experience = jax.jit(agent.init)(jax.random.key(0)), rollouts_of(env, agent, 1)
    first = experience._replace(steps=jax.tree.map(lambda x: x[0], experience.steps))
    monkeypatch.setattr(dqn, "gradient_step", note)
    with jax.disable_jit():
        agent.update(state, first, jax.random.key(1))
    assert len(set(seen)) == len(seen) > 2


@pytest.mark.parametrize(
    ("probe", "poison", "prioritized"),
    [
        (probes.constant_reward_terminal, np.nan, False),
        (probes.best_action, 1e6, True),
        pytest.param(probes.constant_reward_terminal, np.nan, True, marks=pytest.mark.slow),
        pytest.param(probes.best_action, 1e6, False, marks=pytest.mark.slow),
    ],
)
def test_reset_rows_change_nothing(probe, poison, prioritized):
    """Neither their action nor their reward: parameters, priorities and metrics come out bit for bit the same.

    Of best_action half the rows are resets, so some draws find nothing and weigh nothing; a NaN would show there.
    """
    env = probe(4)
    config = dqn.Config(
        rollout_length=8, capacity=256, batch_size=16, replay_ratio=0.25, learning_starts=0, n_step=3, hidden=(8,),
        prioritized=prioritized, target_period=8,
    )  # fmt: skip
    agent = dqn.make(config, env.spec, 6)
    experience = rollouts_of(env, agent, 6)

    @jax.jit
    def learn(poison):
        steps = experience.steps
        steps = steps._replace(
            reward=jnp.where(steps.valid, steps.reward, poison),
            action=jnp.where(steps.valid | (poison == 0), steps.action, 1 - steps.action),
        )
        update = lambda state, x: agent.update(state, experience._replace(steps=x[0]), x[1])
        keys = jax.random.split(jax.random.key(0), 6)
        state, metrics = jax.lax.scan(update, agent.init(jax.random.key(1)), (steps, keys))
        return state.learner, metrics

    assert not experience.steps.valid.all()
    clean, disturbed = learn(0.0), learn(poison)
    assert np.isfinite(clean[1]["loss_sum"]).all() and clean[1]["gradient_steps"].sum() > 0
    jax.tree.map(np.testing.assert_array_equal, clean, disturbed)


# Learning


def agent_of(env, num_updates, **config):
    defaults = dict(
        rollout_length=4, capacity=2048, batch_size=32, replay_ratio=0.25, learning_starts=64, target_period=40,
        learning_rate=3e-3, gamma=probes.GAMMA, hidden=(16,), epsilon_start=0.5, epsilon_end=0.5,
    )  # fmt: skip
    return dqn.make(dqn.Config(**defaults | config), env.spec, num_updates)


def learn(env, num_updates=200, seed=0, **config):
    """Expected returns [B, A] and greedy actions [B] of observations, after training in 8 environments."""
    agent = agent_of(env, num_updates, **config)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)
    state, metrics = jax.jit(run, compiler_options=probes.QUICK)(jax.random.key(seed))
    assert np.isfinite(metrics["loss_sum"]).all()
    parts = agent.update.args[0]

    def answer(obs):
        obs = jnp.float32(obs)
        value = value_distributions.mean(parts.form, parts.network.apply(state.agent.learner.params, obs))
        return np.asarray(value), np.asarray(agent.exploit(state.agent, PolicyInput(obs), (), None).action)

    return answer


NOISY = dict(noisy=True, epsilon_start=0.0, epsilon_end=0.0)
C51 = dict(distribution="c51", num_atoms=21, v_min=-2.0, v_max=2.0)
RAINBOW = NOISY | C51 | dict(double=True, dueling=True, n_step=3, prioritized=True)
SWITCHES = {
    "plain": {},
    "double": dict(double=True),
    "dueling": dict(dueling=True),
    "n_step": dict(n_step=3),
    "prioritized": dict(prioritized=True),
    "noisy": NOISY,
    "c51": C51,
    "quantile": dict(distribution="quantile", num_atoms=11),
    "munchausen": dict(munchausen=True),
    "huber": dict(loss="huber"),
    "layer_norm": dict(layer_norm=True),
    "epsilon_ladder": dict(epsilon_ladder=3.0),
    "average": dict(target_period=1, target_step_size=0.05),
    "rainbow": RAINBOW,
    "rainbow_munchausen": RAINBOW | dict(munchausen=True),
}


ALWAYS_RUN = ("prioritized",)


@pytest.mark.parametrize(
    "switch", [pytest.param(name, marks=[] if name in ALWAYS_RUN else [pytest.mark.slow]) for name in SWITCHES]
)
def test_every_switch_learns_a_delayed_consequence(switch):
    """Values of the start and of both consequences, of both actions; noise alone soon leaves the worse one be."""
    config = SWITCHES[switch]
    value, action = learn(probes.delayed_consequence(8), **config)([[0, 0], [-1, 1], [1, 1]])
    assert action[0] == 1
    if "munchausen" in switch:
        return  # its values are soft, and contain the log-policy
    np.testing.assert_allclose(value.max(-1)[[0, 2]], [0.9, 1], atol=0.1)
    if "noisy" not in config:
        np.testing.assert_allclose(value, [[-0.9, 0.9], [-1, -1], [1, 1]], atol=0.1)


@pytest.mark.parametrize("n_step", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_values_are_bootstrapped_where_time_runs_out(n_step):
    """Reward 1 for ever is worth 10; 6.5 would mean that the time limit counted as death."""
    value, _ = learn(probes.constant_reward(8), 300, n_step=n_step, learning_rate=1e-2, anneal=True)([[1.0]])
    np.testing.assert_allclose(value, 10, atol=0.2)


@pytest.mark.parametrize("n_step", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_nothing_lies_beyond_a_terminal_state(n_step):
    value, _ = learn(probes.constant_reward_terminal(8), 300, n_step=n_step, learning_rate=1e-2, anneal=True)(
        np.eye(10)
    )
    expected = [(1 - 0.9 ** (10 - t)) / 0.1 for t in range(10)]
    np.testing.assert_allclose(value, np.repeat(expected, 2).reshape(10, 2), atol=0.3)


# Seeds


@pytest.mark.slow
def test_seeds_differ_and_each_is_its_own_run():
    """The first gradient steps to rounding; later ones may draw otherwise where a rounding decides."""
    env = probes.best_action_of_observation(4)
    agent = agent_of(env, 6, learning_starts=16, prioritized=True, dueling=True)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), 6)
    keys = jax.random.split(jax.random.key(0), 3)
    together, metrics = jax.jit(jax.vmap(run), compiler_options=probes.QUICK)(keys)
    alone = jax.jit(run, compiler_options=probes.QUICK)
    assert (metrics["gradient_steps"].sum(1) == 20).all()  # .25 * (6 * 16 - 16)
    for i in (0, 2):
        state, _ = alone(keys[i])
        one = jax.tree.map(lambda x, i=i: x[i], together.agent)
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(close, one.learner.params, state.agent.learner.params)
        np.testing.assert_array_equal(one.replay.action, state.agent.replay.action)
    kernels = [leaf for leaf in jax.tree.leaves(together.agent.learner.params) if leaf.ndim == 3]
    assert all(np.abs(leaf[i] - leaf[j]).max() > 1e-3 for leaf in kernels for i, j in ((0, 1), (1, 2), (0, 2)))


@pytest.mark.parametrize("batch", [(3,), (2, 3)], ids=["seeds", "seeds of several shards"])
def test_seeds_share_their_loop_and_their_condition(batch):
    """Under vmap a condition on a batch would become a select of both sides, and a loop would wait for all."""
    env = probes.best_action(4)
    agent = agent_of(env, 6)
    over_all = lambda function: reduce(lambda f, _: jax.vmap(f), batch, function)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    states = jax.eval_shape(over_all(agent.init), keys)
    experience = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], rollouts_of(env, agent, 1).steps))
    more = lambda x: ShapeDtypeStruct((*batch, *x.shape), x.dtype)
    rollout = jax.tree.map(more, Rollout(experience, ShapeDtypeStruct((4, 1), jnp.float32), ()))
    found = list(equations(jax.make_jaxpr(over_all(agent.update))(states, rollout, keys)))
    conditions = [e for e in found if e.primitive.name == "cond"]
    assert [e.invars[0].aval.shape for e in conditions] == [()]
    names = lambda jaxpr: {e.primitive.name for e in equations(jaxpr)}
    loops = [e for e in found if e.primitive.name == "while" and "cond" in names(e.params["body_jaxpr"])]
    assert len(loops) == 1 and "reduce_or" not in names(loops[0].params["cond_jaxpr"])


# What is refused


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(action=Box((2,))), r"dqn wants a finite number of actions, not vectors of shape \[2\]"),
        (dict(num_shards=3, batch_size=64), "batch_size 64 does not divide into 3 devices"),
        (dict(capacity=64, batch_size=65), "capacity 64 is less than one batch of 65"),
        (dict(capacity=64, learning_starts=65), "learning_starts 65 is beyond the capacity 64;"),
        (dict(capacity=8, n_step=4), "capacity 8 is too small for n_step 4 and 1 environments .* at least 12"),
        (dict(distribution="c51", num_atoms=1), "num_atoms 1: a distribution has at least 2"),
        (dict(distribution="quantile", num_atoms=1), "num_atoms 1: a distribution has at least 2"),
        (dict(distribution="c51", v_min=1.0, v_max=1.0), "v_min 1.0 is not below v_max 1.0"),
        (dict(replay_ratio=1 / 3), r"cannot be counted exactly .* the nearest that can is 0\.33333328125$"),
        (dict(replay_ratio=4e-11), r"cannot be counted exactly .* the nearest that can is 9\.5367431640625e-10$"),
        (
            dict(replay_ratio=1.5, target_period=2**29),
            r"cannot be counted .* target_period 536870912; .* that can is (1|2)\.0$",
        ),
        (dict(replay_ratio=0.3333333333, target_period=2**29), r"the nearest that can is 0\.4$"),
        (dict(num_updates=2**31, replay_ratio=4), "gradient steps in all are more than"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(config, words):
    with pytest.raises(ValueError, match=words):
        make(**config)


@pytest.mark.parametrize(
    "config",
    [
        dict(replay_ratio=1 / 3),
        dict(replay_ratio=4e-11),
        dict(replay_ratio=3.33333e-7),
        dict(replay_ratio=1.23456, target_period=2**22),
    ],
)
def test_the_ratio_that_is_named_can_be_counted(config):
    with pytest.raises(ValueError, match="the nearest that can is") as refusal:
        make(**config)
    make(**config | dict(replay_ratio=float(str(refusal.value).split()[-1])))


@settings(max_examples=50)
@given(st.integers(1, 100), st.integers(1, 20), st.integers(1, 12), st.sampled_from([0, 1, 4]))
def test_the_least_capacity_is_enough_and_one_less_is_not(num_envs, rollout_length, n_step, frame_stack):
    """Enough: when the replay is full, a row that has its frames and its successors is left, and a rollout's worth of
    rows can change priority without meeting each other.
    """
    shape = dict(num_envs=num_envs, rollout_length=rollout_length, n_step=n_step, frame_stack=frame_stack)
    least = least_capacity(**shape)
    layout = make(**shape, capacity=least, batch_size=1).update.args[0].layout
    assert layout.num_rows * num_envs == least and layout.num_rows % rollout_length == 0
    lost = max(frame_stack - 1, 0)
    assert layout.num_rows - n_step - lost >= 1
    assert n_step + rollout_length + lost <= layout.num_rows
    with pytest.raises(ValueError, match=f"at least {least}"):
        make(**shape, capacity=least - 1, batch_size=1)


# Acting and reporting


def test_noise_explores_and_evaluation_has_none():
    """Without epsilon: environments that see the same act by noises of their own, and all exploit alike."""
    agent = make(num_envs=200, noisy=True, epsilon_start=0.0, epsilon_end=0.0, hidden=(16,), capacity=2000)
    state, obs = jax.jit(agent.init)(jax.random.key(0)), jnp.ones((200, 1))
    noise = agent.sample_noise(jax.random.key(1), 2, 200)
    decide = jax.jit(lambda i: agent.explore(state, PolicyInput(obs), (), jax.tree.map(lambda x: x[i], noise)).action)
    first, second = np.asarray(decide(0)), np.asarray(decide(1))
    assert set(first) == {0, 1} and (first != second).any()
    assert len(set(np.asarray(agent.exploit(state, PolicyInput(obs), (), None).action))) == 1


def test_sums_are_reported_per_gradient_step():
    """And as nothing where no gradient step was made."""
    rows = {name: np.zeros((2, 3)) for name in records.SCORES}
    rows |= {
        "gradient_steps": np.array([[0, 2, 6], [0, 0, 0]]),
        "loss_sum": np.array([[0, 4.0, 8.0], [0, 0, 0]]),
        "epsilon": np.array([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]]),
    }
    one, other = records.summarize(rows)
    assert (one["loss"], one["gradient_steps"], one["epsilon"]) == (1.5, 8, 0.5)  # (4 + 8) / (2 + 6)
    assert (other["loss"], other["gradient_steps"], other["epsilon"]) == (None, 0, 0.5)
    assert not any(name in record for record in (one, other) for name in ("loss_sum", "return_sum", "length_sum"))
