"""DQN: deep Q-learning from a replay buffer (Mnih et al. 2015), with the parts of Rainbow and Munchausen as switches.

Every kind of value is a distribution, and every target is a set of weighted atoms (`rl.value_distributions`). So the
switches combine freely. `rl.off_policy` counts gradient steps and target updates exactly.

Deviations from Rainbow: epsilon-greedy actions unless the epsilons are 0; noise is drawn for each environment in
acting, and once per batch in learning.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import networks, replay
from jaxrl_fast.agents.configs.common import as_fraction, rollout_length
from jaxrl_fast.agents.configs.dqn import DQN as Config
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import distributions, exploration, normalize, off_policy, optim, value_distributions
from jaxrl_fast.rl.off_policy import ReplayRatio, State
from jaxrl_fast.types import Agent, Array, Decision, EnvSpec, Key, Metrics, Parallelism, PolicyInput, PyTree, Rollout

SUPPORTS = frozenset({"shards", "grad_workers"})


class Learner(NamedTuple):
    """The variables that a gradient step changes, without the priorities."""

    params: PyTree
    target_params: PyTree
    optimizer: PyTree


class Noise(NamedTuple):
    """The random numbers for T decisions."""

    explore: exploration.Noise
    network: PyTree  # [T, N, K] of each noisy layer, or ()


class Context(NamedTuple):
    """The constants of an agent, which all functions of this module share."""

    config: Config
    spec: EnvSpec
    parallelism: Parallelism
    replay: replay.Replay
    ratio: ReplayRatio
    num_updates: int
    network: networks.Network
    value_head: value_distributions.ValueHead
    epsilon: exploration.Epsilon
    learning_rate: optax.Schedule
    optimizer: optax.GradientTransformation

    @property
    def num_envs(self) -> int:
        """Return the number of environments on all shards."""
        return self.spec.num_envs * self.parallelism.num_shards


def make(config: Config, spec: EnvSpec, num_updates: int, parallelism: Parallelism = Parallelism()) -> Agent:
    """Return DQN for environments of this spec, with schedules over `num_updates` updates.

    Raises ValueError if options contradict each other or the environment.
    """
    num_envs = spec.num_envs * parallelism.num_shards
    num_steps = rollout_length(config, num_envs)
    ratio = ReplayRatio(config.ratio, config.first_learning(num_envs), num_steps * num_envs)
    check(config, spec, parallelism, num_steps, ratio)
    num_rows = config.buffer_size // ratio.steps_per_update * num_steps
    buffer = replay.ReplayConfig(num_rows, spec.num_envs, config.n_step, spec.frame_stack)
    buffer = replay.stored(buffer, spec, parallelism, config.replay_storage, config.replay_compression)
    network = networks.network(
        spec.obs,
        exploration.num_actions(spec, "dqn"),
        num_atoms=None if config.value_head == "none" else config.num_atoms,
        dueling=config.dueling,
        noisy=config.noisy,
        layer_norm=config.layer_norm,
        **networks.options_of(config),
    )
    num_gradient_steps = off_policy.num_gradient_steps(ratio, num_updates)
    learning_rate = optim.linear_schedule(config.learning_rate, config.anneal_lr, num_gradient_steps)
    context = Context(
        config=config,
        spec=spec,
        parallelism=parallelism,
        replay=replay.make(buffer, spec, parallelism, config.priority_exponent if config.prioritized else None),
        ratio=ratio,
        num_updates=num_updates,
        network=network,
        value_head=value_distributions.ValueHead(config.value_head, config.num_atoms, config.v_min, config.v_max),
        epsilon=exploration.Epsilon(config.epsilon_start, config.epsilon_end, config.epsilon_steps, config.apex_alpha),
        learning_rate=learning_rate,
        optimizer=optim.make_optimizer(learning_rate, epsilon=config.adam_epsilon, max_grad_norm=config.max_grad_norm),
    )
    return Agent(
        init=partial(init, context),
        explore=partial(explore, context),
        exploit=partial(exploit, context),
        update=partial(update, context),
        sample_noise=partial(sample_noise, context),
        rollout_length=num_steps,
        policy_state=lambda state: state._replace(replay=()),
        on_env_restart=lambda state: state._replace(replay=context.replay.discard_tail(state.replay)),
        resources=context.replay.resources,
    )


def check(config: Config, spec: EnvSpec, parallelism: Parallelism, rollout_length: int, ratio: ReplayRatio) -> None:
    """Raise ValueError if shapes or counts do not fit. Other numbers may be traced, and the host checks them."""
    off_policy.check_sizes(config, spec, parallelism, rollout_length, ratio)
    if config.value_head != "none" and config.num_atoms < 2:
        raise ValueError(f"num_atoms: a distribution requires 2 or more, got {config.num_atoms}; try 51")
    if config.value_head == "c51" and not config.v_min < config.v_max:
        raise ValueError(f"v_min: must be less than v_max ({config.v_max}), got {config.v_min}; lower v_min")
    off_policy.check(ratio, config.target_update_interval, as_fraction)


def init(context: Context, key: Key) -> State:
    """Return fresh parameters, target parameters equal to them, and an empty replay buffer."""
    params = context.network.init(key)
    return off_policy.init_state(Learner(params, params, context.optimizer.init(params)), context.replay.init())


def sample_noise(context: Context, key: Key, num_steps: int, num_envs: int) -> Noise:
    """Return uniform numbers for epsilon-greedy decisions, and normal ones for each noisy layer and environment."""
    key_explore, key_network = jax.random.split(key)
    return Noise(
        exploration.sample_noise(key_explore, num_steps, num_envs),
        context.network.noise(key_network, (num_steps, num_envs)),
    )


def explore(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: Noise) -> Decision:
    """Act epsilon-greedily, with random numbers and an epsilon for each environment."""
    value = action_values(context, state.learner.params, inputs, noise.network)
    now = off_policy.num_env_steps(context.ratio, state) + noise.explore.step * context.num_envs
    epsilon = exploration.epsilons(context.epsilon, context.spec.num_envs, now, context.parallelism)
    policy = distributions.EpsilonGreedy(value, epsilon, inputs.action_mask)
    return Decision(policy.sample_from(noise.explore.uniform))


def exploit(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: Noise) -> Decision:
    """Take the action of the highest value, without noise."""
    value = action_values(context, state.learner.params, inputs)
    return Decision(distributions.EpsilonGreedy(value, 0.0).mode())


def action_values(context: Context, params: PyTree, inputs: PolicyInput, noise: PyTree = ()) -> Array:
    """Return the mean values of all actions, f32 [..., A], FORBIDDEN where masked."""
    value = value_distributions.mean(context.value_head, context.network.apply(params, inputs.obs, noise))
    return distributions.masked(value, inputs.action_mask)


def update(context: Context, state: State, rollout: Rollout, key: Key) -> tuple[State, Metrics]:
    """Add the rollout to the replay buffer, then make the gradient steps that are due."""
    rollout = normalize.clip_rewards(rollout, context.config.clip_rewards)
    buffer = context.replay.add(state.replay, rollout.steps)
    state, metrics = off_policy.learn(
        context.ratio,
        context.parallelism,
        partial(gradient_step, context),
        state._replace(replay=buffer),
        context.replay.update_priorities is not None,
        key,
        context.replay.read_ahead and partial(context.replay.read_ahead, batch_size=context.config.batch_size),
    )
    now = off_policy.num_env_steps(context.ratio, state)
    return state, {
        **metrics,
        "epsilon": exploration.mean(context.epsilon, context.spec.num_envs, now, context.parallelism),
        "learning_rate": context.learning_rate(state.learner.optimizer[-1].count),
        "replay_size": context.replay.size(state.replay) * context.num_envs,
    }


def gradient_step(
    context: Context, buffer: PyTree, num_updates: Array, keys: Key, learner: Learner, counts: off_policy.Counts
) -> tuple[Learner, PyTree, off_policy.Counts, Metrics]:
    """Make one gradient step on a batch from the replay buffer, with keys [2]; then update the target if it is due.

    Metrics are those of this device's rows, [B].
    """
    config, parallelism = context.config, context.parallelism
    key_draw, key_noise = keys
    beta = importance_exponent(context, num_updates)
    batch, weight, index = context.replay.sample(buffer, key_draw, config.batch_size, config.gamma, beta)
    noise_online, noise_target = (context.network.noise(key, ()) for key in jax.random.split(key_noise))
    target = td_target(context, learner, batch, noise_online, noise_target)
    gradient, (errors, metrics) = jax.grad(partial(loss, context), has_aux=True)(
        learner.params, batch, target, weight / config.batch_size, noise_online
    )
    workers = parallelism.num_grad_workers if context.replay.update_priorities else 1
    whole = collectives.scatter_rows(errors, workers) if workers > 1 else ()
    gradient, whole = collectives.all_reduce_sum((gradient, whole), parallelism.grad_axis)
    updates, optimizer = context.optimizer.update(gradient, learner.optimizer, learner.params)
    params = optax.apply_updates(learner.params, updates)
    if context.replay.update_priorities:
        buffer = context.replay.update_priorities(buffer, index, whole if workers > 1 else errors)
    target_params, counts = off_policy.update_target(
        context.ratio, config.target_update_interval, config.tau, params, learner.target_params, counts
    )
    return Learner(params, target_params, optimizer), buffer, counts, metrics


def importance_exponent(context: Context, num_updates: Array) -> Array:
    """Return the exponent of importance weights, f32: it rises from config.importance_exponent to 1 over the run."""
    return optax.linear_schedule(context.config.importance_exponent, 1.0, context.num_updates)(num_updates)


def td_target(
    context: Context, learner: Learner, batch: replay.Sample, noise_online: PyTree, noise_target: PyTree
) -> value_distributions.Atoms:
    """Return the target of the value of (obs, action), as weighted atoms [B, K].

    q are the online values, q' those of the target parameters, g is the discount.

    mean         r + g q'(s', a*), where a* is greedy for q', or with `double` for q (van Hasselt et al. 2016, eq. 4)
    munchausen   r + alpha max(clip, tau log pi(a|s)) + g sum_a' pi(a'|s') (q'(s', a') - tau log pi(a'|s')), with
                 pi = softmax(q' / tau) (Vieillard et al. 2020, eq. 1); with `double`, pi(.|s') is that of q.
                 In an n-step target, only the first step has the term with alpha.
    """
    config, head = context.config, context.value_head
    apply = context.network.apply
    following = apply(learner.target_params, batch.next_obs, noise_target)
    chooser = apply(learner.params, batch.next_obs, noise_online) if config.double else following
    reward = batch.reward
    value = distributions.masked(value_distributions.mean(head, chooser), batch.next_action_mask)
    if config.munchausen:
        temperature = config.munchausen_temperature
        now = value_distributions.mean(head, apply(learner.target_params, batch.obs, noise_target))
        now = jax.nn.log_softmax(distributions.masked(now, batch.action_mask) / temperature)
        log_prob = temperature * distributions.chosen(now, batch.action)
        reward += config.munchausen_alpha * jnp.clip(log_prob, config.munchausen_clip, 0)
        log_policy = jax.nn.log_softmax(value / temperature)[..., None]
        atom, weight = value_distributions.from_outputs(head, following)  # [B, A, K]
        atom, weight = atom - temperature * log_policy, weight * jnp.exp(log_policy)
        atom, weight = (x.reshape(x.shape[0], -1) for x in (atom, weight))
    else:
        greedy = distributions.chosen(following, jnp.argmax(value, axis=-1))
        atom, weight = value_distributions.from_outputs(head, greedy)
    return value_distributions.Atoms(reward[:, None] + batch.discount[:, None] * atom, weight)


def loss(
    context: Context,
    params: PyTree,
    batch: replay.Sample,
    target: value_distributions.Atoms,
    weight: Array,
    noise: PyTree,
) -> tuple[Array, tuple[Array, Metrics]]:
    """Return the weighted sum of the rows' losses, their errors for priorities [B], and weighted metrics [B]."""
    output = context.network.apply(params, batch.obs, noise)
    value = distributions.chosen(value_distributions.mean(context.value_head, output), batch.action)
    td_error = target.mean - value
    chosen = distributions.chosen(output, batch.action)  # [B] or [B, K]
    huber = context.config.loss == "huber"
    losses, errors = value_distributions.losses(context.value_head, chosen, target, td_error, huber)
    metrics = {"weight": jnp.float32(1), "td_loss": losses, "q_value": value, "td_error_abs": jnp.abs(td_error)}
    return (weight * losses).sum(), (errors, jax.tree.map(lambda x: weight * x, metrics))
