"""Provide JaxMARL's multi-agent particle environments (MPE) whose agents have equal observations and actions.

Each agent is a player. `step_env` is called, not `step`, which resets by itself and hides the terminal observation. An
episode is truncated for all players together after `max_steps` + 1 steps, as JaxMARL counts them; none terminates.
"""

import contextlib
import functools
import io
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs.gymnax.batch import adapt
from jaxrl_fast.envs.spaces import Interval
from jaxrl_fast.types import Discrete, Env, HostEnvConfig, Key

with contextlib.redirect_stdout(io.StringIO()):  # it prints which submodules it has not found
    import jaxmarl

FAMILY = "MPE_"


class JaxMarlEnv:
    """One environment of JaxMARL, with gymnax's interface and players."""

    default_params = ()

    def __init__(self, name: str, max_steps: int = 25, action_type: str = "Discrete"):
        if action_type not in ("Discrete", "Continuous"):
            raise ValueError(f"action_type: must be Discrete or Continuous, got {action_type!r}")
        if max_steps < 1:
            raise ValueError(f"max_steps: must be at least 1, got {max_steps}")
        self.env = jaxmarl.make(name, max_steps=max_steps, action_type=action_type)
        agents = self.env.agents
        for what in ("observation", "action"):
            each = {agent: getattr(self.env, f"{what}_space")(agent) for agent in agents}
            kind = lambda space: (type(space).__name__, space.shape, getattr(space, "n", 0))
            kinds = {agent: kind(space) for agent, space in each.items()}
            if len({*kinds.values()}) > 1:
                listed = ", ".join(f"{agent} {kind[2] or list(kind[1])}" for agent, kind in kinds.items())
                raise ValueError(f"the {what}s of its players must be equal, got {listed}; choose MPE_simple_spread_v3")
        self.players = tuple(agents) if len(agents) > 1 else ()

    def reset_env(self, key: Key, params: Any) -> tuple[jax.Array, Any]:
        """Start an episode."""
        obs, state = self.env.reset(key)
        return self._of_players(obs), state

    def step_env(self, key: Key, state: Any, action: jax.Array, params: Any) -> tuple[Any, ...]:
        """Step without a reset."""
        each = action if self.players else action[None]
        obs, state, reward, _, _ = self.env.step_env(key, state, dict(zip(self.env.agents, each, strict=True)))
        return self._of_players(obs), state, self._of_players(reward).astype(jnp.float32), False, {}

    def is_truncated(self, state: Any, params: Any) -> jax.Array:
        """Return whether the time limit is reached: JaxMARL compares the steps before the last one."""
        return jnp.asarray(state.step > self.env.max_steps)

    def action_space(self, params: Any) -> Discrete | Interval:
        """Return the space of a player's actions."""
        space = self.env.action_space(self.env.agents[0])
        if hasattr(space, "n"):
            return Discrete(int(space.n))
        low, high = (np.broadcast_to(np.float32(bound), space.shape) for bound in (space.low, space.high))
        return Interval(low, high)

    def _of_players(self, values: Mapping[str, jax.Array]) -> jax.Array:
        stacked = jnp.stack([values[agent] for agent in self.env.agents])
        return stacked if self.players else stacked[0]


def registered() -> tuple[str, ...]:
    """Return the names of MPE's environments in JaxMARL's registry, but for predator and prey (facmac)."""
    return tuple(name for name in jaxmarl.registered_envs if name.startswith(FAMILY) and "facmac" not in name)


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by JaxMARL's name for them; `host_config` does not concern the device."""
    del host_config
    make_one = functools.partial(JaxMarlEnv, name)
    return adapt(make_one, num_envs, options, f"jaxmarl/{name}", make_one)
