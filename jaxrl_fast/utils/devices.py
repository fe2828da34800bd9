"""Configure and describe the devices that JAX uses."""

import contextlib
import gc
import os
from collections.abc import Iterable
from typing import Any

from jaxrl_fast.utils import target, warnings
from jaxrl_fast.utils.memory import format_bytes
from jaxrl_fast.utils.parsing import one_line

FIXED: list[int] = []  # the number of CPU devices, once the processes of a run have agreed on it


def fix_cpu_devices(number: int) -> None:
    """Set the number of CPU devices for this process, which nothing changes any more."""
    import jax

    jax.config.update("jax_num_cpu_devices", number)
    FIXED.append(number)


def configure_cpu_devices(number: int | str = "auto") -> None:
    """Set the number of CPU devices: one per core for "auto", and never fewer than were set before.

    This has no effect once JAX has initialized its devices, and "auto" has none if JAX_NUM_CPU_DEVICES is set.
    """
    import jax

    if number == "auto" and os.environ.get("JAX_NUM_CPU_DEVICES") or FIXED:
        return
    with contextlib.suppress(RuntimeError):  # already initialized, as in a notebook that has used JAX
        count = num_cores() if number == "auto" else int(number)
        jax.config.update("jax_num_cpu_devices", max(count, jax.config.values["jax_num_cpu_devices"]))


MEMORY_SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX's names; all versions know the last
NO_GPU = "gpu_memory: has no effect, because JAX uses the CPU"
DEFAULT_MEMORY_SHARE = 0.75  # of a GPU's memory, which JAX reserves when it starts


def reserve_gpu_memory(share: float | None) -> None:
    """Set the share of a GPU's memory that JAX reserves when it starts; None changes nothing.

    Raises ValueError if JAX has started with another share. Warns if it uses the CPU.
    """
    import jax

    if share is None or memory_share() == share and is_initialized():
        return
    if is_initialized():
        if jax.local_devices()[0].platform == "cpu":
            warnings.warn(NO_GPU)
            return
        remedy = f"set {MEMORY_SHARE[-1]}={share:g} before JAX is used, or leave it out"
        raise ValueError(f"gpu_memory: JAX has already started, got {share:g}; {remedy}")
    for name in MEMORY_SHARE:
        os.environ.pop(name, None)
    os.environ[MEMORY_SHARE[-1]] = str(share)
    check_device()
    if jax.local_devices()[0].platform == "cpu":
        warnings.warn(NO_GPU)


def memory_share() -> float:
    """Return the share of a GPU's memory that JAX reserves: 0 if it allocates on demand."""
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0"):
        return 0.0
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() == "platform":
        return 0.0
    given = [os.environ[name] for name in MEMORY_SHARE if os.environ.get(name)]
    return float(given[0]) if given else DEFAULT_MEMORY_SHARE


def gpu_memory() -> str:
    """Return how JAX uses the memory of a GPU, for the header of a run; "" on other devices."""
    import jax

    first = jax.local_devices()[0]
    if first.platform != "gpu":
        return ""
    if not memory_share():
        return "allocated on demand"
    limit = (first.memory_stats() or {}).get("bytes_limit")
    size = f" ({format_bytes(limit)})" if limit else ""
    return f"JAX reserves {memory_share():.0%}{size}; gpu_memory changes it"


def is_initialized() -> bool:
    """Return whether JAX has started its devices, so that settings of them have no effect any more."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def limit_blas_threads() -> None:
    """Limit scipy's BLAS, which JAX loads for orthogonal initialization, to one thread unless the user has set it.

    Idle BLAS threads spin for 0.1 s and would take a core from training. Call this before parameters are initialized,
    and only in a process of this package.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device() -> str:
    """Return the name of the first device: "cpu", or platform and kind."""
    import jax

    if other := target.machine():
        return other.name
    first = jax.devices()[0]
    return "cpu" if first.platform == "cpu" else f"{first.platform} {first.device_kind}"


def check_device() -> None:
    """Raise ValueError if JAX finds no device of the requested platform."""
    import jax

    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.values["jax_platforms"]
        prefix = f"JAX_PLATFORMS={platforms}: " if platforms else ""
        reason = one_line(error) or "the platform is not supported"
        remedy = "; unset JAX_PLATFORMS" if platforms else ""
        raise ValueError(f"{prefix}JAX finds no device ({reason}){remedy}") from error


def check_settings() -> None:
    """Raise ValueError for a setting of JAX under which nothing can be trained."""
    import jax

    values = jax.config.values
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("jax_enable_x64 is on, but training requires 32-bit mode; unset JAX_ENABLE_X64")
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError("jax_disable_jit is on, but training is one compiled program; unset JAX_DISABLE_JIT")
    if values.get("jax_numpy_dtype_promotion") == "strict":
        remedy = "unset JAX_NUMPY_DTYPE_PROMOTION"
        raise ValueError(f"jax_numpy_dtype_promotion is strict, but environments mix types; {remedy}")
    if values.get("jax_debug_infs"):
        raise ValueError("jax_debug_infs is on, but inf stands for `no episode ended` in metrics; unset JAX_DEBUG_INFS")
    if not jax.sharding.get_abstract_mesh().empty:
        raise ValueError("a mesh is set, but a run makes its own; train outside of jax.set_mesh")


def release_envs(envs: Iterable[Any]) -> None:
    """Clear compiled programs, which hold the addresses of pools, and then close the environments."""
    import jax

    jax.clear_caches()
    gc.collect()
    for env in envs:
        if env.host:
            env.host.close()
