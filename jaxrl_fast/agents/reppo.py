"""REPPO: relative entropy pathwise policy optimization (Voelcker et al. 2025), for continuous actions.

Each update learns Q of the current policy from lambda-returns of one rollout. The policy then follows the gradient of Q
with respect to actions. Two multipliers keep the entropy near a target and the KL divergence from the policy that acted
below a bound. Rows whose action was ignored (resets) are excluded from losses and statistics.

Deviations from the authors' code: The KL divergence is exact, where the code takes 16 samples. Terminal states have
neither an entropy nor a next embedding. Truncated steps are learned from, since their true successor is known. Layers
have LayerNorm and ReLU in place of RMSNorm and swish. Log standard deviations are clipped to LOG_STD.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import networks
from jaxrl_fast.networks import flat, predictive
from jaxrl_fast.options.reppo import REPPO as Config
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import action_noise, minibatch, normalize, optim, returns, sgd, value_distributions
from jaxrl_fast.rl.distributions import TanhGaussian
from jaxrl_fast.rl.value_distributions import Atoms
from jaxrl_fast.types import (
    Agent,
    Array,
    Decision,
    EnvSpec,
    Key,
    Metrics,
    Parallelism,
    PolicyInput,
    PyTree,
    Rollout,
    SampleNoise,
)

SUPPORTS = frozenset({"shards", "grad_workers"})
LOG_STD = -20.0, 2.0  # bounds of the policy's log standard deviations


class Params(NamedTuple):
    """One value for each network: its parameters, or its optimizer."""

    actor: PyTree  # "network", and the logarithms of the multipliers, f32 []: "log_temperature" and "log_multiplier"
    critic: PyTree


class State(NamedTuple):
    """The whole state of REPPO."""

    params: Params
    optimizer: Params
    observations: PyTree  # normalize.Stats of each leaf of an observation, or None


class Batch(NamedTuple):
    """The rows that losses are computed from, [B, ...]."""

    obs: PyTree
    action: Array
    reward: Array
    discount: Array  # of the environment: 0 where the next state is terminal
    target: Array  # of Q
    noise: Array  # standard normal, [B, epochs, D]; within a gradient step [B, D]
    weight: Array  # of the row in means: 0 where its action was ignored
    next_embedding: Array  # [B, W]
    policy: TanhGaussian  # that acted


class Learner(NamedTuple):
    """The variables that a gradient step changes."""

    params: Params
    optimizer: Params


class Context(NamedTuple):
    """The constants of an agent, which all functions of this module share."""

    config: Config
    spec: EnvSpec
    parallelism: Parallelism
    actor: networks.Network
    critic: predictive.PredictiveCritic
    value_head: value_distributions.ValueHead
    learning_rate: optax.Schedule
    optimizer: optax.GradientTransformation  # of each network

    @property
    def action_size(self) -> int:
        """Return D, the numbers of an action."""
        return self.spec.action.num_outputs


def make(config: Config, spec: EnvSpec, num_updates: int, parallelism: Parallelism = Parallelism()) -> Agent:
    """Return REPPO for environments of this spec, with schedules over `num_updates` updates.

    Raises ValueError if options contradict each other or the environment.
    """
    size = action_noise.action_size(spec, "reppo")
    normalize.check(config, spec)
    minibatch.validate(config.rollout_length * spec.num_envs, config.num_minibatches, parallelism.num_shards)
    num_steps = num_updates * config.num_epochs * config.num_minibatches
    learning_rate = optim.schedule_of(config.learning_rate, config.schedule, num_steps)
    options, head = networks.options_of(config), value_distributions.head_of(config.value)
    of_critic = options._replace(num_atoms=value_distributions.num_atoms(config.value))
    assert isinstance(head, value_distributions.ValueHead), "options allow no custom value head here"
    offset = partial(zero_value, head) if head.kind == "hl_gauss" else None
    context = Context(
        config=config,
        spec=spec,
        parallelism=parallelism,
        actor=networks.network(spec.obs, 2 * size, options),
        critic=predictive.make(spec.obs, size, config.critic_width, of_critic, offset),
        value_head=head,
        learning_rate=learning_rate,
        optimizer=optim.make_optimizer(learning_rate, config.optimizer),
    )
    functions = partial(prepare, context), partial(gradient_step, context), partial(finalize, context)
    epochs = sgd.epochs_of(config, parallelism, functions)
    return Agent(
        init=partial(init, context),
        explore=partial(explore, context),
        exploit=partial(exploit, context),
        update=partial(update, context, epochs),
        rollout_length=config.rollout_length,
        sample_noise=SampleNoise(partial(action_noise.sample_noise, size), ("normal",)),
        parameters=lambda state: state.params,
    )


def zero_value(head: value_distributions.ValueHead) -> Array:
    """Return the probabilities [M] of a value of 0. Logits that are a multiple of them let values begin near 0."""
    return value_distributions.gaussian(head, jnp.zeros(()))


def init(context: Context, key: Key) -> State:
    """Return fresh parameters and empty statistics."""
    config, (key_actor, key_critic) = context.config, jax.random.split(key)
    actor = {
        "network": context.actor.init(key_actor),
        "log_temperature": jnp.log(jnp.float32(config.temperature)),
        "log_multiplier": jnp.log(jnp.float32(config.kl_multiplier)),
    }
    params = Params(actor, context.critic.init(key_critic))
    observations = normalize.init(context.spec.obs) if config.normalize_observations else None
    return State(params, Params(*map(context.optimizer.init, params)), observations)


def explore(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: action_noise.Noise) -> Decision:
    """Sample an action from the policy."""
    pi = policy(context, state.params.actor, normalize.apply(state.observations, inputs.obs))
    return Decision(jnp.tanh(pi.sample_from(noise.normal)), carry)


def exploit(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: action_noise.Noise) -> Decision:
    """Take the policy's median action."""
    pi = policy(context, state.params.actor, normalize.apply(state.observations, inputs.obs))
    return Decision(jnp.tanh(pi.mode()), carry)


