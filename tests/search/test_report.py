"""Test what a search writes: the preset, the table, the report and the figures."""

import csv
import math
import warnings

import numpy as np
import pytest

from jaxrl_fast.config.load import from_keywords
from jaxrl_fast.metrics.statistics import mean_interval
from jaxrl_fast.search import figures, report
from jaxrl_fast.search.spaces import parse, resample
from jaxrl_fast.search.trials import DEFAULT, Result, Trial, best_of, ranked, score_of

pytestmark = pytest.mark.unit

OVER = ["learning_rate=1e-5..1e-2", "gamma=0.9..0.9999", "num_minibatches=2..16", "normalize_advantage=true,false"]


def made(over=OVER, scores=((1.0, 3.0), (5.0, 7.0)), status=(), seed=0, test=None, **options):
    """Return a search whose trials have these scores of each seed."""
    settings = from_keywords("ppo_cartpole", **options)
    space = parse(over, settings.known, "ppo")
    rng = np.random.default_rng(seed)
    trials = [
        Trial(i, {d.name: resample(d, rng) for d in space}, each, score_of(each) if each else None, 1000)
        for i, each in enumerate(scores)
    ]
    trials = [
        t._replace(env_steps_at_end=2000 * (t.number + 1), status=s)
        for t, s in zip(trials, [*status] or ["complete"] * 99)
    ]
    seeds = tuple(range(max(map(len, scores), default=1)))
    return Result(settings, space, tuple(trials), test or {}, "tpe", "none", "final", seeds, (100, 101), 12.0)


def text_of(result, tmp_path):
    report.write(tmp_path, result)
    return (tmp_path / "report.md").read_text(encoding="utf-8")


def test_score_is_the_mean_and_a_diverged_seed_is_the_worst():
    assert score_of([1.0, 2.0, 6.0]) == 3.0
    assert score_of([500.0, math.nan]) == score_of([500.0, -math.inf]) == score_of([]) == -math.inf


def test_ranking_puts_longer_trials_first_and_diverged_ones_last():
    trial = lambda number, score, steps, status="complete", rung=0: Trial(
        number, {}, (score or 0.0,), score, steps, rung, status
    )
    trials = [
        trial(0, 400.0, 1000, "stopped", rung=2),
        trial(1, 300.0, 9000),  # of a bracket of Hyperband that begins with all steps
        trial(2, -math.inf, 9000, "diverged", rung=2),
        trial(3, 300.0, 9000, rung=2),
        trial(4, 350.0, 9000, rung=2),
        trial(5, None, 0, "running"),
        trial(6, 999.0, 9000, "running"),
        trial(7, None, 9000, "failed"),
    ]
    assert [t.number for t in ranked(trials)] == [4, 1, 3, 0, 2]


def test_best_trial_is_chosen_by_tuning_scores_alone():
    result = made(scores=((1.0, 3.0), (5.0, 7.0)), test={0: (9.0, 9.0), 1: (2.0, 4.0), DEFAULT: (1.0, 1.0)})
    assert best_of(result).number == 1
    best, other, base = report.summary(result)[:3]
    assert best == (
        "- Best: **trial 1**, 6 (5 to 7) on tuning seeds, 3 (2 to 4) on test seeds: promised too much by 3."
    )
    assert other.startswith("- On test seeds trial 0 scores more, 9 (9 to 9).")
    assert base == "- The base settings: 1 (1 to 1) on the same test seeds."


def test_report_says_that_the_base_settings_are_not_worse():
    line = report.summary(made(test={1: (3.0, 3.0), DEFAULT: (3.0, 3.0)}))[1]
    assert line == "- The base settings: 3 (3 to 3) on the same test seeds, so this search has found nothing better."
    diverged = report.summary(made(test={1: (3.0, 3.0), DEFAULT: (math.nan, 9.0)}))[1]
    assert diverged == "- The base settings: 9, 1 of 2 diverged on the same test seeds."


def test_preset_trains_the_best_trial(tmp_path):
    result = made(total_steps=123_456, seed=7, num_seeds=3, log_level="quiet", save_every=0, loggers=[])
    report.write(tmp_path, result)
    again = from_keywords(str(tmp_path / "best.yaml"))
    expected = result.settings.replace(**result.trials[1].values)
    assert again.agent == expected.agent
    for name in ("env", "num_envs", "total_steps", "solved_threshold"):
        assert again.value(name) == expected.value(name), name
    defaults = from_keywords(algo="ppo", env="CartPole-v1")
    for name in ("seed", "num_seeds", "log_level", "save_every", "loggers"):
        assert again.value(name) == defaults.value(name), name
    text = (tmp_path / "best.yaml").read_text(encoding="utf-8")
    assert text.startswith("# Found by a search of 2 trials: trial 1, score 6 (5 to 7) on 2 tuning seeds.\nalgo: ppo\n")


