"""Compile the C functions in csrc/ with this machine's compiler, at their first use, and register them with XLA.

The environment variable JAXRL_FAST_KERNELS says which kernels may be computed in C:

    auto (default)      all of `KERNELS`
    xla                 none: nothing is compiled and nothing in C is called
    dense,conv          the kernels named, and no others
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxrl_fast.utils import target

FOLDER = Path(__file__).parent / "csrc"
KERNELS = ("dense", "conv", "layer_norm", "batch_norm", "allreduce", "host_call")  # as VARIABLE names them
SOURCES = tuple(FOLDER / f"{name}.c" for name in KERNELS)
HEADERS = tuple(FOLDER / name for name in ("ffi.h", "simd.h", "activations.h", "gemm.h", "threads.h"))
VARIABLE = "JAXRL_FAST_KERNELS"
LAYER_KERNELS = ("dense", "conv2d", "layer_norm", "batch_norm")
FUNCTIONS = (
    "sum_over_cores",
    "copy_from_first_core",
    "call_host",
    *(f"{layer}_{way}" for layer in LAYER_KERNELS for way in ("forward", "backward")),
)
LOCK = threading.Lock()  # held while the functions are compiled and registered, which happens once in a process
DIGEST = hashlib.sha256().digest_size
CACHE = "~/.cache/jaxrl_fast/native"  # of compiled libraries; compiling takes two seconds
COMPILE = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
FOR_THIS_CPU = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())  # tried in this order


def enabled() -> frozenset[str]:
    """Return the kernels that JAXRL_FAST_KERNELS allows in C. Raise ValueError for an invalid value.

    The variable is read while a program is traced; a later change has no effect on that program.
    """
    value = os.environ.get(VARIABLE, "").strip() or "auto"
    if value in ("auto", "xla"):
        return frozenset(KERNELS if value == "auto" else ())
    names = frozenset(name.strip() for name in value.split(","))
    if not names <= set(KERNELS):
        raise ValueError(f"{VARIABLE}: unknown value {value!r}; use auto, xla, or some of {','.join(KERNELS)}")
    return names


def call(name: str, results: Any, **options: Any) -> Callable[..., Any]:
    """Return one of FUNCTIONS as a `jax.ffi.ffi_call`. It must be available."""
    return jax.ffi.ffi_call(_target(name), results, **options)


def is_available(kernel: str) -> bool:
    """Return whether one of KERNELS can be computed in C: on a CPU, with a C compiler, if VARIABLE allows it."""
    return kernel in enabled() and target.platform() == "cpu" and not unavailable_reason()


def unavailable_reason() -> str:
    """Return why no kernel can be computed in C, for the end of a sentence; "" if some can."""
    if not enabled():
        return f"{VARIABLE} is xla"
    with LOCK:
        return _register()


@functools.cache
def _register() -> str:
    """Compile or load the library and register its functions. Return why that is impossible, or ""."""
    if jax.default_backend() != "cpu":
        return "they are for CPUs"
    try:
        library = _load()
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").splitlines()
        return next((line for line in lines if "error" in line), f"{error.cmd[0]} ended with status {error.returncode}")
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    for name in FUNCTIONS:
        jax.ffi.register_ffi_target(_target(name), jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return ""


def compiler() -> str:
    """Return the first line of the C compiler's version, on which rounding depends; "none" if C is not used.

    If VARIABLE names kernels, the text names them too.
    """
    if unavailable_reason():
        return "none"
    line, allowed = _version(_compiler()).partition("\n")[0], enabled()
    return line if allowed == set(KERNELS) else f"{line}, for {','.join(sorted(allowed))}"


def _target(name: str) -> str:
    return f"jaxrl_fast_{name}"


def _load() -> ctypes.CDLL:
    """Return the library, from the cache or compiled now. Raise OSError or SubprocessError if that fails.

    The file systems of the cache and of the temporary folder may forbid execution (noexec), but not both.
    """
    compiler = _compiler()
    cached = _cache_path(compiler)
    with tempfile.TemporaryDirectory(prefix="jaxrl_fast_") as folder:
        library = Path(folder, "native.so")
        if cached and _checksum_ok(cached):
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(cached))
            with contextlib.suppress(OSError):
                shutil.copy(cached, library)
                return ctypes.CDLL(str(library))
            library.unlink(missing_ok=True)  # it does not load, so it is compiled again
        compile_library(compiler, library)
        if cached:
            _write_cache(library, cached)
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            if not (cached and _checksum_ok(cached)):
                raise
            return ctypes.CDLL(str(cached))


def _compiler() -> str:
    """Return the path of a C compiler. Raise FileNotFoundError if there is none."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        raise FileNotFoundError("there is no gcc or clang")
    return found


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, timeout=60).stdout.decode(errors="replace")


def compile_library(compiler: str, library: Path, *more: str) -> None:
    """Compile SOURCES into a shared library. Raise OSError or SubprocessError if that fails."""
    words = [*COMPILE, *more, f"-I{jax.ffi.include_dir()}", *map(str, SOURCES), "-o", str(library)]
    for processor in FOR_THIS_CPU:
        done = subprocess.run([compiler, *processor, *words], capture_output=True, timeout=60)
        if done.returncode == 0:
            return
    done.check_returncode()


def _cache_path(compiler: str) -> Path | None:
    """Return the library's path in the cache, named by a hash of sources, compiler, flags and processor."""
    digest = hashlib.sha256()
    for file in (*SOURCES, *HEADERS, Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")):
        digest.update(file.read_bytes())
    digest.update(repr((_version(compiler), COMPILE, FOR_THIS_CPU, platform.machine(), _processor())).encode())
    try:
        return Path(CACHE).expanduser() / f"{digest.hexdigest()[:32]}.so"
    except RuntimeError:  # the user has no home directory
        return None


def _processor() -> str:
    """Return the processor's model and instruction sets, as far as the system reports them."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        fields = ("model name", "flags", "Features", "CPU part")
        return "\n".join(sorted({line for line in lines if line.startswith(fields)}))
    return platform.processor()


def _write_cache(library: Path, cached: Path) -> None:
    """Write the library, followed by its SHA-256, to the cache atomically. Errors are ignored."""
    content = library.read_bytes()
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=cached.parent)  # a name that no other process uses
        try:
            with open(descriptor, "wb") as file:
                file.write(content + hashlib.sha256(content).digest())
            os.replace(temporary, cached)
        except OSError:
            os.unlink(temporary)


def _checksum_ok(cached: Path) -> bool:
    """Return whether the file is complete. Loading a truncated library would kill the process."""
    try:
        content = cached.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]
