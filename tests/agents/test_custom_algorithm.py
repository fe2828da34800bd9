"""Custom algorithm modules: the examples in docs/, given by name and as an imported module."""

import dataclasses
import importlib
import itertools
import json
import os
import re
import sys
import types
from pathlib import Path

import jax
import pytest
import yaml

import jaxrl_fast
from jaxrl_fast import agents, envs, evaluate, loop, train
from jaxrl_fast.config import load
from jaxrl_fast.options.declare import configure
from jaxrl_fast.sweep import __main__, grid
from jaxrl_fast.training import plan
from jaxrl_fast.utils import importing

ROOT = Path(__file__).parents[2]


def modules_on_page(page):
    """The Python code blocks of a page that define `make`."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if "def make(" in block]


(HILL_CLIMBING,) = modules_on_page("docs/extending/algorithm.md")
OTHERS = {"docs/extending/change-a-loss.md": ["kl", "td_loss"]}  # a metric of each module on the page
CONTINUOUS = {"env": "Pendulum-v1", "learning_starts": "1k", "replay_ratio": "0.01"}
OPTIONS = {"env": "CartPole-v1", "num_envs": 8, "loggers": (), "log_level": "quiet"}
count = itertools.count()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a module with a new name into the current directory and returns the name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        name = f"own{os.getpid()}_{next(count)}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return name

    return write


def flags(**options):
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_all_documented_algorithm_modules_are_tested():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {p.relative_to(ROOT).as_posix() for p in pages if re.search(r"^def make\(", p.read_text("utf-8"), re.M)}
    assert found == {"docs/extending/algorithm.md", *OTHERS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "index", "more"),
    [("docs/extending/change-a-loss.md", 0, {"beta": 0.5}), ("docs/extending/change-a-loss.md", 1, CONTINUOUS)],
    ids=["loss", "gradient"],
)
def test_documented_modules_train_and_resume(write, page, index, more):
    assert len(modules_on_page(page)) == len(OTHERS[page])
    name = write(modules_on_page(page)[index])
    quick = flags(**OPTIONS | {"loggers": "none"} | more, total_steps="8k", eval_episodes=4)
    assert train.main([name, *quick, "--run-dir", "./run"]) == 0
    assert train.main(["--resume", "run", "--total-steps", "10k", "--log-level", "quiet"]) == 0
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["env_steps"] >= 10_000 and isinstance(last[OTHERS[page][index]], float)


@pytest.mark.slow
def test_documented_penalty_keeps_policy_closer_for_larger_weight(write):
    """The divergence from the old policy is the mean over gradient steps. The first of them has none."""
    module = importlib.import_module(write(modules_on_page("docs/extending/change-a-loss.md")[0]))
    env = envs.make("CartPole-v1", 2)
    small = dict(rollout_length=16, num_minibatches=1, num_epochs=8, hidden_sizes=(4,), learning_rate=1e-2)

    @jax.jit
    def divergence(beta):
        agent = module.make(configure(module.Config, **small, beta=beta), env.spec, 2)
        return loop.train(env, agent, loop.init(env, agent, jax.random.key(0)), 1)[1]["kl"][0]

    assert module.Config().beta == 1.0
    assert 0 < divergence(100.0) < 0.5 * divergence(0.0)


@pytest.mark.slow
def test_algorithm_given_by_name_trains_resumes_and_evaluates(write, tmp_path):
    name = write(HILL_CLIMBING)
    quick = flags(**OPTIONS | {"loggers": "none"}, total_steps="160k", eval_episodes=16)
    assert train.main([name, *quick, "--spread", "0.5", "--run-dir", "./run"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["algo"], summary["env_steps"]) == (name, 160_000)
    assert summary["final_return_mean"] > 60  # a random policy has 22
    kept = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (kept["rollout_length"], kept["spread"]) == (200, 0.5)
    assert train.main(["--resume", "run", "--total-steps", "200k", "--log-level", "quiet"]) == 0
    best = [json.loads(text)["best_score"] for text in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len(best) == 125 and best == sorted(best)  # the resumed run kept its state
    assert evaluate.main(["run", "--episodes", "8"]) == 0
    assert 0 <= jaxrl_fast.load("run").policy([0.0, 0.0, 0.1, 0.0]) <= 1


@pytest.mark.slow
def test_run_stops_if_weights_of_any_name_are_not_finite(write, capsys):
    """An algorithm that names its parameters may have infinite numbers elsewhere in its state."""
    infinite = HILL_CLIMBING.replace('return {"best"', 'return {"most": jnp.float32(jnp.inf), "best"')
    infinite = infinite.replace('state = {"best"', 'state = {"most": state["most"], "best"')
    named = infinite.replace("config.rollout_length)", 'config.rollout_length, parameters=lambda s: s["trial"])')
    for text, status in ((infinite, 1), (named, 0)):
        assert train.main([write(text), *flags(**OPTIONS | {"loggers": "none"}, total_steps=3200)]) == status
        error = capsys.readouterr().err
        assert ("seed 0: a parameter is not finite at step" in error) == (status == 1), error


@pytest.mark.slow
def test_fit_accepts_module_and_module_name(write):
    module = importlib.import_module(write(HILL_CLIMBING))
    run = jaxrl_fast.fit(algo=module, total_steps=8000, num_seeds=2, spread=1, **OPTIONS)
    first, second = ([r["best_score"] for r in run.metrics if r["seed"] == seed] for seed in (0, 1))
    assert run.summary["algo"] == module.__name__ and first != second
    again = jaxrl_fast.fit(algo=module.__name__, total_steps=8000, seed=1, spread=1, **OPTIONS)
    assert [r["best_score"] for r in again.metrics] == pytest.approx(second)


def with_spread(text, declared):
    """Declare the module's `spread` with `option`."""
    found = text.replace("@dataclass", "from jaxrl_fast import option\n@dataclass")
    found = re.sub(r"    spread: float = .*", f"    spread: float = option(0.1, {declared})", found)
    assert declared in found
    return found