def policy(context: Context, actor: PyTree, obs: PyTree) -> TanhGaussian:
    """Return the distribution of actions for normalized observations."""
    mean, log_std = jnp.split(context.actor.apply(actor["network"], obs), 2, axis=-1)
    return TanhGaussian(mean, jnp.clip(log_std, *LOG_STD))


def update(context: Context, epochs: sgd.Epochs, state: State, rollout: Rollout, key: Key) -> tuple[State, Metrics]:
    """Learn from a rollout. Its rows get normal noise, [T, N, 1 + epochs, D]: of the next action, and of each epoch."""
    key_noise, key = jax.random.split(key)
    shape = *rollout.steps.reward.shape, 1 + context.config.num_epochs, context.action_size
    steps = rollout.steps._replace(extras=jax.random.normal(key_noise, shape))
    return sgd.update(epochs, state, rollout._replace(steps=steps), key)


def prepare(context: Context, state: State, rollout: Rollout) -> sgd.UpdateBatch:
    """Compute the targets of one rollout; gradient steps do not change them.

    Observations are normalized by statistics from before it. With a' sampled at s', and g the discount:

        G[t] = r + g (-alpha log pi(a'|s') + (1 - lambda) Q(s', a') + lambda G[t + 1])

    where lambda is 0 at the end of an episode, and g is 0 where it terminates.
    """
    config = context.config
    steps = normalize.clip_rewards(rollout, config.clips_rewards).steps
    obs_moments = normalize.seen(state.observations, steps.obs, steps.valid)
    obs, last_obs = (normalize.apply(state.observations, x) for x in (steps.obs, rollout.next_obs))
    next_obs = jax.tree.map(lambda x, y: jnp.concatenate([x[1:], y[None]]), obs, last_obs)
    rows = minibatch.flatten((obs, next_obs, steps.extras[:, :, 0]))
    acted, value, cost, embedding = minibatch.map_chunks(partial(look_ahead, context, state.params), rows)
    shape, discount = steps.reward.shape, config.gamma * steps.discount
    reward = steps.reward - discount * cost.reshape(shape)
    target = returns.lambda_returns(reward, discount, value.reshape(shape), steps.last, config.return_lambda)
    weight, noise = steps.valid.astype(jnp.float32), steps.extras[:, :, 1:]
    obs, action, reward, discount, target, noise, weight = minibatch.flatten(
        (obs, steps.action, steps.reward, steps.discount, target, noise, weight)
    )
    batch = Batch(obs, action, reward, discount, target, noise, weight, embedding, acted)
    return sgd.UpdateBatch(Learner(state.params, state.optimizer), batch, state=state, moments=obs_moments)


def look_ahead(
    context: Context, params: Params, rows: tuple[PyTree, PyTree, Array]
) -> tuple[TanhGaussian, Array, Array, Array]:
    """Return the policies at observations, and of the next ones Q(s', a'), alpha log pi(a'|s') and the embedding."""
    obs, next_obs, noise = rows
    pi = policy(context, params.actor, next_obs)
    sample = pi.sample_from(noise)
    found = context.critic.apply(params.critic, (next_obs, jnp.tanh(sample)))
    value = value_distributions.mean(context.value_head, found.value)
    cost = jnp.exp(params.actor["log_temperature"]) * pi.log_prob(sample)
    return policy(context, params.actor, obs), value, cost, found.embedding


