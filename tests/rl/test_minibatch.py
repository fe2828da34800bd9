"""minibatch: shuffles are permutations, differ between keys and are uniform; rows are split and summed correctly."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings

from jaxrl_fast.rl import minibatch

shuffle = jax.jit(minibatch.shuffle, static_argnums=1)
deal = jax.jit(minibatch.assign, static_argnums=(1, 2))


@settings(max_examples=10)  # each size is compiled separately
@given(num_rows=st.integers(1, 3000), seed=st.integers(0, 2**31 - 1))
def test_shuffle_is_permutation(num_rows, seed):
    order = shuffle(jax.random.key(seed), num_rows)
    assert order.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(num_rows))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 4096, 4097, 100_000])
def test_shuffle_is_permutation_at_common_sizes(num_rows):
    np.testing.assert_array_equal(np.sort(shuffle(jax.random.key(0), num_rows)), np.arange(num_rows))


def test_shuffle_differs_between_keys():
    orders = np.asarray(jax.vmap(lambda key: minibatch.shuffle(key, 512))(jax.random.split(jax.random.key(0), 64)))
    assert len(np.unique(orders, axis=0)) == 64


@pytest.mark.parametrize("num_rows", [2, 3, 4, 5])
def test_shuffle_reaches_every_order_of_few_rows(num_rows):
    """Find all n! orders. Without an xorshift, 4 rows would have 8 of 24, and rows 0 and 2 never share a minibatch."""
    keys = jax.random.split(jax.random.key(3), 2000)
    orders = np.asarray(jax.jit(jax.vmap(lambda key: minibatch.shuffle(key, num_rows)))(keys))
    assert len(np.unique(orders, axis=0)) == math.factorial(num_rows)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [256, 320])
def test_shuffle_assigns_rows_to_minibatches_uniformly(num_rows):
    """Chi-square test over rows and minibatches with 4000 keys. For a fair shuffle, p is rarely below 1e-4."""
    keys = jax.random.split(jax.random.key(1), 4000)
    place = np.asarray(jax.jit(jax.vmap(lambda key: jnp.argsort(minibatch.shuffle(key, num_rows))))(keys))
    part = place // (num_rows // 4)
    counts = np.stack([(part == m).sum(0) for m in range(4)])
    statistic = ((counts - 1000.0) ** 2 / 1000).sum() * 3 / 4 / (1 - 0.25)  # multinomial per row: 3 degrees each
    assert scipy.stats.chi2.sf(statistic, 3 * num_rows) > 1e-4


def test_shuffle_puts_pairs_in_same_minibatch_with_uniform_probability():
    """Each pair of the first 64 of 256 rows shares one of 4 minibatches with p = 63 / 255, over 4000 keys."""
    keys = jax.random.split(jax.random.key(2), 4000)
    place = np.asarray(jax.jit(jax.vmap(lambda key: jnp.argsort(minibatch.shuffle(key, 256))))(keys))
    part = place[:, :64] // 64
    together = (part[:, :, None] == part[:, None, :]).mean(0)[np.triu_indices(64, 1)]
    p = 63 / 255
    error = (together - p) / np.sqrt(p * (1 - p) / 4000)
    assert abs(error.mean()) < 0.5
    assert error.std() < 1.25, "some pairs share a minibatch far more often than others"
    assert np.abs(error).max() < 5.5


@pytest.mark.slow
@given(shape=st.sampled_from([(1, 1), (1, 37), (8, 40), (7, 3), (5, 1), (4, 32)]), seed=st.integers(0, 1000))
def test_assign_uses_each_row_once_and_gather_rows_keeps_rows_intact(shape, seed):
    parts, size = shape
    rows = {"a": jnp.arange(parts * size), "b": jnp.tile(jnp.arange(parts * size)[:, None], 3)}
    order = deal(jax.random.key(seed), parts * size, parts)
    assert order.shape == (parts, size)
    np.testing.assert_array_equal(np.sort(order.ravel()), np.arange(parts * size))
    batches = minibatch.gather_rows(rows, order)
    np.testing.assert_array_equal(batches["a"], order)
    np.testing.assert_array_equal(batches["b"], np.tile(order[..., None], 3))


@pytest.mark.parametrize("num_rows", [1, 1024, 4096, 5003])
def test_accumulate_grads_sums_over_all_rows(num_rows):
    """5003 is prime: its only equal parts are single rows, so it is not split."""
    rows = jax.random.normal(jax.random.key(0), (num_rows, 3))
    summed = minibatch.accumulate_grads(lambda scale, rows: {"s": (scale * rows).sum(0)}, jnp.float32(2), rows)
    np.testing.assert_allclose(summed["s"], 2 * np.asarray(rows, np.float64).sum(0), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("num_rows", "num_calls"), [(1024, 1), (2048, 2), (2062, 1), (4096, 4), (5003, 1), (1300, 2)])
def test_accumulate_grads_splits_rows_into_equal_parts_of_suitable_size(num_rows, num_calls):
    """2062 is 2 times a prime: its parts would be of 2 or of 1031 rows, so it stays whole."""
    sizes = []
    minibatch.accumulate_grads(lambda _, rows: sizes.append(len(rows)) or rows.sum(), None, jnp.ones(num_rows))
    assert set(sizes) == {num_rows // num_calls}


def test_flatten_is_time_major():
    steps = jnp.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(minibatch.flatten(steps), np.arange(6))


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 2048, 3000, 2 * 1021])
def test_map_chunks_equals_function_of_all_rows(num_rows):
    """Row order and pytrees are kept, also for numbers of rows without a suitable divisor."""
    rows = {"x": jnp.arange(num_rows * 2.0).reshape(num_rows, 2), "y": jnp.arange(num_rows)}
    function = lambda rows: (rows["x"].sum(-1), {"y": 3 * rows["y"]})
    jax.tree.map(np.testing.assert_array_equal, minibatch.map_chunks(function, rows), function(rows))


@pytest.mark.parametrize(("num_rows", "wanted"), [(12, 5), (12, 7), (12, 24), (7, 2), (2048, 3), (100, 33), (1, 3)])
def test_validate_suggests_nearest_divisors(num_rows, wanted):
    """The next divisors below and above, the latter up to twice the given number."""
    divisors = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
    below = [n for n in divisors if n < wanted][-1:]
    above = [n for n in divisors if wanted < n <= 2 * wanted][:1]
    with pytest.raises(ValueError) as refusal:
        minibatch.validate(num_rows, wanted)
    assert str(refusal.value) == (
        f"num_minibatches: must divide the {num_rows} steps per update, got {wanted}; "
        f"use {' or '.join(map(str, below + above))}"
    )


def test_validate_names_number_of_devices_if_several():
    with pytest.raises(ValueError, match="the 6 steps per update on each of 2 devices, got 4; use 3 or 6"):
        minibatch.validate(6, 4, 2)
    minibatch.validate(6, 3, 2)


@pytest.mark.parametrize("num_rows", [2, 3, 4, 255, 256, 257])
def test_shuffle_has_no_loop_for_powers_of_two(num_rows):
    """The rounds permute the integers below the next power of two. Only other sizes need a loop."""
    is_power = num_rows & (num_rows - 1) == 0
    program = str(jax.make_jaxpr(lambda key: minibatch.shuffle(key, num_rows))(jax.random.key(0)))
    assert ("while" in program) == (not is_power)
