"""The table of a sweep: one row for each member, as CSV."""

import contextlib
import csv
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_fast.config import paths
from jaxrl_fast.config.options import as_lists
from jaxrl_fast.config.paths import SWEEP_TABLE
from jaxrl_fast.config.population import member_of
from jaxrl_fast.runs import files
from jaxrl_fast.sweep import grid
from jaxrl_fast.sweep.directory import FAILED, SweepPlan, failure
from jaxrl_fast.utils import formatting, locks
from jaxrl_fast.utils.files import replace
from jaxrl_fast.utils.importing import name_of

MEASURES = (  # beside the columns of the sweep
    *("status", "final_return", "eval_return", "env_steps", "env_steps_per_s", "members", "env_steps_per_s_member"),
    *("compile_time_s", "train_time_s", "steps_to_solve", "time_to_solve_s", "program_memory_mb", "program", "failure"),
)
MAX_LINE = 8192  # bytes of a record
WAIT_S = 60.0  # for another process that writes the same

Row = dict[str, Any]


def write_table(sweep: SweepPlan) -> list[Row]:
    """The table as it is now."""
    with exclusive(sweep.folder):
        table = table_rows(sweep)
        replace(sweep.folder / SWEEP_TABLE, as_csv(table))
    return table


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Several processes may want to write the same files."""
    deadline = time.monotonic() + WAIT_S
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
    """A row for each member, in the order of the sweep."""
    table = []
    for name, group in sweep.groups.items():
        folder = sweep.folder / name
        known, why, could_not_run = files.summary_if_any(folder), failure(folder), (folder / FAILED).is_file()
        last = {member_of(r): r for r in _last_records(folder, len(group.members))}
        speed = known.get("env_steps_per_s")
        for i, member in enumerate(group.members):
            of = lambda key, i=i, known=known: known[key][i] if known.get(key) else None
            diverged = of("diverged_at_per_seed")
            status = "diverged" if diverged else known.get("status", "unfinished")
            own = f"its numbers were no longer finite at step {formatting.short_number(diverged)}" if diverged else None
            common = {key: known.get(key) for key in MEASURES}
            table.append(
                {column: as_cell(value) for column, value in grid.values_of(group, member, sweep.columns).items()}
                | {"seed": member.seed}
                | common
                | {
                    "status": "failed" if could_not_run else status,
                    "final_return": of("final_return_per_seed"),
                    "eval_return": None if diverged else last.get((*member.label.items(),), {}).get("eval_return_mean"),
                    "members": len(group.members),
                    "env_steps_per_s_member": speed and round(speed / len(group.members), 1),
                    "steps_to_solve": of("steps_to_solve_per_seed"),
                    "time_to_solve_s": of("time_to_solve_s_per_seed"),
                    "program": name,
                    "failure": why or own,
                }
            )
    return table


def as_cell(value: Any) -> Any:
    """A column's value as what can be hashed: options as key=value, a class by its place, else as Python shows it."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={as_lists(part)!r}" for name, part in value.items()) or "none"
    if isinstance(value, type):
        return name_of(value)
    return value if isinstance(value, (str, int, float, tuple, type(None))) else repr(value)


def configurations(sweep: SweepPlan, table: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in their seeds only, together."""
    found: dict[str, list[Row]] = {}
    for row in table:
        found.setdefault(repr([row[c] for c in sweep.columns]), []).append(row)
    return list(found.values())


def as_csv(table: Sequence[Row]) -> str:
    """With a header; what is not known is empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: " ".join(map(str, v)) if isinstance(v, tuple) else v for k, v in row.items()} for row in table)
    return file.getvalue()


def _last_records(folder: Path, count: int) -> list[dict[str, Any]]:
    """The last records of a file that may be long, so from its end. None where it is lost or damaged."""
    path = folder / paths.METRICS
    with contextlib.suppress(FileNotFoundError, ValueError), path.open("rb") as file:
        file.seek(max(path.stat().st_size - MAX_LINE * (count + 1), 0))
        return [json.loads(line) for line in file.read().splitlines()[-count:] if line.startswith(b"{")]
    return []
