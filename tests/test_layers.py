"""Who may import whom: every file of the package against the table of layers below.

The table is the design. A new file belongs into it (`LAYERS`, or a folder's pattern) before it may import anything.
"""

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "jaxrl_fast"
ROOT = Path(__file__).parent.parent / PACKAGE
FILES = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.rglob("*.py"))

PARTS = (
    *("returns", "distributions", "atoms", "networks", "normalize", "minibatch"),
    *("convolutions", "products", "frames", "replay", "priorities", "exploration", "gradients", "epochs", "across"),
    *("dense", "dense_layers", "convolve", "layer_norm"),
)
AROUND = ("play", "memory", "config", "checkpoint", "sinks", "terminals", "scores", "curves", "program")
SWEEP = ("sweep", "grid", "layout", "sweeper", "slurm", "results", "figures")
HOST = (
    *("train", "trainer", "feed", "journal", "screen", "keeper", "report", "host"),
    *("plan", "run_folder", "assembly", "cores", "calibrate", *SWEEP),
    *("command", "policy", "evaluate", "video", "plot", "api", "__init__", "__main__"),
)
BELOW_AROUND = (
    "types",
    "spelling",
    "wording",
    "pace",
    "options",
    "written",
    "values",
    "naming",
    "manual",
    "population",
    "members",
    "placement",
    "files",
    *PARTS,
    "rollouts",
    "in_flight",
    "loop",
    "agents/*",
    "envs/*",
)
ARRAYS = ("jax", "flax", "optax", "numpy")
ANY = ("*",)


class Layer(NamedTuple):
    """Some files by pattern, and what they may import of the package and of others' packages."""

    files: tuple[str, ...]
    ours: tuple[str, ...]
    theirs: tuple[str, ...] = ARRAYS
    lazily: tuple[str, ...] = ()  # ours too, but only inside a function: when asked for
    pure: bool = True  # no clock, file, environment variable or process


# The first row that matches a file is its own. `{name}` stands for the last part of the file's own name.
LAYERS = (
    Layer(("types",), ours=(), theirs=("jax",)),
    Layer(("spelling", "wording"), ours=(), theirs=()),
    Layer(("pace",), ours=(), theirs=(), pure=False),
    Layer(("options",), ours=(), theirs=()),
    Layer(("written", "values"), ours=("spelling", "options", "written"), theirs=("yaml",), pure=False),
    Layer(("naming",), ours=("spelling", "options", "written", "agents/configs"), theirs=()),
    Layer(("manual",), ours=("naming", "options", "written", "agents/configs"), theirs=("tyro",)),
    Layer(("native",), ours=(), theirs=("jax",), pure=False),  # a compiler, which products ask for as for a device
    Layer(("networks",), ours=("types", "convolutions", "dense", "dense_layers")),
    Layer(("convolutions",), ours=("dense", "dense_layers", "convolve", "products")),
    Layer(("dense_layers",), ours=("dense", "layer_norm")),
    Layer(("convolve", "layer_norm"), ours=("native", "dense")),
    Layer(("dense",), ours=("native", "products")),
    Layer(("across",), ours=("types", "native")),
    Layer(("replay",), ours=("types", "frames")),
    Layer(("epochs",), ours=("types", "across", "minibatch", "normalize")),
    Layer(("normalize",), ours=("types", "across")),
    Layer(PARTS, ours=("types",)),
    Layer(("population",), ours=(), theirs=("numpy",)),
    Layer(("members",), ours=("types", "agents/configs"), theirs=("numpy",)),
    Layer(("placement",), ours=("types",), theirs=("jax",)),
    Layer(("files",), ours=(), theirs=(), pure=False),
    Layer(("rollouts",), ours=("types",), theirs=("jax",)),
    Layer(("in_flight",), ours=("types", "rollouts"), theirs=("jax",)),
    Layer(("loop",), ours=("types", "rollouts", "in_flight"), theirs=("jax",)),
    Layer(("imported",), ours=(), theirs=(), pure=False),
    Layer(("envs/__init__",), ours=("types", "spelling", "imported"), lazily=("envs/*",), pure=False),
    Layer(("envs/__main__",), ours=ANY, theirs=(), pure=False),  # a command line
    Layer(("envs/inputs",), ours=("types", "spelling")),
    Layer(("envs/qt",), ours=(), theirs=(), pure=False),
    Layer(("envs/envpool_trial",), ours=("envs/qt",), theirs=("jax", "numpy", "envpool"), pure=False),
    Layer(
        ("envs/envpool", "envs/envpool_tasks"),
        ours=("types", "spelling", "envs/inputs", "envs/envpool_tasks", "envs/envpool_trial", "envs/qt"),
        theirs=("jax", "numpy", "gymnasium", "envpool"),
        pure=False,
    ),
    Layer(("envs/gymnax_single",), ours=("types", "spelling", "envs/inputs"), theirs=("jax", "gymnax")),
    Layer(
        ("envs/*",),
        ours=("types", "spelling", "imported", "envs/inputs", "envs/gymnax_single"),
        theirs=("jax", "numpy", "{name}"),
        pure=False,
    ),
    Layer(("agents/configs",), ours=(), theirs=()),  # so that `--help` need not wait for jax
    Layer(("agents/__init__",), ours=("types", "imported", "agents/configs"), lazily=("agents/*",), pure=False),
    Layer(("agents/*",), ours=("types", *PARTS, "agents/*")),
    Layer(("render/*",), ours=("spelling", "render/*"), theirs=("numpy", "PIL")),
    Layer(("program",), ours=(*BELOW_AROUND, "memory"), theirs=ANY, pure=False),
    Layer(("feed",), ours=("loop", "program"), theirs=("jax", "numpy"), pure=False),
    Layer(AROUND, ours=BELOW_AROUND, theirs=ANY, pure=False),
    Layer(HOST, ours=ANY, theirs=ANY, pure=False),
)

