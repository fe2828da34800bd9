"""Test records, windows and statistics against hand calculations and scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxrl_fast.metrics import records, statistics, tracker
from jaxrl_fast.metrics.window import MAX_STEPS, EpisodeWindow

pytestmark = pytest.mark.unit


def rows(**named):
    """Return metrics of updates of one seed; unspecified ones do not matter."""
    number = len(next(iter(named.values())))
    empty = {"return_min": [np.inf] * number, "return_max": [-np.inf] * number}
    complete = {k: [0.0] * number for k in records.SCORES} | empty | named
    return {k: np.array([x], np.float32) for k, x in complete.items()}


def test_summarize_matches_hand_calculation():
    """Updates with 2, 0 and 1 episodes: returns 3 and 5, then 10. Mean 18 / 3 = 6, lengths 12 / 3 = 4."""
    given = rows(
        episodes=[2, 0, 1],
        return_sum=[8, 0, 10],
        return_min=[3, np.inf, 10],
        return_max=[5, -np.inf, 10],
        length_sum=[8, 0, 4],
        quarantined=[0, 5, 2],
        value_loss=[1, 2, 6],
    )
    (record,) = records.summarize(given)
    assert record == {
        "episodes": 3,
        "return_mean": 6.0,
        "return_min": 3.0,
        "return_max": 10.0,
        "episode_length_mean": 4.0,
        "quarantined": 7,
        "value_loss": 3.0,
    }


def test_summarize_unknown_values_are_none():
    (record,) = records.summarize(rows(episodes=[0, 0], value_loss=[np.nan, 1]))
    assert record["episodes"] == 0
    for name in ("return_mean", "return_min", "return_max", "episode_length_mean", "value_loss"):
        assert record[name] is None


def test_summarize_adds_in_float64():
    """Add 2^24 + 1 ones, more than float32 can count, in updates of 2^20 and a last one."""
    (record,) = records.summarize(rows(episodes=[2**20] * 16 + [1], return_sum=[2**20] * 16 + [1]))
    assert record["episodes"] == 2**24 + 1
    assert record["return_mean"] == 1.0


@pytest.mark.parametrize("chunks", [[7], [1] * 7, [3, 4], [2, 2, 3]])
def test_record_buffer_is_independent_of_chunks(chunks):
    ledger, taken, start = records.RecordBuffer(3), [], 0
    for length in chunks:
        ledger.add({"x": np.arange(start, start + length)[None]})
        taken += [r["x"][0].tolist() for r in ledger.take()]
        start += length
    taken += [r["x"][0].tolist() for r in ledger.take(everything=True)]
    assert taken == [[0, 1, 2], [3, 4, 5], [6]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 40))
def test_record_buffer_drops_old_chunks(chunks, most):
    ledger, seen = records.RecordBuffer(10**9, most), []
    for length in chunks:
        ledger.add({"x": np.arange(len(seen), len(seen) + length)[None]})
        seen += range(len(seen), len(seen) + length)
        held = sum(c["x"].shape[1] for c in ledger.chunks)
        assert min(most, len(seen)) <= held < most + 9
    (taken,) = ledger.take(everything=True)
    assert taken["x"][0].tolist() == seen[-held:]
    assert not list(ledger.take(everything=True))


history = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=60)


@given(history, st.integers(1, 40), st.integers(0, 60))
def test_episode_window_is_minimal(updates, num_steps, restored_at):
    window, before = EpisodeWindow(), []
    for i, (ended, longest) in enumerate(updates):
        if i == restored_at:
            window, old = EpisodeWindow(), window
            window.restore([*old.records, old.waiting])
        window.add(ended, 10.0 * ended, num_steps, longest)
        before.append((ended, longest))
        last = max((j + 1 for j, (ended, _) in enumerate(before) if ended), default=0)
        span = window.num_steps // num_steps
        inside = before[last - span : last]
        assert (window.episodes, window.longest) == (sum(n for n, _ in inside), max((n for _, n in inside), default=0))
        assert window.full == (window.episodes >= 100 and window.num_steps >= 2 * window.longest)
        assert not window.episodes or window.mean == pytest.approx(10)
        if span < last:  # records were dropped, and the remaining ones are sufficient
            assert window.full or window.episodes >= 100
        if window.records:
            shorter = window.num_steps - window.records[0].num_steps, window.episodes - window.records[0].ended
            assert shorter[0] < 2 * window.longest or shorter[1] < 100


def test_episode_window_caps_episode_length():
    """One environment never ends its episode; the episodes of the others have 10 steps."""
    window, most = EpisodeWindow(), MAX_STEPS
    for t in range(1, 3 * most // 100):
        window.add(40, 40.0 * t, 100, 100 * t)
    assert window.full and window.num_steps == 2 * most
    assert len(window.records) == 2 * most // 100


def test_episode_window_is_unbiased_for_short_episodes():
    """Of 512 episodes half reach the goal in 50 steps (return 1), half are truncated after 500 (return 0)."""
    rng = np.random.default_rng(0)
    left, good = np.zeros(512, int), np.zeros(512, bool)
    window, first_full = EpisodeWindow(), None
    for t in range(3000):
        begins = left == 0
        good = np.where(begins, rng.random(512) < 0.5, good)
        left = np.where(begins, np.where(good, 50, 500), left)
        left -= 1
        over = left == 0
        longest = np.where(good, 50, 500) - left
        window.add(int(over.sum()), float((over & good).sum()), 1, int(longest.max()))
        if t == 60:
            assert window.mean == 1.0 and not window.full
        if window.full:
            first_full = first_full or t
            assert 0.35 < window.mean < 0.75, t
    assert first_full is not None and first_full < 1100


@pytest.mark.parametrize("record_length", [1, 2, 4])
def test_final_returns_are_independent_of_record_length(record_length):
    """60 episodes in each of four updates, with returns 1 to 4: the last two updates hold a hundred."""
    made = tracker.MetricsTracker([{"seed": 0}], record_length, 8, 8, None)
    given = rows(episodes=[60] * 4, return_sum=[60, 120, 180, 240], train_time_s=[1, 2, 3, 4], wall_time_s=[1, 2, 3, 4])
    made.add(given)
    assert len(list(made.records())) == 4 // record_length
    assert made.final_returns() == [3.5]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 11])
def test_iqm_matches_scipy(number):
    scores = np.random.default_rng(0).normal(size=(number, 3))
    np.testing.assert_allclose(statistics.iqm(scores), stats.trim_mean(scores, 0.25, axis=0))
    np.testing.assert_allclose(statistics.iqm(scores, (0, 1)), stats.trim_mean(scores.ravel(), 0.25))


def test_bootstrap_is_stratified():
    """All seeds of a task agree, so the interval has no width although the tasks differ."""
    scores = np.repeat([[0.0, 5.0, 100.0, 1000.0]], 6, axis=0)
    low, high = statistics.bootstrap(scores, 200)
    assert low == high == statistics.iqm(scores, (0, 1))


def test_bootstrap_matches_scipy():
    scores = np.random.default_rng(1).normal(size=(12, 1))
    low, high = statistics.bootstrap(scores, 4000)
    theirs = stats.bootstrap(
        (scores[:, 0],), lambda x, axis: stats.trim_mean(x, 0.25, axis=axis), n_resamples=4000, method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    np.testing.assert_allclose([low, high], theirs, atol=0.06)


def test_bootstrap_keeps_trailing_axes():
    """Resample all columns of [S, M, ...] alike: each has the interval of its own scores [S, M]."""
    scores = np.random.default_rng(2).normal(size=(5, 2, 3))
    low, high = statistics.bootstrap(scores, 50)
    for i in range(3):
        assert (low[i], high[i]) == statistics.bootstrap(scores[..., i], 50)


def test_best_evaluation_has_highest_known_mean():
    made = tracker.MetricsTracker([{"seed": 0}], 1, 8, 8, None)
    assert made.best() == {} and made.evaluated_at is None
    made.evaluations = [{"eval_return_mean": mean, "env_steps": 8 * i} for i, mean in enumerate([None, 2, 5, None, 3])]
    assert made.best() == {"eval_return_mean": 5, "env_steps": 16} and made.evaluated_at == 32


def test_run_is_settled_when_last_member_is_solved_or_diverged():
    made = tracker.MetricsTracker([{"seed": i} for i in range(3)], 1, 8, 8, 1.0)
    made.solved, made.diverged = [(16, 0.1), None, None], [None, 40, None]
    assert made.settled_at() is None and made.diverged_members == [1]
    made.solved[2] = (24, 0.2)
    assert made.settled_at() == 40


@pytest.mark.parametrize("wrong_update, solved_at", [(1, None), (2, None), (3, 16), (None, 16)])
def test_member_is_solved_only_before_it_diverges(wrong_update, solved_at):
    """Of 60 episodes in each update, a hundred with the threshold's return have ended after update 2, of 8 steps."""
    made = tracker.MetricsTracker([{"seed": 0}], 1, 8, 8, 1.0)
    clock, loss = [1, 2, 3, 4], [np.nan if i == wrong_update else 0.0 for i in range(1, 5)]
    made.add(rows(episodes=[60] * 4, return_sum=[60] * 4, value_loss=loss, train_time_s=clock, wall_time_s=clock))
    assert len(list(made.records())) == 4
    assert (made.solved[0] and made.solved[0][0]) == solved_at


