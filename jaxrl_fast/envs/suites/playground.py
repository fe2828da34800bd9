"""Provide the DM control suite of MuJoCo Playground, with the physics of MJX in JAX.

The time limit of Playground is in a wrapper, whose reset replaces the terminal observation. The adapter calls the
environment below it, and counts the steps itself. Locomotion and manipulation are left out: they download their models.
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
    warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)  # of brax, which it imports
    from mujoco_playground import dm_control_suite

PHYSICS = {"impl": "jax"}  # Playground's default, Warp, requires an NVIDIA GPU to be fast


def make_one(name: str) -> PhysicsEnv:
    """Return one environment with gymnax's interface. Only diverged physics are a terminal state of it."""
    config = dm_control_suite.get_default_config(name)
    env = dm_control_suite.load(name, config, PHYSICS)
    one = np.ones(env.action_size, np.float32)  # the range of controls is [-1, 1] in all of the suite
    return PhysicsEnv(env, Params(int(config.episode_length)), Interval(-one, one))


def registered() -> tuple[str, ...]:
    """Return the names of the DM control suite."""
    return tuple(dm_control_suite.ALL_ENVS)


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by Playground's name for them; `host_config` does not concern the device."""
    del host_config
    construct = functools.partial(make_one, name)
    return adapt(construct, num_envs, options, f"playground/{name}", construct)
