"""Collect asynchronous rollouts: pools of host environments step while the policy computes for other pools."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.rollout import Actors, Policy, as_rollout, follow, policy_input, reset, scores_of
from jaxrl_fast.types import Agent, Array, Decision, Env, Key, Metrics, PyTree, Rollout
from jaxrl_fast.types.host import AsyncPools
from jaxrl_fast.utils.random import key_of_seed


class PendingStep(NamedTuple):
    """A pool whose actions are sent and whose step is not received yet."""

    actors: Actors  # when the action was chosen; env is None, since all pools share one state
    decision: Decision


class Work(NamedTuple):
    """Work that is done while the pools step."""

    state: PyTree = None
    step: Callable[[Array, PyTree], PyTree] = lambda t, state: state  # (t, state) to the state after step t


NO_WORK = Work()


class AsyncActors(NamedTuple):
    """The state of the environments of all pools, and the pending step of each pool."""

    env: PyTree
    pending: tuple[PendingStep, ...]  # one for each pool


def overlaps(env: Env) -> bool:
    """Return whether the next rollout is collected during the update."""
    return env.pools is not None and env.pools.overlap


def on_paper(env: Env) -> Env:
    """Return the environment for `jax.eval_shape`: its pools only compute shapes, and there is one gradient worker."""
    env = env._replace(parallelism=env.parallelism._replace(num_grad_workers=1))
    if not env.pools:
        return env
    each = env.spec.num_envs // env.pools.num
    answer = lambda: jax.tree.map(lambda x: x[:each], env.reset(key_of_seed(0))[1])
    pools = env.pools._replace(
        send=lambda i, state, action: state, receive=lambda i, state: (state, answer()), wait=lambda sent: sent
    )
    return env._replace(host=env.host and env.host._replace(pools=pools))


def begin(env: Env, agent: Agent, policy: Policy, key: Key) -> AsyncActors:
    """Return N actors, each at the start of an episode and with its first action sent."""
    pools = pools_of(env)
    key_env, key_noise = jax.random.split(key)
    actors = reset(env, agent, key_env)
    env_state, pending = actors.env, []
    of_pool = jax.tree.map(lambda x: x.reshape(pools.num, -1, *x.shape[1:]), actors._replace(env=None))
    for i, noise in enumerate(_noise(env, agent, key_noise, 1)):
        own = jax.tree.map(itemgetter(i), of_pool)
        env_state, sent = _send(pools, policy, i, env_state, own, jax.tree.map(itemgetter(0), noise))
        pending.append(sent)
    return AsyncActors(env_state, tuple(pending))


def collect(
    env: Env, agent: Agent, policy: Policy, actors: AsyncActors, key: Key, work: Work = NO_WORK
) -> tuple[AsyncActors, Rollout, Metrics, PyTree]:
    """Collect a rollout from asynchronous pools, and do other work at each of its steps.

    All pools step during the update as well. So the policy before the last update chose the actions of the first row.
    The steps of the actions sent last are received in the next rollout. Returns the actors, the rollout, the scores of
    episodes that ended, and the state of the work.
    """
    pools, noise = pools_of(env), _noise(env, agent, key, agent.rollout_length + 1)
    noise = jax.tree.map(lambda x: x[1:], noise)  # an action chosen at row t is the action of row t + 1

    def step(carry: Any, now: Any) -> tuple[Any, Any]:
        (actors, done), (t, noise) = carry, now
        env_state, pending, rows = actors.env, [], []
        for i, (before, decision) in enumerate(actors.pending):
            env_state, after = pools.receive(i, env_state)
            own, row = follow(agent, before, decision, None, after)
            env_state, sent = _send(pools, policy, i, env_state, own, noise[i])
            pending.append(sent)
            rows.append(row)
        done = work.step(_only_after(env_state, t), done)  # every pool has its action
        return (AsyncActors(env_state, tuple(pending)), done), jax.tree.map(lambda *x: jnp.stack(x), *rows)

    join = lambda *trees: jax.tree.map(lambda *x: jnp.concatenate(x), *trees)
    (end, done), rows = jax.lax.scan(step, (actors, work.state), (jnp.arange(agent.rollout_length), noise))
    steps, scores = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), rows)  # [T, pool, env] to [T, N]
    timestep = lambda actors: join(*(sent.actors.timestep for sent in actors.pending))
    carry = join(*(sent.actors.carry for sent in actors.pending))
    experience = as_rollout(steps, scores.failed, carry, timestep(actors), timestep(end))
    return end, experience, scores_of(steps.valid, scores), done


def pools_of(env: Env) -> AsyncPools:
    """Return the pools of an environment that has pools."""
    assert env.pools, "validate_plan checks it"
    return env.pools


def _noise(env: Env, agent: Agent, key: Key, num_steps: int) -> tuple[PyTree, ...]:
    """Return the noise for each pool's decisions, [T, ...]."""
    num = pools_of(env).num
    return tuple(agent.sample_noise(key, num_steps, env.spec.num_envs // num) for key in jax.random.split(key, num))


def _send(
    pools: AsyncPools, policy: Policy, i: int, env_state: PyTree, actors: Actors, noise: PyTree
) -> tuple[PyTree, PendingStep]:
    """Choose and send the next actions of pool i."""
    decision = policy(policy_input(actors.timestep), actors.carry, noise)
    return pools.send(i, env_state, decision.action), PendingStep(actors, decision)


def _only_after(tree: PyTree, number: Array) -> Array:
    """Return a number, int32 [], that XLA cannot compute before the tree is known.

    An integer is never NaN, but XLA does not use this fact. An `optimization_barrier` would not suffice, since XLA
    removes it before it orders calls. Then the update could run between receiving a step and sending the next action,
    while no environment steps.
    """
    whole = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.integer)]
    assert whole, "the handle of the pools is an integer"
    return number + jnp.isnan(sum(x.astype(jnp.float32).sum() for x in whole))
