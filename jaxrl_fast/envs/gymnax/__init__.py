"""The gymnax backend: environments on the device, by id or as a class with gymnax's interface."""

import functools
from collections.abc import Mapping
from typing import Any

import gymnax

from jaxrl_fast.envs.gymnax.batch import REFUSED, adapt
from jaxrl_fast.types import Env


def registered() -> tuple[str, ...]:
    return tuple(gymnax.registered_envs)


def make(name: str, num_envs: int, options: Mapping[str, Any]) -> Env:
    """An environment of gymnax's registry, by gymnax's name for it."""
    env_id = f"gymnax/{name}"
    if name in REFUSED:
        raise ValueError(f"{env_id} cannot be used: {REFUSED[name]}")
    default, _ = gymnax.make(name)  # its class names the arguments that the registry passes on
    return adapt(type(default), num_envs, options, env_id, functools.partial(gymnax.make, name))
