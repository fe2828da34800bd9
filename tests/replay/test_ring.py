"""Test replay.ring against lists of whole transitions, over histories with all kinds of episode ends."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings

from jaxrl_fast.agents import dqn
from jaxrl_fast.options.declare import configure
from jaxrl_fast.parallel import collectives, program
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.replay import ring as replay_ring
from jaxrl_fast.types import SHARED_MEMORY_AXIS, Box, Discrete, Env, EnvSpec, TimeStep, Transition
from jaxrl_fast.utils import memory
from tests.helpers import slow
from tests.helpers.histories import CASES, GAMMA, NUM_HISTORIES, STACKED, history, known, same, seeds, spec

NUM_DRAWS = 16
MANY = Discrete(2**31 - 1)  # the action is the number of its step and identifies its row


# The ring under test ---------------------------------------------------------------------------


class Seen(NamedTuple):
    """The contents of a ring after an addition."""

    rows: replay_ring.Sample  # [R * N]: every row, also unreadable ones
    drawn: replay_ring.Sample  # [B]
    found: jax.Array  # [B]
    num_readable: jax.Array
    num_lost: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def inspect_ring(layout, ring, key):
    row, env = (x.reshape(-1) for x in jnp.indices((layout.num_rows, layout.num_envs)))
    *drawn, found = replay_ring.draw(layout, ring, key, NUM_DRAWS)
    together = (jnp.concatenate(x) for x in zip((row, env), drawn))  # a second `read` would be compiled separately
    sample = replay_ring.read(layout, ring, *together, GAMMA)
    return Seen(
        jax.tree.map(lambda x: x[:-NUM_DRAWS], sample),
        jax.tree.map(lambda x: x[-NUM_DRAWS:], sample),
        found,
        replay_ring.num_readable(layout, ring),
        replay_ring.num_lost(layout, ring),
    )


def fill(layout, rollout_length, steps):
    """Return a ring after all steps [T, N, ...], and its contents after each rollout [T / rollout_length, ...]."""
    obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), steps.obs)
    rollouts = jax.tree.map(lambda x: x.reshape(-1, rollout_length, *x.shape[1:]), steps)

    def body(carry, rollout):
        ring, key = carry
        ring, (key, key_draw) = replay_ring.add(layout, ring, rollout), jax.random.split(key)
        return (ring, key), inspect_ring(layout, ring, key_draw)

    (ring, _), seen = jax.lax.scan(body, (replay_ring.init(layout, obs, MANY), jax.random.key(7)), rollouts)
    return ring, seen


@functools.partial(jax.jit, static_argnums=(0, 1))
def fill_many(layout, rollout_length, steps):
    return jax.vmap(functools.partial(fill, layout, rollout_length))(steps)


# Reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n if n in ("vector", "gray") else slow(n) for n in CASES])
@settings(max_examples=8)
@given(seed=seeds)
def test_read_equals_transitions_of_history(name, seed):
    """After every addition, each readable step is in exactly one row and equals the oracle's transition."""
    case = CASES[name]
    told = history(case, seed)
    _, seen = jax.device_get(fill_many(case.layout, case.rollout_length, told.steps))
    num_additions = case.num_steps // case.rollout_length
    for i in range(num_additions):
        can = known(case, (i + 1) * case.rollout_length)
        assert (seen.num_readable[:, i] * case.layout.num_envs == can.sum()).all()
        number = seen.rows.action[:, i] - 1  # -1 where nothing was written
        readable = (number >= 0) & can[number]
        for h in range(NUM_HISTORIES):
            np.testing.assert_array_equal(np.sort(number[h][readable[h]]), np.flatnonzero(can))
        which, place = np.nonzero(readable)
        compare(told, jax.tree.map(lambda x: x[which, i, place], seen.rows), which)  # noqa: B023


def compare(told, rows, which):
    """Compare rows [M], read from the histories `which` [M], with the oracle's transitions."""
    at = which, rows.action - 1
    same((rows.obs, rows.next_obs), jax.tree.map(lambda x: x[at], (told.obs, told.next_obs)))
    same(rows.discount, told.discount[at])
    np.testing.assert_allclose(rows.reward, told.reward[at], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKED)