def with_traced(text):
    """Declare `spread` as traced. `make` uses it only in arithmetic."""
    return with_spread(text, "traced=True")


@pytest.mark.slow
def test_sweep_trains_values_of_traced_option_in_one_program(write):
    """Both members have the same first trial. The second trial depends on the member's spread."""
    name = write(with_traced(HILL_CLIMBING))
    assert __main__.main([name, *flags(**OPTIONS | {"loggers": "none"}, total_steps="16k"), "--spread", "0,2"]) == 0
    (folder,) = Path("sweeps").iterdir()
    members = yaml.safe_load((folder / "01" / "config.yaml").read_text())["meta"]["members"]
    assert members == [{"seed": 0, "option.spread": 0.0}, {"seed": 0, "option.spread": 2.0}]
    records = [json.loads(text) for text in (folder / "01" / "metrics.jsonl").read_text().splitlines()]
    still, moving = ([r["return_mean"] for r in records if r["option.spread"] == spread] for spread in (0.0, 2.0))
    assert still[0] == moving[0] and still[1] != moving[1]


def test_sweep_groups_float_values_only_if_option_is_traced(write):
    sizes = lambda text: [
        len(group.members)
        for group in grid.from_keywords(algo=write(text), spread=[0.1, 0.5], rollout_length=[8, 16]).groups
    ]
    assert sizes(HILL_CLIMBING) == [1, 1, 1, 1]
    assert sizes(with_traced(HILL_CLIMBING)) == [2, 2]


@pytest.mark.slow
def test_sweep_varies_option_that_is_used_in_python_condition(write):
    """A traced `spread` would fail in the condition, so each value is a separate program."""
    asking = HILL_CLIMBING.replace(
        "    shape = ", "    assert config.spread > 0 or config.rollout_length\n    shape = "
    )
    assert asking != HILL_CLIMBING
    options = OPTIONS | {
        "total_steps": 1600,
        "eval_episodes": 8,
        "spread": [0.0, 2.0],
        "rollout_length": 100,
    }
    swept = jaxrl_fast.sweep(algo=write(asking), **options)
    assert swept.status == 0 and [row["spread"] for row in swept.results] == [0.0, 2.0]
    assert [row["status"] for row in swept.results] == ["done", "done"]
    assert (swept.folder / "02_spread-2.0" / "summary.json").is_file()


