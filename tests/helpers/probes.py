"""Tiny environments with known optimal policies and values. They show which part of an agent does not learn.

Each is `name(num_envs) -> Env`. Its docstring gives the answer for a discount factor of GAMMA. They implement the
contract of `types.TimeStep` themselves, so they test agents and the loop without a backend. `experience` and `pooled`
work with all of them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast import rollout
from jaxrl_fast.types import Agent, Box, Discrete, Env, EnvSpec, Key, PyTree, Rollout, TimeStep
from jaxrl_fast.types.host import AsyncPools, HostEnv

GAMMA = 0.9
QUICK = {"xla_backend_optimization_level": 1}  # for programs that take longer to compile than to run
TWO_ACTIONS = Discrete(2)


class State(NamedTuple):
    """The state of each environment is a time in its episode and one number, the cue."""

    time: jax.Array  # [N] int32
    cue: jax.Array  # [N] f32: drawn at reset, changed by `advance`
    last: jax.Array  # [N] bool
    key: Key


class Rules(NamedTuple):
    """A probe: its draw at reset, observation, reward, and the time and kind of its end."""

    length: int  # steps in an episode
    terminates: bool  # True: it ends by termination, False: by truncation
    draw: Callable  # (key, [N]) -> cue [N]
    observe: Callable  # (time [N], cue [N]) -> obs [N, D]
    reward: Callable  # (time before the step [N], cue [N], action [N, ...]) -> [N]
    advance: Callable = lambda time, cue, action: cue  # the cue after the step


def constant_reward(num_envs: int) -> Env:
    """Every step has reward 1. Episodes are truncated after 10 steps. The value is 1 / (1 - 0.9) = 10 everywhere."""
    return _env("constant_reward", num_envs, Rules(10, False, _no_cue, _blank, _one))


def constant_reward_terminal(num_envs: int) -> Env:
    """Every step has reward 1. Episodes terminate after 10 steps. The observation is the time, one-hot.

    The value at time t is (1 - 0.9^(10 - t)) / (1 - 0.9): 6.5132 at the start, 1 at the last step.
    """
    return _env("constant_reward_terminal", num_envs, Rules(10, True, _no_cue, _clock(10), _one))


def value_of_observation(num_envs: int) -> Env:
    """Episodes have one step. The reward is the observation, -1 or +1. The value is the observation."""
    return _env("value_of_observation", num_envs, Rules(1, True, _sign, _show, lambda time, cue, action: cue))


def delayed_reward(num_envs: int) -> Env:
    """Episodes have two steps. The second has reward 1. The value is 0.9 at observation [0] and 1 at [1]."""
    return _env("delayed_reward", num_envs, Rules(2, True, _no_cue, _time, lambda time, cue, action: time == 1))


def delayed_cue(num_envs: int) -> Env:
    """Episodes have two steps. The cue, -1 or +1, is drawn at reset and is the reward of the second step.

    The observation is [cue, time]. The value is 0.9 cue, then cue.
    """
    rules = Rules(2, True, _sign, _show_and_time, lambda time, cue, action: cue * (time == 1))
    return _env("delayed_cue", num_envs, rules)


def best_action(num_envs: int) -> Env:
    """Episodes have one step and a constant observation. Action 1 has reward 1, action 0 has -1. The value is 1."""
    rules = Rules(1, True, _no_cue, _blank, lambda time, cue, action: jnp.where(action == 1, 1.0, -1.0))
    return _env("best_action", num_envs, rules)


def best_action_of_observation(num_envs: int) -> Env:
    """Episodes have one step. Reward is 1 for action 1 at observation +1 or action 0 at -1, else -1. The value is 1."""
    rules = Rules(1, True, _sign, _show, lambda time, cue, action: jnp.where((action == 1) == (cue > 0), 1.0, -1.0))
    return _env("best_action_of_observation", num_envs, rules)


def delayed_consequence(num_envs: int) -> Env:
    """Episodes have two steps. Only the first action matters: the second step has reward 1 after action 1, else -1.

    The observation is [cue, time]. The cue is 0, then the coming reward. The best first action is 1. The value is 0.9
    at the first step, then the cue.
    """
    rules = Rules(
        2, True, _no_cue, _show_and_time,
        reward=lambda time, cue, action: cue * (time == 1),
        advance=lambda time, cue, action: jnp.where(time == 0, jnp.where(action == 1, 1.0, -1.0), cue),
    )  # fmt: skip
    return _env("delayed_consequence", num_envs, rules)


def continuous_action(num_envs: int) -> Env:
    """Episodes have one step. The reward is 1 - (action - 0.5)^2. The best action is 0.5, with value 1."""
    rules = Rules(1, True, _no_cue, _blank, lambda time, cue, action: 1.0 - (action[:, 0] - 0.5) ** 2)
    return _env("continuous_action", num_envs, rules, Box((1,)))


def continuous_action_of_observation(num_envs: int) -> Env:
    """Episodes have one step. Reward is 1 - (action - 0.5 observation)^2, observation -1 or +1. The value is 1."""
    rules = Rules(1, True, _sign, _show, lambda time, cue, action: 1.0 - (action[:, 0] - 0.5 * cue) ** 2)
    return _env("continuous_action_of_observation", num_envs, rules, Box((1,)))


def remember(num_envs: int, length: int = 3) -> Env:
    """Only the first observation has a cue, -1 or +1. At step `length`, the matching action has reward 1, else -1."""
    rules = Rules(
        length,
        True,
        _sign,
        observe=lambda time, cue: jnp.stack([jnp.where(time == 0, cue, 0.0), 1.0 * (time == length - 1)], axis=-1),
        reward=lambda time, cue, action: (time == length - 1) * jnp.where((action == 1) == (cue > 0), 1.0, -1.0),
    )
    return _env("remember", num_envs, rules)


def chain(num_envs: int) -> Env:
    """A walk of 8 steps on places 0 to 4 from place 0, observed one-hot. A step that ends at place 4 has reward 1.

    Action 1 moves right, action 0 moves left, between the walls. Episodes are truncated, so the value of a place does
    not depend on time. Going right always has value 0.9^k / (1 - 0.9), with k = max(3 - place, 0) steps before the
    first reward. This is 7.29 from place 0. An episode returns 5. No memory is required.
    """
    rules = Rules(
        8, False, _no_cue,
        observe=lambda time, cue: jax.nn.one_hot(cue.astype(jnp.int32), 5, dtype=jnp.float32),
        reward=lambda time, cue, action: _walk(cue, action) == 4,
        advance=lambda time, cue, action: _walk(cue, action),
    )  # fmt: skip
    return _env("chain", num_envs, rules)


def experience(env: Env, agent: Agent, state: PyTree, seed: int = 1, num_steps: int = 0) -> Rollout:
    """Return a rollout of the exploring agent after a reset, of num_steps or else of the agent's rollout length."""

    def run(state, key_reset, key_noise):
        actors = rollout.reset(env, agent, key_reset)
        length = num_steps or agent.rollout_length
        noise = agent.sample_noise(key_noise, length, env.spec.num_envs)
        return rollout.collect(env, agent, functools.partial(agent.explore, state), actors, noise, length)[1]

    return jax.jit(run)(state, jax.random.key(seed), jax.random.key(seed + 1))


