"""Options of `reset`, and a file that says how the episodes of an evaluation begin."""

import re

import gymnasium
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import envs, evaluate
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers
from jaxrl_fast.evaluation import episode_file
from tests.helpers.host_envs import run


class Level(gymnasium.Env):
    """The reward of an episode of `level` + 1 steps is a number that its seed draws. `reset` requires a level."""

    observation_space, action_space = gymnasium.spaces.Box(-9, 9, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.reward = options["level"] + 1, float(self.np_random.integers(1000))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), self.reward, self.left == 0, False, {}


class Bare(Level):
    def reset(self, seed=None):
        return super().reset(seed=seed, options={"level": 0})


ENV = f"{__name__}:Level"


def expected(begins, level):
    """Return the return of each episode, from a plain loop."""
    found = []
    for seed, options in begins:
        env, total, ended = Level(), 0.0, False
        env.reset(seed=seed, options={"level": level} | (options or {}))
        while not ended:
            _, reward, ended, _, _ = env.step(0)
            total += reward
        found.append(total)
    return found


@pytest.mark.unit
def test_reset_gets_options_from_command_line():
    env = envs.make(ENV, 2, HostEnvConfig(workers=Workers(0)), **{"reset.level": "2"})
    _, steps = run(env, np.zeros((6, 2), np.int32))
    env.host.close()
    assert steps.last[:, 0].tolist() == [False, False, True, False, False, False]
    with pytest.raises(ValueError, match=r"^reset\.level: reset of .*:Bare takes no options; leave it out$"):
        envs.make(f"{__name__}:Bare", 1, **{"reset.level": 2})


def test_error_of_reset_without_options_names_the_way_to_pass_them(tmp_path, capsys):
    from jaxrl_fast import train

    line = f"ppo --env {ENV} --num-envs 2 --total-steps 256 --run-dir {tmp_path / 'run'}"
    assert train.main(line.split()) == 1
    first, *shown = capsys.readouterr().err.splitlines()
    remedy = "--env-option reset.KEY=VALUE passes options to reset"
    assert first.endswith(f"reset failed in environment 0, episode 1, reset; {remedy}")
    assert shown[0].startswith("Traceback") and not [words for words in shown if "jaxrl_fast/jaxrl_fast" in words]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("7\n\n 8 \n", ((7, None), (8, None))),
        ('{"seed": 1, "options": {"level": 3}}\n{"options": {}}', ((1, {"level": 3}), (None, {}))),
    ],
)
def test_file_has_a_line_for_each_episode(text, begins, tmp_path):
    (tmp_path / "begins").write_text(text, encoding="utf-8")
    assert episode_file.read(str(tmp_path / "begins")) == begins


@pytest.mark.unit
@pytest.mark.parametrize(
    "line", ["x", "-1", "1.5", "true", "null", "{}", '{"level": 1}', '{"options": 3}', "[1]", str(2**31)]
)
def test_line_that_is_no_begin_is_refused(line, tmp_path):
    (tmp_path / "begins").write_text(f"3\n{line}\n", encoding="utf-8")
    problem = r"^episodes_file: .*begins:2: must be a seed or an object with seed and options, got " + re.escape(line)
    with pytest.raises(ValueError, match=problem):
        episode_file.read(str(tmp_path / "begins"))


@pytest.mark.unit
@pytest.mark.parametrize(("text", "problem"), [(None, r"cannot be read \(No such file"), ("\n", "must have a line")])
def test_file_without_episodes_is_refused(text, problem, tmp_path):
    if text is not None:
        (tmp_path / "begins").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"^episodes_file: {problem}"):
        episode_file.read(str(tmp_path / "begins"))


@pytest.mark.unit
@pytest.mark.parametrize("env", ["gymnax/CartPole-v1", "envpool/CartPole-v1"])
def test_file_is_refused_for_other_environments(env):
    made = envs.make(env, 2)
    with pytest.raises(ValueError, match=f"^episodes_file: {env} "):
        episode_file.with_begins(made, ((1, None),), HostEnvConfig())


def test_evaluation_plays_the_episodes_of_a_file_in_its_order(tmp_path, capsys):
    """Seven episodes in three environments: two of these play further ones, which do not count."""
    trained = jaxrl_fast.fit(
        env=ENV, env_options={"reset.level": 2}, algo="ppo", num_envs=3, rollout_length=8, total_steps=24,
        hidden_sizes=(8,), loggers=(), log_level="quiet", eval_episodes=0, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    begins = [(7, None), (8, {"level": 4}), (7, None), (9, {"level": 0}), (1, None), (2, None), (3, {"level": 1})]
    lines = [f'{{"seed": {seed}, "options": {{"level": {o["level"]}}}}}' if o else str(seed) for seed, o in begins]
    (tmp_path / "begins.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for workers in (0, 2):
        path = trained.folder / "config.yaml"
        path.write_text(re.sub(r"workers: \S+", f"workers: {workers}", path.read_text("utf-8")), encoding="utf-8")
        found = trained.evaluate(episodes_file=str(tmp_path / "begins.jsonl"))
        assert found["seeds"][0]["returns"] == expected(begins, 2)
        assert (found["eval_episodes"], found["eval_truncated"]) == (7, 0)
    assert evaluate.main([str(trained.folder), "--episodes-file", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: episodes_file: cannot be read (No such file or directory), got ")
