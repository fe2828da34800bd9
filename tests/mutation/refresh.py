"""Carry the patches over to the present source.

    python -m tests.mutation.refresh                # those that do not apply, or whose tests moved
    python -m tests.mutation.refresh --all          # also those that apply
    python -m tests.mutation.refresh --record NAME [--bug SENTENCE] [--test ID ...]

A patch names the blob that it was made from. Its bug is merged into today's source with that blob as the common
ancestor: line by line, then token by token, then with identifiers renamed as the source has renamed them. Candidates
are all source files, so a function may have moved. A test id is looked up by the name of its function.

Unmerged patches are listed, with exit status 1. Then plant the bug by hand in the working tree, `--record` it
(`git diff` becomes the patch; the header of a patch of that name is kept) and restore the source. Read the new diffs,
and run `python -m tests.mutation.run --only NAME` on them.
"""

import argparse
import ast
import difflib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.mutation import patches
from tests.mutation.patches import ROOT, Patch

KINDS = ("*.py", "*.c", "*.h")
BREAK = "\1"  # represents a line break within a piece
TOKEN = re.compile(r"\w+|\n|[^\S\n]+|[^\w\s]")
MAX_CANDIDATES = 6  # files that are tried, most similar first
MIN_SIMILARITY = 0.5  # between the old hunk and the new one
CONTEXT = 1  # lines around a change that help to find it


def refreshed(patch: Patch) -> Patch | None:
    """Return the patch made from today's source, or None if its bug cannot be merged."""
    try:
        base = patches.git("cat-file", "blob", patch.base)
    except subprocess.CalledProcessError:
        return None  # a shallow checkout, or a source that was never committed
    buggy = patched(base, patch)
    for path in candidates(patch):
        today = path.read_text(encoding="utf-8")
        for merged in merges(base, today, buggy):
            if merged != today and is_valid(path, merged):
                new = patch._replace(diff=diff_of(path, today, merged))
                if difflib.SequenceMatcher(None, body(patch), body(new)).ratio() >= MIN_SIMILARITY:
                    return new
    return None


def candidates(patch: Patch) -> list[Path]:
    """Return the files that may hold the patched lines today, most similar first."""
    lines = {line[1:].strip() for line in patch.diff.splitlines()[5:] if line[:1] in (" ", "-")}
    words = set(re.findall(r"\w+", " ".join(lines)))

    def similarity(path: Path) -> float:
        text = path.read_text(encoding="utf-8")
        same_lines = lines & {line.strip() for line in text.splitlines()}
        same_words = words & set(re.findall(r"\w+", text))
        return len(same_lines) / len(lines) + len(same_words) / len(words) + (path == ROOT / patch.source)

    files = [path for kind in KINDS for path in (ROOT / "jaxrl_fast").rglob(kind)]
    return sorted(files, key=similarity, reverse=True)[:MAX_CANDIDATES]


def merges(base: str, today: str, buggy: str) -> Iterator[str]:
    """Yield today's source with the bug, merged in ever finer ways."""
    for split in (split_lines, split_tokens):
        yield from merge(*map(split, (base, today, buggy)))
    renamed = renames(base, today)
    replace = lambda text: re.sub(r"\w+", lambda word: renamed.get(word[0], word[0]), text)
    base, buggy = replace(base), replace(buggy)
    yield from merge(*map(split_tokens, (base, today, buggy)))
    yield from transplant(split_lines(base), split_lines(today), split_lines(buggy))


def merge(base: list[str], ours: list[str], theirs: list[str]) -> Iterator[str]:
    """Yield the text that three lists of pieces merge into, if they do."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, pieces in zip(paths, (ours, base, theirs), strict=True):
            path.write_text("".join(piece.replace("\n", BREAK) + "\n" for piece in pieces), encoding="utf-8")
        done = subprocess.run(["git", "merge-file", "-p", "-q", *paths], capture_output=True, text=True)
    if not done.returncode:
        yield done.stdout.replace("\n", "").replace(BREAK, "\n")


def transplant(base: list[str], today: list[str], buggy: list[str]) -> Iterator[str]:
    """Yield today's source with the bug in the lines that are most like the old ones, if all are found."""
    changes = difflib.SequenceMatcher(None, base, buggy, autojunk=False).get_opcodes()
    for kind, i, i_end, j, j_end in reversed(changes):
        if kind == "equal":
            continue
        before, after = base[max(i - CONTEXT, 0) : i], base[i_end : i_end + CONTEXT]
        old, new = base[i:i_end], buggy[j:j_end]
        start = most_similar(before + old + after, today)
        if start is None:
            return
        end = start + len(before + old + after)
        found = list(
            merge(*(split_tokens("".join(x)) for x in (before + old + after, today[start:end], before + new + after)))
        )
        if not new:  # lines that the bug leaves out may have changed
            found = ["".join(today[start : start + len(before)] + today[end - len(after) : end])]
        if not found:
            return
        today = [*today[:start], *split_lines(found[0]), *today[end:]]
    yield "".join(today)


def most_similar(old: list[str], today: list[str]) -> int | None:
    """Return the start of the lines of today's source that are most similar to the old ones; None if too different."""
    matchers = [difflib.SequenceMatcher(None, "", line.strip()) for line in old]
    ratios = []
    for line in today:
        ratios.append([])
        for matcher in matchers:
            matcher.set_seq1(line.strip())
            ratios[-1].append(matcher.ratio() if matcher.real_quick_ratio() > MIN_SIMILARITY else 0.0)
    scores = [sum(ratios[i + k][k] for k in range(len(old))) for i in range(len(today) - len(old) + 1)]
    best = max(range(len(scores)), key=scores.__getitem__, default=None)
    return best if best is not None and scores[best] >= MIN_SIMILARITY * len(old) else None


