"""Test evaluations of a run: the compilation cache, and the statistics of finished episodes."""

from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from jaxrl_fast import evaluate
from jaxrl_fast.config import cli
from jaxrl_fast.evaluation import episodes, saved_run
from jaxrl_fast.training import evaluator
from jaxrl_fast.utils import compile_cache

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("wanted", "on_device"), [(True, True), (True, False), (False, True), (False, False)])
def test_evaluation_does_not_cache_programs_of_host_envs(wanted, on_device, monkeypatch):
    """These programs contain the address of a pool of this process."""

    class Reached(Exception):
        pass

    def reach(use):
        raise Reached(use)

    monkeypatch.setattr(evaluator, "Evaluator", lambda *_: None)
    monkeypatch.setattr(compile_cache, "compile_cache", reach)
    settings = SimpleNamespace(options=SimpleNamespace(compile_cache=wanted))
    saved = SimpleNamespace(agent=None, env=SimpleNamespace(on_device=on_device), seeds=[0], settings=settings)
    with pytest.raises(Reached) as reached:
        episodes.evaluate_run(saved, episodes.Options())
    assert bool(reached.value.args[0]) == (wanted and on_device)


@pytest.mark.parametrize(
    ("env", "given", "options", "expected"),
    [
        ("gymnasium/CartPole-v1", {}, {}, 2),  # each takes time to make
        ("gymnasium/CartPole-v1", {"eval_envs": 5}, {}, 5),
        ("gymnasium/CartPole-v1", {}, {"episodes": 1}, 1),
        ("gymnasium/CartPole-v1", {"eval_episodes": 1}, {}, 2),
        ("gymnax/CartPole-v1", {}, {}, 128),
        ("gymnax/CartPole-v1", {}, {"explore": True}, 2),
    ],
)
def test_evaluation_has_as_many_environments_as_in_training(env, given, options, expected, tmp_path, monkeypatch):
    config = {"algo": "ppo", "env": env, "num_envs": 2, "meta": {"format": 3}} | given
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(saved_run, "read_run", lambda folder, which, settings, env, *_: env)
    assert episodes.open_run(tmp_path, episodes.Options(**options)).spec.num_envs == expected


def test_seed_option_accepts_0_to_2147483647():
    """Read the smallest and the largest seed. Without the option it is None, and all seeds are evaluated."""
    read = lambda *words: cli.read(evaluate.USAGE, ["run", *words])[1].seed
    assert read() is None and (read("--seed", "0"), read("--seed", str(2**31 - 1))) == (0, 2**31 - 1)
    for wrong in (-1, 2**31):
        with pytest.raises(ValueError, match="seed: must be at least 0 and at most 2147483647"):
            read(f"--seed={wrong}")


def test_summarize_uses_finished_episodes_only():
    """Returns 1, 3 and 8 have lengths 2, 4 and 9: mean 4, variance (9 + 1 + 16) / 3. One of four is unfinished."""
    score, length = np.array([[1.0, 3.0], [8.0, 1e9]]), np.array([[2, 4], [9, 10**9]])
    found = episodes.summarize(score, length, np.array([[True, True], [True, False]]))
    low, high = found.pop("eval_return_low"), found.pop("eval_return_high")
    assert found == {
        "eval_return_mean": 4.0,
        "eval_return_std": pytest.approx((26 / 3) ** 0.5),
        "eval_return_min": 1.0,
        "eval_return_max": 8.0,
        "eval_length_mean": 5.0,
        "eval_episodes": 3,
        "eval_truncated": 1,
    }
    assert 1 <= low < 4 < high <= 8


def test_summarize_returns_none_without_finished_episode():
    nothing = episodes.summarize(np.ones((2, 3)), np.ones((2, 3), int), np.zeros((2, 3), bool))
    assert (nothing.pop("eval_episodes"), nothing.pop("eval_truncated")) == (0, 6)
    assert set(nothing.values()) == {None}


def test_interval_excludes_seed_without_finished_episode():
    ended = np.array([[True, True], [False, False]])
    found = episodes.summarize(np.array([[5.0, 5.0], [0.0, 0.0]]), np.ones((2, 2), int), ended)
    assert (found["eval_return_low"], found["eval_return_mean"], found["eval_return_high"]) == (5, 5, 5)


def test_episode_lists_omit_unfinished_episodes_and_have_none_for_nan():
    found = episodes.episode_lists(np.array([1.5, np.nan, 7.0]), np.array([3, 4, 5]), np.array([True, True, False]))
    assert found == {"returns": [1.5, None], "lengths": [3, 4]}
