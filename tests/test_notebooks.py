"""Test notebooks: they run with small budgets, and the committed files have outputs and no errors or local paths."""

import os
import re
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COLAB = re.compile(
    r"\]\(https://colab\.research\.google\.com/github/([\w-]+/[\w-]+)/blob/main/notebooks/([\w-]+)\.ipynb\)"
)
SCALE = "0.01"  # fraction of the steps
NEEDS = {"4_atari": "envpool"}


def read(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def is_install(cell):
    return "install" in cell.metadata.get("tags", [])


def outputs(cell):
    """Yield every output of a cell as text."""
    for output in cell.outputs:
        yield output.get("text", "")
        yield from map(str, (x for kind, x in output.get("data", {}).items() if not kind.startswith("image/")))


notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_notebooks_exist():
    assert NOTEBOOKS


@pytest.mark.slow
@notebooks
def test_notebook_runs(path, tmp_path, monkeypatch):
    """Run in a separate kernel and folder, without the installation cell."""
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    monkeypatch.setenv("JAXRL_FAST_NOTEBOOK_SCALE", SCALE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook = read(path)
    notebook.cells = [cell for cell in notebook.cells if not is_install(cell)]
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()


@notebooks
def test_colab_badge_opens_same_notebook(path):
    found = COLAB.findall(read(path).cells[0].source)
    assert [name for _, name in found] == [path.stem]


def test_all_notebooks_name_one_repository():
    texts = [path.read_text(encoding="utf-8") for path in NOTEBOOKS]
    named = {owner for text in texts for owner in re.findall(r"github(?:\.com)?/([\w-]+/jaxrl_fast)", text)}
    assert len(named) == 1


@notebooks
def test_first_code_cell_installs_package_without_replacing_jax(path):
    first, *others = code(read(path))
    assert is_install(first) and not any(map(is_install, others))
    assert "pip install -q -c colab.txt" in first.source and '"jax"' in first.source and '"jaxlib"' in first.source


def test_versions_on_colab_satisfy_requirements():
    """The versions on Colab must be high enough. Otherwise pip would replace the JAX that fits its GPU."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    floors = {r.name: r.specifier for r in map(Requirement, asked)}
    lines = (ROOT / "constraints-colab.txt").read_text(encoding="utf-8").splitlines()
    brought = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {"jax", "flax", "optax"} <= floors.keys() & brought.keys()
    assert all(floors[name].contains(version) for name, version in brought.items() if name in floors)


@notebooks
def test_notebook_explains_gpu_selection_and_saves_runs_on_drive(path):
    source = "\n".join(cell.source for cell in code(read(path)))
    assert "Change runtime type" in source
    assert 'if "google.colab" in sys.modules' in source and "drive.mount" in source


@notebooks
def test_notebook_is_committed_with_outputs_and_without_errors(path):
    cells = [cell for cell in code(read(path)) if not is_install(cell)]
    shown = [output.output_type for cell in cells for output in cell.outputs]
    assert "error" not in shown
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs) > 0
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(counts[0], counts[0] + len(cells))), "cells were not run from top to bottom"
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)


@notebooks
def test_outputs_of_notebook_contain_no_local_paths(path):
    for cell in code(read(path)):
        for text in outputs(cell):
            assert not re.search(r"/(?:tmp|home|root|opt|Users|mnt|work)/", text)


@notebooks
def test_notebook_is_smaller_than_4_mb(path):
    assert path.stat().st_size < 4_000_000
