"""Provide JaxMARL's multi-agent particle environments (MPE).

Each agent is a player. If players differ, shorter observations are padded with zeros. A mask forbids the actions that a
player lacks, and excess numbers of a continuous action are ignored.

`step_env` is called, not `step`, which resets by itself and hides the terminal observation. An episode is truncated for
all players together after `max_steps` + 1 steps, as JaxMARL counts them; none terminates.
"""

import contextlib
import functools
import io
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs.gymnax.adapter import adapt
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.spaces import Interval
from jaxrl_fast.types import Discrete, Env, Key

with contextlib.redirect_stdout(io.StringIO()):  # JaxMARL prints the names of missing submodules
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
        self.players = tuple(agents) if len(agents) > 1 else ()
        self.obs_size = max(self.env.observation_space(agent).shape[0] for agent in agents)
        self.spaces = [self.env.action_space(agent) for agent in agents]
        nums = [getattr(space, "n", 0) for space in self.spaces]
        if len({*nums}) > 1:  # `envs.gymnax` looks for the method
            mask = jnp.arange(max(nums)) < jnp.asarray(nums)[:, None]
            self.action_mask = lambda state, params: mask

    def reset_env(self, key: Key, params: Any) -> tuple[jax.Array, Any]:
        """Start an episode."""
        obs, state = self.env.reset(key)
        return self._of_players(obs), state

    def step_env(self, key: Key, state: Any, action: jax.Array, params: Any) -> tuple[Any, ...]:
        """Step without a reset."""
        rows = zip(self.env.agents, self.spaces, action if self.players else action[None], strict=True)
        own = {agent: row[: space.shape[0]] if space.shape else row for agent, space, row in rows}
        obs, state, reward, _, _ = self.env.step_env(key, state, own)
        return self._of_players(obs), state, self._of_players(reward).astype(jnp.float32), False, {}

    def is_truncated(self, state: Any, params: Any) -> jax.Array:
        """Return whether the time limit is reached: JaxMARL compares the steps before the last one."""
        return jnp.asarray(state.step > self.env.max_steps)

    def action_space(self, params: Any) -> Discrete | Interval:
        """Return the largest action space of a player."""
        largest = max(self.spaces, key=lambda space: getattr(space, "n", 0) or space.shape)
        if hasattr(largest, "n"):
            return Discrete(int(largest.n))
        low, high = (np.broadcast_to(np.float32(bound), largest.shape) for bound in (largest.low, largest.high))
        return Interval(low, high)

    def _of_players(self, values: Mapping[str, jax.Array]) -> jax.Array:
        """Return values of all players; shorter observations end with zeros."""
        pad = lambda x: jnp.pad(x, (0, self.obs_size - len(x))) if x.ndim else x
        stacked = jnp.stack([pad(values[agent]) for agent in self.env.agents])
        return stacked if self.players else stacked[0]


def registered() -> tuple[str, ...]:
    """Return the names of MPE's environments in JaxMARL's registry, but for predator and prey (facmac)."""
    return tuple(name for name in jaxmarl.registered_envs if name.startswith(FAMILY) and "facmac" not in name)


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N environments by JaxMARL's name for them; `host_config` does not concern the device."""
    del host_config
    make_one = functools.partial(JaxMarlEnv, name)
    return adapt(make_one, num_envs, options, f"jaxmarl/{name}", make_one)