def test_nonfinite_loss_is_reported_once_with_its_first_update():
    """Of two losses, the first to fail is reported. Other metrics may be NaN. A diverged seed is reported once."""
    made = tracker.MetricsTracker([{"seed": 0}, {"seed": 1}], 10, 8, 8, None)
    fine, clock = np.ones((2, 4)), np.ones((2, 4))
    late, early = fine.copy(), fine.copy()
    late[1, 3], early[1, 2] = np.nan, np.inf
    given = {"a_loss": late, "td_loss_sum": early, "kl": fine * np.nan, "train_time_s": clock, "wall_time_s": clock}
    made.updates = 5
    assert made.add(given) == [tracker.NotFinite(1, "td_loss", 5 + 3)]
    assert made.diverged == [None, 64] and made.updates == 9
    assert made.add(given) == []


def test_members_diverging_in_one_chunk_are_reported_in_update_order():
    made = tracker.MetricsTracker([{"seed": 0}, {"seed": 1}], 10, 8, 8, None)
    loss, clock = np.ones((2, 4)), np.ones((2, 4))
    loss[0, 2] = loss[1, 1] = np.nan
    found = made.add({"loss": loss, "train_time_s": clock, "wall_time_s": clock})
    assert [(wrong.member, wrong.update) for wrong in found] == [(1, 2), (0, 3)]


