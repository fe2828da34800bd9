"""Let one agent for each player act in the same games."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxrl_fast.types import Agent, Decision, Key, PolicyInput, PyTree


def joint_agent(agents: Sequence[Agent]) -> Agent:
    """Return an agent that only acts, where agent p decides for player p of P * N rows.

    Its state is the tuple of the agents' states. Each row carries the recurrent states of all agents and uses one.
    """

    def act(policy_of: Callable[[Agent], Callable[..., Decision]]) -> Callable[..., Decision]:
        def act_all(states: PyTree, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
            num_games = jax.tree.leaves(inputs.obs)[0].shape[0] // len(agents)
            actions, carries = [], []
            for i, agent in enumerate(agents):
                own = slice(i * num_games, (i + 1) * num_games)
                given = jax.tree.map(lambda x, own=own: x[own], (inputs, carry[i]))
                decision = policy_of(agent)(states[i], *given, noise[i])
                actions.append(decision.action)
                carries.append(jax.tree.map(lambda x, new, own=own: x.at[own].set(new), carry[i], decision.carry))
            return Decision(jnp.concatenate(actions), tuple(carries))

        return act_all

    def sample_noise(key: Key, num_steps: int, num_envs: int) -> PyTree:
        keys = jax.random.split(key, len(agents))
        each = num_envs // len(agents)
        return tuple(agent.sample_noise(key, num_steps, each) for agent, key in zip(agents, keys, strict=True))

    return agents[0]._replace(
        explore=act(lambda agent: agent.explore),
        exploit=act(lambda agent: agent.exploit),
        sample_noise=sample_noise,
        initial_carry=tuple(agent.initial_carry for agent in agents),
        learning=agents[0].learning._replace(compress_obs=lambda obs: obs, gradient_steps=None),
    )