@settings(max_examples=2)
@given(seed=seeds)
def test_ring_of_single_frames_reads_same_stacks_as_ring_of_whole_stacks(name, seed):
    case = CASES[name]
    steps = history(case, seed).steps
    _, once = jax.device_get(fill_many(case.layout, case.rollout_length, steps))
    whole_ring, whole = jax.device_get(fill_many(case.layout._replace(frame_stack=0), case.rollout_length, steps))
    assert whole_ring.age is None
    for i in range(case.num_steps // case.rollout_length):
        can = known(case, (i + 1) * case.rollout_length)
        number = once.rows.action[:, i] - 1
        readable = (number >= 0) & can[number]
        assert (whole.num_readable[:, i] >= once.num_readable[:, i]).all()
        rows = lambda x: x[:, i][readable]  # noqa: B023
        same(jax.tree.map(rows, once.rows), jax.tree.map(rows, whole.rows))


@pytest.mark.parametrize("name", [n if n in ("vector", "gray") else slow(n) for n in CASES])
@settings(max_examples=3)
@given(seed=seeds)
def test_draw_finds_only_valid_readable_rows(name, seed):
    """Rows with `found` are readable and not reset rows. `found` is false when no such row exists."""
    case = CASES[name]
    told = history(case, seed)
    _, seen = jax.device_get(fill_many(case.layout, case.rollout_length, told.steps))
    for i in range(case.num_steps // case.rollout_length):
        can = known(case, (i + 1) * case.rollout_length)
        which, draw = np.nonzero(seen.found[:, i])
        rows = jax.tree.map(lambda x: x[which, i, draw], seen.drawn)  # noqa: B023
        assert can[rows.action - 1].all() and told.valid[which, rows.action - 1].all()
        compare(told, rows, which)
        some = (told.valid & can).any(-1)
        assert not seen.found[~some, i].any()
        mostly = (told.valid & can).sum(-1) > 0.8 * can.sum()  # a draw fails with probability 0.2^4 at most
        assert not mostly.any() or seen.found[mostly, i].mean() > 0.9


# Counting --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_num_readable_and_num_lost_equal_formula(name):
    """Of min(s, R) rows, the last n have too few successors. Once rows are overwritten, k - 1 rows lack frames."""
    layout, length = CASES[name].layout, CASES[name].rollout_length
    _, seen = fill_many(layout, length, history(CASES[name], 0).steps)
    size = np.minimum(np.arange(1, len(seen.num_lost[0]) + 1) * length, layout.num_rows)
    lost = np.where(size == layout.num_rows, {0: 0, 3: 2, 4: 3}[layout.frame_stack], 0)
    np.testing.assert_array_equal(seen.num_lost, np.broadcast_to(lost, seen.num_lost.shape))
    np.testing.assert_array_equal(seen.num_readable[0], np.maximum(size - layout.n_step - lost, 0))
    assert not np.asarray(seen.found[:, size <= layout.n_step]).any()


@pytest.mark.parametrize("frame_stack", [0, 4])
def test_empty_ring_has_no_readable_row(frame_stack):
    layout = CASES["gray"].layout._replace(frame_stack=frame_stack)
    ring = replay_ring.init(layout, spec(CASES["gray"]), MANY)
    seen = inspect_ring(layout, ring, jax.random.key(0))
    assert seen.num_readable == 0 and not seen.found.any()


def test_full_ring_has_no_readable_row_when_too_short():
    """Of 8 rows, 5 have too few successors and 3 lack frames, so none is readable. Of 7 rows, 2 are."""
    layout = replay_ring.ReplayConfig(8, 1, n_step=5, frame_stack=4)
    ring = replay_ring.init(layout, jax.ShapeDtypeStruct((2, 2, 4), jnp.uint8), MANY)._replace(size=jnp.int32(8))
    assert replay_ring.num_readable(layout, ring) == 0
    assert replay_ring.num_readable(layout, ring._replace(size=jnp.int32(7))) == 2


def test_add_rejects_rollout_length_that_does_not_divide_num_rows():
    case = CASES["vector"]
    with pytest.raises(AssertionError, match=r"\(13, 4\)"):
        fill(case.layout._replace(num_rows=13), 4, jax.tree.map(lambda x: x[0], history(case, 0, 1).steps))


# Drawing ---------------------------------------------------------------------------------------

MANY_DRAWS = 40_000
UNEVEN = replay_ring.ReplayConfig(16, 3, n_step=3)


def half_resets(num_steps):
    """Environment 0 has a reset row every second step, 1 never, 2 in 10 of 12 steps. The observation is the action."""
    times = np.arange(num_steps)
    valid = np.stack([times % 2 == 0, times >= 0, times % 12 < 2], axis=-1)
    number = 1 + np.arange(valid.size, dtype=np.int32).reshape(valid.shape)
    ones = np.ones(valid.shape, np.float32)
    return Transition(number[..., None], number, ones, ones, ~valid, valid, ())


add_one = jax.jit(functools.partial(replay_ring.add, UNEVEN))
draw_many = jax.jit(functools.partial(replay_ring.draw, UNEVEN, batch_size=MANY_DRAWS))


def ring_of(steps):
    ring = replay_ring.init(UNEVEN, jax.ShapeDtypeStruct((1,), jnp.int32), MANY)
    for t in range(len(steps.reward)):
        ring = add_one(ring, jax.tree.map(lambda x: x[t : t + 1], steps))  # noqa: B023
    return ring


@pytest.mark.parametrize("num_steps", [9, 41])
def test_draw_is_uniform_over_valid_readable_steps(num_steps):
    """Test a partly filled and a wrapped ring (chi-square, fixed key). A draw fails when 4 tries hit reset rows."""
    steps = half_resets(num_steps)
    ring = ring_of(steps)
    row, env, found = jax.device_get(draw_many(ring, jax.random.key(num_steps)))
    number = np.asarray(ring.action)[row, env][found]
    can = np.arange(max(num_steps - 16, 0), num_steps - 3)
    fair = steps.action[can][steps.valid[can]]
    counts = np.bincount(number, minlength=steps.action.size + 1)
    assert counts[fair].sum() == found.sum(), "a reset row or an unreadable row was drawn"
    assert scipy.stats.chisquare(counts[fair]).pvalue > 1e-4
    resets = 1 - len(fair) / (3 * len(can))
    assert scipy.stats.binomtest(int((~found).sum()), MANY_DRAWS, resets**4).pvalue > 1e-4


def test_draws_are_independent_within_batch_and_between_keys():
    """All 24 x 24 pairs of steps are equally frequent, within a batch and between successive keys (chi-square)."""
    steps = half_resets(11)
    ring = ring_of(steps._replace(valid=steps.valid | True))
    keys = jax.vmap(jax.random.key)(jnp.arange(4000))
    row, env, found = jax.jit(jax.vmap(lambda key: replay_ring.draw(UNEVEN, ring, key, 8)))(keys)
    assert found.all()
    cell = np.asarray(row) * 3 + np.asarray(env)
    for one, other in [(cell[:, ::2], cell[:, 1::2]), (cell[:, :4], cell[:, 4:]), (cell[::2], cell[1::2])]:
        counts = np.bincount((one * 24 + other).reshape(-1), minlength=24 * 24)
        assert scipy.stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.slow
def test_grad_workers_draw_disjoint_parts_of_one_batch():
    ring, key = ring_of(half_resets(41)), jax.random.key(5)
    whole, own = (
        replay_ring.draw(UNEVEN, ring, key, 24),
        functools.partial(collectives.local_rows, num_grad_workers=3, axis=-1),
    )
    of_hands = jax.vmap(lambda _: replay_ring.draw(UNEVEN, ring, key, 24, own), axis_name=SHARED_MEMORY_AXIS)(
        jnp.arange(3)
    )
    jax.tree.map(lambda x, parts: np.testing.assert_array_equal(parts.reshape(-1), x), whole, of_hands)


def test_draw_finds_nothing_when_all_rows_are_reset_rows():
    ring = ring_of(half_resets(41)._replace(valid=np.zeros((41, 3), bool)))
    assert not draw_many(ring, jax.random.key(0))[2].any()


def test_draw_and_read_ignore_rows_beyond_size():
    """Rows that were not written yet are marked valid and filled with -1 and NaN."""
    ring = ring_of(half_resets(9))
    blank = np.asarray(ring.action) == 0
    assert blank.sum() == 7 * 3
    spoil = lambda x, bad: jnp.where(blank.reshape(*blank.shape, *(1,) * (x.ndim - 2)), bad, x).astype(x.dtype)
    poisoned = ring._replace(
        obs=spoil(ring.obs, -1),
        action=spoil(ring.action, -1),
        reward=spoil(ring.reward, np.nan),
        discount=spoil(ring.discount, np.nan),
        last=spoil(ring.last, True),
        valid=spoil(ring.valid, True),
    )
    drawn = draw_many(ring, jax.random.key(1))
    same(draw_many(poisoned, jax.random.key(1)), drawn)
    row, env, found = (np.asarray(x) for x in drawn)
    for some in (ring, poisoned):
        sample = replay_ring.read(UNEVEN, some, row[found], env[found], 1.0)
        assert np.isfinite(sample.reward).all() and (np.asarray(sample.next_obs) > 0).all()


# By hand ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_frame_stacks_match_hand_computation():
    """Frames are 5 6 7, a reset to 1, then 2. Check stacks of three before, at and after the reset."""
    layout = replay_ring.ReplayConfig(8, 1, frame_stack=3)
    stacks = [[5, 5, 5], [5, 5, 6], [5, 6, 7], [1, 1, 1], [1, 1, 2], [1, 2, 2]]
    obs = jnp.array(stacks, jnp.uint8)[:, None]
    ones = jnp.ones((6, 1))
    ring = replay_ring.init(layout, jax.ShapeDtypeStruct((3,), jnp.uint8), Discrete(2))
    for t in range(6):
        step = Transition(obs, ones > 0, ones, ones, ones < 0, ones > 0, ())
        ring = replay_ring.add(layout, ring, jax.tree.map(lambda x: x[t : t + 1], step))  # noqa: B023
    np.testing.assert_array_equal(ring.obs[:6, 0, 0], [5, 6, 7, 1, 2, 2])
    np.testing.assert_array_equal(ring.age[:6, 0], [0, 1, 2, 0, 1, 2])
    sample = replay_ring.read(layout, ring, jnp.arange(5), jnp.zeros(5, jnp.int32), 1.0)
    np.testing.assert_array_equal(sample.obs, stacks[:5])
    np.testing.assert_array_equal(sample.next_obs, stacks[1:])


# Seeds -----------------------------------------------------------------------------------------


# Size and cost ---------------------------------------------------------------------------------


def num_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", CASES)
def test_ring_and_samples_keep_dtypes(name):
    case = CASES[name]
    obs = spec(case)
    ring = jax.eval_shape(functools.partial(replay_ring.init, case.layout, action=MANY, obs=obs))
    jax.tree.map(lambda x, like: np.testing.assert_equal(x.dtype, like.dtype), ring.obs, obs)
    index = jax.ShapeDtypeStruct((5,), jnp.int32)
    sample = jax.eval_shape(lambda *x: replay_ring.read(case.layout, *x, 0.9), ring, index, index)
    for whole in (sample.obs, sample.next_obs):
        jax.tree.map(lambda x, like: np.testing.assert_equal((x.shape, x.dtype), ((5, *like.shape), like.dtype)),
                     whole, obs)  # fmt: skip
    assert sample.action.dtype == jnp.int32 and sample.reward.dtype == sample.discount.dtype == jnp.float32


def test_ring_stores_box_actions_as_float32():
    ring = replay_ring.init(replay_ring.ReplayConfig(4, 2), jax.ShapeDtypeStruct((3,), jnp.float32), Box((5,)))
    assert ring.action.shape == (4, 2, 5) and ring.action.dtype == jnp.float32


def test_ring_of_1m_atari_frames_takes_7_1_gb():
    """A frame takes 84 x 84 bytes and 15 more: action, reward and discount take 4 each, and three fields take 1."""
    layout = replay_ring.ReplayConfig(125_000, 8, n_step=3, frame_stack=4)
    atari = jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8)
    ring = jax.eval_shape(functools.partial(replay_ring.init, layout, atari, Discrete(18)))
    assert num_bytes(ring.obs) == 1_000_000 * 84 * 84 == 7_056_000_000
    assert num_bytes(ring) == 1_000_000 * (84 * 84 + 15) + 8 == memory.nbytes(ring)
    assert memory.format_bytes(memory.nbytes(ring)) == "7.1 GB"


IMAGE = jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8)


