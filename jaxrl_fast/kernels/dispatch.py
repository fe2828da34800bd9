"""Decide whether a layer is computed in C, and whether by the version for CPUs."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.kernels import build
from jaxrl_fast.utils import target


def use_c(kernel: str, *arrays: Array) -> bool:
    """Return whether this kernel (one of `build.KERNELS`) computes with these arrays in C: float32, on a CPU."""
    available = build.is_available(kernel)  # first, so that a wrong JAXRL_FAST_KERNELS is an error on every device
    return available and on_cpu(*arrays) and all(x.dtype == jnp.float32 for x in arrays)


def on_cpu(*arrays: Array) -> bool:
    """Return whether a CPU computes with these arrays, and custom gradients may be used.

    Custom gradients are wrong inside a `shard_map` with check_vma, where JAX tracks which arrays vary over devices.
    """
    types = [jax.typeof(x) for x in arrays]
    varying = any(getattr(getattr(x, "mat", x), "varying", None) or getattr(x, "vma", None) for x in types)
    return target.platform() == "cpu" and not varying
