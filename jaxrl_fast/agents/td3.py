"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al. 2018), for continuous actions.

DDPG (Lillicrap et al. 2016) is TD3 with one critic, no delay and no noise on target actions (`agents.ddpg`).

With the default options, the computation is the paper's. As in the authors' code, actions are clipped to the bounds
before they are stored.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import replay
from jaxrl_fast.agents import actor_critic, critics, demonstrations
from jaxrl_fast.agents.actor_critic import SUPPORTS as SUPPORTS
from jaxrl_fast.agents.actor_critic import Context, Learner, Params
from jaxrl_fast.kernels.branch import cond
from jaxrl_fast.options.td3 import TD3 as Config
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import off_policy
from jaxrl_fast.rl.bonuses import bc
from jaxrl_fast.rl.value_distributions import Atoms
from jaxrl_fast.types import Agent, Array, EnvSpec, Key, Metrics, Parallelism, PyTree


def make(
    config: Config,
    spec: EnvSpec,
    num_updates: int,
    parallelism: Parallelism = Parallelism(),
    transform_gradient: optax.GradientTransformation | None = None,
) -> Agent:
    """Return TD3 for environments of this spec, with schedules over `num_updates` updates.

    `transform_gradient` changes the gradient of each network before its optimizer does. Raises ValueError if options
    contradict each other or the environment.
    """
    context = actor_critic.make_context(
        config,
        spec,
        num_updates,
        parallelism,
        outputs_per_number=1,
        transform_gradient=transform_gradient,
    )
    return actor_critic.make_agent(context, init, exploit, explore, gradient_step)


def init(context: Context, key: Key) -> Learner:
    """Return fresh parameters, and targets equal to them; with `crossq`, no targets."""
    params = actor_critic.init_params(context, key)
    target_params = Params(None, None) if context.config.crossq else params
    return Learner(params, target_params, actor_critic.init_optimizer(context, params))


def explore(context: Context, params: Params, obs: PyTree, noise: Array) -> Array:
    """Return the policy's actions [N, D] with noise, clipped to the bounds."""
    return jnp.clip(exploit(context, params, obs) + context.config.noise.std * noise, -1, 1)


def exploit(context: Context, params: Params, obs: PyTree) -> Array:
    """Return the policy's actions [N, D]."""
    return jnp.tanh(context.actor.apply(params.actor, obs))


def gradient_step(
    context: Context, buffer: PyTree, num_updates: Array, keys: Key, learner: Learner, counts: off_policy.Counts
) -> tuple[Learner, PyTree, off_policy.Counts, Metrics]:
    """Make one gradient step on a batch from the replay buffer, with keys [2] (algorithm 1).

    The policy and all targets move in every `policy_delay`-th step.
    """
    config = context.config
    (noise,) = actor_critic.sample_normal(context, keys[1], 1)
    batch = actor_critic.sample(context, learner, buffer, keys[0], num_updates)
    next_action, target_of = td_target(context, learner, batch.rows, noise)
    learner, buffer, metrics = critics.step(context, learner, buffer, batch, next_action, target_of)
    found = (batch.weight > 0) / config.batch_size  # only the critics' losses have importance weights
    added = demonstrations.draw(context, learner, keys, num_updates, partial(cloning_costs, context))
    move = partial(policy_step, context, batch.rows.obs, found, added=added)
    due = learner.optimizer.critic[-1].count % config.policy_delay == 0
    skip = lambda learner: (learner, {"policy_loss": 0.0} | ({} if added is None else {"bc_loss": 0.0}))
    learner, losses = cond(off_policy.same_for_all_seeds(due), move, skip, learner)
    scale = metrics["weight"].sum() * config.policy_delay  # losses are 0 in the other steps
    return learner, buffer, counts, {**metrics, **{name: scale * x for name, x in losses.items()}}


def td_target(
    context: Context, learner: Learner, batch: replay.Sample, noise: Array
) -> tuple[Array, Callable[[Array], Atoms]]:
    """Return a' [B, D], and a function from the critics' outputs there to the target of Q(obs, action).

    The target is r + g min_i Q_i(s', a'), with a' = clip(pi'(s') + clip(std noise, -c, c), -1, 1) of the target policy
    (equations 14 and 15), or with `crossq` of the policy. For distributions, see `critics.minimum`.
    """
    config = context.config
    noise = jnp.clip(config.target_noise * noise, -config.target_noise_clip, config.target_noise_clip)
    params = learner.params if config.crossq else learner.target_params
    action = jnp.clip(exploit(context, params, batch.next_obs) + noise, -1, 1)

    def target_of(output: Array) -> Atoms:
        atom, weight = critics.minimum(context, output)
        return Atoms(batch.reward[:, None] + batch.discount[:, None] * atom, weight)

    return action, target_of


def policy_step(
    context: Context, obs: PyTree, weight: Array, learner: Learner, added: demonstrations.Added | None = None
) -> tuple[Learner, Metrics]:
    """Move the policy towards actions that the first critic rates highly, then the targets. Also returns losses []."""

    def objective(actor: PyTree) -> tuple[Array, Metrics]:
        loss = policy_loss(context, learner, obs, weight, actor)
        if added is None:
            return loss, {"policy_loss": loss}
        more, costs = added(actor)
        mean = lambda x: x.sum() / context.config.batch_size
        return loss + more, {"policy_loss": loss, **jax.tree.map(mean, costs)}

    (_, losses), gradient = jax.value_and_grad(objective, has_aux=True)(learner.params.actor)
    losses, gradient = collectives.all_reduce_sum((losses, gradient), context.parallelism.grad_axis)
    learner = actor_critic.apply_gradient(context, learner, Params(gradient, None))
    if context.config.crossq:
        return learner, losses
    target_params = optax.incremental_update(learner.params, learner.target_params, context.config.target.tau)
    return learner._replace(target_params=target_params), losses


def policy_loss(context: Context, learner: Learner, obs: PyTree, weight: Array, actor: PyTree) -> Array:
    """Return the weighted sum of -Q_1(s, pi(s)) over the rows, f32 [] (equation 1 with the first critic)."""
    action = exploit(context, learner.params._replace(actor=actor), obs)
    return -(weight * critics.values(context, learner, obs, action)[0]).sum()


def cloning_costs(context: Context, actor: PyTree, steps: bc.Demonstrations) -> Array:
    """Return the squared errors of the policy's actions at the steps of a dataset, means over D, [B]."""
    action = jnp.tanh(context.actor.apply(actor, steps.obs))
    return ((action - steps.action.reshape(action.shape)) ** 2).mean(-1)
