"""gymnax's environments keep the contract of `types.TimeStep`; gymnax's own functions are the oracle."""

import subprocess
import sys
from functools import cache, partial
from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.envs import gymnax as adapter
from jaxrl_fast.types import Box, Discrete

REFUSED = {"gymnax/MNISTBandit-bsuite"}
ENV_IDS = [env_id for env_id in envs.registered() if env_id not in REFUSED]
N, T = 3, 48
LIMIT = 20  # steps, so that every environment reaches the end of an episode within T
QUICK = {"xla_backend_optimization_level": 0}  # for what runs once: most of the time here is compiling


class Bare:
    """A countdown with gymnax's interface and none of its base class."""

    default_params = SimpleNamespace()

    def __init__(self, start: int = 5, observation=float, reward=1):
        self.start, self.observation, self.reward = start, observation, reward

    def action_space(self, params):
        return gymnax.environments.spaces.Discrete(2)

    def reset_env(self, key, params):
        return self._see(0), {"time": 0, "left": jnp.asarray(self.start)}

    def step_env(self, key, state, action, params):
        state = {"time": state["time"] + 1, "left": state["left"] - 1}
        return self._see(state["left"]), state, self.reward, state["left"] == 0, {}

    def is_truncated(self, state, params):
        return state["time"] >= 100

    def _see(self, left):
        return jnp.asarray(left, self.observation)


def random_actions(spec, key, length=T):
    if isinstance(spec.action, Discrete):
        return jax.random.randint(key, (length, spec.num_envs), 0, spec.action.num)
    return jax.random.uniform(key, (length, spec.num_envs, *spec.action.shape), minval=-1.0, maxval=1.0)


def odd_actions(spec):
    """Actions that no agent should give: far out of range, and NaN."""
    if isinstance(spec.action, Discrete):
        values = jnp.array([-(2**31), -1, spec.action.num, 2**31 - 1], jnp.int32)
    else:
        values = jnp.array([-jnp.inf, jnp.inf, jnp.nan, 1e30], jnp.float32)
    shape = (8, spec.num_envs, *getattr(spec.action, "shape", ()))
    return jnp.resize(values, shape)


def play(env, key, actions):
    """What `reset` and every step said, and with every step the keys that `step_env` was given."""

    def body(state, action):
        following, timestep = env.step(state, action)
        return following, (timestep, state, adapter.step_keys(state))

    state, first = env.reset(key)
    last_state, (timesteps, states, keys) = jax.lax.scan(body, state, actions)
    return first, timesteps, states, keys, last_state


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile(QUICK)(*arguments)


@cache
def trajectory(env_id):
    """N environments played for T random steps, with four pairs of odd actions on the way."""
    env = envs.make(env_id, N, max_steps_in_episode=LIMIT)
    actions = random_actions(env.spec, jax.random.key(1))
    actions = actions.at[8:16].set(odd_actions(env.spec))
    first, timesteps, states, keys, last_state = compiled(partial(play, env), jax.random.key(0), actions)
    return env, actions, first, timesteps, states, keys, last_state


def rows_before(first, timesteps):
    """The time steps that were acted upon: the first, and all but the last of those that followed."""
    return jax.tree.map(lambda a, b: np.concatenate([np.asarray(a)[None], np.asarray(b)[:-1]]), first, timesteps)


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x, float), np.asarray(y, float), **tolerance), a, b)


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_every_step_is_what_gymnax_answers_to_the_same_key(env_id):
    """gymnax's own `step` splits its key and steps with the first half, so we step it with ours in that place."""
    env, actions, first, timesteps, states, keys, _ = trajectory(env_id)
    single = env.step.args[0]
    oracle, params = single.env, single.params

    def ask(key, state, action):
        key_unused = jax.random.fold_in(key, 1)
        with pytest.MonkeyPatch.context() as patch:  # within gymnax's step alone
            patch.setattr(oracle, "step_env", partial(type(oracle).step_env, oracle), raising=False)
            obs, _, reward, terminated, info = oracle.step_env(key, state, action, params)
        del key_unused
        return obs, reward, terminated, info

    del ask
