"""What docs/ says is so: every metric and option is explained, defaults and names are right, links lead somewhere."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

import jaxrl_fast
from jaxrl_fast import agents, envs, loop
from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.config import load, presets
from jaxrl_fast.config.names import ELSEWHERE
from jaxrl_fast.config.options import Options, types_of
from jaxrl_fast.metrics import records
from jaxrl_fast.rollout import collect, reset
from jaxrl_fast.types import Agent, Decision

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
OWN = {name: {f.name: f.default for f in dataclasses.fields(kind)} for name, kind in CONFIGS.items()}
COMMAND = re.compile(r"^python -m jaxrl_fast\.train ([^#\n]*)", re.MULTILINE)


def rows(page, heading):
    """Cells of the tables below a heading, up to the next one of its level."""
    section = re.split(r"^## ", page.split(f"## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def explained(page, heading):
    """Names in the first column, in backquotes, that have words beside them."""
    return {cells[0].strip("`") for cells in rows(page, heading) if cells[0].startswith("`") and cells[1]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training of a second, for the names of what it writes."""
    small = dict(num_envs=2, total_steps=256, eval_episodes=2, tensorboard=False, log_level="quiet")
    folder = tmp_path_factory.mktemp("docs") / "run"
    return jaxrl_fast.fit(algo="pqn", env="Catch-bsuite", agent={"hidden": (4,)}, run_dir=str(folder), **small)


def own_metrics(algo):
    """Of the algorithm's updates, traced only."""
    env = envs.make("CartPole-v1", 2)
    agent = agents.load(algo).make(CONFIGS[algo](), env.spec, 10)
    train = lambda: loop.train(env, agent, loop.init(env, agent, jax.random.key(0)), 1)[1]
    return {k.removesuffix(records.SUM_SUFFIX) for k in jax.eval_shape(train) if k not in records.SCORES}


@pytest.mark.parametrize("algo", CONFIGS)
def test_every_metric_of_an_algorithm_is_explained(algo):
    assert explained(PAGES[algo], "Metrics") == own_metrics(algo)


def test_every_other_metric_is_explained_and_named_on_each_page(run):
    common = set().union(*run.metrics) - own_metrics("pqn")
    assert explained(PAGES["metrics"], "metrics.jsonl") == common
    for algo in CONFIGS:
        unnamed = {key for key in common if f"`{key}`" not in PAGES[algo]}
        assert not unnamed


def test_every_number_of_the_summary_is_explained(run):
    assert explained(PAGES["metrics"], "summary.json") == set(run.summary)


@pytest.mark.parametrize("algo", CONFIGS)
def test_every_option_is_explained_with_its_default(algo):
    told = {cells[0].strip("`"): cells[1].strip("`") for cells in rows(PAGES[algo], "Options")[1:]}
    assert told == {name: str(default) for name, default in OWN[algo].items()}


def test_options_named_for_movers_exist():
    known = set(types_of(Options)) | {f"agent.{name}" for own in OWN.values() for name in own}
    page = re.sub(r"--agent\.no-(\w+)", r"--agent.\1", PAGES["moving"])
    ours = [cells[1] for text in page.split("\n## ")[2:] for cells in rows(f"## {text}", text.splitlines()[0])[1:]]
    named = {name for cell in ours for name in re.findall(r"`([^`]+)`", cell)}
    named |= {name.replace("-", "_") for name in re.findall(r"`--(agent\.[a-z-]+)", page)}
    named |= set(re.findall(r"`(agent\.[a-z_]+)`", page))
    assert len(named) > 30
    assert named <= known


def test_names_of_other_libraries_are_answered_with_ours():
    """Those of the page that are one name there and one here."""
    told = re.findall(r"^\| `(?:--)?([\w-]+)` \| `([\w.]+)` \|", PAGES["moving"], re.MULTILINE)
    plain = {there.lower().replace("-", "_"): here for there, here in told}
    other = {there: here for there, here in plain.items() if there != here.removeprefix("agent.")}
    assert len(other) > 20
    assert {there: ELSEWHERE.get(there) for there in other} == other


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page):
    for line in COMMAND.findall(PAGES[page]):
        if "my_package" not in line:
            load.from_command_line(line.split())


@pytest.mark.parametrize("page", PAGES)
def test_presets_named_are_shipped(page):
    named = set(re.findall(r"(?:--config |curves\.py |`)((?:ppo|dqn|pqn|rainbow)_[a-z_]+)", PAGES[page]))
    assert named <= set(presets.shipped())


@pytest.mark.parametrize("page", [*PAGES, "README"])
def test_links_lead_somewhere(page):
    text = PAGES.get(page) or (ROOT / "README.md").read_text(encoding="utf-8")
    folder = ROOT / "docs" if page in PAGES else ROOT
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (folder / name) if name else folder / f"{page}.md"
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}, target


class Steps:
    """Shows how many steps were made, pays 1 for each, dies by action 1, and runs out of time after 3."""

    default_params = ()

    def reset_env(self, key, params):
        return jnp.zeros(1), jnp.float32(0)

    def step_env(self, key, state, action, params):
        return state[None] + 1, state + 1, jnp.float32(1), action == 1, {}

    def is_truncated(self, state, params):
        return state >= 3

    def action_space(self, params):
        return spaces.Discrete(2)


def test_the_table_of_rows_is_what_is_played():
    table = PAGES["environments"].split("<!-- test: rows -->")[1].split("\n\n")[0]
    told = [[c.strip() for c in line.split("|")[2:-1]] for line in table.splitlines() if re.match(r"\| \d", line)]
    actions = jnp.array([[int(row[1])] for row in told], jnp.int32)
    env, play = envs.make(Steps, 1), lambda obs, memory, noise: Decision(noise)
    agent = Agent(*(None,) * 5, rollout_length=len(told))
    actors = reset(env, agent, jax.random.key(0))
    act = partial(collect, env, agent, play, num_steps=len(told))
    _, rollout, _ = jax.jit(act)(actors, actions)
    steps = jax.tree.map(lambda x: np.asarray(x).reshape(len(told)), rollout.steps._replace(extras=np.zeros(len(told))))
    following = [*steps.obs[1:], float(np.asarray(rollout.next_obs).item())]
    say = lambda x: ("no", "yes")[int(x)] if isinstance(x, np.bool_) else f"{x:g}"
    columns = steps.obs, steps.action, steps.reward, steps.discount, steps.last, steps.valid, following
    assert told == [[say(x) for x in row] for row in zip(*columns, strict=True)]
