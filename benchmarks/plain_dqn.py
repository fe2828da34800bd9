"""Train DQN on CartPole-v1 in one file, in the style of most JAX programs. dqn_speed.py compares jaxrl_fast with it.

The whole training is one jit. Each vector step makes the gradient steps that are due, under `lax.cond`. The replay
buffer is flat and stores both observations of each transition. optax Adam updates the tree of parameters. Unlike other
programs of this style, it makes one gradient step for every TRAIN_EVERY environment steps at any number of
environments. With many environments, several gradient steps are due at once. Both sides of the comparison thus do the
same work. The program is meant to be typical, not slow:

    python benchmarks/plain_dqn.py --num-envs 10
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

GAMMA, LEARNING_RATE, BATCH, CAPACITY = 0.99, 2.5e-4, 128, 10_000
TRAIN_EVERY, TARGET_EVERY, START = 10, 500, 10_000  # environment steps
EPSILON, EPSILON_STEPS = (1.0, 0.05), 250_000


class Network(nn.Module):
    """ReLU layers of 120 and 84."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        x = nn.relu(nn.Dense(120)(obs))
        x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(self.num_actions)(x)


class Rows(NamedTuple):
    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    done: jax.Array
    next_obs: jax.Array


def make(num_envs, num_steps, capacity=CAPACITY):
    """Return a function of a PRNG key that trains for `num_steps` vector steps.

    The function returns the parameters. For each vector step it also returns the sum of the returns of the episodes
    that ended, and their number.
    """
    env, env_params = gymnax.make("CartPole-v1")
    network = Network(env.num_actions)
    optimizer = optax.adam(LEARNING_RATE)
    capacity = capacity // num_envs * num_envs
    epsilon_at = optax.linear_schedule(*EPSILON, EPSILON_STEPS)

    def loss(params, target, rows):
        next_value = network.apply(target, rows.next_obs).max(-1)
        goal = rows.reward + GAMMA * (1 - rows.done) * next_value
        value = jnp.take_along_axis(network.apply(params, rows.obs), rows.action[:, None], 1)[:, 0]
        return ((value - goal) ** 2).mean()

    def learn(_, carry):
        params, opt_state, target, buffer, size, key = carry
        key, key_draw = jax.random.split(key)
        place = jax.random.randint(key_draw, (BATCH,), 0, size)
        grads = jax.grad(loss)(params, target, jax.tree.map(lambda x: x[place], buffer))
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, target, buffer, size, key

    def step(carry, i):
        params, opt_state, target, buffer, state, obs, score, key = carry
        key, key_coin, key_action, key_env, key_learn = jax.random.split(key, 5)
        steps = i * num_envs
        greedy = network.apply(params, obs).argmax(-1)
        anything = jax.random.randint(key_action, (num_envs,), 0, env.num_actions)
        action = jnp.where(jax.random.uniform(key_coin, (num_envs,)) < epsilon_at(steps), anything, greedy)
        next_obs, state, reward, terminated, truncated, _ = jax.vmap(env.step, (0, 0, 0, None))(
            jax.random.split(key_env, num_envs), state, action, env_params
        )
        done = terminated | truncated
        rows = Rows(obs, action, reward, done, next_obs)
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, steps % capacity, 0)
        buffer = jax.tree.map(write, buffer, rows)
        after = steps + num_envs
        size = jnp.minimum(after, capacity)
        due = after // TRAIN_EVERY - steps // TRAIN_EVERY

        def several(learner):
            params, opt_state, *_ = jax.lax.fori_loop(0, due, learn, (*learner, target, buffer, size, key_learn))
            return params, opt_state

        learner = jax.lax.cond((due > 0) & (after > START), several, lambda same: same, (params, opt_state))
        params, opt_state = learner
        copies = after // TARGET_EVERY > steps // TARGET_EVERY
        target = jax.lax.cond(copies, lambda: params, lambda: target)
        score = score + reward
        ended = jnp.where(done, score, 0.0).sum(), done.sum()
        return (params, opt_state, target, buffer, state, next_obs, jnp.where(done, 0.0, score), key), ended

    def train(key):
        key, key_init, key_reset = jax.random.split(key, 3)
        obs, state = jax.vmap(env.reset, (0, None))(jax.random.split(key_reset, num_envs), env_params)
        params = network.init(key_init, obs)
        flat = lambda shape, dtype: jnp.zeros((capacity, *shape), dtype)
        buffer = Rows(
            flat(obs.shape[1:], obs.dtype), flat((), jnp.int32), flat((), jnp.float32), flat((), bool),
            flat(obs.shape[1:], obs.dtype),
        )  # fmt: skip
        carry = params, optimizer.init(params), params, buffer, state, obs, jnp.zeros(num_envs), key
        carry, ended = jax.lax.scan(step, carry, jnp.arange(num_steps))
        return carry[0], ended

    return train


def main():
    """Time three trainings with different seeds, without compilation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=10)
    parser.add_argument("--total-steps", type=int, default=500_000)
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
        print(f"{steps / seconds / 1e3:.0f}k steps/s, return over the last tenth of the steps {final:.1f}")


if __name__ == "__main__":
    main()
