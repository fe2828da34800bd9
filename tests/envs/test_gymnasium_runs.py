"""Runs in Python environments: scores, saving after failures, resume, videos, and messages of the commands."""

import asyncio
import json
import re
import sys

import gymnasium
import jax
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import check, train, video
from jaxrl_fast.parallel.placement import max_grad_workers
from jaxrl_fast.runs import files
from jaxrl_fast.training import build, env_check
from tests.helpers import gym_envs, slow

MODULE = "tests.helpers.gym_envs"
SHORT = dict(num_envs=4, total_steps=1280, eval_episodes=4, eval_envs=2, log_every=32, seed=3, loggers=())
SHORT |= dict(hidden_sizes=(8,), log_level="quiet")
DQN = SHORT | dict(algo="dqn", batch_size=128, learning_starts=8, replay={"size": 1024})
SHORT |= dict(algo="ppo", rollout_length=8, num_minibatches=1)
LINE = "--num-envs 4 --total-steps 1280 --rollout-length 8 --num-minibatches 1 --hidden-sizes 8 "
LINE += "--log-every 32 --loggers none --eval-episodes 4"


class Noted(gymnasium.wrappers.RecordEpisodeStatistics):
    """Record (return, length) of each finished episode, separately for each instance."""

    instances: list = []  # noqa: RUF012

    def __init__(self, env):
        super().__init__(env)
        self.finished = []
        self.instances.append(self.finished)

    def step(self, action):
        outcome = super().step(action)
        if "episode" in outcome[-1]:
            self.finished.append((float(outcome[-1]["episode"]["r"]), int(outcome[-1]["episode"]["l"])))
        return outcome


@pytest.mark.slow
def test_training_scores_match_record_episode_statistics(tmp_path):
    Noted.instances.clear()
    run = jaxrl_fast.fit(**SHORT, env=lambda: Noted(gym_envs.Walk()), run_dir=str(tmp_path / "run"), workers=0)
    records = [r for r in run.metrics if r["episodes"]]
    assert len(Noted.instances) == 2 + 4 + 2 + 1, "2 to inspect, 4 to train, 2 to evaluate, 1 to copy"
    finished = [episode for instance in Noted.instances[2:6] for episode in instance]
    assert sum(r["episodes"] for r in records) == len(finished) > 50
    total = sum(r["return_mean"] * r["episodes"] for r in records)
    assert total == pytest.approx(sum(score for score, _ in finished), rel=1e-5)
    lengths = sum(r["episode_length_mean"] * r["episodes"] for r in records)
    assert lengths == pytest.approx(sum(length for _, length in finished), rel=1e-5)


class Fragile(gym_envs.Walk):
    """Raise after 700 steps of all instances together, unless `mended` is set."""

    num_steps, mended = 0, False

    def step(self, action):
        Fragile.num_steps += 1
        if Fragile.num_steps > 700 and not Fragile.mended:
            raise KeyError("wheel")
        return super().step(action)


