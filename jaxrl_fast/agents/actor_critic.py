"""Build agents with an actor and several critics that learn from a replay buffer: the parts of SAC and TD3."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import networks, replay
from jaxrl_fast.networks import views
from jaxrl_fast.networks.batch_renorm import RenormOptions, with_stats
from jaxrl_fast.networks.ensemble import critics
from jaxrl_fast.options.explore import Held, OrnsteinUhlenbeck
from jaxrl_fast.options.value import C51, TruncatedQuantile
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import action_noise, normalize, off_policy, optim, return_scale, value_distributions
from jaxrl_fast.rl.off_policy import ReplayRatio, State
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
    SampleNoise,
)

SUPPORTS = frozenset({"shards", "grad_workers"})
RETURN_BOUND = 5.0  # of returns with rewards scaled, if the value head has no bound


class Params(NamedTuple):
    """One value for each learned part: its parameters, its optimizer, or its learning rate."""

    actor: PyTree
    critic: PyTree  # parameters have a leading axis [num_critics]
    log_temperature: PyTree = None  # of SAC: f32 []


class Learner(NamedTuple):
    """The variables that a gradient step changes."""

    params: Params
    target_params: Params  # None for parts without a target
    optimizer: Params
    observations: PyTree = None  # normalize.Stats of each leaf of an observation
    batch_stats: PyTree = None  # running statistics of the critics' layers that normalize batches
    target_stats: PyTree = None  # the same of the target critics
    actor_stats: PyTree = None  # the same of the policy
    rewards: return_scale.ReturnScale | None = None  # with rewards scaled


class Context(NamedTuple):
    """The constants of an agent, which all its functions share."""

    config: Any
    spec: EnvSpec
    parallelism: Parallelism
    replay: replay.Replay
    ratio: ReplayRatio
    num_updates: int
    actor: networks.Network  # f32 [..., num_outputs] of an observation
    critic: networks.Network  # f32 [num_critics, ... (, M)] of (observation, action [..., D])
    value_head: value_distributions.ValueHead | value_distributions.CustomHead  # the meaning of the critics' outputs
    return_bound: float  # of returns, with rewards scaled
    learning_rate: Params  # an optax.Schedule for each part, over gradient steps of the critics
    optimizer: Params  # an optax.GradientTransformation for each part

    @property
    def action_size(self) -> int:
        """Return D, the numbers of an action."""
        return self.spec.action.num_outputs


def make_context(
    config: Any,
    spec: EnvSpec,
    num_updates: int,
    parallelism: Parallelism,
    outputs_per_number: int,
    transform_gradient: optax.GradientTransformation | None = None,
    of_discrete: Callable[..., networks.Network] | None = None,
) -> Context:
    """Return the constants of an agent. Its actor has `outputs_per_number` outputs for each number of an action.

    With `of_discrete`, actions are discrete, the actor has an output for each of them, and `of_discrete(obs, number of
    actions, number of critics, options)` makes the critics.

    Raises ValueError if options contradict each other or the environment.
    """
    is_discrete = of_discrete is not None
    size = spec.action.num_outputs if is_discrete else action_noise.action_size(spec, type(config).__name__.lower())
    normalize.check(config, spec)
    check(config, parallelism)
    bound = config.value.v_max if isinstance(config.value, C51) else RETURN_BOUND
    if config.rewards == "scaled" and not bound > 0:
        raise ValueError(f"value.v_max: must be positive with rewards scaled, got {bound}; use {RETURN_BOUND:g}")
    ratio = off_policy.schedule_of(config, spec, parallelism)
    buffer = replay.config_of(config.replay, spec, parallelism, ratio.rollout_length)
    num_gradient_steps = off_policy.num_gradient_steps(ratio, num_updates)
    rates = config.learning_rate, config.critic_learning_rate, config.learning_rate
    schedules = Params(*(optim.schedule_of(rate, config.schedule, num_gradient_steps) for rate in rates))
    of_policy = lambda steps: schedules.actor(config.policy_delay * steps)  # an optimizer counts its own steps
    optimizer = partial(optim.make_optimizer, options=config.optimizer, transform=transform_gradient)
    options = networks.options_of(config)
    of_critic = options._replace(
        hidden=config.critic_hidden_sizes or config.network.hidden_sizes,
        layer_norm=config.network.layer_norm or config.critic_layer_norm,
        batch_renorm=RenormOptions(config.target.momentum, config.target.warmup) if config.crossq else None,
        num_atoms=value_distributions.num_atoms(config.value),
    )
    of_actor, to_critic = views.views(config, spec.obs)
    return Context(
        config=config,
        spec=spec,
        parallelism=parallelism,
        replay=replay.make(buffer, spec, parallelism, replay.priority_exponent(config.replay)),
        ratio=ratio,
        num_updates=num_updates,
        actor=views.through(
            of_actor,
            networks.network(of_actor(spec.obs), (1 if is_discrete else outputs_per_number) * size, options),
        ),
        critic=views.through(
            to_critic, (of_discrete or critics)(to_critic(spec.obs), size, config.num_critics, of_critic), True
        ),
        value_head=value_distributions.head_of(config.value),
        return_bound=bound,
        learning_rate=schedules,
        optimizer=Params(
            optimizer(of_policy, prefix="actor/"), optimizer(schedules.critic, prefix="critic/"), optimizer(of_policy)
        ),
    )


def check(config: Any, parallelism: Parallelism) -> None:
    """Raise ValueError for options of the critics that contradict each other or the number of devices."""
    if isinstance(value := config.value, TruncatedQuantile) and value.drop >= value.atoms:
        problem = f"must be less than value.atoms ({value.atoms}), got {value.drop}"
        raise ValueError(f"value.drop: {problem}; use {max(value.atoms // 12, 1)}")
    num_devices = parallelism.num_shards * parallelism.num_grad_workers
    if config.normalizes_batches and num_devices > 1:
        option = "target: none" if config.crossq else "network: flash"
        raise ValueError(f"{option} normalizes a batch on one device, got {num_devices} devices; set devices to 1")


def theta_of(config: Any) -> float:
    """Return the rate at which the exploration noise forgets: 1 for independent noise."""
    theta: float = config.noise.theta if isinstance(config.noise, OrnsteinUhlenbeck) else 1.0
    return theta


def initial_noise(config: Any, size: int) -> PyTree:
    """Return the state of the exploration noise at the start of an episode."""
    if isinstance(config.noise, Held):
        return action_noise.held_carry(size)
    return action_noise.initial_carry(size, theta_of(config))


def next_noise(config: Any, carry: PyTree, normal: Array) -> tuple[Array, PyTree]:
    """Return the exploration noise [N, D], and its state for the step after."""
    if isinstance(config.noise, Held):
        return action_noise.hold(config.noise, carry, normal)
    return action_noise.correlated(theta_of(config), carry, normal)


def make_agent(context: Context, init: Callable, policy: Callable, explore: Callable, gradient_step: Callable) -> Agent:
    """Return an agent.

    `init(context, key)` is the Learner, `policy(context, params, obs)` the greedy action [N, D], `explore(context,
    params, obs, noise)` another action from noise [N, D], and `gradient_step` an `off_policy.Step` after the context.
    """
    size, is_held = context.action_size, isinstance(context.config.noise, Held)
    return Agent(
        init=partial(_init, context, init),
        explore=partial(_explore, context, explore),
        exploit=partial(_exploit, context, policy),
        update=partial(update, context, gradient_step),
        rollout_length=context.ratio.rollout_length,
        sample_noise=SampleNoise(partial(action_noise.sample_noise, size + is_held), ("normal",)),
        initial_carry=initial_noise(context.config, size),
        policy_state=lambda state: state._replace(replay=None),
        parameters=lambda state: (state.learner.params, state.learner.target_params),
        learning=Learning(
            on_env_restart=partial(on_env_restart, context),
            resources=context.replay.resources,
        ),
    )


def _init(context: Context, init: Callable, key: Key) -> State:
    """Return the state before the first update, with empty statistics."""
    config = context.config
    of_critics = context.critic.init_stats()
    learner = init(context, key)._replace(
        observations=normalize.init(context.spec.obs) if config.normalize_observations else None,
        batch_stats=of_critics,
        target_stats=None if config.crossq else of_critics,
        actor_stats=context.actor.init_stats(),
        rewards=return_scale.init(context.spec.num_envs) if config.rewards == "scaled" else None,
    )
    return off_policy.init_state(learner, context.replay.init())


def on_env_restart(context: Context, state: State) -> State:
    """Discard the transitions that an environment restart interrupts, and the reward sums of their episodes."""
    learner = state.learner
    if learner.rewards is not None:
        learner = learner._replace(rewards=return_scale.restart(learner.rewards))
    return state._replace(learner=learner, replay=context.replay.discard_tail(state.replay))


def acting(learner: Learner) -> Params:
    """Return the parameters with which the policy acts: with the running statistics of its layers, if any."""
    return learner.params._replace(actor=with_stats(learner.params.actor, learner.actor_stats))


def _exploit(
    context: Context, policy: Callable, state: State, inputs: PolicyInput, carry: PyTree, noise: action_noise.Noise
) -> Decision:
    """Take the greedy actions. The carry is the state of the exploration noise and does not change."""
    learner = state.learner
    return Decision(policy(context, acting(learner), normalize.apply(learner.observations, inputs.obs)), carry)


def _explore(
    context: Context, explore: Callable, state: State, inputs: PolicyInput, carry: PyTree, noise: action_noise.Noise
) -> Decision:
    """Take uniformly random actions until the first gradient step, then the algorithm's exploring actions."""
    now = off_policy.num_env_steps(context.ratio, state) + noise.step * context.ratio.num_envs
    x, carry = next_noise(context.config, carry, noise.normal)
    obs = normalize.apply(state.learner.observations, inputs.obs)
    chosen = explore(context, acting(state.learner), obs, x)
    anything = action_noise.uniform(noise.normal[..., : context.action_size])
    return Decision(jnp.where(now < context.ratio.first_learning, anything, chosen), carry)


