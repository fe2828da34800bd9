"""Test the use of a trained run: its policy, evaluation and video, and the errors for invalid runs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import gymnax
import jax
import numpy as np
import pytest
from flax.core import FrozenDict
from gymnax.environments.classic_control.cartpole import CartPole
from PIL import Image

import jaxrl_fast
from jaxrl_fast import envs, evaluate
from jaxrl_fast import video as video_
from jaxrl_fast.config import load
from jaxrl_fast.evaluation import episodes, inputs, policy, render, saved_run, video
from jaxrl_fast.metrics import statistics
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.training import evaluator
from jaxrl_fast.types import Discrete, Env, EnvSpec, PolicyInput
from jaxrl_fast.utils import files

ROOT = Path(__file__).parents[2]
TINY = {"loggers": (), "log_level": "quiet", "eval_episodes": 4}
PPO = {"rollout_length": 32, "hidden_sizes": [8]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def cart(place):
    """Return a PPO run on two devices, saved and evaluated halfway."""
    return jaxrl_fast.fit(
        algo="ppo", env="CartPole-v1", num_envs=8, devices=2, total_steps=4096, eval_every=2048, seed=5,
        run_dir=str(place / "cart"), normalize_observations=True, **PPO, **TINY,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two(place):
    """Return a DQN run of two seeds, with a replay."""
    agent = dict(learning_starts=64, replay={"size": 256}, hidden_sizes=[8], batch_size=8)
    return jaxrl_fast.fit(
        algo="dqn", env="CartPole-v1", num_envs=4, total_steps=512, num_seeds=2, seed=1,
        run_dir=str(place / "two"), explore={"end": 0.5, "steps": 64}, **agent, **TINY,
    )  # fmt: skip


@pytest.fixture(scope="module")
def swing(place):
    """Return a PPO run with continuous actions."""
    return jaxrl_fast.fit(
        algo="ppo", env="Pendulum-v1", num_envs=4, total_steps=256, run_dir=str(place / "swing"), **PPO, **TINY
    )


@pytest.mark.slow
def test_load_last_equals_final_agent(cart):
    trained = jaxrl_fast.load(cart, which="last")
    obs = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    wanted = trained.agent.exploit(cart.agent_state, PolicyInput(obs), (), None).action
    action = trained.policy(obs)
    np.testing.assert_array_equal(action, wanted)
    assert len(set(np.asarray(action).tolist())) == 2  # otherwise the comparison would be trivial
    assert (trained.seed, trained.env_steps, trained.settings.algo) == (5, 4096, "ppo")


def test_policy_takes_single_observation(cart):
    trained = jaxrl_fast.load(cart.folder)
    obs = np.random.default_rng(0).normal(size=(4, 4))
    batch = trained.policy(obs)
    assert [int(trained.policy(row)) for row in obs] == batch.tolist()
    assert trained.policy(obs[0].tolist()).shape == ()


@pytest.mark.slow
def test_policy_works_under_jit_and_vmap(cart, swing):
    for run, size in ((cart, 4), (swing, 3)):
        policy = jaxrl_fast.load(run).policy
        obs = np.random.default_rng(0).normal(size=(16, size)).astype(np.float32)
        wanted = np.asarray(policy(obs))
        assert len(np.unique(wanted)) > 1  # otherwise the comparison would be trivial
        for program in jax.jit(policy), jax.vmap(policy):
            np.testing.assert_allclose(program(obs), wanted, rtol=1e-5, atol=1e-7)


def test_policy_returns_actions_in_env_scale(swing):
    """Compare with Pendulum's torque in [-2, 2]; the agent's actions are clipped to [-1, 1]."""
    trained = jaxrl_fast.load(swing)
    obs = 50 * np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    agents = trained.agent.exploit(swing.agent_state, PolicyInput(obs), (), None).action
    np.testing.assert_allclose(trained.policy(obs), 2 * np.clip(agents, -1, 1), rtol=1e-5)
    explored = np.asarray(trained.policy(obs, jax.random.key(0), explore=True))
    assert np.abs(explored).max() == 2  # noise of standard deviation 1 goes beyond


@pytest.mark.slow
def test_policy_explore_requires_key_and_matches_training(two):
    """With epsilon 0.5 and two actions, 3/4 of 601 are greedy, within five standard deviations."""
    trained = jaxrl_fast.load(two)
    obs = np.ones((601, 4))
    with pytest.raises(ValueError, match="requires a PRNG key"):
        trained.policy(obs, explore=True)
    action = np.asarray(trained.policy(obs, jax.random.key(0), explore=True))
    assert abs((action == trained.policy(obs[0])).mean() - 3 / 4) < 5 * np.sqrt(3 / 16 / 601)
    assert (action != trained.policy(obs, jax.random.key(1), explore=True)).any()


EXPLORE = {"env": "Pendulum-v1", "num_envs": 4, "hidden_sizes": [8], "eval_episodes": 4, "log_level": "quiet"}


def explored(policy, obs, num_steps):
    """Return the differences [num_steps, B] of exploring actions from greedy ones, in the environment's scale."""
    memory, found = policy.initial_memory(len(obs)), []
    for i in range(num_steps):
        action, memory = policy(obs, memory, jax.random.key(i), explore=True)
        found.append(np.asarray(action - policy(obs))[:, 0])
    return np.stack(found)


