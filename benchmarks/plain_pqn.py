"""Train PQN on Breakout-MinAtar in one file, in the style of most JAX programs, for comparison in pqn_speed.py.

The whole training is one jit. It uses flax's Conv and LayerNorm, `vmap(env.step)` with gymnax's reset inside the step,
`jax.random.permutation`, and optax RAdam on the tree of parameters. The program is meant to be typical, not slow:

    python benchmarks/plain_pqn.py --num-envs 128
"""

import argparse
import time

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

GAMMA, LAMBDA, LENGTH, EPOCHS, MINIBATCHES, LEARNING_RATE = 0.99, 0.65, 32, 2, 32, 5e-4
EPSILON, EPSILON_STEPS = (1.0, 0.05), 1_000_000


class Network(nn.Module):
    """16 3x3 convolutions and a layer of 128, each with LayerNorm and ReLU."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        x = nn.Conv(16, (3, 3), padding="VALID")(obs.astype(jnp.float32))
        x = nn.relu(nn.LayerNorm()(x))
        x = nn.Dense(128)(x.reshape(x.shape[0], -1))
        x = nn.relu(nn.LayerNorm()(x))
        return nn.Dense(self.num_actions)(x)


def make(num_envs, num_updates):
    """Return a function of a PRNG key that trains for `num_updates` updates.

    The function returns the parameters. For each update it also returns the sum of the returns of the episodes that
    ended, and their number.
    """
    env, env_params = gymnax.make("Breakout-MinAtar")
    network = Network(env.num_actions)
    num_steps = num_updates * EPOCHS * MINIBATCHES
    optimizer = optax.chain(
        optax.clip_by_global_norm(10.0), optax.radam(optax.linear_schedule(LEARNING_RATE, 0.0, num_steps))
    )
    epsilon_at = optax.linear_schedule(*EPSILON, EPSILON_STEPS)

    def loss(params, obs, action, target):
        value = jnp.take_along_axis(network.apply(params, obs), action[:, None], 1)[:, 0]
        return 0.5 * ((value - target) ** 2).mean()

    def env_step(carry, _):
        params, state, obs, score, steps, key = carry
        key, key_coin, key_action, key_env = jax.random.split(key, 4)
        value = network.apply(params, obs)
        anything = jax.random.randint(key_action, (num_envs,), 0, env.num_actions)
        coin = jax.random.uniform(key_coin, (num_envs,)) < epsilon_at(steps)
        action = jnp.where(coin, anything, value.argmax(-1))
        next_obs, state, reward, terminated, truncated, _ = jax.vmap(env.step, (0, 0, 0, None))(
            jax.random.split(key_env, num_envs), state, action, env_params
        )
        done = terminated | truncated
        score = score + reward
        row = obs, action, reward, done, value.max(-1)
        carry = params, state, next_obs, jnp.where(done, 0.0, score), steps + num_envs, key
        return carry, (row, jnp.where(done, score, 0.0))

    def update(carry, _):
        params, opt_state, state, obs, score, steps, key = carry
        (_, state, obs, score, steps, key), (rows, scores) = jax.lax.scan(
            env_step, (params, state, obs, score, steps, key), length=LENGTH
        )
        all_obs, action, reward, done, value = rows
        last_value = network.apply(params, obs).max(-1)

        def backup(carry, row):
            following, next_value = carry
            reward, done, value = row
            goal = reward + GAMMA * (1 - done) * (LAMBDA * following + (1 - LAMBDA) * next_value)
            return (goal, value), goal

        _, target = jax.lax.scan(backup, (last_value, last_value), (reward, done, value), reverse=True)
        data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (all_obs, action, target))

        def minibatch(carry, batch):
            params, opt_state = carry
            grads = jax.grad(loss)(params, *batch)
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        def epoch(carry, key):
            order = jax.random.permutation(key, LENGTH * num_envs)
            batches = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), data)
            return jax.lax.scan(minibatch, carry, batches)

        key, key_epochs = jax.random.split(key)
        (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), jax.random.split(key_epochs, EPOCHS))
        return (params, opt_state, state, obs, score, steps, key), (scores.sum(), done.sum())

    def train(key):
        key, key_init, key_reset = jax.random.split(key, 3)
        obs, state = jax.vmap(env.reset, (0, None))(jax.random.split(key_reset, num_envs), env_params)
        params = network.init(key_init, obs)
        carry = (params, optimizer.init(params), state, obs, jnp.zeros(num_envs), jnp.int32(0), key)
        carry, ended = jax.lax.scan(update, carry, length=num_updates)
        return carry[0], ended

    return train


def main():
    """Time three trainings with different seeds, without compilation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=128)
    parser.add_argument("--total-steps", type=int, default=50_000)
    args = parser.parse_args()
    num_updates = max(1, args.total_steps // (LENGTH * args.num_envs))
    train = jax.jit(make(args.num_envs, num_updates)).lower(jax.random.key(0)).compile()
    for seed in range(3):
        start = time.perf_counter()
        jax.block_until_ready(train(jax.random.key(seed)))
        steps = num_updates * LENGTH * args.num_envs
        print(f"{steps / (time.perf_counter() - start) / 1e3:.1f}k steps/s")


if __name__ == "__main__":
    main()
