"""Test the sum tree: exact sums against running sums, proportional draws, and no accumulated rounding errors."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings

from jaxrl_fast.replay import sum_tree

SIZES = [1, 9, 64, 65, 600]  # one group; a padded group; a full group; three levels; four levels
NUM_CHANGED, NUM_MASSES = 40, 512  # fixed, since each length is compiled

update, find, total = jax.jit(sum_tree.update), jax.jit(sum_tree.find), jax.jit(sum_tree.total)
draw = jax.jit(sum_tree.draw, static_argnums=2)

seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from(SIZES)


def tree_of(priority):
    """Return the tree of these priorities, set in one update."""
    priority = np.asarray(priority, np.float32)
    return update(sum_tree.init(len(priority)), np.arange(len(priority)), priority)


def whole_numbers(rng, size):
    """Priorities whose sums are exact in float32, some or nearly all of them 0, but not all."""
    priority = rng.integers(1, 100, size) * (rng.random(size) < rng.choice([0.05, 0.5, 1.0]))
    priority[rng.integers(size)] = rng.integers(1, 100)
    return priority.astype(np.float32)


def magnitudes(rng, size):
    """Priorities from 1e-6 to 1e6, three in ten of them 0, but not all."""
    priority = 10 ** rng.uniform(-6, 6, size) * (rng.random(size) < 0.7)
    priority[rng.integers(size)] = 10 ** rng.uniform(-6, 6)
    return priority.astype(np.float32)


def assert_sums(tree, leaves, rtol=0.0):
    """Each level holds the sums of the one below it, eight at a time, and zeros beyond."""
    for level in tree.levels:
        expected = np.zeros(level.size)
        expected[: len(leaves)] = leaves
        np.testing.assert_allclose(level, expected, rtol=rtol)
        leaves = np.asarray(level, np.float64).reshape(-1, sum_tree.BRANCHES).sum(-1)
    assert level.size == sum_tree.BRANCHES
    np.testing.assert_allclose(total(tree), leaves.sum(), rtol=rtol)


# Sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*range(1, 18), 63, 64, 65, 512, 513, 600, 4096, 4097])
def test_levels_shrink_to_single_group_of_minimum_size(size):
    """Each level has the minimum number of groups for the level below."""
    widths = [level.size for level in sum_tree.init(size).levels]
    for below, width in zip([size, *(w // 8 for w in widths)], widths):
        assert width % 8 == 0 and 0 <= width - below < 8
    assert widths[-1] == 8 and 8 not in widths[:-1]


@given(seed=seeds, size=sizes)
def test_every_node_is_sum_of_its_children_after_updates(seed, size):
    """Apply three updates in sequence. An item may occur twice in an update, with the same value."""
    rng = np.random.default_rng(seed)
    leaves, tree = np.zeros(size), sum_tree.init(size)
    for _ in range(3):
        item = rng.integers(0, size, NUM_CHANGED)
        value_of_item = rng.integers(0, 1000, size)
        tree = update(tree, item, value_of_item[item] * 1.0)
        leaves[item] = value_of_item[item]
        assert_sums(tree, leaves)


@given(seed=seeds, size=sizes)
def test_sums_of_fractions_are_exact_up_to_rounding(seed, size):
    leaves = magnitudes(np.random.default_rng(seed), size)
    assert_sums(tree_of(leaves), leaves, rtol=1e-6)


@given(seed=seeds)
def test_update_with_repeated_item_stores_one_of_its_values_in_all_sums(seed):
    rng = np.random.default_rng(seed)
    item, priority = rng.integers(0, 20, NUM_CHANGED), rng.integers(0, 1000, NUM_CHANGED) * 1.0
    tree = update(sum_tree.init(65), item, priority)
    leaves = np.asarray(tree.levels[0])[:65]
    for i in range(65):
        assert leaves[i] in (priority[item == i] if i in item else [0])
    assert_sums(tree, leaves)


def test_update_ignores_items_beyond_tree():
    """All items of the update are beyond the tree."""
    before = tree_of(np.arange(65))
    after = update(before, np.full(NUM_CHANGED, 65 * 8), np.ones(NUM_CHANGED, np.float32))
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_rounding_errors_do_not_accumulate():
    """After 2000 updates of 40 items of very different magnitudes, the tree equals a new one bit for bit.

    The new tree is filled by the same program, since another program may add eight numbers in another order.
    """
    size, rng = 600, np.random.default_rng(0)
    item = rng.integers(0, size, (2000, NUM_CHANGED))
    priority = magnitudes(rng, item.size).reshape(item.shape)
    run = jax.jit(lambda tree, changes: jax.lax.scan(lambda t, c: (sum_tree.update(t, *c), None), tree, changes)[0])
    worn = run(tree_of(magnitudes(rng, size)), (item, priority))
    leaves = np.asarray(worn.levels[0])[:size]
    each = np.resize(np.arange(size), item.shape)
    fresh = run(sum_tree.init(size), (each, leaves[each]))
    jax.tree.map(np.testing.assert_array_equal, worn, fresh)
    assert total(worn) == total(fresh) > 0
    assert_sums(worn, leaves, rtol=1e-6)


# Finding ---------------------------------------------------------------------------------------


def test_find_returns_positive_priority_when_running_sums_are_unsorted(monkeypatch):
    """The running sums of an associative scan are not sorted, and the last one may be less than one before it."""
    monkeypatch.setattr(sum_tree.jnp, "cumsum", lambda x, axis: jax.lax.associative_scan(jnp.add, x, axis=axis))
    find = jax.jit(sum_tree.find)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tree = tree_of(magnitudes(rng, 600))
        most = total(tree)
        mass = jnp.append(jnp.float32(rng.uniform(0, most, NUM_MASSES)), most)
        item, priority = find(tree, mass)
        assert (item < 600).all() and (priority > 0).all()


@given(seed=seeds, size=sizes)
def test_find_equals_searchsorted_in_running_sums(seed, size):
    """Masses are 0, exact boundaries, the neighboring floats of these, values in between, and the total."""
    rng = np.random.default_rng(seed)
    priority = whole_numbers(rng, size)
    upto = np.cumsum(priority)
    boundary = rng.choice(upto, NUM_MASSES // 4)
    hair = np.nextafter(boundary, np.float32(np.inf)), np.nextafter(boundary, np.float32(0))
    mass = np.concatenate([boundary, *hair, rng.uniform(0, upto[-1], NUM_MASSES // 4)]).astype(np.float32)
    mass[:2] = 0, upto[-1]
    item, found = find(tree_of(priority), mass)
    assert item.dtype == jnp.int32
    last = np.flatnonzero(priority)[-1]  # gets the mass beyond all items
    np.testing.assert_array_equal(item, np.minimum(np.searchsorted(upto, mass, side="right"), last))
    np.testing.assert_array_equal(found, priority[item])


@given(seed=seeds, size=sizes)
def test_find_never_returns_item_of_priority_0(seed, size):
    """Priorities span 12 orders of magnitude. Masses are their rounded boundaries and the neighboring floats."""
    rng = np.random.default_rng(seed)
    priority = magnitudes(rng, size)
    tree = tree_of(priority)
    upto = np.cumsum(priority, dtype=np.float64)
    boundary = np.concatenate([rng.choice(upto, NUM_MASSES // 4), rng.choice(np.cumsum(priority), NUM_MASSES // 4)])
    mass = np.tile(boundary.astype(np.float32), 2)
    for _ in range(rng.integers(3)):
        mass = np.nextafter(mass, np.float32(rng.choice([0, np.inf])))
    mass[:3] = 0, total(tree), 2 * total(tree)
    item, found = find(tree, mass)
    assert (priority[item] > 0).all()
    np.testing.assert_array_equal(found, priority[item])
    off = 1e-6 * upto[-1]
    begin = upto[item] - priority[item].astype(np.float64)
    assert ((begin - off <= mass) & (np.minimum(mass, upto[-1]) <= upto[item] + off)).all()


# Drawing ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [9, 65])
def test_single_draws_are_proportional_to_priorities(size):
    """Chi-square test over 100,000 keys. For a correct draw, p is uniform and rarely below 1e-4."""
    priority = whole_numbers(np.random.default_rng(size), size)
    priority[::3] = 0
    tree = tree_of(priority)
    keys = jax.random.split(jax.random.key(3), 100_000)
    item = np.asarray(jax.jit(jax.vmap(lambda key: sum_tree.draw(tree, key, 1)[0][0]))(keys))
    counts = np.bincount(item, minlength=size)
    some = priority > 0
    assert not counts[~some].any()
    expected = priority[some].astype(np.float64) / priority.sum(dtype=np.float64) * len(keys)
    assert scipy.stats.chisquare(counts[some], expected).pvalue > 1e-4


@given(seed=seeds, size=sizes)
def test_draws_are_stratified(seed, size):
    """An item that covers L of the B strata contains at least floor(L) - 1 and overlaps at most ceil(L) + 1."""
    rng = np.random.default_rng(seed)
    priority = whole_numbers(rng, size)
    item, found = draw(tree_of(priority), jax.random.key(seed), 256)
    assert item.dtype == jnp.int32 and item.shape == found.shape == (256,)
    np.testing.assert_array_equal(found, priority[item])
    assert (np.diff(item) >= 0).all(), "one draw from each stratum, in order"
    counts = np.bincount(item, minlength=size)
    share = 256 * priority.astype(np.float64) / priority.sum(dtype=np.float64)
    assert (counts >= np.floor(share) - 1).all() and (counts <= np.ceil(share) + 1).all()
    assert not counts[priority == 0].any()


@pytest.mark.parametrize("size", SIZES)
def test_draw_returns_only_item_with_positive_priority(size):
    for only in {0, size // 2, size - 1}:
        item, found = draw(tree_of(np.arange(size) == only), jax.random.key(only), 256)
        assert (np.asarray(item) == only).all() and (np.asarray(found) == 1).all()


@pytest.mark.parametrize("size", SIZES)
def test_draw_returns_priority_0_when_all_priorities_are_0(size):
    """Check a new tree, and a tree whose priorities were set back to 0."""
    for tree in (sum_tree.init(size), update(tree_of(np.ones(size)), np.arange(size), np.zeros(size, np.float32))):
        item, found = draw(tree, jax.random.key(0), 256)
        assert not np.asarray(found).any()
        assert ((np.asarray(item) >= 0) & (np.asarray(item) < size)).all()


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=seeds)
def test_vmapped_draws_equal_single_draws(seed):
    """Draw from two trees under vmap, as with several seeds."""
    rng = np.random.default_rng(seed)
    trees = [tree_of(magnitudes(rng, 65)) for _ in range(2)]
    keys = jax.random.split(jax.random.key(seed), 2)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *trees)
    item, priority = jax.jit(jax.vmap(lambda tree, key: sum_tree.draw(tree, key, 256)))(stacked, keys)
    for i in range(2):
        alone = draw(trees[i], keys[i], 256)
        np.testing.assert_array_equal(item[i], alone[0])
        np.testing.assert_array_equal(priority[i], alone[1])
