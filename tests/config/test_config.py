"""Test settings: command line, presets and Python have the same names, and a mistake gives a one-line error."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import jaxrl_fast
from jaxrl_fast import evaluate, plot, train, video
from jaxrl_fast.config import cli, load, presets, resume
from jaxrl_fast.config.settings import to_mapping
from jaxrl_fast.config.sources import SINGULAR
from jaxrl_fast.loggers import terminal
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure, options_of
from jaxrl_fast.options.ppo import PPO
from jaxrl_fast.options.run import OF_RUN, same_env
from jaxrl_fast.plotting import compare
from jaxrl_fast.sweep import grid
from jaxrl_fast.training import checks, console, plan, trainer
from jaxrl_fast.utils import locks, memory, parsing
from jaxrl_fast.utils.importing import install

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def parse(line):
    return load.from_command_line(line.split())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("64", 64),
        ("64k", 64_000),
        ("10M", 10_000_000),
        ("1.5M", 1_500_000),
        ("1e6", 10**6),
        ("2_000", 2000),
        ("1B", 10**9),
    ],
)
def test_int_option_accepts_suffixes_exponents_and_underscores(text, number):
    assert parse(f"ppo --total-steps {text}").options.total_steps == number


@given(st.integers(1, 10**9), st.integers(1, 9), st.sampled_from(["k", "M", "B"]))
def test_parse_int_accepts_decimals_with_suffix_only_if_exact(number, digits, suffix):
    """4.1M is an integer, although 4.1 * 1e6 is not in floating point; 4.0000001M is not an integer."""
    text = f"{Decimal(number).scaleb(-digits):f}{suffix}"
    exact = Fraction(number, 10**digits) * {"k": 10**3, "M": 10**6, "B": 10**9}[suffix]
    if exact.denominator == 1:
        assert parsing.parse_int(text) == exact
    else:
        with pytest.raises(ValueError):
            parsing.parse_int(text)


@pytest.mark.parametrize(("text", "seconds"), [("20", 20), ("0.5", 0.5), ("20s", 20), ("1.5min", 90), ("2h", 7200)])
def test_duration_option_accepts_unit(text, seconds):
    assert parse(f"ppo --console-every {text}").options.console_every == seconds


def test_large_int_option_is_exact():
    assert parse("ppo --total-steps 9007199254740993").options.total_steps == 2**53 + 1


def test_option_spellings_are_equivalent():
    lines = (
        "ppo --num-envs 8 --learning-rate 1e-3 --no-clip-vloss --network.hidden-sizes 32 16 --policy state-dependent",
        "ppo --num_envs=8 --learning_rate=1e-3 --clip-vloss false --hidden_sizes 32 16 --policy=state_dependent",
    )
    first, second = map(parse, lines)
    assert first == second
    assert first.options.num_envs == 8
    assert first.agent == configure(
        PPO, learning_rate=1e-3, clip_vloss=False, hidden_sizes=(32, 16), policy="state_dependent"
    )


def test_python_keywords_equal_command_line_options():
    from_python = load.from_keywords(
        "ppo_cartpole",
        num_envs=256,
        total_steps=1_000_000,
        eval_every="10k",
        env_options={"max_steps_in_episode": 200},
        learning_rate=1e-3,
        network={"kind": "mlp", "hidden_sizes": (32,)},
        schedule="constant",
    )
    from_line = parse(
        "--config ppo_cartpole --num-envs 256 --total-steps 1M --eval-every 10k --env-options max_steps_in_episode=200 "
        "--learning-rate 1e-3 --network mlp --network.hidden-sizes 32 --schedule constant"
    )
    as_text = from_line.options.env_options
    assert as_text == {"max_steps_in_episode": "200"}
    options = dataclasses.replace(from_line.options, env_options={"max_steps_in_episode": 200})
    assert from_python == from_line._replace(options=options)


def test_command_line_overrides_preset_which_overrides_defaults(tmp_path):
    preset = tmp_path / "mine.yaml"
    preset.write_text("env: Acrobot-v1\nnum_envs: 8\ntotal_steps: 30k\nlearning_rate: 1e-3\ngamma: 0.5\n")
    settings = parse(f"--config {preset} --num-envs 16 --gamma 0.9")
    assert settings.algo == "ppo"
    assert settings.options.env == "Acrobot-v1"
    assert settings.options.num_envs == 16
    assert settings.options.total_steps == 30_000
    assert settings.agent == PPO(learning_rate=1e-3, gamma=0.9)


def test_preset_reads_date_as_string(tmp_path):
    preset = tmp_path / "dates.yaml"
    preset.write_text("algo: ppo\nenv: CartPole-v1\nrun_dir: 2026-13-45\nproject: 2026-11-24\n")
    options = parse(f"--config {preset}").options
    assert (options.run_dir, options.project) == ("runs/2026-13-45", "2026-11-24")


def test_repeated_member_option_of_evaluate_merges_pairs():
    line = ["a run", "--member", "a=1", "b=2", "--member", "b=3"]
    assert cli.read(evaluate.USAGE, line)[1].member == {"a": "1", "b": "3"}


def test_repeated_env_options_are_merged():
    settings = parse("ppo --env-options a=1 b=x --env-option c=2 --env-option a=3")
    assert settings.options.env_options == {"a": "3", "b": "x", "c": "2"}


@pytest.mark.parametrize("line", ["", "--seed 3", "--num-seeds 4 --loggers none"])
def test_default_task_is_cartpole_until_solved(line):
    settings = parse(line)
    assert settings.by_default
    assert settings.options.env == "gymnax/CartPole-v1"
    assert settings.options.stop_when_solved
    assert settings.options.solved_threshold == 475


@pytest.mark.parametrize("line", ["ppo", "--env Acrobot-v1", "--config ppo_cartpole"])
def test_explicit_task_does_not_stop_when_solved_by_default(line):
    settings = parse(line)
    assert not settings.by_default
    assert not settings.options.stop_when_solved


def test_stop_when_solved_of_default_task_can_be_disabled():
    assert not parse("--no-stop-when-solved").options.stop_when_solved


@pytest.mark.parametrize(
    ("line", "solved"),
    [
        ("--config ppo_acrobot", -100),
        ("--config ppo_acrobot --env Acrobot-v1", -100),
        ("--config ppo_acrobot --env gymnax/Acrobot-v1 --num-envs 8", -100),
        ("--config ppo_acrobot --env CartPole-v1", None),
        ("--config ppo_acrobot --env CartPole-v1 --solved-threshold 475", 475),
    ],
)
def test_preset_solved_threshold_applies_to_its_environment_only(line, solved):
    assert parse(line).options.solved_threshold == solved


def test_environment_instance_drops_solved_threshold_of_preset():
    assert load.from_keywords("ppo_acrobot", env=object()).options.solved_threshold is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("CartPole-v1", "CartPole-v1", True),
        ("CartPole-v1", "gymnax/CartPole-v1", True),
        ("envpool/CartPole-v1", "gymnax/CartPole-v1", False),
        ("CartPole-v1", "gymnax/CartPole-v0", False),
        ("CartPole-v1", "Acrobot-v1", False),
    ],
)
def test_same_env_treats_missing_backend_as_default_backend(one, other, same):
    assert same_env(one, other) == same_env(other, one) == same


def test_preset_threshold_is_kept_when_env_adds_backend_prefix(tmp_path):
    preset = tmp_path / "mine.yaml"
    preset.write_text("env: CartPole-v1\nsolved_threshold: 475\n")
    solved = {
        env: parse(f"--config {preset} --env {env}").options.solved_threshold
        for env in ("gymnax/CartPole-v1", "Acrobot-v1")
    }
    assert solved == {"gymnax/CartPole-v1": 475, "Acrobot-v1": None}


@pytest.mark.parametrize("again", [(1.0, 2.0), [1.0, 2.0], np.array([1.0, 2.0])])
def test_resume_accepts_equal_env_options_as_tuple_list_or_array(again, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "algo: ppo\nenv: CartPole-v1\nenv_options: {goal: [1.0, 2.0]}\nmeta: {format: 3}\n"
    )
    load.from_keywords(resume=str(tmp_path), env_options={"goal": again})
    with pytest.raises(ValueError, match=r"^env_options: a resume cannot change it"):
        load.from_keywords(resume=str(tmp_path), env_options={"goal": (*again[:1], 3.0)})


def test_read_meta_returns_empty_dict_when_meta_is_missing(tmp_path):
    for text in ("algo: ppo\nmeta:\n", "algo: ppo\n"):
        (tmp_path / "config.yaml").write_text(text)
        assert presets.read_meta(tmp_path / "config.yaml") == {}


def test_env_option_named_members_does_not_mark_sweep_part(tmp_path):
    """Only `members` in `meta` marks a part of a sweep."""
    path = tmp_path / "config.yaml"
    text = "algo: ppo\nenv: CartPole-v1\nenv_options:\n  members:\n  - 1\n  - 2\nmeta:\n  format: 3\n  id: 1a2b\n"
    path.write_text(text)
    resumed = load.from_keywords(resume=str(tmp_path))
    assert resumed.options.env_options == {"members": [1, 2]} and resumed.options.resume == str(tmp_path)
    path.write_text(text + "  members:\n  - {seed: 0}\n")
    with pytest.raises(ValueError, match="is a part of a sweep"):
        load.from_keywords(resume=str(tmp_path))


def test_written_settings_are_read_back_as_preset(tmp_path):
    settings = parse(
        "ppo --env Acrobot-v1 --hidden-sizes 8 8 --target-kl 0.01 --memory gru --memory.size 8 --env-options x=1 "
        "--solved-threshold -100"
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_mapping(settings) | {"meta": {"format": 3, "device": "cpu"}}))
    again = parse(f"--config {path}")
    assert again._replace(preset="") == settings


@pytest.mark.parametrize(
    ("protocol", "rewards", "decided", "line", "expected"),
    [
        (
            "dqn2015",
            "sign",
            True,
            "--protocol machado2018",
            "auto",
        ),  # the protocol set it, so the new one sets it again
        ("machado2018", "raw", True, "--protocol dqn2015", "auto"),
        ("dqn2015", "raw", False, "--protocol machado2018", "raw"),  # set explicitly
        ("dqn2015", "sign", True, "--protocol machado2018 --rewards sign", "sign"),
        ("dqn2015", "sign", True, "--num-envs 2", "sign"),
    ],
)
def test_protocol_option_resets_rewards_of_run_config(tmp_path, protocol, rewards, decided, line, expected):
    path = tmp_path / "config.yaml"
    content = {"algo": "ppo", "env": "envpool/Pong-v5", "protocol": protocol, "rewards": rewards}
    meta = {"format": 3, "decided": ["rewards"] * decided}
    path.write_text(yaml.safe_dump(content | {"meta": meta}))
    assert parse(f"--config {path} {line}").agent.rewards == expected
    path.write_text(yaml.safe_dump(content))  # a preset of a user, whose values are explicit
    assert parse(f"--config {path} {line}").agent.rewards == ("sign" if "--rewards" in line else rewards)


@pytest.mark.parametrize(
    ("decided", "expected"),
    [
        (["protocol", "rewards", "replay.storage"], ("", "auto", "auto")),
        (["replay.storage"], ("dqn2015", "sign", "auto")),  # the others were given
    ],
)
def test_other_environment_drops_what_the_run_of_a_config_decided(tmp_path, decided, expected):
    path = tmp_path / "config.yaml"
    content = {"algo": "dqn", "env": "envpool/Pong-v5", "protocol": "dqn2015"}
    content |= {"rewards": "sign", "replay": {"kind": "uniform", "size": 5000, "storage": "disk"}, "num_envs": 4}
    path.write_text(yaml.safe_dump(content | {"meta": {"format": 3, "decided": decided}}))
    of = lambda read: tuple(map(read.value, ("protocol", "rewards", "replay.storage")))
    other = parse(f"--config {path} --env envpool/Breakout-v5")
    assert of(other) == expected and other.options.num_envs == 4 and other.agent.replay.size == 5000
    assert of(parse(f"--config {path}")) == ("dqn2015", "sign", "disk")
    path.write_text(yaml.safe_dump(content))  # a preset of a user, whose values are explicit
    assert of(parse(f"--config {path} --env envpool/Breakout-v5")) == of(parse(f"--config {path}"))


@pytest.mark.parametrize(
    ("line", "decided"),
    [
        ("dqn --env CartPole-v1", ("replay.storage",)),
        ("dqn --env CartPole-v1 --wrap quarantine --replay.storage device", ()),
        ("ppo --env CartPole-v1", ()),
    ],
)
def test_plan_names_options_that_it_decided(line, decided):
    assert plan.validate_plan(parse(f"{line} --num-envs 2")).decided == decided


@pytest.mark.parametrize(("name", "emptied"), [("protocol", ""), ("rewards", "auto")])
def test_check_unchanged_rejects_emptied_protocol_and_rewards(name, emptied):
    """Only a sweep.yaml (`decided=False`) may leave these options to the environment."""
    settings = parse("ppo --env envpool/Pong-v5 --protocol machado2018 --rewards raw")
    before = to_mapping(settings)
    now = settings.replace(**{name: emptied})
    with pytest.raises(ValueError, match=rf"^run/config.yaml: {name} was .* when step was saved, got .*restore the"):
        resume.check_unchanged(now, before, Path("run"), Path("step"))
    resume.check_unchanged(now, before, Path("run"), Path("step"), decided=False)
    resume.check_unchanged(settings, before, Path("run"), Path("step"))


@pytest.mark.parametrize("name", presets.shipped())
def test_shipped_presets_are_read(name):
    settings = parse(f"--config {name}")
    assert settings.preset == name
    assert isinstance(settings.agent, ALGORITHMS[settings.algo])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "rewards"),
    [
        ("ppo --env envpool/Pong-v5", "sign"),
        ("dqn --env envpool/Pong-v5 --protocol dqn2015", "sign"),
        ("pqn --env envpool/Pong-v5 --protocol machado2018", "raw"),
        ("pqn --env envpool/Pong-v5 --protocol machado2018 --rewards sign", "sign"),
        ("ppo --env envpool/Pong-v5 --rewards raw", "raw"),
        ("ppo --env envpool/CartPole-v1", "auto"),
        ("ppo --env CartPole-v1", "auto"),
    ],
)
def test_protocol_sets_default_rewards(line, rewards):
    small = "--num-envs 4 --eval-envs 4 --env-option img_height=36 img_width=36" if "Pong" in line else "--num-envs 4"
    assert plan.validate_plan(parse(f"{line} {small}")).settings.agent.rewards == rewards


def test_help_lists_every_option_without_importing_array_libraries():
    code = (
        "import sys\nfrom jaxrl_fast import train\n"
        "try: train.main(['--config', 'ppo_cartpole', '--num-envs', '77', '--help', 'all'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print([m for m in ('jax', 'numpy', 'gymnax', 'flax', 'matplotlib', 'tensorboardX') if m in sys.modules])"
    )
    environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert said.endswith("[]\n")
    assert "77" in said and "475" in said  # the preset's values, and what overrides them
    options = OF_RUN | options_of(PPO)
    for name in (name for name, option in options.items() if "" not in option.parts):
        assert f"--{SINGULAR.get(name, name).replace('_', '-')} " in said.replace(",", " "), name


# Each entry: a command line, and words of its one-line error message.
MISTAKES = [
    ("-seed 3", ["error: -seed: unknown option; did you mean seed or num_seeds?\n"]),
    ("--config=", ["config: must be a preset or a file, got ''\n"]),
    ("ppo --activation gelu", ["error: activation: ", "'gelu'", "'tanh'", "'relu'"]),
    (
        "ppo --network mlpp",
        ["error: network: must be 'auto' or", " or a class (package.module:Class), got 'mlpp'; did you mean mlp?\n"],
    ),
    ("ppo --env-option num_envs=3", ["gymnax/CartPole-v1 has no option 'num_envs'"]),
    ("ppo --name x", ["error: name: unknown option; did you mean run_dir?\n"]),
    (f"ppo --run-dir {'x' * 300}", ["run_dir", "is not a valid path (File name too long)"]),
    (f"--resume {'x' * 5000}", ["resume", "is not a valid path (File name too long)"]),
    ("ppo --run-dir ~nobody-at-all/run", ["run_dir '~nobody-at-all/run' is not a valid path"]),
    ("ppo --num-envs 1e99", ["num_envs: must be at least 1 and at most 2147483647, got 1e+99"]),
    ("ppo --env os:makedirs --env-option name=made", ["env: os:makedirs", "got none", "fit(env=makedirs)"]),
    ("ppo --total-steps 200B --num-envs 8", ["total_steps: must give at most 2147483647 gradient steps, got "]),
    ("--num-env 3", ["error: num_env: ", "did you mean num_envs"]),
    ("--agent.learning-rate 1", ["agent.learning_rate: unknown option; did you mean learning_rate?\n"]),
    ("ppo --frobnicate", ["frobnicate: unknown option; python -m jaxrl_fast.train --help all lists all\n"]),
    (
        "ppo --network-optins a=1",
        ["error: network_optins: unknown option; did you mean network.options or network.observations?\n"],
    ),
    ("dqn --buffer-size 9", ["buffer_size: unknown option; did you mean replay.size?\n"]),
    ("ppo --lr 1e-3", ["error: lr: unknown option; did you mean learning_rate?\n"]),
    ("dqn --n-steps 3", ["n_steps: unknown option; did you mean replay.n_step?\n"]),
    ("ppo --n-steps 3", ["n_steps: unknown option; did you mean rollout_length?\n"]),
    ("ppo --wandb-project-name x", ["wandb_project_name: unknown option; did you mean project?\n"]),
    ("ppo --hidden-sizes", ["hidden_sizes: needs a value, or several\n"]),
    (
        "ppo --env __main__:Nothing",
        ["was defined in a script's __main__", "pass it from Python, or move it to a module"],
    ),
    ("--algo dqn", ["algo: the algorithm is the first argument; use python -m jaxrl_fast.train dqn\n"]),
    ("ppo --env MinAtar/Breakout-v1", ["did you mean gymnax/Breakout-MinAtar?\n"]),
    ("--preset ppo_pong", ["preset: unknown option; did you mean config?\n"]),
    ("dqn --clip-eps 1", ["clip_eps: unknown option; did you mean bonus.clip?\n"]),
    ("ppo CartPole-v1", ["got 'CartPole-v1' too; use --env 'CartPole-v1'\n"]),
    ("ppo --env ALE/Pong-v5", ["unknown backend 'ALE'", "did you mean envpool/Pong-v5?\n"]),
    ("ppo --env PongNoFrameskip-v4", ["unknown environment", "did you mean envpool/Pong-v5?\n"]),
    ("ppo --env Breakout", ["did you mean Breakout-MinAtar or envpool/Breakout-v5?\n"]),
    ("ppo --env envpool/Pogn-v5", ["unknown environment 'envpool/Pogn-v5'; did you mean envpool/Pong-v5"]),
    (
        "ppo --rollout-length 1 --num-minibatches 4",
        ["num_minibatches: a minibatch must have 2 rows", "4 minibatches of 4 rows", "fewer minibatches"],
    ),
    ("ppo --double", ["double: ppo has no such option; dqn has it\n"]),
    (
        "ppo --network simba --no-layer-norm",
        [
            "no_layer_norm: network simba has no such option, got false; use network auto, mlp, minatar, nature, "
            "dqn2013, impala or MODULE:CLASS\n"
        ],
    ),
    ("ppo --replay-ratio 1", ["replay_ratio: ppo has no such option; dqn, sac, td3, ddpg have it\n"]),
    ("--config clip.yaml", ["clip_coef in clip.yaml: dqn has no such option; ppo has it\n"]),
    ("--no-num-envs", ["no_num_envs: num_envs requires a value, got none; give it one\n"]),
    ("pppo", ["unknown algorithm 'pppo'", "did you mean ppo or reppo?"]),
    ("ppo_pong", ["unknown algorithm 'ppo_pong'", "did you mean --config ppo_pong?"]),
    ("sarsa", ["unknown algorithm 'sarsa'; there are ppo, dqn, pqn"]),
    ("ppo extra", ["'extra'"]),
    ("ppo --num-envs", ["error: num_envs: ", "whole number"]),
    (
        "ppo --seed 0,1,2",
        ["seed: must be a whole number (64, 64k, 10M, 1e6), got '0,1,2'", "python -m jaxrl_fast.sweep takes several\n"],
    ),
    ("ppo --seed 0-4", ["whole number (64, 64k, 10M, 1e6), got '0-4'; python -m jaxrl_fast.sweep takes several\n"]),
    ("ppo --keep-checkpoints 1,2", ["keep_checkpoints: must be a whole number (64, 64k, 10M, 1e6), got '1,2'\n"]),
    (
        "ppo --hidden-sizes 64,64",
        [
            "hidden_sizes: must be a whole number (64, 64k, 10M, 1e6), got '64,64'",
            "separate several by spaces: hidden_sizes 64 64\n",
        ],
    ),
    ("ppo --hidden-sizes [64,64]", ["got '[64,64]'; separate several by spaces: hidden_sizes 64 64\n"]),
    ("ppo --total-steps 1m", ["total_steps: must be a whole number (64, 64k, 10M, 1e6), got '1m'\n"]),
    ("ppo --solved-threshold 1.5K", ["solved_threshold: must be a number or none, got '1.5K'\n"]),
    ("ppo --num-envs 1.5", ["error: num_envs: ", "'1.5'"]),
    ("ppo --num-envs aut", ["error: num_envs: ", "whole number", "'auto'"]),
    (
        "ppo --num-envs auto --num-minibatches 3",
        ["num_envs: no number of environments works, got auto; 1 environment failed: num_minibatches: must "],
    ),
    (
        "ppo --num-envs auto --total-steps 100",
        ["works, got auto; 1 environment failed: 100 steps in total, only 0 updates\n"],
    ),
    ("ppo --num-envs 4 8", ["num_envs: takes one value, got 4 8\n"]),
    ("ppo --num-envs 0", ["error: num_envs: ", "at least 1"]),
    ("ppo --num-envs -4", ["error: num_envs: ", "-4", "at least 1"]),
    (
        "ppo --total-steps 100",
        ["total_steps: must be at least one update of 512 steps (128 steps in each of 4 environments), got 100\n"],
    ),
    ("ppo --seed 2147483648", ["error: seed: ", "2147483647"]),
    ("ppo --seed 2147483647 --num-seeds 2", ["seeds", "2147483647"]),
    ("ppo --stop-when-solved", ["error: stop_when_solved: ", "solved_threshold"]),
    ("ppo --console-every 20m", ["console_every: must be a time (30, 30s, 5min, 2h), got '20m'\n"]),
    ("ppo --log-level loud", ["error: log_level: ", "quiet"]),
    ("ppo --loggers maybe", ["loggers: must be 'tensorboard' or 'wandb' or 'trackio', got 'maybe'\n"]),
    ("ppo --loggers none,wandb", ["error: loggers: must be ", "got 'none'\n"]),
    ("ppo --wandb", ["error: wandb: unknown option; did you mean loggers?\n"]),
    ("ppo --no-tensorboard", ["error: no_tensorboard: unknown option; did you mean loggers?\n"]),
    ("ppo --devices some", ["error: devices: ", "auto"]),
    ("ppo --learning-rate fast", ["error: learning_rate: ", "'fast'"]),
    ("ppo --learning-rate nan", ["error: learning_rate: ", "'nan'"]),
    ("ppo --gamma 1.5", ["error: gamma: ", "at most 1"]),
    ("ppo --num-minibatches 3", ["num_minibatches: must divide the 512 steps", "got 3; use 2 or 4"]),
    ("ppo --env-options horizon", ["'horizon'", "key=value"]),
    ("ppo --env-options max_steps=3", ["max_steps", "max_steps_in_episode"]),
    ("ppo --env CartPole-v2", ["CartPole-v2", "CartPole-v1"]),
    ("--config ppo_cartpol", ["ppo_cartpol", "did you mean ppo_cartpole"]),
    (
        "--config dqn",
        ["config: must be a preset, got the algorithm 'dqn'", "use `train dqn`, or algo='dqn' from Python\n"],
    ),
    ("--config absent.yaml", ["absent.yaml", "ppo_cartpole"]),
    ("--config wrong_key.yaml", ["wrong_key.yaml", "num_env", "num_envs"]),
    ("--config wrong_agent_key.yaml", ["wrong_agent_key.yaml", "gama", "gamma"]),
    ("--config wrong_value.yaml", ["wrong_value.yaml", "num_envs", "'many'"]),
    ("--config broken.yaml", ["broken.yaml", "YAML", "line"]),
    ("--config a_list.yaml", ["error: a_list.yaml: "]),
    ("--config flat_agent.yaml", ["flat_agent.yaml", "agent"]),
    ("--config unknown_algo.yaml", ["sarsa"]),
    ("dqn --env Pendulum-v1", ["gymnax/Pendulum-v1", "dqn", "requires discrete actions, got Box"]),
    *[
        (
            f"{algo} --env CartPole-v1",
            [f"{algo}: requires continuous actions, got Discrete(num=2) of gymnax/CartPole-v1; try dqn, ppo or sac\n"],
        )
        for algo in ("td3", "ddpg")
    ],
    (
        "sac --env Pendulum-v1 --target-entropy-share 0.5",
        ["target_entropy_share: gymnax/Pendulum-v1 has continuous actions", "use target_entropy\n"],
    ),
    ("sac --env CartPole-v1 --noise ou", ["noise: gymnax/CartPole-v1 has discrete actions, got ou; leave it out\n"]),
    *[
        (f"{algo} --env Pendulum-v1 --{option} 0", [f"{option}: must be at least 1{most}, got 0\n"])
        for algo in ("sac", "td3", "ddpg")
        for option, most in (("num_critics", " and at most 1024"), ("policy_delay", ""))
    ],
    (
        "sac --env Pendulum-v1 --replay.size 1k --learning-starts 10k",
        ["learning_starts: must be at most replay.size (1000), got 10000; use 1000 or fewer\n"],
    ),
    ("dqn --replay.size 1000 --batch-size 32", ["learning_starts: must be at most replay.size (1000), got 10000;"]),
    ("dqn --replay.size 10k --num-envs 4096", ["replay.size: must be at least 12288", "4096 environments, got 10000;"]),
    ("dqn --replay.size 10k --n-step 20k", ["replay.size: must be at least", "n_step 20000", "got 10000;"]),
    (
        "dqn --env Breakout-MinAtar --replay.size 1e9",
        ["replay.size: a replay of ", "GB", "got 1000000000; use at most "],
    ),
    (
        "dqn --replay.size 1e9 --replay.storage host",
        ["replay.size: a replay of ", " does not fit with replay.storage host, got 1000000000; use at most "],
    ),
    (
        "dqn --replay.storage disk --num-seeds 2",
        ["replay.storage: must be device for several seeds in one program, got disk; "],
    ),
    ("dqn --value c51 --value.atoms 1", ["value.atoms: must be at least 2"]),
    ("dqn --value c51 --v-min 3 --v-max 3", ["v_min: must be less than v_max (3.0), got 3.0;"]),
    ("sac --target none --tau 0.1", ["tau: target none has no such option, got 0.1; use target average\n"]),
    ("sac --alpha 0.1", ["alpha: unknown option; did you mean temperature?\n"]),
    ("sac --replay.alpha 0.1", ["replay.alpha: replay uniform has no such option, got 0.1; use replay prioritized\n"]),
    ("dqn --alpha 0.1", ["alpha: replay uniform has no such option, got 0.1; use replay prioritized\n"]),
    ("dqn --replay.alpha 0.6", ["replay.alpha: replay uniform has no such option, got 0.6; use replay prioritized\n"]),
    (
        "--config rainbow_cartpole --replay uniform --replay.beta 1",
        ["replay.beta: replay uniform has no such option, got 1; use replay prioritized\n"],
    ),
    ("--config idle.yaml", ["bonus.clip in idle.yaml: bonus none has no such option, got -2; use bonus munchausen\n"]),
    ("ppo --eval-episodes 2e9", ["error: eval_episodes: ", "at most 1000000"]),
    ("dqn --replay-ratio 0.123456789", ["replay_ratio: ", "32 steps", "got 0.123456789; use 0.123456787109375"]),
    ("dqn --bonus munchausen --bonus.clip 1", ["bonus.clip: must be at most 0"]),
    (
        "dqn --devices 2 --num-envs 2 --batch-size 33",
        ["batch_size: must be a multiple of 2, the number of devices, got 33; use 34"],
    ),
    ("dqn --config ppo_cartpole", ["ppo_cartpole", "ppo", "dqn"]),
    ("--config rainbow_cartpol", ["did you mean rainbow_cartpole"]),
    ("pqn --config ppo_cartpole", ["ppo_cartpole", "ppo", "pqn"]),
    ("ppo --run-dir ./taken", ["run_dir: must be a new or empty folder, got taken"]),
    ("ppo --run-dir taken", ["run_dir: must be a new or empty folder, got runs/taken"]),
    ("ppo --run-dir a_list.yaml/run", ["a_list.yaml/run"]),
    ("ppo --save-every 5m", ["save_every: must be environment steps (64k, 1M) or a time (30s, 5min, 2h), got '5m'\n"]),
    ("ppo --no-clip-vloss false", ["no_clip_vloss: takes no value, got 'false'\n"]),
    ("--config empty.yaml", ["empty.yaml: the preset is empty; name options, such as env: CartPole-v1\n"]),
    ("--config taken", ["config: must be a preset or a file, got 'taken'\n"]),
    ("ppo --save-every -64", ["save_every: must be environment steps", "got '-64'"]),
    ("--resume", ["resume: needs a value; give a run directory\n"]),
    ("ppo --run-dir=", ["run_dir: must not be empty, got ''; give a value or leave it out\n"]),
    ("ppo --replay-dir=", ["replay_dir: must not be empty, got ''; give a value or leave it out\n"]),
    (
        "--config members.yaml",
        ["config: a preset cannot hold several values of seed, learning_rate, got 2 members of a sweep in "],
    ),
    (
        "--config goes_on.yaml",
        ["goes_on.yaml: a preset cannot name a run to resume; use python -m jaxrl_fast.train --resume a_run\n"],
    ),
    ("--seed 3 ppo", ["seed: takes one value, got 3 ppo\n"]),
    ("--clip-vloss ppo", ["clip_vloss: must be true or false, got 'ppo'\n"]),
    (
        "ppo --run-dir ./a_run",
        [
            "run_dir: must be a new or empty folder, got a_run; choose another, or resume it with "
            "python -m jaxrl_fast.train --resume a_run\n"
        ],
    ),
    ("--resume nowhere", ["resume nowhere", "no config.yaml"]),
    ("--resume a_rum", ["did you mean a_run?"]),
    (
        "--resume a_sweep",
        ["resume a_sweep: is a sweep, not a run", "use python -m jaxrl_fast.sweep --resume a_sweep\n"],
    ),
    ("--config a_run", ["config: must be a preset, got the run directory 'a_run'; use a_run/config.yaml\n"]),
    ("--config merged.yaml", ["merged.yaml line 2: not readable as YAML (aliases are not supported)\n"]),
    ("--config twice.yaml", ["twice.yaml line 4: not readable as YAML (agent is given twice)\n"]),
    (
        "--config minutes.yaml",
        ["save_every in minutes.yaml: must be environment steps (64k, 1M) or a time (30s, 5min, 2h), got '1:30'"],
    ),
    ("--config twice_told.yaml", ["gamma in twice_told.yaml: given twice; keep one\n"]),
    ("ppo --env-option a=1 a=2", ["env_options: a is given twice; keep one\n"]),
    ("ppo --learning-rate 1e39", ["learning_rate: must be a 32-bit number, got 1e+39\n"]),
    ("ppo --learning-rate 1e-50", ["learning_rate: must be a 32-bit number, got 1e-50\n"]),
    ("--resume broken_run", ["broken_run/config.yaml line 2", "not readable as YAML"]),
    ("--resume a_run --num-envs 3", ["num_envs: a resume cannot change it from 8, got 3\n"]),
    ("--resume a_run --num-envs auto", ["num_envs: a resume cannot change it from 8, got auto\n"]),
    ("ppo --no-network.layer-norm", ["no_network.layer_norm: unknown option; did you mean network.layer_norm?\n"]),
    ("--resume a_run --schedule constant", ["schedule: a resume cannot change it from linear, got constant\n"]),
    (
        "--resume a_run --total-steps 3",
        ["total_steps: must be at least one update of 1024 steps (128 steps in each of 8 environments), got 3\n"],
    ),
    (
        "--resume a_run --config ppo_cartpole",
        ["config: cannot be combined with resume, which continues in the run directory\n"],
    ),
    (
        "--resume a_run --run-dir b",
        ["run_dir: cannot be combined with resume, which continues in the run directory\n"],
    ),
    (
        "ppo --num-envs 100M",
        [
            "num_envs: an update must have at most 2147483647 steps, got 12800000000 (128 steps "
            "in each of 100000000 environments); use fewer environments or a shorter rollout\n"
        ],
    ),
    ("--config dashed.yaml", ["error: --num-envs in dashed.yaml: unknown option; did you mean num_envs?\n"]),
    ("--config of_itself.yaml", ["of_itself.yaml line 1: not readable as YAML (aliases are not supported)\n"]),
    (
        "--config old_run/config.yaml",
        ["old_run/config.yaml: written by an older version of jaxrl_fast (format 2, this is 3); train it again\n"],
    ),
    ("--resume made_of_number", ["made_of_number/config.yaml: `meta` is damaged; restore the file\n"]),
    ("--resume made_a_number", ["made_a_number/config.yaml: `meta` is damaged; restore the file\n"]),
    ("--resume made_of_nothing", ["made_of_nothing/config.yaml: `meta` is damaged; restore the file\n"]),
    (
        "--resume old_run",
        ["resume old_run: written by an older version of jaxrl_fast (format 2, this is 3); train it again\n"],
    ),
    (
        "--resume newer_run",
        ["resume newer_run: written by a newer version of jaxrl_fast (format 4, this is 3); update jaxrl_fast\n"],
    ),
    ("dqn --resume a_run", ["resume a_run: uses algorithm ppo, got dqn; leave dqn out\n"]),
]
FILES = {
    "wrong_key.yaml": "num_env: 3\n",
    "dashed.yaml": "--num-envs: 8\n",
    "of_itself.yaml": "env_options: &x {a: [*x]}\n",
    "wrong_agent_key.yaml": "gama: 0.9\n",
    "clip.yaml": "algo: dqn\nclip_coef: 0.1\n",
    "merged.yaml": "a: &a {gamma: 0.9}\nb: &b {<<: *a, gamma: 0.8}\nalgo: dqn\nagent: {<<: *a, <<: *b}\n",
    "minutes.yaml": "algo: ppo\nenv: CartPole-v1\nsave_every: 1:30\n",
    "twice_told.yaml": "algo: ppo\nagent:\n  gamma: 0.9\nenv: CartPole-v1\ngamma: 0.8\n",
    "twice.yaml": "algo: dqn\nagent:\n  gamma: 0.9\nagent: {learning_rate: 1e-3}\n",
    "idle.yaml": "algo: dqn\nbonus.clip: -2\n",
    "wrong_value.yaml": "num_envs: many\n",
    "broken.yaml": "num_envs: [3\nseed: 1\n",
    "a_list.yaml": "- 1\n- 2\n",
    "flat_agent.yaml": "agent: 3\n",
    "unknown_algo.yaml": "algo: sarsa\n",
    "empty.yaml": "# nothing\n",
    "goes_on.yaml": "resume: a_run\nseed: 3\n",
    "members.yaml": "algo: ppo\nmeta:\n  format: 3\n  members:\n"
    "  - {seed: 0, option.learning_rate: 1e-3}\n  - {seed: 5, option.learning_rate: 4e-3}\n",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    runs = {
        "a_run": "algo: ppo\nnum_envs: 8\nmeta: {format: 3}\n",
        "old_run": "algo: ppo\nmeta: {format: 2}\nagent: {clip: 0.1}\n",
        "newer_run": "algo: ppo\nmeta: {format: 4}\n",
        "broken_run": "num_envs: [3\nseed: 1\n",
        "made_a_number": "algo: ppo\nmeta: 3\n",
        "made_of_number": "algo: ppo\nmeta: {format: 3, decided: 3}\n",
        "made_of_nothing": "algo: ppo\nmeta: {members: []}\n",
    }
    for name, text in runs.items():
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_text(text)
        (folder / name / locks.LOCK).touch()
    (folder / "a_sweep" / "01").mkdir(parents=True)
    (folder / "a_sweep" / "sweep.yaml").touch()
    for taken in (folder / "taken", folder / "runs" / "taken"):
        taken.mkdir(parents=True)
        (taken / "thesis.txt").touch()
    return folder


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_invalid_command_line_prints_one_line_and_writes_nothing(line, words, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    monkeypatch.setattr(trainer, "execute", lambda plan: pytest.fail("it began"))
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 24 * 2**30)
    assert train.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n"), err
    for word in words:
        assert word in err
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("value", "kind"), [(len, "builtin_function_or_method"), ([{"f": len}], "list"), ({(1, 2): 3}, "dict")]
)
def test_fit_rejects_env_options_that_yaml_cannot_store(value, kind, tmp_path):
    """A resume or an evaluation reads the options from config.yaml."""
    with pytest.raises(
        ValueError, match=rf"^env_options: x must be numbers, .* got type {kind}; .*env=MyEnv\(x=...\)$"
    ):
        jaxrl_fast.fit(algo="ppo", env_options={"x": value}, run_dir=str(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["a\0b", "a\nb"])
def test_fit_rejects_null_characters_and_line_breaks_in_names(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^'a.*b' has a (null character|line break) in it; remove it$"):
        jaxrl_fast.fit(algo="ppo", run_dir=text)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("train_with", [jaxrl_fast.fit, jaxrl_fast.sweep])
def test_preset_from_python_must_be_name_or_file(train_with, place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(ValueError, match="must be a preset or a file, got ''"):
        train_with("")
    with pytest.raises(ValueError, match=r"^config\b.*ppo_acrobot"):
        train_with(["ppo_cartpole", "ppo_acrobot"])
    with pytest.raises(ValueError, match="unknown algorithm 'sarsa'"):
        train_with(place / "unknown_algo.yaml")
    assert load.from_keywords(place / "a_run" / "config.yaml").preset == str(place / "a_run" / "config.yaml")


@pytest.mark.parametrize("read", [load.from_keywords, grid.from_keywords])
@pytest.mark.parametrize(
    ("value", "name"), [((i for i in range(2)), "builtins:generator"), (str.join, "builtins:method_descriptor")]
)
def test_value_of_unnamed_type_is_rejected_with_the_name_of_its_type(read, value, name):
    with pytest.raises(ValueError, match=rf"^seed: must be a whole number .*, got {name}$"):
        read("ppo_cartpole", seed=value)


@pytest.mark.parametrize(
    ("given", "folder"),
    [("mine", "runs/mine"), ("./mine", "./mine"), ("a/b", "a/b"), ("/a", "/a"), ("..", ".."), ("~", "~"), ("", "")],
)
def test_bare_word_as_run_dir_is_a_folder_in_runs(given, folder):
    assert load.from_keywords(algo="ppo", run_dir=given).options.run_dir == folder


@pytest.mark.parametrize(
    ("given", "loggers"),
    [
        ("none", ()),
        ([], ()),
        (None, ()),
        ("wandb", ("wandb",)),
        ("tensorboard,trackio", ("tensorboard", "trackio")),
        (["wandb", "trackio"], ("wandb", "trackio")),
    ],
)
def test_loggers_are_words_or_none(given, loggers):
    assert load.from_keywords(algo="ppo", loggers=given).options.loggers == loggers


def test_empty_text_in_preset_is_the_default(place):
    (place / "nameless.yaml").write_text("run_dir: ''\nreplay_dir: ''\n")
    assert load.from_keywords(place / "nameless.yaml").options == load.from_keywords(algo="ppo").options


def test_mapping_as_env_replaces_the_env_of_the_preset():
    assert load.from_keywords("ppo_cartpole", env={"id": 1}).options.env == {"id": 1}  # envs.make refuses it


def test_whole_number_that_no_float_holds_is_rejected_in_one_line():
    with pytest.raises(ValueError, match=r"^num_envs: must be .*, got a number beyond 1e308$"):
        load.from_keywords(algo="ppo", num_envs=10**400)


def test_nearest_run_ignores_private_folders(tmp_path, monkeypatch):
    for name in ("mine", "private"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    stat = os.stat

    def stat_public(path, *args, **kwargs):
        if "private" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat_public)
    assert resume.nearest_with("config.yaml", tmp_path / "mime") == f"; did you mean {tmp_path / 'mine'}?"
    assert resume.nearest_with("config.yaml", tmp_path / "privat") == ""


@pytest.mark.parametrize("nothing", ["", None])
def test_empty_resume_keyword_starts_new_run(nothing):
    assert load.from_keywords(algo="ppo", resume=nothing) == load.from_keywords(algo="ppo")
    assert grid.from_keywords(algo="ppo", resume=nothing) == grid.from_keywords(algo="ppo")


def test_double_dash_ends_options(place, monkeypatch):
    monkeypatch.chdir(place)
    assert load.from_command_line(["--seed", "3", "--", "pqn"]).algo == "pqn"
    with pytest.raises(ValueError, match="has a line break in it"):
        load.from_command_line(["--", "p\nqn"])


def test_env_options_are_written_as_yaml_types():
    options = {"a": np.eye(2), "b": {"c": [1, (2.5, None)], 3: "x"}, "d": True, "e": np.float32(2)}
    settings = load.from_keywords(algo="ppo", env_options=options)
    written = to_mapping(settings)["env_options"]
    assert written == options | {"a": [[1, 0], [0, 1]], "b": {"c": [1, [2.5, None]], 3: "x"}, "e": 2}
    assert yaml.safe_dump(written) and json.dumps(written)


def test_preset_option_of_a_part_that_is_not_chosen_is_refused(tmp_path):
    """An option of the preset's part is dropped where the command line chooses another part."""
    settings = parse("--config rainbow_cartpole --replay uniform --value mean")
    assert settings.value("replay.alpha") is settings.value("value.v_max") is None
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_mapping(settings) | {"meta": {"format": 3}}))
    assert parse(f"--config {path}").agent == resume.of_run(tmp_path).agent == settings.agent
    path.write_text("algo: dqn\nvalue.v_max: 100\n")
    with pytest.raises(
        ValueError, match=rf"^value.v_max in {path}: value mean has no such option, got 100; use value c51$"
    ):
        parse(f"--config {path}")


