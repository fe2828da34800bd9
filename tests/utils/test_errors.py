"""Test one-line error messages, and that every command prints its version."""

import pytest

import jaxrl_fast
from jaxrl_fast.config import cli
from jaxrl_fast.utils.errors import why

pytestmark = pytest.mark.unit


def test_why_returns_first_line_of_error():
    assert why(ValueError("first\nsecond")) == "ValueError: first"
    assert why(ValueError("")) == "ValueError"
    assert why(OSError(28, "No space left on device")) == "No space left on device"


def test_why_returns_first_line_of_error_below_traceback():
    text = 'INTERNAL: CpuCallback error: Traceback (most recent call last):\n  File "own.py", line 3, in step\n'
    assert why(RuntimeError(f"{text}    raise ValueError(...)\nValueError: first\nsecond")) == (
        "RuntimeError: ValueError: first"
    )
    assert why(RuntimeError(f"{text}KeyError: 'a'")) == "RuntimeError: KeyError: 'a'"


def test_python_functions_name_keywords_in_messages(tmp_path):
    with pytest.raises(ValueError, match=r"^num_seeds: seeds must be at most"):
        jaxrl_fast.fit(algo="ppo", seed=2**31 - 2, num_seeds=3, run_dir=str(tmp_path / "run"))
    with pytest.raises(
        ValueError, match=r"^stop_when_solved: needs a solved_threshold, got none; set solved_threshold$"
    ):
        jaxrl_fast.fit(algo="ppo", stop_when_solved=True)
    with pytest.raises(ValueError, match=r"^slurm_options: needs launcher slurm$"):
        jaxrl_fast.sweep(algo="ppo", slurm_options={"timeout_min": 3})


@pytest.mark.parametrize("name", ["__main__", "train", "sweep.__main__", "evaluate", "video", "plot", "envs.__main__"])
def test_every_command_prints_version(name, capsys):
    import importlib

    assert importlib.import_module(f"jaxrl_fast.{name}").main(["--version"]) == 0
    assert capsys.readouterr().out == f"{cli.version_line()}\n"
    assert cli.version_line().startswith(f"jaxrl_fast {jaxrl_fast.__version__}, jax 0.")
