"""Test sweeps: combinations are expanded, validated and run once each; one table holds the results."""

import csv
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from gymnax.environments.classic_control.cartpole import CartPole

import jaxrl_fast
from jaxrl_fast import evaluate
from jaxrl_fast.config import load
from jaxrl_fast.config.population import Member, by_member
from jaxrl_fast.parallel import placement
from jaxrl_fast.plotting import sweep_figures
from jaxrl_fast.runs import checkpoint, files
from jaxrl_fast.sweep import __main__, directory, grid, prepare, runner, slurm, worker
from jaxrl_fast.sweep import report as sweep_report
from jaxrl_fast.sweep import table as sweep_table
from jaxrl_fast.training import memory, trainer
from jaxrl_fast.types.host import HostEnv
from jaxrl_fast.utils import locks, signals
from jaxrl_fast.utils.importing import install
from tests.helpers.sweeps import TINY, Pretence

ROOT = Path(__file__).parents[2]


def ask(line):
    return grid.from_command_line(line.split())


def sizes(line):
    return [len(group.members) for group in ask(line).groups]


# Groups that share a program


def test_grid_groups_seeds_and_floats_but_not_integers():
    asked = ask("ppo --num-envs 1,8 --learning-rate 1e-4,1e-3 --seed 0..4")
    assert [g.settings.options.num_envs for g in asked.groups] == [1, 8]
    assert asked.columns == ("num_envs", "learning_rate")
    rates = [m.values["learning_rate"] for m in asked.groups[0].members]
    assert rates == [1e-4] * 5 + [1e-3] * 5
    assert [m.seed for m in asked.groups[1].members] == [0, 1, 2, 3, 4] * 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ppo --seed 3,11,7", [3]),
        ("ppo --num-seeds 4", [4]),
        ("ppo --gamma 0.9,0.99 --schedule linear,constant", [2, 2]),
        ("ppo --max-grad-norm 0,0.5,1", [1, 2]),  # 0 removes code from the program
        ("ppo --target-kl none,0.01,0.02", [1, 2]),
        ("dqn --replay-ratio 0.1,0.2", [1, 1]),  # counted exactly
        ("dqn --explore.end 0,0.05 --batch-size 32,64", [2, 2]),
        ("ppo --env CartPole-v1,Acrobot-v1 --seed 0,1", [2, 2]),
        ("ppo --hidden-sizes 64 64,128", [1, 1]),
        ("ppo --seed 1k..1002,5", [4]),
    ],
)
def test_grid_group_sizes(line, expected):
    assert sizes(line) == expected


def test_grid_keeps_tuple_as_one_value():
    groups = ask("ppo --hidden-sizes 64 64,128").groups
    assert [g.settings.agent.network.hidden_sizes for g in groups] == [(64, 64), (128,)]


def test_group_settings_are_those_of_first_member():
    (group,) = ask("ppo --clip-coef 0.1,0.3 --seed 5,2").groups
    assert group.settings.options.seed == 5 and group.settings.options.num_seeds == 4
    assert group.settings.agent.clip_coef == 0.1
    later = grid.part(group, group.members[3:])
    assert later.settings.agent.clip_coef == 0.3 and later.settings.options.seed == 2


def test_from_keywords_equals_command_line():
    line = "--config ppo_cartpole --num-envs 64,256 --seed 0..4 --learning-rate 1e-4,1e-3 --scale minibatches"
    rates = np.array([1e-4, 1e-3])
    asked = grid.from_keywords(
        "ppo_cartpole", num_envs=[64, 256], seed=range(5), learning_rate=rates, scale="minibatches"
    )
    assert asked == ask(line)
    assert grid.from_keywords("ppo_cartpole", num_envs=[64, 256], agent={"learning_rate": rates}) == ask(
        "--config ppo_cartpole --num-envs 64,256 --learning-rate 1e-4,1e-3"
    )
    hidden = grid.from_keywords(algo="ppo", hidden_sizes=[(64, 64), (128,)]).groups
    assert [g.settings.agent.network.hidden_sizes for g in hidden] == [(64, 64), (128,)]
    (group,) = grid.from_keywords(algo="ppo", network={"kind": "mlp", "hidden_sizes": (64, 32)}).groups
    assert group.settings.agent.network.hidden_sizes == (64, 32)


def test_sweep_defaults_are_overridden_by_user():
    assert ask("ppo").groups[0].settings.options.on_nonfinite == "continue"
    assert ask("ppo --on-nonfinite stop").groups[0].settings.options.on_nonfinite == "stop"
    assert ask("ppo").groups[0].settings.options.loggers == ()
    assert ask("ppo --loggers tensorboard").groups[0].settings.options.loggers == ("tensorboard",)


def test_grid_last_occurrence_of_option_wins():
    clip_vloss = lambda line: [g.settings.agent.value.clip_vloss for g in ask(f"ppo {line}").groups]
    assert clip_vloss("--clip-vloss true,false --no-clip-vloss") == [False]
    assert clip_vloss("--no-clip-vloss --clip-vloss true,false") == [True, False]
    schedule = lambda line: [g.settings.agent.schedule.kind for g in ask(f"ppo {line}").groups]
    assert schedule("--schedule linear,constant --schedule constant") == ["constant"]
    assert schedule("--schedule constant --schedule linear,constant") == ["linear", "constant"]
    assert ask("ppo --seed 0..4 --seed 7").groups[0].members == (Member(7),)


def test_grid_validates_options_per_combination():
    """Check that --stop-when-solved accepts --solved-threshold as a varied option."""
    asked = ask("ppo --env CartPole-v1 --stop-when-solved --solved-threshold 400,475")
    assert [g.settings.options.solved_threshold for g in asked.groups] == [400, 475]
    assert asked.base_num_envs == 4


def test_grid_defaults_to_preset_shown_in_help():
    settings = ask("--seed 0..4").groups[0].settings
    single = load.from_command_line([])
    assert settings.agent == single.agent and settings.preset == single.preset == "ppo_cartpole"
    names = ("env", "num_envs", "total_steps", "solved_threshold", "stop_when_solved")
    assert [getattr(settings.options, n) for n in names] == [getattr(single.options, n) for n in names]


# Scaling with the number of environments


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [
        ("learning-rate-linear", "learning_rate", [1.25e-4, 5e-4, 2e-3]),  # 5e-4 x (4, 16, 64) / 16
        ("learning-rate-sqrt", "learning_rate", [2.5e-4, 5e-4, 1e-3]),  # 5e-4 x (1/2, 1, 2)
        ("minibatches", "num_minibatches", [2, 8, 32]),  # 8 x (1/4, 1, 4)
        ("none", "learning_rate", [5e-4, 5e-4, 5e-4]),
    ],
)
def test_scaling_rules_start_from_preset(rule, name, expected):
    """Use a preset with 16 environments, learning rate 5e-4 and 8 minibatches of 128 x 16 / 8 = 256 rows."""
    asked = ask(f"--config ppo_cartpole --num-envs 4,16,64 --scale {rule}")
    assert [getattr(g.settings.agent, name) for g in asked.groups] == pytest.approx(expected)
    assert asked.base_num_envs == 16
    assert (name in asked.columns) == (rule != "none")


def test_scale_minibatches_is_at_least_one():
    asked = ask("--config ppo_cartpole --num-envs 1 --scale minibatches")
    assert asked.groups[0].settings.agent.num_minibatches == 1


# Invalid command lines


