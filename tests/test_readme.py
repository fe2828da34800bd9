"""The README's Python runs as it stands, and the code that it quotes is the code."""

import inspect
import re
from pathlib import Path

import pytest

from jaxrl_fast import loop

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"<!-- source: (\S+) (\S+) -->\n```python\n(.*?)```", README, re.DOTALL)
BLOCKS = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if b not in [q[2] for q in QUOTED]]


def test_train_step_is_quoted_as_it_is():
    assert [q[2] for q in QUOTED] == [inspect.getsource(loop.train_step)]


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:40])
def test_python_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


def test_every_preset_named_is_shipped():
    from jaxrl_fast import config

    named = set(re.findall(r"--config ([a-z_]+)", README)) | set(re.findall(r'fit\("([a-z_]+)"', README))
    assert named and named <= set(config.shipped())
