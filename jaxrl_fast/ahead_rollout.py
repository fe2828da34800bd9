"""Collect rollouts ahead of the learner: pools of host environments that are fast do not wait for slow ones.

With K = `AsyncPools.ahead`, actions of rollout r are chosen by the parameters after update r - K, and those of the
first K rollouts by the first parameters. So a pool may be K rollouts ahead of the learner. Rows, parameters and noise
of an environment do not depend on the durations of steps, nor on the number of pools.
"""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.async_rollout import pools_of
from jaxrl_fast.rollout import Actors, as_rollout, follow, initial_carry, policy_input, reset, scores_of
from jaxrl_fast.types import Agent, Array, Decision, Env, Key, Metrics, PyTree, Rollout


class Progress(NamedTuple):
    """N environments, each at a step of a rollout. Rollouts are counted from the last start of all environments."""

    actors: Actors  # before the next action of each environment, or before its pending one
    decision: Decision  # the last one of each environment
    rollout: Array  # [N] int32: of the next row
    t: Array  # [N] int32: the next row's index in the rollout
    pending: Array  # [N] bool: the action is sent and its step is not received yet
    rows: PyTree  # [K + 1, T, N, ...] of transitions and scores; rollout r is at r % (K + 1)
    starts: PyTree  # [K + 2, N, ...] of recurrent states and inputs of the policy before a rollout


class AheadActors(NamedTuple):
    """The environments' progress, and what their decisions need."""

    progress: Progress
    num_collected: Array  # int32: rollouts that the learner has
    policies: list[Array]  # [K + 1, ...]: what `explore` reads after each of the last updates
    noise: PyTree  # [K + 1, T, ...]


def begin(env: Env, agent: Agent, learner: PyTree, key: Key) -> AheadActors:
    """Return N actors, each at the start of an episode. No action is sent yet."""
    num_slots, num_steps, num_envs = pools_of(env).ahead + 1, agent.rollout_length, env.spec.num_envs
    key_env, *keys = jax.random.split(key, num_slots + 1)
    actors = reset(env, agent, key_env)
    noise = jax.tree.map(lambda *x: jnp.stack(x), *(agent.sample_noise(key, num_steps, num_envs) for key in keys))

    def act(actors: Actors, noise: PyTree) -> tuple[Decision, PyTree]:
        """Return a decision and a row, for their shapes."""
        decision = agent.explore(learner, policy_input(actors.timestep), actors.carry, noise)
        return decision, follow(agent, actors, decision, actors.env, actors.timestep)[1]

    first = jax.tree.map(lambda x: x[0, 0], noise)
    decision, row = jax.eval_shape(act, actors, first)
    zeros = lambda tree, *shape: jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape), x.dtype), tree)
    start = (initial_carry(agent, num_envs), policy_input(actors.timestep))
    starts = jax.tree.map(lambda x: jnp.repeat(x[None], num_slots + 1, axis=0), start)
    none = jnp.zeros(num_envs, jnp.int32)
    progress = Progress(actors, zeros(decision), none, none, none > 0, zeros(row, num_slots, num_steps), starts)
    policies = [jnp.repeat(x[None], num_slots, axis=0) for x in _read(agent, learner, actors, first)[0]]
    return AheadActors(progress, jnp.int32(0), policies, noise)


def collect(
    env: Env, agent: Agent, learner: PyTree, actors: AheadActors, key: Key
) -> tuple[AheadActors, Rollout, Metrics]:
    """Return the actors, the next rollout and its scores, when all environments have finished it.

    The others continue with later rollouts meanwhile. All that may step do so when this returns, and during the update.
    """
    pools, number = pools_of(env), actors.num_collected
    new = agent.sample_noise(key, agent.rollout_length, env.spec.num_envs)
    own, state_with = _read(agent, learner, actors.progress.actors, jax.tree.map(lambda x: x[0], new))
    policies = _put(actors.policies, number, own)
    noise = _put(actors.noise, number + pools.ahead, new)

    def may_act(now: Progress) -> Array:
        """Return whose next action may be sent: bool [N]."""
        return ~now.pending & (now.rollout <= number + pools.ahead)

    def act(now: Progress) -> Progress:
        """Send the next actions of all environments that are at the same step as the first one that may act."""
        able = may_act(now)
        rollout, t = now.rollout[jnp.argmax(able)], now.t[jnp.argmax(able)]
        policy = state_with(_take(policies, jnp.maximum(rollout - pools.ahead, 0)))
        of_step = jax.tree.map(lambda x: x[t], _take(noise, rollout))
        decision = agent.explore(policy, policy_input(now.actors.timestep), now.actors.carry, of_step)
        chosen = able & (now.rollout == rollout) & (now.t == t)
        return _send(env, now, chosen, _where(chosen, decision, now.decision))

    step = lambda now: jax.lax.cond(may_act(now).any(), act, partial(_receive, env, agent), now)
    is_short = lambda now: (now.rollout <= number).any() | may_act(now).any()
    end = jax.lax.while_loop(is_short, step, actors.progress)
    (steps, scores), (carry, first) = _take(end.rows, number), _take(end.starts, number)
    after = _take(end.starts, number + 1)[1]
    rollout = as_rollout(steps, scores.failed, carry, first, after)
    return AheadActors(end, number + 1, policies, noise), rollout, scores_of(steps.valid, scores)