KNOWN = frozenset(FILES) | {file for layer in LAYERS for file in layer.files if "*" not in file}

CLOCKS = ("datetime", "time")
FILES_AND_STREAMS = ("glob", "io", "logging", "pathlib", "pickle", "shutil", "tempfile")
PROCESSES = ("asyncio", "importlib", "multiprocessing", "os", "signal", "socket", "subprocess", "sys", "threading")
IMPURE = frozenset((*CLOCKS, *FILES_AND_STREAMS, *PROCESSES, "random"))


class Import(NamedTuple):
    """One imported name: ours as a file (`envs/gymnax`), theirs as a package (`jax`)."""

    target: str
    ours: bool
    lazy: bool
    line: int


def layer_of(file: str) -> Layer | None:
    """The file's row of the table, None where it has none."""
    return next((layer for layer in LAYERS if _matches(file, layer.files)), None)


def violations(file: str, source: str) -> list[str]:
    """What the file imports and may not, a sentence each."""
    layer = layer_of(file)
    if layer is None:
        return [
            f"{PACKAGE}/{file}.py has no layer: add it to PARTS (mathematics and parts), AROUND (around the loop) or "
            f"HOST (command lines) in {Path(__file__).name}, and to the design's table"
        ]
    theirs = tuple(pattern.format(name=file.split("/")[-1]) for pattern in layer.theirs)
    return [
        f"{PACKAGE}/{file}.py:{found.line} may not import {found.target}" + why
        for found in imports(file, source)
        if (why := _objection(found, file, layer, theirs)) is not None
    ]


def imports(file: str, source: str) -> Iterator[Import]:
    """Every import of a file, wherever it stands, by the file or package that it reaches."""
    tree = ast.parse(source)
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        for dotted in _dotted(file, node):
            top, *rest = dotted.split(".")
            ours = top == PACKAGE
            yield Import(_file(rest) if ours else top, ours, id(node) in lazy, node.lineno)


