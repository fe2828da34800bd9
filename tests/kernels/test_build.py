"""Test kernels.build: C is compiled once per machine and when its inputs change; JAXRL_FAST_KERNELS selects it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_fast.kernels import build
from jaxrl_fast.runs import fingerprint
from jaxrl_fast.training import console
from jaxrl_fast.utils import devices

COMPILERS = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
needs_compiler = pytest.mark.skipif(bool(build.unavailable_reason()), reason="no C compiler here")
COUNTED = """
import sys
from jaxrl_fast.kernels import build
build.CACHE = sys.argv[1]
compiled, compile_library = [], build.compile_library
build.compile_library = lambda *words: (compiled.append(words), compile_library(*words))
print(build.unavailable_reason() == "", len(compiled), build.compiler() != "none")
"""


def build_in_process(cache, **environment):
    """Return from a new process whether kernels are available, how often it compiled, and whether it has a compiler."""
    command = [sys.executable, "-c", COUNTED, str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=True)
    return done.stdout.split()


@pytest.mark.slow
@needs_compiler
def test_kernels_are_compiled_once_for_all_processes(tmp_path):
    assert build_in_process(tmp_path) == ["True", "1", "True"]
    assert build_in_process(tmp_path) == ["True", "0", "True"]
    assert len(list(tmp_path.iterdir())) == 1, "no file is left next to the library"


@needs_compiler
def test_damaged_library_is_compiled_again(tmp_path):
    build_in_process(tmp_path)
    (kept,) = tmp_path.iterdir()
    for damaged in (b"", b"no library", kept.read_bytes()[:2000]):
        kept.write_bytes(damaged)
        assert build_in_process(tmp_path) == ["True", "1", "True"]
        assert build_in_process(tmp_path) == ["True", "0", "True"]


NO_EXECUTION = """
import ctypes
load = ctypes.CDLL


def refuse(path, *others):
    if path and REFUSED in str(path):
        raise OSError(f"{path}: failed to map segment from shared object")
    return load(path, *others)


ctypes.CDLL = refuse
"""


@needs_compiler
@pytest.mark.slow
def test_library_is_compiled_once_when_cache_is_mounted_noexec(tmp_path):
    """A copy in the temporary folder is loaded, as with a home directory that is mounted noexec."""
    check_compiled_once(tmp_path, "sys.argv[1]")


@needs_compiler
@pytest.mark.slow
def test_library_is_compiled_once_when_temporary_folder_is_mounted_noexec(tmp_path):
    check_compiled_once(tmp_path, "'/jaxrl_fast_'")


def check_compiled_once(tmp_path, refused):
    """Start two processes that cannot load libraries with `refused` in their path."""
    script = COUNTED.replace("import sys", "import sys" + NO_EXECUTION.replace("REFUSED", refused), 1)
    counts = []
    for _ in range(2):
        command = [sys.executable, "-c", script, str(tmp_path / "kept")]
        counts.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert counts == [["True", "1", "True"], ["True", "0", "True"]]


@needs_compiler
@pytest.mark.slow
def test_library_is_compiled_by_each_process_when_cache_is_not_writable(tmp_path):
    (tmp_path / "file").touch()
    for _ in range(2):
        assert build_in_process(tmp_path / "file" / "below") == ["True", "1", "True"]


@needs_compiler
def test_cache_path_depends_on_compiler_source_flags_and_processor(monkeypatch, tmp_path):
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
def test_kernels_are_available_when_compiler_exists():
    """Otherwise all tests of C kernels would be skipped unnoticed, e.g. when jaxlib's headers change."""
    assert build.unavailable_reason() == ""


def test_kernels_are_unavailable_without_compiler(tmp_path):
    assert build_in_process(tmp_path, PATH=str(tmp_path), CC="") == ["False", "0", "False"]
    assert not list(tmp_path.iterdir())


