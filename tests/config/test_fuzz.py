"""Fuzz the command lines, presets and keyword arguments: each gives settings or a one-line error."""

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxrl_fast import evaluate, plot, video
from jaxrl_fast.config import load, paths
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.options.declare import options_of
from jaxrl_fast.options.run import OF_RUN, SweepOptions
from jaxrl_fast.sweep import directory, grid
from jaxrl_fast.training import plan

OF_PARTS = ["gamma", "x", "memory", "memory.size", "size", "n_step", "replay", "network.no_layer_norm", "no_memory"]
OF_TRAINING = [f"--{name.replace('_', '-')}" for name in (*OF_RUN, "config", *OF_PARTS)]
VALUES = [
    "ppo",
    "dqn",
    "1",
    "-1",
    "1e3",
    "10M",
    "nan",
    "inf",
    "none",
    "true",
    "a=b",
    "=",
    "",
    "-",
    "--",
    "CartPole-v1",
    "gru",
    "prioritized",
]
LISTS = ["1,2", "0..4", "4..0", "..", "1..", "1,,2", "1e-4,1e-3", "0..1e9", "true,false", "1,1", ",", "0.1..0.5"]


def arguments(names, values=VALUES):
    word = st.one_of(
        st.sampled_from(names), st.sampled_from(values), st.text(max_size=8), st.sampled_from(names).map("{}=3".format)
    )
    return st.lists(word, max_size=6).filter(lambda words: not {"--help", "-h", "--h"} & set(words))


YAML = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.sampled_from(VALUES)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([n[2:].replace("-", "_") for n in OF_TRAINING] + ["agent", "algo", "meta", "kind"]), inner
        ),
    ),
    max_leaves=12,
)


def parse_or_error(read, kind):
    """Check that `read` returns an instance of `kind` or raises a ValueError of one line."""
    try:
        assert isinstance(read(), kind)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)


@settings(max_examples=200)
@given(arguments(OF_TRAINING))
@pytest.mark.slow
def test_any_command_line_gives_settings_or_one_line_error(words):
    parse_or_error(lambda: load.from_command_line(words), Settings)


@settings(max_examples=200)
@given(YAML)
@pytest.mark.slow
def test_any_preset_gives_settings_or_one_line_error(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "preset.yaml"
        path.write_text(yaml.safe_dump(content))
        parse_or_error(lambda: load.from_command_line(["--config", str(path)]), Settings)


@settings(max_examples=300)
@given(st.text(max_size=60))
def test_any_preset_text_gives_settings_or_one_line_error(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "preset.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        parse_or_error(lambda: load.from_command_line(["--config", str(path)]), Settings)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([n[2:].replace("-", "_") for n in OF_TRAINING]), YAML, max_size=3), YAML)
def test_any_keywords_give_settings_or_one_line_error(keywords, agent):
    keywords.pop("config", None)
    parse_or_error(lambda: load.from_keywords(agent=agent, **keywords), Settings)


OF_SWEEPS = [*OF_TRAINING, *(f"--{name.replace('_', '-')}" for name in options_of(SweepOptions)), "--learning-rate"]


@pytest.mark.slow
@settings(max_examples=200)
@given(arguments(OF_SWEEPS, VALUES + LISTS))
@example(["--env=0", "\n"])
def test_any_sweep_command_line_gives_request_or_one_line_error(words):
    parse_or_error(lambda: grid.from_command_line(words), grid.SweepRequest)


@pytest.mark.slow
@settings(max_examples=300)
@given(YAML)
def test_any_sweep_file_gives_plan_or_one_line_error(content):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / paths.SWEEP_FILE).write_text(yaml.safe_dump({"groups": content, "columns": content}))
        parse_or_error(lambda: directory.read_plan(Path(folder)), directory.SweepPlan)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with files and folders that resemble runs."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "file").write_text("text")
    (folder / "empty").mkdir()
    for name, text in (
        ("plain", "algo: ppo\nmeta: {format: 3}\n"),
        ("broken", "num_envs: [3\n"),
        ("odd", "meta: {format: 3}\nenv: 3\n"),
    ):
        (folder / name / "checkpoints" / "step-000000000001").mkdir(parents=True)
        (folder / name / "config.yaml").write_text(text)
        (folder / name / "summary.json").write_text(json.dumps({"status": "done"}) if name == "plain" else "{")
        (folder / name / "metrics.jsonl").write_text('{"env_steps": 1}\n{"env_st' if name == "odd" else "")
    return folder


@pytest.mark.parametrize("module", [evaluate, plot, video])
def test_commands_on_runs_reject_any_arguments_in_one_line(module, place, monkeypatch):
    """No run here has a checkpoint that can be loaded."""
    monkeypatch.chdir(place)
    names = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(module.Options)]
    places = ["file", "empty", "plain", "broken", "odd", "nowhere", ".", "plain/config.yaml", "x.gif", "x.mp4"]

    @settings(max_examples=200, suppress_health_check=[HealthCheck.differing_executors])
    @given(arguments(names, VALUES + places))
    def fuzz(words):
        try:
            module.prepare(words)
        except ValueError as error:
            assert str(error) and "\n" not in str(error)
        else:
            assert module is plot, "only plot accepts folders without a checkpoint"

    before = sorted(place.rglob("*"))
    fuzz()
    assert sorted(place.rglob("*")) == before