@pytest.mark.slow
def test_exploring_policy_remembers_correlated_noise(tmp_path):
    """Ornstein-Uhlenbeck noise starts at 0 and has standard deviation 0.06 sqrt(1 - 0.85^(2k)) after k steps.

    Pendulum's torque is in [-2, 2]. Without memory each step would have that of the first one.
    """
    run = jaxrl_fast.fit(
        algo="ddpg",
        noise={"kind": "ou", "theta": 0.15, "std": 0.06},
        learning_starts=64,
        batch_size=16,
        total_steps=128,
        loggers=(),
        run_dir=str(tmp_path / "run"),
        **EXPLORE,
    )
    policy, obs = jaxrl_fast.load(run, which="last").policy, np.zeros((4096, 3), np.float32)
    for given in ((jax.random.key(0),), (None, jax.random.key(0))):
        with pytest.raises(
            ValueError, match=r"^policy: explore=True requires the memory .*pass memory=policy.initial_"
        ):
            policy(obs, *given, explore=True)
    noise = explored(policy, obs, 6)
    wanted = 2 * 0.06 * np.sqrt(1 - 0.85 ** (2 * np.arange(1, 7)))
    np.testing.assert_allclose(noise.std(1), wanted, rtol=5 / np.sqrt(2 * 4096))  # five standard errors
    assert np.corrcoef(noise[4], noise[5])[0, 1] == pytest.approx(0.85 * wanted[4] / wanted[5], abs=0.03)
    one, memory = policy(obs[0], policy.initial_memory(), jax.random.key(0), explore=True)
    assert one.shape == (1,) and policy(obs[0]).shape == (1,) and policy(obs[0], memory)[0] == policy(obs[0])


def test_exploring_policy_remembers_noise_of_gsde():
    """The noise is a function of the observation, another one in each environment, drawn again after 3 steps."""
    gsde = {"kind": "gsde", "sample_freq": 3, "log_std_init": -3.0}
    settings = load.from_keywords(None, "ppo", policy=gsde, **EXPLORE)
    env = envs.make("Pendulum-v1", 1)
    agent = saved_run._agent(settings, env, 1)
    made = policy.policy_of(env, 4, agent.policy_state(agent.init(jax.random.key(0))), agent)
    noise = explored(made, np.full((64, 3), 0.5, np.float32), 6)
    for i in (0, 3):
        np.testing.assert_allclose(noise[i + 1 : i + 3], noise[[i, i]], rtol=1e-4, atol=1e-6)
    assert np.abs(noise[3] - noise[0]).min() > 1e-6 and len(np.unique(noise[0])) == 64