def abstract_ring(num_rows, num_envs=4):
    layout = replay_ring.ReplayConfig(num_rows, num_envs, n_step=3, frame_stack=4)
    return layout, jax.eval_shape(functools.partial(replay_ring.init, layout, IMAGE, Discrete(18)))


def test_add_writes_donated_ring_in_place():
    """A scan that adds and reads needs less than 5% of the donated ring in addition. It is compiled, not run."""
    layout, ring = abstract_ring(1000)
    one = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    as_bool = jax.ShapeDtypeStruct((1, 4), bool)
    steps = Transition(
        jax.ShapeDtypeStruct((1, 4, *IMAGE.shape), jnp.uint8), jax.ShapeDtypeStruct((1, 4), jnp.int32),
        one, one, as_bool, as_bool, (),
    )  # fmt: skip
    steps = jax.tree.map(lambda x: jax.ShapeDtypeStruct((5, *x.shape), x.dtype), steps)

    def run(ring, rollouts, key):
        def body(ring, rollout):
            ring = replay_ring.add(layout, ring, rollout)
            row, env, found = replay_ring.draw(layout, ring, key, 8)
            sample = replay_ring.read(layout, ring, row, env, 0.99)
            return ring, (jnp.where(found, sample.reward, 0).sum(), sample.obs.sum(), sample.next_obs.sum())

        return jax.lax.scan(body, ring, rollouts)

    compiled = jax.jit(run, donate_argnums=0).lower(ring, steps, jax.eval_shape(lambda: jax.random.key(0))).compile()
    memory = compiled.memory_analysis()
    assert num_bytes(ring) > 28_000_000
    assert memory.temp_size_in_bytes < 0.05 * num_bytes(ring)
    assert memory.alias_size_in_bytes >= num_bytes(ring), "the new ring does not alias the old one"


