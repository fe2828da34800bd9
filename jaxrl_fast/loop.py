"""Rollout and update as one scan. Knows environments and agents only by their functions."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.types import (
    Agent,
    Array,
    Decision,
    Env,
    Game,
    Key,
    Metrics,
    Pools,
    PyTree,
    Rollout,
    TimeStep,
    Transition,
)

Policy = Callable[[PyTree, PyTree, PyTree], Decision]  # (obs, memory, noise)


class Actors(NamedTuple):
    """Where the N environments stand."""

    env: PyTree
    timestep: TimeStep
    memory: PyTree
    score: Array  # [N] f32: reward so far in this game
    length: Array  # [N] int32: environment steps so far in this game


class Flight(NamedTuple):
    """A pool that was sent an action and has not answered yet."""

    actors: Actors  # as they stood when it was chosen; env: (), for that is of all pools
    decision: Decision


class InFlight(NamedTuple):
    """Where environments stand that are dealt to pools."""

    env: PyTree
    flights: tuple[Flight, ...]


class TrainState(NamedTuple):
    """All there is: enough to continue, to save, to vmap over seeds and to split over devices."""

    agent: PyTree
    actors: Actors | InFlight
    key: Key
    num_updates: Array  # int32; environment steps are derived from it on the host, where integers do not overflow
    rollout: Rollout | tuple[()] = ()  # what was played last and is still to be learnt from, where play does not wait


def init(env: Env, agent: Agent, key: Key) -> TrainState:
    """Before the first step: parameters from the key alone, environments also from the device's place."""
    key_agent, key_env, key = jax.random.split(key, 3)
    learner = agent.init(key_agent)
    actors = begin(env, agent, learner, key_of_shard(env, key_env))
    if not overlaps(env):
        return TrainState(learner, actors, key, jnp.int32(0))
    like = jax.eval_shape(lambda: act(env, agent, learner, actors, key)[1])
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)  # not one row of it is valid
    return TrainState(learner, actors, key, jnp.int32(0), nothing)


def on_paper(env: Env) -> Env:
    """The same for shapes only: no pool is made of it, and it cannot be run."""
    if not env.pools:
        return env
    each = env.spec.num_envs // env.pools.num
    answer = lambda: jax.tree.map(lambda x: x[:each], env.reset(jax.random.key(0))[1])
    pools = env.pools._replace(send=lambda i, state, action: state, receive=lambda i, state: (state, answer()))
    return env._replace(pools=pools)


def train(env: Env, agent: Agent, state: TrainState, num_updates: int) -> tuple[TrainState, Metrics]:
    """`num_updates` train steps in one scan. Metrics are stacked: [num_updates]."""
    once = train_step_overlapped if overlaps(env) else train_step
    state, (scores, metrics) = jax.lax.scan(lambda state, _: once(env, agent, state), state, length=num_updates)
    return state, {**_over_shards(env, scores), **metrics}


def train_step(env: Env, agent: Agent, state: TrainState) -> tuple[TrainState, tuple[Metrics, Metrics]]:
    """What every algorithm here does, over and over: act for T steps, then learn from them."""
    key_noise, key_update, key = jax.random.split(state.key, 3)
    actors, experience, scores = act(env, agent, state.agent, state.actors, key_of_shard(env, key_noise))
    learner, metrics = agent.update(state.agent, experience, key_of_shard(env, key_update))
    return TrainState(learner, actors, key, state.num_updates + 1), (scores, metrics)


def train_step_overlapped(env: Env, agent: Agent, state: TrainState) -> tuple[TrainState, tuple[Metrics, Metrics]]:
    """The same where a rollout is played while the agent learns from the one before: the policy is an update old."""
    pools, learning, actors, before = env.pools, agent.gradient_steps, state.actors, state.rollout
    assert pools and learning and isinstance(actors, InFlight) and isinstance(before, Rollout), "the plan sees to it"
    key_noise, key_update, key = jax.random.split(state.key, 3)
    noise = _noise_of_pools(pools, agent, key_of_shard(env, key_noise), agent.rollout_length, env.spec.num_envs)
    num_gradient_steps = jnp.where(state.num_updates > 0, learning.num, 0)  # at first there is nothing to learn from
    by_then = lambda t: num_gradient_steps * t // agent.rollout_length  # spread evenly over the rollout
    learn = lambda t, lesson: learning.take(lesson, by_then(t), by_then(t + 1))
    lesson = learning.begin(state.agent, before, key_of_shard(env, key_update))
    policy = partial(agent.explore, state.agent)
    actors, experience, scores, lesson = rollout_in_flight(pools, agent, policy, actors, noise, learn, lesson)
    learner, metrics = learning.end(lesson)
    return TrainState(learner, actors, key, state.num_updates + 1, experience), (scores, metrics)


