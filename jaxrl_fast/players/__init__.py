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

from jaxrl_fast.options.declare import Part
from jaxrl_fast.options.run import SelfPlay
from jaxrl_fast.players import independent, self_play, shared
from jaxrl_fast.players.rows import marked_config
from jaxrl_fast.types import Agent, EnvSpec, Parallelism


def learning(algorithm: Any, options: Part) -> Any:
    """Return an algorithm for environments with or without players.

    Args:
        algorithm: A module, or another object with `Config` and `make` (see `agents`).
        options: The option `players`.
    """
    return SimpleNamespace(
        __name__=algorithm.__name__,
        Config=algorithm.Config,
        make=partial(_make, algorithm, options),
        SUPPORTS=getattr(algorithm, "SUPPORTS", frozenset()),
    )


def mode_of(options: Part) -> str:
    """Return the mode of an environment with players."""
    return "shared" if options.kind == "auto" else options.kind


def num_learner_envs(spec: EnvSpec, options: Part) -> int:
    """Return the number of rows that one policy learns from at each step."""
    return spec.num_envs if mode_of(options) == "shared" else spec.num_games


def _make(algorithm: Any, options: Part, config: Any, spec: EnvSpec, num_updates: int, *own: Parallelism) -> Agent:
    """Return the agent, or raise ValueError if the environment does not have the players that the mode requires."""
    if options.kind != "auto" and not spec.players:
        raise ValueError(f"players: {spec.id} has no players, got {options.kind}; leave it out")
    if not spec.players:
        agent: Agent = algorithm.make(config, spec, num_updates, *own)
        return agent
    if mode_of(options) != "independent":
        config = marked_config(config, spec.obs)
    make = lambda config, spec: algorithm.make(config, spec, num_updates, *own)
    modes: dict[str, Callable[..., Agent]] = {
        "shared": shared.make,
        "independent": independent.make,
        "self-play": partial(self_play.make, pool_size=options.pool if isinstance(options, SelfPlay) else 1),
    }
    return modes[mode_of(options)](make, config, spec, own[0] if own else Parallelism(), num_updates)