def blank_screens(num_envs):
    """A screen that is always black, in one endless episode."""
    timestep = TimeStep(
        jnp.zeros((num_envs, *IMAGE.shape), jnp.uint8), jnp.zeros(num_envs), jnp.ones(num_envs), jnp.zeros(num_envs) > 0
    )
    spec = EnvSpec("tests/blank_screens", IMAGE, Discrete(2), num_envs, frame_stack=4)
    return Env(lambda key: ((), timestep), lambda state, action: ((), timestep), spec)


@pytest.mark.parametrize(("kind", "seeds_each"), [("uniform", 1), ("prioritized", 1), ("uniform", 2)])
@pytest.mark.slow
def test_dqn_chunk_keeps_one_copy_of_ring(kind, seeds_each):
    """DQN's chunk needs the state and less than 5% of the ring in addition. It is compiled, not run.

    The same holds for several seeds on a device, whose positions in the ring may differ as far as XLA knows.
    """
    env = blank_screens(4)
    config = configure(
        dqn.Config,
        batch_size=8,
        rollout_length=4,
        network="mlp",
        hidden_sizes=(4,),
        replay=dict(kind=kind, size=12_000, n_step=3),
    )
    agent = dqn.make(config, env.spec, 100)
    num_seeds = 1 if seeds_each == 1 else seeds_each * jax.local_device_count()
    built = program.build(env, agent, 100, Placement(num_seeds))
    state = program.shapes(env, agent, Placement(seeds_each))  # on one device
    ring = num_bytes(state.agent.replay)
    assert ring > seeds_each * 84_000_000
    rest = jax.tree.map(lambda x: x if x.dtype.name != "key<fry>" else jax.random.key_data(x), state._replace(key=()))
    assert num_bytes(rest) <= built.memory < num_bytes(rest) + 0.05 * ring


