"""Provide gymnax's environments, and objects with gymnax's interface, which run on the device."""

import functools
from collections.abc import Mapping
from typing import Any

import gymnax

from jaxrl_fast.envs.gymnax.adapter import UNSUPPORTED, adapt
from jaxrl_fast.envs.gymnax.adapter import made as made
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.types import Env


def registered() -> tuple[str, ...]:
    """Return the names in gymnax's registry."""
    return tuple(gymnax.registered_envs)


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by gymnax's name for them; `host_config` does not concern the device."""
    del host_config
    env_id = f"gymnax/{name}"
    if name in UNSUPPORTED:
        raise ValueError(f"{env_id} cannot be used: {UNSUPPORTED[name]}")
    default, _ = gymnax.make(name)  # its class declares the arguments that the registry passes on
    return adapt(type(default), num_envs, options, env_id, functools.partial(gymnax.make, name))