@pytest.mark.slow
@pytest.mark.parametrize("algo, async_pools", [("ppo", 0), ("ppo", 2), ("dqn", 0)])
def test_environment_failure_saves_run_that_can_resume(algo, async_pools, tmp_path, capsys):
    """With DQN, gradient workers wait for the environment that fails."""
    Fragile.num_steps, Fragile.mended, folder = 0, False, str(tmp_path / "run")
    options = (DQN if algo == "dqn" else SHORT) | dict(env=Fragile, workers=0, async_pools=async_pools)
    with pytest.raises(KeyError, match="wheel") as raised:
        jaxrl_fast.fit(**options, run_dir=folder)
    assert any("raised by the environment: " in note for note in raised.value.__notes__)
    summary = files.read_summary(tmp_path / "run")
    assert summary["status"] == "failed" and "wheel" in summary["failure"]
    assert 0 < summary["env_steps"] < 700
    assert (summary["num_grad_workers"] > 1) == (algo == "dqn" and max_grad_workers() > 1)
    assert f"saved at step {summary['env_steps']}, before the environment failed; resume: " in capsys.readouterr().err
    Fragile.mended = True
    run = jaxrl_fast.fit(resume=folder, env=Fragile, log_level="quiet")
    assert run.summary["status"] == "done" and run.summary["env_steps"] == 1280
    steps = [json.loads(line)["env_steps"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 1280


@pytest.mark.slow
@pytest.mark.skipif(max_grad_workers() == 1, reason="one core, or no C compiler")
def test_gradient_workers_learn_what_one_core_learns(tmp_path):
    """To rounding: environments are stepped once, and each worker has the rollout."""
    options = DQN | dict(env=f"{MODULE}:Walk", workers=0, total_steps=512, log_every=128)
    runs = [jaxrl_fast.fit(**options, devices=n, run_dir=str(tmp_path / f"{n}")) for n in ("auto", 1)]
    assert [run.summary["num_grad_workers"] > 1 for run in runs] == [True, False]
    for one, other in zip(*(run.metrics for run in runs), strict=True):
        assert one["episodes"] == other["episodes"] and one["valid_steps"] == other["valid_steps"]
        for name in ("return_mean", "td_loss", "q_value"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name


@pytest.mark.slow  # three runs
@pytest.mark.skipif(max_grad_workers() == 1, reason="one core, or no C compiler")
def test_run_resumed_on_one_core_has_all_gradient_workers_when_resumed_on_several(tmp_path, monkeypatch):
    folder, options = str(tmp_path / "run"), DQN | dict(env=f"{MODULE}:Walk", workers=0, total_steps=128)
    runs = [jaxrl_fast.fit(**options, run_dir=folder)]
    with monkeypatch.context() as one_core:
        one_core.setattr(build, "max_grad_workers", lambda: 1)
        runs += [jaxrl_fast.fit(resume=folder, total_steps=256)]
    runs += [jaxrl_fast.fit(resume=folder, total_steps=384)]
    workers = [run.summary["num_grad_workers"] for run in runs]
    assert workers == [workers[0], 1, workers[0]] and workers[0] > 1


@pytest.mark.slow
def test_train_command_prints_failed_step_and_user_traceback(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(gym_envs.FAULTS, "late", lambda *outcome: 1 // 0)
    options = f"--env {MODULE}:Walk --env-option fault=late fault_at=60 limit=90 size=99 --run-dir {tmp_path / 'run'}"
    assert train.main(["ppo", *options.split(), *LINE.split(), "--host.workers", "0"]) == 1
    error = capsys.readouterr().err
    line, traceback = error[error.index("error: ") :].split("\n", 1)
    assert line.startswith(f"error: {MODULE}:Walk: step failed in environment 0, episode 1, step 60, action ")
    assert traceback.startswith("Traceback (most recent call last):") and traceback.count("File") == 2
    assert "gym_envs.py" in traceback and traceback.rstrip().endswith(
        "ZeroDivisionError: integer division or modulo by zero"
    )
    assert "site-packages" not in traceback and files.read_summary(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_train_command_prints_invalid_observation_without_traceback(tmp_path, capsys):
    options = f"--env {MODULE}:Walk --env-option fault=nan fault_at=60 limit=90 size=99 --run-dir {tmp_path / 'run'}"
    assert train.main(["ppo", *options.split(), *LINE.split(), "--log-level", "quiet"]) == 1
    error = capsys.readouterr().err
    assert (
        f"error: {MODULE}:Walk: observation must be finite, got [nan, nan] in environment 0, episode 1, step 60"
        in error
    )
    assert "Traceback" not in error


def test_fault_in_first_steps_is_reported_before_run_folder_exists(tmp_path, capsys):
    for fault, status in (("nan", 1), ("raise", 1)):
        options = f"--env {MODULE}:Walk --env-option fault={fault} --run-dir {tmp_path / 'run'}"
        assert train.main(["ppo", *options.split(), *LINE.split()]) == status
        assert f"error: {MODULE}:Walk: " in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_exact_resume_gives_bitwise_equal_agent_state(workers, tmp_path):
    options = SHORT | dict(env=f"{MODULE}:Walk", workers=workers, exact_resume=True, save_every=160)
    options["schedule"] = "constant"  # annealing depends on the length of the run
    whole = jaxrl_fast.fit(**options, run_dir=str(tmp_path / "whole"))
    jaxrl_fast.fit(**(options | dict(total_steps=640)), run_dir=str(tmp_path / "parts"))
    parts = jaxrl_fast.fit(resume=str(tmp_path / "parts"), total_steps=1280, log_level="quiet")
    jax.tree.map(np.testing.assert_array_equal, whole.agent_state, parts.agent_state)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "pqn", "dqn"])
def test_masked_actions_are_never_taken(algo, tmp_path):
    own = {"learning_starts": 500, "replay": {"size": 5000}} if algo == "dqn" else {}
    options = dict(num_envs=8, total_steps=8000, log_level="quiet", loggers=(), run_dir=str(tmp_path / "run"))
    run = jaxrl_fast.fit(algo=algo, env=gym_envs.Guarded, gamma=0.5, **own, **options)
    returns = [r[name] for r in run.metrics for name in ("return_min", "eval_return_min") if r.get(name) is not None]
    assert len(returns) > 5 and min(returns) >= 0, "a forbidden action costs 1000"
    greedy = [r["eval_return_mean"] for r in run.metrics if r.get("eval_return_mean") is not None]
    assert greedy[-1] > 40, "a random policy expects 30, the best one 55"


@pytest.mark.slow
def test_run_with_overlapping_async_worker_pools_completes(tmp_path):
    options = SHORT | dict(env=f"{MODULE}:Walk", workers=1, async_pools=2, overlap=True)
    run = jaxrl_fast.fit(**options, run_dir=str(tmp_path / "run"))
    assert run.summary["status"] == "done" and run.summary["env_steps"] == 1280


@pytest.mark.slow
def test_video_shows_rendered_frames(tmp_path, capsys):
    folder = str(tmp_path / "run")
    jaxrl_fast.fit(**(SHORT | dict(env=f"{MODULE}:Walk", total_steps=64)), run_dir=folder)
    assert video.main([folder]) == 0
    from PIL import Image

    with Image.open(tmp_path / "run" / "video.gif") as shown:
        white = np.asarray(shown.convert("L")) > 250
        assert shown.n_frames > 2 and white.sum(axis=0).max() >= 240, "the white column of 48 rows, scaled by 5"


@pytest.mark.slow
def test_evaluate_accepts_environment_options(tmp_path):
    run = jaxrl_fast.fit(**(SHORT | dict(env=f"{MODULE}:Walk", total_steps=64)), run_dir=str(tmp_path / "run"))
    found = run.evaluate(episodes=4, env_options={"limit": 5})
    assert set(found["seeds"][0]["lengths"]) == {5}  # the walk cannot reach its end in 5 steps
    written = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert written == {name: value for name, value in found.items() if name != "file"}


def findings(env_id, **options):
    return list(env_check.check(env_id, env_check.Options(**({"algo": "none", "steps": 200} | options))))


def problems(env_id, level="fix", **options):
    return [finding.text for finding in findings(env_id, **options) if finding.level == level]


class Unseeded(gym_envs.Walk):
    """An environment whose random generator ignores the seed."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = np.random.default_rng().uniform(-1, 1)
        return self.observe(), {}


class Sharing(gym_envs.Walk):
    """An environment whose reward counts the steps of all instances."""

    total = 0

    def reset(self, *, seed=None, options=None):
        Sharing.total = 0
        return super().reset(seed=seed)

    def step(self, action):
        Sharing.total += 1
        obs, _, *rest = super().step(action)
        return obs, float(Sharing.total), *rest


class Endless(gym_envs.Walk):
    def step(self, action):
        obs, reward, *_ = super().step(action)
        return obs, reward, False, False, {}


class Mislabeled(gym_envs.Walk):
    """An environment that returns its time limit as a termination."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, False, info


@pytest.mark.slow
@pytest.mark.parametrize("env_id", [f"{MODULE}:Guarded", "gymnax/CartPole-v1"])
def test_env_check_reports_no_problem_for_correct_environments(env_id):
    assert problems(env_id) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "says"),
    [
        pytest.param(Unseeded, "the same seed and actions gave a different first observation", id="unseeded"),
        slow(Sharing, "an environment gave a different reward in step 2 alone than next to others", id="sharing"),
    ],
)
def test_env_check_reports_problem_of_faulty_environment(env, says):
    (found,) = problems(env)
    assert says in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "says"),
    [
        (Endless, "none ended in 4 environments of 200 steps each, by random actions; --steps 2000 looks longer"),
        (lambda: Mislabeled(size=99), "every episode terminated after 12 steps"),
    ],
)
def test_what_is_only_likely_is_a_note_of_env_check(env, says):
    assert problems(env) == []
    assert [text for text in problems(env, "note") if says in text]


