"""Runs whose environment options follow a schedule, or the word of a callback: bits, records, evaluations, messages."""

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from gymnax.environments import spaces

import jaxrl_fast
from jaxrl_fast import train
from jaxrl_fast.plotting import run_curve
from jaxrl_fast.training import dispatcher
from tests.helpers.runs import same, stop_after


class Params(NamedTuple):
    max_steps_in_episode: int = 6
    level: float = 0.0


class Choice:
    """Reward action 0 with 0.5, and action 1 with the level, so that the best action depends on it."""

    default_params = Params()

    def reset_env(self, key, params):
        return jnp.ones(2), jnp.zeros(())

    def step_env(self, key, state, action, params):
        return jnp.ones(2), state + 1, jnp.where(action == 1, params.level, 0.5), False, {}

    def is_truncated(self, state, params):
        return state >= params.max_steps_in_episode

    def action_space(self, params):
        return spaces.Discrete(2)


class Words(jaxrl_fast.Callback):
    """Set the level by the step of the run only, so that a resumed run hears the same words."""

    def on_record(self, records, state):
        if state.env_steps == 256:
            state.set_env_option("level", 0.75)

    def on_evaluation(self, evaluation, state):
        if evaluation["env_steps"] == 640:
            state.set_env_option("level", 2)


CHOICE, ON_HOST, UNSAVABLE = (
    "tests.training.test_curriculum:Choice",
    "tests.helpers.gym_envs:Leveled",
    "tests.helpers.gym_envs:UnsavableLeveled",
)
TINY = dict(algo="pqn", env=CHOICE, num_envs=8, total_steps=1280, eval_every=640, eval_episodes=8, log_every=128)
TINY |= dict(save_every=192, loggers=(), log_level="quiet", devices=1, rollout_length=8, hidden_sizes=(8,))
SCHEDULE, WORDS = {"level": "0..1@800"}, {"level": "0.25..1@callback"}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(run_curve, "figure", lambda folder: SimpleNamespace(savefig=Path.touch))


def fit(folder, *callbacks, **options):
    given = {"log_level": "quiet"} if "resume" in options else TINY | {"run_dir": str(folder)}
    return jaxrl_fast.fit(**given | options, callbacks=callbacks)


def levels(run):
    return {record["env_steps"]: record["env_option/level"] for record in run.metrics}


def test_words_of_callbacks_take_effect_at_fixed_steps_without_compiling_again(tmp_path):
    """In `on_record`, after the next record; in `on_evaluation`, at once. Evaluations have the last value, 1."""
    compiled = []
    listen = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None

    class Last(Words):
        """Note the programs that are compiled after the first evaluation."""

        def on_evaluation(self, evaluation, state):
            super().on_evaluation(evaluation, state)
            compiled.clear()

        def on_end(self, summary):
            self.num_compiled = len(compiled)

    words = Last()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run = fit(tmp_path / "run", words, env_options=WORDS, eval_every=320, rollout_length=8)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert words.num_compiled == 0
    found = levels(run)
    assert [found[k] for k in (128, 256, 320)] == [0.25] * 3  # an evaluation ends a record
    assert found[640] == 0.75 and found[768] == found[1280] == 2
    assert run.summary["env_options"] == {"level": 2}
    rewards = {r["env_steps"]: r["return_max"] for r in run.metrics if r["return_max"] is not None}
    assert max(x for k, x in rewards.items() if k <= 640) <= 6 * 0.75 < rewards[1280]
    assert all(3 <= e["eval_return_max"] <= 6 for e in run.summary["evaluations"])


@pytest.mark.slow  # compiles a program for each device count, and resumes it
@pytest.mark.parametrize("options", [dict(num_seeds=2), dict(algo="ppo", devices=2, num_minibatches=1)])
@pytest.mark.parametrize("env_options", [SCHEDULE, WORDS])
def test_run_stopped_twice_is_bit_identical(options, env_options, tmp_path, monkeypatch):
    """Words are saved: also one that was heard, and takes effect after the checkpoint."""
    callbacks = [Words()] if env_options is WORDS else []
    fit(tmp_path / "whole", *callbacks, env_options=env_options, **options)
    folder = tmp_path / "run"
    stop_after(monkeypatch, 320, 704)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    fit(folder, *callbacks, env_options=env_options, **options)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 100.0)
    for _ in range(2):
        fit(folder, *callbacks, resume=str(folder))
    same(folder, tmp_path / "whole")


HOSTS = [(ON_HOST, {"workers": 0}), (ON_HOST, {"workers": 2}), (UNSAVABLE, {"exact_resume": True, "async_pools": 2})]


@pytest.mark.slow  # resumes runs of gymnasium environments
@pytest.mark.parametrize(("env", "host"), HOSTS)
@pytest.mark.parametrize("env_options", [SCHEDULE, WORDS])
def test_host_run_stopped_twice_is_bit_identical(env, host, env_options, tmp_path, monkeypatch):
    callbacks = [Words()] if env_options is WORDS else []
    given = dict(env=env, env_options=env_options, eval_envs=2, host=host)
    fit(tmp_path / "whole", *callbacks, **given)
    folder = tmp_path / "run"
    stop_after(monkeypatch, 320, 704)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    first = fit(folder, *callbacks, **given)
    assert first.summary["status"] == "stopped"
    monkeypatch.setattr(dispatcher, "CHUNK_S", 100.0)
    for _ in range(2):
        fit(folder, *callbacks, resume=str(folder))
    same(folder, tmp_path / "whole")


MISTAKES = {
    "gymnax/CartPole-v1 gravty=4..12@2M": "has no option 'gravty'; did you mean gravity",
    "gymnax/CartPole-v1 gravity=4..12@2X": "a schedule must end with a number of environment steps, got 4..12@2X",
    "gymnax/CartPole-v1 gravity=4..x@2M": "gravity: the values of a schedule must be numbers, got 4..x@2M",
    "gymnax/CartPole-v1 gravity=4@2M": "gravity: a schedule must have two or more values, got 4@2M",
    "gymnax/CartPole-v1 gravity=4..9@0": "gravity: a schedule must have 1 to 1e+12 environment steps, got 4..9@0",
    "envpool/CartPole-v1 max_episode_steps=9..20@1M": "max_episode_steps: must be one value for envpool/CartPole-v1",
    "gymnasium/CartPole-v1 gravit=4..9@1M": "no attribute 'gravit' that could follow 4..9@1M; did you mean gravity?",
    "gymnasium/CartPole-v1 action_space=4..9@1M": "action_space: must be a number in gymnasium/CartPole-v1",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_get_one_line(words, capsys):
    env, option = words.split()
    assert train.main(["ppo", "--env", env, "--env-option", option, "--dry-run"]) == 2
    printed = capsys.readouterr().err
    assert MISTAKES[words] in printed and printed.count("\n") == 1 and printed.startswith("error: ")
