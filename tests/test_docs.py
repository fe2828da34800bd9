"""Test docs/: tables are complete, names exist, commands are valid, and links have targets."""

import dataclasses
import importlib.util
import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

import jaxrl_fast
from jaxrl_fast import envs
from jaxrl_fast.config import load, presets
from jaxrl_fast.config.names import ELSEWHERE, all_options
from jaxrl_fast.config.sources import SINGULAR
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import Part, choice, complete, fields_of, option, options_of, part, value_of
from jaxrl_fast.options.run import OF_RUN, Options, SweepOptions
from jaxrl_fast.options.search import SearchOptions
from jaxrl_fast.rollout import collect, reset
from jaxrl_fast.types import Agent, Decision

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
NOTES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(RESULTS.glob("*.md"))}
README = {"README.md": (ROOT / "README.md").read_text(encoding="utf-8")}
MUJOCO = ("envpool/HalfCheetah", "envpool/Hopper", "envpool/Walker2d", "envpool/Ant", "envpool/Humanoid", "playground/")
COMMAND = re.compile(r"^python -m jaxrl_fast\.train ([^#\n]*)", re.MULTILINE)
TEST = re.compile(r"`(test_\w+\.py)?(?:::(test_\w+))?(\.\.\.)?`")


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = _load(DOCS / "tables.py")


