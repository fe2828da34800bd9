"""Describe the influences on a result besides its configuration: device, versions, compiler flags."""

import contextlib
import os
import platform
from importlib import metadata
from typing import Any

from jaxrl_fast import __version__
from jaxrl_fast.utils.devices import device

PACKAGES = ("jax", "jaxlib", "flax", "optax", "gymnax", "envpool", "numpy")
SUITES = ("ale-py", "brax", "craftax", "jumanji", "navix", "pgx", "playground", "xminigrid")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    found = {}
    for package in (*PACKAGES, *SUITES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return {"jaxrl_fast": __version__, "python": platform.python_version(), **found}


def fingerprint() -> dict[str, Any]:
    """Return everything besides the configuration that affects the bits of a result."""
    import jax

    from jaxrl_fast.kernels import build  # which imports jax

    return {
        "device": device(),
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "c_compiler": build.compiler(),
        "prng": jax.config.values["jax_default_prng_impl"],
    }
