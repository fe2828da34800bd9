"""Decide for which devices programs are traced and compiled: JAX's, unless `tracing_for` names others.

The environment variable JAXRL_FAST_TARGET chooses the version of a program too, to compare versions on one device. Code
that has a version for CPUs asks here. What runs on this machine whatever is compiled asks JAX.
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

VARIABLE, PLATFORMS = "JAXRL_FAST_TARGET", ("cpu", "gpu", "tpu")


class Machine(NamedTuple):
    """Devices that this machine does not have, for which programs are compiled but not run."""

    name: str
    devices: tuple[Any, ...]
    memory: int  # bytes of each that JAX would use


_platform: ContextVar[str | None] = ContextVar("platform", default=None)
_machine: ContextVar[Machine | None] = ContextVar("machine", default=None)


def platform() -> str:
    """Return the platform for which programs are traced: "cpu", "gpu" or "tpu", or "any" for all at once.

    Raises ValueError for another value of JAXRL_FAST_TARGET.
    """
    import jax

    given = os.environ.get(VARIABLE, "")
    if given and given not in PLATFORMS:
        raise ValueError(f"{VARIABLE}: must be {', '.join(PLATFORMS)} or unset, got {given}; unset it")
    return _platform.get() or given or jax.default_backend()


def machine() -> Machine | None:
    """Return the devices of another machine for which programs are compiled; None: this one's."""
    return _machine.get()


def devices() -> tuple[Any, ...]:
    """Return the devices for which programs are compiled: with several processes, those of all, process by process."""
    import jax

    if other := machine():
        return other.devices
    if jax.process_count() == 1:
        return tuple(jax.local_devices())
    return tuple(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))


@contextlib.contextmanager
def tracing_for(platform: str, machine: Machine | None = None) -> Iterator[None]:
    """Trace for a platform within the context, and compile for the devices of a machine.

    Functions that `jax.jit` has traced before stay as they are.
    """
    tokens = _platform.set(platform), _machine.set(machine)
    try:
        yield
    finally:
        _platform.reset(tokens[0])
        _machine.reset(tokens[1])
