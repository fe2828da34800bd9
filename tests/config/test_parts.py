"""Test options of parts: choosing a part brings its options into existence, and an option's name is its path."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_fast import train
from jaxrl_fast.config import load, resume
from jaxrl_fast.config.parts import apart, by_path, choose, find, known_options, named, read_values, to_plain
from jaxrl_fast.config.settings import Request, defaults, resolve, to_mapping
from jaxrl_fast.config.sources import from_mapping, tokenize
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import Part, choice, complete, configure, option, options_of, replace, value_of
from jaxrl_fast.options.dqn import DQN
from jaxrl_fast.options.host import Host
from jaxrl_fast.options.memory import NoMemory, OfReplay, Recurrent
from jaxrl_fast.options.ppo import PPO
from jaxrl_fast.sweep import __main__ as sweep_command
from jaxrl_fast.sweep import grid

pytestmark = pytest.mark.unit

algorithms = st.sampled_from(list(ALGORITHMS))


@st.composite
def records(draw):
    """Return the options of an algorithm with any parts, and with other numbers for some options."""
    record = ALGORITHMS[draw(algorithms)]()
    choices = {path: option for path, option in options_of(record).items() if option.parts}
    record = replace(record, {path: draw(st.sampled_from(list(option.parts))) for path, option in choices.items()})
    paths = draw(st.lists(st.sampled_from(numbers_of(record)), unique=True))
    return replace(record, {path: another(value_of(record, path)) for path in paths})


def numbers_of(record):
    return [path for path in options_of(record) if type(value_of(record, path)) in (int, float)]


def another(number):
    """Return another number within the bounds of every option with this default."""
    return number + 1 if isinstance(number, int) else number / 2 if number else 0.5


def settings_of(algo, preset, given=None):
    """Return the settings of a preset's mapping and of given options."""
    return resolve(Request(algo, "", from_mapping(preset), from_mapping(given or {})))


def parse(line):
    return load.from_command_line(line.split())


# Records of options


@given(records())
def test_by_path_of_plain_record_has_value_of_every_option(record):
    known = options_of(record)
    assert by_path(to_plain(record), known) == {path: value_of(record, path) for path in known}


@given(records())
def test_replace_and_configure_invert_value_of(record):
    values = {path: value_of(record, path) for path in options_of(record)}
    assert replace(type(record)(), values) == record
    parts = {name: getattr(record, name) for name in values if isinstance(getattr(record, name, None), Part)}
    own = {name: value for name, value in values.items() if "." not in name and name not in parts}
    assert configure(type(record), **own, **parts) == configure(type(record), **to_plain(record)) == record


@given(records())
def test_every_option_is_completed_from_its_path_and_last_word(record):
    known = options_of(record)
    for path in known:
        last = path.rpartition(".")[2]
        assert complete(path, known) == [path]
        assert path in complete(last, known) or last in known
    assert complete("no_such", known) == []


def test_options_of_a_record_are_those_of_its_chosen_parts():
    assert "memory.size" not in options_of(PPO)
    recurrent = options_of(replace(PPO(), {"memory": "gru"}))
    assert recurrent["memory.size"].default == 128 and recurrent["memory"].default == "none"
    assert [*recurrent["memory"].parts] == ["none", "gru", "lstm", "lru"]
    assert options_of(replace(DQN(), {"memory": "gru"}))["memory.sequence_length"].default == 40


def test_replace_of_an_option_keeps_the_part_and_of_a_word_keeps_an_equal_part():
    small = replace(PPO(), {"memory": "gru", "memory.size": 8})
    assert small.memory == Recurrent(size=8, kind="gru")
    assert replace(small, {"memory.sequence_length": 4}).memory.size == 8
    assert replace(small, {"memory": "gru"}) == small
    assert replace(small, {"memory": "lstm"}).memory == Recurrent(size=128, kind="lstm")
    with pytest.raises(TypeError, match="size"):
        replace(PPO(), {"memory.size": 8})


def test_configure_takes_words_mappings_records_and_last_words():
    expected = replace(DQN(), {"memory": "gru", "memory.size": 8, "replay.n_step": 3, "replay.size": 50})
    for memory in ({"kind": "gru", "size": 8}, OfReplay(size=8, kind="gru")):
        assert configure(DQN, memory=memory, n_step=3, replay={"size": 50}) == expected
    assert configure(DQN, memory="none") == DQN()
    with pytest.raises(
        ValueError, match=r"^size: must name one option, got replay.size, memory.size; use another name$"
    ):
        configure(DQN, memory="gru", size=8)
    with pytest.raises(ValueError, match=r"^burn_in: must name one option, got none; use another name$"):
        configure(DQN, burn_in=8)


