"""Report the time limit of an environment as the end of its task."""

from typing import Any

import jax.numpy as jnp

from jaxrl_fast.envs.spaces import readable
from jaxrl_fast.types import Env, TimeStep


def terminating(env: Env) -> Env:
    """Return the same environments with each truncation as a termination: `discount` is 0 wherever `last` is True."""

    def end(result: tuple[Any, TimeStep]) -> tuple[Any, TimeStep]:
        state, timestep = result
        discount = jnp.where(timestep.last, 0.0, timestep.discount)
        return state, timestep._replace(discount=discount, obs=readable(timestep.last, timestep.obs))

    resize, pools = env.resize, env.pools
    return env._replace(
        step=lambda state, action: end(env.step(state, action)),
        pools=pools and pools._replace(receive=lambda pool, state: end(pools.receive(pool, state))),
        resize=resize and (lambda num_envs, config: terminating(resize(num_envs, config))),
    )
