"""Train PPO on CartPole-v1 in one file, in the style of most JAX programs. ppo_speed.py compares jaxrl_fast with it.

The whole training is one jit. It uses `vmap(env.step)` with gymnax's reset inside the step, separate tanh networks,
`jax.random.permutation` over the batch, and optax Adam on the tree of parameters. The program is meant to be typical,
not slow:

    python benchmarks/plain_ppo.py --num-envs 64
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

GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5
LENGTH, EPOCHS, MINIBATCHES = 128, 4, 4


class ActorCritic(nn.Module):
    """Two tanh networks of 64 and 64, orthogonally initialized."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        def mlp(num_outputs, gain):
            x = obs
            for _ in range(2):
                x = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
            return nn.Dense(num_outputs, kernel_init=nn.initializers.orthogonal(gain))(x)

        return mlp(self.num_actions, 0.01), mlp(1, 1.0)[..., 0]


class Batch(NamedTuple):
    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    done: jax.Array
    value: jax.Array
    log_prob: jax.Array


def make(num_envs, num_updates, learning_rate=2.5e-4):
    """Return a function of a PRNG key that trains for `num_updates` updates.

    The function returns the parameters. For each update it also returns the sum of the returns of the episodes that
    ended, and their number.
    """
    env, env_params = gymnax.make("CartPole-v1")
    network = ActorCritic(env.num_actions)
    num_steps = num_updates * EPOCHS * MINIBATCHES
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(learning_rate, 0.0, num_steps), eps=1e-5)
    )

    def loss(params, batch, advantage, target):
        logits, value = network.apply(params, batch.obs)
        log_probs = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, batch.action[:, None], 1)[:, 0]
        ratio = jnp.exp(log_prob - batch.log_prob)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
        clipped = batch.value + jnp.clip(value - batch.value, -CLIP, CLIP)
        value_loss = 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return policy + VALUE * value_loss - ENTROPY * entropy

    def env_step(carry, _):
        params, state, obs, score, key = carry
        key, key_act, key_env = jax.random.split(key, 3)
        logits, value = network.apply(params, obs)
        action = jax.random.categorical(key_act, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        next_obs, state, reward, terminated, truncated, _ = jax.vmap(env.step, (0, 0, 0, None))(
            jax.random.split(key_env, num_envs), state, action, env_params
        )
        done = terminated | truncated
        score = score + reward
        row = Batch(obs, action, reward, done, value, log_prob)
        return (params, state, next_obs, jnp.where(done, 0.0, score), key), (row, jnp.where(done, score, 0.0))

    def update(carry, _):
        params, opt_state, state, obs, score, key = carry
        (_, state, obs, score, key), (rows, scores) = jax.lax.scan(
            env_step, (params, state, obs, score, key), length=LENGTH
        )
        last_value = network.apply(params, obs)[1]

        def gae(carry, row):
            advantage, next_value = carry
            delta = row.reward + GAMMA * next_value * (1 - row.done) - row.value
            advantage = delta + GAMMA * LAMBDA * (1 - row.done) * advantage
            return (advantage, row.value), advantage

        _, advantages = jax.lax.scan(gae, (jnp.zeros(num_envs), last_value), rows, reverse=True)
        data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (rows, advantages, advantages + rows.value))

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
        return (params, opt_state, state, obs, score, key), (scores.sum(), rows.done.sum())

    def train(key):
        key, key_init, key_reset = jax.random.split(key, 3)
        obs, state = jax.vmap(env.reset, (0, None))(jax.random.split(key_reset, num_envs), env_params)
        params = network.init(key_init, obs)
        carry = (params, optimizer.init(params), state, obs, jnp.zeros(num_envs), key)
        carry, scores = jax.lax.scan(update, carry, length=num_updates)
        return carry[0], scores

    return train


def main():
    """Time three trainings with different seeds, without compilation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--total-steps", type=int, default=500_000)
    args = parser.parse_args()
    num_updates = max(1, args.total_steps // (LENGTH * args.num_envs))
    train = jax.jit(make(args.num_envs, num_updates)).lower(jax.random.key(0)).compile()
    for seed in range(3):
        start = time.perf_counter()
        _, (scores, episodes) = jax.block_until_ready(train(jax.random.key(seed)))
        seconds = time.perf_counter() - start
        steps = num_updates * LENGTH * args.num_envs
        tenth = -max(1, num_updates // 10)
        final = np.sum(scores[tenth:]) / max(np.sum(episodes[tenth:]), 1)
        print(f"{steps / seconds / 1e3:.0f}k steps/s, return over the last tenth of the updates {final:.1f}")


if __name__ == "__main__":
    main()
