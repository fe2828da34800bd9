"""Environments on the host that are dealt to pools: each works while the policy thinks for the others."""

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.rollout import Actors, Policy, follow, reset, scores_of
from jaxrl_fast.types import Agent, Array, Decision, Env, Key, Metrics, Pools, PyTree, Rollout


class PendingStep(NamedTuple):
    """A pool that was sent an action and has not answered yet."""

    actors: Actors  # as they stood when it was chosen; env: (), for that is of all pools
    decision: Decision


class AsyncActors(NamedTuple):
    """Where environments stand that are dealt to pools."""

    env: PyTree
    flights: tuple[PendingStep, ...]


def overlaps(env: Env) -> bool:
    """Whether it is played while the agent learns."""
    return env.pools is not None and env.pools.overlap


def on_paper(env: Env) -> Env:
    """The environment with pools that only have shapes, for `jax.eval_shape`: none is made, and it cannot be run."""
    if not env.pools:
        return env
    each = env.spec.num_envs // env.pools.num
    answer = lambda: jax.tree.map(lambda x: x[:each], env.reset(jax.random.key(0))[1])
    pools = env.pools._replace(send=lambda i, state, action: state, receive=lambda i, state: (state, answer()))
    return env._replace(pools=pools)


def begin(env: Env, agent: Agent, policy: Policy, key: Key) -> AsyncActors:
    """N actors, each at the start of an episode and with its first action sent."""
    pools = pools_of(env)
    key_env, key_noise = jax.random.split(key)
    actors = reset(env, agent, key_env)
    env_state, flights = actors.env, []
    of_pool = jax.tree.map(lambda x: x.reshape(pools.num, -1, *x.shape[1:]), actors._replace(env=()))
    for i, noise in enumerate(_noise(env, agent, key_noise, 1)):
        ours = jax.tree.map(itemgetter(i), of_pool)
        env_state, flight = _send(pools, policy, i, env_state, ours, jax.tree.map(itemgetter(0), noise))
        flights.append(flight)
    return AsyncActors(env_state, tuple(flights))


def collect(
    env: Env,
    agent: Agent,
    policy: Policy,
    actors: AsyncActors,
    key: Key,
    meanwhile: Callable[[Array, PyTree], PyTree] = lambda t, work: work,
    work: PyTree = (),
) -> tuple[AsyncActors, Rollout, Metrics, PyTree]:
    """`rollouts.rollout` of environments that are dealt to pools; also returns the work that was done meanwhile.

    All pools play while the agent learns: what the first rows tell was decided before the last update, by the policy of
    then, and what is sent last is answered in the next rollout. They also do while `meanwhile` goes on with some work,
    at each step of the rollout.
    """
    pools, noise = pools_of(env), _noise(env, agent, key, agent.rollout_length + 1)
    noise = jax.tree.map(lambda x: x[1:], noise)  # what is decided at row t is done in row t + 1

    def step(carry, now):
        (actors, work), (t, noise) = carry, now
        env_state, flights, rows = actors.env, [], []
        for i, (before, decision) in enumerate(actors.flights):
            env_state, after = pools.receive(i, env_state)
            ours, row = follow(agent, before, decision, (), after)
            env_state, flight = _send(pools, policy, i, env_state, ours, noise[i])
            flights.append(flight)
            rows.append(row)
        work = meanwhile(_only_after(env_state, t), work)  # all have been sent their actions
        return (AsyncActors(env_state, tuple(flights)), work), jax.tree.map(lambda *x: jnp.stack(x), *rows)

    join = lambda *trees: jax.tree.map(lambda *x: jnp.concatenate(x), *trees)
    (end, work), rows = jax.lax.scan(step, (actors, work), (jnp.arange(agent.rollout_length), noise))
    steps, games = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), rows)  # [T, pool, env] to [T, N]
    obs = lambda flights: join(*(flight.actors.timestep.obs for flight in flights))
    memory = join(*(flight.actors.memory for flight in actors.flights))
    experience = Rollout(steps, obs(end.flights), memory, obs(actors.flights))
    return end, experience, scores_of(steps.valid, *games), work


def pools_of(env: Env) -> Pools:
    """The pools that its environments are dealt to."""
    assert env.pools, "the plan sees to it"
    return env.pools


def _noise(env: Env, agent: Agent, key: Key, num_steps: int) -> tuple[PyTree, ...]:
    """What the decisions of each pool need of chance, [T, ...]."""
    num = pools_of(env).num
    return tuple(agent.noise(key, num_steps, env.spec.num_envs // num) for key in jax.random.split(key, num))


def _send(
    pools: Pools, policy: Policy, i: int, env_state: PyTree, actors: Actors, noise: PyTree
) -> tuple[PyTree, PendingStep]:
    """Pool i gets its next actions."""
    decision = policy(actors.timestep.obs, actors.memory, noise)
    return pools.send(i, env_state, decision.action), PendingStep(actors, decision)


def _only_after(tree: PyTree, number: Array) -> Array:
    """A number, int32 [], as something that is not known before the tree of numbers is.

    A whole number is never NaN, which XLA does not know. An `optimization_barrier` it forgets before it puts calls in
    order: it would learn between an answer and the next action, when no environment has anything to do.
    """
    whole = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.integer)]
    assert whole, "pools keep their order by a handle"
    return number + jnp.isnan(sum(x.astype(jnp.float32).sum() for x in whole))