def pooled(env: Env, overlap: bool = False) -> Env:
    """Return the same environments as one pool. `send` stores the actions and `receive` steps."""

    def reset(key):
        state, timestep = env.reset(key)
        return (state, jnp.zeros(env.spec.num_envs, jnp.int32)), timestep

    def receive(i, state):
        state, action = state
        state, timestep = env.step(state, action)
        return (state, action), timestep

    send = lambda i, state, action: (state[0], action)
    return env._replace(reset=reset, host=HostEnv(pools=AsyncPools(1, send, receive, overlap)))


def reset(rules: Rules, num_envs: int, key: Key) -> tuple[State, TimeStep]:
    key, key_draw = jax.random.split(key)
    cue = rules.draw(key_draw, (num_envs,))
    time, last = jnp.zeros(num_envs, jnp.int32), jnp.zeros(num_envs, bool)
    zero, one = jnp.zeros(num_envs, jnp.float32), jnp.ones(num_envs, jnp.float32)
    return State(time, cue, last, key), TimeStep(rules.observe(time, cue), zero, one, last)


def step(rules: Rules, state: State, action: jax.Array) -> tuple[State, TimeStep]:
    key, key_draw = jax.random.split(state.key)
    begins = state.last
    cue = jnp.where(begins, rules.draw(key_draw, begins.shape), rules.advance(state.time, state.cue, action))
    time = jnp.where(begins, 0, state.time + 1)
    last = time == rules.length
    reward = jnp.where(begins, 0.0, jnp.float32(rules.reward(state.time, state.cue, action)))
    discount = jnp.where(last & rules.terminates, 0.0, 1.0).astype(jnp.float32)
    return State(time, cue, last, key), TimeStep(rules.observe(time, cue), reward, discount, last)


def _env(name: str, num_envs: int, rules: Rules, action: Discrete | Box = TWO_ACTIONS) -> Env:
    of = functools.partial
    obs = jax.eval_shape(lambda: rules.observe(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.float32)))
    spec = EnvSpec(f"probes/{name}", jax.ShapeDtypeStruct(obs.shape[1:], obs.dtype), action, num_envs)
    return Env(of(reset, rules, num_envs), of(step, rules), spec)


def _no_cue(key: Key, shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def _sign(key: Key, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.rademacher(key, shape, jnp.float32)


def _blank(time: jax.Array, cue: jax.Array) -> jax.Array:
    return jnp.ones((*time.shape, 1), jnp.float32)


def _show(time: jax.Array, cue: jax.Array) -> jax.Array:
    return cue[:, None]


def _time(time: jax.Array, cue: jax.Array) -> jax.Array:
    return time[:, None].astype(jnp.float32)


def _show_and_time(time: jax.Array, cue: jax.Array) -> jax.Array:
    return jnp.stack([cue, time.astype(jnp.float32)], axis=-1)


def _clock(length: int) -> Callable:
    return lambda time, cue: jax.nn.one_hot(time, length, dtype=jnp.float32)


def _one(time: jax.Array, cue: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.ones(time.shape, jnp.float32)


def _walk(place: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.clip(place + jnp.where(action == 1, 1.0, -1.0), 0.0, 4.0)
