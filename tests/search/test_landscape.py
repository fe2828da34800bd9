"""Test the benchmark of landscapes: its tasks are valid, and its statistics are right."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl_fast.config.population import real_numbers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as for a script
import landscape

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", landscape.TASKS)
def test_settings_of_task_share_a_program(name):
    base, space = landscape.task(name)
    settings = landscape.settings_of(base, space, 3)
    assert len(settings) == 5
    assert {dimension.name for dimension in space} <= {*real_numbers(base.agent)}
    assert settings[:3] == landscape.settings_of(base, space, 8)[:3], "more settings must not change the first ones"
    defaults, preset = settings[3:]
    assert defaults["learning_rate"] == base.known["learning_rate"].default
    assert preset == {dimension.name: base.value(dimension.name) for dimension in space}
    assert base.options.total_steps in (20_000, 100_000) and base.options.eval_episodes == 32


def test_summary_of_scores():
    scores = np.array(
        [
            [100, 100, 0, 0],  # 50: the best on one of six halves
            [90, 90, 90, 90],  # 90
            [86, 86, 86, 86],  # 86: within 5% of the range from 10 to 90
            [10, 10, 10, 10],  # 10
            [99, 99, 99, math.nan],  # diverged
            [85, 85, 85, 85],  # the defaults
            [100, 100, 100, math.nan],  # the preset
        ]
    )
    found = landscape.summary(scores, 86.0)
    assert found["quantiles"]["0"] == 10 and found["quantiles"]["50"] == 68 and found["quantiles"]["100"] == 90
    assert (found["diverged"], found["solved"], found["near_the_best"]) == (1, 2, 2)
    assert found["chosen_by_half"] == pytest.approx((100 + 5 * 90) / 6, abs=0.01)
    assert found["on_other_half"] == pytest.approx((0 + 5 * 90) / 6, abs=0.01)
    assert found["defaults"] == {"score": 85, "rank": 3}
    assert found["preset"] == {"score": None, "rank": 5}
    assert landscape.summary(scores, None)["solved"] is None