def test_draw_cost_is_independent_of_num_rows():
    """Compare XLA's counts of operations and of temporary bytes. Its count of bytes read includes the whole ring."""

    def cost(num_rows):
        layout, ring = abstract_ring(num_rows)

        def batch(ring, key):
            row, env, _ = replay_ring.draw(layout, ring, key, 8)
            return replay_ring.read(layout, ring, row, env, 0.99)

        compiled = jax.jit(batch).lower(ring, jax.eval_shape(lambda: jax.random.key(0))).compile()
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    assert cost(1000) == cost(100_000)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [2, 6])
def test_frame_stack_of_1_equals_no_frame_stack(num_rows):
    """Compare filled and overwritten rings with frame_stack 0 and 1."""
    ones = jnp.ones((2, 1))
    found = []
    for frame_stack in (0, 1):
        layout = replay_ring.ReplayConfig(num_rows, 1, frame_stack=frame_stack)
        ring = replay_ring.init(layout, jax.ShapeDtypeStruct((3,), jnp.uint8), Discrete(2))
        for t in range(5):
            obs = jnp.arange(6 * t, 6 * t + 6, dtype=jnp.uint8).reshape(2, 1, 3)
            ring = replay_ring.add(layout, ring, Transition(obs, ones > 0, ones, ones, ones < 0, ones > 0, ()))
        sample = replay_ring.read(layout, ring, jnp.arange(num_rows), jnp.zeros(num_rows, jnp.int32), 0.5)
        found.append((ring, sample, replay_ring.num_readable(layout, ring), replay_ring.num_lost(layout, ring)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[0][2] == num_rows - 1 and found[0][3] == 0


def test_random_numbers_are_distinct():
    """Each round is a bijection of 32 bits, so counters give different numbers. Independent draws would repeat 8."""
    numbers = np.asarray(jax.jit(lambda key: replay_ring.random_numbers(key, (2**18,)))(jax.random.key(0)))
    assert numbers.dtype == np.uint32 and len(np.unique(numbers)) == 2**18


@pytest.mark.parametrize("frame_stack", [2, slow(3)])
def test_ring_keeps_one_frame_of_stacks_of_any_size(frame_stack):
    """The frame of step t is filled with t. The stack of row 4 has the frames up to 4, the next one those up to 5."""
    config = replay_ring.ReplayConfig(8, 1, 1, frame_stack)
    number = np.arange(8.0)[:, None] + np.arange(1 - frame_stack, 1)
    stacks = jnp.float32(np.maximum(number, 0)).reshape(8, 1, 1, frame_stack)
    one, none = jnp.ones((8, 1)), jnp.zeros((8, 1), bool)
    steps = Transition(stacks, jnp.zeros((8, 1), jnp.int32), one, one, none, ~none, ())
    empty = replay_ring.init(config, jax.ShapeDtypeStruct((1, frame_stack), jnp.float32), Discrete(2))
    assert jax.tree.leaves(empty.obs)[0].shape == (8, 1, 1, 1)
    row, env = jnp.int32([4]), jnp.int32([0])
    found = jax.jit(lambda: replay_ring.read(config, replay_ring.add(config, empty, steps), row, env, 1.0))()
    np.testing.assert_array_equal(found.obs, stacks[4])
    np.testing.assert_array_equal(found.next_obs, stacks[5])