MISTAKES = [
    ("ppo --no-clip-vloss true,false", ["no_clip_vloss: takes no value, got 'true,false'\n"]),
    (
        "ppo --stop-when-solved --solved-threshold none,475",
        ["stop_when_solved: needs a solved_threshold, got none; set solved_threshold\n"],
    ),
    ("ppo --num-envs 1,,2", ["error: num_envs: ", "empty value", "'1,,2'"]),
    ("ppo --seed 4..0", ["error: seed: ", "the smaller number of a range comes first, got 4..0"]),
    ("ppo --seed 0..1M", ["error: seed: ", "10000"]),
    ("ppo --seed 0..999 --num-envs 1..999", ["999000 combinations"]),
    ("ppo --seed 1,2,1e0", ["seed: has 1 twice"]),
    ("ppo --seed 0-4", ["seed: must be a range such as 0..4, got '0-4'"]),
    ("ppo --env CartPole-v1,gymnax/CartPole-v1", ["env: has gymnax/CartPole-v1 twice; keep one"]),
    ("ppo --dry-run", ["dry_run: cannot be combined with a sweep; use it with train"]),
    ("ppo --gamma 0.9,0.90", ["gamma: has 0.9 twice"]),
    ("ppo --gamma 0.9,1.5", ["error: gamma: ", "at most 1"]),
    ("ppo --seed 0,1 --num-seeds 3", ["num_seeds 3", "seed"]),
    ("ppo --run-dir x", ["error: run_dir: ", "sweep_dir"]),
    ("dqn --scale minibatches", ["scale minibatches", "dqn", "ppo and pqn"]),
    ("--config ppo_cartpole --num-envs 3 --scale minibatches", ["got 1.5 for 3", "multiple of 16"]),
    ("ppo --retry", ["error: retry: ", "resume"]),
    ("ppo --slurm-option timeout_min=3", ["slurm_options: needs launcher slurm\n"]),
    ("ppo --launcher slurm --workers 2", ["workers: must be 1 with launcher slurm"]),
    ("ppo --name x", ["error: name: cannot be combined with a sweep; use sweep_dir\n"]),
    ("dqn --v-min -1,0", ["v_min: value mean has no such option, got -1,0; use value c51\n"]),
    (f"ppo --sweep-dir {'x' * 300}", ["sweep_dir 'sweeps/xxx", "is not a valid path (File name too long)"]),
    ("ppo --sweep-dir ~nobody-at-all/x", ["sweep_dir '~nobody-at-all/x' is not a valid path"]),
    ("--resume no_members", ["no_members/sweep.yaml is not a valid sweep file"]),
    ("--resume elsewhere", ["elsewhere/sweep.yaml is not a valid sweep file"]),
    ("--resume deep", ["deep/sweep.yaml is not a valid sweep file (RecursionError)"]),
    ("--resume numeric", ["env: must be an id, such as 'CartPole-v1', or an environment, got 3"]),
    ("ppo --sweep-dir=", ["sweep_dir: must not be empty, got ''; give a value or leave it out"]),
    ("ppo --sweep-dir taken", ["sweep_dir: the folder sweeps/taken exists and is not a sweep"]),
    ("--resume sweeps/a_swep", ["the folder has no sweep.yaml; did you mean sweeps/a_sweep?"]),
    (
        "--resume a_run",
        ["a_run: the folder has no sweep.yaml", "it is a run, resume it with", ".train --resume a_run\n"],
    ),
    (
        "--resume sweeps/a_sweep/01",
        ["it is part of a sweep, resume that with python -m jaxrl_fast.sweep --resume sweeps/a_sweep\n"],
    ),
    ("--resume nowhere", ["resume nowhere", "has no sweep.yaml"]),
    ("--resume=", ["resume: must be a sweep directory, got ''"]),
    ("ppo --sweep-dir sweeps/taken", ["sweep_dir: the folder sweeps/taken exists", "choose another"]),
    ("--resume broken", ["broken/sweep.yaml"]),
    ("--resume no_groups", ["no_groups/sweep.yaml is not a valid sweep file"]),
    ("--resume a_sweep --config ppo_cartpole", ["config: cannot be combined with resume"]),
    ("ppo --resume a_sweep", ["ppo: cannot be combined with resume"]),
    ("--resume a_sweep --scale minibatches", ["scale: cannot be combined with resume"]),
    ("ppo --sweep-dir a_sweep --num-envs 1,16", ["a_sweep holds a different sweep", "num_envs"]),
    (
        "ppo --sweep-dir a_sweep --memory gru,none",
        ["a_sweep holds a different sweep (num_envs, memory.size, memory differ)"],
    ),
    (
        "ppo --num-envs 8,64 --num-minibatches 1,3",
        ["num_envs 8, num_minibatches 3: num_minibatches: must divide", "got 3;"],
    ),
    (
        "dqn --num-envs 8,4096 --replay.size 10k",
        ["num_envs 4096: replay.size: must be", "4096 environments, got 10000;"],
    ),
    ("ppo --env CartPole-v1,CartPole-v2", ["env CartPole-v2", "CartPole-v1"]),
    (
        "dqn --env Breakout-MinAtar --num-envs 8,16 --replay.size 1e9",
        ["num_envs 8", "replay.size: a replay of ", "use at most "],
    ),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "sweeps" / "taken" / "01").mkdir(parents=True)
    (folder / "broken").mkdir()
    (folder / "broken" / "sweep.yaml").write_text("format: 3\ngroups: 3\n")
    asked = ask("ppo --num-envs 1,8")
    groups = dict(prepare._with_names(asked.columns, list(asked.groups)))
    prepare._create(asked, groups, folder / "sweeps" / "a_sweep", Path())
    content = yaml.safe_load((folder / "sweeps" / "a_sweep" / "sweep.yaml").read_text())
    for run in (folder / "a_run", folder / "sweeps" / "a_sweep" / "01"):
        run.mkdir()
        (run / "config.yaml").write_text("algo: ppo\n")
    (folder / "no_groups").mkdir()
    (folder / "no_groups" / "sweep.yaml").write_text(yaml.safe_dump(content | {"groups": []}))
    (folder / "deep").mkdir()
    (folder / "deep" / "sweep.yaml").write_text("[" * 5000)
    numeric = {"config": content["groups"][0]["config"] | {"env": 3}}
    for name, wrong in (("no_members", {"members": []}), ("elsewhere", {"folder": "../x"}), ("numeric", numeric)):
        (folder / name).mkdir()
        bad = content | {"groups": [content["groups"][0] | wrong]}
        (folder / name / "sweep.yaml").write_text(yaml.safe_dump(bad))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_invalid_command_line_prints_one_line_and_writes_nothing(line, words, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    monkeypatch.setattr(runner, "execute", lambda sweep: pytest.fail("a training started"))
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 24 * 2**30)
    assert __main__.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith("\n"), err
    for word in words:
        assert word in err
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"seed": []}, "seed: needs at least one value"),
        ({"num_envs": [8, 8]}, "num_envs: has 8 twice"),
        ({"gama": [0.9]}, r"^gama: unknown option; did you mean gamma\?$"),
        ({"agent": "gamma"}, "agent: must map the algorithm's options to values, got 'gamma'"),
        ({"num_seeds": [1, 2]}, "^num_seeds: takes one value, got 1 2$"),
    ],
)
def test_from_keywords_raises_same_messages(keywords, words):
    with pytest.raises(ValueError, match=words):
        grid.from_keywords(algo="ppo", **keywords)


def test_from_keywords_accepts_env_with_params():
    """Pass a pair as one value and a list of pairs as several."""
    env, params = CartPole(), CartPole().default_params
    asked = grid.from_keywords(algo="ppo", env=(env, params), seed=[0, 1])
    assert [group.settings.options.env for group in asked.groups] == [(env, params)]
    assert len(grid.from_keywords(algo="ppo", env=[(env, params), CartPole]).groups) == 2


