"""PPO: proximal policy optimization with a clipped loss (Schulman et al. 2017), for discrete and continuous actions.

Deviations from the paper, all common: advantages are standardized in each minibatch, the value loss is also clipped,
and the learning rate decays linearly. Rows whose action was ignored (resets) are excluded from losses and statistics.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast.networks import flat
from jaxrl_fast.options.optimizer import AdaptiveKL
from jaxrl_fast.options.ppo import PPO as Config
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import bonuses, minibatch, normalize, optim, policies, returns, sequences, sgd, value_distributions
from jaxrl_fast.rl.frame_stack import Frames, compressor, decode, encode_rollout, map_rollout
from jaxrl_fast.types import (
    Agent,
    Array,
    Decision,
    EnvSpec,
    Key,
    Learning,
    Metrics,
    Parallelism,
    PolicyInput,
    PyTree,
    Rollout,
)

SUPPORTS = frozenset({"shards", "grad_workers", "sequential_seeds"})


class State(NamedTuple):
    """The whole state of PPO."""

    params: PyTree
    optimizer: PyTree
    observations: PyTree  # normalize.Stats of each leaf of an observation, or None
    rewards: normalize.RewardScale | None
    lr_scale: Array | None = None  # f32 [], of the learning rate with schedule kl
    bonus: PyTree = None  # what the bonus keeps, but for its learned parameters


class Batch(NamedTuple):
    """The rows that the loss is computed from, [B, ...]; with a memory, sequences [B, L, ...]."""

    obs: PyTree  # the network's input, or numbers of stacks (`frame_stack`) before a gradient step
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
    bonus: PyTree = None  # rows of the bonus


class Learner(NamedTuple):
    """The variables that a gradient step changes."""

    params: PyTree
    optimizer: PyTree
    stopped: Array  # bool: the KL divergence exceeds its limit, and no further step is applied
    lr_scale: Array | None = None


class Context(NamedTuple):
    """The constants of an agent, which all functions of this module share."""

    config: Config
    spec: EnvSpec
    parallelism: Parallelism
    policy: policies.Policy
    value_head: value_distributions.ValueHead
    learning_rate: optax.Schedule
    optimizer: optax.GradientTransformation
    objective: Callable[["Context", PyTree, Batch], tuple[Array, Metrics]]
    bonus: bonuses.Bonus | None = None

    @property
    def frame_stack(self) -> int:
        """Return the frames of an observation, of which only the newest is stored; 0 if all are stored."""
        return 0 if self.config.normalize_observations else self.spec.frame_stack


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
    policy = policies.make(config, spec)
    num_steps = num_updates * config.num_epochs * config.num_minibatches
    learning_rate = optim.schedule_of(config.learning_rate, config.schedule, num_steps)
    optimizer = optim.make_optimizer(learning_rate, config.optimizer)
    value_head = value_distributions.head_of(config.value)
    assert isinstance(value_head, value_distributions.ValueHead), "options allow no custom value head here"
    bonus = bonuses.make(config, spec, policy, num_updates, parallelism)
    objective = bonuses.with_loss(bonus, objective or loss)
    context = Context(config, spec, parallelism, policy, value_head, learning_rate, optimizer, objective, bonus)
    functions = partial(prepare, context), partial(gradient_step, context), partial(finalize, context)
    epochs = sgd.epochs_of(config, parallelism, functions, "advantage" if config.normalize_advantage else "")
    return Agent(
        init=partial(init, context),
        explore=partial(explore, context),
        exploit=partial(exploit, context),
        update=partial(sgd.update, epochs),
        sample_noise=policy.head.sample_noise,
        rollout_length=config.rollout_length,
        initial_carry=policy.initial_carry,
        policy_state=bonuses.without,
        parameters=lambda state: state.params,
        learning=Learning(
            compress_obs=compressor(context.frame_stack),
            on_env_restart=on_env_restart,
            gradient_steps=sgd.incremental_update(epochs),
        ),
    )


def check(config: Config, spec: EnvSpec, parallelism: Parallelism) -> None:
    """Raise ValueError if shapes do not fit. Other numbers may be traced, and the host checks them."""
    normalize.check(config, spec)
    sequences.validate(config, spec, parallelism.num_shards)
    num_rows = config.rollout_length * spec.num_envs * parallelism.num_shards
    if config.normalize_advantage and num_rows == config.num_minibatches:
        remedy = "use fewer minibatches" if config.num_minibatches > 1 else "use a longer rollout"
        raise ValueError(
            f"num_minibatches: a minibatch must have 2 rows or more with normalize_advantage, got "
            f"{config.num_minibatches} minibatches of {num_rows} rows; {remedy}"
        )


def init(context: Context, key: Key) -> State:
    """Return fresh parameters and empty statistics."""
    params = policies.init(context.policy, key, context.config.policy.log_std_init)
    params, bonus = bonuses.init(context.bonus, params, key)
    return State(
        params=params,
        optimizer=context.optimizer.init(params),
        observations=normalize.init(context.spec.obs) if context.config.normalize_observations else None,
        rewards=normalize.init_reward(context.spec.num_envs) if context.config.rewards == "normalized" else None,
        lr_scale=jnp.float32(1) if isinstance(context.config.schedule, AdaptiveKL) else None,
        bonus=bonus,
    )


def on_env_restart(state: State) -> State:
    """Reset the reward sums of episodes that an environment restart interrupts."""
    scale = state.rewards and state.rewards._replace(total=jnp.zeros_like(state.rewards.total))
    return state._replace(rewards=scale)


def explore(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
    """Sample an action from the policy."""
    return policies.sample(context.policy, state.params, normalized(state, inputs), carry, noise)


def exploit(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
    """Take the mode of the policy."""
    return policies.mode(context.policy, state.params, normalized(state, inputs), carry)


def normalized(state: State, inputs: PolicyInput) -> PolicyInput:
    """Return the input of the policy with its observation normalized, if there are statistics."""
    return inputs._replace(obs=normalize.apply(state.observations, inputs.obs))


def prepare(context: Context, state: State, rollout: Rollout) -> sgd.UpdateBatch:
    """Compute advantages and targets of one rollout (algorithm 1).

    Observations are normalized by statistics from before it.
    """
    config = context.config
    rollout = normalize.clip_rewards(rollout, config.clips_rewards)
    rollout = rollout._replace(carry=rollout.carry[0] if context.policy.gsde else rollout.carry)  # of the memory
    steps, axis_name = rollout.steps, context.parallelism.axis_name
    rewards, reward = normalize.scale_rewards(state.rewards, steps, config.gamma, axis_name)
    obs_moments, given = normalize.seen(state.observations, steps.obs, steps.valid), rollout
    rollout = rollout._replace(steps=steps._replace(obs=normalize.apply(state.observations, steps.obs)))
    obs, kept = encode_rollout(context.frame_stack, rollout)
    value, next_value, carry = values(context, state, rollout, obs, kept)
    discount = config.gamma * steps.discount
    advantage = returns.gae(reward, discount, value, next_value, steps.last, config.gae_lambda)
    target = advantage + value
    weight = steps.valid.astype(jnp.float32)
    pi, sample = policies.samples_of(steps)
    log_prob = pi.log_prob(sample)
    added = bonuses.prepare(context.bonus, state, given, advantage)
    rows = Batch(obs, sample, pi, log_prob, value, added.advantage, target, weight, steps.action_mask, bonus=added.rows)
    rows = minibatch.flatten(rows._replace(reset=~steps.valid if config.has_memory else None), config.sequence())
    learner = Learner(state.params, state.optimizer, jnp.bool_(False), state.lr_scale)
    after = state._replace(rewards=rewards, bonus=added.state)
    moments = normalize.moments(jnp.stack([target, advantage]), weight, axis=(1, 2)), obs_moments, added.moments
    return sgd.UpdateBatch(learner, rows._replace(carry=carry), kept, after, moments, added.metrics)


def values(
    context: Context, state: State, rollout: Rollout, obs: PyTree, kept: Frames | None
) -> tuple[Array, Array, PyTree]:
    """Return the values of each step and of its successor, f32 [T, N], computed in bulk after acting.

    `obs` [T, N, ...] are the observations of the steps, or the numbers of their stacks in `kept`. Also returns the
    carry before each sequence.
    """
    network, params = context.policy.network, state.params["network"]
    mean = partial(value_distributions.mean, context.value_head)
    next_obs = normalize.apply(state.observations, rollout.next_obs)
    if length := context.config.sequence():
        unroll = partial(network.unroll, params)
        (_, value), carry = sequences.recompute(unroll, rollout, obs, next_obs, partial(decode, kept), length)
        value = mean(value)
        return value[:-1], value[1:], carry
    critic = lambda obs: mean(network.critic(params, obs))
    value = map_rollout(critic, obs, kept, context.config.num_minibatches)
    return value, jnp.concatenate([value[1:], critic(next_obs)[None]]), ()


def finalize(
    context: Context, batch: sgd.UpdateBatch, learner: Learner, sums: tuple[Metrics, Array], pooled: PyTree
) -> tuple[State, Metrics]:
    """Return the state after the update, and metrics: means over gradient steps, up to the first beyond the KL limit.

    `pooled` are the moments of all shards.
    """
    (metrics, tried), (moments, obs_moments, of_bonus) = sums, pooled
    means = jax.tree.map(lambda x: x / jnp.maximum(tried, 1), metrics)
    means = collectives.all_reduce_sum(means, context.parallelism.grad_axis)
    params, optimizer, _, lr_scale = learner
    learning_rate = context.learning_rate(optimizer[-1].count) * (1 if lr_scale is None else lr_scale)
    observations = normalize.merge(batch.state.observations, obs_moments)
    state = State(params, optimizer, observations, batch.state.rewards, lr_scale, batch.state.bonus)
    own = {"explained_variance": normalize.explained_variance(moments), "learning_rate": learning_rate}
    return state, means | own | batch.metrics | bonuses.summarize(context.bonus, of_bonus)


def gradient_step(context: Context, learner: Learner, batch: Batch) -> tuple[Learner, tuple[Metrics, Array]]:
    """Make one gradient step. Once the KL divergence exceeds its limit, this and later steps are discarded.

    The first discarded step still changes an adaptive learning rate: its divergence shows that the rate is too high.
    """
    config, schedule = context.config, context.config.schedule
    params, optimizer, stopped, lr_scale = learner
    tried = ~stopped
    objective = lambda params, batch: context.objective(context, flat.unpack(params), batch)
    gradient_of = jax.grad(objective, has_aux=True)
    gradient, metrics = minibatch.accumulate_grads(gradient_of, params, batch)
    approx_kl = metrics["approx_kl"] if config.target_kl is not None or isinstance(schedule, AdaptiveKL) else None
    gradient, approx_kl = collectives.all_reduce_sum((gradient, approx_kl), context.parallelism.grad_axis)
    updates, next_optimizer = context.optimizer.update(gradient, optimizer, params)
    if isinstance(schedule, AdaptiveKL) and lr_scale is not None:
        num_steps = config.num_epochs * config.num_minibatches
        has_moved = optimizer[-1].count % num_steps > 0  # before the first step of an update, the KL is rounding only
        adapted = optim.adapt_lr(schedule, config.learning_rate, lr_scale, approx_kl)
        lr_scale = jnp.where(tried & has_moved, adapted, lr_scale)
        updates = jax.tree.map(lambda x: lr_scale * x, updates)
    after = optax.apply_updates(params, updates), next_optimizer
    if config.target_kl is not None:
        stopped |= approx_kl > 1.5 * config.target_kl
        before = params, (*optimizer[:-1], next_optimizer[-1])  # the rate is annealed by progress, as in CleanRL
        after = jax.tree.map(partial(jnp.where, stopped), before, after)
    return Learner(*after, stopped, lr_scale), (jax.tree.map(lambda x: tried * x, metrics), tried.astype(jnp.float32))


def loss(context: Context, params: PyTree, batch: Batch) -> tuple[Array, Metrics]:
    """Return the loss of equation 9, a sum of weighted rows, and its terms.

    ratio r = pi(a|s) / pi_old(a|s);  policy loss = -min(r A, clip(r, 1 - eps, 1 + eps) A)  (equation 7),
    which is -A times r, or times the bound if r is beyond it in the direction that increases r A.
    """
    config = context.config
    pi, output = policies.outputs(context.policy, params, batch)
    log_ratio = pi.log_prob(batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    bound = jnp.where(batch.advantage > 0, 1 + config.clip_coef, 1 - config.clip_coef)
    beyond = (ratio - bound) * batch.advantage > 0
    policy_loss = -jnp.where(beyond, bound, ratio) * batch.advantage
    value_loss = value_distributions.loss_of_states(
        config.value, context.value_head, config.clip_coef, output, batch.target, batch.value
    )
    entropy = pi.entropy()
    total = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": ratio - 1 - log_ratio,  # Schulman 2020, "Approximating KL divergence", k3
        "clip_fraction": (jnp.abs(ratio - 1) > config.clip_coef).astype(jnp.float32),
    }
    return sgd.weighted_sums(batch.weight, total, metrics)
