"""Distill the policy of another run: add KL(teacher || policy) at the states of the rollout to PPO's loss.

This is the loss of Schmitt et al. 2018, "Kickstarting deep reinforcement learning", equation 2, whose gradient is that
of the cross entropy with the teacher's actions. The policy that learns visits the states.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.rl import minibatch, policies
from jaxrl_fast.rl.bonuses import annealed
from jaxrl_fast.rl.bonuses.record import Added, Bonus
from jaxrl_fast.rl.frame_stack import decode, encode_rollout
from jaxrl_fast.types import EnvSpec, Metrics, Parallelism, PolicyInput, PyTree, Rollout
from jaxrl_fast.types.spaces import mask_size


def make(config: Any, spec: EnvSpec, policy: policies.Policy, num_updates: int, parallelism: Parallelism) -> Bonus:
    """Return the bonus of PPO. Raise ValueError if the teacher has another kind of policy.

    `config.bonus.data` is the teacher, a function from a PolicyInput [B, ...] to distributions [B, ...].
    """
    if config.bonus.data is not None:
        check(config.bonus.data, spec, partial(_of_policy, policy))
    return Bonus(annealed.init, partial(prepare, config, spec, parallelism), partial(loss, policy))


def check(teacher: Any, spec: EnvSpec, of_mask: Callable[[Array | None], PyTree]) -> None:
    """Raise ValueError unless the teacher's distributions have the form of `of_mask`'s, of the mask of one row."""
    one = lambda x: jnp.zeros((1, *x.shape), x.dtype)
    mask = jnp.ones((1, mask_size(spec.action)), bool) if spec.has_action_mask else None

    def both() -> tuple[PyTree, PyTree]:
        return teacher(PolicyInput(jax.tree.map(one, spec.obs), mask)), of_mask(mask)

    theirs, mine = jax.eval_shape(both)
    if type(theirs) is not type(mine) or str(jax.tree.structure(theirs)) != str(jax.tree.structure(mine)):
        kinds = type(mine).__name__, type(theirs).__name__
        raise ValueError(f"bonus.run: must have a policy of the kind {kinds[0]}, got {kinds[1]}; use the same policy")


def _of_policy(policy: policies.Policy, mask: Array | None) -> PyTree:
    """Return a distribution of PPO's policy, of one row."""
    return policy.head.make(jnp.zeros((1, policy.head.num_outputs)), policy.head.init(0.0), mask)


def prepare(
    config: Any, spec: EnvSpec, parallelism: Parallelism, state: Any, rollout: Rollout, advantage: Array
) -> Added:
    """Compute the teacher's distributions at the rollout's steps. The rows are these and the weight of the loss."""
    teacher, (key, num_updates) = config.bonus.data, state.bonus
    obs, kept = encode_rollout(0 if config.normalize_observations else spec.frame_stack, rollout)
    steps = PolicyInput(obs, rollout.steps.action_mask)
    if kept is None:
        flat = minibatch.map_chunks(teacher, minibatch.flatten(steps))
        found = jax.tree.map(lambda x: x.reshape(*advantage.shape, *x.shape[1:]), flat)
    else:  # stacks are built for one step at a time
        found = jax.lax.map(lambda step: teacher(step._replace(obs=decode(kept, step.obs))), steps)
    weight = annealed.weight_of_update(config.bonus, spec, parallelism, config.rollout_length, num_updates)
    rows = found, jnp.broadcast_to(weight, advantage.shape)
    return Added(annealed.State(key, num_updates + 1), advantage, rows, {"distill_weight": weight})


def loss(policy: policies.Policy, params: PyTree, batch: Any) -> tuple[Array, Metrics]:
    """Return the weighted KL(teacher || policy) of each row, f32 [B], and metrics [B]."""
    teacher, weight = batch.bonus
    kl = teacher.kl(policies.outputs(policy, params, batch)[0])
    return weight * kl, {"distill_kl": kl}