def test_slurm_launcher_requires_submitit_and_sbatch(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm.util, "find_spec", lambda name: None)
    assert __main__.main(["ppo", "--launcher", "slurm"]) == 2
    assert install("slurm") in capsys.readouterr().err
    monkeypatch.setattr(slurm.util, "find_spec", lambda name: name)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert __main__.main(["ppo", "--launcher", "slurm"]) == 2
    assert "sbatch was not found" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_does_not_import_jax():
    code = (
        "import sys\nimport jaxrl_fast.sweep.__main__ as command\n"
        "try: command.main(['--config', 'ppo_cartpole', '--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print([m for m in ('jax', 'numpy', 'gymnax', 'matplotlib') if m in sys.modules])"
    )
    environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert said.stdout.endswith("[]\n")
    for name in ("--scale", "--workers", "--launcher", "--sweep-dir", "--num-envs", "--learning-rate"):
        assert name in said.stdout


def test_help_shows_sweep_defaults(capsys):
    """Check the defaults that differ from those of a single run."""
    for words in (["--help", "all"], ["--config", "ppo_cartpole", "--help", "all"], ["dqn", "-h", "all"]):
        with pytest.raises(SystemExit) as end:
            __main__.main(words)
        assert end.value.code == 0
        said = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert re.search(r"--loggers \S+ (?:(?!--|default).)* --", said), words  # without a default: none
        for name, value in (("on-nonfinite", "continue"), ("console-every", "10.0")):
            line = rf"--{name} (?:(?!--).)*\(default: {re.escape(value)}[,)]"
            assert re.search(line, said), (words, name)


@pytest.mark.slow
def test_train_rejects_resume_of_sweep_group(swept):
    with pytest.raises(ValueError, match=r"part of a sweep; use python -m jaxrl_fast.sweep --resume"):
        load.from_command_line(["--resume", str(swept.folder / "01_num_envs-2")])


# The folder


def test_read_plan_inverts_create(place):
    asked = ask("ppo --num-envs 1,8")
    read = directory.read_plan(place / "sweeps" / "a_sweep")
    assert list(read.groups) == ["01_num_envs-1", "02_num_envs-8"]
    assert [g._replace(settings=g.settings._replace(preset="")) for g in read.groups.values()] == list(asked.groups)


def test_split_to_fit_splits_by_free_memory(monkeypatch):
    """Split seven members of which three fit at once into three parts with their own first members."""
    asked = ask(TINY + " --num-envs 2 --clip-coef 0.1,0.2,0.3,0.4,0.5,0.6,0.7")
    (group,) = asked.groups
    assert len(prepare.split_to_fit(group, asked.columns)) == 1
    ready = prepare.plan.validate_plan(grid.part(group, group.members[:1]).settings)
    one = memory.estimate(ready.env, ready.agent).total + memory.rollout_bytes(ready.env, ready.agent)
    assert ready.placement.num_shards == 1
    monkeypatch.setattr(memory, "free_bytes", lambda _=1: 7 * one + 10)  # on four devices seven are trained as eight
    assert [len(part.members) for part in prepare.split_to_fit(group, asked.columns)] == [3, 4]
    monkeypatch.setattr(memory, "free_bytes", lambda _=1: 3 * one + 10)
    parts = prepare.split_to_fit(group, asked.columns)
    assert [len(part.members) for part in parts] == [2, 2, 3]
    assert [part.settings.agent.clip_coef for part in parts] == [0.1, 0.3, 0.5]
    monkeypatch.setattr(memory, "free_bytes", lambda _=1: 10)
    with pytest.raises(ValueError, match=r"^clip_coef 0.1: this does not fit into memory"):
        prepare.split_to_fit(group, asked.columns)


def test_split_to_fit_gives_host_env_one_member(monkeypatch):
    from jaxrl_fast import envs

    make = envs.make
    monkeypatch.setattr(envs, "make", lambda *a, **k: make(*a, **k)._replace(host=HostEnv()))
    asked = ask(TINY + " --num-envs 2 --seed 0..2")
    assert [len(part.members) for part in prepare.split_to_fit(asked.groups[0], asked.columns)] == [1, 1, 1]


