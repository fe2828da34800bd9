"""Collecting: the file's steps are those of the evaluation's episodes, in the environment's own form."""

import json
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import envs, evaluate
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.evaluation import collect, episodes
from jaxrl_fast.training import dataset
from jaxrl_fast.types import Transition
from tests.helpers.gym_envs import Slide

TINY = dict(
    algo="ppo", num_envs=2, rollout_length=8, num_minibatches=2, num_epochs=1, hidden_sizes=(8,), eval_episodes=0,
    log_level="quiet",
)  # fmt: skip


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """A run in Python environments whose actions are within -2 and 2, and which end after 12 steps at the latest."""
    folder = tmp_path_factory.mktemp("walk") / "run"
    return jaxrl_fast.fit(env="tests.helpers.gym_envs:Slide", total_steps=64, run_dir=str(folder), **TINY)


def test_steps_replay_in_the_environment(walk, tmp_path):
    """The rewards are those of the evaluation, and each step leads to the next one, also across the noise of Slide."""
    file = tmp_path / "walk.npz"
    result = walk.evaluate(episodes=4, collect=str(file), explore=True)
    data = np.load(file)
    about = json.loads(str(data["metadata"]))
    assert about["env_id"].endswith("Slide") and (about["policy"], about["observations"]) == ("sampled", "raw")
    assert about["algorithm"] == "ppo" and about["env_steps"] == 64
    ends = data["terminations"] | data["truncations"]
    assert ends.sum() == 4 and ends[-1] and not (data["terminations"] & data["truncations"]).any()
    parts = np.split(np.arange(len(ends)), np.flatnonzero(ends)[:-1] + 1)
    [seed] = result["seeds"]
    np.testing.assert_allclose([data["rewards"][part].sum() for part in parts], seed["returns"], rtol=1e-4)
    assert [len(part) for part in parts] == seed["lengths"] and result["collected"]["steps"] == len(ends)
    for part in parts:
        np.testing.assert_array_equal(data["next_observations"][part][:-1], data["observations"][part][1:])
        np.testing.assert_array_equal(data["observations"][part][:, 1], np.arange(len(part)))
        assert data["next_observations"][part[-1], 1] == len(part)  # not the first one of the next episode
    assert (np.abs(data["observations"][:, 0]) < 2).all() and np.abs(data["actions"]).max() <= 2
    assert data["actions"].dtype == np.float32 and data["actions"].shape == (len(ends), 1)
    steps = dataset.load(str(file), envs.make(Slide, 1, HostEnvConfig()))
    np.testing.assert_allclose(2 * steps.action, data["actions"], atol=1e-6)


@pytest.mark.slow
def test_device_environments_have_the_episodes_of_the_evaluation(tmp_path):
    run = jaxrl_fast.fit(env="CartPole-v1", total_steps=64, run_dir=str(tmp_path / "run"), **TINY)
    file = tmp_path / "poles.npz"
    one, two = run.evaluate(episodes=6), run.evaluate(episodes=6, collect=str(file))
    assert one["seeds"] == two["seeds"]
    data = np.load(file)
    assert len(data["rewards"]) == sum(two["seeds"][0]["lengths"]) and data["terminations"].sum() == 6
    env = gymnasium.make("CartPole-v1").unwrapped  # the same physics
    for i in (0, 3):
        env.reset()
        env.state = data["observations"][i].astype(float)
        np.testing.assert_allclose(
            env.step(int(data["actions"][i]))[0], data["next_observations"][i], rtol=1e-3, atol=1e-4
        )


def test_mistakes_are_refused_before_anything_is_made(walk, tmp_path, capsys):
    (tmp_path / "old.npz").write_text("mine")
    run = str(walk.folder)
    lines = {
        "old.npz": "must be a new file, got {0}/old.npz, which exists; choose another name",
        "data.hdf5": "must end with .npz, got '{0}/data.hdf5'; rename it",
        "none/data.npz": "must be in an existing folder, got '{0}/none/data.npz'; create '{0}/none'",
    }
    for name, line in lines.items():
        assert evaluate.main([run, "--collect", f"{tmp_path}/{name}"]) == 2
        assert capsys.readouterr().err == f"error: collect: {line.format(tmp_path)}\n"
    assert (tmp_path / "old.npz").read_text() == "mine" and not (walk.folder / "evaluation-9.json").exists()


