"""PPO: proximal policy optimization with a clipped loss (Schulman et al. 2017), for discrete and continuous actions.

Deviations from the paper, all common: advantages are standardized in each minibatch, the value loss is also clipped,
and the learning rate decays linearly. Rows whose action was ignored (resets) are excluded from losses and statistics.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import networks
from jaxrl_fast.options.explore import GSDE, StateDependent, squashes
from jaxrl_fast.options.optimizer import AdaptiveKL
from jaxrl_fast.options.ppo import PPO as Config
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import distributions, minibatch, normalize, optim, returns, sequences, sgd, state_noise
from jaxrl_fast.rl.frame_stack import Frames, compressor, decode, encode_rollout
from jaxrl_fast.types import (
    Agent,
    Array,
    Box,
    Decision,
    EnvSpec,
    Key,
    Learning,
    Metrics,
    Parallelism,
    PolicyInput,
    PyTree,
    Rollout,
    Transition,
)

SUPPORTS = frozenset({"shards", "grad_workers", "sequential_seeds"})
LR_FACTOR, LR_RANGE = 1.5, (1e-5, 1e-2)  # of schedule kl: the factor of a change of the learning rate, and its bounds


class State(NamedTuple):
    """The whole state of PPO."""

    params: PyTree
    optimizer: PyTree
    observations: PyTree  # normalize.Stats of each leaf of an observation, or None
    rewards: normalize.RewardScale | None
    lr_scale: Array | None = None  # f32 [], of the learning rate with schedule kl


class Sampled(NamedTuple):
    """The extras of a decision with a tanh policy, where the action is a function of the sample.

    Without a tanh policy, the extras are the policy only.
    """

    policy: PyTree  # the distribution of the sample
    sample: Array  # f32 [N, D], before the tanh


class Batch(NamedTuple):
    """The rows that the loss is computed from, [B, ...]; with a memory, sequences [B, L, ...]."""

    obs: PyTree  # the network's input, or numbers of stacks that a gradient step decodes
    action: Array  # before the tanh, with a tanh policy
    policy: PyTree  # the distribution of the action
    log_prob: Array  # of the action under `policy`
    value: Array  # before the first gradient step
    advantage: Array
    target: Array  # of the value
    weight: Array  # of the row in means: 0 where its action was ignored
    action_mask: Array | None = None  # bool [B, num_outputs]
    carry: PyTree = ()  # [B, ...] of the memory before each sequence
    reset: Array | None = None  # bool [B, L]: an episode begins after the step


class Learner(NamedTuple):
    """The variables that a gradient step changes."""

    params: PyTree
    optimizer: PyTree
    stopped: Array  # bool: the KL divergence exceeds its limit, and no further step is applied
    lr_scale: Array | None = None


class UpdateBatch(NamedTuple):
    """An update in progress."""

    learner: Learner
    rows: Batch  # [T * N, ...]
    frames: Frames | None  # the frames from which observations are built, if they are stored as frames
    state: State  # after the update, without the changes by gradient steps and `moments`
    moments: PyTree  # normalize.Moments: of targets and advantages [2], and of observations if these are normalized


class Context(NamedTuple):
    """The constants of an agent, which all functions of this module share."""

    config: Config
    spec: EnvSpec
    parallelism: Parallelism
    head: distributions.Head
    network: networks.ActorCritic
    learning_rate: optax.Schedule
    optimizer: optax.GradientTransformation
    objective: Callable[["Context", PyTree, Batch], tuple[Array, Metrics]]
    frame_stack: int  # frames of an observation, of which only the newest is stored; 0: observations are stored whole
    gsde: bool  # carries are pairs, of the memory and of gSDE


def make(
    config: Config,
    spec: EnvSpec,
    num_updates: int,
    parallelism: Parallelism = Parallelism(),
    objective: Callable | None = None,
) -> Agent:
    """Return PPO for environments of this spec, its learning rate annealed over `num_updates` updates.

    A custom `objective`, (context, params, batch) -> (sum of weighted rows, metrics), replaces `loss`; with `target_kl`
    its metrics must include "approx_kl". Raises ValueError if options contradict each other or the environment.
    """
    check(config, spec, parallelism)
    head, network = policy_of(config, spec)
    num_steps = config.num_epochs * config.num_minibatches  # of an update
    learning_rate = optim.schedule_of(config.learning_rate, config.schedule, num_updates * num_steps)
    optimizer = optim.make_optimizer(learning_rate, config.optimizer)
    frame_stack = 0 if config.normalize_observations or spec.frame_stack < 2 else spec.frame_stack
    context = Context(
        config,
        spec,
        parallelism,
        head,
        network,
        learning_rate,
        optimizer,
        objective or loss,
        frame_stack,
        network.num_features > 0,
    )
    return Agent(
        init=partial(init, context),
        explore=partial(explore, context),
        exploit=partial(exploit, context),
        update=partial(update, context),
        sample_noise=head.sample_noise,
        rollout_length=config.rollout_length,
        initial_carry=(network.initial_carry, state_noise.initial_carry(head))
        if context.gsde
        else network.initial_carry,
        parameters=lambda state: state.params,
        learning=Learning(
            compress_obs=compressor(frame_stack),
            on_env_restart=on_env_restart,
            gradient_steps=sgd.incremental_update(
                num_steps, partial(prepare, context), partial(epochs_of, context), partial(finalize, context)
            ),
        ),
    )


def policy_of(config: Config, spec: EnvSpec) -> tuple[distributions.Head, networks.ActorCritic]:
    """Return the distribution over actions, and the network that outputs its parameters."""
    options = networks.options_of(config) | networks.memory_of(config)
    chosen = config.policy
    squash = squashes(chosen)
    if isinstance(chosen, GSDE) and isinstance(spec.action, Box):
        network = networks.actor_critic(spec.obs, spec.action.num_outputs, with_features=True, **options)
        return state_noise.head(spec.action, squash, network.num_features), network
    log_std_offset = chosen.log_std_init if isinstance(chosen, StateDependent) else None
    head = distributions.head(spec.action, squash, log_std_offset)
    return head, networks.actor_critic(spec.obs, head.num_outputs, **options)


def check(config: Config, spec: EnvSpec, parallelism: Parallelism) -> None:
    """Raise ValueError if shapes do not fit. Other numbers may be traced, and the host checks them."""
    normalize.check(config, spec)
    sequences.validate(config, spec, parallelism.num_shards)
    if config.policy.kind != "gaussian" and not isinstance(spec.action, Box):
        raise ValueError(f"policy: {spec.id} has discrete actions, got {config.policy.kind}; leave it out")
    num_rows = config.rollout_length * spec.num_envs
    if config.normalize_advantage and num_rows * parallelism.num_shards == config.num_minibatches:
        remedy = "use fewer minibatches" if config.num_minibatches > 1 else "use a longer rollout"
        raise ValueError(
            f"num_minibatches: a minibatch must have 2 rows or more with normalize_advantage, got "
            f"{config.num_minibatches} minibatches of {num_rows * parallelism.num_shards} rows; {remedy}"
        )


def init(context: Context, key: Key) -> State:
    """Return fresh parameters and empty statistics."""
    params = {"network": context.network.init(key)}
    log_std = context.head.init(context.config.policy.log_std_init)
    if log_std is not None:
        params["log_std"] = log_std
    return State(
        params=params,
        optimizer=context.optimizer.init(params),
        observations=normalize.init(context.spec.obs) if context.config.normalize_observations else None,
        rewards=normalize.init_reward(context.spec.num_envs) if context.config.rewards == "normalized" else None,
        lr_scale=jnp.float32(1) if isinstance(context.config.schedule, AdaptiveKL) else None,
    )


def on_env_restart(state: State) -> State:
    """Reset the reward sums of episodes that an environment restart interrupts."""
    scale = state.rewards and state.rewards._replace(total=jnp.zeros_like(state.rewards.total))
    return state._replace(rewards=scale)


def explore(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
    """Sample an action from the policy."""
    pi, output, carry = policy(context, context.network.step, state, inputs, carry)
    if isinstance(chosen := context.config.policy, GSDE) and context.gsde:
        memory, own = carry[0], state_noise.renew(carry[1], chosen.sample_freq, noise)
        noise, carry = state_noise.noise(output, state.params["log_std"], pi.log_std, own.matrix), (memory, own)
    sample = pi.sample_from(noise)
    is_action = not isinstance(pi, distributions.TanhGaussian)  # else the sample cannot be recovered from the action
    return Decision(context.head.to_action(sample), carry, extras=pi if is_action else Sampled(pi, sample))


def exploit(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
    """Take the mode of the policy."""
    pi, _, carry = policy(context, context.network.act, state, inputs, carry)
    return Decision(context.head.to_action(pi.mode()), carry)


def policy(
    context: Context, step: Callable, state: State, inputs: PolicyInput, carry: PyTree
) -> tuple[Any, Array, PyTree]:
    """Return the distribution over actions for N observations, the actor's output, and the carry after these.

    `step` is the network's `step`, or its `act`, which does not change the critic's part of the carry.
    """
    obs = normalize.apply(state.observations, inputs.obs)
    output, memory = step(state.params["network"], obs, carry[0] if context.gsde else carry)
    pi = context.head.make(output, state.params.get("log_std"), inputs.action_mask)
    return pi, output, (memory, carry[1]) if context.gsde else memory


def update(context: Context, state: State, rollout: Rollout, key: Key) -> tuple[State, Metrics]:
    """Learn from a rollout, in several epochs of minibatches (algorithm 1)."""
    update_batch = prepare(context, state, rollout)
    epochs = epochs_of(context, update_batch)
    return finalize(
        context, update_batch, *sgd.run(epochs, update_batch.learner, update_batch.rows, key, update_batch.moments)
    )


def epochs_of(context: Context, update_batch: UpdateBatch) -> sgd.Epochs:
    """Return the settings of SGD on the rows of an update."""
    return sgd.Epochs(
        num_epochs=context.config.num_epochs,
        num_minibatches=context.config.num_minibatches,
        axis_name=context.parallelism.axis_name,
        gradient_step=partial(gradient_step, context, update_batch.frames),
        standardize_field="advantage" if context.config.normalize_advantage else "",
        num_grad_workers=context.parallelism.num_grad_workers,
    )


def prepare(context: Context, state: State, rollout: Rollout) -> UpdateBatch:
    """Compute advantages and targets of one rollout. Observations are normalized by statistics from before it."""
    config = context.config
    rollout = normalize.clip_rewards(rollout, config.clips_rewards)
    rollout = rollout._replace(carry=rollout.carry[0] if context.gsde else rollout.carry)  # of the memory
    steps = rollout.steps
    after, reward = scaled(context, state, steps)
    obs_moments = normalize.seen(state.observations, steps.obs, steps.valid)
    if not context.frame_stack:
        rollout = rollout._replace(steps=steps._replace(obs=normalize.apply(state.observations, steps.obs)))
    obs, kept = encode_rollout(context.frame_stack, rollout)
    value, next_value, carry = values(context, state, rollout, obs, kept)
    discount = config.gamma * steps.discount
    advantage = returns.gae(reward, discount, value, next_value, steps.last, config.gae_lambda)
    target = advantage + value
    weight = steps.valid.astype(jnp.float32)
    pi, sample = steps.extras if isinstance(steps.extras, Sampled) else Sampled(steps.extras, steps.action)
    log_prob = pi.log_prob(sample)
    rows = Batch(obs, sample, pi, log_prob, value, advantage, target, weight, steps.action_mask)
    rows = minibatch.flatten(rows._replace(reset=~steps.valid if config.has_memory else None), config.sequence())
    moments = normalize.moments(jnp.stack([target, advantage]), weight, axis=(1, 2))
    learner = Learner(state.params, state.optimizer, jnp.bool_(False), state.lr_scale)
    return UpdateBatch(learner, rows._replace(carry=carry), kept, after, (moments, obs_moments))


def scaled(context: Context, state: State, steps: Transition) -> tuple[State, Array]:
    """Return the state after its reward statistics are updated, and the rewards [T, N].

    With rewards normalized, they are scaled.
    """
    reward, rewards, axis_name = steps.reward, state.rewards, context.parallelism.axis_name
    if rewards is None:
        return state, reward
    rewards = normalize.update_reward(rewards, reward, steps.last, steps.valid, context.config.gamma, axis_name)
    return state._replace(rewards=rewards), normalize.apply_reward(rewards, reward)


def values(
    context: Context, state: State, rollout: Rollout, obs: PyTree, kept: Frames | None
) -> tuple[Array, Array, PyTree]:
    """Return the values of each step and of its successor, f32 [T, N], computed in bulk after acting.

    `obs` [T, N, ...] are the observations of the steps, or the numbers of their stacks in `kept`. Also returns the
    carry before each sequence.
    """
    network, params = context.network, state.params["network"]
    next_obs = normalize.apply(state.observations, rollout.next_obs)
    read = partial(decode, context.frame_stack, kept)
    if length := context.config.sequence():
        unroll = partial(network.unroll, params)
        (_, value), carry = sequences.recompute(unroll, rollout, obs, next_obs, read, length)
        return value[:-1], value[1:], carry
    critic, rows = partial(network.critic, params), minibatch.flatten(obs)
    if context.frame_stack:  # stacks are built for one minibatch at a time
        value = jax.lax.map(lambda some: critic(read(some)), rows.reshape(context.config.num_minibatches, -1))
    else:
        value = minibatch.map_chunks(critic, rows)
    value = value.reshape(rollout.steps.reward.shape)
    return value, jnp.concatenate([value[1:], critic(next_obs)[None]]), ()


def explained_variance(moments: normalize.Moments) -> Array:
    """Return 1 - Var(target - value) / Var(target), f32 []; 1 is a perfect prediction, 0 as good as the mean.

    `moments` [2] are the moments of targets and of advantages; an advantage is target - value.
    """
    variance, unexplained = moments.var
    return jnp.where(variance > 0, 1 - unexplained / jnp.maximum(variance, 1e-8), 0)


def finalize(
    context: Context, update_batch: UpdateBatch, learner: Learner, sums: tuple[Metrics, Array], pooled: PyTree
) -> tuple[State, Metrics]:
    """Return the state after the update, and metrics: means over gradient steps, up to the first beyond the KL limit.

    `pooled` are the moments of all shards.
    """
    (metrics, tried), (moments, obs_moments) = sums, pooled
    means = jax.tree.map(lambda x: x / jnp.maximum(tried, 1), metrics)
    means = collectives.all_reduce_sum(means, context.parallelism.grad_axis)
    learning_rate = context.learning_rate(learner.optimizer[-1].count)
    if isinstance(context.config.schedule, AdaptiveKL):
        learning_rate *= learner.lr_scale
    observations = normalize.merge(update_batch.state.observations, obs_moments)
    state = update_batch.state._replace(
        params=learner.params, optimizer=learner.optimizer, observations=observations, lr_scale=learner.lr_scale
    )
    return state, means | {"explained_variance": explained_variance(moments), "learning_rate": learning_rate}


def gradient_step(
    context: Context, kept: Frames | None, learner: Learner, batch: Batch
) -> tuple[Learner, tuple[Metrics, Array]]:
    """Make one gradient step. Once the KL divergence exceeds its limit, this and later steps are discarded."""
    params, optimizer, stopped, lr_scale = learner
    schedule = context.config.schedule
    needs_kl = context.config.target_kl is not None or isinstance(schedule, AdaptiveKL)
    tried = ~stopped
    batch = batch._replace(obs=decode(context.frame_stack, kept, batch.obs))
    gradient, metrics = minibatch.accumulate_grads(
        jax.grad(partial(context.objective, context), has_aux=True), params, batch
    )
    approx_kl = metrics["approx_kl"] if needs_kl else None
    gradient, approx_kl = collectives.all_reduce_sum((gradient, approx_kl), context.parallelism.grad_axis)
    updates, next_optimizer = context.optimizer.update(gradient, optimizer, params)
    if isinstance(schedule, AdaptiveKL) and lr_scale is not None:
        adapted = adapt_lr(schedule.target, context.config.learning_rate, lr_scale, approx_kl)
        num_steps = context.config.num_epochs * context.config.num_minibatches
        has_moved = optimizer[-1].count % num_steps > 0  # before the first step of an update, the KL is rounding only
        lr_scale = jnp.where(tried & has_moved, adapted, lr_scale)
        updates = jax.tree.map(lambda x: lr_scale * x, updates)
    after = optax.apply_updates(params, updates), next_optimizer
    if context.config.target_kl is not None:
        stopped |= approx_kl > 1.5 * context.config.target_kl
        held = params, (*optimizer[:-1], next_optimizer[-1])  # the learning rate is annealed by progress, as in CleanRL
        after = jax.tree.map(partial(jnp.where, stopped), held, after)
    return Learner(*after, stopped, lr_scale), (jax.tree.map(lambda x: tried * x, metrics), tried.astype(jnp.float32))


def adapt_lr(target: float | Array, learning_rate: float | Array, scale: Array, approx_kl: Array) -> Array:
    """Return the scale of the learning rate for this gradient step, f32 [].

    It falls if the divergence exceeds twice its target, and rises if the divergence is below half of its target. The
    rate stays in LR_RANGE, which is extended to include the configured rate.
    """
    factor = jnp.where(approx_kl > 2 * target, 1 / LR_FACTOR, jnp.where(approx_kl < target / 2, LR_FACTOR, 1.0))
    low, high = (bound / learning_rate for bound in LR_RANGE)
    return jnp.clip(scale * factor, jnp.minimum(low, 1.0), jnp.maximum(high, 1.0))


def loss(context: Context, params: PyTree, batch: Batch) -> tuple[Array, Metrics]:
    """Return the loss of equation 9, a sum of weighted rows, and its terms.

    ratio r = pi(a|s) / pi_old(a|s);  policy loss = -min(r A, clip(r, 1 - eps, 1 + eps) A)  (equation 7),
    which is -A times r, or times the bound if r is beyond it in the direction that increases r A.
    """
    config = context.config
    (output, value), _ = context.network.unroll(params["network"], batch.obs, batch.carry, batch.reset)
    pi = context.head.make(output, params.get("log_std"), batch.action_mask)
    log_ratio = pi.log_prob(batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    bound = jnp.where(batch.advantage > 0, 1 + config.clip_coef, 1 - config.clip_coef)
    beyond = (ratio - bound) * batch.advantage > 0
    policy_loss = -jnp.where(beyond, bound, ratio) * batch.advantage
    error = (value - batch.target) ** 2
    if config.clip_vloss:
        near = batch.value + jnp.clip(value - batch.value, -config.clip_coef, config.clip_coef)
        error = jnp.maximum(error, (near - batch.target) ** 2)
    entropy = pi.entropy()
    total = policy_loss + config.value_coef * 0.5 * error - config.entropy_coef * entropy
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": 0.5 * error,
        "entropy": entropy,
        "approx_kl": ratio - 1 - log_ratio,  # Schulman 2020, "Approximating KL divergence", k3
        "clip_fraction": (jnp.abs(ratio - 1) > config.clip_coef).astype(jnp.float32),
    }
    weigh = lambda x: jnp.sum(batch.weight * x)
    return weigh(total), jax.tree.map(weigh, metrics)
