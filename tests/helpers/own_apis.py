"""Drive each suite by its own functions, without the adapter: the oracles of test_conformance.

A plain loop takes over the suite's state where an episode begins. From there on it knows nothing of the adapter.
"""

import functools
import warnings
from collections.abc import Callable
from copy import deepcopy as copy
from typing import Any, NamedTuple

import jax


class Result(NamedTuple):
    """What one step of one environment returns."""

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    mask: Any = ()


class OwnApi(NamedTuple):
    """One environment of a suite."""

    reset: Callable[[Any], Any]  # key to the suite's state
    step: Callable[[Any, Any, Any], tuple[Any, Result]]  # (suite's state, key, action in true bounds)
    observe: Callable[[Any], Any]  # suite's state to its observation
    mask: Callable[[Any], Any] = lambda state: ()
    of_adapter: Callable[[Any], Any] = lambda state: state  # the adapter's state to the suite's
    bounds: Any = ()


def gymnax(name, **options):
    import gymnax

    env, params = gymnax.make(name)
    params = params.replace(**options)

    def step(state, key, action):
        obs, state, reward, terminated, _ = env.step_env(key, state, action, params)
        return state, Result(obs, reward, terminated, env.is_truncated(state, params))

    space = env.action_space(params)
    bounds = (space.low, space.high) if hasattr(space, "low") else ()
    return OwnApi(
        lambda key: env.reset_env(key, params)[1], step, lambda state: env.get_obs(state, params), bounds=bounds
    )


def brax(name, max_steps_in_episode, **options):
    """Use brax's own time limit, without its reset."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from brax import envs

        env = envs.create(name, max_steps_in_episode, auto_reset=False, **options)

    def step(state, key, action):
        state = env.step(copy(state), action)
        return state, Result(
            state.obs, state.reward, state.done * (1 - state.info["truncation"]), state.info["truncation"]
        )

    def of_adapter(state):
        """Add what brax's wrapper keeps of an episode, as at its start."""
        fresh = env.reset(jax.random.key(0))
        return fresh.replace(**{name: getattr(state.env, name) for name in ("pipeline_state", "obs", "reward", "done")})

    low, high = env.sys.actuator.ctrl_range.T
    return OwnApi(env.reset, step, lambda state: state.obs, of_adapter=of_adapter, bounds=(low, high))


def navix(name, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import navix

    env = navix.make(name, **options)

    def step(state, key, action):
        state = env.step(state, action)
        return state, Result(state.observation, state.reward, state.step_type == 2, state.step_type == 1)

    return OwnApi(env.reset, step, lambda state: state.observation)


def xminigrid(name, **options):
    import xminigrid

    env, params = xminigrid.make(name, **options)

    def step(state, key, action):
        state = env.step(params, state, action)
        terminated = state.last() & (state.discount == 0)
        truncated = state.last() & (state.state.step_num == params.max_steps)
        return state, Result(state.observation, state.reward, terminated, truncated & ~terminated)

    return OwnApi(functools.partial(env.reset, params), step, lambda state: state.observation)
