"""Provide brax's environments: continuous control with its four physics engines.

`brax.envs.create` wraps an environment in a time limit and a reset that replaces the terminal observation. The adapter
calls the environment below both, and counts the steps itself.
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_fast.envs.gymnax.adapter import adapt
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.spaces import Interval
from jaxrl_fast.envs.suites.physics import Params, PhysicsEnv
from jaxrl_fast.envs.suites.physics import is_physics as is_physics
from jaxrl_fast.types import Env

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)
    from brax import envs

UNMAINTAINED = "Brax System, piplines and environments are not actively being maintained"
ENGINES = ("generalized", "mjx", "positional", "spring")
FOR_TESTS = "fast"  # an environment without physics, which brax uses to test itself


def make_one(name: str, **options: Any) -> PhysicsEnv:
    """Return one environment with gymnax's interface."""
    engine = options.get("backend", ENGINES[0])
    if engine not in ENGINES:
        raise ValueError(f"backend: not an engine of brax, got {engine!r}; choose {' or '.join(ENGINES)}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNMAINTAINED, UserWarning)
        env = envs.get_environment(name, **options)
    low, high = np.asarray(env.sys.actuator.ctrl_range, np.float32).T
    return PhysicsEnv(env, Params(), Interval(low, high))


def registered() -> tuple[str, ...]:
    """Return the names in brax's registry."""
    return tuple(name for name in envs._envs if name != FOR_TESTS)


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by brax's name for them; `host_config` does not concern the device."""
    del host_config
    kind = envs._envs[name]  # its class declares the options
    return adapt(kind, num_envs, options, f"brax/{name}", functools.partial(make_one, name))
