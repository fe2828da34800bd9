"""Decide whether a layer is computed in C, and whether by the version for CPUs."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.kernels import build

_is_portable = ContextVar("is_portable", default=False)


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """Trace all layers in XLA's operations alone within the context, so that every device can run them.

    As with JAXRL_FAST_KERNELS, functions that `jax.jit` has traced before stay as they are.
    """
    token = _is_portable.set(True)
    try:
        yield
    finally:
        _is_portable.reset(token)


def use_c(kernel: str, *arrays: Array) -> bool:
    """Return whether this kernel (one of `build.KERNELS`) computes with these arrays in C: float32, on a CPU."""
    if _is_portable.get():
        return False
    available = build.is_available(kernel)  # first, so that a wrong JAXRL_FAST_KERNELS is an error on every device
    return available and on_cpu(*arrays) and all(x.dtype == jnp.float32 for x in arrays)


def for_cpu() -> bool:
    """Return whether to trace for a CPU: it is JAX's default device, and the code is not `portable`."""
    return jax.default_backend() == "cpu" and not _is_portable.get()


def on_cpu(*arrays: Array) -> bool:
    """Return whether a CPU computes with these arrays, and custom gradients may be used.

    Custom gradients are wrong inside a `shard_map` with check_vma, where JAX tracks which arrays vary over devices.
    """
    types = [jax.typeof(x) for x in arrays]
    varying = any(getattr(getattr(x, "mat", x), "varying", None) or getattr(x, "vma", None) for x in types)
    return for_cpu() and not varying
