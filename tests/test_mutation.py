"""The planted bugs still apply to the source, and the tests that must catch them exist."""

import shutil

import pytest

from tests.mutation import patches, refresh

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(not shutil.which("git"), reason="git applies the patches"),
]
PATCHES = patches.read_all()


def test_more_than_100_patches_exist():
    assert len(PATCHES) > 100


def test_every_patch_applies():
    problems = {patch.name: patches.apply(patch, patches.ROOT, "--check") for patch in PATCHES}
    assert not {name: problem for name, problem in problems.items() if problem}, "python -m tests.mutation.refresh"


def test_every_test_named_by_patch_exists():
    gone = [test for patch in PATCHES for test in patch.tests if refresh.moved(test) != test]
    assert not gone, "python -m tests.mutation.refresh"


def test_merges_carry_bug_over_to_renamed_and_moved_lines():
    base = "def f(reward, last):\n    trace = where(last, 0.0, lambda_)\n    return scan(reward, trace)\n"
    buggy = base.replace("where(last, 0.0, lambda_)", "full_like(reward, lambda_)")
    today = "import jax\n\n\n" + base.replace("trace", "decay").replace("scan(", "jax.lax.scan(")
    expected = today.replace("where(last, 0.0, lambda_)", "full_like(reward, lambda_)")
    assert expected in refresh.merges(base, today, buggy)


def test_merges_drop_bug_in_removed_line():
    base = "x = 1\ny = last & valid\nz = 3\n"
    assert not list(refresh.merges(base, "x = 1\nz = 3\n", base.replace("& valid", "")))