@dataclasses.dataclass(frozen=True)
class Inner(Part):
    depth: int = option(1, "Depth.", bounds=(1,))


@dataclasses.dataclass(frozen=True)
class Outer(Part):
    inner: Part = choice("flat", "Part of a part.", flat=Part(), deep=Inner(depth=5))


@dataclasses.dataclass(frozen=True)
class Nested:
    rollout_length: int = 8
    outer: Outer = choice("one", "Part.", one=Outer(), two=Outer())


def test_parts_of_parts_are_chosen_and_named_by_path():
    written = from_mapping({"outer": {"kind": "two", "inner": {"kind": "deep", "depth": 7}}})
    (chosen,) = choose([Nested()], written)
    assert [*options_of(chosen)] == ["rollout_length", "outer", "outer.inner", "outer.inner.depth"]
    assert value_of(chosen, "outer.inner.depth") == options_of(chosen)["outer.inner.depth"].default == 5
    known = options_of(chosen)
    assert read_values(named(written, known), known)["outer.inner.depth"] == 7
    assert configure(Nested, outer="two", inner="deep", depth=7) == replace(chosen, {"outer.inner.depth": 7})
    deep = replace(chosen, {"outer.inner.depth": 7})
    assert to_plain(deep)["outer"] == {"kind": "two", "inner": {"kind": "deep", "depth": 7}}
    assert by_path(to_plain(deep), options_of(deep))["outer.inner.depth"] == 7


# Names in settings


def test_choose_uses_the_last_word_of_a_part_and_ignores_other_options():
    written = from_mapping({"memory": {"kind": "gru", "size": 8}, "replay": "prioritized"})
    _, chosen = choose(defaults("dqn"), written)
    assert chosen == configure(DQN, memory="gru", replay="prioritized")  # options of parts have their defaults
    _, last = choose(defaults("dqn"), tokenize(["--memory", "gru", "--memory", "none"])[1])
    assert last.memory == NoMemory(kind="none")


def test_apart_splits_the_mapping_of_a_part():
    known = known_options(defaults("ppo"))
    written = from_mapping(
        {"memory": {"kind": "gru", "size": 8}, "network": {"hidden_sizes": [4, 4]}, "env_options": {"kind": 3}},
        lambda name: f"{name} in x.yaml",
    )
    found = [(s.name, s.values, s.origin) for s in apart(written, known)]
    assert found == [
        ("memory", ["gru"], "memory in x.yaml"),
        ("memory.size", [8], "memory.size in x.yaml"),
        ("network.hidden_sizes", [4, 4], "network.hidden_sizes in x.yaml"),
        ("env_options", [("kind", 3)], "env_options in x.yaml"),
    ]


@pytest.mark.parametrize(
    ("word", "path", "values"),
    [
        ("--tau=1", "target.tau", ["1"]),
        ("--target.tau=1", "target.tau", ["1"]),
        ("--no-layer-norm", "network.layer_norm", ["false"]),
        ("--network.no-layer-norm", "network.layer_norm", ["false"]),
        ("--no-double", "double", ["false"]),
        ("--num-envs=3", "num_envs", ["3"]),
    ],
)
def test_find_returns_the_path_of_an_option(word, path, values):
    (setting,) = tokenize([word])[1]
    found = find(setting, known_options(defaults("dqn")))
    assert (found.name, found.values) == (path, values)


@given(st.data())
def test_given_option_overrides_preset_which_overrides_default(data):
    algo = data.draw(algorithms)
    record = data.draw(records().filter(lambda record: type(record) is ALGORITHMS[algo]) | st.just(ALGORITHMS[algo]()))
    path = data.draw(st.sampled_from(numbers_of(record)))
    preset = to_plain(record)
    value = another(value_of(record, path))
    for name in (path, *([last] if complete(last := path.rpartition(".")[2], options_of(record)) == [path] else [])):
        settings = settings_of(algo, preset, {name: value})
        assert settings.agent == replace(record, {path: value})
    assert settings_of(algo, preset).agent == record


