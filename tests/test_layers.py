"""Check imports: packages follow one order, files have no import cycle, and third parties have allowed places."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxrl_fast.envs import PACKAGES
from jaxrl_fast.envs import SUITES as ADAPTED

pytestmark = pytest.mark.unit

PACKAGE = "jaxrl_fast"
ROOT = Path(__file__).parent.parent / PACKAGE

# A file imports only packages to the left of its own, and its own package. `options` is far to the left, so that the
# command line is parsed without jax, and every part reads its own options.
ORDER = (
    "types", "utils", "options", "metrics", "kernels", "networks", "rollout", "async_rollout", "ahead_rollout", "loop",
    "parallel", "rl", "replay", "agents", "players", "config", "runs", "loggers", "envs", "plotting", "gpu_check",
    "training", "evaluation", "sweep", "search", "api", "train", "evaluate", "video", "export", "plot", "check",
    "__main__",
)  # fmt: skip
NO_JAX = ("options", "config", "metrics.records", "search.spaces", "search.trials")
NO_JAX += ("utils.parsing", "utils.formatting", "utils.errors")
PURE = ORDER[: ORDER.index("runs")]  # these use no clock, file, environment variable or process
IMPURE_ALLOWED = ("utils", "kernels.build", "replay.host", "config", "agents", "metrics.tracker")
IMPURE_ALLOWED += ("parallel.program", "parallel.address", "parallel.distributed", "parallel.line", "parallel.team")
IMPURE = ("datetime", "glob", "io", "logging", "os", "pathlib", "pickle", "shutil", "signal", "socket", "subprocess")
IMPURE += ("sys", "tempfile", "threading", "time")
SUITES = {name: f"envs.{name}" for name in ("gymnax", "envpool", "gymnasium")}  # the only importer of each suite
SUITES |= {PACKAGES.get(name, name): f"envs.suites.{name}" for name in ADAPTED}
MAY_IMPORT = {"gymnasium": ("envs.envpool",)}  # exceptions, for spaces


class Import(NamedTuple):
    """One import: a module of jaxrl_fast ("rl.returns") or a package of a third party ("jax")."""

    target: str
    ours: bool
    line: int
    lazy: bool


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the files of the package by dotted name, and packages by the name of their folder."""
    paths = {path.relative_to(root).with_suffix(""): path for path in sorted(root.rglob("*.py"))}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


MODULES = modules()
FILES = [name for name in MODULES if name != "__init__"]


def imports(source: str, known: set[str]) -> Iterator[Import]:
    """Yield every import of a source, also inside functions."""
    tree = ast.parse(source)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda))
    lazy = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name.partition(".")[0], name.name.startswith(PACKAGE), node.lineno, id(node) in lazy)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            top, _, inner = (node.module or "").partition(".")
            if top != PACKAGE:
                yield Import(top, False, node.lineno, id(node) in lazy)
                continue
            for name in node.names:
                whole = f"{inner}.{name.name}".strip(".")
                if (inner, name.name) != ("", "__version__"):  # a constant that every module may import
                    yield Import(whole if whole in known else inner, True, node.lineno, id(node) in lazy)


def place(module: str) -> int:
    """Return the index in ORDER of a module's package; raise ValueError if it is not in ORDER."""
    return ORDER.index(module.partition(".")[0])


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def violations(module: str, source: str, known: set[str] = frozenset(MODULES)) -> list[str]:
    """Return the forbidden imports of a file, one line each."""
    found = []
    for one in imports(source, known):
        where = f"{module}:{one.line} imports {one.target}"
        if one.ours:
            if one.target.partition(".")[0] != module.partition(".")[0] and place(one.target) >= place(module):
                found.append(f"{where}, which is to the right of it in ORDER")
        elif one.target in sys.stdlib_module_names:
            if within(module, PURE) and not within(module, IMPURE_ALLOWED) and one.target in IMPURE:
                found.append(f"{where}: no clock, file, environment or process below `runs`")
        elif module.startswith("types") and one.target != "jax":
            found.append(f"{where}: types imports jax only")
        elif module.startswith("options"):
            found.append(f"{where}: options import the standard library only")
        elif one.target in ("jax", "flax", "optax") and within(module, NO_JAX) and not one.lazy:
            found.append(f"{where}: --help must not wait for jax")
        elif one.target in SUITES and not module.startswith((SUITES[one.target], *MAY_IMPORT.get(one.target, ()))):
            found.append(f"{where}: only {SUITES[one.target]} may")
    return found


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that import each other directly or indirectly, including lazy imports."""
    reach = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    groups = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in graph}
    return [list(group) for group in groups if group]


@pytest.mark.parametrize("module", FILES)
def test_imports_follow_order(module):
    found = violations(module, MODULES[module].read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_files_have_no_import_cycle():
    graph = {
        name: {one.target for one in imports(path.read_text(encoding="utf-8"), set(MODULES)) if one.ours} - {name, ""}
        for name, path in MODULES.items()
    }
    assert not import_cycles(graph)


def test_order_has_all_packages():
    assert {name.partition(".")[0] for name in FILES} == set(ORDER)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("types", "import flax"),
        ("types", "from jaxrl_fast.rl import returns"),
        ("rl.returns", "from jaxrl_fast.agents import ppo"),
        ("networks.torsos", "import time"),
        ("networks.torsos", "import gymnax"),
        ("loop", "from jaxrl_fast.rl.returns import gae"),
        ("loop", "def f():\n    from jaxrl_fast.agents import ppo"),
        ("envs.gymnax.batch", "import envpool"),
        ("envs.gymnax.batch", "from jaxrl_fast.training import plan"),
        ("options.ppo", "import jax"),
        ("options.ppo", "import yaml"),
        ("options.ppo", "from jaxrl_fast.networks import torsos"),
        ("agents.ppo", "from jaxrl_fast.envs import make"),
        ("agents.ppo", "from jaxrl_fast import api"),
        ("config.settings", "import jax"),
        ("loggers.jsonl", "from jaxrl_fast.training import plan"),
        ("training.plan", "from jaxrl_fast import train"),
    ],
)
def test_violations_finds_forbidden_import(module, source):
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("types", "from jax import Array\nfrom typing import Any"),
        ("rl.returns", "import jax.numpy as jnp\nfrom jaxrl_fast.types import Rollout"),
        ("rl.sgd", "from jaxrl_fast.rl import minibatch"),
        ("envs.gymnax.batch", "import gymnax\nfrom jaxrl_fast.types import Env"),
        ("training.evaluator", "import time\nfrom jaxrl_fast import __version__, envs, loop"),
        ("train", "from jaxrl_fast.training import plan"),
    ],
)
def test_violations_accepts_allowed_imports(module, source):
    assert not violations(module, source)


def test_import_cycles_finds_cycle():
    assert import_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
