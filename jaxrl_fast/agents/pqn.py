"""PQN: Q-learning on fresh rollouts, without replay and without target parameters (Gallici et al. 2025).

LayerNorm replaces the target network. As in flax and in the authors' code for MinAtar, it normalizes the width of dense
layers, and each pixel's channels of convolutions. PyTorch versions that normalize over channels and pixels together are
a different network. Rows whose action was ignored (resets) have weight 0.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import networks
from jaxrl_fast.agents import joint
from jaxrl_fast.options.pqn import PQN as Config
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import (
    distributions,
    exploration,
    frame_stack,
    minibatch,
    normalize,
    optim,
    returns,
    sequences,
    sgd,
)
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

SUPPORTS = frozenset({"shards", "grad_workers", "sequential_seeds"})


class State(NamedTuple):
    """The whole state of PQN."""

    params: PyTree
    optimizer: PyTree
    num_updates: Array  # int32


class Batch(NamedTuple):
    """The rows that the loss is computed from, [B, ...]; with a memory, sequences [B, L, ...]."""

    obs: PyTree  # the network's input, or numbers of stacks (`frame_stack`) before a gradient step
    action: Array
    target: Array
    weight: Array  # of the row in means: 0 where its action was ignored
    carry: PyTree = ()  # [B, ...] of the memory before each sequence
    reset: Array | None = None  # bool [B, L]: an episode begins after the step


class Learner(NamedTuple):
    """The variables that a gradient step changes."""

    params: PyTree
    optimizer: PyTree


class Context(NamedTuple):
    """The constants of an agent, which all functions of this module share."""

    config: Config
    spec: EnvSpec
    parallelism: Parallelism
    network: networks.Network
    learning_rate: optax.Schedule
    optimizer: optax.GradientTransformation

    @property
    def steps_per_update(self) -> int:
        """Return the environment steps of an update on all shards."""
        return self.config.rollout_length * self.spec.num_envs * self.parallelism.num_shards


def make(config: Config, spec: EnvSpec, num_updates: int, parallelism: Parallelism = Parallelism()) -> Agent:
    """Return PQN for environments of this spec, its learning rate annealed over `num_updates` updates.

    Raises ValueError if options contradict each other or the environment.
    """
    if isinstance(spec.action, MultiDiscrete):
        return joint.agent_of(make(config, joint.spec_of(spec, "pqn"), num_updates, parallelism), spec)
    sequences.validate(config, spec, parallelism.num_shards)
    network = networks.network(spec.obs, exploration.num_actions(spec, "pqn"), networks.options_of(config))
    num_steps = num_updates * config.num_epochs * config.num_minibatches
    learning_rate = optim.schedule_of(config.learning_rate, config.schedule, num_steps)
    optimizer = optim.make_optimizer(learning_rate, config.optimizer)
    context = Context(config, spec, parallelism, network, learning_rate, optimizer)
    functions = partial(prepare, context), partial(gradient_step, context), partial(finalize, context)
    epochs = sgd.epochs_of(config, parallelism, functions)
    return Agent(
        init=partial(init, context),
        explore=partial(explore, context),
        exploit=partial(exploit, context),
        update=partial(sgd.update, epochs),
        sample_noise=SampleNoise(exploration.sample_noise, ("uniform",)),
        rollout_length=config.rollout_length,
        initial_carry=network.initial_carry,
        parameters=lambda state: state.params,
        learning=Learning(
            compress_obs=frame_stack.compressor(spec.frame_stack),
            gradient_steps=sgd.incremental_update(epochs),
        ),
    )


def init(context: Context, key: Key) -> State:
    """Return fresh parameters."""
    params = context.network.init(key)
    return State(params, context.optimizer.init(params), jnp.int32(0))


def explore(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: exploration.Noise) -> Decision:
    """Act epsilon-greedily, with random numbers and an epsilon for each environment."""
    value, carry = action_values(context, state.params, inputs, carry)
    policy = distributions.EpsilonGreedy(value, epsilons(context, state, noise.step), inputs.action_mask)
    return Decision(policy.sample_from(noise.uniform), carry, extras=value.max(-1))


def exploit(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: exploration.Noise) -> Decision:
    """Take the action of the highest value."""
    value, carry = action_values(context, state.params, inputs, carry)
    return Decision(distributions.EpsilonGreedy(value, 0.0).mode(), carry)


def action_values(context: Context, params: PyTree, inputs: PolicyInput, carry: PyTree) -> tuple[Array, PyTree]:
    """Return the values of all actions, f32 [..., A], FORBIDDEN where masked, and the carry after these inputs."""
    value, carry = context.network.step(params, inputs.obs, carry)
    return distributions.masked(value, inputs.action_mask), carry


def epsilons(context: Context, state: State, step: int | Array = 0) -> Array:
    """Return epsilon at a step of a rollout, for each environment of a pool or of the shard, f32 [N]."""
    before = exploration.env_steps(context.steps_per_update, state.num_updates)
    now = before + step * context.spec.num_envs * context.parallelism.num_shards
    return exploration.epsilons(context.config.explore, context.spec.num_envs, now, context.parallelism)


def prepare(context: Context, state: State, rollout: Rollout) -> sgd.UpdateBatch:
    """Compute the targets of one rollout (algorithm 1); gradient steps do not change them."""
    rows, kept = rows_of(context, state.params, normalize.clip_rewards(rollout, context.config.clips_rewards))
    after = state._replace(num_updates=state.num_updates + 1)
    return sgd.UpdateBatch(Learner(state.params, state.optimizer), rows, kept, after)


def finalize(
    context: Context, batch: sgd.UpdateBatch, learner: Learner, sums: Metrics, pooled: None
) -> tuple[State, Metrics]:
    """Return the state after the update, and metrics: means over gradient steps."""
    state = batch.state._replace(params=learner.params, optimizer=learner.optimizer)
    num_steps = context.config.num_epochs * context.config.num_minibatches
    means = collectives.all_reduce_sum(jax.tree.map(lambda x: x / num_steps, sums), context.parallelism.grad_axis)
    now = exploration.env_steps(context.steps_per_update, state.num_updates)
    return state, means | {
        "epsilon": exploration.mean(context.config.explore, context.spec.num_envs, now, context.parallelism),
        "learning_rate": context.learning_rate(state.optimizer[-1].count),
    }


def rows_of(context: Context, params: PyTree, rollout: Rollout) -> tuple[Batch, frame_stack.Frames | None]:
    """Return the rows to learn from, [T * N, ...], and the frames from which their observations are built.

    Targets are Peng's Q(lambda) (section 3.2 of the paper). The value after the last step is computed as well, so that
    no row is lost or bootstrapped from itself. Steps of a burn-in have weight 0.
    """
    config, steps = context.config, rollout.steps
    obs, kept = frame_stack.encode_rollout(context.spec.frame_stack, rollout)
    next_best, carry = next_values(context, params, rollout, obs, kept)
    discount = config.gamma * steps.discount
    target = returns.lambda_returns(steps.reward, discount, next_best, steps.last, config.q_lambda)
    rows = Batch(obs, steps.action, target, steps.valid.astype(jnp.float32))
    length = config.sequence()
    if length is None:
        return minibatch.flatten(rows), kept
    counts = jnp.arange(config.rollout_length) % length >= config.memory.burn_in
    rows = rows._replace(weight=rows.weight * counts[:, None], reset=~steps.valid)
    return minibatch.flatten(rows, length)._replace(carry=carry), kept


def next_values(
    context: Context, params: PyTree, rollout: Rollout, obs: PyTree, kept: frame_stack.Frames | None
) -> tuple[Array, PyTree]:
    """Return the highest value after each step, f32 [T, N], and the carry before each sequence.

    `obs` [T, N, ...] are the observations as `frame_stack.encode_rollout` returns them. Without a memory, the values
    are those computed when acting.
    """
    if length := context.config.sequence():
        read = partial(frame_stack.decode, kept)
        unroll = partial(context.network.unroll, params)
        value, carry = sequences.recompute(unroll, rollout, obs, rollout.next_obs, read, length)
        join = lambda now, after: jnp.concatenate([now, after[None]])
        mask = jax.tree.map(join, rollout.steps.action_mask, rollout.next_action_mask)
        return distributions.masked(value, mask).max(-1)[1:], carry
    after = PolicyInput(rollout.next_obs, rollout.next_action_mask)
    best_at_end = action_values(context, params, after, ())[0].max(-1)
    return jnp.concatenate([rollout.steps.extras[1:], best_at_end[None]]), ()


def gradient_step(context: Context, learner: Learner, batch: Batch) -> tuple[Learner, Metrics]:
    """Make one gradient step."""
    params, optimizer = learner
    gradient, metrics = minibatch.accumulate_grads(jax.grad(partial(loss, context), has_aux=True), params, batch)
    gradient = collectives.all_reduce_sum(gradient, context.parallelism.grad_axis)
    updates, optimizer = context.optimizer.update(gradient, optimizer, params)
    return Learner(optax.apply_updates(params, updates), optimizer), metrics


def loss(context: Context, params: PyTree, batch: Batch) -> tuple[Array, Metrics]:
    """Return half the squared distance to the target (equation 4 of the paper), summed over weighted rows, and metrics.

    Each metric is a sum over weighted rows as well.
    """
    unroll = partial(context.network.unroll, params)
    burn_in = context.config.memory.burn_in
    value, _ = unroll(*sequences.after_burn_in(unroll, batch.obs, batch.carry, batch.reset, burn_in))
    if burn_in:
        batch = batch._replace(**{name: getattr(batch, name)[:, burn_in:] for name in ("action", "target", "weight")})
    chosen = distributions.chosen(value, batch.action)
    distance = batch.target - chosen
    metrics = {"td_loss": 0.5 * distance**2, "q_value": chosen, "td_error_abs": jnp.abs(distance)}
    return sgd.weighted_sums(batch.weight, metrics["td_loss"], metrics)