def test_register_returns_error_message_of_compiler(tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'In file included' >&2; echo 'dense.c:7: error: no such type' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(build, "CACHE", str(tmp_path / "cache"))
    assert build._register.__wrapped__() == "dense.c:7: error: no such type" or devices.device() != "cpu"


def test_fingerprint_contains_compiler():
    """The compiler affects the bits of results, as versions do."""
    assert fingerprint.fingerprint()["c_compiler"] == build.compiler()
    assert (build.compiler() == "none") == bool(build.unavailable_reason())


def test_c_sources_are_installed_with_package():
    for file in (*build.SOURCES, *build.HEADERS):
        assert file.is_file() and file.parent == Path(build.__file__).parent / "csrc"


# JAXRL_FAST_KERNELS


@pytest.mark.parametrize(
    ("value", "kernels"),
    [
        (None, build.KERNELS),
        ("", build.KERNELS),
        ("auto", build.KERNELS),
        ("xla", ()),
        ("dense", ("dense",)),
        ("conv, allreduce", ("conv", "allreduce")),
    ],
)
def test_environment_variable_selects_kernels(value, kernels, monkeypatch):
    monkeypatch.delenv(build.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(build.VARIABLE, value)
    can = not build._register()
    assert build.enabled() == set(kernels)
    assert [name for name in build.KERNELS if build.is_available(name)] == [
        k for k in build.KERNELS if k in kernels
    ] * can


@needs_compiler
def test_compiler_description_lists_selected_kernels(monkeypatch):
    monkeypatch.delenv(build.VARIABLE, raising=False)
    compiler = build.compiler()
    monkeypatch.setenv(build.VARIABLE, "conv,dense")
    assert build.compiler() == f"{compiler}, for conv,dense"
    monkeypatch.setenv(build.VARIABLE, "xla")
    assert build.compiler() == "none"


@pytest.mark.slow
@pytest.mark.parametrize("value", ["c", "xla,dense", "dense,,conv"])
def test_unknown_value_of_variable_prints_one_error_line(value):
    command = [sys.executable, "-m", "jaxrl_fast.train", "ppo", "--env", "CartPole-v1"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {build.VARIABLE: value})
    use = "use auto, xla, or some of dense,conv,layer_norm,batch_norm,allreduce,host_call"
    assert done.stderr == f"error: {build.VARIABLE}: unknown value {value!r}; {use}\n"
    assert done.returncode == 2


NO_C = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
from jax.sharding import AxisType, PartitionSpec
import jaxrl_fast
from jaxrl_fast import networks
from jaxrl_fast.kernels import build
from jaxrl_fast.parallel import collectives
from jaxrl_fast.types import SHARED_MEMORY_AXIS
from jaxrl_fast.utils import devices

def refuse(*_):
    raise AssertionError("C is used")

build.compile_library = build._load = build.call = refuse
devices.num_cores = lambda: 2
options = dict(num_envs=8, total_steps=256, loggers=(), log_level="quiet", eval_episodes=1)
options |= dict(replay={"size": 256}, batch_size=128, learning_starts=64)
run = jaxrl_fast.fit(algo="dqn", env="CartPole-v1", **options, run_dir=sys.argv[1])
assert run.summary["num_updates"]
for shape, kind in [((10, 10, 4), "minatar"), ((36, 36, 4), "nature")]:
    options = networks.Options(kind=kind, layer_norm=True, hidden=(8,))
    network = networks.network(jax.ShapeDtypeStruct(shape, np.uint8), 3, options)
    params = network.init(jax.random.key(0))
    loss = lambda params: network.apply(params, np.ones((2, *shape), np.uint8)).sum()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))
mesh = jax.make_mesh((2,), (SHARED_MEMORY_AXIS,), axis_types=(AxisType.Auto,))
spec = PartitionSpec(SHARED_MEMORY_AXIS)
add = lambda x: collectives.all_reduce_sum(x, SHARED_MEMORY_AXIS)
add = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
assert add(np.float32([1, 2])).tolist() == [3, 3]
print("no C")
"""


@pytest.mark.slow
def test_value_xla_compiles_and_calls_no_c(tmp_path):
    """Check layers, a run whose gradient workers would need the all-reduce, and the all-reduce itself."""
    command = [sys.executable, "-c", NO_C, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {build.VARIABLE: "xla"})
    assert done.stdout.endswith("no C\n"), done.stderr


def test_console_reports_no_missing_c_when_disabled_by_variable(monkeypatch):
    monkeypatch.setenv(build.VARIABLE, "xla")
    assert console.why_no_c() == ""
    assert build.unavailable_reason() == "JAXRL_FAST_KERNELS is xla"
