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


def test_find_matches_hand_computation():
    """Running sums are 2 2 5 5 6: item 0 covers [0, 2), item 2 covers [2, 5), item 4 covers [5, 6)."""
    item, priority = sum_tree.find(tree_of([2, 0, 3, 0, 1]), jnp.array([0, 1.9, 2, 4.9, 5, 5.9, 6, 7]))
    np.testing.assert_array_equal(item, [0, 0, 2, 2, 4, 4, 4, 4])
    np.testing.assert_array_equal(priority, [2, 2, 3, 3, 1, 1, 1, 1])


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


@given(seed=seeds, size=sizes)
def test_draws_over_orders_of_magnitude_have_positive_priority(seed, size):
    priority = magnitudes(np.random.default_rng(seed), size)
    item, found = draw(tree_of(priority), jax.random.key(seed), 256)
    assert (np.asarray(item) < size).all() and (priority[item] > 0).all()
    np.testing.assert_array_equal(found, priority[item])


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


# Large trees -----------------------------------------------------------------------------------


@pytest.fixture
def as_large(monkeypatch):
    """Search small trees with the method of large ones: pairs of float32 at all levels but the lowest."""
    monkeypatch.setattr(sum_tree, "MAX_SINGLE", 0)
    monkeypatch.setattr(sum_tree, "MAX_LEAVES", 1)


def exact_items(priority, mass):
    """Return the items at these masses, computed in float64."""
    return np.minimum(np.searchsorted(np.cumsum(priority, dtype=np.float64), mass, side="right"), len(priority) - 1)


def pair(place):
    """Return a float64 as a pair of float32."""
    high = np.asarray(place, np.float32)
    return jnp.asarray(high), jnp.asarray(place - high, jnp.float32)


def large_then_small(size):
    """Return a group of large priorities, then groups of priority 1, which are lost in a float32 running sum."""
    priority = np.ones(size, np.float32)
    priority[:8] = 2.0**22  # all sums are exact: multiples of 4 below 2^26
    return priority


@pytest.mark.parametrize("size", [64, 600])
def test_find_in_large_returns_small_items_after_large_ones(as_large, size):
    priority = large_then_small(size)
    place = np.cumsum(priority, dtype=np.float64) - np.where(priority > 1, priority / 2, 0.25)
    tree = tree_of(priority)
    item, found = jax.jit(sum_tree.find_in_large)(tree, *pair(place))
    np.testing.assert_array_equal(item, exact_items(priority, place))
    np.testing.assert_array_equal(found, priority)
    alone = np.asarray(find(tree, jnp.asarray(place, jnp.float32))[0])
    assert (alone != np.arange(size)).any(), "float32 alone does not find them"


@pytest.mark.parametrize("num_draws", [1, 3, 32, 256, 5000])
def test_masses_of_strata_are_exact_to_2_to_minus_40(num_draws):
    """Each mass lies in its stratum and equals that of float64 up to 2^-40 of the total."""
    tree = tree_of(large_then_small(600))
    total = np.asarray(tree.levels[-1], np.float64).sum()
    high, low = jax.jit(sum_tree._strata_in_pairs, static_argnums=2)(tree, jax.random.key(0), num_draws)
    place = (np.asarray(high, np.float64) + np.asarray(low, np.float64)) / total * num_draws
    offset = place - np.arange(num_draws)
    assert (offset > -num_draws * 2.0**-40).all() and (offset < 1 + num_draws * 2.0**-40).all()
    key_part, key_rest = jax.random.split(jax.random.key(0))
    part = np.asarray(jax.random.randint(key_part, (num_draws,), 0, 4096), np.float64)
    expected = (part + np.asarray(jax.random.uniform(key_rest, (num_draws,)), np.float64)) / 4096
    np.testing.assert_allclose(offset, expected, atol=num_draws * 2.0**-40)


@given(seed=seeds, size=sizes)
def test_find_in_large_equals_find(seed, size):
    """Masses are whole numbers, exact in float32. Over orders of magnitude, found items have positive priorities."""
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_tree, "MAX_LEAVES", 1)
        priority = whole_numbers(rng, size)
        mass = jnp.float32(rng.uniform(0, priority.sum(), 64))
        large = sum_tree.find_in_large(tree_of(priority), mass, jnp.zeros(64))
        for found, expected in zip(large, find(tree_of(priority), mass), strict=True):
            np.testing.assert_array_equal(found, expected)
        wide = magnitudes(rng, size)
        upto = np.cumsum(wide, dtype=np.float64)
        item, found = sum_tree.find_in_large(tree_of(wide), *pair(rng.choice([*upto, 0.0, 2 * upto[-1]], 64)))
        assert (wide[item] > 0).all()
        np.testing.assert_array_equal(found, wide[item])


def test_draws_of_large_trees_are_stratified(as_large):
    """As in `test_draws_are_stratified`."""
    priority = whole_numbers(np.random.default_rng(1), 600)
    item, found = sum_tree.draw(tree_of(priority), jax.random.key(0), 256)
    np.testing.assert_array_equal(found, priority[item])
    counts = np.bincount(item, minlength=600)
    share = 256 * priority.astype(np.float64) / priority.sum(dtype=np.float64)
    assert (np.diff(item) >= 0).all()
    assert (counts >= np.floor(share) - 1).all() and (counts <= np.ceil(share) + 1).all()


def test_draw_from_empty_large_tree_returns_item_0_with_priority_0(as_large):
    item, found = sum_tree.draw(sum_tree.init(600), jax.random.key(0), 4)
    assert not np.asarray(item).any() and not np.asarray(found).any()


@pytest.mark.slow
def test_draw_can_return_each_of_2_to_the_25_items():
    """With equal priorities, the last bits of items are uniform. In float32, every second item is never drawn."""
    size, num_draws = 2**25, 2**16
    levels = [jnp.ones(size)]
    while levels[-1].size > 8:
        sums = levels[-1].reshape(-1, 8).sum(-1)
        levels.append(jnp.pad(sums, (0, -sums.size % 8)))
    tree = sum_tree.Tree(tuple(levels))
    item = np.asarray(jax.jit(sum_tree.draw, static_argnums=2)(tree, jax.random.key(0), num_draws)[0])
    begin = np.arange(num_draws) * (size // num_draws)
    assert (item >= begin).all() and (item <= begin + size // num_draws).all(), "one of each stratum, up to rounding"
    for half in (item[: num_draws // 2], item[num_draws // 2 :]):
        counts = np.bincount(half % 8, minlength=8)
        assert scipy.stats.chisquare(counts).pvalue > 1e-4
    assert np.isin([0, size - 1], sum_tree.find_in_large(tree, *pair(np.array([0.0, size - 0.5])))[0]).all()