@given(st.data())
def test_given_part_drops_the_options_of_the_preset_that_it_does_not_have(data):
    """Options that both parts have keep the preset's values; the others have the defaults of the given part."""
    algo = data.draw(algorithms)
    several = [(path, o) for path, o in options_of(ALGORITHMS[algo]).items() if len(o.parts) > 1]
    path, option = data.draw(st.sampled_from(several))
    before, after = (option.part(data.draw(st.sampled_from(list(option.parts)))) for _ in range(2))
    preset = replace(before, {name: another(value_of(before, name)) for name in numbers_of(before)})
    settings = settings_of(algo, {path: preset}, {path: after.kind})
    kept = {name: value_of(preset, name) for name in options_of(after) if name in options_of(before)}
    assert getattr(settings.agent, path) == replace(after, kept)


def test_part_without_alternatives_is_given_as_a_mapping():
    host = {"workers": 2, "async_pools": 1}
    for settings in (settings_of("ppo", {}, {"host": host}), settings_of("ppo", {"host": host})):
        assert settings.options.host == Host(workers=2, async_pools=1)


@pytest.mark.slow
@given(records())
def test_settings_are_read_back_from_their_file(record):
    algo = next(name for name, kind in ALGORITHMS.items() if kind is type(record))
    settings = settings_of(algo, to_plain(record))
    content = yaml.safe_load(yaml.safe_dump(to_mapping(settings)))
    assert settings.agent == record
    assert settings_of(content.pop("algo"), content) == settings


# Mistakes


MISTAKES = [
    ("dqn --memory gru --memory.sise 3", "memory.sise: unknown option; did you mean memory.size?"),
    ("dqn --memory gru --sequence-lenth 3", "sequence_lenth: unknown option; did you mean memory.sequence_length?"),
    ("dqn --memroy gru", "memroy: unknown option; did you mean memory or gpu_memory?"),
    (
        "ppo --memory.size 64",
        "memory.size: memory none has no such option, got 64; use memory gru, lstm, lru or MODULE:CLASS",
    ),
    (
        "ppo --network.options a=1",
        "network.options: network auto has no such option, got a=1; use network MODULE:CLASS",
    ),
    (
        "ppo --memory grru",
        "memory: must be 'none' or 'gru' or 'lstm' or 'lru' or a class (package.module:Class), got 'grru'; "
        "did you mean gru?",
    ),
    (
        "ppo --memory",
        "memory: needs a value; give 'none' or 'gru' or 'lstm' or 'lru' or a class (package.module:Class)",
    ),
    ("ppo --memory gru lstm", "memory: takes one value, got gru lstm"),
    (
        "dqn --memory gru --size 64",
        "size: must name one option, got one for each of replay.size and memory.size; use a whole name",
    ),
    ("ppo --gru", "gru: unknown option; did you mean memory gru?"),
    ("dqn --prioritized", "prioritized: unknown option; did you mean replay prioritized?"),
    ("dqn --no-memory", "no_memory: memory requires a value, got none; give it one"),
    ("ppo --memory gru --memory.burn-in 3", "memory.burn_in: ppo has no such option; dqn, pqn have it"),
    ("ppo --memory gru --size many", "size: must be a whole number (64, 64k, 10M, 1e6), got 'many'"),
    ("sac --crossq", "crossq: unknown option; did you mean target?"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistake_about_a_part_is_one_line(line, message):
    with pytest.raises(ValueError) as error:
        parse(line)
    assert str(error.value) == message + "; python -m jaxrl_fast.train --help all lists all" * message.endswith(
        "option"
    )


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"memory": {"size": 3}},
            "memory.size: memory none has no such option, got 3; use memory gru, lstm, lru or MODULE:CLASS",
        ),
        ({"memory": {"kind": "gru", "sise": 3}}, "memory.sise: unknown option; did you mean memory.size?"),
        (
            {"memory": {"kind": "gru", "size": 3}, "agent": {"size": 4}},
            "size: given twice, as memory.size and size; keep one",
        ),
        ({"memory": {"kind": "gru", "size": 3}, "agent": {"memory.size": 4}}, "memory.size: given twice; keep one"),
        ({"memory": {"kind": "gru", "size": "x"}}, "memory.size: must be a whole number (64, 64k, 10M, 1e6), got 'x'"),
        ({"memory": 3}, "memory: must be 'none' or 'gru' or 'lstm' or 'lru' or a class (package.module:Class), got 3"),
        ({"memory": "gru", "agent": {"memory": "gru"}}, "memory: given twice; keep one"),
    ],
)
def test_mistake_about_a_part_in_keywords(keywords, message):
    with pytest.raises(ValueError) as error:
        load.from_keywords(algo="ppo", **keywords)
    assert str(error.value) == message