@pytest.mark.slow
def test_load_selects_seed_and_skips_replay(two):
    trained = jaxrl_fast.load(two, seed=2, which="last")
    jax.tree.map(
        lambda x, both: np.testing.assert_array_equal(x, both[1]),
        trained.agent_state.learner.params,
        two.agent_state.learner.params,
    )
    assert not jax.tree.leaves(trained.agent_state.replay)  # acting does not require it
    with pytest.raises(ValueError, match=r"^seed: must be 1 to 2, which .* has trained, got 7; leave it out$"):
        jaxrl_fast.load(two, seed=7)
    for wrong in ("1", 1.5):
        with pytest.raises(ValueError, match=rf"^seed: must be a whole number, got {wrong!r}$"):
            jaxrl_fast.load(two, seed=wrong)


@pytest.mark.slow
def test_fit_result_holds_no_replay(two):
    saved, _ = checkpoint.newest(two.folder / "checkpoints")
    replay = sum(x.nbytes for name, x in saved.arrays.items() if name.startswith("agent/replay/"))
    others = sum(x.nbytes for name, x in saved.arrays.items() if name.startswith("agent/learner/params"))
    held = sum(x.nbytes for x in jax.tree.leaves(two.agent_state))
    assert 0 < others < held < replay / 2


@pytest.mark.slow
def test_load_selects_seed_of_sequential_groups(place):
    """Train three seeds of two shards on two groups of two devices; the padding seed is not kept."""
    run = jaxrl_fast.fit(
        algo="ppo", env="CartPole-v1", num_envs=8, devices=2, num_seeds=3, total_steps=2048, eval_every=1024,
        run_dir=str(place / "turns"), num_minibatches=1, **PPO | {"rollout_length": 64}, **TINY,
    )  # fmt: skip
    assert len(run.summary["final_return_per_seed"]) == len(run.evaluate(episodes=4)["seeds"]) == 3
    for seed in range(3):
        one = jaxrl_fast.load(run, seed=seed, which="last").agent_state.params
        jax.tree.map(np.testing.assert_array_equal, one, jax.tree.map(itemgetter(seed), run.agent_state.params))
    kernels = jax.tree.leaves(run.agent_state.params)[-1]
    assert len(kernels) == 3 and len(np.unique(np.asarray(kernels).reshape(3, -1), axis=0)) == 3


@pytest.mark.parametrize(
    "obs", [np.zeros(3), np.zeros((2, 2, 4)), {"a": np.zeros(4)}, np.array("x"), np.zeros(4, complex)]
)
def test_policy_rejects_invalid_observation(cart, obs):
    with pytest.raises(ValueError, match=r"^obs: gymnax/CartPole-v1 observes float32\[4\]") as caught:
        jaxrl_fast.load(cart).policy(obs)
    assert "\n" not in str(caught.value)


def env_of(obs):
    return Env(None, None, EnvSpec("x", obs, Discrete(2), 1))