# Training


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Return a sweep of 2 and 4 environments, two learning rates and seeds 5 and 3: two programs of four members."""
    folder = tmp_path_factory.mktemp("sweep") / "one"
    line = f"{TINY} --num-envs 2,4 --learning-rate 1e-3,1e-2 --seed 5,3 --sweep-dir {folder}"
    assert __main__.main(line.split()) == 0
    ready = directory.read_plan(folder)
    return jaxrl_fast.Sweep(folder, sweep_table.table_rows(ready), 0)


@pytest.mark.slow
def test_table_has_row_per_member(swept):
    with open(swept.folder / "results.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = [(int(r["num_envs"]), float(r["learning_rate"]), int(r["seed"])) for r in rows]
    assert found == [(n, rate, seed) for n in (2, 4) for rate in (1e-3, 1e-2) for seed in (5, 3)]
    for row, ours in zip(rows, swept.results):
        assert row["status"] == "done" and row["env_steps"] == "512" and row["members"] == "4"
        together, alone = float(row["env_steps_per_s"]), float(row["env_steps_per_s_member"])
        assert together == pytest.approx(4 * alone, rel=1e-2)
        assert float(row["final_return"]) == ours["final_return"] > 0
        assert float(row["program_memory_mb"]) >= 0 and float(row["compile_time_s"]) > 0


@pytest.mark.slow
def test_metrics_records_hold_member_label(swept):
    last = files.read_metrics(swept.folder / "01_num_envs-2")[-4:]
    labels = [(r["seed"], r["option.learning_rate"]) for r in last]
    assert labels == [(5, 1e-3), (3, 1e-3), (5, 1e-2), (3, 1e-2)]
    assert last[0]["learning_rate"] < 1e-3  # reduced by annealing


@pytest.mark.slow
def test_load_selects_member_by_seed(swept, tmp_path):
    jaxrl_fast.sweep(
        algo="ppo", env="CartPole-v1", total_steps=512, eval_episodes=2, num_envs=2, seed=[9, 4], log_level="quiet",
        rollout_length=16, hidden_sizes=(4,), num_epochs=1, num_minibatches=1,
        sweep_dir=str(tmp_path / "one"),
    )  # fmt: skip
    part = tmp_path / "one" / "01"
    saved, _ = checkpoint.newest(part / "checkpoints")
    for place, seed in enumerate((9, 4)):
        trained = jaxrl_fast.load(part, seed=seed, which="last")
        kernel = trained.agent_state.params["network"]["params"]["torso"]["mlp"]["Dense_0"]["kernel"]
        written = saved.arrays["agent/params/network/params/torso/mlp/Dense_0/kernel"]
        np.testing.assert_array_equal(kernel, written[place])
    assert jaxrl_fast.load(part).seed == 9
    with pytest.raises(ValueError, match=r"^seed: must be 9 or 4, which .*01 has trained, got 5; leave it out$"):
        jaxrl_fast.load(part, seed=5)


@pytest.mark.slow
def test_load_and_evaluate_select_member_by_values(swept, tmp_path, capsys):
    """Compare the selected member with its row of the checkpoint, from Python and from the command line."""
    part = shutil.copytree(swept.folder / "01_num_envs-2", tmp_path / "part")
    labels = yaml.safe_load((part / "config.yaml").read_text())["meta"]["members"]
    rates = list(dict.fromkeys(label["option.learning_rate"] for label in labels))
    assert len(rates) > 1 and len(labels) > len(rates)
    saved, _ = checkpoint.newest(part / "checkpoints")
    written = saved.arrays["agent/params/network/params/torso/mlp/Dense_0/kernel"]
    for place, label in enumerate(labels):
        rate = label["option.learning_rate"]
        trained = jaxrl_fast.load(part, seed=label["seed"], which="last", member={"option.learning_rate": rate})
        kernel = trained.agent_state.params["network"]["params"]["torso"]["mlp"]["Dense_0"]["kernel"]
        np.testing.assert_array_equal(kernel, written[place])
        assert trained.settings.agent.learning_rate == rate
    assert jaxrl_fast.load(part, member={"option.learning_rate": rates[0]}).seed == 5, "the first one"
    with pytest.raises(ValueError, match=r"^seed: must be 5 or 3, which .*part has trained, got 7; leave it out$"):
        jaxrl_fast.load(part, seed=7, member={"option.learning_rate": rates[0]})
    chosen = ["--member", f"learning-rate={rates[1]}", "--episodes", "4"]
    assert evaluate.main([str(part), *chosen]) == 0
    seeds = [label["seed"] for label in labels if label["option.learning_rate"] == rates[1]]
    out = capsys.readouterr().out
    assert out.count("seed ") == len(seeds) and f"learning_rate={rates[1]:g}" in out and "option." not in out
    assert json.loads((part / "evaluation.json").read_text())["member"] == {"learning_rate": rates[1]}
    for member in ({"learning-rate": rates[1]}, f"learning-rate={rates[1]}", [f"option.learning_rate={rates[1]}"]):
        assert jaxrl_fast.load(part, member=member).settings.agent.learning_rate == rates[1]
    for given, words in (
        ([], "has members that differ in learning_rate ("),
        ([], "choose one, e.g. member learning_rate="),
        (["--member", "learning-rate=0.7"], "member learning_rate=0.7: members of"),
        (["--member", "learning-rate=high"], "member learning_rate=high: 'high' is not a number"),
        (["--member", "learning-rate=1", "option.learning-rate=2"], "member: learning_rate is given twice"),
        (["--member", "gamma=0.7"], "member gamma=0.7: members of "),
    ):
        assert evaluate.main([str(part), *given]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_report_ranks_configurations(swept):
    text = swept.report
    for words in ("By throughput: **num_envs", "By time to the threshold of 2", "By steps to the threshold of 2"):
        assert words in text
    assert "scale none" in text and "| 4 | 0.01 | 2 |" in text
    for name in ("throughput", "cost", "final_return", "threshold", "curves"):
        assert f"({name}.png)" in text and (swept.folder / f"{name}.png").stat().st_size > 10_000


@pytest.mark.slow
def test_sweep_from_python(swept, monkeypatch):
    """A finished sweep is not trained again."""
    assert "8 trainings" in repr(swept) and "<table>" in swept._repr_html_()
    assert swept.plot().axes and swept.plot("curves").axes
    with pytest.raises(ValueError, match="available: throughput"):
        swept.plot("speed")
    monkeypatch.setattr(trainer, "execute", lambda *_, **__: pytest.fail("a training started"))
    again = jaxrl_fast.sweep(resume=str(swept.folder), log_level="quiet")
    assert again.results == swept.results and again.status == 0
    assert callable(jaxrl_fast.sweep)


@pytest.mark.slow
def test_finished_sweep_trains_nothing(swept, monkeypatch):
    monkeypatch.setattr(trainer, "execute", lambda *_, **__: pytest.fail("a training started"))
    line = f"{TINY} --num-envs 2,4 --learning-rate 1e-3,1e-2 --seed 5,3 --sweep-dir {swept.folder}"
    assert __main__.main(line.split()) == 0
    assert __main__.main(["--resume", str(swept.folder), "--log-level", "quiet"]) == 0


@pytest.fixture
def fake_training(monkeypatch, tmp_path):
    monkeypatch.setattr(trainer, "execute", Pretence.execute)
    monkeypatch.setattr(sweep_report, "figures_of", lambda *_: {})
    monkeypatch.setattr(Pretence, "ran", [])
    return f"{TINY} --num-envs 2,4,8 --sweep-dir {tmp_path / 'sweep'}".split(), tmp_path / "sweep"


def test_sweep_of_env_object_resumes_only_from_python(tmp_path, capsys):
    """Check that the rejected command marks no group as failed."""
    folder = tmp_path / "swept"
    options = dict(algo="ppo", env=CartPole, num_envs=[2, 4], sweep_dir=str(folder))
    prepare.prepare(grid.from_keywords(**options))
    before = sorted(folder.rglob("*"))
    assert __main__.main(["--resume", str(folder)]) == 2
    assert "resume with jaxrl_fast.sweep(...) and the same arguments" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before
    assert prepare.prepare(grid.from_keywords(**options)).folder == folder


def test_error_of_all_groups_is_reported_before_any_group_is_marked_failed(tmp_path, monkeypatch, capsys):
    """Check a missing module and jax_enable_x64. No group is marked as failed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "soon_missing.py"
    module.write_text("from gymnax.environments.classic_control.cartpole import CartPole as Own\n")
    folder = tmp_path / "swept"
    line = f"ppo --env soon_missing:Own --num-envs 2,4 --sweep-dir {folder}"
    prepare.prepare(grid.from_command_line(line.split()))
    before = sorted(folder.rglob("*"))
    module.unlink()
    monkeypatch.delitem(sys.modules, "soon_missing")
    assert __main__.main(["--resume", str(folder)]) == 2
    assert "soon_missing" in capsys.readouterr().err
    module.write_text("from gymnax.environments.classic_control.cartpole import CartPole as Own\n")
    with jax.enable_x64(True):
        assert __main__.main(["--resume", str(folder)]) == 2
    assert "jax_enable_x64 is on" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_resumed_sweep_of_env_instance_warns(tmp_path, monkeypatch, capsys):
    """Check that a class, which has an unambiguous name, does not warn."""
    monkeypatch.chdir(tmp_path)
    options = dict(algo="ppo", env=CartPole(), num_envs=[2, 4], sweep_dir="swept")
    prepare.prepare(grid.from_keywords(**options))
    prepare.prepare(grid.from_keywords(**options | {"env": CartPole()}))
    message = "was trained on environment instances; make sure that the given ones are the same\n"
    assert capsys.readouterr().err == f"warning: sweeps/swept {message}"
    options |= {"env": CartPole, "sweep_dir": "other"}
    assert prepare.prepare(grid.from_keywords(**options)) == prepare.prepare(grid.from_keywords(**options))
    assert not capsys.readouterr().err


class DirectoryChangingCartPole(CartPole):
    """Change the current directory when it is made."""

    def __init__(self):
        super().__init__()
        os.chdir("/")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sweep_dir": "swept"}, {"sweep_dir": "sweeps/swept"}, {}])
def test_sweep_stays_in_one_folder_when_current_directory_changes(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Pretence, "behave", staticmethod(lambda plan: os.chdir("/") or "done"))
    monkeypatch.setattr(trainer, "execute", Pretence.execute)
    made = dict(algo="ppo", env=DirectoryChangingCartPole, num_envs=[2, 4], **options)
    for _ in range(2 if options else 1):  # the second time, it is resumed
        monkeypatch.chdir(tmp_path)
        swept = jaxrl_fast.sweep(**made)
    assert swept.folder.parent == tmp_path / "sweeps" and [row["status"] for row in swept.results] == ["done"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"sweeps"} and not Path("/sweeps").exists()
    assert {"01_num_envs-2", "02_num_envs-4", "sweep.yaml", "results.csv"} <= {p.name for p in swept.folder.iterdir()}
    said = capsys.readouterr().out
    assert f"sweep  sweeps/{swept.folder.name}" in said and f"report sweeps/{swept.folder.name}/report.md" in said
    assert str(tmp_path) not in said


def test_member_settings_ignore_object_address():
    """Compare two instances, as after a restart of a notebook's kernel."""

    def environment():
        def make_env():
            return CartPole()

        return make_env

    first, second = (grid.from_keywords(algo="ppo", env=environment()) for _ in range(2))
    assert repr(first.groups[0].settings.options.env) != repr(second.groups[0].settings.options.env)
    assert list(prepare._member_settings(first.groups)) == list(prepare._member_settings(second.groups))