def steps_of(rows):
    """Steps of (environment, time, discount, last), each observed as its number, as `play` keeps them in blocks."""
    found = []
    for block in rows:
        env, time, discount, last = (np.array(x) for x in zip(*block, strict=True))
        obs = 10 * env + time
        row = Transition(obs, obs, 1.0 * obs, discount.astype(np.float32), last.astype(bool), env == env, None)
        found.append((collect.Steps(row, obs + 1, env == env), env, time))
    return found


def test_steps_are_in_order_and_the_last_one_of_an_open_episode_is_truncated():
    """Environment 1 terminates at time 1, resets at time 2, and is cut off at 4. Environment 0 fails at time 2."""
    first = [(0, 0, 1, 0), (1, 0, 1, 0), (0, 1, 1, 0), (1, 1, 0, 1)]
    arrays = collect.in_order(steps_of([first, [(1, 3, 1, 0), (0, 3, 1, 1), (1, 4, 1, 0)]]))
    assert arrays["observations"].tolist() == [0, 1, 3, 10, 11, 13, 14]
    assert arrays["terminations"].tolist() == [False] * 4 + [True, False, False]
    assert arrays["truncations"].tolist() == [False, True, True, False, False, False, True]
    assert arrays["next_observations"].tolist() == [1, 2, 4, 11, 12, 14, 15] and "action_masks" not in arrays


def saved_run(**changes):
    spec = SimpleNamespace(
        id="gymnax/Big", players=(), obs=np.zeros(10**6, np.float32), action=SimpleNamespace(zeros=lambda: np.zeros(1))
    )
    return SimpleNamespace(**dict(env=SimpleNamespace(spec=spec), seeds=[0], start=".", folder=None) | changes)


def test_episodes_that_do_not_fit_are_refused(monkeypatch, tmp_path):
    """Two observations of 4 MB in each of 50 steps of 100 episodes are 40 GB, and three copies put them in order."""
    (tmp_path / "summary.json").write_text('{"eval_length_mean": 50}')
    options = episodes.Options(episodes=100, collect=str(tmp_path / "x.npz"))
    saved = saved_run(folder=tmp_path, start=collect.files.current_folder())
    free = lambda memory: monkeypatch.setattr(collect, "host_free_bytes", lambda: memory)
    for enough in (121 * 10**9, None):
        free(enough)
        collect.check_run(saved, options)
    free(20 * 10**9)
    message = r"^collect: 100 episodes of gymnax/Big need about 120.0 GB of memory, got 20.0 GB free; use 16 episodes"
    with pytest.raises(ValueError, match=message):
        collect.check_run(saved, options)
    saved.seeds.append(1)
    with pytest.raises(ValueError, match=r"^collect: takes the policy of one seed, got 2; add seed 0$"):
        collect.check_run(saved, options)
    saved.env.spec.players = ("left", "right")
    with pytest.raises(ValueError, match=r"^collect: requires an environment without players"):
        collect.check_run(saved, options)


def test_longer_episodes_than_expected_stop_with_status_1(walk, tmp_path, monkeypatch, capsys):
    """Nothing is written if memory runs out while episodes are played."""
    free = [10**9, 3000]
    monkeypatch.setattr(collect, "host_free_bytes", lambda: free.pop(0))
    assert evaluate.main([str(walk.folder), "--collect", f"{tmp_path}/x.npz", "--episodes", "8"]) == 1
    line = capsys.readouterr().err
    start = f"error: {tmp_path}/x.npz: cannot be written (the steps need more than "
    assert line.startswith(start) and "; use " in line
    assert not [*tmp_path.iterdir()]
