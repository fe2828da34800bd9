"""native: our functions in C are compiled once for a machine, and anew whenever what they are made of changes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_fast.kernels import build
from jaxrl_fast.runs import fingerprint
from jaxrl_fast.utils import devices

COMPILERS = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
needs_compiler = pytest.mark.skipif(not build.is_available(), reason="no C compiler here")
COUNTED = """
import sys
from jaxrl_fast.kernels import build
build.CACHE = sys.argv[1]
compiled, compile_library = [], build.compile_library
build.compile_library = lambda *words: (compiled.append(words), compile_library(*words))
print(build.is_available(), len(compiled), build.compiler() != "none")
"""


def in_a_process(cache, **environment):
    """Whether they can be called there, and how often it has compiled them."""
    command = [sys.executable, "-c", COUNTED, str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=True)
    return done.stdout.split()


@needs_compiler
def test_they_are_compiled_once_for_all_processes(tmp_path):
    assert in_a_process(tmp_path) == ["True", "1", "True"]
    assert in_a_process(tmp_path) == ["True", "0", "True"]
    assert len(list(tmp_path.iterdir())) == 1, "nothing is left beside what is kept"


@needs_compiler
def test_a_damaged_library_is_compiled_anew(tmp_path):
    in_a_process(tmp_path)
    (kept,) = tmp_path.iterdir()
    for damaged in (b"", b"no library", kept.read_bytes()[:2000]):
        kept.write_bytes(damaged)
        assert in_a_process(tmp_path) == ["True", "1", "True"]
        assert in_a_process(tmp_path) == ["True", "0", "True"]


@needs_compiler
def test_where_nothing_can_be_kept_it_is_compiled_each_time(tmp_path):
    (tmp_path / "file").touch()
    for _ in range(2):
        assert in_a_process(tmp_path / "file" / "below") == ["True", "1", "True"]


@needs_compiler
def test_what_is_kept_depends_on_compiler_source_and_processor(monkeypatch, tmp_path):
    compiler = build._compiler()
    names = {build._cache_path(compiler)}
    edited = tmp_path / "dense.c"
    edited.write_text(build.SOURCES[1].read_text() + "\n")
    for name, value in (
        ("SOURCES", (build.SOURCES[0], edited)),
        ("COMPILE", (*build.COMPILE, "-g")),
        ("_processor", lambda: "another one"),
        ("_version", lambda compiler: "another one"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(build, name, value)
            names.add(build._cache_path(compiler))
    assert len(names) == 5


@pytest.mark.skipif(devices.device() != "cpu" or not COMPILERS, reason="no C compiler here")
def test_where_there_is_a_compiler_they_can_be_called():
    """Or all tests of what is in C would be skipped, and nobody would know: jaxlib's headers change."""
    assert build.unavailable_reason() == ""


def test_without_a_compiler_they_cannot_be_called(tmp_path):
    assert in_a_process(tmp_path, PATH=str(tmp_path), CC="") == ["False", "0", "False"]
    assert not list(tmp_path.iterdir())


def test_what_a_compiler_objects_to_is_told(tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'In file included' >&2; echo 'dense.c:7: error: no such type' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(build, "CACHE", str(tmp_path / "cache"))
    assert build._register.__wrapped__() == "dense.c:7: error: no such type" or devices.device() != "cpu"


def test_a_run_tells_what_compiled_them():
    """For it decides bits, as versions do."""
    assert fingerprint.fingerprint()["c_compiler"] == build.compiler()
    assert (build.compiler() == "none") is not build.is_available()


def test_their_sources_are_installed_with_the_package():
    for file in (*build.SOURCES, *build.HEADERS):
        assert file.is_file() and file.parent == Path(devices.__file__).parent