class Slow(gym_envs.Walk):
    def __init__(self):
        super().__init__(sleep=0.01)


@pytest.mark.slow
def test_check_of_slow_environment_ends_in_time_and_says_what_it_saw():
    """Steps of four environments take 0.04 s together, so 2.25 times 44 of these take 4 s."""
    texts = [finding.text for finding in findings(Slow, steps=1000, max_time=4.0, algo="ppo")]
    seen = re.search(r"4 environments of (\d+) steps each, as many as max_time 4 allows, by random", "\n".join(texts))
    assert seen and 4 <= int(seen[1]) <= 44
    assert [text for text in texts if text.startswith("training     not timed: steps of an update by ppo")]


class Single(gym_envs.Walk):
    """A simulator of which only one can exist at a time."""

    open = False

    def __init__(self):
        super().__init__()
        if Single.open:
            raise ConnectionError("there is a client already")
        Single.open = True

    def close(self):
        Single.open = False


@pytest.mark.slow
def test_check_of_single_simulator_steps_one_environment():
    assert problems(Single) == []
    notes = problems(Single, "note")
    assert (
        "instances    4 environments cannot exist together (ConnectionError: there is a client already); " in notes[0]
    )
    assert not Single.open


def test_check_takes_environment_and_wrappers_as_train_does(capsys):
    env_id, _, first = check.prepare(["--env", f"{MODULE}:Mixed", "--wrap", "hide=camera", "--algo", "none"])
    assert env_id == f"{MODULE}:Mixed" and "joints" in first.text and "camera" not in first.text
    for words in ([], [f"{MODULE}:Mixed", "--env", f"{MODULE}:Walk"]):
        assert check.main(words) == 2
        assert capsys.readouterr().err.startswith("error: env: must be one environment, got ")


