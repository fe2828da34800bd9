"""Add behavior cloning to the policy's loss of SAC, TD3 and DDPG, with steps drawn in every gradient step.

SAC adds the mean of -log pi(a|s), and TD3 the mean of (pi(s) - a)^2 over steps and numbers of an action, as Fujimoto &
Gu 2021, "A minimalist approach to offline reinforcement learning", equation 5. Unlike there, values are not normalized:
choose the weight by the scale of the returns.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_fast.agents import joint
from jaxrl_fast.agents.actor_critic import Context, Learner
from jaxrl_fast.networks.batch_renorm import with_stats
from jaxrl_fast.options.bonus import BC
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import exploration
from jaxrl_fast.rl.bonuses import annealed, bc
from jaxrl_fast.types import Array, Key, Metrics, PyTree

FOLD = 101  # of the key of the dataset's steps: splits of the same key have smaller numbers
Cost = Callable[[PyTree, bc.Demonstrations], Array]  # (the actor's parameters, steps [B, ...]) to costs [B]
Added = Callable[[PyTree], tuple[Array, Metrics]]  # the actor's parameters to the loss to add [] and costs [B] by name


def draw(context: Context, learner: Learner, keys: Key, num_updates: Array, cost: Cost) -> Added | None:
    """Draw this device's steps of the dataset. Return what they add to the policy's loss, or None without a bonus.

    The random numbers come from the second of the gradient step's keys [2], by a number that no split of it has.
    """
    config, parallelism = context.config, context.parallelism
    if not isinstance(config.bonus, BC):
        return None
    data, num_rows = config.bonus.data, config.batch_size // parallelism.num_shards
    key = jax.random.fold_in(jax.random.clone(keys)[1], FOLD)
    numbers = bc.draw(data, key, (num_rows,))
    numbers = collectives.local_rows(numbers, parallelism.num_grad_workers)
    rows = bc.steps_at(data, numbers, learner.observations)
    weight = annealed.weight_at(config.bonus, exploration.env_steps(context.ratio.steps_per_update, num_updates))

    def of_params(actor: PyTree) -> tuple[Array, Metrics]:
        each = cost(with_stats(actor, learner.actor_stats), rows)
        return weight * each.sum() / config.batch_size, {"bc_loss": each}

    return of_params


def joined(config: Any, nums: tuple[int, ...]) -> Any:
    """Return options whose dataset, if there is one, has one action for each combination of choices."""
    if not isinstance(config.bonus, BC) or config.bonus.data is None:
        return config
    data = config.bonus.data
    one = data._replace(action=joint.join(nums, data.action), action_mask=joint.join_mask(nums, data.action_mask))
    return dataclasses.replace(config, bonus=dataclasses.replace(config.bonus, data=one))


def with_costs(loss: Callable[..., Any], added: Added | None) -> Callable[..., Any]:
    """Return SAC's loss of the actor's parameters with what is added, and the costs among its metrics [B]."""
    if added is None:
        return loss

    def both(actor: PyTree) -> tuple[Array, Any]:
        total, (excess, metrics, stats) = loss(actor)
        more, costs = added(actor)
        return total + more, (excess, {**metrics, **costs}, stats)

    return both
