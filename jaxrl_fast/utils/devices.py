"""The devices that JAX computes on."""

import contextlib
import gc
import os
from collections.abc import Iterable
from typing import Any


def configure_cpu_devices(wanted: int | str = "auto") -> None:
    """Lets JAX see every core as a device, or so many, or the most that were wanted before.

    It must be told before it first looks for devices.
    """
    import jax

    with contextlib.suppress(RuntimeError):  # too late, as in a notebook that has used JAX: what is there will do
        number = num_cores() if wanted == "auto" else int(wanted)
        jax.config.update("jax_num_cpu_devices", max(number, jax.config.values["jax_num_cpu_devices"]))


def limit_blas_threads() -> None:
    """Keeps scipy's BLAS, which JAX loads for orthogonal parameters, to one thread: more stay awake for nothing.

    For a tenth of a second after the first parameters they take a core from training. For a process of our own, before
    there are parameters; what the user has set stays.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device() -> str:
    import jax

    first = jax.devices()[0]
    return "cpu" if first.platform == "cpu" else f"{first.platform} {first.device_kind}"


def check_device() -> None:
    """ValueError where JAX finds none of the kind that it was told to use."""
    import jax

    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        asked = jax.config.values["jax_platforms"]
        which = f"JAX_PLATFORMS={asked}: " if asked else ""
        reason = " ".join(str(error).split()) or "it has no support for such a one"
        raise ValueError(f"{which}JAX finds no device here ({reason})") from error


def compiles() -> bool:
    """Whether JAX compiles what is jitted."""
    import jax

    return not jax.config.jax_disable_jit  # type: ignore[attr-defined]


def is_double() -> bool:
    """JAX makes float64 and int64 where no type is named."""
    import jax

    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def release_envs(envs: Iterable[Any]) -> None:
    """Drops what was compiled, and after that the pools of these environments, whose addresses were in it."""
    import jax

    jax.clear_caches()
    gc.collect()
    for env in envs:
        env.close()
