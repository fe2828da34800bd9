"""Test statistics against an enumeration of all resamples, and with batches of any size."""

import itertools

import numpy as np
import pytest

from jaxrl_fast.metrics import statistics

pytestmark = pytest.mark.unit


def test_mean_interval_resamples_trainings_and_their_scores():
    """Compare with all draws of two trainings, which have two scores and one, and with direct resampling of four.

    In the first case, the mean 0 has probability 1 / 64, and the next one, 6 / 4, has 4 / 64.
    """
    groups = [np.array([0.0, 6.0]), np.array([30.0])]
    means = []  # each draw of two trainings has the same weight, whatever its number of draws of scores
    for one, two in itertools.product(groups, repeat=2):
        draws = [itertools.product(group, repeat=group.size) for group in (one, two)]
        all_of = [np.mean(a + b) for a, b in itertools.product(*draws)]
        means += all_of * (16 // len(all_of))
    low, high = statistics.mean_interval(groups, 20_000)
    assert (low, high) == tuple(np.quantile(means, (0.025, 0.975))) == (1.5, 30.0)
    rng = np.random.default_rng(0)
    many = [rng.normal(size=25) + effect for effect in (-1.0, 0.0, 1.0, 2.0)]
    drawn = [np.mean([np.mean(rng.choice(many[g], 25)) for g in rng.integers(4, size=4)]) for _ in range(4000)]
    np.testing.assert_allclose(statistics.mean_interval(many, 4000), np.quantile(drawn, (0.025, 0.975)), atol=0.1)


@pytest.mark.parametrize("limit", [1, 60, 100])
def test_mean_interval_does_not_depend_on_batch_size(limit, monkeypatch):
    groups = [np.arange(20.0), np.arange(30.0) ** 2]
    whole = statistics.mean_interval(groups, 50)
    monkeypatch.setattr(statistics, "MAX_DRAWN", limit)
    assert statistics.mean_interval(groups, 50) == whole
