"""DQN: deep Q-learning from a replay buffer (Mnih et al. 2015), with the parts of Rainbow and Munchausen as options.

Every kind of value is a distribution, and every target is a set of weighted atoms (`rl.q_learning`). So these options
combine freely. `rl.off_policy` counts gradient steps and target updates exactly.

Deviations from Rainbow: epsilon-greedy actions unless the epsilons are 0; noise is drawn for each environment in
acting, and once per batch in learning.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import networks, replay
from jaxrl_fast.agents import joint
from jaxrl_fast.options.dqn import DQN as Config
from jaxrl_fast.options.memory import OfReplay
from jaxrl_fast.replay import sequences as replay_sequences
from jaxrl_fast.rl import (
    distributions,
    exploration,
    normalize,
    off_policy,
    optim,
    q_learning,
    sequences,
    value_distributions,
)
from jaxrl_fast.rl.off_policy import ReplayRatio, State
from jaxrl_fast.rl.value_distributions import Atoms
from jaxrl_fast.types import (
    Agent,
    Array,
    Decision,
    EnvSpec,
    Key,
    Learning,
    Metrics,
    MultiDiscrete,
    Parallelism,
    PolicyInput,
    PyTree,
    Rollout,
    SampleNoise,
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
    rule: q_learning.Rule
    learning_rate: optax.Schedule
    optimizer: optax.GradientTransformation


def make(config: Config, spec: EnvSpec, num_updates: int, parallelism: Parallelism = Parallelism()) -> Agent:
    """Return DQN for environments of this spec, with schedules over `num_updates` updates.

    Raises ValueError if options contradict each other or the environment.
    """
    if isinstance(spec.action, MultiDiscrete):
        return joint.agent_of(make(config, joint.spec_of(spec, "dqn"), num_updates, parallelism), spec)
    ratio, rule = off_policy.schedule_of(config, spec, parallelism), q_learning.rule_of(config.value, config.bonus)
    num_atoms = value_distributions.num_atoms(config.value)
    options = networks.options_of(config, num_atoms=num_atoms, dueling=config.dueling, noisy=config.noisy)
    network = networks.network(spec.obs, exploration.num_actions(spec, "dqn"), options)
    num_gradient_steps = off_policy.num_gradient_steps(ratio, num_updates)
    learning_rate = optim.schedule_of(config.learning_rate, config.schedule, num_gradient_steps)
    context = Context(
        config=config,
        spec=spec,
        parallelism=parallelism,
        replay=make_replay(config, spec, parallelism, network.initial_carry),
        ratio=ratio,
        num_updates=num_updates,
        network=network,
        rule=rule,
        learning_rate=learning_rate,
        optimizer=optim.make_optimizer(learning_rate, config.optimizer),
    )
    return Agent(
        init=partial(init, context),
        explore=partial(explore, context),
        exploit=partial(exploit, context),
        update=partial(update, context),
        sample_noise=SampleNoise(partial(sample_noise, context), ("uniform", "normal")),
        rollout_length=ratio.rollout_length,
        initial_carry=network.initial_carry,
        policy_state=lambda state: state._replace(replay=None),
        parameters=lambda state: (state.learner.params, state.learner.target_params),
        learning=Learning(
            on_env_restart=lambda state: state._replace(replay=context.replay.discard_tail(state.replay)),
            resources=context.replay.resources,
        ),
    )


def make_replay(config: Config, spec: EnvSpec, parallelism: Parallelism, initial_carry: PyTree) -> replay.Replay:
    """Return a replay buffer of transitions, or of sequences for an agent with memory."""
    rollout_length = config.length(spec.num_envs * parallelism.num_shards)
    period, exponent = config.sequence_period(rollout_length), replay.priority_exponent(config.replay)
    buffer = replay.config_of(config.replay, spec, parallelism, period)
    if not isinstance(memory := config.memory, OfReplay):
        return replay.make(buffer, spec, parallelism, exponent)
    replay_sequences.check(memory, config.replay, spec, parallelism, rollout_length, period)
    of_sequences = replay_sequences.SequenceConfig(buffer, memory.sequence_length, memory.burn_in, period)
    return replay_sequences.make(of_sequences, spec, initial_carry, parallelism, exponent)


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
    now = off_policy.num_env_steps(context.ratio, state) + noise.explore.step * context.ratio.num_envs
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
    return distributions.masked(value_distributions.mean(context.rule.head, output), inputs.action_mask), carry


def update(context: Context, state: State, rollout: Rollout, key: Key) -> tuple[State, Metrics]:
    """Add the rollout to the replay buffer, then make the gradient steps that are due."""
    rollout = normalize.clip_rewards(rollout, context.config.clips_rewards)
    state = state._replace(replay=context.replay.add(state.replay, rollout.steps, rollout.carry))
    state, metrics = off_policy.learn(context, partial(gradient_step, context), state, key)
    now = off_policy.num_env_steps(context.ratio, state)
    return state, {
        **metrics,
        "epsilon": exploration.mean(context.config.explore, context.spec.num_envs, now, context.parallelism),
        "learning_rate": context.learning_rate(state.learner.optimizer[-1].count),
        "replay_size": context.replay.size(state.replay) * context.ratio.num_envs,
    }


def gradient_step(
    context: Context, buffer: PyTree, num_updates: Array, keys: Key, learner: Learner, counts: off_policy.Counts
) -> tuple[Learner, PyTree, off_policy.Counts, Metrics]:
    """Make one gradient step on a batch from the replay buffer, with keys [2]; then update the target if it is due.

    Metrics cover this device's rows, [B].
    """
    config = context.config
    key_draw, key_noise = keys
    beta = replay.importance_exponent(config.replay, context.num_updates, num_updates)
    batch, weight, index = context.replay.sample(buffer, key_draw, config.batch_size, config.gamma, beta)
    noise_online, noise_target = (context.network.noise(key, ()) for key in jax.random.split(key_noise))
    weight /= config.batch_size
    if config.has_memory:
        noise = noise_online, noise_target
        objective = partial(sequence_loss, context, learner.target_params, batch, weight, noise)
    else:
        target = td_target(context, learner, batch, noise_online, noise_target)
        objective = partial(loss, context, batch=batch, target=target, weight=weight, noise=noise_online)
    gradient, (errors, metrics) = jax.grad(objective, has_aux=True)(learner.params)
    gradient, errors = replay.sum_gradient(context.replay, context.parallelism, gradient, errors)
    updates, optimizer = context.optimizer.update(gradient, learner.optimizer, learner.params)
    params = optax.apply_updates(learner.params, updates)
    if context.replay.update_priorities:
        buffer = context.replay.update_priorities(buffer, index, errors)
    target_params, counts = off_policy.update_target(
        context.ratio, config.target.interval, config.target.tau, params, learner.target_params, counts
    )
    return Learner(params, target_params, optimizer), buffer, counts, metrics


def td_target(
    context: Context, learner: Learner, batch: replay.Sample, noise_online: PyTree, noise_target: PyTree
) -> Atoms:
    """Return the target of the value of (obs, action), as weighted atoms [B, K]; see `q_learning.target`.

    Values q' are those of the target parameters. They also choose the next action, or with `double` the online
    parameters do (van Hasselt et al. 2016, eq. 4).
    """
    online = partial(context.network.apply, learner.params, noise=noise_online)
    target = partial(context.network.apply, learner.target_params, noise=noise_target)
    following = target(batch.next_obs)
    chooser = online(batch.next_obs) if context.config.double else following
    return q_learning.target(context.rule, batch, following, chooser, target(batch.obs) if context.rule.bonus else None)


def loss(
    context: Context,
    params: PyTree,
    batch: replay.Sample,
    target: Atoms,
    weight: Array,
    noise: PyTree,
) -> tuple[Array, tuple[Array, Metrics]]:
    """Return the weighted sum of the rows' losses, their errors for priorities [B], and weighted metrics [B]."""
    return weighted_loss(context, context.network.apply(params, batch.obs, noise), batch.action, target, weight)


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
    now = flat(target[:, :num_learned]) if context.rule.bonus else None
    goal = q_learning.target(context.rule, batch.steps, following, chooser, now)
    each = (weight / num_learned)[:, None] * batch.weight
    outputs = flat(online[:, :num_learned])
    total, (errors, metrics) = weighted_loss(context, outputs, batch.steps.action, goal, flat(each))
    return total, (replay_sequences.errors_of(errors.reshape(each.shape), batch.weight), metrics)


def sequence_outputs(context: Context, params: PyTree, batch: replay_sequences.Sequences, noise: PyTree) -> Array:
    """Return the network's outputs after the burn-in of each sequence, [B, M - burn_in, A (, K)]."""
    unroll = partial(context.network.unroll, params, noise=noise)
    given = sequences.after_burn_in(unroll, batch.obs, batch.carry, batch.reset, context.config.memory.burn_in)
    outputs: Array = unroll(*given)[0]
    return outputs


def weighted_loss(
    context: Context, output: Array, action: Array, target: Atoms, weight: Array
) -> tuple[Array, tuple[Array, Metrics]]:
    """Return the results of `loss` for the network's outputs [B, A (, M)]."""
    losses, errors, metrics = q_learning.losses(context.rule, output, action, target)
    metrics = {"weight": jnp.float32(1), **metrics}
    return (weight * losses).sum(), (errors, jax.tree.map(lambda x: weight * x, metrics))
