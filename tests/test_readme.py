"""Test README and docs/: Python blocks run, commands are valid, and quoted code equals the source."""

import inspect
import re
import shlex
import sys
from pathlib import Path

import pytest

from jaxrl_fast import check, loop, train
from jaxrl_fast.config import load, presets
from jaxrl_fast.runs import files
from jaxrl_fast.sweep import grid
from jaxrl_fast.training import plan

HOME = Path(__file__).parent.parent
README = (HOME / "README.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"<!-- source: (\S+) (\S+) -->\n```python\n(.*?)```", README, re.DOTALL)
PAGES = {"README": README} | {
    path.relative_to(HOME / "docs").with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted((HOME / "docs").rglob("*.md"))
}
PYTHON = {name: re.findall(r"```python\n(.*?)```", page, re.DOTALL) for name, page in PAGES.items()}
FILE = re.compile(r"# (\w+)\.py\n")  # the first line of a block that is a module
BLOCKS = {
    f"{name}-{number}": block
    for name, blocks in PYTHON.items()
    for number, block in enumerate(blocks)
    if block not in [q[2] for q in QUOTED] and "def make(" not in block  # these are in test_custom_algorithm
    if not FILE.match(block)
}
COMMAND = re.compile(r"^python -m jaxrl_fast\.((?:train|sweep) ?[^#\n]*)", re.MULTILINE)
SHOWN = {line.strip() for page in PAGES.values() for line in COMMAND.findall(page)}
OWN = r"my_package|hill_climbing|penalized_ppo|clipped_sac|attention:|line:|waves:|elman:|halved:|gaussian:"
BEGUN = sorted(line for line in SHOWN if not re.search(rf"--resume|--help|auto|--init-from|--bonus|{OWN}", line))
MOST_LINES = 150


def test_quoted_train_step_equals_source():
    assert [q[2] for q in QUOTED] == [inspect.getsource(loop.train_step)]


def test_readme_has_at_most_150_lines():
    assert len(README.splitlines()) <= MOST_LINES


def test_readme_marks_commands_for_ci_once():
    """`.ci/run` executes the blocks below these marks."""
    for mark in ("run", "test"):
        assert len(re.findall(rf"<!-- ci: {mark} -->\n```bash\n.+?\n```", README, re.DOTALL)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_python_blocks_run_and_print(name, tmp_path, monkeypatch, capsys):
    """Run each block of a page. The modules of that page can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in PYTHON[name.rpartition("-")[0]]:
        if module := FILE.match(block):
            (tmp_path / f"{module[1]}.py").write_text(block)
            monkeypatch.delitem(sys.modules, module[1], raising=False)
    exec(compile(BLOCKS[name], f"{name}.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README", "guides/custom-environment"])
def test_documented_environment_passes_check_and_trains(page, tmp_path, monkeypatch, capsys):
    (module,) = [block for block in PYTHON[page] if block.startswith("# line.py")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "line", raising=False)
    (tmp_path / "line.py").write_text(module)
    lines = re.findall(r"^python -m jaxrl_fast\.(check|train) (.*line:Line.*)$", PAGES[page], re.MULTILINE)
    assert [command for command, _ in lines] == ["check", "train"]
    assert check.main([*lines[0][1].split(), "--steps", "300"]) == 0
    assert train.main([*lines[1][1].split(), "--run-dir", "./run", "--loggers", "none"]) == 0
    assert files.read_summary(tmp_path / "run")["final_return_mean"] > 20, "a random policy has less than 0"


def test_presets_named_in_readme_and_docs_are_shipped():
    text = "\n".join(PAGES.values())
    named = set(re.findall(r"--config ([a-z_0-9]+)", text)) | set(re.findall(r'(?:fit|sweep)\("([a-z_0-9]+)"', text))
    assert named and named <= set(presets.shipped())


@pytest.mark.parametrize("line", BEGUN)
@pytest.mark.slow
def test_documented_commands_pass_validation(line):
    """Validate options, environments and combinations of numbers, as a run does before compilation."""
    program, *argv = shlex.split(line)
    if program == "train":
        plan.validate_plan(load.from_command_line(argv))
        return
    for group in grid.from_command_line(argv).groups:
        one = grid.part(group, group.members[:1])
        plan.validate_plan(one.settings, one.members)
