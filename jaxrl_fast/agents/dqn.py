"""DQN: deep Q-learning from a replay buffer (Mnih et al. 2015), with the parts of Rainbow and Munchausen as options.

Every kind of value is a distribution, and every target is a set of weighted atoms (`rl.value_distributions`). So these
options combine freely. `rl.off_policy` counts gradient steps and target updates exactly.

Deviations from Rainbow: epsilon-greedy actions unless the epsilons are 0; noise is drawn for each environment in
acting, and once per batch in learning.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import networks, replay
from jaxrl_fast.options.algorithm import as_fraction
from jaxrl_fast.options.dqn import DQN as Config
from jaxrl_fast.options.memory import OfReplay
from jaxrl_fast.options.value import Munchausen, RescaledMean
from jaxrl_fast.parallel import collectives
from jaxrl_fast.replay import sequences as replay_sequences
from jaxrl_fast.rl import (
    distributions,
    exploration,
    normalize,
    off_policy,
    optim,
    returns,
    sequences,
    value_distributions,
)
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
)

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
    value_head: value_distributions.ValueHead | value_distributions.CustomHead
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
    num_steps = config.length(num_envs)
    ratio = ReplayRatio(config.ratio, config.first_learning(num_envs), num_steps * num_envs)
    check(config, spec, parallelism, num_steps, ratio)
    num_rows = config.replay.size // ratio.steps_per_update * num_steps
    network = networks.network(
        spec.obs,
        exploration.num_actions(spec, "dqn"),
        num_atoms=value_distributions.num_atoms(config.value),
        dueling=config.dueling,
        noisy=config.noisy,
        **networks.options_of(config),
        **networks.memory_of(config),
    )
    num_gradient_steps = off_policy.num_gradient_steps(ratio, num_updates)
    learning_rate = optim.schedule_of(config.learning_rate, config.schedule, num_gradient_steps)
    context = Context(
        config=config,
        spec=spec,
        parallelism=parallelism,
        replay=make_replay(config, spec, parallelism, num_rows, num_steps, network.initial_carry),
        ratio=ratio,
        num_updates=num_updates,
        network=network,
        value_head=value_distributions.head_of(config.value),
        learning_rate=learning_rate,
        optimizer=optim.make_optimizer(learning_rate, config.optimizer),
    )
    return Agent(
        init=partial(init, context),
        explore=partial(explore, context),
        exploit=partial(exploit, context),
        update=partial(update, context),
        sample_noise=partial(sample_noise, context),
        rollout_length=num_steps,
        initial_carry=network.initial_carry,
        policy_state=lambda state: state._replace(replay=None),
        parameters=lambda state: (state.learner.params, state.learner.target_params),
        learning=Learning(
            on_env_restart=lambda state: state._replace(replay=context.replay.discard_tail(state.replay)),
            resources=context.replay.resources,
        ),
    )


def make_replay(
    config: Config, spec: EnvSpec, parallelism: Parallelism, num_rows: int, rollout_length: int, initial_carry: PyTree
) -> replay.Replay:
    """Return a replay buffer of transitions, or of sequences for an agent with memory."""
    period = config.sequence_period(rollout_length)
    sizes = num_rows // period * period, spec.num_envs, config.replay.n_step, spec.frame_stack
    buffer = replay.ReplayConfig(*sizes)
    buffer = replay.stored(buffer, spec, parallelism, config.replay.storage, config.replay.compression)
    exponent = replay.priority_exponent(config.replay)
    if not isinstance(config.memory, OfReplay):
        return replay.make(buffer, spec, parallelism, exponent)
    memory = config.memory
    of_sequences = replay_sequences.SequenceConfig(buffer, memory.sequence_length, memory.burn_in, period)
    return replay_sequences.make(of_sequences, spec, initial_carry, parallelism, exponent)


def check(config: Config, spec: EnvSpec, parallelism: Parallelism, rollout_length: int, ratio: ReplayRatio) -> None:
    """Raise ValueError if shapes or counts do not fit. Other numbers may be traced, and the host checks them."""
    off_policy.check_sizes(config, spec, parallelism, rollout_length, ratio)
    check_sequences(config, spec, parallelism, rollout_length)
    if rescales(config) and isinstance(config.bonus, Munchausen):
        raise ValueError("value.rescaling: cannot be combined with bonus munchausen, got both; switch one off")
    off_policy.check(ratio, config.target.interval, as_fraction)


def check_sequences(config: Config, spec: EnvSpec, parallelism: Parallelism, rollout_length: int) -> None:
    """Raise ValueError if the sequences of an agent with memory do not fit the buffer."""
    if not isinstance(config.memory, OfReplay):
        return
    length, burn_in = config.memory.sequence_length, config.memory.burn_in
    num_envs = spec.num_envs * parallelism.num_shards
    if burn_in >= length:
        raise ValueError(
            f"memory.burn_in: must be less than the {length} steps of a sequence, got {burn_in}; use {length // 4}"
        )
    if rollout_length > length - burn_in:
        raise ValueError(
            f"rollout_length: must be at most the {length - burn_in} steps of a sequence after its burn_in, got "
            f"{rollout_length}; use {length - burn_in}"
        )
    period = config.sequence_period(rollout_length)
    num_rows = length + config.replay.n_step + max(spec.frame_stack, 1) + rollout_length  # the fewest for one sequence
    smallest = (num_rows + 2 * period) // period * period * num_envs
    if config.replay.size < smallest:
        raise ValueError(
            f"replay.size: must be at least {smallest} for sequences of {length} steps in each of {num_envs} "
            f"environments, got {config.replay.size}; use {smallest} or more"
        )


def rescales(config: Config) -> bool:
    """Return whether the network learns h(q) instead of q."""
    return isinstance(config.value, RescaledMean) and config.value.rescaling


def init(context: Context, key: Key) -> State:
    """Return fresh parameters, target parameters equal to them, and an empty replay buffer."""
    params = context.network.init(key)
    learner = Learner(params, params, context.optimizer.init(params))
    return off_policy.init_state(learner, context.replay.init())


def sample_noise(context: Context, key: Key, num_steps: int, num_envs: int) -> Noise:
    """Return uniform numbers for epsilon-greedy decisions, and normal ones for each noisy layer and environment."""
    key_explore, key_network = jax.random.split(key)
    return Noise(
        exploration.sample_noise(key_explore, num_steps, num_envs),
        context.network.noise(key_network, (num_steps, num_envs)),
    )


def explore(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: Noise) -> Decision:
    """Act epsilon-greedily, with random numbers and an epsilon for each environment."""
    value, carry = action_values(context, state.learner.params, inputs, carry, noise.network)
    now = off_policy.num_env_steps(context.ratio, state) + noise.explore.step * context.num_envs
    epsilon = exploration.epsilons(context.config.explore, context.spec.num_envs, now, context.parallelism)
    policy = distributions.EpsilonGreedy(value, epsilon, inputs.action_mask)
    return Decision(policy.sample_from(noise.explore.uniform), carry)


def exploit(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: Noise) -> Decision:
    """Take the action of the highest value, without noise."""
    value, carry = action_values(context, state.learner.params, inputs, carry)
    return Decision(distributions.EpsilonGreedy(value, 0.0).mode(), carry)


def action_values(
    context: Context, params: PyTree, inputs: PolicyInput, carry: PyTree, noise: PyTree = ()
) -> tuple[Array, PyTree]:
    """Return the mean values of all actions, f32 [..., A], FORBIDDEN where masked, and the carry after these inputs."""
    output, carry = context.network.step(params, inputs.obs, carry, noise)
    return distributions.masked(value_distributions.mean(context.value_head, output), inputs.action_mask), carry


def update(context: Context, state: State, rollout: Rollout, key: Key) -> tuple[State, Metrics]:
    """Add the rollout to the replay buffer, then make the gradient steps that are due."""
    rollout = normalize.clip_rewards(rollout, context.config.clips_rewards)
    buffer = context.replay.add(state.replay, rollout.steps, rollout.carry)
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
        "epsilon": exploration.mean(context.config.explore, context.spec.num_envs, now, context.parallelism),
        "learning_rate": context.learning_rate(state.learner.optimizer[-1].count),
        "replay_size": context.replay.size(state.replay) * context.num_envs,
    }


def gradient_step(
    context: Context, buffer: PyTree, num_updates: Array, keys: Key, learner: Learner, counts: off_policy.Counts
) -> tuple[Learner, PyTree, off_policy.Counts, Metrics]:
    """Make one gradient step on a batch from the replay buffer, with keys [2]; then update the target if it is due.

    Metrics cover this device's rows, [B].
    """
    config, parallelism = context.config, context.parallelism
    key_draw, key_noise = keys
    beta = replay.importance_exponent(config.replay, context.num_updates, num_updates)
    batch, weight, index = context.replay.sample(buffer, key_draw, config.batch_size, config.gamma, beta)
    noise_online, noise_target = (context.network.noise(key, ()) for key in jax.random.split(key_noise))
    weight /= config.batch_size
    if not config.has_memory:
        target = td_target(context, learner, batch, noise_online, noise_target)
        objective = partial(loss, context, batch=batch, target=target, weight=weight, noise=noise_online)
    else:
        noise = noise_online, noise_target
        objective = partial(sequence_loss, context, learner.target_params, batch, weight, noise)
    gradient, (errors, metrics) = jax.grad(objective, has_aux=True)(learner.params)
    workers = parallelism.num_grad_workers if context.replay.update_priorities else 1
    whole = collectives.scatter_rows(errors, workers) if workers > 1 else None
    gradient, whole = collectives.all_reduce_sum((gradient, whole), parallelism.grad_axis)
    updates, optimizer = context.optimizer.update(gradient, learner.optimizer, learner.params)
    params = optax.apply_updates(learner.params, updates)
    if context.replay.update_priorities:
        buffer = context.replay.update_priorities(buffer, index, whole if workers > 1 else errors)
    target_params, counts = off_policy.update_target(
        context.ratio, config.target.interval, config.target.tau, params, learner.target_params, counts
    )
    return Learner(params, target_params, optimizer), buffer, counts, metrics


def td_target(
    context: Context, learner: Learner, batch: replay.Sample, noise_online: PyTree, noise_target: PyTree
) -> value_distributions.Atoms:
    """Return the target of the value of (obs, action), as weighted atoms [B, K].

    q are values of the online parameters, q' values of the target parameters, and g is the discount.

    mean         r + g q'(s', a*), where a* is greedy for q', or with `double` for q (van Hasselt et al. 2016, eq. 4)
    munchausen   r + alpha max(clip, tau log pi(a|s)) + g sum_a' pi(a'|s') (q'(s', a') - tau log pi(a'|s')), with
                 pi = softmax(q' / tau) (Vieillard et al. 2020, eq. 1); with `double`, pi(.|s') is that of q.
                 In an n-step target, only the first step has the term with alpha.
    """
    apply = context.network.apply
    following = apply(learner.target_params, batch.next_obs, noise_target)
    chooser = apply(learner.params, batch.next_obs, noise_online) if context.config.double else following
    now = (
        apply(learner.target_params, batch.obs, noise_target) if isinstance(context.config.bonus, Munchausen) else None
    )
    return target_of_outputs(context, batch, following, chooser, now)


def target_of_outputs(
    context: Context, batch: replay.Sample, following: Array, chooser: Array, now: Array | None
) -> value_distributions.Atoms:
    """Return the target of `td_target` from outputs [B, A (, M)]: q' and the chooser's at s', and q' at s.

    With `value.rescaling`, outputs are h(q), and so is the target: h(r + g h^-1(q'(s', a*))) (Pohlen et al. 2018,
    section 3.2, over n steps as in Kapturowski et al. 2019, section 2.3).
    """
    config, head, reward = context.config, context.value_head, batch.reward
    value = distributions.masked(value_distributions.mean(head, chooser), batch.next_action_mask)
    if now is not None:
        assert isinstance(config.bonus, Munchausen), "else there is no `now`"
        temperature = config.bonus.temperature
        now = value_distributions.mean(head, now)
        now = jax.nn.log_softmax(distributions.masked(now, batch.action_mask) / temperature)
        log_prob = temperature * distributions.chosen(now, batch.action)
        reward += config.bonus.alpha * jnp.clip(log_prob, config.bonus.clip, 0)
        log_policy = jax.nn.log_softmax(value / temperature)[..., None]
        atom, weight = value_distributions.from_outputs(head, following)  # [B, A, K]
        atom, weight = atom - temperature * log_policy, weight * jnp.exp(log_policy)
        atom, weight = (x.reshape(x.shape[0], -1) for x in (atom, weight))
    else:
        greedy = distributions.chosen(following, jnp.argmax(value, axis=-1))
        atom, weight = value_distributions.from_outputs(head, greedy)
    if rescales(config):
        atom = returns.unrescale(atom)
    target = reward[:, None] + batch.discount[:, None] * atom
    return value_distributions.Atoms(returns.rescale(target) if rescales(config) else target, weight)


def loss(
    context: Context,
    params: PyTree,
    batch: replay.Sample,
    target: value_distributions.Atoms,
    weight: Array,
    noise: PyTree,
) -> tuple[Array, tuple[Array, Metrics]]:
    """Return the weighted sum of the rows' losses, their errors for priorities [B], and weighted metrics [B]."""
    return loss_of_outputs(context, context.network.apply(params, batch.obs, noise), batch, target, weight)


