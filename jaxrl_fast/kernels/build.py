"""Functions of ours in C that XLA calls on a CPU: compiled by this machine's compiler when they are first wanted."""

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

FOLDER = Path(__file__).parent / "csrc"
SOURCES = tuple(FOLDER / name for name in ("allreduce.c", "dense.c", "conv.c", "layer_norm.c"))
HEADERS = tuple(FOLDER / name for name in ("ffi.h", "simd.h", "activations.h", "gemm.h", "threads.h"))
LAYER_KERNELS = "dense", "convolve", "layer_norm"
FUNCTIONS = ("sum_over_cores", *(f"{layer}_{way}" for layer in LAYER_KERNELS for way in ("forward", "backward")))
LOCK = threading.Lock()  # they are registered once
DIGEST = hashlib.sha256().digest_size
CACHE = "~/.cache/jaxrl_fast/native"  # of what was compiled, which takes two seconds
COMPILE = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
FOR_THIS_CPU = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())  # the first that it knows


def call(name: str, results: Any, **options: Any) -> Callable[..., Any]:
    """One of FUNCTIONS, as `jax.ffi.ffi_call` has it. Only where they are `ready`."""
    return jax.ffi.ffi_call(_target(name), results, **options)


def is_available() -> bool:
    """Whether they can be called: on a CPU, where a C compiler is found and its work loads."""
    return not unavailable_reason()


def unavailable_reason() -> str:
    """Why they cannot be called, for a sentence's end; "" where they can."""
    with LOCK:
        return _register()


@functools.cache
def _register() -> str:
    if jax.default_backend() != "cpu":
        return "they are for CPUs"
    try:
        library = _load()
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").splitlines()
        return next((line for line in said if "error" in line), f"{error.cmd[0]} ended with status {error.returncode}")
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    for name in FUNCTIONS:
        jax.ffi.register_ffi_target(_target(name), jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return ""


@functools.cache
def compiler() -> str:
    """What compiled them, in its own words: it decides bits. "none" where they cannot be called."""
    return _version(_compiler()).partition("\n")[0] if is_available() else "none"


def _target(name: str) -> str:
    return f"jaxrl_fast_{name}"


def _load() -> ctypes.CDLL:
    """What was compiled before, by the same compiler for the same processor, or is now. OSError or SubprocessError."""
    compiler = _compiler()
    kept = _cache_path(compiler)
    if kept and _checksum_ok(kept):
        with contextlib.suppress(OSError):  # what no longer loads is compiled anew
            return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(prefix="jaxrl_fast_") as folder:
        library = Path(folder, "native.so")
        compile_library(compiler, library)
        if kept:
            _keep(library, kept)
        return ctypes.CDLL(str(kept if kept and _checksum_ok(kept) else library))


def _compiler() -> str:
    """Where it is. FileNotFoundError where none is."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        raise FileNotFoundError("there is no gcc or clang")
    return found


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, timeout=60).stdout.decode(errors="replace")


def compile_library(compiler: str, library: Path, *more: str) -> None:
    """OSError or SubprocessError where it cannot be done."""
    words = [*COMPILE, *more, f"-I{jax.ffi.include_dir()}", *map(str, SOURCES), "-o", str(library)]
    for own in FOR_THIS_CPU:
        done = subprocess.run([compiler, *own, *words], capture_output=True, timeout=60)
        if done.returncode == 0:
            return
    done.check_returncode()


def _cache_path(compiler: str) -> Path | None:
    """Where it is kept from process to process: by what it is made of, with what, and for which processor."""
    made_of = hashlib.sha256()
    for file in (*SOURCES, *HEADERS, Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")):
        made_of.update(file.read_bytes())
    made_of.update(repr((_version(compiler), COMPILE, FOR_THIS_CPU, platform.machine(), _processor())).encode())
    try:
        return Path(CACHE).expanduser() / f"{made_of.hexdigest()[:32]}.so"
    except RuntimeError:  # this user has no home
        return None


def _processor() -> str:
    """Its model and what it can do, as far as the system tells."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        telling = ("model name", "flags", "Features", "CPU part")
        return "\n".join(sorted({line for line in lines if line.startswith(telling)}))
    return platform.processor()


def _keep(library: Path, kept: Path) -> None:
    """With its SHA-256 at its end, whole or not at all; no matter if it cannot be."""
    content = library.read_bytes()
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        descriptor, aside = tempfile.mkstemp(dir=kept.parent)  # of a name that no other process has, on any machine
        try:
            with open(descriptor, "wb") as file:
                file.write(content + hashlib.sha256(content).digest())
            os.replace(aside, kept)
        except OSError:
            os.unlink(aside)


def _checksum_ok(kept: Path) -> bool:
    """Whether it is there as it was kept: a part of a library would end the process."""
    try:
        content = kept.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]
