"""Build the table of a sweep: one row for each member, as CSV."""

import contextlib
import csv
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_fast.config import paths
from jaxrl_fast.config.paths import SWEEP_TABLE
from jaxrl_fast.config.population import member_of
from jaxrl_fast.runs import files
from jaxrl_fast.sweep import grid
from jaxrl_fast.sweep.directory import FAILED, SweepPlan, failure, is_done
from jaxrl_fast.utils import formatting, locks
from jaxrl_fast.utils.files import replace
from jaxrl_fast.utils.importing import name_of
from jaxrl_fast.utils.plain import as_lists

MEASURES = (  # in addition to the columns of the sweep
    *("status", "final_return", "eval_return", "env_steps", "env_steps_per_s", "members", "env_steps_per_s_member"),
    *("compile_time_s", "train_time_s", "steps_to_solve", "time_to_solve_s", "program_memory_mb", "program", "failure"),
)
MAX_RECORD_BYTES = 8192
LOCK_TIMEOUT_S = 60.0  # for another process that writes the results

Row = dict[str, Any]


def write_table(sweep: SweepPlan) -> list[Row]:
    """Write results.csv from the state of the runs now; return its rows."""
    with locked(sweep.folder):
        table = table_rows(sweep)
        replace(sweep.folder / SWEEP_TABLE, as_csv(table))
    return table


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock on a sweep's folder, for several processes may write its results."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            lock = locks.Lock(folder)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.release()


def table_rows(sweep: SweepPlan) -> list[Row]:
    """Return a row for each member, in the order of the sweep."""
    table = []
    for name, group in sweep.groups.items():
        folder = sweep.folder / name
        summary, reason, failed = files.summary_if_any(folder), failure(folder), (folder / FAILED).is_file()
        last = {member_of(r): r for r in _last_records(folder, len(group.members))}
        speed = summary.get("env_steps_per_s")
        for i, member in enumerate(group.members):
            at_member = lambda key, i=i, summary=summary: summary[key][i] if summary.get(key) else None
            diverged = at_member("diverged_at_per_seed")
            status = "diverged" if diverged else summary.get("status", "unfinished")
            status = "unfinished" if status == "done" and not is_done(summary, group) else status
            divergence = f"not finite from step {formatting.short_number(diverged)} on" if diverged else None
            common = {key: summary.get(key) for key in MEASURES}
            table.append(
                {column: as_cell(value) for column, value in grid.values_of(group, member, sweep.columns).items()}
                | {"seed": member.seed}
                | common
                | {
                    "status": "failed" if failed else status,
                    "final_return": at_member("final_return_per_seed"),
                    "eval_return": None if diverged else last.get((*member.label.items(),), {}).get("eval_return_mean"),
                    "members": len(group.members),
                    "env_steps_per_s_member": speed and round(speed / len(group.members), 1),
                    "steps_to_solve": at_member("steps_to_solve_per_seed"),
                    "time_to_solve_s": at_member("time_to_solve_s_per_seed"),
                    "program": name,
                    "failure": divergence if divergence and len(group.members) > 1 else reason or divergence,
                }
            )
    return table


def as_cell(value: Any) -> Any:
    """Return a column's value in a hashable form: options as key=value, a class by its name, else its repr."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={as_lists(part)!r}" for name, part in value.items()) or "none"
    if isinstance(value, type):
        return name_of(value)
    return value if isinstance(value, (str, int, float, tuple, type(None))) else repr(value)


def configurations(sweep: SweepPlan, table: Sequence[Row]) -> list[list[Row]]:
    """Return the rows grouped by configuration: rows of a group differ only in their seeds."""
    found: dict[str, list[Row]] = {}
    for row in table:
        found.setdefault(repr([row[c] for c in sweep.columns]), []).append(row)
    return list(found.values())


def as_csv(table: Sequence[Row]) -> str:
    """Return the table as CSV with a header; unknown values are empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: " ".join(map(str, v)) if isinstance(v, tuple) else v for k, v in row.items()} for row in table)
    return file.getvalue()


def _last_records(folder: Path, count: int) -> list[dict[str, Any]]:
    """Return the last `count` records of a run, read from the end of the file; [] if it is missing or damaged."""
    path = folder / paths.METRICS
    with contextlib.suppress(FileNotFoundError, ValueError), path.open("rb") as file:
        file.seek(max(path.stat().st_size - MAX_RECORD_BYTES * (count + 1), 0))
        return [json.loads(line) for line in file.read().splitlines()[-count:] if line.startswith(b"{")]
    return []
