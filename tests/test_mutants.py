"""Test mutants: which code they change, the draw by seed, the choice of tests, and the outcomes."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.mutation import lines, mutants, sample
from tests.mutation.mutants import Mutant
from tests.mutation.patches import ROOT

pytestmark = pytest.mark.unit

SOURCE = '''\
"""Add 1."""

import functools

__all__ = ["f"]


@functools.lru_cache(maxsize=1)
def f(x: int | None, axis: int = 0) -> int | float:
    """Return 2 * x."""
    assert x > 0, "1 or more"
    if x < 3 and not axis:
        raise ValueError(f"x: must be at least {3 - 1}")
    y = g(x, axis, key=None)
    return y[1:] + x
'''


def changed(source):
    """Each mutant's line before and after."""
    found = [mutant for mutant in mutants.of_source(source, "f.py") if mutant.is_worth_a_test(source)]
    return {tuple(line[2:] for line in mutant.diff(source)) for mutant in found}


def test_mutants_skip_annotations_docstrings_decorators_and_messages():
    assert changed(SOURCE) == {
        (
            "def f(x: int | None, axis: int = 0) -> int | float:",
            "def f(x: int | None, axis: int = 1) -> int | float:",
        ),
        ("if x < 3 and not axis:", "if (not (x < 3 and not axis)):"),
        ("if x < 3 and not axis:", "if x <= 3 and not axis:"),
        ("if x < 3 and not axis:", "if x < 4 and not axis:"),
        ("if x < 3 and not axis:", "if x < 3 or not axis:"),
        ("if x < 3 and not axis:", "if x < 3 and axis:"),
        ('raise ValueError(f"x: must be at least {3 - 1}")', "pass"),
        ("y = g(x, axis, key=None)", "y = g(axis, x, key=None)"),
        ("y = g(x, axis, key=None)", "y = g(x, axis, )"),
        ("return y[1:] + x", "return y[1:] - x"),
        ("return y[1:] + x", "return y[2:] + x"),
        ("return y[1:] + x", "return y[:] + x"),
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a = jnp.where(x, 0, y)", "a = jnp.where(x, y, 0)"),
        ("a = x.max(-1)", "a = x.min(-1)"),
        ("a = jax.lax.stop_gradient(x)", "a = x"),
        ("a = é * (b) // (c)", "a = é * (b) * (c)"),
        ("a += b", "pass"),
        ("f(x)", "pass"),
        ("a = b if c else d", "a = b if (not (c)) else d"),
        ("a = [b for b in c if b]", "a = [b for b in c if True]"),
        ("a = ~b", "a = b"),
    ],
)
def test_each_rule_makes_its_change(before, after):
    assert (before, after) in changed(before + "\n")


def test_every_sampled_file_exists_and_has_nearest_tests():
    paths = [path.relative_to(ROOT).as_posix() for name in sample.FILES for path in (ROOT / "jaxrl_fast").glob(name)]
    assert len(paths) == len(set(paths)) > 40
    assert all(list((ROOT / "jaxrl_fast").glob(name)) for name in sample.FILES)
    for path in paths:
        near = sample.nearest(ROOT, path)
        assert all((ROOT / test).is_file() for test in near), near
        assert near or path.endswith("__init__.py")


@pytest.mark.slow
def test_every_equivalent_mutant_can_still_be_made():
    made = {}
    for path, diff in sample.equivalents():
        if path not in made:
            source = (ROOT / path).read_text(encoding="utf-8")
            made[path] = {"\n".join(mutant.diff(source)) for mutant in mutants.of_file(ROOT, path)}
        assert diff in made[path], f"{path}: take it out of survivors.json\n{diff}"


