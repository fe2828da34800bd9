"""Learn a policy for each player: P agents of one algorithm in one program, vectorized over players.

Each agent has its own parameters, optimizer, statistics, replay and keys, and sees only the rows of its player. The
other players are a part of its environment.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxrl_fast.metrics.records import GRADIENT_STEPS, SUM_SUFFIX
from jaxrl_fast.players.rows import Make, join, map_rows, split
from jaxrl_fast.types import (
    Agent,
    AgentPlayers,
    Array,
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
    """Return an agent for P * N rows whose state is P states of an agent for N, [P, ...]."""
    inner, num_players = make_inner(config, spec._replace(num_envs=spec.num_games, players=())), len(spec.players)
    keys_of = lambda key: jax.random.split(key, num_players)

    def act(policy: Callable[..., Decision]) -> Callable[..., Decision]:
        def act_all(state: PyTree, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
            decision: Decision = join(jax.vmap(policy)(state, *split(num_players, (inputs, carry)), noise))
            return decision

        return act_all

    def update(state: PyTree, rollout: Rollout, key: Key) -> tuple[PyTree, Metrics]:
        own = map_rows(rollout, lambda rows, axis: split(num_players, rows, axis))
        state, metrics = jax.vmap(inner.update)(state, own, keys_of(key))
        return state, by_player(spec.players, metrics)

    def sample_noise(key: Key, num_steps: int, num_envs: int) -> PyTree:
        sample = lambda key: inner.sample_noise(key, num_steps, num_envs // num_players)
        return jax.vmap(sample, out_axes=1)(keys_of(key))  # [T, P, ...]

    return inner._replace(
        init=lambda key: jax.lax.map(inner.init, keys_of(key)),  # batched orthogonal matrices can deadlock JAX
        explore=act(inner.explore),
        exploit=act(inner.exploit),
        update=update,
        sample_noise=sample_noise,
        learning=inner.learning._replace(on_env_restart=jax.vmap(inner.learning.on_env_restart), gradient_steps=None),
        players=AgentPlayers(of_player=lambda player: agent_of_player(inner, player)),
    )


def agent_of_player(inner: Agent, player: int) -> Agent:
    """Return the agent that acts for one player with its own policy, from the states of all [P, ...]."""
    own: Callable[[PyTree], PyTree] = lambda state: jax.tree.map(lambda x: x[player], state)
    return inner._replace(
        explore=lambda state, *given: inner.explore(own(state), *given),
        exploit=lambda state, *given: inner.exploit(own(state), *given),
        learning=inner.learning._replace(gradient_steps=None),
    )


def by_player(players: tuple[str, ...], metrics: Metrics) -> Metrics:
    """Return scalar metrics of metrics [P]: "td_loss/left" for each player, and the mean over players as "td_loss".

    All players make the same number of gradient steps. Sums over them keep their suffix: "td_loss/left_sum".
    """
    found: dict[str, Array] = {}
    for name, values in metrics.items():
        found[name] = values[0] if name == GRADIENT_STEPS else values.mean()
        if name != GRADIENT_STEPS:
            plain, suffix = name.removesuffix(SUM_SUFFIX), SUM_SUFFIX * name.endswith(SUM_SUFFIX)
            found |= {f"{plain}/{player}{suffix}": value for player, value in zip(players, values, strict=True)}
    return found
