"""Report the time limit of an environment as the end of its task."""

import jax.numpy as jnp

from jaxrl_fast.envs.spaces import readable
from jaxrl_fast.envs.wrappers.wrapper import mapped
from jaxrl_fast.types import Env, TimeStep


def terminating(env: Env) -> Env:
    """Return the same environments with each truncation as a termination: `discount` is 0 wherever `last` is True."""
    return mapped(env, _end)


def _end(timestep: TimeStep) -> TimeStep:
    discount = jnp.where(timestep.last, 0.0, timestep.discount)
    return timestep._replace(discount=discount, obs=readable(timestep.last, timestep.obs))
