"""SAC: soft actor-critic (Haarnoja et al. 2018) with a learned temperature.

For continuous actions, the policy is a tanh-Gaussian; for discrete ones, see `agents.discrete_sac`. A gradient step
moves the critics, then the policy towards actions of high value, then the temperature, then the target critics.

Deviations from the second paper: The temperature's loss uses its logarithm, as in the authors' code. The entropies of
the steps within an n-step return do not count. Log standard deviations are clipped to LOG_STD. With several devices,
each draws its own subset of `num_target_critics` critics.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_fast import replay
from jaxrl_fast.agents import actor_critic, critics, demonstrations, discrete_sac, distillation, joint
from jaxrl_fast.agents.actor_critic import SUPPORTS as SUPPORTS
from jaxrl_fast.agents.actor_critic import Context, Learner, Params, temperature
from jaxrl_fast.kernels.branch import cond
from jaxrl_fast.options.sac import SAC as Config
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import normalize, off_policy
from jaxrl_fast.rl.bonuses import bc
from jaxrl_fast.rl.distributions import TanhGaussian
from jaxrl_fast.rl.value_distributions import Atoms
from jaxrl_fast.types import (
    Agent,
    Array,
    Box,
    EnvSpec,
    Key,
    Metrics,
    MultiDiscrete,
    Parallelism,
    PolicyInput,
    PyTree,
)

LOG_STD = -20.0, 2.0  # bounds of the policy's log standard deviations
TANH_LOG_STD = -10.0, 2.0  # the same with std_bounds tanh


def make(
    config: Config,
    spec: EnvSpec,
    num_updates: int,
    parallelism: Parallelism = Parallelism(),
    transform_gradient: optax.GradientTransformation | None = None,
) -> Agent:
    """Return SAC for environments of this spec, with schedules over `num_updates` updates.

    `transform_gradient` changes the gradient of each network before its optimizer does. Raises ValueError if options
    contradict each other or the environment.
    """
    distillation.check(config, spec)
    if isinstance(spec.action, MultiDiscrete):
        one = joint.spec_of(spec, "sac")
        config = demonstrations.joined(config, spec.action.nums)
        return joint.agent_of(make(config, one, num_updates, parallelism, transform_gradient), spec)
    discrete_sac.check(config, spec)
    if (config.num_target_critics or 1) > config.num_critics:
        problem = f"must be at most num_critics ({config.num_critics}), got {config.num_target_critics}"
        raise ValueError(f"num_target_critics: {problem}; use more critics")
    if config.target_sigma is not None and config.target_entropy is not None:
        raise ValueError("target_sigma: cannot be combined with target_entropy, got both; drop one")
    context = actor_critic.make_context(
        config,
        spec,
        num_updates,
        parallelism,
        outputs_per_number=2,
        transform_gradient=transform_gradient,
        of_discrete=None if isinstance(spec.action, Box) else discrete_sac.critics_of,
    )
    agent = actor_critic.make_agent(context, init, exploit, explore, gradient_step)
    return agent if isinstance(spec.action, Box) else discrete_sac.agent_of(context, agent)


def distribution_of(config: Config, spec: EnvSpec) -> Callable[[off_policy.State, PolicyInput], TanhGaussian] | None:
    """Return a function to the policy's distributions [B, ...], for a teacher; None if actions are discrete."""
    if not isinstance(spec.action, Box):
        return None
    context = actor_critic.make_context(config, spec, 1, Parallelism(), outputs_per_number=2)

    def act(state: off_policy.State, inputs: PolicyInput) -> TanhGaussian:
        obs = normalize.apply(state.learner.observations, inputs.obs)
        return policy(context, actor_critic.acting(state.learner).actor, obs)

    return act


def init(context: Context, key: Key) -> Learner:
    """Return fresh parameters, and target critics equal to the critics; with `crossq`, no target critics."""
    params = actor_critic.init_params(context, key)
    if context.config.learn_temperature:
        params = params._replace(log_temperature=jnp.log(jnp.float32(context.config.temperature)))
    target_params = Params(None, None if context.config.crossq else params.critic)
    return Learner(params, target_params, actor_critic.init_optimizer(context, params))


