"""Test uniform and prioritized replay buffers: weights, priorities, action masks, shards and gradient workers."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax import ShapeDtypeStruct

from jaxrl_fast import replay
from jaxrl_fast.replay import ring, sum_tree
from jaxrl_fast.types import SHARED_MEMORY_AXIS, Discrete, EnvSpec, MultiDiscrete, Parallelism, Transition
from tests.helpers import slow

pytestmark = pytest.mark.unit
GAMMA = 0.5
CONFIG = replay.ReplayConfig(num_rows=8, num_envs=1)
THREE_ACTIONS = Discrete(3)
each_kind = pytest.mark.parametrize("kind", [replay.uniform, replay.prioritized])


def spec_of(num_envs=1, frame_stack=0, action=THREE_ACTIONS, has_action_mask=False):
    obs = ShapeDtypeStruct((max(frame_stack, 1),), jnp.float32)
    return EnvSpec("test", obs, action, num_envs, frame_stack, has_action_mask)


@cache
def make(kind, config=CONFIG, spec=None, parallelism=Parallelism()):
    """A buffer whose functions are compiled, once for all tests."""
    buffer = kind(config, spec or spec_of(), parallelism)
    return buffer._replace(add=jax.jit(buffer.add), sample=jax.jit(buffer.sample, static_argnums=2))


def rows(obs, last=None, valid=None, action_mask=None):
    """Return T rows [T, N] whose observation, action and reward are the numbers `obs` [T, N]."""
    number = jnp.float32(obs)
    last = jnp.zeros(number.shape, bool) if last is None else jnp.asarray(last, bool)
    valid = jnp.ones(number.shape, bool) if valid is None else jnp.asarray(valid, bool)
    return Transition(
        number[..., None], jnp.int32(number), number, jnp.ones(number.shape), last, valid, (), action_mask
    )


def with_four_rows(buffer):
    """Return the state after rows 0, 1, 2, 3 of one environment. All but the last can be sampled."""
    return buffer.add(buffer.init(), rows(np.arange(4)[:, None]))


# Importance weights


def test_importance_weights_are_divided_by_maximum_over_devices():
    """One of the three devices has nothing to sample."""
    prob = jnp.float32([[1, 4], [16, 64], [0, 0]])
    found = jax.vmap(partial(replay.importance_weights, exponent=0.5, axis_name="shards"), axis_name="shards")(prob)
    np.testing.assert_allclose(found, replay.importance_weights(prob.reshape(-1), 0.5).reshape(3, 2), rtol=1e-6)


def test_importance_weights_equal_formula_of_paper():
    """The formula is (1 / (N P))^beta divided by its maximum in the batch, independent of N."""
    priority = np.random.default_rng(0).random(8)
    prob = priority / 17.0
    expected = (1 / (1000 * prob)) ** 0.6
    found = replay.importance_weights(jnp.float32(priority), 0.6)
    np.testing.assert_allclose(found, expected / expected.max(), rtol=1e-5)


# Adding and sampling


@pytest.mark.slow
@each_kind
def test_sample_has_weight_0_when_no_row_can_be_sampled(kind):
    """Check an empty buffer, one row without a successor, and 4 invalid rows."""
    buffer = make(kind)
    lone = buffer.add(buffer.init(), rows([[7]]))
    invalid = buffer.add(buffer.init(), rows(np.arange(4)[:, None], valid=np.zeros((4, 1))))
    for state, size in ((buffer.init(), 0), (lone, 1), (invalid, 4)):
        batch, weight, index = buffer.sample(state, jax.random.key(0), 8, GAMMA, 0.4)
        np.testing.assert_array_equal(weight, np.zeros(8))
        assert weight.dtype == jnp.float32 and batch.reward.shape == (8,) and buffer.size(state) == size
        if buffer.update_priorities:  # rows that were not found get no priority
            after = buffer.update_priorities(state, index, jnp.full(8, 9.0))
            jax.tree.map(np.testing.assert_array_equal, after, state)


@each_kind
def test_sample_returns_two_step_transitions_of_added_rows(kind):
    """Rewards are 0, 1, ...; row 1 is the last of its episode, where one step remains, and row 2 is a reset row."""
    buffer, number = make(kind, CONFIG._replace(n_step=2)), np.arange(8)[:, None]
    state = buffer.add(buffer.init(), rows(number[:4], last=number[:4] == 1, valid=number[:4] != 2))
    state = buffer.add(state, rows(number[4:]))
    batch, weight, _ = buffer.sample(state, jax.random.key(1), 512, GAMMA, 1.0)
    found = np.asarray(weight) > 0
    batch = jax.tree.map(lambda x: np.asarray(x)[found], batch)
    obs = batch.obs[:, 0].astype(int)
    counts = np.bincount(obs, minlength=6)
    assert counts[2] == 0 and len(counts) == 6 and scipy.stats.chisquare(counts[[0, 1, 3, 4, 5]]).pvalue > 1e-4
    np.testing.assert_array_equal(weight[found], 1)
    np.testing.assert_array_equal(batch.action, obs)
    np.testing.assert_allclose(batch.reward, np.array([0.5, 1, np.nan, 5, 6.5, 8])[obs])
    np.testing.assert_allclose(batch.discount, np.where(obs == 1, 0.5, 0.25))
    np.testing.assert_array_equal(batch.next_obs[:, 0], np.array([2, 2, -1, 5, 6, 7])[obs])
    assert batch.action_mask is batch.next_action_mask is None
    assert buffer.size(state) == 8


@each_kind
def test_discard_tail_excludes_newest_row_from_later_samples(kind):
    """When all environments restart, the next row is not a successor of the newest one."""
    buffer = make(kind)
    restarted = buffer.add(buffer.discard_tail(with_four_rows(buffer)), rows(10 + np.arange(4)[:, None]))
    going_on = buffer.add(with_four_rows(buffer), rows(10 + np.arange(4)[:, None]))
    for state, expected in ((restarted, {0, 1, 2, 10, 11, 12}), (going_on, {0, 1, 2, 3, 10, 11, 12})):
        batch, weight, _ = buffer.sample(state, jax.random.key(0), 256, GAMMA, 0.4)
        assert set(np.asarray(batch.obs)[np.asarray(weight) > 0, 0]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("action", [Discrete(3), MultiDiscrete((2, 3))])
@each_kind
def test_sample_returns_action_masks_of_observations(kind, action):
    """The mask of row t is the bits of t. The next mask is that of row t + 2, or less at the end of an episode."""
    num = action.num_outputs
    mask = (np.arange(8)[:, None, None] >> np.arange(num)) % 2 == 1
    buffer = make(kind, CONFIG._replace(n_step=2), spec_of(action=action, has_action_mask=True))
    steps = rows(np.arange(8)[:, None], last=np.arange(8)[:, None] == 2, action_mask=jnp.asarray(mask))
    steps = steps._replace(action=action.zeros(8, 1))
    state = buffer.add(buffer.init(), jax.tree.map(lambda x: x[:4], steps))
    state = buffer.add(state, jax.tree.map(lambda x: x[4:], steps))
    batch, weight, _ = buffer.sample(state, jax.random.key(0), 64, GAMMA, 0.4)
    now = np.asarray(batch.obs)[:, 0].astype(int)
    assert set(now[np.asarray(weight) > 0]) == set(range(6))
    following = np.where(now <= 2, np.minimum(now + 2, 3), now + 2)
    np.testing.assert_array_equal(batch.next_obs[:, 0], following)
    np.testing.assert_array_equal(batch.action_mask, mask[now, 0])
    np.testing.assert_array_equal(batch.next_action_mask, mask[following, 0])
    assert batch.action.shape == (64, *action.shape)


@pytest.mark.slow
@each_kind
def test_each_shard_samples_its_part_of_batch(kind):
    """Two shards with the same rows sample half of the batch each."""
    buffer, whole = make(kind, parallelism=Parallelism("shards", 2)), make(kind)
    run = lambda _: buffer.sample(with_four_rows(buffer), jax.random.key(0), 8, GAMMA, 0.4)
    batch, weight, _ = jax.jit(jax.vmap(run, axis_name="shards"))(jnp.arange(2))
    expected, expected_weight, _ = whole.sample(with_four_rows(whole), jax.random.key(0), 4, GAMMA, 0.4)
    assert weight.shape == (2, 4)
    for i in range(2):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], batch), expected)
        np.testing.assert_allclose(weight[i], expected_weight, rtol=1e-6)


@pytest.mark.parametrize("kind", [replay.uniform, slow(replay.prioritized)])
def test_grad_workers_read_disjoint_parts_of_one_batch(kind):
    """The index is that of the whole batch on each of the three workers."""
    buffer, whole = make(kind, parallelism=Parallelism(num_grad_workers=3)), make(kind)
    run = lambda _: buffer.sample(with_four_rows(buffer), jax.random.key(0), 12, GAMMA, 0.4)
    batch, weight, index = jax.jit(jax.vmap(run, axis_name=SHARED_MEMORY_AXIS))(jnp.arange(3))
    *expected, expected_index = whole.sample(with_four_rows(whole), jax.random.key(0), 12, GAMMA, 0.4)
    join = lambda x: x.reshape(-1, *x.shape[2:])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(join, [batch, weight]), expected)
    for i in range(3):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], index), expected_index)


# Priorities


def test_uniform_has_no_priorities():
    assert replay.uniform(CONFIG, spec_of()).update_priorities is None


def prioritize(state, priorities):
    """The state with these priorities of rows 0, 1, ..."""
    priority = jnp.float32(priorities)
    return state._replace(priorities=sum_tree.update(state.priorities, jnp.arange(len(priority)), priority))


def test_prioritized_sample_is_proportional_and_has_importance_weights():
    # Priorities 1, 0 and 4 have sum 5, in 16 strata: row 0 is drawn 3 or 4 times. Weights (1 / P)^.5 / max: 1 and 1/2.
    buffer = make(replay.prioritized)
    state = prioritize(with_four_rows(buffer), [1, 0, 4])
    batch, weight, index = buffer.sample(state, jax.random.key(0), 16, GAMMA, 0.5)
    obs = np.asarray(batch.obs)[:, 0]
    assert set(obs) == {0, 2} and (obs == 0).sum() in (3, 4)
    np.testing.assert_allclose(weight, np.where(obs == 0, 1, 0.5), rtol=1e-6)
    np.testing.assert_array_equal(index.item, obs)
    assert index.found.all()


def test_update_priorities_match_hand_computation():
    # (|error| + 1e-6)^.5 of errors 4, 9 and 0: 2, 3 and 1e-3. A row that was not found gets no priority.
    buffer = make(replay.prioritized)  # the exponent is 1/2
    index = replay.Index(jnp.int32([0, 2, 1, 5]), jnp.array([True, True, True, False]))
    after = buffer.update_priorities(prioritize(with_four_rows(buffer), [1, 1, 1]), index, jnp.float32([4, 9, 0, 100]))
    np.testing.assert_allclose(after.priorities.levels[0], [2, 1e-3, 3, 0, 0, 0, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(after.max_priority, 3, rtol=1e-5)
    lower = buffer.update_priorities(after, index, jnp.float32([1, 1, 1, 1]))
    np.testing.assert_allclose(lower.max_priority, 3, rtol=1e-5)  # the maximum never decreases
    added = buffer.add(lower, rows(10 + np.arange(4)[:, None]))
    np.testing.assert_allclose(added.priorities.levels[0], [1, 1, 1, 3, 3, 3, 3, 0], rtol=1e-5)


def test_add_gives_new_rows_maximum_priority_over_shards():
    """The shards begin with maxima 2 and 7; after the addition both have 7."""
    buffer = make(replay.prioritized, parallelism=Parallelism("shards", 2))

    def run(max_priority):
        state = buffer.add(buffer.init()._replace(max_priority=max_priority), rows(np.arange(4)[:, None]))
        return state.priorities.levels[0], state.max_priority

    found, largest = jax.vmap(run, axis_name="shards")(jnp.float32([2, 7]))
    np.testing.assert_array_equal(found, [[7, 7, 7, 0, 0, 0, 0, 0]] * 2)
    np.testing.assert_array_equal(largest, [7, 7])


def random_rollouts(spec, rollout_length, num_rollouts, seed=0):
    """Yield rollouts of random rows, of which a third is invalid."""
    rng = np.random.default_rng(seed)
    for _ in range(num_rollouts):
        shape = rollout_length, spec.num_envs
        flags = [jnp.asarray(rng.random(shape) < chance) for chance in (0.2, 0.67)]
        numbers = [jnp.asarray(rng.normal(size=(*shape, *more)), jnp.float32) for more in (spec.obs.shape, (), ())]
        obs, reward, discount = numbers
        yield Transition(obs, jnp.zeros(shape, jnp.int32), reward, discount, *flags, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_envs", "rollout_length", "n_step", "frame_stack"), [(3, 4, 1, 0), (2, 1, 3, 0), (1, 5, 2, 4), (2, 3, 3, 3)]
)
def test_unreadable_rows_have_priority_0_and_new_rows_maximum(num_envs, rollout_length, n_step, frame_stack):
    """Use the smallest buffer that DQN allows, before and after it is full.

    The maximum priority is the number of the rollout, so the tree shows when each row became readable.
    """
    num_rollouts = -(-(n_step + max(frame_stack, 1) + rollout_length) // rollout_length)
    num_rows = num_rollouts * rollout_length
    config, spec = replay.ReplayConfig(num_rows, num_envs, n_step, frame_stack), spec_of(num_envs, frame_stack)
    buffer = replay.prioritized(config, spec)
    add, state, capacity = jax.jit(buffer.add), buffer.init(), num_rows * num_envs
    since = {}  # row, counted from the start: the rollout that made it readable
    for i, steps in enumerate(random_rollouts(spec, rollout_length, 5 * num_rollouts), start=1):
        state = add(state._replace(max_priority=jnp.float32(i)), steps)
        written = i * rollout_length
        lost = max(frame_stack - 1, 0) if written >= num_rows else 0
        expected = np.zeros((num_rows, num_envs))
        for row in range(max(written - num_rows, 0) + lost, written - n_step):
            since.setdefault(row, i)
            expected[row % num_rows] = since[row] * np.asarray(state.ring.valid)[row % num_rows]
        leaves = np.asarray(state.priorities.levels[0])
        np.testing.assert_array_equal(leaves[:capacity].reshape(num_rows, num_envs), expected)
        np.testing.assert_array_equal(leaves[capacity:], 0)
        assert written < n_step + 1 or int(ring.num_readable(config, state.ring)) > 0
        assert buffer.size(state) == min(written, num_rows)