def sequence_loss(
    context: Context,
    target_params: PyTree,
    batch: replay_sequences.Sequences,
    weight: Array,
    noise: tuple[PyTree, PyTree],
    params: PyTree,
) -> tuple[Array, tuple[Array, Metrics]]:
    """Return the results of `loss` for B sequences: means over the K steps after the burn-in of each.

    Both networks are unrolled from the stored carry, after a burn-in (Kapturowski et al. 2019, section 3).
    """
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    online, target = (
        sequence_outputs(context, own, batch, own_noise)
        for own, own_noise in zip((params, target_params), noise, strict=True)
    )
    num_learned, place = batch.weight.shape[1], batch.following - context.config.memory.burn_in
    at_next = lambda x: flat(jnp.take_along_axis(x, place.reshape(*place.shape, *(1,) * (x.ndim - 2)), axis=1))
    following = at_next(target)
    chooser = at_next(jax.lax.stop_gradient(online)) if context.config.double else following
    now = flat(target[:, :num_learned]) if isinstance(context.config.bonus, Munchausen) else None
    goal = target_of_outputs(context, batch.steps, following, chooser, now)
    each = (weight / num_learned)[:, None] * batch.weight
    outputs = flat(online[:, :num_learned])
    total, (errors, metrics) = loss_of_outputs(context, outputs, batch.steps, goal, flat(each))
    return total, (replay_sequences.errors_of(errors.reshape(each.shape), batch.weight), metrics)