def test_as_batch_casts_boards_but_not_images():
    bits, frames = (env_of(jax.ShapeDtypeStruct((2, 2), d)) for d in (np.bool_, np.uint8))
    (batch, _), is_one = inputs.as_batch(bits, np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert is_one and batch.dtype == bool and batch.tolist() == [[[False, True], [True, False]]]
    with pytest.raises(ValueError, match=r"uint8\[2, 2\]"):
        inputs.as_batch(frames, np.full((2, 2), 0.5))


def test_as_batch_accepts_tuples_and_mappings():
    """Pass tuples, lists and other mappings."""
    like = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    pair = env_of((like(2), like(2)))
    (batch, _), is_one = inputs.as_batch(pair, ([1.0, 2.0], np.ones(2)))
    assert is_one and [x.tolist() for x in batch] == [[[1, 2]], [[1, 1]]]
    assert not inputs.as_batch(pair, (np.ones((3, 2)), np.ones((3, 2))))[1]
    with pytest.raises(ValueError, match=r"^obs: x observes \('float32\[2\]', 'float32\[2\]'\)"):
        inputs.as_batch(pair, np.ones(2))
    named = env_of({"a": like(2), "b": like()})
    (batch, _), is_one = inputs.as_batch(named, FrozenDict(a=np.ones(2), b=1.0))
    assert is_one and batch["a"].shape == (1, 2) and batch["b"].shape == (1,)


def test_load_which_selects_checkpoint(cart, tmp_path):
    folder = shutil.copytree(cart.folder, tmp_path / "run")
    first, last = checkpoint.folders(folder / "checkpoints")
    for score, best in enumerate((first, last), start=1000):
        checkpoint.mark_best(best, score)
        assert jaxrl_fast.load(folder).checkpoint == best
        assert jaxrl_fast.load(folder, which="last").checkpoint == last
    with pytest.raises(ValueError, match="which: must be 'best' or 'last', got 'newest'"):
        jaxrl_fast.load(folder, which="newest")


def test_load_skips_corrupt_checkpoint_with_warning(cart, tmp_path, capsys):
    folder = shutil.copytree(cart.folder, tmp_path / "run")
    first, last = checkpoint.folders(folder / "checkpoints")
    checkpoint.mark_best(last, 1000.0)
    for which in ("best", "last"):
        (last / checkpoint.ARRAYS).write_bytes(b"x")
        assert jaxrl_fast.load(folder, which=which).checkpoint == first
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "does not match its checksum" in said and first.name in said
    (first / checkpoint.MANIFEST).write_bytes(b"{")
    with pytest.raises(
        ValueError, match=r": needs an intact checkpoint, got 2 damaged checkpoints \(.*\); train again with python -m "
    ):
        jaxrl_fast.load(folder)


def test_run_without_records_has_no_figure(swing, tmp_path):
    folder = shutil.copytree(swing.folder, tmp_path / "run")
    assert "<img" in jaxrl_fast.Run.open(folder)._repr_html_()
    (folder / "metrics.jsonl").unlink()
    run = jaxrl_fast.Run.open(folder)
    assert run.metrics == []
    with pytest.raises(ValueError, match=rf"^{re.escape(str(folder))} has no records of its training") as caught:
        run.plot()
    assert "\n" not in str(caught.value)
    assert "Pendulum" in run._repr_html_() and "<img" not in run._repr_html_()


def test_load_accepts_custom_env(swing, tmp_path):
    folder = shutil.copytree(swing.folder, tmp_path / "run")
    text = (folder / "config.yaml").read_text().replace("gymnax/Pendulum-v1", "no_such_module:Pendulum")
    (folder / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match="no_such_module"):
        jaxrl_fast.load(folder)
    trained = jaxrl_fast.load(folder, env=gymnax.make("Pendulum-v1"))
    assert trained.policy(np.zeros(3)) == jaxrl_fast.load(swing).policy(np.zeros(3))


@pytest.mark.slow
def test_evaluate_matches_plain_loop(cart):
    """Step gymnax one environment at a time from the same first observations, which are CartPole's states."""
    result = cart.evaluate(episodes=4, play_seed=3)
    trained = jaxrl_fast.load(cart)
    _, params = gymnax.make("CartPole-v1")
    env = gymnax.make("CartPole-v1")[0]
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), evaluator.EVAL_FOLD), np.uint32(2**32 - 4))
    four = jaxrl_fast.envs.make("CartPole-v1", 4)
    first = np.asarray(four.reset(jax.random.split(key)[0])[1].obs)
    step = jax.jit(env.step_env)
    returns = []
    for obs in first:
        _, state = env.reset_env(jax.random.key(0), params)
        state = state.replace(x=obs[0], x_dot=obs[1], theta=obs[2], theta_dot=obs[3], time=0)
        score, over = 0.0, False
        while not over:
            obs, state, reward, terminated, _ = step(jax.random.key(0), state, trained.policy(obs), params)
            score += float(reward)
            over = bool(terminated) or bool(env.is_truncated(state, params))
        returns.append(score)
    assert result["seeds"][0]["returns"] == returns == result["seeds"][0]["lengths"]
    assert result["eval_return_mean"] == np.mean(returns) and result["eval_return_std"] == np.std(returns)
    assert (result["eval_return_min"], result["eval_return_max"]) == (min(returns), max(returns))
    assert result["eval_episodes"] == 4 and result["checkpoint"] == trained.checkpoint.name


