"""Add behavior cloning to a policy's loss: the mean of -log pi(a|s) over steps drawn from a dataset.

With on-policy gradients, this is the term of Rajeswaran et al. 2018, "Learning complex dexterous manipulation with deep
reinforcement learning and demonstrations", equation 9, with a weight that falls linearly and not geometrically.
Observations of the dataset are normalized by the agent's statistics, as those of its environments.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.rl import normalize, policies
from jaxrl_fast.rl.bonuses import annealed
from jaxrl_fast.rl.bonuses.record import Added, Bonus
from jaxrl_fast.rl.distributions import TanhGaussian
from jaxrl_fast.rl.product import Product
from jaxrl_fast.types import EnvSpec, Metrics, Parallelism, PyTree, Rollout

LIMIT = 1 - 1e-5  # of actions before the inverse of the tanh, which is infinite at 1 (as in the code of IQL)


class Demonstrations(NamedTuple):
    """Steps of a dataset, [B, ...], in the form of agents. The last two fields are those of a policy without memory."""

    obs: PyTree
    action: Array  # continuous numbers in [-1, 1]
    action_mask: Array | None = None  # bool [B, num_outputs]
    carry: PyTree = ()
    reset: Array | None = None


def make(config: Any, spec: EnvSpec, policy: policies.Policy, num_updates: int, parallelism: Parallelism) -> Bonus:
    """Return the bonus of PPO. Raise ValueError for a policy with memory, since a dataset has single steps."""
    if config.has_memory:
        raise ValueError(f"bonus: bc requires a policy without memory, got memory {config.memory.kind}; use none")
    shape = config.rollout_length, spec, parallelism
    return Bonus(annealed.init, partial(prepare, config, shape), partial(loss, config.bonus.data, config, policy))


def prepare(
    config: Any, shape: tuple[int, EnvSpec, Parallelism], state: Any, rollout: Rollout, advantage: Array
) -> Added:
    """Draw a step of the dataset for each step of the rollout, with replacement.

    The rows are its number, or if observations are normalized the step itself, and the weight of the loss.
    """
    (key, num_updates), data, (length, spec, parallelism) = state.bonus, config.bonus.data, shape
    key_rows, key = jax.random.split(key)
    numbers = draw(data, annealed.of_shard(parallelism, key_rows), advantage.shape)
    weight = annealed.weight_of_update(config.bonus, spec, parallelism, length, num_updates)
    rows = numbers if state.observations is None else steps_at(data, numbers, state.observations)
    after = annealed.State(key, num_updates + 1)
    return Added(after, advantage, (rows, jnp.broadcast_to(weight, advantage.shape)), {"bc_weight": weight})


def loss(
    data: Demonstrations, config: Any, policy: policies.Policy, params: PyTree, batch: Any
) -> tuple[Array, Metrics]:
    """Return the weighted -log pi(a|s) of the drawn steps, f32 [B], and metrics [B]."""
    rows, weight = batch.bonus
    rows = rows if config.normalize_observations else steps_at(data, rows)
    cost = -log_prob(policies.outputs(policy, params, rows)[0], rows.action)
    return weight * cost, {"bc_loss": cost}


def draw(data: Demonstrations, key: Array, shape: tuple[int, ...]) -> Array:
    """Return numbers of random steps of a dataset, int32 of this shape."""
    return jax.random.randint(key, shape, 0, len(data.action))


def steps_at(data: Demonstrations, numbers: Array, stats: PyTree = None) -> Demonstrations:
    """Return the steps [...] of these numbers [...], with their observations normalized if there are statistics."""
    take = lambda x: jnp.asarray(x).at[numbers].get(mode="promise_in_bounds")
    found: Demonstrations = jax.tree.map(take, data)
    return found._replace(obs=normalize.apply(stats, found.obs))


def log_prob(pi: Any, action: Array) -> Array:
    """Return the log-probabilities of agents' actions [...]; those at the bounds of a tanh count as at LIMIT."""
    before_tanh = lambda x: jnp.arctanh(jnp.clip(x, -LIMIT, LIMIT))
    if isinstance(pi, TanhGaussian):
        action = before_tanh(action)
    elif isinstance(pi, Product) and isinstance(pi.numbers, TanhGaussian):
        num = len(pi.choices.nums)
        action = jnp.concatenate([action[..., :num], before_tanh(action[..., num:])], axis=-1)
    found: Array = pi.log_prob(action)
    return found