def _send(env: Env, now: Progress, chosen: Array, decision: Decision) -> Progress:
    """Send the decision's actions to the pools that are chosen, bool [N]."""
    pools, state = pools_of(env), now.actors.env
    for i, own in enumerate(_slices(env)):
        send = partial(pools.send, i)
        state = jax.lax.cond(chosen[own][0], send, lambda state, _: state, state, decision.action[own])
    return now._replace(actors=now.actors._replace(env=state), decision=decision, pending=now.pending | chosen)


def _receive(env: Env, agent: Agent, now: Progress) -> Progress:
    """Wait for the step of at least one pool, and take over the rows of all pools whose steps are done."""
    pools, state, before, num_envs = pools_of(env), now.actors.env, now.actors.timestep, env.spec.num_envs
    ready, parts = pools.wait(now.pending[:: num_envs // pools.num]), []
    for i, own in enumerate(_slices(env)):
        waiting = jax.tree.map(itemgetter(own), before)
        state, part = jax.lax.cond(ready[i], partial(pools.receive, i), lambda state, x=waiting: (state, x), state)
        parts.append(part)
    actors, row = follow(agent, now.actors, now.decision, None, jax.tree.map(lambda *x: jnp.concatenate(x), *parts))
    done = jnp.repeat(ready, num_envs // pools.num)
    actors = _where(done, actors, now.actors._replace(env=None))._replace(env=state)
    rows = _put_rows(now.rows, done, now.rollout, row, now.t)
    t = now.t + done
    ended = t == agent.rollout_length
    rollout = now.rollout + ended
    starts = _put_rows(now.starts, ended, rollout, (actors.carry, policy_input(actors.timestep)))
    return Progress(actors, now.decision, rollout, jnp.where(ended, 0, t), now.pending & ~done, rows, starts)


def _slices(env: Env) -> list[slice]:
    """Return the environments of each pool."""
    size = env.spec.num_envs // pools_of(env).num
    return [slice(i * size, (i + 1) * size) for i in range(pools_of(env).num)]


def _read(
    agent: Agent, learner: PyTree, actors: Actors, noise: PyTree
) -> tuple[list[Array], Callable[[list[Array]], PyTree]]:
    """Return the leaves of the agent's state that `explore` reads, and a function from such leaves to a state.

    So the replay and the optimizer's state are not copied for each of the last updates. `noise` is of one step.
    """
    leaves, structure = jax.tree.flatten(agent.policy_state(learner))

    def explore(leaves: list[Array]) -> Decision:
        """Return a decision, with the leaves as the only variables."""
        state = jax.tree.unflatten(structure, leaves)
        return agent.explore(state, policy_input(actors.timestep), actors.carry, noise)

    program = jax.make_jaxpr(explore)(leaves).jaxpr
    used = {id(x) for equation in program.eqns for x in equation.invars} | {id(x) for x in program.outvars}
    read = [i for i, x in enumerate(program.invars) if id(x) in used]

    def state_with(own: list[Array]) -> PyTree:
        """Return the state with these leaves in place of the ones that are read."""
        changed = dict(zip(read, own, strict=True))
        return jax.tree.unflatten(structure, [changed.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in read], state_with


def _take(slots: PyTree, number: Array) -> PyTree:
    """Return the slot of a rollout or update."""
    return jax.tree.map(lambda x: x[number % len(x)], slots)


def _put(slots: PyTree, number: Array, tree: PyTree) -> PyTree:
    """Return the slots with a tree in the slot of a rollout or update."""
    return jax.tree.map(lambda x, new: x.at[number % len(x)].set(new), slots, tree)


def _put_rows(slots: PyTree, mask: Array, rollout: Array, rows: PyTree, *t: Array) -> PyTree:
    """Return the slots with rows [N, ...] of rollouts [N], and of steps t [N] if given, where `mask` [N] is True."""

    def put(x: Array, new: Array) -> Array:
        """Write at an index that is dropped where the mask is False."""
        return x.at[jnp.where(mask, rollout % len(x), len(x)), *t, jnp.arange(len(mask))].set(new, mode="drop")

    return jax.tree.map(put, slots, rows)


def _where(mask: Array, first: PyTree, second: PyTree) -> PyTree:
    """Return rows of the first tree [N, ...] where `mask` [N] is True, else rows of the second."""
    return jax.tree.map(lambda a, b: jnp.where(mask.reshape(-1, *(1,) * (b.ndim - 1)), a, b), first, second)