def overlaps(env: Env) -> bool:
    """Whether it is played while the agent learns."""
    return env.pools is not None and env.pools.overlap


def cut(rollout: Rollout) -> Rollout:
    """A rollout whose episodes nobody goes on with: time runs out for all of them."""
    return rollout._replace(steps=rollout.steps._replace(last=rollout.steps.last.at[-1].set(True)))


def act(env: Env, agent: Agent, learner: PyTree, actors: PyTree, key: Key) -> tuple[PyTree, Rollout, Metrics]:
    """A rollout by the exploring policy; also returns the scores of games that ended."""
    policy, num_steps = partial(agent.explore, learner), agent.rollout_length
    if not env.pools:
        return rollout(env, agent, policy, actors, agent.noise(key, num_steps, env.spec.num_envs))
    noise = _noise_of_pools(env.pools, agent, key, num_steps, env.spec.num_envs)
    return rollout_in_flight(env.pools, agent, policy, actors, noise)[:3]


def begin(env: Env, agent: Agent, learner: PyTree, key: Key) -> Actors | InFlight:
    """N actors, each at the start of an episode. Those of pools are sent their first actions."""
    pools = env.pools
    if not pools:
        return reset(env, agent, key)
    key_env, key_noise = jax.random.split(key)
    actors = reset(env, agent, key_env)
    policy, env_state, flights = partial(agent.explore, learner), actors.env, []
    of_pool = jax.tree.map(lambda x: x.reshape(pools.num, -1, *x.shape[1:]), actors._replace(env=()))
    for i, noise in enumerate(_noise_of_pools(pools, agent, key_noise, 1, env.spec.num_envs)):
        ours = jax.tree.map(itemgetter(i), of_pool)
        env_state, flight = _send(pools, policy, i, env_state, ours, jax.tree.map(itemgetter(0), noise))
        flights.append(flight)
    return InFlight(env_state, tuple(flights))


def reset(env: Env, agent: Agent, key: Key) -> Actors:
    """N actors, each at the start of an episode."""
    env_state, timestep = env.reset(key)
    num_envs = env.spec.num_envs
    length = jnp.zeros(num_envs, jnp.int32)
    return Actors(env_state, timestep, _fresh_memory(agent, num_envs), jnp.zeros(num_envs), length)


def rollout(env: Env, agent: Agent, policy: Policy, actors: Actors, noise: PyTree) -> tuple[Actors, Rollout, Metrics]:
    """Lets `policy` act once for each step of `noise` [T, ...]; also returns the scores of games that ended."""

    def step(actors, noise):
        decision = policy(actors.timestep.obs, actors.memory, noise)
        return _follow(agent, actors, decision, *env.step(actors.env, decision.action))

    end, (steps, games) = jax.lax.scan(step, actors, noise)
    experience = Rollout(steps, end.timestep.obs, actors.memory, actors.timestep.obs)
    return end, experience, _scores(steps.valid, *games)


def rollout_in_flight(
    pools: Pools,
    agent: Agent,
    policy: Policy,
    actors: InFlight,
    noise: tuple[PyTree, ...],
    meanwhile: Callable[[Array, PyTree], PyTree] = lambda t, work: work,
    work: PyTree = (),
) -> tuple[InFlight, Rollout, Metrics, PyTree]:
    """The same where environments are dealt to pools: each works while the policy thinks for the others.

    All of them do while the agent learns: what the first rows tell was decided before the last update, by the policy of
    then, and what is sent last is answered in the next rollout. They also do while `meanwhile` goes on with some work,
    at each step of the rollout.
    """

    def step(carry, now):
        (actors, work), (t, noise) = carry, now
        env_state, flights, rows = actors.env, [], []
        for i, (before, decision) in enumerate(actors.flights):
            env_state, after = pools.receive(i, env_state)
            ours, row = _follow(agent, before, decision, (), after)
            env_state, flight = _send(pools, policy, i, env_state, ours, noise[i])
            flights.append(flight)
            rows.append(row)
        work = meanwhile(_only_after(env_state, t), work)  # all have been sent their actions
        return (InFlight(env_state, tuple(flights)), work), jax.tree.map(lambda *x: jnp.stack(x), *rows)

    join = lambda *trees: jax.tree.map(lambda *x: jnp.concatenate(x), *trees)
    num_steps = len(jax.tree.leaves(noise)[0])
    (end, work), rows = jax.lax.scan(step, (actors, work), (jnp.arange(num_steps), noise))
    steps, games = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), rows)  # [T, pool, env] to [T, N]
    obs = lambda flights: join(*(flight.actors.timestep.obs for flight in flights))
    memory = join(*(flight.actors.memory for flight in actors.flights))
    experience = Rollout(steps, obs(end.flights), memory, obs(actors.flights))
    return end, experience, _scores(steps.valid, *games), work