NUMBERS = st.one_of(st.integers(-2, 70), st.sampled_from([10**6, 2**31, 0.5, 1e-9]))
OPTIONS = {
    "num_envs": NUMBERS,
    "total_steps": st.one_of(NUMBERS, st.just("10k")),
    "num_seeds": st.integers(-1, 3),
    "devices": st.one_of(st.just("auto"), st.integers(-1, 9)),
    "async_pools": st.integers(-1, 3),
    "overlap": st.booleans(),
    "protocol": st.sampled_from(["", "dqn2015", "dqn"]),
    "exact_resume": st.booleans(),
    "eval_envs": NUMBERS,
    "solved_threshold": NUMBERS,
    "env_options": st.dictionaries(
        st.sampled_from(["max_steps_in_episode", "gravity", "length", "max_episode_steps", "num_threads", "x"]),
        st.one_of(NUMBERS, st.booleans(), st.text(max_size=3)),
        max_size=2,
    ),
}
OF_AGENTS = {
    "ppo": {
        "rollout_length": NUMBERS,
        "num_minibatches": NUMBERS,
        "network": st.sampled_from(["mlp", "nature", "minatar"]),
        "memory": st.fixed_dictionaries({"kind": st.just("gru"), "size": NUMBERS, "sequence_length": NUMBERS}),
    },
    "dqn": {
        "batch_size": NUMBERS,
        "replay": st.fixed_dictionaries({"kind": st.just("uniform")}, optional={"size": NUMBERS, "n_step": NUMBERS}),
        "replay_ratio": NUMBERS,
        "value": st.one_of(
            st.just("mean"), st.fixed_dictionaries({"kind": st.sampled_from(["c51", "quantile"]), "atoms": NUMBERS})
        ),
    },
    "pqn": {"rollout_length": NUMBERS, "num_epochs": NUMBERS, "hidden_sizes": st.lists(NUMBERS, max_size=2)},
}
ENVS = [
    "CartPole-v1",
    "Pendulum-v1",
    "Breakout-MinAtar",
    "FourRooms-misc",
    "envpool/CartPole-v1",
    "envpool/Pendulum-v1",
]


@pytest.mark.slow
@pytest.mark.parametrize("algo", OF_AGENTS)
def test_any_options_give_plan_or_one_line_error(algo):
    """Each option may be valid alone, but not with the others, the environment or the memory."""

    @settings(max_examples=25)
    @given(
        st.fixed_dictionaries({"env": st.sampled_from(ENVS)}, optional=OPTIONS),
        st.fixed_dictionaries({}, optional=OF_AGENTS[algo]),
    )
    def fuzz(options, agent):
        parse_or_error(lambda: plan.validate_plan(load.from_keywords(algo=algo, **agent, **options)), plan.Plan)

    fuzz()
