"""Read and write the records and the summary in a run's folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast.config.paths import METRICS, SEARCH_FILE, SUMMARY, SWEEP_FILE
from jaxrl_fast.config.sources import PROGRAM, SEARCH, SWEEP
from jaxrl_fast.utils import files, warnings
from jaxrl_fast.utils.errors import why

NEVER_NULL = ("env_steps", "num_envs", "num_seeds", "num_updates", "train_time_s")
NUMBER_ENDINGS = ("_mean", "_std", "_iqm", "_time_s", "_per_s", "_mb", "_threshold", "_to_solve", "_to_solve_s")


def resume_command(folder: Path, shown: Path | None = None) -> str:
    """Return the command that resumes a run, with its folder as in `shown`. Sweeps and searches are resumed whole."""
    shown = shown or folder
    if (folder.parent / SWEEP_FILE).is_file():
        return f"{SWEEP} --resume {quote(str(shown.parent))}"
    if (folder.parent.parent / SEARCH_FILE).is_file():
        return f"{SEARCH} --resume {quote(str(shown.parent.parent))}"
    return f"{PROGRAM} --resume {quote(str(shown))}"


def mark_running(folder: Path) -> None:
    """Set the status in the summary of a resumed run to "running" until it ends again."""
    with warnings.warn_on_error(f"{SUMMARY} could not be written"):
        if (folder / SUMMARY).is_file():
            write_summary(folder, read_summary(folder) | {"status": "running"})


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json."""
    files.replace(folder / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run; [] if it has none, and without a last line that is incomplete.

    Raises:
        ValueError: If a line is not a record.
    """
    if not (folder / METRICS).is_file():
        return []
    records = []
    with open(folder / METRICS, encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                records.append(_record(json.loads(text)))
            except (ValueError, RecursionError) as error:
                if text.endswith("\n"):
                    raise ValueError(f"line {number}: {why(error)}") from error
    return records


def _record(found: Any) -> dict[str, Any]:
    """Return the record. Raise ValueError if it is not one."""
    if not isinstance(found, dict) or not all(isinstance(found.get(name), int) for name in ("seed", "env_steps")):
        raise ValueError("not a record")
    if any(isinstance(number, int) and abs(number) >= 2**63 for number in found.values()):
        raise ValueError("a number is too large")
    wrong = [name for name, value in found.items() if isinstance(value, str)]
    if wrong:
        raise ValueError(f"{wrong[0]}: must be a number, got {found[wrong[0]]!r}")
    return found


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a run. Raise ValueError if the run has not ended or its summary cannot be read."""
    path = folder / SUMMARY
    if not path.is_file():
        remedy = f"resume it with {resume_command(folder)} if it is not in progress"
        raise ValueError(f"{folder} has no {SUMMARY} because the run has not ended; {remedy}")
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({why(error)})") from error
    if not isinstance(summary, dict):
        raise ValueError(f"{path} cannot be read (not a summary)")
    for name, value in summary.items():
        _check_number(name, value, path)
    return summary


def _check_number(name: str, value: Any, path: Path) -> None:
    """Raise ValueError if a number of the summary is something else: the file was edited."""
    per_seed = name.endswith("_per_seed") or name == "valid_steps"
    if not (per_seed or name in NEVER_NULL or name.endswith(NUMBER_ENDINGS)):
        return
    numbers = value if per_seed and isinstance(value, list) else [value]
    is_number = lambda x: isinstance(x, int | float) or x is None and name not in NEVER_NULL
    if per_seed and not isinstance(value, list | None) or not all(map(is_number, numbers)):
        raise ValueError(f"{path}: {name}: must be a number, got {value!r}; restore the file")


def summary_if_any(folder: Path) -> dict[str, Any]:
    """Return the summary of a run, or {} if it has none that can be read."""
    try:
        return read_summary(folder)
    except (OSError, ValueError):
        return {}