def _noise_of_pools(pools: Pools, agent: Agent, key: Key, num_steps: int, num_envs: int) -> tuple[PyTree, ...]:
    return tuple(agent.noise(key, num_steps, num_envs // pools.num) for key in jax.random.split(key, pools.num))


def _send(
    pools: Pools, policy: Policy, i: int, env_state: PyTree, actors: Actors, noise: PyTree
) -> tuple[PyTree, Flight]:
    """Pool i gets its next actions."""
    decision = policy(actors.timestep.obs, actors.memory, noise)
    return pools.send(i, env_state, decision.action), Flight(actors, decision)


def _only_after(tree: PyTree, number: Array) -> Array:
    """The same number, int32 [], as something that is not known before the tree of numbers is.

    A whole number is never NaN, which XLA does not know. An `optimization_barrier` it forgets before it puts calls in
    order: it would learn between an answer and the next action, when no environment has anything to do.
    """
    whole = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.integer)]
    assert whole, "pools keep their order by a handle"
    return number + jnp.isnan(sum(x.astype(jnp.float32).sum() for x in whole))


def _follow(
    agent: Agent, actors: Actors, decision: Decision, env_state: PyTree, after: TimeStep
) -> tuple[Actors, tuple[Transition, tuple[Array, Array, Array]]]:
    """Where the actors stand when their decision is answered; what they have been through, and how games ended."""
    now, extras = actors.timestep, decision.extras
    memory = jax.tree.map(partial(_where, now.last), _fresh_memory(agent, len(now.last)), decision.memory)
    game = after.game or Game(after.reward, after.last)
    score, length = actors.score + game.reward, actors.length + ~now.last
    row = Transition(agent.keep(now.obs), decision.action, after.reward, after.discount, after.last, ~now.last, extras)
    ended = jnp.where(game.over, 0.0, score), jnp.where(game.over, 0, length)
    return Actors(env_state, after, memory, *ended), (row, (game.over, score, length))


def _fresh_memory(agent: Agent, num_envs: int) -> PyTree:
    """[N, ...]"""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_envs, *jnp.shape(x))), agent.memory)


def _scores(valid: Array, over: Array, score: Array, length: Array) -> Metrics:
    """Sums and extremes over the games that ended; a minimum of inf says that none did."""
    return {
        "episodes": over.sum(),
        "valid_steps": valid.sum(),
        "return_sum": jnp.where(over, score, 0.0).sum(),
        "return_min": jnp.where(over, score, jnp.inf).min(),
        "return_max": jnp.where(over, score, -jnp.inf).max(),
        "length_sum": jnp.where(over, length, 0).astype(jnp.float32).sum(),  # past int32, if many end at once
    }


def _over_shards(env: Env, scores: Metrics) -> Metrics:
    """The scores of all devices' games together."""
    if env.spec.axis_name is None:
        return scores
    reduce = {"return_min": jax.lax.pmin, "return_max": jax.lax.pmax}
    return {name: reduce.get(name, jax.lax.psum)(x, env.spec.axis_name) for name, x in scores.items()}


def key_of_shard(env: Env, key: Key) -> Key:
    """A key of its own for each device that the environments are split over."""
    axis_name = env.spec.axis_name
    return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def _where(mask: Array, x: Array, y: Array) -> Array:
    return jnp.where(mask.reshape(mask.shape + (1,) * (y.ndim - 1)), x, y)
