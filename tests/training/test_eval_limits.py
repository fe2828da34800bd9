"""Evaluations in host environments: their number of episodes, environments without an end, and a single simulator."""

import re
from typing import ClassVar

import gymnasium
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast.options.run import Options
from jaxrl_fast.training import eval_limits, printers
from jaxrl_fast.training.eval_limits import Limits
from jaxrl_fast.utils import errors

RUN = dict(algo="ppo", rollout_length=8, hidden_sizes=(8,), loggers=(), host={"workers": 0}, total_steps=64)


class Endless(gymnasium.Env):
    """An environment without an end; each step has reward 1."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Single(Endless):
    """A simulator of which only one can exist at a time. Its episodes have 5 steps."""

    open = False

    def __init__(self):
        if Single.open:
            raise ConnectionError("there is a client already")
        Single.open = True

    def step(self, action):
        return (*super().step(action)[:3], self.t >= 5, {})

    def close(self):
        Single.open = False


class Seeded(Single):
    seeds: ClassVar = []

    def reset(self, *, seed=None, options=None):
        Seeded.seeds.append(seed)
        return super().reset(seed=seed)


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    monkeypatch.setattr(Single, "open", False)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "steps", "longest", "limits"),
    [
        (dict(eval_episodes=128), 10**6, 500, None),  # chosen by the user
        (dict(), 10**6, 500, Limits(10**5, 2500)),
        (dict(), 500, 20, Limits(50, 1000)),
        (dict(), 10**7, 20_000, Limits(10**6, 27_000)),
        (dict(num_envs=4), 256, 0, Limits(25, 1000, 1)),  # no end so far
        (dict(num_envs=4), 10**5, 0, Limits(10**4, 2500, 1)),
        (dict(num_envs=4), 10**9, 0, Limits(10**8, 27_000, 1)),
    ],
)
def test_limits_follow_training(options, steps, longest, limits):
    assert eval_limits.limits_of(Options(**options), steps, longest, 27_000) == limits


def test_environment_without_an_end_is_evaluated_for_a_moment(tmp_path, capsys):
    run = jaxrl_fast.fit(env=Endless, num_envs=2, run_dir=str(tmp_path / "run"), **RUN)
    total = run.summary["evaluations"][-1]
    assert (total["eval_episodes"], total["eval_return_mean"], total["eval_truncated"]) == (2, 1000.0, 0)
    told = re.findall(r"warning: no episode has ended in training, .*", capsys.readouterr().err)
    assert len(told) == 1 and "cuts each after 1000 steps; --env-option max_episode_steps=N ends episodes" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [True, False])
def test_simulator_of_which_only_one_can_exist_is_trained(evaluates, tmp_path, capsys):
    chosen = {} if evaluates else {"eval_episodes": 0}
    run = jaxrl_fast.fit(env=Single, num_envs=1, run_dir=str(tmp_path / "run"), **RUN | chosen)
    assert run.summary["status"] == "done" and run.summary["eval_return_mean"] == (5.0 if evaluates else None)
    assert len(run.summary["evaluations"]) == evaluates and not Single.open
    out, err = capsys.readouterr()
    assert "making 1 environment ...\n" in out and not err
    longer = jaxrl_fast.fit(resume=run, total_steps=96)
    assert longer.summary["env_steps"] == 96 and not Single.open


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (dict(num_envs=2), "environment 1 could not be made; if only one can exist at a time, use num_envs 1"),
        (
            dict(num_envs=1, eval_every=32),
            "environment 0 could not be made; evaluations have environments of their own: ",
        ),
    ],
)
def test_error_of_second_environment_names_remedy(options, remedy, tmp_path):
    with pytest.raises(ConnectionError) as raised:
        jaxrl_fast.fit(env=Single, run_dir=str(tmp_path / "run"), **RUN | options)
    assert remedy in f"{errors.blamed(raised.value)}{errors.remedy_of(raised.value)}"


def test_period_of_evaluations_without_episodes_is_refused():
    with pytest.raises(ValueError, match=r"^eval_every: must be 0 where eval_episodes is 0, got 32; leave one out$"):
        jaxrl_fast.fit(env="CartPole-v1", algo="ppo", eval_every=32, eval_episodes=0)


def test_shared_environment_has_other_episodes_than_training(tmp_path, monkeypatch):
    """Each environment gets one seed: in its first reset, and before the evaluation."""
    monkeypatch.setattr(Seeded, "seeds", [])
    jaxrl_fast.fit(env=Seeded, num_envs=1, run_dir=str(tmp_path / "run"), eval_episodes=3, save_every="0", **RUN)
    training, evaluation = filter(None, Seeded.seeds)  # the seed of trials is 0
    assert training != evaluation


@pytest.mark.unit
def test_long_evaluation_prints_its_progress():
    lines = []
    printer = printers.EvaluationPrinter(lines.append, 1.0)
    for _ in range(2):  # evaluations
        for seconds in (0.0, 1.9, 2.1, 2.5, 3.2, 3.3, 40.0, 43.9, 44.1):
            printer(int(seconds), 128, seconds)
        shown = [f"evaluating ... {num} of at most 128 episodes" for num in (2, 3, 40, 44)]
        assert lines == shown
        lines.clear()
    printer(None, 1, 2.0)
    assert lines == ["evaluating ... 1 episode"]
