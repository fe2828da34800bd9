"""Cores of this CPU that can sum by way of their memory: `cores.c`, compiled here and made known to JAX."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

from jaxrl_fast import across, host

SHARE = {"processes": 1}  # of ours that use these cores at the same time
SOURCE = Path(__file__).with_suffix(".c")
COMPILE = ("-std=gnu11", "-O3", "-shared", "-fPIC")  # a tenth of a second, so each process does it for itself


def most() -> int:
    """Cores that may sum together: 1 where they cannot, or are few to each of the processes that share them."""
    number = host.num_cores() // SHARE["processes"]
    return number if number > 1 and ready() else 1


def share(num_processes: int) -> None:
    """So many processes of ours use these cores."""
    SHARE["processes"] = num_processes


@functools.cache
def ready() -> bool:
    """Whether `across.total` works on an axis of cores: on a CPU, where a C compiler is found and its work loads."""
    if jax.default_backend() != "cpu":
        return False
    try:
        library = _compile()
    except (OSError, subprocess.SubprocessError):
        return False
    jax.ffi.register_ffi_target(across.TARGET, jax.ffi.pycapsule(library.sum_over_cores), platform="cpu")
    return True


def _compile() -> ctypes.CDLL:
    """OSError or SubprocessError where it cannot be done."""
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((found for name in compilers if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    with tempfile.TemporaryDirectory(prefix="jaxrl_fast_") as folder:
        library = Path(folder, "cores.so")
        words = [*COMPILE, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(library)]
        build = lambda *more: subprocess.run([compiler, *more, *words], capture_output=True, timeout=60)
        if build("-march=native").returncode:  # which not every compiler knows
            build().check_returncode()
        return ctypes.CDLL(str(library))
