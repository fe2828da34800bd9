"""The README's Python runs as it stands, and the code that it quotes is the code."""

import inspect
import re
import shlex
from pathlib import Path

import pytest

from jaxrl_fast import loop
from jaxrl_fast.config import load, presets
from jaxrl_fast.sweep import grid
from jaxrl_fast.training import plan

HOME = Path(__file__).parent.parent
README = (HOME / "README.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"<!-- source: (\S+) (\S+) -->\n```python\n(.*?)```", README, re.DOTALL)
ALL = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
BLOCKS = [b for b in ALL if b not in [q[2] for q in QUOTED] and "def make(" not in b]  # that is in test_own_algorithm
PAGES = [README, *(page.read_text(encoding="utf-8") for page in sorted((HOME / "docs").glob("*.md")))]
SHOWN = {line for page in PAGES for line in re.findall(r"^python -m jaxrl_fast\.((?:train|sweep) [^#\n]+)", page, re.M)}
BEGUN = sorted(line.strip() for line in SHOWN if not re.search(r"--resume|--help|my_package|hill_climbing|auto", line))


def test_train_step_is_quoted_as_it_is():
    assert [q[2] for q in QUOTED] == [inspect.getsource(loop.train_step)]


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:40])
def test_python_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


def test_every_preset_named_is_shipped():
    named = set(re.findall(r"--config ([a-z_]+)", README)) | set(re.findall(r'fit\("([a-z_]+)"', README))
    assert named and named <= set(presets.shipped())


@pytest.mark.parametrize("line", BEGUN)
def test_commands_that_are_shown_would_begin(line):
    """Options, environments, and numbers that fit each other: all that is refused before anything is compiled."""
    program, *argv = shlex.split(line)
    if program == "train":
        plan.validate_plan(load.from_command_line(argv))
        return
    for group in grid.from_command_line(argv).groups:
        one = grid.part(group, group.members[:1])
        plan.validate_plan(one.settings, one.members)