def test_choose_tests_orders_by_line_nearness_and_duration(monkeypatch):
    path = "jaxrl_fast/rl/returns.py"
    monkeypatch.setattr(sample, "nearest", lambda root, path: ["tests/near.py"])
    of_line = {"tests/near.py::slow": 9.0, "tests/near.py::quick": 1.0, "tests/far.py::far": 0.5}
    by_line = {path: {test: [7] for test in of_line}}
    record = lines.Record(of_line | {"tests/near.py::other": 0.1}, {path: lines.digest(ROOT / path)}, by_line)
    mutant = Mutant(path, "constant", 7, 0, 0, "")
    order = ["tests/near.py::quick", "tests/far.py::far", "tests/near.py::slow", "tests/near.py::other"]
    assert sample.choose_tests(ROOT, mutant, record, 100) == order
    assert sample.choose_tests(ROOT, mutant, record, 10) == order[:2]
    stale = record._replace(digests={path: "of another source"})
    assert sample.choose_tests(ROOT, mutant, stale, 100) == [
        "tests/near.py::other",
        "tests/near.py::quick",
        "tests/near.py::slow",
    ]


def test_table_counts_kills_by_new_tests_as_not_noticed():
    """Count five mutants: one changes nothing, and the tests before the sample noticed two of the others."""
    of = lambda outcome, path="rl/a.py", **more: {"path": f"jaxrl_fast/{path}", "outcome": outcome} | more
    results = [of("killed"), of("killed", new_test=True), of("timeout"), of("survived"), of("equivalent", "loop.py")]
    assert sample.table(results).splitlines()[2:] == [
        "| loop.py | 1 | 0 | 0 | 0 | 0 | 1 |  |",
        "| rl | 4 | 1 | 1 | 1 | 1 | 0 | 50% |",
        "| all | 5 | 1 | 1 | 1 | 1 | 1 | 50% |",
    ]


def test_again_plants_only_survivors(tmp_path, monkeypatch):
    """Let one of two mutants survive until a new test kills it."""
    outcomes = iter(["survived", "killed", "killed"])
    copy = lambda tree, _: shutil.copytree(ROOT / "jaxrl_fast" / "rl", tree / "jaxrl_fast" / "rl")
    monkeypatch.setattr(sample, "copy_tree", copy)
    monkeypatch.setattr(sample, "warm_up", lambda _: None)
    monkeypatch.setattr(sample, "passes", lambda *_: True)
    monkeypatch.setattr(sample, "plant", lambda *_: (next(outcomes), "a test"))
    chosen, out = sample.draw(ROOT, 2, 0, ["rl/returns.py"]), tmp_path / "sample.jsonl"
    found = lambda again: [(r["outcome"], r.get("new_test")) for r in sample.sample(chosen, out, 1.0, again)]
    assert found(False) == found(False) == [("survived", None), ("killed", None)]
    assert found(True) == found(False) == [("killed", True), ("killed", None)]
    assert len(sample.read(out)) == 2 and next(outcomes, None) is None


PLANT = """
import json, sys
from pathlib import Path
from tests.mutation import mutants, sample

tree, path = Path(sys.argv[1]), "jaxrl_fast/double.py"
found = {mutant.text: sample.plant(tree, mutant, ["test_double.py"], 60)[0] for mutant in mutants.of_file(tree, path)}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_plant_returns_killed_if_test_fails_and_restores_source(tmp_path):
    tree = tmp_path / "tree"
    (tree / "jaxrl_fast").mkdir(parents=True)
    source = "def double(x):\n    return 2 * x\n"
    (tree / "jaxrl_fast" / "double.py").write_text(source)
    (tree / "jaxrl_fast" / "__init__.py").touch()
    test = "from jaxrl_fast.double import double\n\n\ndef test_double():\n    assert double(4) >= 8\n"
    (tree / "test_double.py").write_text(test)
    option = "parser.addoption('--nightly', action='store_true')"
    (tree / "conftest.py").write_text(f"def pytest_addoption(parser):\n    {option}\n")
    shutil.copy(ROOT / "pyproject.toml", tree)
    done = subprocess.run([sys.executable, "-c", PLANT, str(tree)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"3": "survived", "/": "killed"}  # 3 * 4 is 8 or more, and 2 / 4 is not
    assert (tree / "jaxrl_fast" / "double.py").read_text() == source