def test_records_have_env_steps_and_steps_per_second():
    """Records of 2 members have 2 updates of 8 steps: 2 * 8 * 2 steps take 4 s in the first and 2 s in the second."""
    made = tracker.MetricsTracker([{"seed": 0}, {"seed": 1}], 2, 8, 8, None)
    given = rows(
        episodes=[1] * 4, return_sum=[1, 2, 3, 4], valid_steps=[8, 7, 6, 5], train_time_s=[1, 4, 5, 6],
        wall_time_s=[2, 8, 10, 12],
    )  # fmt: skip
    made.add({name: np.repeat(x, 2, axis=0) for name, x in given.items()})
    first, second = made.records(evaluation=[{"eval_return_mean": 1.0}, {"eval_return_mean": 2.0}])
    assert [r["env_steps_per_s"] for r in (*first, *second)] == [8.0, 8.0, 16.0, 16.0]
    assert [(r["env_steps"], r["num_updates"], r["train_time_s"], r["wall_time_s"]) for r in (first[1], second[0])] == [
        (16, 2, 4.0, 8.0),
        (32, 4, 6.0, 12.0),
    ]
    assert [r["valid_steps"] for r in (first[0], second[0])] == [15, 26]
    assert "eval_return_mean" not in first[0] and [r["eval_return_mean"] for r in second] == [1.0, 2.0]


def test_member_with_too_many_failed_steps_is_reported_at_first_such_update():
    """Updates have 1,000 steps, and 100 failed steps or 1% are allowed. The second member has 90, 110 and 110."""
    made = tracker.MetricsTracker([{"seed": 0}, {"seed": 1}], 1, 1000, 10, None)
    assert made.add_quarantined({"quarantined": np.array([[50, 50, 0], [90, 20, 0]])}) == [(1, 2)]
    assert made.quarantined == [100, 110]
    made.diverged[1] = 2000
    made.updates = 20
    assert made.add_quarantined({"quarantined": np.array([[100, 11, 0], [500, 500, 500]])}) == []
    made.updates = 10
    assert made.add_quarantined({"quarantined": np.array([[0, 0, 1], [0, 0, 0]])}) == [(0, 11)]


def test_mean_return_of_player_is_over_its_own_episodes():
    """Left has 2 episodes with a sum of 6, right 1 with 5, and neither one more game with 4 for left alone."""
    given = rows(episodes=[2, 0, 2], return_sum=[5, 0, 6])
    of_players = {"return_sum/left": [6, 0, 4], "episodes/left": [2, 0, 1], "return_sum/right": [5, 0, 0]}
    of_players |= {"episodes/right": [1, 0, 0], "return_sum/third": [0, 0, 0], "episodes/third": [0, 0, 0]}
    (record,) = records.summarize(given | {name: np.array([x]) for name, x in of_players.items()})
    assert record["return_mean/left"] == pytest.approx(10 / 3) and record["return_mean/right"] == 5
    assert record["return_mean/third"] is None and record["return_mean"] == 2.75
    assert not any("/" in name and name.startswith(("return_sum", "episodes")) for name in record)


@pytest.mark.parametrize(("steps", "expected"), [([1, 0], 6.0), ([0, 0], None), ([2, 4], 1.0)])
def test_sums_over_gradient_steps_are_divided_by_their_number(steps, expected):
    """Sums of 6 and 0 over one step, over none, and over six steps."""
    (record,) = records.summarize(rows(episodes=[0, 0], td_loss_sum=[6, 0], gradient_steps=steps))
    assert (record["td_loss"], record["gradient_steps"]) == (expected, sum(steps))
    assert "td_loss_sum" not in record
