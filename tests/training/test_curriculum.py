"""Runs whose environment options follow a schedule, or the word of a callback: bits, records, evaluations, messages."""

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

import jaxrl_fast
from jaxrl_fast import train
from jaxrl_fast.envs.schedules import read
from jaxrl_fast.plotting import run_curve
from jaxrl_fast.training import callbacks, dispatcher
from tests.helpers.ray_clusters import local_ray
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


class Paid(Choice):
    """Reward both actions with the level."""

    def step_env(self, key, state, action, params):
        return jnp.ones(2), state + 1, params.level, False, {}


class PaidPlayers(Choice):
    """Reward the first player with the level, and the second one with twice the level."""

    players = ("first", "second")

    def reset_env(self, key, params):
        return jnp.ones((2, 2)), jnp.zeros(())

    def step_env(self, key, state, action, params):
        return jnp.ones((2, 2)), state + 1, params.level * jnp.array([1.0, 2.0]), False, {}


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


GRU = dict(algo="ppo", memory={"kind": "gru", "size": 4})
RUNS = {
    "memory": (Paid, GRU),
    "memory, observed rewards": (Paid, GRU | dict(wrap=["previous"])),
    "memory, two seeds": (Paid, GRU | dict(num_seeds=2)),
    "memory, two devices": (Paid, GRU | dict(devices=2, num_minibatches=1)),
    "players": (PaidPlayers, dict(players="shared")),
    "players, two devices": (PaidPlayers, dict(players="shared", algo="ppo", devices=2, num_minibatches=1)),
    "independent players": (PaidPlayers, dict(players="independent")),
    "self-play": (PaidPlayers, dict(players="self-play", algo="ppo")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_returns_are_sums_of_the_values_of_each_step(case, tmp_path):
    """The oracle is a loop over steps: an episode has 6 of them and a reset, which takes a step too."""
    env, options = RUNS[case]
    run = fit(tmp_path / "run", env=f"{__name__}:{env.__name__}", env_options=SCHEDULE, **options)
    ended, total = {}, 0.0  # returns by the step of an environment after which they are complete
    for t in range(1280 // 8):
        total = 0.0 if t % 7 == 6 else total + np.interp(8 * t, [0, 800], [0, 1])
        if t % 7 == 5:
            ended[t + 1] = total
    most = 2 if env is PaidPlayers else 1  # in self-play, the learner is the first player in some games only
    before = dict.fromkeys([0, 1], 0)
    for record in run.metrics:
        rows, seed = record["env_steps"] // 8, record["seed"]
        expected = [x for t, x in ended.items() if before[seed] < t <= rows]
        before[seed] = rows
        assert record["return_max"] == pytest.approx(most * max(expected), rel=1e-5)
        assert record["return_min"] == pytest.approx(min(expected), rel=1e-5)
        assert record["env_option/level"] == min(record["env_steps"] / 800, 1)
    assert {x["eval_return_min"] for x in run.summary["evaluations"]} == {6}


@pytest.mark.slow  # compiles a program for each device count, and resumes it
@pytest.mark.parametrize("options", [dict(num_seeds=2), dict(algo="ppo", devices=2, num_minibatches=1)])
@pytest.mark.parametrize("env_options", [SCHEDULE, WORDS])
def test_run_stopped_twice_is_bit_identical(options, env_options, tmp_path, monkeypatch):
    """Words are saved: also one that was heard, and takes effect after the checkpoint."""
    words = [Words()] if env_options is WORDS else []
    fit(tmp_path / "whole", *words, env_options=env_options, **options)
    folder = tmp_path / "run"
    stop_after(monkeypatch, 320, 704)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    fit(folder, *words, env_options=env_options, **options)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 100.0)
    for _ in range(2):
        fit(folder, *words, resume=str(folder))
    same(folder, tmp_path / "whole")


HOSTS = [(ON_HOST, {"workers": 0}), (ON_HOST, {"workers": 2}), (UNSAVABLE, {"exact_resume": True, "async_pools": 2})]


@pytest.mark.slow  # resumes runs of gymnasium environments
@pytest.mark.parametrize(("env", "host"), HOSTS)
@pytest.mark.parametrize("env_options", [SCHEDULE, WORDS])
def test_host_run_stopped_twice_is_bit_identical(env, host, env_options, tmp_path, monkeypatch):
    words = [Words()] if env_options is WORDS else []
    given = dict(env=env, env_options=env_options, eval_envs=2, host=host)
    fit(tmp_path / "whole", *words, **given)
    folder = tmp_path / "run"
    stop_after(monkeypatch, 320, 704)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    first = fit(folder, *words, **given)
    assert first.summary["status"] == "stopped"
    monkeypatch.setattr(dispatcher, "CHUNK_S", 100.0)
    for _ in range(2):
        fit(folder, *words, resume=str(folder))
    same(folder, tmp_path / "whole")


@pytest.fixture(scope="module")
def ray():
    yield from local_ray()


@pytest.mark.slow
@pytest.mark.parametrize("env_options", [SCHEDULE, WORDS])
def test_run_in_ray_actors_has_the_bits_of_one_in_processes(env_options, tmp_path, monkeypatch, ray):
    """The one in actors is stopped, and resumed in actors."""
    words = [Words()] if env_options is WORDS else []
    given = dict(env=ON_HOST, env_options=env_options, eval_envs=2)
    fit(tmp_path / "whole", *words, **given, workers=2)
    folder = tmp_path / "run"
    stop_after(monkeypatch, 704)
    monkeypatch.setattr(dispatcher, "CHUNK_S", 0.0)
    assert fit(folder, *words, **given, workers="ray:2").summary["status"] == "stopped"
    monkeypatch.setattr(dispatcher, "CHUNK_S", 100.0)
    fit(folder, *words, resume=str(folder))
    same(folder, tmp_path / "whole")


@pytest.mark.slow  # trains two runs until the best action is found
def test_curriculum_changes_the_best_action(tmp_path):
    """With a level of 0, action 0 is better. At the end of the schedule, action 1 earns 1 in each of 6 steps."""
    long = dict(total_steps=25_600, eval_every=0, save_every=0, learning_rate=0.01)
    easy = fit(tmp_path / "easy", env_options={"level": "0@callback"}, **long)
    hard = fit(tmp_path / "hard", env_options={"level": "0..1@3k"}, **long)
    assert easy.summary["eval_return_mean"] == 3 and hard.summary["eval_return_mean"] == 6


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("levl", 1, "set_env_option: 'levl' has no schedule in this run; did you mean level?"),
        ("level", "1", "set_env_option level: must be a finite number, got '1'"),
        ("level", float("nan"), "set_env_option level: must be a finite number, got nan"),
    ],
)
def test_wrong_word_of_callback_is_one_line(name, value, message):
    state = callbacks.RunState(Path(), 0, 1, 0, 0.0)
    state.schedules = {"level": read("level", "0..1@10", 0.0)}
    with pytest.raises(ValueError, match=message):
        state.set_env_option(name, value)


def test_command_refuses_a_wrong_schedule_before_it_writes(tmp_path, capsys):
    given = ["ppo", "--env", "CartPole-v1", "--run-dir", str(tmp_path / "run"), "--env-option", "gravity=4@2M"]
    assert train.main(given) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "run").exists()
