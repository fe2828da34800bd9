"""Test the window of the last episodes at the boundaries of its requirements."""

import pytest

from jaxrl_fast.metrics.window import WINDOW, EpisodeWindow

pytestmark = pytest.mark.unit


def test_window_is_full_with_100_episodes_and_not_with_99():
    """Each record has enough steps. Older records are dropped once the newest one is sufficient by itself."""
    window = EpisodeWindow()
    window.add(WINDOW - 1, 1.0 * (WINDOW - 1), 10, 5)
    assert not window.full
    window.add(1, 1.0, 10, 5)
    assert window.full and window.episodes == WINDOW
    window.add(WINDOW, 3.0 * WINDOW, 10, 5)
    assert window.full and window.episodes == WINDOW and window.mean == 3.0


def test_window_is_full_at_twice_longest_episode_and_not_one_step_less():
    for num_steps, is_full in ((9, False), (10, True)):
        window = EpisodeWindow()
        window.add(WINDOW, 1.0 * WINDOW, num_steps, 5)
        assert window.full == is_full


def test_longest_is_of_records_in_window():
    """Add records of 100 episodes in 20 steps, of lengths 10, 3, 5 and 4: each suffices, so one is kept."""
    window = EpisodeWindow()
    for longest in (10, 3, 5, 4):
        window.add(WINDOW, 1.0, 20, longest)
        assert (window.longest, len(window.records)) == (longest, 1)
    window.add(WINDOW, 1.0, 7, 2)  # 7 steps alone do not suffice while the longest has 4
    assert (window.longest, len(window.records)) == (4, 2)
    window.add(WINDOW, 1.0, 1, 1)  # 7 + 1 do; then 1 does not while the longest has 2
    assert (window.longest, len(window.records)) == (2, 2)
