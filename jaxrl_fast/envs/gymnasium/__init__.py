"""Provide gymnasium's environments, which Python steps on the host: ids, classes and factories of `gymnasium.Env`.

This module, `layout`, `making`, `stepping` and `worker` do not import JAX, because worker processes import them.
"""

import inspect
import sys
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_fast.utils import importing

if TYPE_CHECKING:
    from jaxrl_fast.envs.host.config import HostEnvConfig
    from jaxrl_fast.types import Env

PHYSICS = ("gymnasium.envs.mujoco", "gymnasium_robotics", "shimmy.dm_control")  # modules of environments


def registered() -> tuple[str, ...]:
    """Return the ids in gymnasium's registry. An id may name a module that registers it: "my_package:MyEnv-v0"."""
    import gymnasium

    return tuple(gymnasium.registry)


def is_physics(name: str) -> bool:
    """Return whether MuJoCo simulates an id: of gymnasium, gymnasium_robotics, or shimmy's dm_control."""
    import gymnasium

    module, _, bare = name.rpartition(":")
    if module:
        importing.module(module, f"environment {name!r}")
    spec = gymnasium.registry.get(bare)
    return spec is not None and str(spec.entry_point).startswith(PHYSICS)


def option_names(name: str) -> tuple[str, ...]:
    """Return the arguments of the class or function that makes an environment."""
    from jaxrl_fast.envs.gymnasium import source

    return source.option_names(name)


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: "HostEnvConfig") -> "Env":
    """Return N environments by gymnasium's id for them, with the module that registers it or without."""
    from jaxrl_fast.envs.gymnasium import description, source

    return description.make_envs(source.from_id(name, options), num_envs, host_config)


def adapt(given: Any, num_envs: int, options: Mapping[str, Any], host_config: "HostEnvConfig", env_id: str) -> "Env":
    """Return N environments from a class, a factory, or an environment that gymnasium can make again."""
    from jaxrl_fast.envs.gymnasium import description, source

    return description.make_envs(source.from_object(given, options, env_id), num_envs, host_config)


def recognizes(given: Any) -> bool:
    """Return whether this is a gymnasium environment, its class, or a function that is annotated to return one."""
    gymnasium = sys.modules.get("gymnasium")  # an object of its classes exists only if it is imported
    if gymnasium is None:
        return False
    made = given
    if inspect.isfunction(given):
        try:
            made = typing.get_type_hints(given).get("return")
        except Exception:  # a name in an annotation may be undefined
            return False
    return isinstance(given, gymnasium.Env) or inspect.isclass(made) and issubclass(made, gymnasium.Env)
