"""Plant every bug in a scratch copy and report whether the named tests catch it.

    python -m tests.mutation.run                    # all of them; the named tests without a bug alone take ten minutes
    python -m tests.mutation.run --only replay      # those with this in their name
    python -m tests.mutation.run --list

First all named tests must pass without a bug. Then each patch is applied alone, and the tests that it names are run.
A bug is caught if one of them fails; a run that is killed after a time limit has caught nothing.

Prints a line for each bug and a line of JSON at the end. Exits with 1 if a bug was missed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutation import patches
from tests.mutation.patches import ROOT, Patch

PARTS = ("configs", "jaxrl_fast", "tests", "pyproject.toml")  # parts of the tree that the named tests need
PYTEST = (sys.executable, "-m", "pytest", "-q", "--slow", "--nightly", "-p", "no:cacheprovider")
LIMIT_S, CONTROL_LIMIT_S = 180, 900
CRASHES = {-signal.SIGABRT: "aborted", -signal.SIGSEGV: "segmentation fault"}
FAILED = re.compile(r"^FAILED (?:tests/)?(.+?)(?: - ([\w.]+).*)?$", re.MULTILINE)


def copy_tree(folder: Path, parts: Sequence[str] = PARTS) -> None:
    """Copy the parts that the tests need, without caches."""
    folder.mkdir()
    for part in parts:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy(ROOT / part, folder / part)


def run_tests(tree: Path, arguments: list[str], limit_s: float) -> tuple[int | None, str]:
    """Return the exit status of pytest and its output; the status is None if it was killed."""
    changes = {"CI": "1", "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tree.parent)}
    env = os.environ | changes | {"PYTHONPATH": str(tree)}
    process = subprocess.Popen(
        [*PYTEST, *arguments],
        cwd=tree,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its children as well; SIGTERM would only ask a run to stop
            process.communicate()


def plant(tree: Path, patch: Patch) -> tuple[bool, str]:
    """Return whether the tests catch the bug, and a short reason. The tree is restored."""
    if problem := patches.apply(patch, tree):
        return False, problem
    try:
        status, output = run_tests(tree, ["-x", *patch.tests], LIMIT_S)
    finally:
        if problem := patches.apply(patch, tree, "--reverse"):
            raise SystemExit(f"{patch.name}: cannot be reversed: {problem}")
    if status == 1 and (found := FAILED.search(output)):
        return True, f"{found[1]} ({found[2] or 'failed'})"
    if status in CRASHES:
        return True, f"the test process: {CRASHES[status]}"
    reasons = {None: f"killed after {LIMIT_S} s", 0: "all named tests pass"}
    return False, reasons.get(status, f"pytest exited with {status}:\n{output[-2000:]}")


def check_control(tree: Path, chosen: list[Patch]) -> None:
    """Raise SystemExit if a named test fails without any bug."""
    tests = list(dict.fromkeys(test for patch in chosen for test in patch.tests))
    status, output = run_tests(tree, tests, CONTROL_LIMIT_S)
    if status != 0:
        raise SystemExit(f"the named tests fail without a bug (pytest exited with {status}):\n{output[-3000:]}")


def run(chosen: list[Patch]) -> int:
    """Print the outcome of each bug; return 1 if one was missed."""
    missed = []
    with tempfile.TemporaryDirectory(prefix="mutation_", ignore_cleanup_errors=True) as name:
        tree = Path(name, "tree")
        copy_tree(tree)
        check_control(tree, chosen)
        for patch in chosen:
            start = time.perf_counter()
            is_caught, how = plant(tree, patch)
            outcome = f"caught by {how}" if is_caught else f"MISSED: {how}"
            print(f"{patch.name}: {outcome}, {time.perf_counter() - start:.0f} s", flush=True)
            missed += [] if is_caught else [patch.name]
    print(json.dumps({"planted": len(chosen), "caught": len(chosen) - len(missed), "missed": missed}))
    return int(bool(missed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="bugs with this in their name")
    parser.add_argument("--list", action="store_true", help="print name, bug and tests; run nothing")
    args = parser.parse_args()
    chosen = [patch for patch in patches.read_all() if args.only in patch.name]
    if not chosen:
        parser.error(f"--only: no bug has {args.only!r} in its name")
    if args.list:
        for patch in chosen:
            print(f"{patch.name}: {patch.bug}\n    {patch.source}", *patch.tests, sep="\n    ")
        return 0
    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())
