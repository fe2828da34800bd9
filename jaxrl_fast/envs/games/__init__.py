"""Provide the package's own games, which run on the device."""

from collections.abc import Mapping
from typing import Any

from jaxrl_fast.envs.games import paddles
from jaxrl_fast.envs.gymnax.adapter import adapt
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.types import Env

GAMES = {"Paddles": paddles.Paddles}


def registered() -> tuple[str, ...]:
    """Return the names of all games."""
    return tuple(GAMES)


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig | None = None) -> Env:
    """Return N games by name; `host_config` does not concern the device."""
    del host_config
    paddles.check_options(options)
    env = adapt(GAMES[name], num_envs, options, f"games/{name}", GAMES[name])
    return env._replace(view=env.view._replace(warnings=paddles.unused(options)))


def option_names(name: str) -> tuple[str, ...]:
    """Return the options of a game that have a name of `construct.FRAME_OPTIONS`: none."""
    return ()
