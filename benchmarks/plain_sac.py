"""Train SAC on Pendulum in one file, in the style of most JAX programs. sac_speed.py compares jaxrl_fast with it.

The whole training is one jit. Each vector step makes as many gradient steps as environment steps. The replay buffer is
flat and stores both observations of each transition. Three optax Adams update the trees of parameters. The program is
meant to be typical, not slow:

    python benchmarks/plain_sac.py --num-envs 1
"""

import argparse
import time
from typing import NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax

GAMMA, TAU, LEARNING_RATE, BATCH, CAPACITY, WIDTH = 0.99, 0.005, 1e-3, 256, 20_000, 256
START = 1_000  # environment steps with random actions


class Actor(nn.Module):
    """Two layers; outputs the mean and log standard deviation of each component of an action."""

    size: int

    @nn.compact
    def __call__(self, obs):
        x = nn.relu(nn.Dense(WIDTH)(obs))
        x = nn.relu(nn.Dense(WIDTH)(x))
        return nn.Dense(self.size)(x), jnp.clip(nn.Dense(self.size)(x), -20, 2)


class Critic(nn.Module):
    """Two layers; outputs the value of an action."""

    @nn.compact
    def __call__(self, obs, action):
        x = nn.relu(nn.Dense(WIDTH)(jnp.concatenate([obs, action], -1)))
        x = nn.relu(nn.Dense(WIDTH)(x))
        return nn.Dense(1)(x)[..., 0]


TwinCritic = nn.vmap(Critic, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)


class Rows(NamedTuple):
    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    next_obs: jax.Array


class Learner(NamedTuple):
    actor: dict
    critic: dict
    target: dict
    log_alpha: jax.Array
    optimizers: tuple


def sample(actor, params, obs, key):
    """Sample an action in [-1, 1]. Return it and its log-probability."""
    mean, log_std = actor.apply(params, obs)
    x = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
    log_prob = -0.5 * ((x - mean) / jnp.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    return jnp.tanh(x), (log_prob - 2 * (np.log(2) - x - jax.nn.softplus(-2 * x))).sum(-1)


def make(num_envs, num_steps, start=START, capacity=CAPACITY):
    """Return a function of a PRNG key that trains for `num_steps` vector steps.

    The function returns the learner. For each vector step it also returns the sum of the returns of the episodes that
    ended, and their number.
    """
    env, env_params = gymnax.make("Pendulum-v1")
    actor, critic, adam = Actor(1), TwinCritic(), optax.adam(LEARNING_RATE)
    capacity = capacity // num_envs * num_envs

    def learn(_, carry):
        learner, buffer, size, key = carry
        key, key_draw, key_next, key_now = jax.random.split(key, 4)
        rows = jax.tree.map(lambda x: x[jax.random.randint(key_draw, (BATCH,), 0, size)], buffer)
        alpha = jnp.exp(learner.log_alpha)
        next_action, next_log_prob = sample(actor, learner.actor, rows.next_obs, key_next)
        next_value = critic.apply(learner.target, rows.next_obs, next_action).min(0) - alpha * next_log_prob
        goal = rows.reward + GAMMA * (1 - rows.terminated) * next_value

        def critic_loss(params):
            return 0.5 * ((critic.apply(params, rows.obs, rows.action) - goal[None]) ** 2).mean(1).sum()

        def step(loss, params, state, **more):
            found, gradient = jax.value_and_grad(loss, **more)(params)
            updates, state = adam.update(gradient, state)
            return found, optax.apply_updates(params, updates), state

        of_critic, of_actor, of_alpha = learner.optimizers
        _, critic_params, of_critic = step(critic_loss, learner.critic, of_critic)

        def actor_loss(params):
            action, log_prob = sample(actor, params, rows.obs, key_now)
            return (alpha * log_prob - critic.apply(critic_params, rows.obs, action).min(0)).mean(), log_prob.mean()

        (_, log_prob), actor_params, of_actor = step(actor_loss, learner.actor, of_actor, has_aux=True)
        _, log_alpha, of_alpha = step(lambda x: -x * (log_prob - 1.0), learner.log_alpha, of_alpha)
        target = optax.incremental_update(critic_params, learner.target, TAU)
        optimizers = of_critic, of_actor, of_alpha
        return Learner(actor_params, critic_params, target, log_alpha, optimizers), buffer, size, key

    def step(carry, i):
        learner, buffer, state, obs, score, key = carry
        key, key_action, key_random, key_env, key_learn = jax.random.split(key, 5)
        steps = i * num_envs
        anything = jax.random.uniform(key_random, (num_envs, 1), minval=-1.0)
        action = jnp.where(steps < start, anything, sample(actor, learner.actor, obs, key_action)[0])
        next_obs, state, reward, terminated, truncated, _ = jax.vmap(env.step, (0, 0, 0, None))(
            jax.random.split(key_env, num_envs), state, 2.0 * action, env_params
        )
        done, reward = terminated | truncated, reward.reshape(num_envs)
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, steps % capacity, 0)
        buffer = jax.tree.map(write, buffer, Rows(obs, action, reward, done, next_obs))
        size = jnp.minimum(steps + num_envs, capacity)
        several = lambda learner: jax.lax.fori_loop(0, num_envs, learn, (learner, buffer, size, key_learn))[0]
        learner = jax.lax.cond(steps + num_envs > start, several, lambda same: same, learner)
        score = score + reward
        ended = jnp.where(done, score, 0.0).sum(), done.sum()
        return (learner, buffer, state, next_obs, jnp.where(done, 0.0, score), key), ended

    def train(key):
        key, key_actor, key_critic, key_reset = jax.random.split(key, 4)
        obs, state = jax.vmap(env.reset, (0, None))(jax.random.split(key_reset, num_envs), env_params)
        params = actor.init(key_actor, obs), critic.init(key_critic, obs, jnp.zeros((num_envs, 1))), jnp.float32(0)
        optimizers = adam.init(params[1]), adam.init(params[0]), adam.init(params[2])
        learner = Learner(params[0], params[1], params[1], params[2], optimizers)
        flat = lambda *shape: jnp.zeros((capacity, *shape))
        buffer = Rows(flat(3), flat(1), flat(), jnp.zeros(capacity, bool), flat(3))
        carry = learner, buffer, state, obs, jnp.zeros(num_envs), key
        carry, ended = jax.lax.scan(step, carry, jnp.arange(num_steps))
        return carry[0], ended

    return train


def main():
    """Time three trainings with different seeds, without compilation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=10_000)
    args = parser.parse_args()
    num_steps = max(1, args.total_steps // args.num_envs)
    train = jax.jit(make(args.num_envs, num_steps)).lower(jax.random.key(0)).compile()
    for seed in range(3):
        start = time.perf_counter()
        _, (scores, episodes) = jax.block_until_ready(train(jax.random.key(seed)))
        seconds = time.perf_counter() - start
        tenth = -max(1, num_steps // 10)
        final = np.sum(scores[tenth:]) / max(np.sum(episodes[tenth:]), 1)
        steps = num_steps * args.num_envs
        print(f"{steps / seconds:.0f} steps/s, return over the last tenth of the steps {final:.1f}")


if __name__ == "__main__":
    main()