WRONG = {
    "no_make": ("Config = int", "got no make"),
    "nothing": ("", "got no Config and no make"),
    "no_dataclass": ("Config = int\ndef make(): ...", "Config must be a dataclass, got builtins:int; add"),
    "no_default": (
        HILL_CLIMBING.replace("int = 200", "int"),
        "fields of Config must have defaults, got none for rollout_length",
    ),
    "no_rollout": (
        HILL_CLIMBING.replace("rollout_length: int", "steps: int"),
        "Config must have a field rollout_length",
    ),
    "no_types": (
        HILL_CLIMBING.replace("spread: float", "spread: 'Nowhere'"),
        "the fields of Config cannot be read (name",
    ),
    "leaves": ("raise SystemExit(0)", "failed with SystemExit: 0"),
    "no_import": ("import nowhere_at_all", "failed with ModuleNotFoundError: No module named 'nowhere_at_all'"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_train_rejects_invalid_algorithm_module_in_one_line(write, text, said, tmp_path, capsys):
    name = write(text)
    assert train.main([name, *flags(**OPTIONS | {"loggers": "none"}, total_steps="160k")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error
    assert not (tmp_path / "runs").exists()


def test_error_message_has_location_for_bugs_but_not_for_errors_of_make(write, tmp_path, capsys):
    """A ValueError of `make` is a message for users. A ValueError from elsewhere is a bug and gets its location."""
    broken = HILL_CLIMBING.replace("        better = ", "        one, two, three, four = state\n        better = ")
    for text, said in (
        (broken, "cannot learn in gymnax/CartPole-v1: ValueError: not enough values to unpack"),
        (HILL_CLIMBING.replace("    shape = ", "    raise ValueError('no')\n    shape = "), "error: no\n"),
        (
            HILL_CLIMBING.replace("    shape = ", "    raise ValueError('rollout_length: no')\n    shape = "),
            "error: rollout_length: no\n",
        ),
        (
            HILL_CLIMBING.replace("    shape = ", "    raise ValueError('total_steps: no')\n    shape = "),
            "error: total_steps: no\n",
        ),
    ):
        name = write(text)
        assert train.main([name, *flags(**OPTIONS | {"loggers": "none"}, total_steps="160k")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error, error
        assert (f"({name}.py:" in error) == (text == broken)


@pytest.mark.parametrize(("env", "said"), [("Pendulum-v1", "AttributeError"), ("Breakout-MinAtar", "TypeError")])
def test_train_rejects_unsupported_environment_in_one_line(write, env, said, tmp_path, capsys):
    name = write(HILL_CLIMBING)
    assert train.main([name, *flags(**OPTIONS | {"loggers": "none", "env": env})]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"algorithm {name!r} cannot learn in gymnax/{env}: {said}" in error
    assert f"({name}.py:" in error and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("algo", "said"),
    [
        ("{}.py", "unknown algorithm '{0}.py'; give the name by which Python imports it, such as {0}"),
        ("pqm", "unknown algorithm 'pqm'; did you mean pqn"),
        ("json", "unknown algorithm 'json'; there are"),
        ("a_folder", "unknown algorithm 'a_folder'; there are"),
        ("a-b", "unknown algorithm 'a-b'; there are"),
        ("no_package.mine", "unknown algorithm 'no_package.mine'; there are"),
    ],
)
def test_config_rejects_unknown_algorithm_name_with_suggestion(write, algo, said, tmp_path):
    name = write(HILL_CLIMBING)
    (tmp_path / "a_folder").mkdir()
    with pytest.raises(ValueError, match=f"^{re.escape(said.format(name))}"):
        load.from_keywords(algo=algo.format(name))


def test_module_is_found_in_folder_without_init_file(write, tmp_path):
    """The folder alone is not a module."""
    name = write(HILL_CLIMBING)
    folder = tmp_path / f"algos_{name}"
    folder.mkdir()
    (tmp_path / f"{name}.py").rename(folder / "hill.py")
    importlib.invalidate_caches()
    whole = f"{folder.name}.hill"
    found = {
        each: (importing.module_exists(each), agents.exists(each))
        for each in (whole, folder.name, f"{folder.name}.hull")
    }
    assert found == {whole: (True, True), folder.name: (False, False), f"{folder.name}.hull": (False, False)}
    settings = load.from_keywords(algo=whole)
    assert isinstance(settings.agent, agents.load(whole).Config) and settings.algo_name == "hill"


def test_config_rejects_running_script_as_algorithm():
    with pytest.raises(ValueError, match=r"^algo: other processes cannot import the running script"):
        load.from_keywords(algo=sys.modules["__main__"])


@pytest.mark.parametrize("algo, got", [(Path, "pathlib.*:Path"), (3, "3"), (["ppo"], r"\['ppo'\]")])
def test_config_rejects_algorithm_that_is_neither_name_nor_module(algo, got):
    message = rf"^algo: must be a name or a module, got {got}; for example algo='ppo'$"
    for from_keywords in (load.from_keywords, grid.from_keywords):
        with pytest.raises(ValueError, match=message):
            from_keywords(algo=algo)


def test_config_accepts_builtin_module_and_rejects_namesake():
    assert load.from_keywords(algo=importlib.import_module("jaxrl_fast.agents.pqn")).algo == "pqn"
    with pytest.raises(ValueError, match=r"^algo: the module ppo has the name of a built-in algorithm"):
        load.from_keywords(algo=types.ModuleType("ppo"))


@pytest.mark.parametrize("name", ["episodes", "env_steps", "eval_return_mean"])
def test_plan_rejects_reserved_metric_name(write, name):
    settings = load.from_keywords(algo=write(HILL_CLIMBING.replace('"best_score"', f'"{name}"')), **OPTIONS)
    with pytest.raises(ValueError, match=rf"the metric name {name} is reserved; rename it$"):
        plan.validate_plan(settings)


def test_config_validates_options_of_custom_algorithm(write):
    name = write(HILL_CLIMBING)
    with pytest.raises(ValueError, match=r"^spred: unknown option; did you mean spread\?"):
        load.from_keywords(algo=name, spred=1)
    with pytest.raises(ValueError, match=r"^rollout_length: must be at least 1, got 0"):
        load.from_keywords(algo=name, rollout_length=0)
    with pytest.raises(ValueError, match=r"^spread: must be a number, got 'wide'"):
        load.from_keywords(algo=name, spread="wide")
    settings = load.from_keywords(algo=name, spread="1e-2", env="CartPole-v1")
    assert dataclasses.asdict(settings.agent) == dataclasses.asdict(agents.load(name).Config(spread=0.01))


def test_custom_options_support_bounds_and_help(write, capsys):
    name = write(with_spread(HILL_CLIMBING, "'Width of the search.', bounds=(0, 2)"))
    with pytest.raises(ValueError, match=r"^spread: must be at least 0 and at most 2, got 3.0$"):
        load.from_keywords(algo=name, spread=3)
    assert load.from_command_line([name, "--spread", "1"]).agent.spread == 1.0
    with pytest.raises(SystemExit):
        load.from_command_line([name, "--help", "spread"])
    assert "Width of the search. (default: 0.1, 0 to 2)" in " ".join(capsys.readouterr().out.split())


def test_config_rejects_traced_option_that_is_no_float(write):
    text = with_traced(HILL_CLIMBING).replace("spread: float", "spread: float | int")
    with pytest.raises(ValueError, match=r"Config\.spread must be a float to be traced; drop traced$"):
        load.from_keywords(algo=write(text))


@pytest.mark.slow
def test_option_name_may_start_with_no(write, tmp_path):
    """`--no-op-max` is not parsed as a negated flag, also when a run is resumed."""
    with_it = HILL_CLIMBING.replace("    spread: float", "    no_op_max: int = 30\n    spread: float")
    given = flags(**OPTIONS | {"loggers": "none"}, total_steps=1600, eval_episodes=8)
    assert train.main([write(with_it), *given, "--no-op-max", "2", "--run-dir", "./run"]) == 0
    settings = load.from_command_line(["--resume", "run", "--no-op-max", "2"])
    assert settings.agent.no_op_max == 2
    with pytest.raises(ValueError, match=r"^no_op_max: a resume cannot change it from 2, got 3"):
        load.from_command_line(["--resume", "run", "--no-op-max", "3"])


def test_plan_rejects_metrics_that_are_not_scalars(write):
    wrong = HILL_CLIMBING.replace('{"best_score": state["score"]}', '{"best_score": state["score"], "best": best}')
    assert wrong != HILL_CLIMBING
    name = write(wrong)
    message = rf"^algorithm '{name}': metrics must be scalars, but best has shape \[4, 2\]; return means$"
    with pytest.raises(ValueError, match=message):
        plan.validate_plan(load.from_keywords(algo=name, total_steps=16_000, **OPTIONS))
    assert plan.validate_plan(load.from_keywords(algo=write(HILL_CLIMBING), total_steps=16_000, **OPTIONS))


SLIPS = {
    "new": (
        "return state, {",
        'return state | {"more": 1.0}, {',
        r"update must keep state\['more'\] as init makes it, nothing, got float32\[\]$",
    ),
    "dtype": (
        'jnp.maximum(score, state["score"])}',
        "jnp.int32(0)}",
        r"state\['score'\] as init makes it, float32\[\], got int32\[\]$",
    ),
    "state": (
        'return state, {"best_score": state["score"]}',
        "return state",
        r"update must return a state and a dict of metrics, got dict$",
    ),
    "make": ("return Agent(", "Agent(", r"make must return an Agent, got None$"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_plan_names_mistake_in_custom_algorithm(write, slip):
    right, wrong, says = SLIPS[slip]
    assert right in HILL_CLIMBING
    settings = load.from_keywords(algo=write(HILL_CLIMBING.replace(right, wrong)), total_steps=16_000, **OPTIONS)
    with pytest.raises(ValueError, match=says):
        plan.validate_plan(settings)


SUPPORTS = '\nSUPPORTS = frozenset({"shards"})\n'
ROWS = """
    def gradient_rows(self, num_envs):
        return 200 * num_envs


def make("""


@pytest.mark.parametrize("supports", [False, True])
def test_plan_shards_custom_algorithm_only_if_it_supports_shards(write, supports):
    text = HILL_CLIMBING
    if supports:
        assert "def make(config, spec, num_updates):" in text
        text = text.replace("\ndef make(", ROWS, 1).replace("num_updates):", "num_updates, parallelism):", 1) + SUPPORTS
    name = write(text)
    settings = load.from_keywords(algo=name, total_steps=16_000, **OPTIONS)
    assert plan.validate_plan(settings).placement.num_shards == (2 if supports else 1)
    split = load.from_keywords(algo=name, total_steps=16_000, devices=2, **OPTIONS)
    if supports:
        assert plan.validate_plan(split).placement.num_shards == 2
        return
    with pytest.raises(ValueError, match=r"^devices: .* must declare SUPPORTS = .*shards.*, got 2; use 1"):
        plan.validate_plan(split)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (SUPPORTS, r"SUPPORTS needs Config\.gradient_rows\(num_envs\); add it"),
        (SUPPORTS.replace("shards", "shard"), r"SUPPORTS has an unknown name, got 'shard'; did you mean shards\?"),
    ],
)
def test_plan_rejects_incomplete_or_misspelled_supports(write, added, message):
    settings = load.from_keywords(algo=write(HILL_CLIMBING + added), total_steps=16_000, **OPTIONS)
    with pytest.raises(ValueError, match=f"^algorithm '.*': {message}"):
        plan.validate_plan(settings)