def _objection(found: Import, file: str, layer: Layer, theirs: tuple[str, ...]) -> str | None:
    """None where the import is right; else what to add to the sentence that says it is not."""
    if found.ours:
        if found.target == file or _matches(found.target, layer.ours):
            return None
        if _matches(found.target, layer.lazily):
            return None if found.lazy else " at the top: import it inside the function that needs it"
        return f": of {PACKAGE} it may only use {', '.join(layer.ours + layer.lazily) or 'nothing'}"
    if found.target in sys.stdlib_module_names:
        return ": no clock, file or process below the host" if layer.pure and found.target in IMPURE else None
    if _matches(found.target, theirs):
        return None
    return f": of other packages it may only use {', '.join(theirs) or 'none'}"


def _dotted(file: str, node: ast.AST) -> list[str]:
    """The absolute dotted names that an import statement reaches."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    here = [PACKAGE, *file.split("/")]
    base = ".".join(here[: len(here) - node.level]) if node.level else ""
    module = ".".join(part for part in (base, node.module) if part)
    # The version is a constant, the only thing at the top that everyone may know.
    return [f"{module}.{name.name}" for name in node.names if (module, name.name) != (PACKAGE, "__version__")]


def _file(parts: list[str]) -> str:
    """The file of ours that a dotted name reaches: `types.Env` is in types, `envs.make` in envs/__init__."""
    names = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((file for name in names for file in (name, f"{name}/__init__") if file in KNOWN), "__init__")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_what_its_layer_may(file):
    found = violations(file, (ROOT / f"{file}.py").read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("types", "import flax"),
        ("types", "from jaxrl_fast import returns"),
        ("returns", "from jaxrl_fast.distributions import Categorical"),
        ("returns", "from . import networks"),
        ("networks", "import time"),
        ("networks", "import gymnax"),
        ("loop", "import jaxrl_fast.returns"),
        ("loop", "def f():\n    from jaxrl_fast.agents import ppo"),
        ("envs/__init__", "from jaxrl_fast.envs import gymnax"),
        ("envs/__init__", "from . import gymnax"),
        ("envs/gymnax", "import envpool"),
        ("envs/gymnax", "from jaxrl_fast import returns"),
        ("agents/configs", "import jax"),
        ("agents/configs", "from jaxrl_fast import types"),
        ("agents/ppo", "from jaxrl_fast import loop"),
        ("agents/ppo", "from jaxrl_fast.envs import make"),
        ("agents/ppo", "from ..envs.gymnax import make"),
        ("agents/ppo", "import os.path"),
        ("agents/ppo", "from jaxrl_fast import fit"),
        ("play", "from jaxrl_fast import train"),
        ("play", "from jaxrl_fast import sinks"),
        ("render/minatar", "from jaxrl_fast import envs"),
        ("render/minatar", "import jax"),
        ("somewhere_new", ""),
    ],
)
def test_the_reader_of_imports_sees_a_violation(file, source):
    assert violations(file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("types", "from jax import Array\nfrom typing import Any"),
        ("returns", "import jax.numpy as jnp\nfrom jaxrl_fast.types import Rollout"),
        ("returns", "from jaxrl_fast import types\nfrom .types import Env"),
        ("loop", "import jax\nfrom jaxrl_fast.types import Env, Agent"),
        ("envs/__init__", "def make():\n    from jaxrl_fast.envs import gymnax"),
        ("envs/gymnax", "import gymnax\nfrom gymnax.environments import spaces\nfrom ..types import Env"),
        ("agents/pqn", "import optax\nfrom jaxrl_fast import networks, returns\nfrom jaxrl_fast.agents import ppo"),
        ("play", "import time\nimport rich\nfrom jaxrl_fast import __version__, loop, envs\n"),
        ("train", "from jaxrl_fast import sinks, checkpoint, sweep, agents"),
    ],
)
def test_the_reader_of_imports_lets_the_rest_through(file, source):
    assert not violations(file, source)