def split_lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def split_tokens(text: str) -> list[str]:
    return TOKEN.findall(text)


def renames(base: str, today: str) -> dict[str, str]:
    """Return identifiers of the base that mostly stand under another name today."""
    votes: dict[str, Counter[str]] = {}
    for before, after in replaced(split_lines(base), split_lines(today)):
        for old, new in replaced(split_tokens("".join(before)), split_tokens("".join(after))):
            if len(old) == len(new):
                for x, y in zip(old, new, strict=True):
                    if x.isidentifier() and y.isidentifier():
                        votes.setdefault(x, Counter())[y] += 1
    left, there = Counter(split_tokens(today)), Counter(split_tokens(base))
    return {x: new.most_common(1)[0][0] for x, new in votes.items() if left[x] <= there[x] // 3}


def replaced(before: list[str], after: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the pairs of parts in which two lists differ, without pure insertions and deletions."""
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "replace":
            yield before[i:i_end], after[j:j_end]


def patched(base: str, patch: Patch) -> str:
    """Return the base with the bug."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, patch.source)
        path.parent.mkdir(parents=True)
        path.write_text(base, encoding="utf-8")
        if problem := patches.apply(patch, Path(folder)):
            raise SystemExit(f"{patch.name}: does not apply to its own base: {problem}")
        return path.read_text(encoding="utf-8")


def is_valid(path: Path, text: str) -> bool:
    """Return whether the text parses, if it is Python."""
    try:
        return path.suffix != ".py" or bool(ast.parse(text))
    except SyntaxError:
        return False


def body(patch: Patch) -> list[str]:
    """Return the tokens of the patch's hunks, without headers."""
    lines = [line for line in patch.diff.splitlines()[4:] if not line.startswith("@@")]
    return split_tokens("\n".join(lines))


def diff_of(path: Path, old: str, new: str) -> str:
    """Return git's diff between two contents of a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    with tempfile.TemporaryDirectory() as folder:
        for side, text in (("a", old), ("b", new)):
            copy = Path(folder, side, name)
            copy.parent.mkdir(parents=True)
            copy.write_text(text, encoding="utf-8")
        options = ["--no-index", "--full-index", "--no-color", "--no-ext-diff", "--no-prefix"]
        command = ["git", "diff", *options, f"a/{name}", f"b/{name}"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def moved(test: str) -> str:
    """Return the id of a test in its present file; raise LookupError if this is ambiguous."""
    path, _, rest = test.partition("::")
    if is_there(ROOT / path, rest):
        return test
    found = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if is_there(file, rest)]
    if len(same := [file for file in found if file.name == Path(path).name]) == 1:
        found = same
    if len(found) != 1:
        raise LookupError(f"{len(found)} files define the test of {test}")
    return f"{found[0].relative_to(ROOT).as_posix()}::{rest}"


def is_there(path: Path, rest: str) -> bool:
    """Return whether a file defines the test of an id's second half."""
    function = rest.partition("[")[0].rpartition("::")[2]
    return path.is_file() and f"def {function}(" in path.read_text(encoding="utf-8")


def refresh(everything: bool) -> int:
    """Rewrite outdated patches; print those that were rewritten and those that could not be."""
    lost = 0
    for patch in patches.read_all():
        try:
            new = patch._replace(tests=tuple(map(moved, patch.tests)))
        except LookupError as problem:
            print(f"{patch.name}: {problem}")
            new, lost = patch, lost + 1
        if everything or patches.apply(patch, ROOT, "--check"):
            if (with_diff := refreshed(new)) is None:
                print(f"{patch.name}: no longer applies to {patch.source}; plant it again and --record it")
                lost += 1
            else:
                new = with_diff
        if new != patch:
            patches.write(new)
            print(f"{patch.name}: renewed for {new.source}")
    return int(lost > 0)


def record(name: str, bug: str | None, tests: list[str] | None) -> int:
    """Write the working tree's diff as a patch."""
    old = patches.read(patches.path_of(name)) if patches.path_of(name).exists() else None
    if old is None and not (bug and tests):
        raise SystemExit(f"--record {name}: a new bug needs --bug and --test")
    changed = patches.git("diff", "--name-only", "--", "jaxrl_fast").split()
    if len(changed) != 1:
        raise SystemExit(f"--record {name}: expected one changed file in jaxrl_fast/, found {changed}")
    diff = patches.git("diff", "--full-index", "--no-color", "--no-ext-diff", "--", *changed)
    patches.write(Patch(name, bug or old.bug, tuple(tests or old.tests), diff))
    print(f"wrote {patches.path_of(name)}; restore the source with: git checkout {changed[0]}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="also patches that still apply")
    parser.add_argument("--record", metavar="NAME", help="write the working tree's diff as this patch")
    parser.add_argument("--bug", help="with --record: what is wrong, in a sentence")
    parser.add_argument("--test", action="append", help="with --record: a test that must fail; may be given again")
    args = parser.parse_args()
    return record(args.record, args.bug, args.test) if args.record else refresh(args.all)


if __name__ == "__main__":
    sys.exit(main())