@pytest.mark.slow
def test_10000_seeds_are_resolved_in_60_s_and_more_are_rejected():
    start = time.perf_counter()
    (group,) = grid.from_keywords("ppo_cartpole", seed=range(5, 10_005)).groups
    assert [member.seed for member in group.members] == list(range(5, 10_005))
    with pytest.raises(ValueError, match=r"^seed: has at most 10000 values, got 10001$"):
        grid.from_keywords("ppo_cartpole", seed=list(range(10_001)))
    with pytest.raises(ValueError, match=r"^seed: has at most 10000 values, got range\(0, 1000000000\)$"):
        grid.from_keywords("ppo_cartpole", seed=range(10**9))  # not listed: it would not fit into memory
    assert time.perf_counter() - start < 60


@pytest.mark.slow
def test_failed_group_is_recorded_and_others_run(fake_training, monkeypatch, capsys):
    line, folder = fake_training

    def behave(plan):
        if plan.settings.options.num_envs == 4:
            raise RuntimeError("no room\nat all")
        return "done"

    monkeypatch.setattr(Pretence, "behave", staticmethod(behave))
    assert __main__.main(line) == 1
    assert Pretence.ran == ["01_num_envs-2", "03_num_envs-8"]
    assert "error: 02_num_envs-4: RuntimeError: no room" in capsys.readouterr().err
    rows = sweep_table.table_rows(directory.read_plan(folder))
    assert [r["status"] for r in rows] == ["done", "failed", "done"]
    assert "num_envs 4, seed 0: failed: RuntimeError: no room" in (folder / "report.md").read_text()
    assert __main__.main(["--resume", str(folder), "--log-level", "quiet"]) == 1
    assert len(Pretence.ran) == 2  # a failed group is not retried
    capsys.readouterr()
    assert __main__.main([*line, "--log-level", "info"]) == 1
    retry = f"python -m jaxrl_fast.sweep --resume {folder} --retry"
    assert f"retry failed programs with  {retry}" in capsys.readouterr().out
    assert f"Retry the failed programs: `{retry}`." in (folder / "report.md").read_text()
    monkeypatch.setattr(Pretence, "behave", staticmethod(lambda plan: "done"))
    assert __main__.main([*line, "--retry"]) == 0
    assert Pretence.ran[2:] == ["02_num_envs-4"]


@pytest.mark.slow
def test_diverged_group_is_recorded_with_reason(fake_training, monkeypatch, capsys):
    line, folder = fake_training
    diverge = lambda plan: "diverged" if plan.settings.options.num_envs == 4 else "done"
    monkeypatch.setattr(Pretence, "behave", staticmethod(diverge))
    for words in (line, ["--resume", str(folder), "--log-level", "quiet"]):
        assert __main__.main(words) == 1
        assert capsys.readouterr().err == f"error: 02_num_envs-4: {Pretence.why}\n"
    assert len(Pretence.ran) == 3  # no group is retried
    found = [(r["status"], r["failure"]) for r in sweep_table.table_rows(directory.read_plan(folder))]
    assert found == [("done", None), ("diverged", Pretence.why), ("done", None)]
    assert f"- num_envs 4, seed 0: diverged: {Pretence.why}\n" in (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("option", "status"), [("", 0), (" --on-nonfinite stop", 1)])
def test_diverged_member_stops_itself_or_program(option, status, tmp_path, capsys):
    folder = tmp_path / "sweep"
    line = f"{TINY} --num-envs 2 --learning-rate 1e-3,1e30 --sweep-dir {folder}{option}"
    assert __main__.main(line.split()) == status
    why = files.summary_if_any(folder / "01")["failure"]
    assert ("error: 01: " in capsys.readouterr().err) == bool(why) == bool(status)
    well, ill = sweep_table.table_rows(directory.read_plan(folder))
    assert (well["status"], well["failure"]) == ("diverged" if why else "done", why)
    assert ill["status"] == "diverged"
    assert ill["failure"].startswith("not finite from step ")
    assert f"diverged: {ill['failure']}\n" in (folder / "report.md").read_text()


def test_each_diverged_member_has_its_own_failure_message(tmp_path):
    """The failure of a program names the member that diverged first."""
    ready = finished(tmp_path / "sweep", [None], algo="ppo", num_envs=2, seed=[0, 1])
    (folder,) = (ready.folder / name for name in ready.groups)
    summary = files.read_summary(folder) | {"status": "diverged", "failure": "seed 0: loss is not finite"}
    files.write_summary(folder, summary | {"diverged_at_per_seed": [64, 128]})
    assert [row["failure"] for row in sweep_table.table_rows(ready)] == [
        "not finite from step 64 on",
        "not finite from step 128 on",
    ]


def test_table_and_ranking_use_iqm_of_evaluation_returns(place):
    """The interquartile mean (IQM) of these returns differs from their median."""
    ready = directory.read_plan(place / "sweeps" / "a_sweep")
    row = lambda num_envs, seed, score: {
        "num_envs": num_envs, "seed": seed, "env_steps_per_s": 10.0, "final_return": score, "eval_return": score,
        "time_to_solve_s": None, "steps_to_solve": None, "members": 3, "compile_time_s": 1.0, "program_memory_mb": 1.0,
    }  # fmt: skip
    table = [row(1, i, x) for i, x in enumerate((0.0, 1.0, 2.0, 6.0, 100.0))] + [row(8, 0, 1.0)]
    iqm = sweep_report._iqm([0.0, 1.0, 2.0, 6.0, 100.0])
    assert iqm != 2.0
    assert f"- By evaluation return (IQM): **num_envs 1** ({iqm:.1f})." in sweep_report.ranking(ready, table)
    lines = sweep_report._table(ready, table)
    assert "| eval return (IQM) |" in lines[0] and f"| {iqm:.1f} | " in lines[2].replace(f"{iqm:.1f} (", "")


def test_single_numbers_of_list_option_give_note(tmp_path):
    plan = lambda line: directory.SweepPlan(tmp_path, dict(enumerate(ask(line).groups)), ask(line).columns, "none", 0)
    (note,) = runner.single_numbers(plan("ppo --hidden-sizes 128,256"))
    assert note == (
        "network.hidden_sizes  128 | 256, a single number per run; --network.hidden-sizes 128 256 is one run with both"
    )
    assert not runner.single_numbers(plan("ppo --hidden-sizes 64 64,128 --num-envs 1,2"))


@pytest.mark.parametrize(
    ("more", "idle"),
    [
        ("--scale minibatches --num-envs 4", ["scale"]),  # those of TINY
        ("--scale minibatches --num-envs 4,8", []),
        ("--workers 3 --num-envs 4,8", ["workers"]),
        ("--workers 2 --num-envs 4,8", []),
        ("--num-envs 4", []),
    ],
)
def test_announce_names_options_of_sweep_without_effect(more, idle, tmp_path):
    ready = prepare.prepare(grid.from_command_line(f"{TINY} {more} --sweep-dir {tmp_path / 'sweep'}".split()))
    assert [line.partition(": has no effect")[0] for line in runner.unused(ready)] == idle


@pytest.mark.slow
def test_interrupted_sweep_resumes(fake_training, monkeypatch):
    line, folder = fake_training
    stop = lambda plan: "stopped" if plan.settings.options.num_envs == 4 else "done"
    monkeypatch.setattr(Pretence, "behave", staticmethod(stop))
    assert __main__.main(line) == 128 + signal.SIGTERM
    assert Pretence.ran == ["01_num_envs-2", "02_num_envs-4"]
    assert [r["status"] for r in sweep_table.table_rows(directory.read_plan(folder))] == [
        "done",
        "stopped",
        "unfinished",
    ]
    monkeypatch.setattr(Pretence, "behave", staticmethod(lambda plan: "done"))
    assert __main__.main(line) == 0
    assert Pretence.ran[2:] == ["02_num_envs-4", "03_num_envs-8"]