def init_params(context: Context, key: Key) -> Params:
    """Return fresh parameters of the actor and of each critic."""
    key_actor, key_critic = jax.random.split(key)
    return Params(context.actor.init(key_actor), context.critic.init(key_critic))


def init_optimizer(context: Context, params: Params) -> Params:
    """Return the optimizers before the first step; None for parts without parameters."""
    both = zip(context.optimizer, params, strict=True)
    return Params(*(rule.init(part) if jax.tree.leaves(part) else None for rule, part in both))


def update(
    context: Context, gradient_step: Callable, state: State, rollout: Rollout, key: Key
) -> tuple[State, Metrics]:
    """Add the rollout to the statistics and to the replay buffer, then make the gradient steps that are due."""
    steps = normalize.clip_rewards(rollout, context.config.clips_rewards).steps
    stats = state.learner.observations
    if stats is not None:
        stats = normalize.update(stats, steps.obs, steps.valid, context.parallelism.axis_name)
    rewards = state.learner.rewards
    if rewards is not None:
        rewards = return_scale.update(rewards, steps, context.config.gamma, context.parallelism.axis_name)
    learner = state.learner._replace(observations=stats, rewards=rewards)
    state = state._replace(learner=learner, replay=context.replay.add(state.replay, steps))
    state, metrics = off_policy.learn(context, partial(gradient_step, context), state, key)
    return state, {
        **metrics,
        "learning_rate": context.learning_rate.actor(state.learner.optimizer.critic[-1].count),
        "replay_size": context.replay.size(state.replay) * context.ratio.num_envs,
    }


