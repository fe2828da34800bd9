"""Test the curve of a run: downsampling keeps its mean, and the figure has labels and units."""

import numpy as np
import pytest

from jaxrl_fast.plotting import curves

pytestmark = pytest.mark.unit


def test_downsample_keeps_mean_of_episodes():
    """300 records become 150: returns 1 and 4 with 3 and 1 episodes have mean 7 / 4. A pair without episodes is NaN."""
    steps = np.arange(1, 301)
    returns, episodes = np.tile([1.0, 4.0], (2, 150)), np.tile([3, 1], (2, 150))
    episodes[:, :2] = 0
    at, means, counts = curves.downsample(steps, returns, episodes)
    assert at[0] == 2 and at[-1] == 300 and at.size == 150
    assert np.isnan(means[:, 0]).all() and (means[:, 1:] == 7 / 4).all()
    assert (counts[:, 1:] == 4).all()


@pytest.mark.parametrize("num_seeds", [1, 5])
def test_draw_run_has_labels_and_units(num_seeds):
    steps = np.arange(10) * 1000
    returns = np.random.default_rng(0).normal(size=(num_seeds, 10))
    band = (returns.min(0), returns.max(0)) if num_seeds > 1 else None
    curve = curves.Curve("", steps, returns, returns.mean(0), band)
    evals = [{"env_steps": 5000, "eval_return_mean": 1.0, "eval_return_std": 0.5}]
    (axes,) = curves.draw_run("PPO on CartPole", curve, evals, 475.0).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert axes.get_xlabel() == "environment steps" and axes.get_ylabel() == "return of an episode"
    assert axes.get_title(loc="left") == "PPO on CartPole"
    assert any("solved at 475" in label for label in labels) and any("evaluation" in label for label in labels)
    assert any("95% interval" in label for label in labels) == (num_seeds > 1)
    center = max(axes.get_lines(), key=lambda line: line.get_linewidth())
    np.testing.assert_array_equal(center.get_ydata(), returns.mean(0))


def test_draw_run_omits_unknown_values():
    """An evaluation without a finished episode has no return, and the return of a record may be NaN."""
    flat = np.zeros((1, 2))
    curve = curves.Curve("", np.array([1000, 2000]), flat, flat[0], None)
    unknown = {"env_steps": 1000, "eval_return_mean": None, "eval_return_std": None}
    known = {"env_steps": 2000, "eval_return_mean": 3.0, "eval_return_std": 0.5}
    (axes,) = curves.draw_run("", curve, [unknown, known], None).axes
    (bars,) = axes.containers
    assert bars.lines[0].get_xydata().tolist() == [[2000, 3]]
    (axes,) = curves.draw_run("", curve, [unknown], None).axes
    assert not axes.containers
    _, means, counts = curves.downsample(np.arange(2), np.array([[np.nan, 6.0]]), np.array([[5, 1]]), max_points=1)
    assert means.item() == 6 and counts.item() == 1
