"""The numbers of summary.json over several members, worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_fast.metrics.tracker import MetricsTracker
from jaxrl_fast.rl import normalize
from jaxrl_fast.training import evaluator
from jaxrl_fast.training.summary import RunResult, of_replay, summarize

pytestmark = pytest.mark.unit

TIMES = dict(train=8.0, compile=2.0, eval=1.0, idle=2.0, save=0.5, wall=12.0)


def summary(folder, returns, solved=(), threshold=None, evaluations=()):
    """Return the summary of a run of 5 updates of 40 steps, whose members' last episodes have these returns."""
    tracker = MetricsTracker([{"seed": i} for i in range(len(returns))], 1, 40, 10, threshold)
    for window, score in zip(tracker.windows, returns, strict=True):
        if score is not None:
            window.add(2, 2 * score, 10, 5)
    tracker.solved, tracker.evaluations = [*solved] or [None] * len(returns), [*evaluations]
    options = SimpleNamespace(num_envs=4, seed=0, num_seeds=len(returns), solved_threshold=threshold, init_from="")
    plan = SimpleNamespace(
        settings=SimpleNamespace(options=options, algo="ppo"),
        env=SimpleNamespace(spec=SimpleNamespace(id="test"), protocol=""),
        steps_per_update=40, folder=folder, placement=SimpleNamespace(num_shards=1, num_grad_workers=1),
    )  # fmt: skip
    return summarize(plan, tracker, RunResult("done", "", 5, TIMES, 3 * 2**20, 1, "last"))


def test_final_returns_have_mean_and_sample_deviation_of_members(tmp_path):
    """1, 2 and 6: the mean is 3, and the squared distances 4 + 1 + 9 over two give 7."""
    found = summary(tmp_path, [1.0, 2.0, 6.0])
    assert (found["final_return_mean"], found["final_return_per_seed"]) == (3.0, [1.0, 2.0, 6.0])
    assert found["final_return_std"] == pytest.approx(7**0.5)


def test_members_without_episodes_do_not_count(tmp_path):
    found = summary(tmp_path, [1.0, None, 5.0])
    assert (found["final_return_mean"], found["final_return_per_seed"]) == (3.0, [1.0, None, 5.0])
    assert found["final_return_std"] == pytest.approx(8**0.5)  # 4 + 4 over one
    assert summary(tmp_path, [None, 5.0])["final_return_std"] is None
    assert summary(tmp_path, [None, None])["final_return_mean"] is None


def test_run_is_solved_once_all_members_are(tmp_path):
    found = summary(tmp_path, [1.0, 2.0, 6.0], [(40, 1.0), (200, 7.0), (80, 3.0)], threshold=1.0)
    assert (found["solved"], found["steps_to_solve"], found["time_to_solve_s"]) == (True, 80, 3.0)
    found = summary(tmp_path, [1.0, 2.0], [(40, 1.0), None], threshold=1.5)
    assert (found["solved"], found["steps_to_solve"], found["time_to_solve_s"]) == (False, None, None)
    assert found["steps_to_solve_per_seed"] == [40, None]
    assert summary(tmp_path, [1.0])["solved"] is None


def test_speed_counts_members_and_idle_share_is_of_training(tmp_path):
    """Three members take 5 x 40 steps each in 8 seconds, 2 of which the device idles."""
    found = summary(tmp_path, [1.0, 2.0, 6.0])
    assert (found["env_steps"], found["env_steps_per_s"], found["device_idle_fraction"]) == (200, 75.0, 0.25)
    assert (found["wall_time_s"], found["program_memory_mb"]) == (12.0, 3.0)


def test_evaluations_of_summary_are_last_and_best(tmp_path):
    rows = [
        {"env_steps": 40 * i, "eval_return_mean": mean, "eval_return_std": 1.0, "eval_length_mean": 2.0,
         "eval_episodes": 8, "eval_truncated": 0}
        for i, mean in enumerate([3.0, 9.0, 5.0])
    ]  # fmt: skip
    found = summary(tmp_path, [1.0], evaluations=rows)
    assert found["eval_return_mean"] == 5.0
    assert (found["best_eval_return_mean"], found["best_eval_env_steps"]) == (9.0, 40)


def test_replay_report_adds_parts():
    """100 bytes of 300 and 300 bytes of 300 before compression: 600 over 400. Shares are of 10 s of training."""
    one = dict(bytes=100, compression_ratio=3.0, read_time_s=1.0, codec_time_s=2.0)
    other = dict(bytes=300, compression_ratio=1.0, read_time_s=3.0, codec_time_s=0.5)
    assert of_replay([one, other], 10.0) == {
        "bytes": 400, "compression_ratio": 1.5, "reading_share": 0.4, "compression_share": 0.25
    }  # fmt: skip


def test_evaluation_statistics_are_of_games_and_of_each_player():
    """Two players of three games: left returns 1, 2 and nothing yet, right returns 5, 7 and nothing yet."""
    score = np.array([[1.0, 2.0, 9.0, 5.0, 7.0, 9.0]])
    ended = np.array([[True, True, False] * 2])
    found = evaluator.summarize_all(("left", "right"), score, np.array([[4, 8, 0] * 2]), ended)
    assert (found["eval_episodes"], found["eval_truncated"], found["eval_length_mean"]) == (2, 1, 6)
    assert (found["eval_return_mean"], found["eval_return_min"], found["eval_return_max"]) == (3.75, 1, 7)
    assert (found["eval_return_mean/left"], found["eval_return_mean/right"]) == (1.5, 6.0)
    assert found["eval_return_std"] == pytest.approx((22.75 / 4) ** 0.5)  # 2.75^2 + 1.75^2 + 1.25^2 + 3.25^2
    nothing = evaluator.summarize_all(("left", "right"), score, score, ~ended & ended)
    assert nothing["eval_return_mean/left"] is None and nothing["eval_truncated"] == 3


@pytest.mark.parametrize(("variance", "unexplained", "expected"), [(4.0, 1.0, 0.75), (0.5, 1.0, -1.0), (0.0, 1.0, 0.0)])
def test_explained_variance_equals_hand_calculation(variance, unexplained, expected):
    moments = normalize.Moments(np.float32([3, 3]), np.float32([0, 0]), np.float32([variance, unexplained]))
    assert float(normalize.explained_variance(moments)) == pytest.approx(expected)