@pytest.mark.slow
def test_check_command_prints_findings_and_returns_exit_status(capsys):
    assert check.main([f"{MODULE}:Walk", "--steps", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{MODULE}:Walk" and all(line.startswith(("  ok ", "  note ")) for line in lines[1:])
    assert any("training" in line and "of which the environment takes about" in line for line in lines)
    assert check.main([f"{MODULE}:Walk", "--algo", "none", "--env-option", "fault=raise", "fault_at=9"]) == 1
    assert f"error: {MODULE}:Walk: step failed in environment" in capsys.readouterr().err
    assert check.main([f"{MODULE}:Wolk"]) == 2
    capsys.readouterr()
    assert check.main([f"{MODULE}:Walk", "--algo", "pqo"]) == 2
    found = capsys.readouterr()
    assert found.err.startswith("error: ") and found.err.count("\n") == 1 and not found.out
    assert check.main([f"{MODULE}:Mixed", "--algo", "dqn", "--steps", "50"]) == 0
    assert "note  training     not timed: dqn: requires discrete actions" in capsys.readouterr().out
    assert sys.modules[MODULE] is gym_envs


@pytest.mark.parametrize(("algo", "is_told"), [("none", True), ("ppo", False)])
def test_check_names_num_envs_without_training_as_without_effect(algo, is_told, capsys):
    check.prepare([f"{MODULE}:Walk", "--algo", algo, "--num-envs", "2"])
    assert ("num_envs: has no effect; algo is none" in capsys.readouterr().err) == is_told


class Speechless(Exception):
    """An exception whose text fails: a mistake in a user's own class."""

    def __str__(self):
        return self.code


ERRORS = {
    "memory": MemoryError("unable to allocate"),
    "grpc": RuntimeError("StatusCode.RESOURCE_EXHAUSTED: Received message larger than max"),
    "cancelled": asyncio.CancelledError("connection lost"),
    "speechless": Speechless(),
}


STEP_5 = "step failed in environment [01], episode 1, step 5, action 0"


class Failing(gymnasium.Env):
    """Raises an exception in step 5, but not in the two instances that are tried before training."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(1)
    num_made = 0

    def __init__(self, how: str = ""):
        Failing.num_made += 1
        if how == "made" and Failing.num_made == 4:
            raise ConnectionError("the simulator has a client already")
        self.how, self.is_trial = how, Failing.num_made <= 2

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t == 5 and self.how in ERRORS and not self.is_trial:
            raise ERRORS[self.how]
        return np.zeros(1, np.float32), 1.0, False, self.t == 20, {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "place", "last"),
    [
        ("memory", STEP_5, "MemoryError: unable to allocate"),
        ("grpc", STEP_5, "RuntimeError: StatusCode.RESOURCE_EXHAUSTED: Received message"),
        ("cancelled", STEP_5, "CancelledError: connection lost"),
        ("speechless", STEP_5, "Speechless: <exception str() failed>"),
        ("made", "environment [01] could not be made.*", "ConnectionError: the simulator has a client already"),
    ],
)
def test_any_exception_of_environment_is_shown_with_its_place(how, place, last, tmp_path, capsys):
    """Neither a MemoryError nor a text like JAX's is taken for a program that does not fit into memory."""
    Failing.num_made = 0
    line = f"ppo --env {__name__}:Failing --env-option how={how} --num-envs 2 --host.workers 0 --total-steps 128"
    line += f" --rollout-length 16 --loggers none --eval-episodes 1 --run-dir {tmp_path / 'run'}"
    assert train.main(line.split()) == 1
    said = capsys.readouterr().err.strip().splitlines()
    said = said[next(i for i, words in enumerate(said) if words.startswith("error: ")) :]
    assert re.fullmatch(f"error: {__name__}:Failing: {place}", said[0]) and said[1].startswith("Traceback")
    assert any(last in words for words in said) and len(said) < 14, said