def gradient_step(context: Context, learner: Learner, batch: Batch) -> tuple[Learner, Metrics]:
    """Move the critic towards the targets, then the policy and the multipliers."""
    (actor, critic), (of_actor, of_critic) = learner
    config, parallelism = context.config, context.parallelism
    epoch = of_critic[-1].count // config.num_minibatches % config.num_epochs
    batch = batch._replace(noise=jax.lax.dynamic_index_in_dim(batch.noise, epoch, axis=1, keepdims=False))
    gradient_of = jax.grad(lambda params, rows: critic_loss(context, flat.unpack(params), rows), has_aux=True)
    gradient, metrics = minibatch.accumulate_grads(gradient_of, critic, batch)
    gradient = collectives.all_reduce_sum(gradient, parallelism.grad_axis)
    updates, of_critic = context.optimizer.update(gradient, of_critic, critic)
    critic = optax.apply_updates(critic, updates)
    gradient_of = jax.grad(lambda params, rows: actor_loss(context, critic, flat.unpack(params), rows), has_aux=True)
    gradient, of_policy = minibatch.accumulate_grads(gradient_of, actor, batch)
    gradient = collectives.all_reduce_sum(gradient, parallelism.grad_axis)
    updates, of_actor = context.optimizer.update(gradient, of_actor, actor)
    actor = optax.apply_updates(actor, updates)
    return Learner(Params(actor, critic), Params(of_actor, of_critic)), {**metrics, **of_policy}


def critic_loss(context: Context, params: PyTree, batch: Batch) -> tuple[Array, Metrics]:
    """Return the loss of the critic, a sum of weighted rows, and metrics.

    It is the loss of Q(s, a) plus the weighted mean squared error of the predicted reward and next embedding, which
    terminal states do not have.
    """
    found = context.critic.apply(params, (batch.obs, batch.action))
    value = value_distributions.mean(context.value_head, found.value)
    error, goal = batch.target - value, Atoms(batch.target[:, None], jnp.ones((len(batch.target), 1)))
    losses, _ = value_distributions.losses(context.value_head, found.value, goal, error, huber=False)
    squares = jnp.sum((found.next_embedding - batch.next_embedding) ** 2, axis=-1) + (found.reward - batch.reward) ** 2
    auxiliary = batch.discount * squares / (1 + batch.next_embedding.shape[-1])
    metrics = {"value_loss": losses, "auxiliary_loss": auxiliary, "q_value": value, "td_error_abs": jnp.abs(error)}
    return sgd.weighted_sums(batch.weight, losses + context.config.auxiliary_coef * auxiliary, metrics)


def actor_loss(context: Context, critic: PyTree, params: PyTree, batch: Batch) -> tuple[Array, Metrics]:
    """Return the loss of the policy and of the multipliers, a sum of weighted rows, and metrics.

    With the temperature alpha, the multiplier beta and D = KL(policy that acted || policy), a row has the loss
    alpha log pi(a|s) - Q(s, a) if D is below its bound, else beta D. No gradient of it flows to alpha and beta; their
    losses are alpha (entropy - target) and beta (bound - D).
    """
    config = context.config
    pi = policy(context, params, batch.obs)
    sample = pi.sample_from(batch.noise)
    log_prob, kl = pi.log_prob(sample), batch.policy.kl(pi)
    found = context.critic.apply(critic, (batch.obs, jnp.tanh(sample)))
    value = value_distributions.mean(context.value_head, found.value)
    alpha, beta = jnp.exp(params["log_temperature"]), jnp.exp(params["log_multiplier"])
    fixed_alpha, fixed_beta = jax.lax.stop_gradient((alpha, beta))
    losses = jnp.where(kl < config.kl_bound, fixed_alpha * log_prob - value, fixed_beta * kl)
    target = -0.5 * context.action_size if config.target_entropy is None else config.target_entropy
    excess, slack = jax.lax.stop_gradient((-log_prob - target, config.kl_bound - kl))
    ones = jnp.ones_like(kl)
    metrics = {"policy_loss": losses, "entropy": -log_prob, "kl": kl}
    metrics |= {"temperature": fixed_alpha * ones, "kl_multiplier": fixed_beta * ones}
    return sgd.weighted_sums(batch.weight, losses + alpha * excess + beta * slack, metrics)


def finalize(
    context: Context, batch: sgd.UpdateBatch, learner: Learner, sums: Metrics, pooled: PyTree
) -> tuple[State, Metrics]:
    """Return the state after the update, and metrics: means over gradient steps. `pooled` are moments of all shards."""
    num_steps = context.config.num_epochs * context.config.num_minibatches
    means = collectives.all_reduce_sum(jax.tree.map(lambda x: x / num_steps, sums), context.parallelism.grad_axis)
    observations = normalize.merge(batch.state.observations, pooled)
    learning_rate = context.learning_rate(learner.optimizer.critic[-1].count)
    return State(*learner, observations), {**means, "learning_rate": learning_rate}
