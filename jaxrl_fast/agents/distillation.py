"""Distill the policy of another run into SAC's: add KL(teacher || policy) at rows of the replay to the policy's loss.

`rl.bonuses.distill` does the same for PPO at the states of the rollout. The divergence of two tanh-Gaussians is that of
the Gaussians before the tanh.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxrl_fast.agents.actor_critic import Context, Learner
from jaxrl_fast.agents.demonstrations import Added
from jaxrl_fast.networks.batch_renorm import with_stats
from jaxrl_fast.options.bonus import Distill
from jaxrl_fast.rl import exploration
from jaxrl_fast.rl.bonuses import annealed, distill
from jaxrl_fast.rl.distributions import TanhGaussian
from jaxrl_fast.types import Array, Box, EnvSpec, Metrics, PolicyInput, PyTree


def check(config: Any, spec: EnvSpec) -> None:
    """Raise ValueError unless actions are continuous and the teacher's policy is a tanh-Gaussian."""
    if not isinstance(config.bonus, Distill):
        return
    if not isinstance(spec.action, Box):
        problem = f"distill requires continuous actions in sac, got {spec.action} of {spec.id}"
        raise ValueError(f"bonus: {problem}; use bc, or ppo")
    if config.bonus.data is not None:
        mine = lambda mask: TanhGaussian(jnp.zeros(()), jnp.zeros(()))
        distill.check(config.bonus.data, spec, mine)


def of_rows(
    context: Context,
    learner: Learner,
    given: PyTree,
    obs: PyTree,
    weight: Array,
    num_updates: Array,
    policy: Callable[[Context, PyTree, PyTree], TanhGaussian],
) -> Added | None:
    """Return what the divergences from the teacher at rows [B] add to the policy's loss, or None without a teacher.

    The teacher gets observations as they are, `given`, and the policy normalized ones, `obs`. `weight` [B] is that of
    the rows in the loss.
    """
    bonus = context.config.bonus
    if not isinstance(bonus, Distill):
        return None
    teacher = bonus.data(PolicyInput(given))
    scale = annealed.weight_at(bonus, exploration.env_steps(context.ratio.steps_per_update, num_updates))

    def of_params(actor: PyTree) -> tuple[Array, Metrics]:
        kl = teacher.kl(policy(context, with_stats(actor, learner.actor_stats), obs))
        return scale * (weight * kl).sum(), {"distill_kl": kl}

    return of_params
