"""Record which tests run which lines: a plugin of pytest, and its records.

    python -m tests.mutation.lines [PYTEST ARGUMENT...]     # the fast tests, about ten minutes on two cores

New records of a test replace its old ones. A line that runs while a module is imported belongs to no test.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.mutation.patches import ROOT

RECORD = ROOT / "build" / "mutation" / "lines.json"


class Record(NamedTuple):
    """The tests of each line, and how long each test takes."""

    seconds: dict[str, float]  # by test id
    digests: dict[str, str]  # of the sources when they were recorded, by path
    tests: dict[str, dict[str, list[int]]]  # path -> test id -> lines


def digest(source: Path) -> str:
    """Return a checksum of a source file."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def read() -> Record:
    """Return the saved record, or an empty one."""
    return Record(**json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.is_file() else Record({}, {}, {})


def merge(old: Record, new: Record) -> Record:
    """Return the old record with the tests of the new one replaced. A changed source loses its old lines."""
    tests = {}
    for path in {**old.tests, **new.tests}:
        before = old.tests.get(path, {}) if new.digests.get(path) in (None, old.digests.get(path)) else {}
        kept = {test: lines for test, lines in before.items() if test not in new.seconds}
        tests[path] = kept | new.tests.get(path, {})
    return Record(old.seconds | new.seconds, old.digests | new.digests, tests)


def main(arguments: list[str]) -> int:
    """Run the tests under coverage and merge what they ran into the record; return pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        data, settings = Path(folder, "lines.json"), Path(folder, "coveragerc")
        settings.write_text(f"[run]\nsource = {ROOT / 'jaxrl_fast'}\ndata_file = {folder}/coverage\n", encoding="utf-8")
        run = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", "-n", "0"]
        env = os.environ | {"MUTATION_LINES": str(data)}
        status = subprocess.run(
            [*run, "-p", "tests.mutation.lines", *(arguments or ["tests"])], cwd=ROOT, env=env
        ).returncode
        if not data.is_file():
            return status
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        merged = merge(read(), from_coverage(Path(folder, "coverage"), json.loads(data.read_text(encoding="utf-8"))))
        RECORD.write_text(json.dumps(merged._asdict()), encoding="utf-8")
    return status


def from_coverage(path: Path, seconds: dict[str, float]) -> Record:
    """Return the record in a data file of coverage whose contexts are test ids."""
    import coverage

    data = coverage.CoverageData(str(path))
    data.read()
    tests: dict[str, dict[str, list[int]]] = {}
    for file in data.measured_files():
        of_file = tests.setdefault(Path(file).relative_to(ROOT).as_posix(), {})
        for line, names in data.contexts_by_lineno(file).items():
            for name in seconds.keys() & names:
                of_file.setdefault(name, []).append(line)
    return Record(seconds, {name: digest(ROOT / name) for name in tests}, tests)


_seconds: dict[str, float] = {}
_not_passed: set[str] = set()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Let coverage note the test, from before its fixtures until after them."""
    import coverage

    coverage.Coverage.current().switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        coverage.Coverage.current().switch_context("")


def pytest_runtest_logreport(report: Any) -> None:
    """Add up the seconds of a test's phases. A test that fails or is skipped cannot kill a mutant."""
    if not report.passed:
        _not_passed.add(report.nodeid)
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0) + report.duration


def pytest_sessionfinish() -> None:
    """Write the seconds to the file that `main` reads."""
    seconds = {test: time for test, time in _seconds.items() if test not in _not_passed}
    Path(os.environ["MUTATION_LINES"]).write_text(json.dumps(seconds), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
