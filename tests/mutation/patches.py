"""Read and apply the planted bugs.

A patch file is a header and a diff of one source file:

    Bug: One sentence that says what is wrong.
    Caught by: tests/path.py::test_name
    (one such line for each test that must fail)

    diff --git a/jaxrl_fast/... b/jaxrl_fast/...
    index ... (whole blob ids, so that `refresh` finds the source that the diff was made from)
"""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
FIELD = re.compile(r"^(Bug|Caught by): (.+)$", re.MULTILINE)
INDEX = re.compile(r"^index ([0-9a-f]{40})\.\.[0-9a-f]{40}", re.MULTILINE)
SOURCE = re.compile(r"^diff --git a/(\S+) b/\1$", re.MULTILINE)


class Patch(NamedTuple):
    """One bug, and the tests that must notice it."""

    name: str
    bug: str
    tests: tuple[str, ...]  # pytest ids
    diff: str

    @property
    def source(self) -> str:
        """Return the path of the file that the diff changes."""
        return SOURCE.findall(self.diff)[0]

    @property
    def base(self) -> str:
        """Return the blob id of the source that the diff was made from."""
        return INDEX.findall(self.diff)[0]


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.patch"


def read(path: Path) -> Patch:
    """Return the patch in a file; raise ValueError if a part is missing."""
    header, start, diff = path.read_text(encoding="utf-8").partition("diff --git ")
    fields = FIELD.findall(header)
    bugs, tests = ([value for key, value in fields if key == wanted] for wanted in ("Bug", "Caught by"))
    patch = Patch(path.stem, bugs[0] if bugs else "", tuple(tests), start + diff)
    if len(bugs) != 1 or not tests or len(SOURCE.findall(patch.diff)) != 1 or len(INDEX.findall(patch.diff)) != 1:
        raise ValueError(f"{path.name}: expected `Bug:`, `Caught by:` and the diff of one file with whole blob ids")
    return patch


def read_all() -> list[Patch]:
    return [read(path) for path in sorted(FOLDER.glob("*.patch"))]


def write(patch: Patch) -> None:
    """Write the patch to its file."""
    tests = "".join(f"Caught by: {test}\n" for test in patch.tests)
    path_of(patch.name).write_text(f"Bug: {patch.bug}\n{tests}\n{patch.diff}", encoding="utf-8")


def apply(patch: Patch, tree: Path, *options: str) -> str:
    """Apply the patch to a tree (`--check`: only try); return why it does not apply, or ""."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    # Inside another repository git would silently skip paths outside the present folder.
    env |= {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent), "LC_ALL": "C"}
    command = ["git", "apply", *options, "-"]
    done = subprocess.run(command, input=patch.diff, cwd=tree, env=env, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def git(*arguments: str) -> str:
    """Return what git prints in the repository; raise CalledProcessError where it fails."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