def test_mistake_about_a_part_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("algo: dqn\nmemory: {kind: gru, sise: 3}\n")
    with pytest.raises(ValueError) as error:
        parse(f"--config {path}")
    assert str(error.value) == f"memory.sise in {path}: unknown option; did you mean memory.size?"


@pytest.mark.parametrize("name", ["seed", "num_envs", "players", "run_dir"])
def test_config_of_a_custom_algorithm_may_not_use_the_name_of_an_option_of_a_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = f"named_like_{name}"
    lines = (
        "from dataclasses import dataclass",
        "@dataclass(frozen=True)",
        f"class Config:\n    rollout_length: int = 8\n    {name}: int = 3",
        "def make(config, spec, num_updates): ...",
    )
    (tmp_path / f"{module}.py").write_text("\n".join(lines))
    with pytest.raises(ValueError) as error:
        load.from_keywords(algo=module)
    taken = f"Config.{name} has the name of an option of the run; rename it"
    assert str(error.value) == f"algorithm {module!r}: {taken}"


# Sweeps over parts


def swept(line):
    """Return the columns of a sweep, and the memory or replay and the number of members of each group."""
    asked = grid.from_command_line(line.split())
    return asked.columns, [(group.settings.agent, len(group.members)) for group in asked.groups]


def test_sweep_over_an_option_of_a_part_that_is_chosen_later():
    columns, groups = swept("ppo --memory.size 64,128 --memory gru")
    assert columns == ("memory.size",)
    assert [agent.memory for agent, _ in groups] == [Recurrent(size=size, kind="gru") for size in (64, 128)]


def test_sweep_over_parts_has_a_group_for_each():
    columns, groups = swept("dqn --replay uniform,prioritized")
    assert columns == ("replay",) and [agent.replay.kind for agent, _ in groups] == ["uniform", "prioritized"]
    columns, groups = swept("ppo --memory none,gru --seed 0,1")
    assert columns == ("memory",) and [(a.memory.kind, n) for a, n in groups] == [("none", 2), ("gru", 2)]


def test_sweep_over_parts_and_an_option_that_all_have():
    columns, groups = swept("ppo --memory gru,lstm --memory.size 64,128")
    assert columns == ("memory", "memory.size")
    found = [(agent.memory.kind, agent.memory.size) for agent, _ in groups]
    assert found == [("gru", 64), ("gru", 128), ("lstm", 64), ("lstm", 128)]
    columns, groups = swept("dqn --replay prioritized --replay.alpha 0.4,0.6")
    assert columns == ("replay.alpha",) and [n for _, n in groups] == [2]  # one program for both


def test_sweep_over_parts_from_python():
    asked = grid.from_keywords(algo="ppo", memory={"kind": "gru", "size": [64, 128]}, seed=[0, 1])
    assert asked == grid.from_command_line(["ppo", "--memory", "gru", "--memory.size", "64,128", "--seed", "0,1"])
    asked = grid.from_keywords(algo="ppo", memory=["none", "gru"])
    assert asked == grid.from_command_line(["ppo", "--memory", "none,gru"])
    (group,) = grid.from_keywords(algo="ppo", memory=Recurrent(size=8, kind="gru")).groups
    assert group.settings.agent.memory == Recurrent(size=8, kind="gru")
    with pytest.raises(ValueError, match=r"^memory: several values must be words, got \['none', \{'kind': 'gru'\}\]; "):
        grid.from_keywords(algo="ppo", memory=["none", {"kind": "gru"}])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "ppo --memory none,gru --memory.size 64,128",
            "memory.size: memory none has no such option, got 64; use memory gru, lstm, lru or MODULE:CLASS",
        ),
        ("ppo --memory gru,gru", "memory: has gru twice; keep one"),
        (
            "ppo --memory gru,grru",
            "memory: must be 'none' or 'gru' or 'lstm' or 'lru' or a class (package.module:Class), got 'grru'; "
            "did you mean gru?",
        ),
        ("ppo --no-retrry", "no_retrry: unknown option; did you mean retry?"),
    ],
)
def test_sweep_over_parts_with_a_mistake_is_one_line(line, message):
    with pytest.raises(ValueError) as error:
        swept(line)
    assert str(error.value) == message