def explore(context: Context, params: Params, obs: PyTree, noise: Array) -> Array:
    """Sample actions [N, D] from the policy, with standard normal noise [N, D]."""
    return jnp.tanh(policy(context, params.actor, obs).sample_from(noise))


def exploit(context: Context, params: Params, obs: PyTree) -> Array:
    """Return the policy's median actions [N, D]."""
    return jnp.tanh(policy(context, params.actor, obs).mode())


def policy(context: Context, params: PyTree, obs: PyTree) -> TanhGaussian:
    """Return the distribution of actions."""
    return distribution(context, context.actor.apply(params, obs))


def distribution(context: Context, output: Array) -> TanhGaussian:
    """Return the distribution of actions of the actor's output [..., 2 D]: means and log standard deviations."""
    mean, log_std = jnp.split(output, 2, axis=-1)
    if context.config.std_bounds == "tanh":
        low, high = TANH_LOG_STD
        return TanhGaussian(mean, low + (high - low) * 0.5 * (1 + jnp.tanh(log_std)))
    return TanhGaussian(mean, jnp.clip(log_std, *LOG_STD))


def gradient_step(
    context: Context, buffer: PyTree, num_updates: Array, keys: Key, learner: Learner, counts: off_policy.Counts
) -> tuple[Learner, PyTree, off_policy.Counts, Metrics]:
    """Make one gradient step on a batch from the replay buffer, with keys [2] (algorithm 1 of the second paper)."""
    config, is_continuous = context.config, isinstance(context.spec.action, Box)
    key_noise, key_subset = jax.random.split(keys[1])
    noise_target, noise_policy = actor_critic.sample_normal(context, key_noise, 2) if is_continuous else (None, None)
    stored = actor_critic.sample_stored(context, buffer, keys[0], num_updates)
    batch = actor_critic.normalized(context, learner, stored)
    target: Any = td_target if is_continuous else discrete_sac.td_target
    next_action, target_of = target(context, learner, batch.rows, noise_target, key_subset)
    learner, buffer, metrics = critics.step(context, learner, buffer, batch, next_action, target_of)
    found = (batch.weight > 0) / config.batch_size  # only the critics' losses have importance weights
    alpha = temperature(context, learner.params)
    cost = partial(cloning_costs if is_continuous else discrete_sac.cloning_costs, context)
    added = demonstrations.draw(context, learner, keys, num_updates, cost) or distillation.of_rows(
        context, learner, stored.rows.obs, batch.rows.obs, found, num_updates, policy
    )
    move = partial(policy_step, context, batch.rows, noise_policy, found, added=added)
    if config.policy_delay == 1:
        learner, of_policy = move(learner)
    else:
        skip = lambda learner: (learner, jax.tree.map(jnp.zeros_like, jax.eval_shape(move, learner)[1]))
        due = learner.optimizer.critic[-1].count % config.policy_delay == 0
        learner, of_policy = cond(off_policy.same_for_all_seeds(due), move, skip, learner)
    if config.crossq:
        critic = learner.target_params.critic
    else:
        critic, counts = off_policy.update_target(
            context.ratio,
            config.target.interval,
            config.target.tau,
            learner.params.critic,
            learner.target_params.critic,
            counts,
        )
    scale = metrics["weight"] * config.policy_delay  # metrics of the policy are 0 in the steps between
    of_policy = jax.tree.map(lambda x: scale * x, of_policy) | {"temperature": metrics["weight"] * alpha}
    return learner._replace(target_params=Params(None, critic)), buffer, counts, {**metrics, **of_policy}


