"""Test that the documentation, and the docstrings and comments of the package, avoid the words of the glossary.

The list is docs/data/words.toml. Only prose is checked, not code in backquotes, fenced blocks, targets of links and
comments of Markdown.
"""

import ast
import fnmatch
import io
import json
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORDS = tomllib.loads((ROOT / "docs" / "data" / "words.toml").read_text(encoding="utf-8"))["avoid"]
NOT_PROSE = re.compile(
    r"^```.*?^```|`[^`\n]*`|<!--.*?-->|(?<=\])\([^)\s]*\)|https?://\S+|\$[^$\n]+\$", re.DOTALL | re.MULTILINE
)
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.yml")),
    *sorted((ROOT / "docs").rglob("*.py")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PACKAGE = sorted((ROOT / "jaxrl_fast").rglob("*.py"))
# Files whose docstrings and comments are still to be rewritten. Take a file out once it is clean; add none.
TO_CLEAN = set((ROOT / "tests" / "words_to_clean.txt").read_text(encoding="utf-8").split())


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def found(text, name):
    """Return the lines with a word to avoid, each with its replacement."""
    faults = []
    for entry in WORDS:
        if any(fnmatch.fnmatch(name, pattern) for pattern in entry.get("except_in", ())):
            continue
        for match in re.finditer(entry["pattern"], text):
            line = text.count("\n", 0, match.start()) + 1
            faults.append(f"{name}:{line}: {match[0].strip()!r}; write {entry['write']}")
    return faults


def prose_of_page(path):
    """Return a page without its code, with the same lines."""
    text = path.read_text(encoding="utf-8")
    text = prose_of_module(text) if path.suffix == ".py" else text
    return NOT_PROSE.sub(lambda match: "\n" * match[0].count("\n") or "x", text)


def prose_of_module(source):
    """Return docstrings, strings below fields, and comments of a module, each on its line."""
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] += token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number, line in enumerate(node.value.value.split("\n"), start=node.lineno - 1):
                lines[number] += line
    return "\n".join(lines)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_pages_avoid_the_words(path):
    if path.name == "glossary.md":
        assert len(found(path.read_text(encoding="utf-8"), name_of(path))) < 3  # it names a few of them
    else:
        assert not found(prose_of_page(path), name_of(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebooks_avoid_the_words(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert not found(NOT_PROSE.sub("x", text), name_of(path))


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_docstrings_and_comments_avoid_the_words(path):
    faults = found(NOT_PROSE.sub("x", prose_of_module(path.read_text(encoding="utf-8"))), name_of(path))
    if name_of(path) in TO_CLEAN:
        assert faults, f"{name_of(path)} is clean: take it out of tests/words_to_clean.txt"
    else:
        assert not faults


def test_files_of_words_to_clean_exist():
    gone = TO_CLEAN - {name_of(path) for path in PACKAGE}
    assert not gone, f"take out of tests/words_to_clean.txt: {' '.join(sorted(gone))}"


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("the run goes on", True),
        ("a run that is no longer saved", False),
        ("it is no run", True),
        ("there is no replay buffer", False),
        ("dealt into minibatches", True),
        ("to deal with errors", False),
        ("a key of its own", True),
        ("its own key", False),
        ("so many rows", True),
        ("it wants Qt", True),
        ("if you want to train", False),
        ("as I said", True),
        ("the games end", True),
        ("Optimisers normalise", True),
        ("an optimistic organism", False),
        ("two hands share it", True),
        ("written by hand", False),
        ("prioritised replay", True),
        ("prioritized replay", False),
    ],
)
def test_patterns_find_words_to_avoid_only(text, is_fault):
    assert bool(found(text, "page.md")) == is_fault


def test_code_is_not_checked_as_prose(tmp_path):
    path = tmp_path / "page.md"
    code = "`prioritised` is an option.\n\n```bash\ntrain --prioritised  # goes on\n```\n"
    path.write_text(code, encoding="utf-8")
    assert not found(prose_of_page(path), "page.md")
    module = '"""Prioritised."""\nx = "goes on"  # anew\n'
    assert len(found(prose_of_module(module), "module.py")) == 2
