"""Test files of a run: an edited summary is rejected in one line, and a part of a sweep is resumed by the sweep."""

import json

import pytest

import jaxrl_fast
from jaxrl_fast.runs import files

pytestmark = pytest.mark.unit

SUMMARY = {"algo": "ppo", "env_id": "gymnax/CartPole-v1", "env_steps": 10, "train_time_s": 1.0, "status": "done"}
SUMMARY |= {"final_return_mean": 2.0, "final_return_per_seed": [2.0], "failure": None, "evaluations": []}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("algo: ppo\nmeta: {format: 3}\n")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        ({"final_return_mean": "high"}, "final_return_mean: must be a number, got 'high'; restore the file"),
        ({"final_return_per_seed": ["high"]}, r"final_return_per_seed: must be a number, got \['high'\]"),
        ({"final_return_per_seed": 3}, "final_return_per_seed: must be a number, got 3"),
        ({"train_time_s": "x"}, "train_time_s: must be a number, got 'x'"),
        ({"env_steps": None}, "env_steps: must be a number, got None"),
    ],
)
def test_run_open_rejects_edited_summary(folder, edit, why):
    (folder / "summary.json").write_text(json.dumps(SUMMARY | edit))
    with pytest.raises(ValueError, match=rf"summary\.json: {why}"):
        jaxrl_fast.Run.open(folder)


@pytest.mark.parametrize(
    ("text", "why"),
    [("[" * 100_000, "cannot be read"), ("[]", "not a summary"), ('{"algo": "ppo"}', "env_id: is missing")],
)
def test_run_open_rejects_invalid_summary(folder, text, why):
    (folder / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        jaxrl_fast.Run.open(folder)


def test_run_open_reads_complete_summary(folder):
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"final_return_mean": None}))
    assert "10 steps in 1 s" in repr(jaxrl_fast.Run.open(folder))


def test_resume_command_of_sweep_part_names_sweep(folder):
    assert files.resume_command(folder) == f"python -m jaxrl_fast.train --resume {folder}"
    (folder.parent / "sweep.yaml").touch()
    assert files.resume_command(folder) == f"python -m jaxrl_fast.sweep --resume {folder.parent}"
    with pytest.raises(ValueError, match=rf"resume it with python -m jaxrl_fast.sweep --resume {folder.parent} if it"):
        files.read_summary(folder)
