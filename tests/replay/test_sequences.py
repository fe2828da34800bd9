"""Test sequence replay against a list of all rows, and DQN's sequence loss against one sequence at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import ShapeDtypeStruct

from jaxrl_fast import loop
from jaxrl_fast.agents import dqn
from jaxrl_fast.options.declare import configure
from jaxrl_fast.replay import ReplayConfig, sequences, sum_tree
from jaxrl_fast.rl import q_learning
from jaxrl_fast.training import evaluator
from jaxrl_fast.types import Discrete, EnvSpec, Parallelism, Transition
from tests.helpers import probes

T, N, L, BURN_IN, STEPS, PERIOD, R = 2, 3, 5, 2, 2, 4, 16
SPEC = EnvSpec("test", ShapeDtypeStruct((), jnp.float32), Discrete(2), N)
CONFIG = sequences.SequenceConfig(ReplayConfig(R, N, STEPS), L, BURN_IN, PERIOD)
GAMMA = 0.5


def history(seed, num_rollouts):
    """Return rows [num_rollouts * T, N] with episode ends, their number as observation, and the carry before each."""
    rng = np.random.default_rng(seed)
    shape = num_rollouts * T, N
    last = rng.random(shape) < 0.25
    valid = ~np.concatenate([np.zeros((1, N), bool), last[:-1]])
    last &= valid
    valid[1:] = ~last[:-1]
    obs = np.arange(shape[0])[:, None] + 1000 * np.arange(N)[None]
    discount = 1.0 - (last & (rng.random(shape) < 0.5))
    rows = Transition(obs, rng.integers(0, 2, shape), rng.normal(size=shape), discount, last, valid, ())
    rows = rows._replace(**{name: np.float32(getattr(rows, name)) for name in ("obs", "reward", "discount")})
    return rows, np.float32(rng.normal(size=(*shape, 2)))


def filled(rows, carry, exponent=None):
    buffer = sequences.make(CONFIG, SPEC, jnp.zeros(2), exponent=exponent)
    state = buffer.init()
    for start in range(0, len(rows.reward), T):
        part = jax.tree.map(lambda x, start=start: jnp.asarray(x[start : start + T]), rows)
        state = ADD[exponent](state, part, jnp.asarray(carry[start]))
    return buffer, state


ADD = {e: jax.jit(sequences.make(CONFIG, SPEC, jnp.zeros(2), exponent=e).add) for e in (None, 1.0)}
SAMPLE = {e: jax.jit(sequences.make(CONFIG, SPEC, jnp.zeros(2), exponent=e).sample, static_argnums=(2, 3)) for e in ADD}


def readable(num_rows):
    """Return the first rows of readable sequences: every PERIOD-th, if the sequence is whole and not overwritten."""
    oldest = max(num_rows - R, 0)
    return [row for row in range(oldest, num_rows - L - STEPS + 1) if row % PERIOD == 0]


def n_step(rows, row, env):
    """Return the n-step reward, the discount and the next row of a transition, by a plain loop."""
    reward, discount = 0.0, 1.0
    for i in range(STEPS):
        reward += discount * rows.reward[row + i, env]
        discount *= GAMMA * rows.discount[row + i, env]
        if rows.last[row + i, env]:
            break
    return reward, discount, row + i + 1


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), num_rollouts=st.integers(4, 20), prioritized=st.booleans())
def test_sampled_sequences_equal_slices_of_row_list(seed, num_rollouts, prioritized):
    rows, carry = history(seed, num_rollouts)
    exponent = 1.0 if prioritized else None
    _, state = filled(rows, carry, exponent)
    found, weight, _ = SAMPLE[exponent](state, jax.random.key(seed), 64, GAMMA)
    possible = readable(num_rollouts * T)
    assert (np.asarray(weight) > 0).all() == bool(possible)
    if not possible:
        return
    num_learned = L - BURN_IN
    steps = jax.tree.map(lambda x: np.asarray(x).reshape(64, num_learned), found.steps[1:4])
    seen = set()
    for b in range(64):
        env, start = divmod(int(found.obs[b, 0]), 1000)
        seen.add((start, env))
        wanted = slice(start, start + L + STEPS)
        np.testing.assert_array_equal(found.obs[b], rows.obs[wanted, env])
        np.testing.assert_array_equal(found.reset[b], ~rows.valid[wanted, env])
        np.testing.assert_array_equal(found.carry[b], carry[start, env])
        for k in range(num_learned):
            row = start + BURN_IN + k
            reward, discount, following = n_step(rows, row, env)
            np.testing.assert_allclose([steps[1][b, k], steps[2][b, k]], [reward, discount], rtol=1e-5, atol=1e-6)
            assert steps[0][b, k] == rows.action[row, env] and found.following[b, k] == following - start
            assert found.weight[b, k] == rows.valid[row, env]
    assert {start for start, _ in seen} <= set(possible)
    if len(possible) <= 2:
        assert seen == {(start, env) for start in possible for env in range(N)}  # 64 draws of at most 6


@pytest.mark.slow
def test_memory_goes_on_up_to_newest_row_before_restart():
    """Rows 0 to 7 are of one episode, which a restart interrupts; their targets of two steps stay in rows 0 to 7."""
    ones, number = np.ones((R, N), np.float32), np.repeat(np.arange(R)[:, None], N, 1)
    rows = Transition(np.float32(number), number, ones, ones, ones < 0, ones > 0, ())
    buffer, state = filled(jax.tree.map(lambda x: x[:8], rows), np.zeros((8, N, 2), np.float32))
    state = buffer.discard_tail(state)
    for start in range(8, R, T):
        part = jax.tree.map(lambda x, start=start: jnp.asarray(x[start : start + T]), rows)
        state = buffer.add(state, part, jnp.zeros((N, 2)))
    found, _, _ = buffer.sample(state, jax.random.key(0), 64, GAMMA)
    assert {*np.asarray(found.obs)[:, 0].tolist()} == {0, 4, 8}
    np.testing.assert_array_equal(found.reset, found.obs == 7)
    learned = np.asarray(found.obs)[:, BURN_IN:L]
    np.testing.assert_array_equal(found.weight, learned != 7)
    start, steps = np.asarray(found.obs)[:, :1], np.where(learned == 6, 1, 2)
    used = learned != 7
    np.testing.assert_array_equal((found.following + start)[used], (learned + steps)[used])
    np.testing.assert_array_equal(found.steps.reward.reshape(learned.shape)[used], np.where(steps == 1, 1, 1.5)[used])


@pytest.mark.slow
def test_sequence_priorities_are_added_and_removed_with_sequences():
    rows, carry = history(0, 12)
    buffer, state = filled(rows, carry, 1.0)
    leaves = lambda state: np.asarray(state.priorities.levels[0])[: CONFIG.num_slots * N].reshape(-1, N)
    possible = [start % R // PERIOD for start in readable(24)]
    expected = np.zeros((CONFIG.num_slots, N))
    expected[possible] = 1
    np.testing.assert_array_equal(leaves(state), expected)
    _, _, index = SAMPLE[1.0](state, jax.random.key(0), 64, GAMMA, 1.0)
    item = np.asarray(index.item)
    assert set(item // N) == set(possible)
    state = buffer.update_priorities(state, index, jnp.full(64, 3.0))
    expected.reshape(-1)[item] = 3 + 1e-6
    np.testing.assert_allclose(leaves(state), expected, rtol=1e-5)
    more, after = history(1, 2)
    more = jax.tree.map(jnp.asarray, more)
    state = ADD[1.0](state, jax.tree.map(lambda x: x[:T], more), after[0])
    gone = [slot for slot in possible if slot not in [start % R // PERIOD for start in readable(26)]]
    fresh = [start % R // PERIOD for start in readable(26) if start % R // PERIOD not in possible]
    expected[gone], expected[fresh] = 0, 3 + 1e-6
    np.testing.assert_allclose(leaves(state), expected, rtol=1e-5)
    assert gone or fresh
    assert float(sum_tree.total(state.priorities)) == pytest.approx(expected.sum(), rel=1e-5)


def test_sequence_error_is_mix_of_maximum_and_mean_error():
    errors = sequences.errors_of(jnp.float32([[1, 3, 9], [2, 2, 2]]), jnp.float32([[1, 1, 0], [1, 1, 1]]))
    np.testing.assert_allclose(errors, [0.9 * 3 + 0.1 * 2, 2], rtol=1e-6)


@pytest.mark.parametrize("length", range(1, 13))
def test_sequence_period_leaves_no_row_out(length):
    """Sequences begin at multiples of the period, and rows burn_in to length - 1 of each are learned from."""
    for burn_in in range(length):
        config = configure(dqn.Config, memory="gru", sequence_length=length, burn_in=burn_in)
        for rollout_length in range(1, length - burn_in + 1):
            period = config.sequence_period(rollout_length)
            learned = {start + i for start in range(0, 60, period) for i in range(burn_in, length)}
            assert learned >= set(range(burn_in, 60)), (burn_in, rollout_length, period)
            assert period % rollout_length == 0


@pytest.mark.slow
@pytest.mark.parametrize(("length", "burn_in", "rollout_length"), [(1, 0, 1), (6, 4, 2), (12, 8, 4), (10, 5, 5)])
def test_dqn_samples_every_valid_row_after_burn_in(length, burn_in, rollout_length):
    """The newest rows wait for the end of their sequence and of its targets."""
    sizes = dict(replay=dict(size=40 * N), rollout_length=rollout_length)
    config = configure(dqn.Config, memory="gru", sequence_length=length, burn_in=burn_in, **sizes)
    buffer = dqn.make_replay(config, SPEC, Parallelism(), jnp.zeros(2))
    rows, carry = history(0, 20)
    state, add = buffer.init(), jax.jit(buffer.add)
    for start in range(0, 40, rollout_length):
        part = jax.tree.map(lambda x, start=start: jnp.asarray(x[start : start + rollout_length]), rows)
        state = add(state, part, jnp.asarray(carry[start]))
    found, _, _ = buffer.sample(state, jax.random.key(0), 2048, GAMMA)
    learned = {*np.asarray(found.obs[:, burn_in:length])[np.asarray(found.weight) > 0].tolist()}
    newest = 40 - config.replay.n_step - config.sequence_period(rollout_length)
    assert learned >= {*rows.obs[burn_in:newest][rows.valid[burn_in:newest]].tolist()}


def test_automatic_rollout_length_is_at_most_learned_part_of_sequence():
    """32 steps over 3 environments are 10 in each, more than the 4 of a sequence of 6 that follow its burn-in of 2."""
    lengths = (6, 2), (1, 0), (40, 2)
    memories = [dict(kind="gru", sequence_length=length, burn_in=burn_in) for length, burn_in in lengths]
    assert [agent_of(probes.remember(3), memory=one).rollout_length for one in memories] == [4, 1, 10]


def test_default_sequences_accept_any_number_of_environments():
    for num_envs in (1, 2, 3, 5, 8, 32, 64):
        config = configure(dqn.Config, memory="gru")
        period = config.sequence_period(config.length(num_envs))
        assert 20 <= period <= 32


def agent_of(env, num_updates=10, **options):
    small = dict(
        memory=dict(kind="gru", size=4, sequence_length=6, burn_in=2), replay=dict(n_step=2, size=400),
        hidden_sizes=(8,), batch_size=8, learning_starts=40, gamma=probes.GAMMA,
    )  # fmt: skip
    return dqn.make(configure(dqn.Config, **small | options), env.spec, num_updates, Parallelism())


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(double=True), dict(value="quantile", atoms=3, bonus="munchausen")])
def test_sequence_loss_equals_loop_over_sequences_and_steps(options):
    """The loop steps both networks from the stored carry, and resets the carry at episode starts."""
    env = probes.remember(3, length=3)
    agent = agent_of(env, **options)
    context = agent.explore.args[0]
    state = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), 8)[0].agent)(jax.random.key(0))
    other = context.network.init(jax.random.key(9))
    batch, weight, _ = jax.jit(lambda s: context.replay.sample(s, jax.random.key(1), 4, probes.GAMMA))(state.replay)
    learner = state.learner._replace(target_params=other)
    loss = partial(dqn.sequence_loss, context, other, batch, weight / 4, ((), ()))
    found, (errors, _) = jax.jit(loss)(learner.params)

    advance = jax.jit(context.network.step)

    def outputs(params, b):
        carry, rows = jax.tree.map(lambda x: x[None, b], batch.carry), []
        for m in range(batch.obs.shape[1]):
            output, carry = advance(params, batch.obs[None, b, m], carry)
            rows.append(output)
            if batch.reset[b, m]:
                carry = jax.tree.map(jnp.zeros_like, carry)
        return rows

    total, per_sequence = 0.0, []
    for b in range(4):
        own, target, each = outputs(learner.params, b), outputs(other, b), []
        for k in range(4):
            place, row = int(batch.following[b, k]), b * 4 + k
            step = jax.tree.map(lambda x, row=row: x[None, row], batch.steps)
            chooser = own[place] if context.config.double else target[place]
            now = target[2 + k] if context.config.bonus.kind == "munchausen" else None
            goal = q_learning.target(context.rule, step, target[place], chooser, now)
            loss, (error, _) = dqn.weighted_loss(context, own[2 + k], step.action, goal, jnp.ones(1))
            total += float(loss) * float(batch.weight[b, k]) / 4 / 4
            each.append(float(error[0]) if batch.weight[b, k] else 0.0)
        per_sequence.append(0.9 * max(each) + 0.1 * sum(each) / max(float(batch.weight[b].sum()), 1))
    np.testing.assert_allclose(found, total, rtol=1e-4)
    np.testing.assert_allclose(errors, per_sequence, rtol=1e-4, atol=1e-6)
    assert batch.reset.any() and (np.asarray(batch.weight) == 0).any()


@pytest.mark.slow
def test_dqn_with_memory_solves_memory_probe():
    env = probes.remember(8, length=4)
    options = dict(memory=dict(kind="gru", size=16, sequence_length=12, burn_in=2), hidden_sizes=(16,), batch_size=32,
                   replay=dict(kind="prioritized", size=4000, n_step=2), replay_ratio=0.25, learning_rate=5e-3,
                   explore=dict(start=0.3, end=0.3), interval=200, double=True)  # fmt: skip
    agent = agent_of(env, 500, **options)
    state = jax.jit(lambda key: loop.train(env, agent, loop.init(env, agent, key), 500)[0].agent)(jax.random.key(0))
    play = jax.jit(partial(evaluator.evaluate_policy, env, agent, 4))
    assert float(play(state, jnp.uint32(0), jnp.int32(0)).score.mean()) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(burn_in=6), "memory.burn_in: must be less than the 6 steps of a sequence, got 6; use 1"),
        (
            dict(rollout_length=5),
            "rollout_length: must be at most the 4 steps of a sequence after its burn_in, got 5; use 4$",
        ),
        ({"replay.size": 45}, r"replay.size: must be at least \d+ for sequences of 6 steps"),
    ],
)
def test_dqn_rejects_options_that_do_not_fit_sequences(options, message):
    with pytest.raises(ValueError, match=message):
        agent_of(probes.remember(3), **options)


def test_added_sequences_get_largest_priority_of_all_shards_and_others_keep_theirs():
    """A ring of 8 rows has 4 starts; 6 rows have two sequences, 8 rows three, and 10 rows have overwritten one."""
    config = sequences.SequenceConfig(ReplayConfig(8, 1, 1), 2, 0, 2)
    spec = SPEC._replace(num_envs=1)
    buffer = sequences.make(config, spec, jnp.zeros(1), Parallelism("shards", 2), exponent=1.0)
    ones = jnp.ones((2, 1))
    rows = Transition(ones, jnp.zeros((2, 1), jnp.int32), ones, ones, ones < 0, ones > 0, ())

    def run(largest):
        state = buffer.init()
        for _ in range(3):
            state = buffer.add(state, rows, jnp.zeros((1, 1)))
        first = state.priorities.levels[0]
        priorities = sum_tree.update(state.priorities, jnp.int32([0, 1]), jnp.float32([3, 5]))
        state = state._replace(priorities=priorities, max_priority=largest)
        state = buffer.add(state, rows, jnp.zeros((1, 1)))
        second = state.priorities.levels[0]
        return first, second, buffer.add(state, rows, jnp.zeros((1, 1))).priorities.levels[0]

    assert buffer.update_priorities and not sequences.make(config, spec, jnp.zeros(1)).update_priorities
    first, second, third = jax.jit(jax.vmap(run, axis_name="shards"))(jnp.float32([2, 7]))
    for shard in range(2):
        np.testing.assert_array_equal(first[shard, :4], [1, 1, 0, 0])
        np.testing.assert_array_equal(second[shard, :4], [3, 5, 7, 0])
        np.testing.assert_array_equal(third[shard, :4], [0, 5, 7, 7])