@pytest.mark.slow
def test_late_signal_stops_sweep(fake_training, monkeypatch):
    line, folder = fake_training
    monkeypatch.setattr(Pretence, "behave", staticmethod(lambda plan: "too late"))
    assert __main__.main(line) == 128 + signal.SIGTERM
    assert Pretence.ran == ["01_num_envs-2"]
    assert [r["status"] for r in sweep_table.table_rows(directory.read_plan(folder))] == [
        "done",
        "unfinished",
        "unfinished",
    ]


@pytest.mark.slow
def test_sweep_survives_full_disk(fake_training, monkeypatch, capsys):
    line, folder = fake_training

    def no_room(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(sweep_table, "write_table", no_room)
        patched.setattr(sweep_report, "write_report", no_room)
        assert __main__.main(line) == 1
    assert len(Pretence.ran) == 3 and "(No space left on device); resume writes them" in capsys.readouterr().err
    assert __main__.main(["--resume", str(folder), "--log-level", "quiet"]) == 0
    assert len(Pretence.ran) == 3 and (folder / "results.csv").is_file()


@pytest.mark.slow
def test_unwritable_group_is_retried_on_resume(fake_training, monkeypatch, capsys):
    line, folder = fake_training
    lock = locks.Lock

    def no_room(place):
        if "num_envs-4" in place.name:
            raise OSError(28, "No space left on device", str(place))
        return lock(place)

    with monkeypatch.context() as patched:
        patched.setattr(locks, "Lock", no_room)
        assert __main__.main(line) == 1
    assert "02_num_envs-4 cannot be written (No space left on device)" in capsys.readouterr().err
    assert __main__.main(["--resume", str(folder), "--log-level", "quiet"]) == 0
    assert Pretence.ran == ["01_num_envs-2", "03_num_envs-8", "02_num_envs-4"]


@pytest.mark.slow
def test_resumed_sweep_offers_devices_of_all_groups(tmp_path):
    """Run in a separate process, since JAX counts devices once. The first group requires one device."""
    line = f"{TINY} --num-envs 4 --devices 1,2 --sweep-dir x"
    prepared = f"from jaxrl_fast.sweep import grid, prepare; prepare.prepare(grid.from_command_line({line.split()!r}))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", prepared], check=True, cwd=tmp_path, env=environment)
    command = [sys.executable, "-m", "jaxrl_fast.sweep", "--resume", "sweeps/x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    parts = sorted((tmp_path / "sweeps" / "x").glob("*/summary.json"))
    assert [json.loads(part.read_text())["num_shards"] for part in parts] == [1, 2]


@pytest.mark.slow
def test_workers_share_cores(fake_training, tmp_path, monkeypatch):
    """Run a worker here, with the arguments of a worker process."""
    line, _ = fake_training
    code = f"import json, os, sys; open(f'{tmp_path}/{{os.getpid()}}.json', 'w').write(json.dumps(sys.argv[1:]))"
    monkeypatch.setattr(runner, "WORKER_CODE", code)
    __main__.main([*line, "--workers", "3"])
    arguments = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    monkeypatch.setattr(signals, "stop_with_parent", lambda parent: None)
    monkeypatch.setitem(placement.CORE_SHARE, "processes", 1)
    assert len(arguments) == 3 and worker.worker_main(*arguments[0]) == 0
    assert placement.CORE_SHARE["processes"] == 3


@pytest.mark.slow
def test_killed_workers_are_reported(fake_training, monkeypatch, capsys):
    line, folder = fake_training
    with monkeypatch.context() as patched:
        patched.setattr(runner, "WORKER_CODE", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert __main__.main([*line, "--workers", "2"]) == 1
    assert "2 of 2 workers failed or could not write all results" in capsys.readouterr().err
    assert [r["status"] for r in sweep_table.table_rows(directory.read_plan(folder))] == ["unfinished"] * 3
    assert __main__.main(["--resume", str(folder), "--log-level", "quiet"]) == 0
    assert len(Pretence.ran) == 3


@pytest.mark.slow
def test_retry_restarts_group_without_checkpoint(tmp_path, monkeypatch):
    """Retry a group whose metrics.jsonl already has lines."""
    folder = tmp_path / "sweep"

    def fail(self, *_):
        raise RuntimeError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "save", fail)
        assert __main__.main(f"{TINY} --num-envs 2 --sweep-dir {folder}".split()) == 1
    assert (folder / "01" / "metrics.jsonl").stat().st_size > 0
    assert __main__.main(["--resume", str(folder), "--retry", "--log-level", "quiet"]) == 0
    assert [r["status"] for r in sweep_table.table_rows(directory.read_plan(folder))] == ["done"]


@pytest.mark.slow
def test_locked_group_is_skipped(fake_training):
    line, folder = fake_training
    ready = prepare.prepare(grid.from_command_line(line))
    (folder / "02_num_envs-4").mkdir()
    other = locks.Lock(folder / "02_num_envs-4")
    assert runner.execute(ready) == 0
    assert Pretence.ran == ["01_num_envs-2", "03_num_envs-8"]
    other.release()
    assert runner.execute(ready) == 0
    assert Pretence.ran[2:] == ["02_num_envs-4"]


@pytest.mark.slow
def test_killed_group_resumes_from_checkpoint(tmp_path, monkeypatch):
    """Stop after the first checkpoint; except for times, the lines equal those of an uninterrupted sweep."""
    line = f"{TINY} --seed 4,9 --gamma 0.9,0.99 --num-envs 2 --sweep-dir "
    assert __main__.main((line + str(tmp_path / "whole")).split()) == 0
    process_chunk = trainer.Trainer.process_chunk

    def stop(self, done):
        process_chunk(self, done)
        if self.finished >= 8:
            self.stop(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "process_chunk", stop)
        assert __main__.main((line + str(tmp_path / "broken")).split()) == 128 + signal.SIGTERM
    assert __main__.main(["--resume", str(tmp_path / "broken"), "--log-level", "quiet"]) == 0
    times = ("wall_time_s", "train_time_s", "env_steps_per_s")
    found = [files.read_metrics(tmp_path / name / "01") for name in ("whole", "broken")]
    lines = [[{k: v for k, v in r.items() if k not in times} for r in records] for records in found]
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_workers_run_each_group_once(tmp_path):
    """Run two worker processes."""
    folder = tmp_path / "shared"
    line = f"{TINY} --num-envs 2,4,8,16 --workers 2 --sweep-dir {folder}"
    command = [sys.executable, "-m", "jaxrl_fast.sweep", *line.split(), "--log-level", "info"]
    said = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert "1/4  0" in said and "4/4  0" in said and said.count(" · done\n") == 4
    rows = sweep_table.table_rows(directory.read_plan(folder))
    assert [r["status"] for r in rows] == ["done"] * 4
    for row in rows:
        updates = [r["num_updates"] for r in files.read_metrics(folder / row["program"])]
        assert updates == sorted(set(updates))


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
def test_workers_stop_when_sweep_is_killed(told, tmp_path):
    """Check that workers stop and save after SIGKILL of the sweep, also if it got SIGTERM before (`told`)."""
    folder = tmp_path / "killed"
    line = f"{TINY} --num-envs 2,4 --total-steps 20M --workers 2 --sweep-dir {folder}"
    parts = [folder / name for name in ("01_num_envs-2", "02_num_envs-4")]
    with subprocess.Popen([sys.executable, "-m", "jaxrl_fast.sweep", *line.split()], cwd=ROOT) as command:
        try:
            until(lambda: all(map(files.read_metrics, parts)))
            if told:
                command.terminate()
                time.sleep(0.2)
        finally:
            command.kill()
    until(lambda: all(files.summary_if_any(part).get("status") == "stopped" for part in parts))
    until(lambda: all(is_free(part) for part in parts))
    assert all(summary["env_steps"] > 0 and summary["last_checkpoint"] for summary in map(files.read_summary, parts))


def until(holds):
    """Wait until `holds()` is true."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_free(folder):
    try:
        locks.Lock(folder).release()
    except BlockingIOError:
        return False
    return True


@pytest.mark.slow
def test_submit_creates_job_per_group(tmp_path):
    """Use submitit's local executor, which starts a process for each job."""
    submitit = pytest.importorskip("submitit")
    asked = ask(f"{TINY} --num-envs 2 --sweep-dir {tmp_path / 'jobs'}")
    ready = prepare.prepare(asked)
    jobs = slurm.submit(
        ready.folder, directory.unfinished(ready), {"timeout_min": "9"}, worker.run_group_by_name, "local"
    )
    assert isinstance(jobs[0], submitit.Job)
    deadline = time.monotonic() + 300
    while not jobs[0].done() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert jobs[0].result().startswith("done")
    assert [r["status"] for r in sweep_table.table_rows(directory.read_plan(ready.folder))] == ["done"]
    with pytest.raises(ValueError, match=r"^slurm_options: .*no_such"):
        slurm.submit(ready.folder, [], {"no_such": "1"}, worker.run_group_by_name, "local")


# Tables, figures and reports


@pytest.mark.parametrize("unknown", [0, 1])
def test_series_uses_records_of_own_member(unknown):
    """Use two members of a program; a record without episodes or finite return keeps the previous value."""
    label = lambda seed, value: Member(seed, {"clip_coef": value}).label
    record = lambda who, step, mean: who | {
        "env_steps": step, "train_time_s": step / 10, "return_mean": mean, "episodes": unknown if mean is None else 1,
    }  # fmt: skip
    ours, other = label(0, 0.1), label(0, 0.2)
    values = ((10, 1.0, 7.0), (20, None, 8.0), (30, 3.0, 9.0))
    lines = [line for step, mean, its in values for line in (record(ours, step, mean), record(other, step, its))]
    steps, seconds, returns = sweep_figures.series(
        [{"seed": 0, "clip_coef": 0.1, "program": "g"}], {"g": by_member(lines)}
    )
    np.testing.assert_array_equal(steps, [10, 20, 30])
    np.testing.assert_allclose(seconds, [1, 2, 3])
    np.testing.assert_array_equal(returns, [[1, 1, 3]])


def finished(folder, returns, **options):
    """Return a finished sweep in which each program has one record with this return, and its summary."""
    ready = prepare.prepare(grid.from_keywords(log_level="quiet", sweep_dir=str(folder), **options))
    for (name, group), score in zip(ready.groups.items(), returns, strict=True):
        known = {"status": "done", "env_steps_per_s": 10.0, "device": "cpu", "train_time_s": 1.0}
        known |= {"final_return_per_seed": [score] * len(group.members)}
        known |= {"env_steps": group.settings.options.total_steps}
        solved = group.settings.options.solved_threshold
        if solved is not None and score >= solved:
            known |= {"steps_to_solve_per_seed": [int(score)], "time_to_solve_s_per_seed": [score / 10]}
        line = {"env_steps": 10, "train_time_s": 1.0, "return_mean": score, "episodes": 1}
        (ready.folder / name).mkdir()
        (ready.folder / name / "summary.json").write_text(json.dumps(known))
        lines = [json.dumps(member.label | line) + "\n" for member in group.members]
        (ready.folder / name / "metrics.jsonl").write_text("".join(lines))
    return ready


@pytest.mark.slow
def test_table_column_of_env_options(tmp_path):
    """Check values that are not hashable."""
    options = dict(algo="ppo", env_options=[{"max_steps_in_episode": 3}, {}], num_envs=2)
    ready = finished(tmp_path / "sweep", [3.0, 3.0], **options)
    table = sweep_table.table_rows(ready)
    assert [row["env_options"] for row in table] == ["max_steps_in_episode=3", "none"]
    drawn = sweep_report.figures_of(ready, table)
    ticks = drawn["final_return.png"].axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["max_steps_in_episode=3", "none"]
    assert "\n| max_steps_in_episode=3 | 1 | 3.0 |" in sweep_report.as_markdown(ready, table, list(drawn))
    assert "\nmax_steps_in_episode=3,0,done," in sweep_table.as_csv(table)
    assert sweep_table.as_cell(SimpleNamespace(size=3)) == "namespace(size=3)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "num_told"),
    [(lambda path: path.unlink(), 0), (lambda path: path.write_text('{"seed": 0, "env_st\n'), 1)],
)
def test_curves_omit_run_without_records(damage, num_told, tmp_path, capsys):
    ready = finished(tmp_path / "sweep", [1.0, 2.0, 3.0], algo="ppo", num_envs=[1, 2, 4])
    damage(ready.folder / "02_num_envs-2" / "metrics.jsonl")
    assert sweep_report.write_report(ready)
    assert capsys.readouterr().err.count("02_num_envs-2/metrics.jsonl cannot be read (ValueError: line 1: ") == num_told
    (axes, _) = sweep_report.figures_of(ready, sweep_table.table_rows(ready))["curves.png"].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["num envs 1", "num envs 4"]
    assert "(curves.png)" in (ready.folder / "report.md").read_text()


