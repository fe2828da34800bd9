"""Test messages about packages and user modules."""

import pytest

from jaxrl_fast.utils import importing

pytestmark = pytest.mark.unit


def test_install_names_command_that_works_for_wheel_and_checkout(tmp_path, monkeypatch):
    """An extra of a checkout is installed in place: the package may not be on any index."""
    module = tmp_path / "a b" / "jaxrl_fast" / "utils" / "importing.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(importing, "__file__", str(module))
    assert importing.install("atari") == 'pip install "jaxrl_fast[atari]"'
    (tmp_path / "a b" / "pyproject.toml").touch()
    assert importing.install("atari") == f'pip install -e "{tmp_path}/a b[atari]"'
    monkeypatch.chdir(tmp_path / "a b")
    assert importing.install("atari") == 'pip install -e ".[atari]"'