@pytest.mark.slow
def test_evaluate_reports_each_seed_and_all(two):
    result = two.evaluate(episodes=8)
    assert [each["seed"] for each in result["seeds"]] == [1, 2]
    assert result["eval_episodes"] == 16 and result["policy"] == "greedy"
    assert result["eval_return_mean"] == pytest.approx(np.mean([each["eval_return_mean"] for each in result["seeds"]]))
    explored = two.evaluate(episodes=8, explore=True, seed=2)
    assert explored["policy"] == "exploring" and explored["eval_episodes"] == 8  # two in each of four environments
    assert explored["seeds"][0]["seed"] == 2
    assert explored["seeds"][0]["returns"] != result["seeds"][1]["returns"]


@pytest.mark.slow
def test_evaluate_excludes_diverged_seed_from_total(two, tmp_path, capsys):
    options = episodes.Options(episodes=8)
    saved = episodes.open_run(shutil.copytree(two.folder, tmp_path / "run"), options)
    assert saved.diverged == []
    result = episodes.evaluate_run(saved._replace(diverged=[1]), options)
    lost, well = result["seeds"]
    assert (result["eval_episodes"], lost["eval_episodes"]) == (8, 8)
    assert result["eval_return_mean"] == well["eval_return_mean"] != lost["eval_return_mean"]
    assert capsys.readouterr().err.endswith("exclude those that diverged: seed 1\n")


def test_evaluate_warns_if_file_cannot_be_written(cart, monkeypatch, capsys):
    monkeypatch.setattr(files, "new_file", lambda path: path.parent / "gone" / path.name)
    assert evaluate.main([str(cart.folder), "--episodes", "2"]) == 0
    out, err = capsys.readouterr()
    assert "return" in out and "written" not in out and "could not be written (No such file or directory)" in err