# Resumes


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run with a memory, and its settings."""
    settings = settings_of("dqn", {"memory": {"kind": "gru", "size": 64}, "env_options": {"kind": 3, "x": 1}})
    content = to_mapping(settings) | {"meta": {"format": 3}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    return tmp_path, settings


@pytest.mark.parametrize("same", [{"memory": "gru"}, {"memory": {"kind": "gru", "size": 64}}, {"memory.size": 64}])
def test_resume_accepts_equal_parts(run, same):
    folder, settings = run
    assert load.from_keywords(resume=str(folder), **same).agent == settings.agent


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"memory": "lstm"}, "memory: a resume cannot change it from gru, got lstm"),
        ({"memory": "none"}, "memory: a resume cannot change it from gru, got none"),
        ({"memory": {"kind": "gru", "size": 32}}, "memory.size: a resume cannot change it from 64, got 32"),
        ({"memory.burn_in": 4}, "memory.burn_in: a resume cannot change it from 8, got 4"),
        ({"replay": {"kind": "uniform", "n_step": 3}}, "replay.n_step: a resume cannot change it from 1, got 3"),
    ],
)
def test_resume_compares_options_of_parts_by_path(run, other, message):
    with pytest.raises(ValueError) as error:
        load.from_keywords(resume=str(run[0]), **other)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("path", "value", "change"),
    [
        ("memory.size", 32, "was 64 when step was saved, got 32"),
        ("memory", "lstm", "was gru when step was saved, got lstm"),
        ("env_options", {"kind": 3, "x": 2}, "was {'kind': 3, 'x': 1} when step was saved, got {'kind': 3, 'x': 2}"),
    ],
)
def test_check_unchanged_compares_by_path(run, path, value, change):
    folder, settings = run
    before = to_mapping(settings)
    resume.check_unchanged(settings, before, folder, Path("step"))
    with pytest.raises(ValueError) as error:
        resume.check_unchanged(settings.replace(**{path: value}), before, folder, Path("step"))
    assert str(error.value) == f"{folder / 'config.yaml'}: {path} {change}; restore the file"


# Help


def help_text(line, capsys, monkeypatch, main=train.main):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_short_help_has_at_most_120_lines_and_one_for_each_part(algo, capsys, monkeypatch):
    lines = help_text(f"{algo} --help", capsys, monkeypatch).splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 120
    first_words = [line.split()[0].rstrip(",") for line in lines if line]
    for path, declared in options_of(ALGORITHMS[algo]).items():
        is_listed = "." not in path and "" not in declared.parts
        assert first_words.count(f"--{path.replace('_', '-')}") == is_listed, path
    assert "more options: output, system, checkpoints; --help NAME lists them" in " ".join(lines)


def test_help_of_a_part_shows_the_options_of_its_alternatives(capsys, monkeypatch):
    shown = help_text("dqn --help memory", capsys, monkeypatch)
    assert shown.startswith("  --memory none|gru|lstm|lru|MODULE:CLASS")
    assert (
        "\n--memory gru, lstm, lru, MODULE:CLASS: A recurrent layer that is trained on sequences of a replay.\n"
        in shown
    )
    assert "--memory.size N" in shown and "--memory.burn-in N" in shown and "(default: 40, >= 1)" in shown
    assert "--replay" not in shown
    assert help_text("dqn --memory gru --memory.size 7 --help memory.size", capsys, monkeypatch).endswith(
        "(default: 7, 1 to 65536)\n"
    )


def test_help_of_a_group_lists_its_options(capsys, monkeypatch):
    shown = help_text("ppo --help output", capsys, monkeypatch)
    assert shown.strip().startswith("output: Names, logs and terminal output.")
    assert "--run-dir TEXT" in shown and "--dry-run, --no-dry-run" in shown and "--num-envs" not in shown


def test_help_of_all_lists_every_option_of_the_chosen_parts(capsys, monkeypatch):
    shown = help_text("dqn --memory gru --replay prioritized --help all", capsys, monkeypatch).replace(",", " ")
    chosen = parse("dqn --memory gru --replay prioritized")
    for path in (path for path, one in chosen.known.items() if "" not in one.parts):
        assert f"--{path.replace('_', '-').replace('options', 'option')} " in shown, path
    assert "--value.v-min" not in shown


@pytest.mark.parametrize(
    ("main", "line"), [(train.main, "ppo --help memroy"), (sweep_command.main, "ppo --seed 0,1 --help memroy")]
)
def test_help_of_an_unknown_topic_is_a_mistake(main, line, capsys):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    message = "help: no option, part or group has this name, got memroy; did you mean memory or gpu_memory?"
    assert (out, err) == ("", f"error: {message}\n")