def sequence_outputs(context: Context, params: PyTree, batch: replay_sequences.Sequences, noise: PyTree) -> Array:
    """Return the network's outputs after the burn-in of each sequence, [B, M - burn_in, A (, K)]."""
    unroll = partial(context.network.unroll, params, noise=noise)
    given = sequences.after_burn_in(unroll, batch.obs, batch.carry, batch.reset, context.config.memory.burn_in)
    outputs: Array = unroll(*given)[0]
    return outputs


def loss_of_outputs(
    context: Context, output: Array, batch: replay.Sample, target: value_distributions.Atoms, weight: Array
) -> tuple[Array, tuple[Array, Metrics]]:
    """Return the results of `loss` for the network's outputs [B, A (, M)]."""
    value = distributions.chosen(value_distributions.mean(context.value_head, output), batch.action)
    td_error = target.mean - value
    chosen = distributions.chosen(output, batch.action)  # [B] or [B, K]
    huber = getattr(context.config.value, "loss", "") == "huber"
    losses, errors = value_distributions.losses(context.value_head, chosen, target, td_error, huber)
    q_value = returns.unrescale(value) if rescales(context.config) else value
    metrics = {"weight": jnp.float32(1), "td_loss": losses, "q_value": q_value, "td_error_abs": jnp.abs(td_error)}
    return (weight * losses).sum(), (errors, jax.tree.map(lambda x: weight * x, metrics))
