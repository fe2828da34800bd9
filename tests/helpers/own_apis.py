"""Step each suite by its own functions, without the adapter. These are the oracles of test_conformance.

A plain loop takes the suite's state from the adapter when an episode begins. All later steps are independent of it.
"""

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Result(NamedTuple):
    """The result of one step of one environment."""

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    mask: Any = None


class OwnApi(NamedTuple):
    """The functions of one environment of a suite."""

    reset: Callable[[Any], Any]  # key to the first observation
    step: Callable[[Any, Any, Any], tuple[Any, Result]]  # (suite's state, key, action in true bounds)
    of_adapter: Callable[[Any], Any] = lambda state: state  # the adapter's state at a reset to the suite's
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
    return OwnApi(lambda key: env.reset_env(key, params)[0], step, bounds=bounds)


def brax(name, max_steps_in_episode, **options):
    """Use brax's own time limit, but not its automatic reset."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from brax import envs

        env = envs.create(name, max_steps_in_episode, auto_reset=False, **options)

    def step(state, key, action):
        state = env.step(deepcopy(state), action)  # brax changes its argument
        truncated = state.info["truncation"]
        return state, Result(state.obs, state.reward, state.done * (1 - truncated), truncated)

    def of_adapter(state):
        """Add the counters of brax's wrapper."""
        fresh = env.reset(jax.random.key(0))
        return fresh.replace(**{name: getattr(state.env, name) for name in ("pipeline_state", "obs", "reward", "done")})

    low, high = env.sys.actuator.ctrl_range.T
    return OwnApi(lambda key: env.reset(key).obs, step, of_adapter, bounds=(low, high))


def craftax(name, **options):
    from craftax.craftax_env import make_craftax_env_from_name

    env = make_craftax_env_from_name(name, auto_reset=False)
    params = env.default_params.replace(**options)

    def step(state, key, action):
        obs, state, reward, done, _ = env.step_env(key, state, action, params)
        is_late = state.timestep >= params.max_timesteps
        truncated = done & is_late & (state.player_health > 0)
        return state, Result(obs, reward, done & ~truncated, truncated)

    return OwnApi(lambda key: env.reset_env(key, params)[0], step)


def jaxmarl(name, max_steps):
    """Use JaxMARL's own time limit, which counts the steps before the last one."""
    import jaxmarl

    env = jaxmarl.make(name, max_steps=max_steps)

    def step(state, key, action):
        obs, after, reward, done, _ = env.step_env(key, state, {"agent_0": action})
        return after, Result(obs["agent_0"], reward["agent_0"], jnp.bool_(False), done["__all__"])

    return OwnApi(lambda key: env.reset(key)[0]["agent_0"], step)


def jumanji(name, **options):
    """Use jumanji's own time limit, which comes with discount 0 in most of its environments."""
    import jumanji

    env = jumanji.make(name, **options)
    limit = getattr(env, "time_limit", 2**30)
    spec = getattr(env.observation_spec, "action_mask", None)
    nums = tuple((np.asarray(env.action_spec.maximum) + 1).reshape(-1).tolist())
    is_joint = spec is not None and len(nums) > 1 and spec.shape == nums

    def as_dict(obs):
        return {name: as_dict(part) for name, part in obs._asdict().items()} if hasattr(obs, "_asdict") else obs

    def seen(timestep):
        obs = as_dict(timestep.observation)
        mask = obs.pop("action_mask", None)
        return obs, mask

    def step(state, key, action):
        state, count = state
        state, timestep = env.step(state, jnp.array(jnp.unravel_index(action, nums)) if is_joint else action)
        obs, mask = seen(timestep)
        truncated = timestep.last() & (count + 1 >= limit)
        result = Result(obs, timestep.reward, timestep.last() & ~truncated, truncated, mask)
        return (state, count + 1), result

    return OwnApi(lambda key: seen(env.reset(key)[1])[0], step, lambda state: (state.env, state.num_steps))


def navix(name, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import navix

    env = navix.make(name, **options)

    def step(state, key, action):
        state = env.step(state, action)
        return state, Result(state.observation, state.reward, state.step_type == 2, state.step_type == 1)

    return OwnApi(lambda key: env.reset(key).observation, step)


def pgx(name, max_steps_in_episode=2**30):
    """Let random players move until it is player 0's turn, at most 8 times."""
    import pgx

    env = pgx.make(name)

    def move(number, carry):
        state, total, key = carry
        waits = (state.current_player != 0) & ~state.terminated
        key_action, key_step = jax.random.split(jax.random.fold_in(key, number))
        action = jax.random.categorical(key_action, jnp.log(state.legal_action_mask.astype(jnp.float32)))
        after = env.step(state, action, key_step)
        after = jax.tree.map(lambda a, b: jnp.where(waits, a, b), after, state)
        return after, total + jnp.where(waits, after.rewards[0], 0.0), key

    def moves(state, total, key):
        return jax.lax.fori_loop(0, 8 * (env.num_players > 1), move, (state, total, key))[:2]

    def observe(state):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return env.observe(state, jnp.int32(0))

    def reset(key):
        key_init, key_others = jax.random.split(key)
        return observe(moves(env.init(key_init), 0.0, key_others)[0])

    def step(state, key, action):
        state, total, count = state
        key_step, key_others = jax.random.split(key)
        state = env.step(state, action, key_step)
        state, total = moves(state, total + state.rewards[0], key_others)
        truncated = ~state.terminated & (count + 1 >= max_steps_in_episode)
        result = Result(observe(state), total, state.terminated, truncated, state.legal_action_mask)
        return (state, 0.0, count + 1), result

    return OwnApi(reset, step, lambda state: (state.env, state.early_reward, state.num_steps))


def playground(name, max_steps_in_episode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mujoco_playground import registry

    env = registry.load(name, config_overrides={"impl": "jax"})

    def step(state, key, action):
        state, count = state
        state = env.step(state, action)
        truncated = (state.done == 0) & (count + 1 >= max_steps_in_episode)
        return (state, count + 1), Result(state.obs, state.reward, state.done, truncated)

    low, high = env.mj_model.actuator_ctrlrange.T
    return OwnApi(lambda key: env.reset(key).obs, step, lambda state: (state.env, state.num_steps), (low, high))


def xminigrid(name, **options):
    import xminigrid

    env, params = xminigrid.make(name, **options)

    def step(state, key, action):
        state = env.step(params, state, action)
        terminated = state.last() & (state.discount == 0)
        truncated = state.last() & (state.state.step_num == params.max_steps)
        return state, Result(state.observation, state.reward, terminated, truncated & ~terminated)

    return OwnApi(lambda key: env.reset(params, key).observation, step)
