"""What decides the bits of a result beside the configuration: device, versions, compiler flags."""

import os
import platform
from importlib import metadata, util
from typing import Any

from jaxrl_fast import __version__
from jaxrl_fast.utils.devices import device


def versions() -> dict[str, str]:
    """The versions of everything that decides the result."""
    packages = ("jax", "jaxlib", "flax", "optax", "gymnax", "envpool", "numpy")
    found = {p: metadata.version(p) for p in packages if util.find_spec(p)}
    return {"jaxrl_fast": __version__, "python": platform.python_version(), **found}


def fingerprint() -> dict[str, Any]:
    """What decides the bits of a result, beside the configuration."""
    import jax

    from jaxrl_fast.kernels import build  # which imports jax

    return {
        "device": device(),
        "num_devices": jax.local_device_count(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "c_compiler": build.compiler(),
        "prng": jax.config.values["jax_default_prng_impl"],
    }