def test_preset_has_chosen_parts_and_lists(tmp_path):
    over = ["memory=gru,lstm", "memory.size=16..64", "hidden_sizes=32 32,64", "target_kl=none,0.01"]
    result = made(over, memory="gru", hidden_sizes=[16], rollout_length=32)
    report.write(tmp_path, result)
    assert from_keywords(str(tmp_path / "best.yaml")).agent == result.settings.replace(**result.trials[1].values).agent


def test_preset_of_custom_environments(tmp_path):
    from gymnax.environments.classic_control.cartpole import CartPole as Env

    result = made(env=Env)
    report.write(tmp_path, result)
    assert from_keywords(str(tmp_path / "best.yaml")).options.env == f"{Env.__module__}:{Env.__qualname__}"
    report.write(tmp_path, made(env=Env()))
    with pytest.raises(ValueError, match=r"trained on an environment instance .* pass it from Python as env="):
        from_keywords(str(tmp_path / "best.yaml"))
    assert from_keywords(str(tmp_path / "best.yaml"), env=Env).options.env is Env


def test_table_holds_every_trial_with_exact_values(tmp_path):
    result = made(
        scores=((1.0, 3.0), (5.0, math.nan), ()), status=("complete", "diverged", "running"), test={0: (2.0,)}
    )
    report.write(tmp_path, result)
    with (tmp_path / "trials.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [row["status"] for row in rows] == ["complete", "diverged", "running"]
    assert [row["scores"] for row in rows] == ["1.0 3.0", "5.0 nan", ""]
    assert [row["score"] for row in rows] == ["2.0", "-inf", ""]
    assert [row["test_scores"] for row in rows] == ["2.0", "", ""]
    assert [float(row["gamma"]) for row in rows] == [trial.values["gamma"] for trial in result.trials]


def test_report_shows_values_beside_those_of_the_base_run(tmp_path):
    result = made()
    text = text_of(result, tmp_path)
    values = result.trials[1].values
    assert f"| learning_rate | 1e-05..0.01 (log) | 0.0005 | {values['learning_rate']:.4g} |" in text
    assert f"| num_minibatches | 2..16 (powers of two) | 8 | {values['num_minibatches']} |" in text
    assert "No trial has been trained on test seeds, so the scores of the best trials promise too much." in text
    assert f"`python -m jaxrl_fast.train --config {tmp_path / 'best.yaml'}`" in text


def test_report_compares_tuning_and_test_scores(tmp_path):
    test = {1: (2.0, 4.0), 0: (math.nan, 4.0), DEFAULT: (0.5, 1.5)}
    text = text_of(made(test=test), tmp_path)
    assert "| 1 | 6 (5 to 7) | 3 (2 to 4) | 3 |" in text
    assert "| 0 | 2 (1 to 3) | 4, 1 of 2 diverged |  |" in text
    assert "trained again on 2 seeds (100, 101)" in text
    lucky = report.summary(made(test={1: (8.0, 8.0)}))[0]
    assert lucky.endswith("8 (8 to 8) on test seeds: promised too little by 2.")
    diverged = report.summary(made(test={1: (math.nan, 8.0)}))[0]
    assert diverged.endswith("8, 1 of 2 diverged on test seeds.")


def test_report_counts_diverged_stopped_and_failed_trials(tmp_path):
    scores = ((1.0, 3.0), (math.nan, math.nan), (math.nan, 5.0), (2.0, 2.0), ())
    status = ("complete", "diverged", "diverged", "stopped", "failed")
    result = made(scores=scores, status=status)
    lines = report.summary(result)
    assert "- 2 of 5 trials diverged, 3 of 8 seeds; they are ranked last." in lines
    assert "- 1 of 5 trials: stopped early." in lines
    assert "- 1 of 5 trials: failed." in lines
    assert "5 trials with 2 seeds each, 10k environment steps together" in lines[1]
    text = text_of(result, tmp_path)
    order = [
        line.split(" | ")[0].strip("| ") for line in text.partition("## The best")[2].splitlines() if "| 1k" in line
    ]
    assert order == ["0", "3", "1", "2", "4"]


def test_failed_trial_has_no_score(tmp_path):
    result = made(scores=((1.0, 3.0), (math.nan, math.nan)), status=("complete", "failed"))
    result = result._replace(trials=(result.trials[0], result.trials[1]._replace(score=None)))
    text = text_of(result, tmp_path)
    assert "- 1 of 2 trials: failed." in text and "diverged" not in text
    why = "num_minibatches: must divide 40 rows, got 16; use 8"
    failed = result._replace(trials=(result.trials[0], result.trials[1]._replace(failure=why)))
    assert f"- 1 of 2 trials: failed.\n  - Failed: {why}\n" in text_of(failed, tmp_path)
    assert "| 1 |  |" in text


def test_preset_of_population_based_training_says_that_values_changed(tmp_path):
    result = made()._replace(scheduler="pbt")
    text = text_of(result, tmp_path)
    assert "the test trains with these values from the first step." in text
    preset = (tmp_path / "best.yaml").read_text(encoding="utf-8")
    assert "# The values are those at the end of population-based training." in preset
    assert from_keywords(str(tmp_path / "best.yaml")).agent == result.settings.replace(**result.trials[1].values).agent


def test_intervals_are_bootstrap_intervals_of_the_mean():
    scores = (480.0, 500.0, 470.0, 500.0)
    low, high = mean_interval([np.array(scores)])
    assert report.mean_of(scores) == f"487.5 ({low:.1f} to {high:.1f})"
    assert 470 <= low < 487.5 < high <= 500
    assert report.mean_of((0.12345678,)) == "0.1235"
    assert report.mean_of((math.nan, math.nan)) == "diverged (2 of 2)"


@pytest.mark.parametrize(
    ("result", "first"),
    [
        (made(scores=()), "- No trial has a score."),
        (made(scores=((),), status=("running",)), "- No trial has a score."),
        (made(scores=((math.nan, 1.0),), status=("diverged",)), "- All scored trials diverged."),
    ],
    ids=["no_trial", "running", "diverged"],
)
def test_search_without_a_best_trial_writes_no_preset(result, first, tmp_path):
    lines = report.write(tmp_path, result)
    assert lines[0] == first.removeprefix("- ")
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", *(["trials.csv"] if result.trials else [])}


@pytest.mark.parametrize(
    ("over", "number", "names"),
    [
        (OVER, 20, {"progress.png", "options.png", "importance.png", "parallel.png"}),
        (OVER, 19, {"progress.png", "options.png", "parallel.png"}),  # too few for an importance
        (OVER, 1, {"progress.png", "options.png"}),
        (["gamma=0.9..0.9999"], 12, {"progress.png", "options.png"}),
    ],
)
def test_figures_are_drawn_without_warnings(over, number, names, tmp_path):
    scores = [(float(i), float(i % 3)) for i in range(number)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = text_of(made(over, scores), tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == names
    assert all(f"]({name})" in text for name in names)


def test_equal_scores_have_no_importance():
    assert "importance.png" not in figures.of(made(scores=[(500.0,)] * 24))


def test_importance_finds_the_option_that_decides():
    result = made(scores=[(0.0,)] * 60)
    trials = [t._replace(score=-abs(math.log10(t.values["learning_rate"]) + 3)) for t in result.trials]
    found = figures.importances(result, trials)
    assert next(iter(found)) == "learning_rate" and found["learning_rate"] > 0.5
    assert sum(found.values()) == pytest.approx(1)


def test_progress_shows_the_best_score_so_far_in_order_of_steps():
    result = made(scores=((3.0,), (9.0,), (math.nan,), (4.0,)), test={DEFAULT: (5.0, 7.0)})
    shuffled = result._replace(trials=tuple(result.trials[i] for i in (1, 3, 0, 2)))
    (axes,) = figures.of(shuffled)["progress.png"]().axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["best so far"].get_xdata().tolist() == [2000, 4000, 8000]
    assert lines["best so far"].get_ydata().tolist() == [3, 9, 9]
    assert lines["diverged"].get_xdata() == [6000]
    assert set(lines["base settings on test seeds"].get_ydata()) == {6}


def test_options_are_drawn_on_their_scales():
    result = made(scores=[(float(i),) for i in range(12)])
    panels = figures.of(result)["options.png"]().axes[:4]
    assert [axes.get_xlabel() for axes in panels] == [dimension.name for dimension in result.space]
    assert [axes.get_xscale() for axes in panels] == ["log", "log", "log", "linear"]
    gamma = panels[1]
    best = result.trials[-1].values["gamma"]
    assert gamma.lines[0].get_xdata() == [1 - best] and gamma.xaxis_inverted()
    assert gamma.xaxis.get_major_formatter()(0.01, 0) == "0.99"