def test_figures_print_dollar_signs_literally(tmp_path):
    """Look for the texts in an SVG."""
    row = lambda value: {
        "env_options": value, "seed": 0, "program": value, "members": 1, "final_return": 1.0, "steps_to_solve": None,
        "env_steps_per_s": 1.0, "program_memory_mb": 1.0, "compile_time_s": 1.0,
    }  # fmt: skip
    values, line = ("x=$a_{$", "x=$"), {"seed": 0, "env_steps": 1, "train_time_s": 1, "return_mean": 1, "episodes": 1}
    groups, records = [[row(value)] for value in values], {value: [line] for value in values}
    drawn = sweep_figures.draw_figures("PPO on $_{$", ["env_options"], groups, records, None)
    for name, label in (("curves", "env options x=$a_{$"), ("final_return", "x=$a_{$"), ("throughput", "x=$a_{$")):
        drawn[f"{name}.png"].savefig(tmp_path / "x.svg")
        text = (tmp_path / "x.svg").read_text()
        assert "<!-- PPO on $_{$ -->" in text and f"<!-- {label} -->" in text


def test_failed_figure_is_a_warning(tmp_path, monkeypatch, capsys):
    """Let one figure fail when it is drawn and one when it is saved."""
    ready = finished(tmp_path / "sweep", [1.0, 2.0], algo="ppo", num_envs=[1, 2])
    monkeypatch.setattr(sweep_figures, "plot_throughput", lambda *_: 1 / 0)
    monkeypatch.setattr(sweep_figures, "plot_learning_curves", lambda *_: SimpleNamespace(savefig=lambda _: 1 / 0))
    assert sweep_report.write_report(ready)
    words = "could not be drawn (ZeroDivisionError: division by zero)\n"
    assert capsys.readouterr().err == f"warning: throughput.png {words}warning: curves.png {words}"
    report = (ready.folder / "report.md").read_text()
    assert "(cost.png)" in report and "throughput.png" not in report and "curves.png" not in report


