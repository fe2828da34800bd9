"""Rollouts with random actions, and options of short runs, in host environments."""

from typing import Any

import jax
import numpy as np

from jaxrl_fast.types import Discrete


def random_actions(spec, num_steps, seed=0):
    chance, lead = np.random.default_rng(seed), (num_steps, spec.num_envs)
    if isinstance(spec.action, Discrete):
        return chance.integers(spec.action.num, size=lead).astype(np.int32)
    return chance.uniform(-1, 1, (*lead, *spec.action.shape)).astype(np.float32)


def run(env, actions):
    """Reset, then one step for each row of actions, as one compiled program."""

    def program(actions):
        state, first = env.reset(jax.random.key(0))
        return first, jax.lax.scan(env.step, state, actions)[1]

    return jax.device_get(jax.jit(program)(actions))


SHORT: dict[str, Any] = dict(env="envpool/CartPole-v1", num_envs=4, total_steps=480, save_every=160, log_every=32)
SHORT |= dict(eval_every=160, eval_episodes=4, eval_envs=4, loggers=(), log_level="quiet")
AGENTS = {
    "ppo": dict(rollout_length=8, hidden_sizes=(8,), rewards="normalized", normalize_observations=True),
    "dqn": dict(size=256, batch_size=8, learning_starts=32, hidden_sizes=(8,), n_step=3, replay="prioritized"),
    "pqn": dict(rollout_length=8, hidden_sizes=(8,)),
}