def policy_step(
    context: Context,
    rows: replay.Sample,
    noise: Array | None,
    weight: Array,
    learner: Learner,
    added: demonstrations.Added | None = None,
) -> tuple[Learner, Metrics]:
    """Move the policy and the temperature. Also returns metrics [B]."""
    if noise is None:
        loss = partial(discrete_sac.policy_loss, context, learner, rows, weight)
    else:
        loss = partial(policy_loss, context, learner, rows.obs, noise, weight, next_obs=rows.next_obs)
    gradient_of = jax.grad(demonstrations.with_costs(loss, added), has_aux=True)
    gradient, (excess, metrics, stats) = gradient_of(learner.params.actor)
    gradient, excess = collectives.all_reduce_sum((gradient, excess), context.parallelism.grad_axis)
    # The loss of the temperature alpha is log alpha times the excess of the entropy (eq. 18, there alpha times it).
    gradients = Params(gradient, None, excess if context.config.learn_temperature else None)
    return actor_critic.apply_gradient(context, learner._replace(actor_stats=stats), gradients), metrics


def td_target(
    context: Context, learner: Learner, batch: replay.Sample, noise: Array, key: Key
) -> tuple[Array, Callable[[Array], Atoms]]:
    """Return a' [B, D], and a function from the critics' outputs there to the target of Q(obs, action).

    The target is r + g (min_i Q_i(s', a') - alpha log pi(a'|s')), where a' is sampled from the policy at s' (Haarnoja
    et al. 2018, "Algorithms and applications", eq. 5). For distributions, see `critics.minimum`. With
    `num_target_critics`, i runs over that many critics, drawn by the key (Chen et al. 2021, algorithm 1).
    """
    config = context.config
    pi = policy(context, actor_critic.acting(learner).actor, batch.next_obs)
    sample = pi.sample_from(noise)
    cost = temperature(context, learner.params) * pi.log_prob(sample)

    def target_of(output: Array) -> Atoms:
        if config.num_target_critics:
            output = output[jax.random.permutation(key, config.num_critics)[: config.num_target_critics]]
        atom, weight = critics.minimum(context, output)
        return Atoms(batch.reward[:, None] + batch.discount[:, None] * (atom - cost[:, None]), weight)

    return jnp.tanh(sample), target_of


def policy_loss(
    context: Context,
    learner: Learner,
    obs: PyTree,
    noise: Array,
    weight: Array,
    params: PyTree,
    next_obs: PyTree = None,
) -> tuple[Array, tuple[Array, Metrics, PyTree]]:
    """Return the weighted sum of alpha log pi(a|s) - min_i Q_i(s, a) over the rows, with a = tanh(sample) (eq. 9).

    With `num_target_critics` or quantiles, the mean over i replaces the minimum. Also returns by how much the entropy
    exceeds its target, f32 [], metrics [B], and the policy's running statistics after the batch, if it has any. The
    batch is then that of `obs` and of `next_obs`, as for the critics.
    """
    stats = learner.actor_stats
    if stats is None:
        pi = policy(context, params, obs)
    else:
        together = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), obs, next_obs)
        output, stats = context.actor.train(params, stats, together)
        pi = distribution(context, jnp.split(output, 2)[0])
    sample = pi.sample_from(noise)
    values = critics.values(context, learner, obs, jnp.tanh(sample))
    takes_mean = context.config.num_target_critics or context.value_head.kind == "quantile"
    value = values.mean(0) if takes_mean else values.min(0)
    log_prob, alpha = pi.log_prob(sample), temperature(context, learner.params)
    losses = alpha * log_prob - value
    metrics = {"policy_loss": losses, "entropy": -log_prob}
    excess = -log_prob - target_entropy(context)
    return (weight * losses).sum(), ((weight * excess).sum(), metrics, stats)


def cloning_costs(context: Context, params: PyTree, steps: bc.Demonstrations) -> Array:
    """Return -log pi(a|s) of the steps of a dataset, [B]."""
    return -bc.log_prob(policy(context, params, steps.obs), steps.action)


def target_entropy(context: Context) -> float | Array:
    """Return the target of the entropy, in nats: by default minus the number D of action dimensions.

    With `target_sigma`, it is the entropy of a Gaussian, D / 2 ln(2 pi e sigma^2) (FlashSAC).
    """
    config = context.config
    if config.target_sigma is not None:
        return context.action_size * (0.5 * np.log(2 * np.pi * np.e) + jnp.log(config.target_sigma))
    target: float | Array = -context.action_size if config.target_entropy is None else config.target_entropy
    return target