def cells(table):
    """Return the cells of a Markdown table, without its header."""
    lines = [line for line in table.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def rows(page, heading):
    """Return the cells of the tables below a heading, up to the next heading of its level."""
    section = re.split(r"^## ", page.split(f"## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return cells("| \n| ---\n" + "\n".join(x for x in section.splitlines() if not x.startswith("| ---")))


# The generator


def written(value):
    """Return a default as the tables write it."""
    words = {"None": "none", "()": "(empty)", "{}": "(empty)", "True": "true", "False": "false", "": "(empty)"}
    return words.get(str(value), str(value))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_option_has_one_row_with_default_and_meaning(algo):
    own = cells(tables.options(algo).split("\n\n")[0])
    fields = {
        path: field
        for path, field in options_of(ALGORITHMS[algo]).items()
        if not field.parts and fields_of(ALGORITHMS[algo])[path.partition(".")[0]].parts.keys() <= {""}
    }
    assert [name.strip("`") for name, *_ in own] == [*fields]
    assert [default.strip("`") for _, default, _ in own] == [written(field.default) for field in fields.values()]
    assert all(len(words) > 5 for *_, words in own)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_alternative_of_every_part_has_its_options_in_table(algo):
    first, *others = re.split(r"^### (\w+)$", tables.options(algo), flags=re.MULTILINE)
    told = cells(first.split("Parts, each")[1])
    choices = {name: field for name, field in fields_of(ALGORITHMS[algo]).items() if field.parts.keys() - {""}}
    assert [row[0].strip("`") for row in told] == [*choices]
    shown = dict(zip(others[::2], map(cells, others[1::2]), strict=True))
    for (_, default, words, _), (name, field) in zip(told, choices.items(), strict=True):
        assert default.strip("`") == field.default.kind
        parts = {**field.parts} | ({"package.module:Class": field.custom} if field.custom else {})
        assert re.findall(r"`([^`]+)`", words) == [*parts]
        rows = shown.get(name, [])
        for word, alternative in parts.items():
            having = [row for row in rows if row[1] == "all" or f"`{word}`" in row[1]]
            values = {f"`{name}.{x}`": f"`{written(value_of(alternative, x))}`" for x in options_of(alternative)}
            assert {row[0]: row[2] for row in having} == values
            assert len(having) == len(values) and all(len(row[3]) > 5 for row in having)


def test_options_of_part_that_alternatives_declare_differently_have_separate_rows():
    @dataclasses.dataclass(frozen=True)
    class Small(Part):
        size: int = option(1, "Number of units.")

    @dataclasses.dataclass(frozen=True)
    class Config:
        memory: Part = choice("one", "Memory.", one=Small(), two=Small(size=2), other=Small(size=2), none=Part())

    assert cells(tables.part_table(fields_of(Config)["memory"])) == [
        ["`memory.size`", "`one`", "`1`", "Number of units."],
        ["`memory.size`", "`two`, `other`", "`2`", "Number of units."],
    ]


OF_COMMANDS = {"train": Options, "sweep": SweepOptions, "search": SearchOptions}


@pytest.mark.parametrize("name", [*OF_COMMANDS, *tables.COMMANDS])
def test_every_command_option_has_one_row(name):
    kind = OF_COMMANDS[name] if name in OF_COMMANDS else tables.options_of(name)
    told = re.findall(r"^\| `--([\w.-]+)` \| `[^`]+` \| .{5,} \|$", tables.command(name), re.MULTILINE)
    own = {path for path, known in options_of(kind).items() if "" in known.parts}  # have no value of their own
    names = [path for path in all_options(kind()) if path not in own]
    assert sorted(told) == sorted(SINGULAR.get(name, name).replace("_", "-") for name in names)


def test_option_table_rejects_option_without_help():
    @dataclasses.dataclass(frozen=True)
    class Config:
        told: int = option(1, "Something.")
        untold: int = 2

    with pytest.raises(ValueError, match="the option untold has no help"):
        tables.option_table(fields_of(Config))


def test_group_table_has_part_without_alternatives_by_its_options():
    @dataclasses.dataclass(frozen=True)
    class Host(Part):
        workers: int = option(1, "Something else.")

    @dataclasses.dataclass(frozen=True)
    class System:
        host: Host = part(Host(), "Stepping.")

    assert cells(tables.group_table(System)) == [["`--host.workers`", "`1`", "Something else."]]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_metric_is_explained(algo):
    told = {name.strip("`"): words for name, *words in cells(tables.metrics(algo))}
    assert set(told) == tables.own_metrics(algo)
    assert all(all(words) for words in told.values())


def test_check_names_rejects_unexplained_metric():
    with pytest.raises(ValueError, match="differ in entropy"):
        tables.check_names("ppo", ["loss", "entropy"], ["loss"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run of about one second, for the names of its metrics and of its summary."""
    small = dict(num_envs=2, total_steps=256, eval_episodes=2, loggers=(), log_level="quiet")
    folder = tmp_path_factory.mktemp("docs") / "run"
    small |= dict(hidden_sizes=(4,), wrap=["quarantine"])
    return jaxrl_fast.fit(algo="pqn", env="Catch-bsuite", run_dir=str(folder), **small)


@pytest.mark.slow
def test_every_common_metric_is_explained(run):
    assert set(tables.explained()["record"]) == set().union(*run.metrics) - tables.own_metrics("pqn")


@pytest.mark.slow
def test_every_entry_of_summary_is_explained(run):
    assert set(tables.explained()["summary"]) == set(run.summary)


def test_every_training_of_learning_json_is_in_table():
    kept = json.loads((RESULTS / "learning.json").read_text(encoding="utf-8"))
    told = tables.published()
    assert set(told["learning"]) == set(kept) - set(told["mujoco"])


def test_row_of_results_equals_hand_computation_from_file():
    """Compare the row of ppo_mountain_car with values computed by hand from learning.json."""
    told = {row[0]: row[1:] for row in cells(tables.learning("ppo_mountain_car"))}
    expected = ["1M", "10 to 14", "-111.4 ± 2.4", "-105.7 ± 2.1", "803k (4 of 5)", ""]
    assert told["`ppo_mountain_car`"] == expected
    assert "--num-seeds 5 --first-seed 10 ppo_mountain_car" in tables.learning("ppo_mountain_car")


def test_mujoco_presets_are_measured_or_listed_as_not_measured():
    told = {row[0]: row[1:] for row in cells(tables.mujoco("ddpg"))}
    assert told["`ddpg_hopper`"][:2] == ["envpool/Hopper-v4", "1M"] and len(told) == 4
    assert all(row[3] == "not yet measured" or row[2] for row in told.values())
    names = {name for name in presets.shipped() if load.from_keywords(name).options.env.startswith(MUJOCO)}
    assert set(tables.published()["mujoco"]) == names


@pytest.mark.slow
@pytest.mark.parametrize("page", [*PAGES, *README])
def test_every_table_mark_of_page_can_be_rendered(page):
    for words in tables.MARK.findall({**PAGES, **README}[page]):
        assert len(cells(tables.render(words))) > 0 or words.startswith("source")


def test_pages_use_all_kinds_of_tables_and_no_unknown_kind():
    asked = {words.split()[0] for page in [*PAGES.values(), *README.values()] for words in tables.MARK.findall(page)}
    assert asked == set(tables.KINDS)
    with pytest.raises(ValueError, match="there is no kind 'nothing'"):
        tables.render("nothing at all")


@pytest.mark.parametrize("kind", ["readme_results", "readme_speed"])
def test_readme_tables_are_up_to_date(kind):
    assert f"<!-- table: {kind} -->\n{tables.render(kind)}\n" in README["README.md"]


# Pages written by hand


def test_every_algorithm_page_has_same_headings_in_order():
    for algo in ALGORITHMS:
        headings = re.findall(r"^## (.*)$", PAGES[f"docs/algorithms/{algo}.md"], re.MULTILINE)
        assert [h.removesuffix(" from the paper").removesuffix(" from the papers") for h in headings] == [
            "Command", "Options", "Metrics", "Deviations", "Results",
        ]  # fmt: skip


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_options_with_advice_exist(algo):
    advice = PAGES[f"docs/algorithms/{algo}.md"].split("When to change them:")[1].split("\n## ")[0]
    heads = [line.partition("`: ")[0] for line in re.findall(r"^- (.*)$", advice, re.MULTILINE)]
    named = {pair for line in heads for pair in re.findall(r"`([\w.]+)(?:: (\w+))?", line)}
    parts = {name: known.parts for name, known in options_of(ALGORITHMS[algo]).items()}
    assert {name for name, _ in named} <= {*all_options(ALGORITHMS[algo]())}
    assert all(word in parts[name] for name, word in named if word and parts[name])
    assert len(named) > 4


def test_options_in_migration_guide_exist():
    known = {*OF_RUN} | {path for kind in ALGORITHMS.values() for path in all_options(kind())}
    page = PAGES["docs/guides/migrating.md"]
    ours = [line[1] for text in page.split("\n## ")[2:] for line in rows(f"## {text}", text.splitlines()[0])[1:]]
    named = {name for cell in ours for name in re.findall(r"`([^`]+)`", cell)}
    assert len(named) > 30
    assert named <= known
    written = {name.replace("-", "_") for name in re.findall(r"jaxrl_fast's `--([\w.-]+)", page)}
    assert all(len(complete(name, known)) == 1 for name in written)


def test_names_in_migration_guide_have_suggestions():
    """Check rows of the guide that map one name of another library to one option of jaxrl_fast."""
    page = PAGES["docs/guides/migrating.md"]
    told = re.findall(r"^\| `(?:--)?([\w-]+)` \| `([\w.]+)` \|", page, re.MULTILINE)
    plain = {there.lower().replace("-", "_"): here for there, here in told}
    other = {there: here for there, here in plain.items() if there != here.rpartition(".")[2]}
    assert len(other) > 20
    assert {there: ELSEWHERE.get(there) for there in other} == other


@pytest.mark.parametrize("page", PAGES)
def test_documented_commands_can_be_parsed(page):
    for line in COMMAND.findall(PAGES[page]):
        if not re.search("my_package|hill_climbing|penalized_ppo|clipped_sac|--resume|--help", line):
            load.from_command_line(load.gpu_of(line.split())[1])


def test_refusal_of_an_option_in_the_reference_is_the_message_of_the_command():
    (told,) = re.findall(r"^error: (.*)$", PAGES["docs/reference/cli.md"], re.MULTILINE)
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        load.from_command_line(["ppo", "--memory.size", "64"])


@pytest.mark.parametrize("name", ["memory", "output", "total_steps", "all"])
def test_topics_of_help_in_the_reference_exist(name, capsys):
    assert f"| `--help {name}` |" in PAGES["docs/reference/cli.md"]
    with pytest.raises(SystemExit) as end:
        load.from_command_line(["ppo", "--help", name])
    assert end.value.code == 0 and capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES)
def test_documented_presets_are_shipped(page):
    named = set(
        re.findall(r"(?:--config |curves\.py |`)((?:ppo|dqn|pqn|rainbow|sac|td3|ddpg)_[a-z_]+[a-z])", PAGES[page])
    )
    assert named <= {*presets.shipped(), *(path.stem for path in RESULTS.glob("*.json"))}


def test_tests_in_guarantees_exist():
    """Files may be in any folder of tests/. A name with three dots is the prefix of one or more tests."""
    functions = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        functions[path.name] = re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    file, count = "", 0
    for name, function, dots in TEST.findall(PAGES["docs/reference/guarantees.md"]):
        file = name or file
        assert file in functions, file
        count += 1
        found = [known for known in functions[file] if known == function or dots and known.startswith(function)]
        assert found or not function, f"{file}::{function}"
    assert count > 50


@pytest.mark.parametrize("page", [*PAGES, *NOTES, *README])
def test_links_have_targets(page):
    text, folder = {**PAGES, **NOTES, **README}[page], (ROOT / page).parent
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (folder / name) if name else ROOT / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}, target


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = re.findall(r"[\w/.-]+\.(?:md|ipynb)", text)
    pages = {page.removeprefix("docs/") for page in PAGES}
    notebooks = {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert sorted(named) == sorted(pages | notebooks)


class Steps:
    """The observation is the number of steps, the reward is 1. Action 1 terminates; step 3 is truncated."""

    default_params = ()

    def reset_env(self, key, params):
        return jnp.zeros(1), jnp.float32(0)

    def step_env(self, key, state, action, params):
        return state[None] + 1, state + 1, jnp.float32(1), action == 1, {}

    def is_truncated(self, state, params):
        return state >= 3

    def action_space(self, params):
        return spaces.Discrete(2)


def test_table_of_episode_ends_equals_collected_rollout():
    table = PAGES["docs/concepts/episode-ends.md"].split("<!-- test: rows -->")[1].split("\n\n")[0]
    told = [[c.strip() for c in line.split("|")[2:-1]] for line in table.splitlines() if re.match(r"\| \d", line)]
    actions = jnp.array([[int(row[1])] for row in told], jnp.int32)
    env, play = envs.make(Steps, 1), lambda inputs, carry, noise: Decision(noise)
    agent = Agent(*(None,) * 4, rollout_length=len(told))
    actors = reset(env, agent, jax.random.key(0))
    act = partial(collect, env, agent, play, num_steps=len(told))
    _, rollout, _ = jax.jit(act)(actors, actions)
    steps = jax.tree.map(lambda x: np.asarray(x).reshape(len(told)), rollout.steps._replace(extras=np.zeros(len(told))))
    following = [*steps.obs[1:], float(np.asarray(rollout.next_obs).item())]
    say = lambda x: ("no", "yes")[int(x)] if isinstance(x, np.bool_) else f"{x:g}"
    columns = steps.obs, steps.action, steps.reward, steps.discount, steps.last, steps.valid, following
    assert told == [[say(x) for x in row] for row in zip(*columns, strict=True)]