@pytest.mark.slow
def test_evaluate_never_overwrites_file(swing, tmp_path, capsys):
    folder = shutil.copytree(swing.folder, tmp_path / "run")
    assert evaluate.main([str(folder), "--episodes", "2"]) == 0
    before = (folder / "evaluation.json").read_text()
    assert evaluate.main([str(folder), "--episodes", "2", "--play-seed", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert (folder / "evaluation.json").read_text() == before
    first, second = json.loads(before), json.loads((folder / "evaluation-2.json").read_text())
    assert first["seeds"][0]["returns"] != second["seeds"][0]["returns"]
    assert f"{first['eval_return_mean']:.2f}" in said[1] and f"{first['eval_return_low']:.2f}" in said[1]
    assert "evaluation-2.json" in said[-1]


def test_mean_interval_width():
    """Constants have width 0, one training about 1.96 standard errors. Two trainings are resampled as groups."""
    assert statistics.mean_interval([np.full(9, 3.0)]) == (3, 3)
    assert statistics.mean_interval([np.zeros(5), np.full(5, 10.0)]) == (0, 10)
    scores = np.random.default_rng(0).normal(size=400)
    low, high = statistics.mean_interval([scores])
    error = scores.std() / 20
    assert (low - scores.mean()) / error == pytest.approx(-1.96, abs=0.15)
    assert (high - scores.mean()) / error == pytest.approx(1.96, abs=0.15)


def test_mean_interval_memory_is_bounded():
    """All resamples at once would take 2 x 320 MB."""
    scores = np.random.default_rng(0).normal(size=200_000)
    tracemalloc.start()
    try:
        low, high = statistics.mean_interval([scores], num_resamples=200)
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()
    assert low < scores.mean() < high and high - low == pytest.approx(2 * 1.96 / 200_000**0.5, rel=0.3)


@pytest.mark.slow
def test_video_has_frame_per_observation(cart, tmp_path):
    """An episode of n steps with reward 1 has n + 1 observations; here it is cut after 9."""
    made = cart.video(episodes=3, max_steps=9, out=str(tmp_path / "a.gif"), fps=25)
    assert len(made.returns) == 3 and max(made.returns) == 9
    with Image.open(made.path) as image:
        assert image.n_frames == made.num_frames == sum(made.returns) + 3
        assert image.size == (600, 226)
        image.seek(1)
        assert image.info["duration"] == 40
        image.seek(int(made.returns[0]))
        assert image.info["duration"] == 1000 * video.PAUSE_S
    assert "data:image/gif;base64," in made._repr_html_()


@pytest.mark.slow
def test_stream_episodes_yields_policy_observations(cart):
    """Compare each observation with a gymnax step from the one before."""
    trained = jaxrl_fast.load(cart)
    moments = evaluator.stream_episodes(trained.env, trained.agent, trained.agent_state, seed=0)
    env, params = gymnax.make("CartPole-v1")
    now = next(moments)
    assert (now.score, now.length, now.over) == (0, 0, False)
    while not now.over:
        _, state = env.reset_env(jax.random.key(0), params)
        state = state.replace(**dict(zip(("x", "x_dot", "theta", "theta_dot"), now.obs)))
        wanted = env.step_env(jax.random.key(0), state, trained.policy(now.obs), params)[0]
        before, now = now, next(moments)
        np.testing.assert_allclose(now.obs, wanted, rtol=1e-4, atol=1e-6)
        assert (now.score, now.length) == (before.score + 1, before.length + 1)
    assert next(moments).length == 0


@pytest.mark.slow
def test_video_command_never_overwrites_default_file(two, tmp_path, capsys):
    folder = shutil.copytree(two.folder, tmp_path / "run")
    for name in ("video.gif", "video-2.gif"):
        assert video_.main([str(folder), "--max-steps", "3", "--seed", "2"]) == 0
        assert name in capsys.readouterr().out and (folder / name).is_file()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_video_command_leaves_no_file_when_interrupted(number, error, two, monkeypatch):
    """Send the signal while the first frame is written."""
    before, heard = sorted(two.folder.iterdir()), []
    monkeypatch.setattr(video, "write_gif", lambda path, *_: path.touch() or signal.raise_signal(number))
    handler = lambda number, _: heard.append(number)
    previous = signal.signal(number, handler)
    try:
        with pytest.raises(error) as raised:
            video_.main([str(two.folder), "--seed", "2"])
        assert signal.getsignal(number) is handler and not heard
    finally:
        signal.signal(number, previous)
    assert sorted(two.folder.iterdir()) == before
    if error is SystemExit:
        assert raised.value.code == 128 + number


def test_mp4_has_same_frames_as_gif(cart, tmp_path, monkeypatch):
    """Replace imageio-ffmpeg by a generator with its interface: first None, then frames of even size."""
    got = []

    def write_frames(path, size, fps, macro_block_size):
        Path(path).touch()
        while (frame := (yield)) is not None:
            got.append((size, fps, frame))

    monkeypatch.setattr(video, "has_ffmpeg", lambda: True)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace(write_frames=write_frames))
    made = cart.video(max_steps=5, out=str(tmp_path / "a.mp4"), fps=10)
    assert made.num_frames == 6 and made.num_cut == 1
    assert len(got) == 5 + round(10 * video.PAUSE_S)  # the last frame is repeated
    assert all(size == (600, 226) and fps == 10 and frame.shape == (226, 600, 3) for size, fps, frame in got)


@pytest.mark.slow
def test_evaluation_reports_environment_options_that_differ_from_training(cart):
    result = cart.evaluate(episodes=4, env_options={"max_steps_in_episode": 7})
    assert result["eval_length_mean"] == 7
    assert result["differs_from_training"] == {"max_steps_in_episode": 7}
    assert evaluate.lines(result)[0].endswith(" · not as trained: max_steps_in_episode=7")
    same = cart.evaluate(episodes=4)
    assert same["differs_from_training"] == {} and "not as trained" not in evaluate.lines(same)[0]


@pytest.mark.slow
def test_open_env_rejects_environment_options_that_change_observations(tmp_path):
    content = {"algo": "ppo", "env": "envpool/Pong-v5", "protocol": "dqn2015", "meta": {"format": 3}}
    (tmp_path / "config.yaml").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^env_options: must keep the obs .*4.* of training, got .*2"):
        saved_run.open_env(tmp_path, env_options={"stack_num": "2"})
    settings, env = saved_run.open_env(tmp_path, env_options={"noop_max": "5"}, protocol="machado2018")
    assert env.protocol == "machado2018"
    asked = episodes.Options(env_options={"noop_max": "5"}, protocol="machado2018")
    assert episodes.differences(settings.options, asked) == {"noop_max": "5", "protocol": "machado2018"}
    assert episodes.differences(settings.options, episodes.Options(protocol="dqn2015")) == {}


BOTH = [
    ("{}", ["RUN is missing"]),
    ("{} nowhere", ["nowhere: is not a run directory (no config.yaml)"]),
    ("{} cartt", ["did you mean cart?"]),
    ("{} empty", ["empty has no checkpoint", "--resume empty"]),
    ("{} broken", ["broken: needs an intact checkpoint, got 1 damaged checkpoint (", "--config broken/config.yaml\n"]),
    ("{} cart two", ["unexpected argument 'two'"]),
    ("{} cart --episode 3", ["error: episode: ", "did you mean episodes?"]),
    ("{} cart --frobnicate", ["error: frobnicate: ", "python -m jaxrl_fast.{} --help all lists all\n"]),
    ("{} cart --episodes 0", ["error: episodes: ", "at least 1"]),
    ("{} cart --episodes many", ["error: episodes: ", "'many'"]),
    ("{} cart --which bset", ["error: which: ", "did you mean best?"]),
    ("{} cart --seed 6", ["error: seed: must be 5, which cart has trained, got 6; leave it out\n"]),
    ("{} cart --play-seed -1", ["error: play_seed: ", "at least 0"]),
]
MISTAKES = [
    (line.format(name), [w.format(name) for w in words])
    for name, lines in (("evaluate", BOTH), ("video", BOTH[::3]))
    for line, words in lines
]
MISTAKES += [
    ("evaluate cart --against=", ["error: against: must not be empty, got ''; give a value or leave it out"]),
    (f"video cart --out {'x' * 246}.gif", ["error: out: the name xxx", "got 250 characters; use a shorter one"]),
    ("video cart --fps 0", ["error: fps: ", "at least 1"]),
    ("video cart --fps 500", ["error: fps: ", "at most 100"]),
    ("video cart --max-steps 0", ["error: max_steps: ", "at least 1"]),
    ("video cart --out a.avi", ["error: out: must end with .gif or .mp4, got 'a.avi'; rename it\n"]),
    (
        "video cart --out nowhere/a.gif",
        ["error: out: must be in an existing folder, got 'nowhere/a.gif'; create 'nowhere'\n"],
    ),
    ("video cart --out a.mp4", ["error: out a.mp4: ", "pip install ", "[video]", ".gif"]),
    ("video rooms", ["gymnax/FourRooms-misc has no renderer", "CartPole-v1", "Breakout-MinAtar"]),
    ("envs CartPol-v1", ["'CartPol-v1'", "did you mean CartPole-v1"]),
    ("envs --describ", ["error: describ: ", "did you mean describe?"]),
    ("envs a b", ["unexpected argument 'b'"]),
]


@pytest.fixture(scope="module")
def invalid_runs(place, cart, two):
    (place / "empty").mkdir()
    shutil.copy(cart.folder / "config.yaml", place / "empty")
    shutil.copytree(place / "empty", place / "broken")
    (place / "broken" / "checkpoints" / "step-000000000001").mkdir(parents=True)
    shutil.copytree(place / "empty", place / "rooms")
    text = (cart.folder / "config.yaml").read_text().replace("gymnax/CartPole-v1", "gymnax/FourRooms-misc")
    (place / "rooms" / "config.yaml").write_text(text)
    return place


@pytest.mark.slow
@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_invalid_command_line_prints_one_line_and_writes_nothing(line, words, invalid_runs, monkeypatch, capsys):
    from jaxrl_fast.envs import __main__ as listing

    commands = {"evaluate": evaluate, "video": video_, "envs": listing}
    monkeypatch.chdir(invalid_runs)
    monkeypatch.setattr(video, "has_ffmpeg", lambda: False)
    before = sorted(invalid_runs.rglob("*"))
    name, *words_given = line.split()
    assert commands[name].main(words_given) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert sorted(invalid_runs.rglob("*")) == before


class DirectoryChangingCartPole(CartPole):
    """Change the current directory when it is made."""

    def __init__(self):
        super().__init__()
        os.chdir("/")


@pytest.fixture(scope="module")
def leaving(place):
    """Return the name of a run in `place` whose environment changes the current directory."""
    before = os.getcwd()
    jaxrl_fast.fit(
        algo="ppo", env=DirectoryChangingCartPole, num_envs=4, total_steps=256, run_dir=str(place / "leaving"),
        **PPO, **TINY,
    )  # fmt: skip
    os.chdir(before)
    return "leaving"


@pytest.mark.slow
def test_load_finds_relative_folder_of_environment_that_changes_directory(leaving, place, monkeypatch):
    monkeypatch.chdir(place)
    trained = jaxrl_fast.load(leaving)
    assert os.getcwd() == "/" and trained.checkpoint.parts[:2] == (leaving, "checkpoints")


@pytest.mark.slow
def test_evaluate_prints_relative_path_when_environment_changes_directory(leaving, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert evaluate.main([leaving, "--episodes", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "written  leaving/evaluation.json"
    assert os.getcwd() == "/" and (place / leaving / "evaluation.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("out", ["", "mine.gif"])
def test_video_is_relative_to_first_directory_when_environment_changes_it(out, leaving, place, monkeypatch, capsys):
    black = render.Renderer(lambda obs: np.zeros((8, 8, 3), np.uint8), 30)
    monkeypatch.setattr(render, "find", lambda *_: black)
    monkeypatch.chdir(place)
    assert video_.main([leaving, "--max-steps", "2", *(["--out", out] if out else [])]) == 0
    shown = out or "leaving/video.gif"
    assert os.getcwd() == "/" and capsys.readouterr().out.startswith(f"{shown}   3 frames")
    assert (place / shown).stat().st_size


@pytest.mark.parametrize("name", ["evaluate", "video", "plot", "envs"])
def test_help_is_complete_and_does_not_import_jax(name):
    code = (
        f"import sys\nfrom jaxrl_fast.{'envs.__main__' if name == 'envs' else name} import main, USAGE\n"
        "from jaxrl_fast.config.sources import SINGULAR\n"
        "from jaxrl_fast.options.declare import options_of\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
        "print(*('--' + SINGULAR.get(n, n).replace('_', '-') for n in options_of(USAGE.options)))\n"
        "print([m for m in ('jax', 'numpy', 'gymnax', 'flax', 'matplotlib', 'PIL') if m in sys.modules])"
    )
    environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    *said, options, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert all(option in "\n".join(said) for option in options.split())


def test_envs_command_lists_observation_and_action(capsys):
    from jaxrl_fast.envs import __main__ as listing

    assert listing.main(["*-v1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "gymnax/" in line]
    assert ["gymnax/CartPole-v1", "float32[4]", "2", "actions"] in lines
    assert ["gymnax/Pendulum-v1", "float32[3]", "1", "number"] in lines
    assert listing.main(["gymnax/mnist"]) == 0
    assert "gymnax/MNISTBandit-bsuite  cannot be used: it downloads" in capsys.readouterr().out


def test_envs_command_groups_names_by_family(capsys, monkeypatch):
    """Use a backend with families and more environments than are described one by one."""
    from jaxrl_fast import envs
    from jaxrl_fast.envs import __main__ as listing

    names = [f"{kind}-{i}-v1" for i in range(30) for kind in ("Ant", "Bee")]
    backend = SimpleNamespace(registered=lambda: names, family=lambda name: f"zoo.{name[:3].lower()}s")
    monkeypatch.setattr(envs, "BACKENDS", ("zoo",))
    monkeypatch.setattr(envs, "_backend", lambda name: backend)
    monkeypatch.setitem(sys.modules, "jaxrl_fast.envs.zoo", backend)
    assert listing.main([]) == 0
    out = capsys.readouterr().out
    assert "zoo: 60 environments" in out and "ants (30)" in out and "bees (30)" in out
    assert out.index("Ant-29-v1") < out.index("bees") < out.index("Bee-0-v1")
    assert set(names) <= set(out.split()), "no line ends within a name"
