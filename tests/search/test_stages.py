"""Check which trials continue and for how long, against slow loops and published tables."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_fast.options.search import PBT, Halving, Hyperband, WholeRuns
from jaxrl_fast.search import stages
from jaxrl_fast.search.spaces import Dimension

pytestmark = pytest.mark.unit

RATE = Dimension("learning_rate", "real", 1e-5, 1e-2, "log")
SCORES = st.integers(2, 9).flatmap(
    lambda n: st.integers(1, 4).flatmap(
        lambda k: st.lists(
            st.lists(st.sampled_from([0.0, 1.0, 2.5, -3.0, math.nan]), min_size=k, max_size=k), min_size=n, max_size=n
        )
    )
)


def test_halving_ends_are_powers_of_factor():
    assert stages.until(Halving(), 90_000, 0) == [10_000, 30_000, 90_000]
    assert stages.until(Halving(factor=2, rungs=4), 1_001, 3) == [126, 251, 501, 1_001]
    assert stages.until(WholeRuns(), 7, 5) == [7]


def test_hyperband_brackets_are_those_of_the_paper():
    """Li et al. 2018, table 1: R = 81 and eta = 3 begin 81, 34 (27 in the first print), 15 (9), 8 (6) and 5 trials."""
    hyperband = Hyperband(factor=3, rungs=5)
    sizes = [stages.size(hyperband, 81, round) for round in range(5)]
    exact = [5 / (s + 1) * 3**s for s in (4, 3, 2, 1, 0)]
    assert all(abs(size - wanted) <= 0.5 for size, wanted in zip(sizes, exact, strict=True))
    assert [stages.until(hyperband, 81, round)[0] for round in range(6)] == [1, 3, 9, 27, 81, 1]


@given(st.integers(1, 200), st.integers(2, 6))
def test_each_rung_keeps_one_trial_in_factor_and_at_least_one(count, factor):
    ranked = list(np.random.default_rng(count).permutation(count))
    kept = stages.kept(Halving(factor=factor), ranked)
    assert len(kept) == max(1, count // factor)
    assert kept == sorted(ranked[: len(kept)])


@given(SCORES)
def test_order_by_mean_puts_diverged_trials_last(scores):
    ranked = stages.order(np.array(scores), "mean")
    key = lambda i: -math.inf if any(map(math.isnan, scores[i])) else float(np.mean(np.array(scores[i])))
    assert ranked == sorted(range(len(scores)), key=lambda i: (-key(i), i))


@given(SCORES)
def test_order_by_probability_equals_loop_over_pairs(scores):
    def chance(i: int) -> float:
        if any(map(math.isnan, scores[i])):
            return -math.inf
        of_others = []
        for j in (j for j in range(len(scores)) if j != i):
            pairs = [(a, -math.inf if math.isnan(b) else b) for a, b in itertools.product(scores[i], scores[j])]
            of_others.append(sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs))
        return sum(of_others) / len(of_others)

    ranked = stages.order(np.array(scores), "probability")
    chances = [chance(i) for i in ranked]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(chances))


def population(count: int) -> list[dict]:
    return [{"learning_rate": 1e-4 * (i + 1)} for i in range(count)]


def test_plain_pbt_replaces_worst_quarter_by_changed_copies_of_best():
    scheduler, values = PBT(frequencies=(1,)), population(8)
    score = np.array([[float(x)] for x in (3, 7, 1, 5, 0, 6, 2, 4)])  # best: 1 and 5, worst: 4 and 2
    copies = stages.evolve(scheduler, [RATE], values, score, "mean", 0, [0])
    assert [c.state_of for c in copies] == [0, 1, 1, 3, 5, 5, 6, 7]
    for place, copy in enumerate(copies):
        if place in (2, 4):
            assert copy.values["learning_rate"] != values[copy.state_of]["learning_rate"]
            assert RATE.low <= copy.values["learning_rate"] <= RATE.high
        else:
            assert copy.values == values[place]


def test_copies_are_drawn_from_seed_and_stage_alone():
    scheduler, values = PBT(frequencies=(1,)), population(8)
    score = np.arange(8.0)[:, None]
    draw = lambda *args: stages.evolve(scheduler, [RATE], values, score, "mean", *args)
    assert draw(3, [5, 0]) == draw(3, [5, 0])
    assert draw(3, [5, 0]) != draw(4, [5, 0]) != draw(4, [6, 0])


def test_parts_with_other_frequencies_evolve_on_their_turn_and_exchange_states():
    scheduler, values = PBT(frequencies=(1, 2)), population(16)
    low, high = np.arange(8.0), 100 + np.arange(8.0)
    score = np.concatenate([low, high])[:, None]  # the second part is better throughout
    first = stages.evolve(scheduler, [RATE], values, score, "mean", 0, [0])
    assert [c.state_of for c in first[8:]] == [*range(8, 16)], "its turn is every second stage"
    # The third quarter of the first part, places 2 and 3, takes the best of the other, with its hyperparameters: the
    # other part is selected less often.
    assert {first[3].state_of, first[2].state_of} == {15, 14}
    assert first[3].values == values[15] and first[2].values == values[14]
    turned = np.concatenate([high, low])[:, None]
    second = stages.evolve(scheduler, [RATE], values, turned, "mean", 1, [0])
    # Now the steady part is worse. It takes states of the part that is selected more often, and keeps the
    # hyperparameters of the best trial of its part.
    assert {second[11].state_of, second[10].state_of} == {7, 6}
    assert second[11].values == second[10].values == values[15]
    assert [c.state_of for c in second[4:8]] == [4, 5, 6, 7] and second[3].state_of == 3


@given(st.integers(2, 24), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 9), st.data())
def test_evolution_keeps_best_and_leaves_no_unknown_parent(count, frequencies, stage, data):
    count = max(count, 2 * len(frequencies))
    score = np.array(data.draw(st.lists(st.floats(-5, 5), min_size=count, max_size=count)))[:, None]
    values = population(count)
    copies = stages.evolve(PBT(frequencies=tuple(frequencies)), [RATE], values, score, "mean", stage, [1])
    best = stages.order(score, "mean")[0]
    assert copies[best].state_of == best and copies[best].values == values[best]
    assert all(0 <= copy.state_of < count for copy in copies)
    if all((stage + 1) % frequency for frequency in frequencies):
        assert [copy.state_of for copy in copies] == [*range(count)]
