"""Read and write the records and the summary in a run's folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast.config.paths import METRICS, SUMMARY
from jaxrl_fast.utils import files, warnings
from jaxrl_fast.utils.errors import why


def mark_running(folder: Path) -> None:
    """A summary of a run that goes on says so, until it ends again: who asks for its status is not told "done"."""
    with warnings.warn_on_error(f"{SUMMARY} could not be written"):
        if (folder / SUMMARY).is_file():
            write_summary(folder, read_summary(folder) | {"status": "running"})


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """What `summarize` gave, where `read_summary` finds it."""
    files.replace(folder / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; none where it failed before the first, and not one that is still being written.

    ValueError where a line is none.
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
    """ValueError for what no run has written."""
    if not isinstance(found, dict) or not all(isinstance(found.get(name), int) for name in ("seed", "env_steps")):
        raise ValueError("no record")
    if any(isinstance(number, int) and abs(number) >= 2**63 for number in found.values()):
        raise ValueError("a number that is too large")
    return found


def read_summary(folder: Path) -> dict[str, Any]:
    """What a run said of itself when it last ended. ValueError where it has not, or where that cannot be read."""
    path = folder / SUMMARY
    if not path.is_file():
        go_on = f"train with --resume {quote(str(folder))} goes on with it, unless it is still under way"
        raise ValueError(f"{folder} has no {SUMMARY}, for its run has not ended; {go_on}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({why(error)})") from error


def summary_if_any(folder: Path) -> dict[str, Any]:
    """The same, or nothing where there is none that can be read."""
    try:
        return read_summary(folder)
    except (OSError, ValueError):
        return {}
