"""Learn one policy for all players, which sees the player's number as a part of its observation.

Its learner treats the rows of all players as rows of P * N environments.
"""

import dataclasses
from typing import Any

from jaxrl_fast.players.rows import Make, agent_of_player, mark, marked_spec
from jaxrl_fast.types import (
    Agent,
    AgentPlayers,
    Decision,
    EnvSpec,
    Key,
    Metrics,
    Parallelism,
    PolicyInput,
    PyTree,
    Rollout,
)


def make(make_inner: Make, config: Any, spec: EnvSpec, parallelism: Parallelism, num_updates: int) -> Agent:
    """Return an agent for P * N rows from one for single players."""
    num_players = len(spec.players)
    length = config.length(spec.num_games * parallelism.num_shards)  # "auto" is of games
    inner = make_inner(dataclasses.replace(config, rollout_length=length), marked_spec(spec, spec.num_envs))
    marked = lambda inputs: inputs._replace(obs=mark(num_players, inputs.obs))

    def explore(state: PyTree, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
        return inner.explore(state, marked(inputs), carry, noise)

    def exploit(state: PyTree, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
        return inner.exploit(state, marked(inputs), carry, noise)

    def update(state: PyTree, rollout: Rollout, key: Key) -> tuple[PyTree, Metrics]:
        next_obs, first_obs = (mark(num_players, obs) for obs in (rollout.next_obs, rollout.first_obs))
        return inner.update(state, rollout._replace(next_obs=next_obs, first_obs=first_obs), key)

    return inner._replace(
        explore=explore,
        exploit=exploit,
        update=update,
        learning=inner.learning._replace(
            compress_obs=lambda obs: inner.learning.compress_obs(mark(num_players, obs)), gradient_steps=None
        ),
        players=AgentPlayers(of_player=lambda player: agent_of_player(inner, num_players, player)),
    )
