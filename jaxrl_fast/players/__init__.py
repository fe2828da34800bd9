"""Let any algorithm learn in environments with several players.

`learning(algorithm, mode)` is the algorithm with another `make`: its agent acts and learns for all players of a game.
The algorithm knows nothing of players: it sees rows, as from any environments (`types.EnvSpec.players`).

shared        one policy for all players; the player's number, one-hot, is a part of the observation
independent   a policy for each player, with its own parameters, optimizer and replay
self-play     one policy for two players, which plays against earlier versions of itself
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from jaxrl_fast.players import independent, self_play, shared
from jaxrl_fast.types import Agent, EnvSpec, Parallelism

DEFAULT = "shared"
POOL_SIZE = 8  # earlier policies that play against the learner in self-play


def learning(algorithm: Any, mode: str, pool_size: int = POOL_SIZE) -> Any:
    """Return an algorithm for environments with or without players.

    Args:
        algorithm: A module, or another object with `Config` and `make` (see `agents`).
        mode: A mode, or "" for DEFAULT where an environment has players.
        pool_size: Earlier policies of self-play.
    """
    return SimpleNamespace(
        __name__=algorithm.__name__,
        Config=algorithm.Config,
        make=partial(_make, algorithm, mode, pool_size),
        SUPPORTS=getattr(algorithm, "SUPPORTS", frozenset()),
    )


def num_learner_envs(spec: EnvSpec, mode: str) -> int:
    """Return the number of rows that one policy learns from at each step."""
    return spec.num_envs if (mode or DEFAULT) == "shared" else spec.num_games


def _make(
    algorithm: Any, mode: str, pool_size: int, config: Any, spec: EnvSpec, num_updates: int, *own: Parallelism
) -> Agent:
    """Return the agent, or raise ValueError if the environment does not have the players that the mode requires."""
    if mode and not spec.players:
        raise ValueError(f"--players: {spec.id} has no players, got {mode}; leave it out")
    if not spec.players:
        agent: Agent = algorithm.make(config, spec, num_updates, *own)
        return agent
    make = lambda config, spec: algorithm.make(config, spec, num_updates, *own)
    modes: dict[str, Callable[..., Agent]] = {
        "shared": shared.make,
        "independent": independent.make,
        "self-play": partial(self_play.make, pool_size=pool_size),
    }
    return modes[mode or DEFAULT](make, config, spec, own[0] if own else Parallelism(), num_updates)