def temperature(context: Context, params: Params) -> Array:
    """Return the weight of the entropy, f32 []."""
    if context.config.learn_temperature:
        return jnp.exp(params.log_temperature)
    return jnp.asarray(context.config.temperature, jnp.float32)


def sample(context: Context, learner: Learner, buffer: PyTree, key: Key, num_updates: Array) -> replay.WeightedBatch:
    """Return this device's transitions [B], with their weights in the loss, as `normalized` returns them."""
    return normalized(context, learner, sample_stored(context, buffer, key, num_updates))


def sample_stored(context: Context, buffer: PyTree, key: Key, num_updates: Array) -> replay.WeightedBatch:
    """Return this device's transitions [B] with observations and rewards as they are."""
    config = context.config
    beta = replay.importance_exponent(config.replay, context.num_updates, num_updates)
    return context.replay.sample(buffer, key, config.batch_size, config.gamma, beta)


def normalized(context: Context, learner: Learner, batch: replay.WeightedBatch) -> replay.WeightedBatch:
    """Return transitions with observations normalized, and rewards scaled, by the current statistics."""
    stats = learner.observations
    obs, next_obs = (normalize.apply(stats, x) for x in (batch.rows.obs, batch.rows.next_obs))
    rows = batch.rows._replace(obs=obs, next_obs=next_obs)
    if learner.rewards is not None:
        rows = rows._replace(reward=return_scale.apply(learner.rewards, rows.reward, context.return_bound))
    return batch._replace(rows=rows)


def sample_normal(context: Context, key: Key, num: int) -> Array:
    """Return standard normal numbers for actions of this device's rows, f32 [num, B, D]."""
    num_rows = context.config.batch_size // context.parallelism.num_shards
    noise = jax.random.normal(key, (num, num_rows, context.action_size))
    return collectives.local_rows(noise, context.parallelism.num_grad_workers, axis=1)


def apply_gradient(context: Context, learner: Learner, gradient: Params) -> Learner:
    """Return the learner after one optimizer step of each part that has a gradient; None means no gradient.

    After its step, a part satisfies the constraint of its network.
    """
    constraints = context.actor.constrain, context.critic.constrain, lambda x: x
    params, optimizer = list(learner.params), list(learner.optimizer)
    for i, (rule, g) in enumerate(zip(context.optimizer, gradient, strict=True)):
        if jax.tree.leaves(g):
            updates, optimizer[i] = rule.update(g, optimizer[i], params[i])
            params[i] = constraints[i](optax.apply_updates(params[i], updates))
    return learner._replace(params=Params(*params), optimizer=Params(*optimizer))
