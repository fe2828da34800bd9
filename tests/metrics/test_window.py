"""The window of the last episodes, at the edges of what it needs."""

import pytest

from jaxrl_fast.metrics.window import WINDOW, EpisodeWindow

pytestmark = pytest.mark.unit


def test_a_hundred_episodes_are_sufficient_and_99_are_not():
    """Each record has steps enough; the first record goes as soon as the second one is sufficient by itself."""
    window = EpisodeWindow()
    window.add(WINDOW - 1, 1.0 * (WINDOW - 1), 10, 5)
    assert not window.full
    window.add(1, 1.0, 10, 5)
    assert window.full and window.episodes == WINDOW
    window.add(WINDOW, 3.0 * WINDOW, 10, 5)
    assert window.full and window.episodes == WINDOW and window.mean == 3.0


def test_twice_the_longest_episode_is_sufficient_and_a_step_less_is_not():
    for num_steps, is_full in ((9, False), (10, True)):
        window = EpisodeWindow()
        window.add(WINDOW, 1.0 * WINDOW, num_steps, 5)
        assert window.full == is_full
