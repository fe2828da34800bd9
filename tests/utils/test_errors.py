"""Test one-line error messages, and option names spelled for the command line or for Python."""

import pytest

import jaxrl_fast
from jaxrl_fast import cli
from jaxrl_fast.utils import errors, warnings
from jaxrl_fast.utils.errors import as_keywords, why

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


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("--num-envs: got 2; use --host-bridge callback", "num_envs: got 2; use host_bridge callback"),
        ("--agent.clip-coef: has no effect", "agent.clip_coef: has no effect"),
        ("use --no-stop-when-solved to train on", "use stop_when_solved=False to train on"),
        ("--seed: x; python -m jaxrl_fast.sweep --seed 0..4", "seed: x; python -m jaxrl_fast.sweep --seed 0..4"),
        ("--slurm-option: x; use --env-option num_threads", "slurm_options: x; use env_options num_threads"),
        ("a--b and a -- b stay", "a--b and a -- b stay"),
    ],
)  # fmt: skip
def test_as_keywords_converts_option_names(text, spelled):
    assert as_keywords(text) == spelled


def test_python_functions_name_keywords_in_messages(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"^num_seeds: seeds must be at most"):
        jaxrl_fast.fit(algo="ppo", seed=2**31 - 2, num_seeds=3, run_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"^stop_when_solved: needs solved_threshold RETURN$"):
        jaxrl_fast.fit(algo="ppo", stop_when_solved=True)
    with pytest.raises(ValueError, match=r"^slurm_options: needs launcher slurm$"):
        jaxrl_fast.sweep(algo="ppo", slurm_options={"timeout_min": 3})
    with errors.from_function():
        warnings.warn("--overlap: has no effect")
    warnings.warn("--overlap: has no effect")
    assert capsys.readouterr().err == "warning: overlap: has no effect\nwarning: --overlap: has no effect\n"


@pytest.mark.parametrize("name", ["__main__", "train", "sweep.__main__", "evaluate", "video", "plot", "envs.__main__"])
def test_every_command_prints_version(name, capsys):
    import importlib

    assert importlib.import_module(f"jaxrl_fast.{name}").main(["--version"]) == 0
    assert capsys.readouterr().out == f"{cli.version_line()}\n"
    assert cli.version_line().startswith(f"jaxrl_fast {jaxrl_fast.__version__}, jax 0.")