def test_train_rejects_blank_run_dir(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["ppo", "--run-dir", " "]) == 2
    assert "error: run_dir: must not be empty, got ' '" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_train_rejects_unwritable_run_dir(tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)  # chmod would not affect root
    assert train.main(["ppo", "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Permission denied" in error and "run_dir: " in error


@pytest.mark.parametrize("out", [(), ("--out", "there.png"), ("--out", "new.png")])
def test_plot_rejects_unwritable_output_before_reading_runs(out, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.png").touch()
    closed = (tmp_path.resolve(), tmp_path.resolve() / "there.png")
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).resolve() not in closed)
    monkeypatch.setattr(compare, "find_runs", lambda _: pytest.fail("it began"))
    assert plot.main(["runs", *out]) == 2
    there = str(tmp_path.resolve() / (out[1] if out else "plot.png"))
    said = f"error: out: must be writable, got {there!r} (no permission); choose another file\n"
    assert capsys.readouterr().err == said


def test_video_rejects_unwritable_output(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert video.main([str(tmp_path)]) == 2
    path = str(tmp_path / "video.gif")
    problem = f"out: must be writable, got {path!r} (no permission); choose another file"
    assert capsys.readouterr().err == f"error: {problem}\n"


def test_permission_error_is_printed_in_one_line(capsys):
    def act(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "sweeps/x/.lock")

    assert cli.run_command(lambda argv: argv, act, []) == 1
    assert capsys.readouterr().err == "error: sweeps/x/.lock: cannot be opened (Permission denied)\n"


@pytest.mark.parametrize(("total_steps", "is_told"), [(10_000, True), (10_016, False)])
def test_announce_warns_when_run_ends_before_learning_starts(total_steps, is_told, capsys):
    """16 environments have updates of 16 steps; dqn learns after 10,000 steps, in the next update."""
    settings = load.from_keywords(algo="dqn", num_envs=16, total_steps=total_steps, rollout_length=1)
    console.announce(plan.validate_plan(settings), terminal.QuietConsole())
    assert ("nothing will be learned: gradient steps begin after step 10000" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(("options", "is_told"), [(["16"], False), (["501"], True), (["501", "--tau", "0.1"], False)])
def test_announce_warns_of_several_target_updates_per_update(options, is_told, capsys):
    """The default interval is 500 steps; with 501 environments, one step of each exceeds it."""
    settings = load.from_command_line(["dqn", "--num-envs", *options])
    console.announce(plan.validate_plan(settings), terminal.QuietConsole())
    assert ("target.interval: the target is copied several times" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("--config rainbow_minatar_asterix", True),
        (f"--config {presets.shipped()['rainbow_minatar_asterix']} --seed 3", True),
        ("--config rainbow_minatar_asterix --total-steps 2M", False),  # nobody has tried
        ("--config rainbow_minatar_asterix --solved-threshold 3", False),
        ("--config rainbow_minatar_asterix --env Breakout-MinAtar", False),
        ("--config rainbow_cartpole", False),  # solved by all seeds
        ("--config sac_walker2d", False),  # not published
        ("ppo", False),
    ],
)
def test_preset_warns_if_no_published_seed_has_solved_it(line, is_told):
    settings = load.from_command_line(line.split())
    options = settings.options
    found = presets.warnings(settings.preset, options.solved_threshold, options.total_steps)
    problem = "none of 5 published seeds of rainbow_minatar_asterix reached 15 in 500k steps"
    assert found == (f"solved_threshold: {problem}; train longer or lower it",) * is_told


@pytest.mark.slow
def test_header_has_warning_of_unsolved_preset(capsys):
    settings = load.from_command_line(["--config", "dqn_minatar_freeway"])
    console.announce(plan.validate_plan(settings), terminal.QuietConsole())
    said = "warning: solved_threshold: none of 5 published seeds of dqn_minatar_freeway reached 58 in 3M steps; "
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_train_rejects_tracking_service_that_is_not_installed(service, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks.util, "find_spec", lambda name: None)
    assert train.main(["ppo", "--loggers", service]) == 2
    assert install(service) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_internal_error_is_not_reported_as_user_error(monkeypatch):
    def fail(settings):
        raise ValueError("a bug\nwith a traceback")

    monkeypatch.setattr(plan, "make_plan", fail)
    with pytest.raises(ValueError, match="a bug"):
        train.main(["ppo"])


@pytest.mark.parametrize("program", [evaluate, video])
def test_evaluate_and_video_reject_sweep_folder(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in (("sweep.yaml", ""), ("02/config.yaml", "algo: ppo\n"), ("01/config.yaml", "algo: ppo\n")):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text(text)
        assert program.main(["x"]) == 2
        there = f"use one of its runs, such as x/{name[:2]}" if text else "none of its runs has started"
        assert capsys.readouterr().err == f"error: x: is a sweep, not a run; {there}\n"


def test_help_prints_no_traceback_when_pipe_is_closed():
    """Close the pipe as `--help | head` does."""
    command = [sys.executable, "-m", "jaxrl_fast.train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() in (0, 128 + 13)