def test_ranking_prefers_higher_solve_rate(place):
    """Compare one of two seeds in 10 s with two of two in 20 s."""
    ready = directory.read_plan(place / "sweeps" / "a_sweep")
    settings = ready.groups["01_num_envs-1"].settings
    solved = settings._replace(options=dataclasses.replace(settings.options, solved_threshold=9.0))
    ready = ready._replace(groups={"01_num_envs-1": grid.Group(solved, (Member(0),))})
    row = lambda num_envs, seed, seconds: {
        "num_envs": num_envs, "seed": seed, "env_steps_per_s": 10.0 * num_envs, "final_return": 1.0,
        "eval_return": None, "time_to_solve_s": seconds, "steps_to_solve": seconds and 100 * seconds,
    }  # fmt: skip
    table = [row(1, 0, 10.0), row(1, 1, None), row(8, 0, 20.0), row(8, 1, 22.0)]
    said = "\n".join(sweep_report.ranking(ready, table))
    assert "By throughput: **num_envs 8** (80 steps/s, 8.0 times that of num_envs 1)" in said
    assert "By time to the threshold of 9: **num_envs 8** (21 s, median of 2 of 2)" in said


def test_ranking_prefers_fewer_lost_seeds(place):
    """Compare one of three seeds at 500 with three of three at 400."""
    ready = directory.read_plan(place / "sweeps" / "a_sweep")
    row = lambda num_envs, seed, score: {
        "num_envs": num_envs, "seed": seed, "env_steps_per_s": 10.0, "final_return": score, "eval_return": score,
        "time_to_solve_s": None, "steps_to_solve": None, "members": 3, "compile_time_s": 1.0, "program_memory_mb": 1.0,
    }  # fmt: skip
    table = [row(1, i, 400.0 + i) for i in range(3)] + [row(8, i, 500.0 if i == 1 else None) for i in range(3)]
    lines = sweep_report.ranking(ready, table)
    assert "- By final return (IQM): **num_envs 1** (401.0)." in lines
    assert "- By evaluation return (IQM): **num_envs 1** (401.0)." in lines
    survivor = sweep_report.ranking(ready, [table[0] | {"final_return": None}, *table[3:]])
    assert "- By final return: **num_envs 8** (500.0, 1 of 3)." in survivor
    assert "| 8 | 1 of 3 | 500.0 | 500.0 |" in "\n".join(sweep_report._table(ready, table))


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ((500.0, 499.98, 300.0), "**num_envs 1** and **num_envs 2** (500.0)"),
        ((500.0, 500.0, 500.0), "all equal (500.0)"),
        ((500.0, 500.0, None), "**num_envs 1** and **num_envs 2** (500.0)"),
        ((1.0, 3.0, 2.0), "**num_envs 2** (3.0)"),
        ((7.0, 7.0, 7.0, 7.0, 7.0, 1.0), "**num_envs 1** and **num_envs 2** and **num_envs 3** and 2 more (7.0)"),
    ],
)
def test_ranking_names_ties(place, returns, said):
    ready = directory.read_plan(place / "sweeps" / "a_sweep")
    row = lambda num_envs, score: {
        "num_envs": num_envs, "seed": 0, "env_steps_per_s": 10.0, "final_return": score, "eval_return": None,
        "time_to_solve_s": None, "steps_to_solve": None,
    }  # fmt: skip
    lines = sweep_report.ranking(ready, [row(i + 1, score) for i, score in enumerate(returns)])
    assert f"- By final return: {said}." in lines


@pytest.mark.slow
def test_ranking_is_per_environment(tmp_path):
    """Give one environment a threshold, from the preset, and the other none."""
    options = dict(preset="ppo_cartpole", env=["gymnax/CartPole-v1", "gymnax/Acrobot-v1"], num_envs=[8, 16])
    ready = finished(tmp_path / "two", [480.0, 490.0, -85.0, -90.0], **options)
    assert sweep_report.ranking(ready, sweep_table.table_rows(ready)) == [
        "- On gymnax/CartPole-v1, by throughput: **num_envs 8** (10 steps/s).",
        "- On gymnax/CartPole-v1, by final return: **num_envs 16** (490.0).",
        "- On gymnax/CartPole-v1, by time to the threshold of 475: **num_envs 8** (48 s, median of 1 of 1).",
        "- On gymnax/CartPole-v1, by steps to the threshold of 475: **num_envs 8** (480, median of 1 of 1).",
        "- On gymnax/Acrobot-v1, by throughput: **num_envs 8** (10 steps/s).",
        "- On gymnax/Acrobot-v1, by final return: **num_envs 8** (-85.0).",
        "- On gymnax/Acrobot-v1, no threshold was given (`solved_threshold`), so time to solve is not ranked.",
    ]
    assert "threshold.png" not in sweep_report.figures_of(ready, sweep_table.table_rows(ready))
    one = finished(tmp_path / "one", [480.0, -85.0], **options | {"num_envs": 8})
    assert sweep_report.ranking(one, sweep_table.table_rows(one)) == []


def test_ranking_skips_differing_thresholds(tmp_path):
    ready = finished(tmp_path / "sweep", [480.0, 490.0], preset="ppo_cartpole", solved_threshold=[100, 475], num_envs=8)
    said = sweep_report.ranking(ready, sweep_table.table_rows(ready))
    assert said[-1] == "- Thresholds differ (100, 475), so time to solve is not ranked."
    assert not any("to the threshold" in line for line in said)
    assert "threshold.png" not in sweep_report.figures_of(ready, sweep_table.table_rows(ready))


def test_report_ends_with_device_of_programs_and_resume_command(tmp_path):
    ready = finished(tmp_path / "a sweep", [1.0, 2.0], algo="ppo", num_envs=[1, 2])
    summary = ready.folder / "01_num_envs-1" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"device": "another device"}))
    *_, blank, last = sweep_report.as_markdown(ready, sweep_table.table_rows(ready), []).splitlines()
    assert "another device" in last and f"--resume '{ready.folder}'" in last and "results.csv" in last and not blank


@pytest.mark.parametrize(
    ("num_envs", "title"), [(8, "ppo on gymnax/CartPole-v1, 8 environments"), ([8, 16], "ppo on gymnax/CartPole-v1")]
)
def test_report_title_has_environments_unless_swept(num_envs, title, tmp_path):
    ready = finished(tmp_path / "sweep", [1.0, 2.0][: np.size(num_envs)], preset="ppo_cartpole", num_envs=num_envs)
    first, *_ = sweep_report.as_markdown(ready, sweep_table.table_rows(ready), []).splitlines()
    assert first == f"# Sweep of {title}"


def test_report_counts_solved_if_any_has_threshold(tmp_path):
    """Give a threshold to one of two environments: the solved one is 1/1, and without a threshold none is solved."""
    options = dict(preset="ppo_cartpole", env=["gymnax/CartPole-v1", "gymnax/Acrobot-v1"], num_envs=8)
    ready = finished(tmp_path / "sweep", [480.0, -85.0], **options)
    heads, _, *lines = sweep_report._table(ready, sweep_table.table_rows(ready))
    place = heads.split(" | ").index("solved")
    assert [line.split(" | ")[place] for line in lines] == ["1/1", "0/1"]


@pytest.mark.parametrize("num_records", [1, 2, 50])
def test_table_reads_last_evaluation(num_records, tmp_path):
    """Write records of two members, each with another evaluation; the table has that of each member's last record."""
    ready = finished(tmp_path / "sweep", [1.0], algo="ppo", seed=[0, 1])
    (name,) = ready.groups
    means = [[float(10 * i), float(10 * i + 1)] for i in range(num_records)]
    lines = [
        json.dumps({"seed": seed, "env_steps": i, "eval_return_mean": mean[seed]})
        for i, mean in enumerate(means)
        for seed in (0, 1)
    ]
    (ready.folder / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert [row["eval_return"] for row in sweep_table.table_rows(ready)] == means[-1]
