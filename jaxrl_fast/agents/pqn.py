"""PQN: Q-learning on fresh rollouts, without replay and without target parameters (Gallici et al. 2025).

LayerNorm takes the target's place: on dense layers over their width, on convolutions over each pixel's channels, as
flax does and the authors' code for MinAtar does; PyTorch versions that normalize over channels and pixels together are
another network. Rows whose action was ignored (resets) take part in nothing.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import networks
from jaxrl_fast.agents.configs import pqn
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import distributions, exploration, frame_stack, minibatch, normalize, optim, returns, sgd
from jaxrl_fast.types import Agent, Array, Decision, EnvSpec, Key, Metrics, PyTree, Rollout

Config = pqn.PQN


class State(NamedTuple):
    """All that PQN carries from update to update."""

    params: PyTree
    optimizer: PyTree
    num_updates: Array  # int32


class Batch(NamedTuple):
    """What the loss is about, row by row: [B, ...]."""

    obs: PyTree  # or what stands for it until a gradient step
    action: Array
    target: Array
    weight: Array  # of the row in means: 0 where its action was ignored


class Learner(NamedTuple):
    """What gradient steps change."""

    params: PyTree
    optimizer: PyTree


class Lesson(NamedTuple):
    """An update under way."""

    learner: Learner
    rows: Batch  # [T * N, ...]
    frames: frame_stack.Frames | tuple[()]  # what their observations are made of, where they are kept as frames
    num_updates: Array  # int32: with this one
    others: tuple[()] = ()  # nothing else that devices have to tell each other


class Parts(NamedTuple):
    """What `make` builds once and the functions below share."""

    config: Config
    spec: EnvSpec
    network: networks.Network
    epsilon: exploration.Epsilon
    learning_rate: optax.Schedule
    optimizer: optax.GradientTransformation


def make(config: Config, spec: EnvSpec, num_updates: int) -> Agent:
    """PQN for environments of this spec, its learning rate annealed over `num_updates` updates.

    Raises ValueError where the numbers do not fit each other or the environment.
    """
    minibatch.validate(config.rollout_length * spec.num_envs, config.num_minibatches, spec.num_shards)
    network = networks.network(
        spec.obs,
        exploration.num_actions(spec, "pqn"),
        kind=config.network,
        hidden=config.hidden_sizes,
        activation=config.activation,
        layer_norm=config.layer_norm,
        dtype=jnp.dtype(config.compute_dtype),
    )
    num_steps = config.num_epochs * config.num_minibatches  # of an update
    learning_rate = optim.linear_schedule(config.learning_rate, config.anneal_lr, num_updates * num_steps)
    optimizer = optim.make_optimizer(
        learning_rate,
        epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm,
        kind="radam",
    )
    epsilon = exploration.Epsilon(config.epsilon_start, config.epsilon_end, config.epsilon_steps, config.apex_alpha)
    parts = Parts(config, spec, network, epsilon, learning_rate, optimizer)
    return Agent(
        init=partial(init, parts),
        explore=partial(explore, parts),
        exploit=partial(exploit, parts),
        update=partial(update, parts),
        noise=exploration.noise,
        rollout_length=config.rollout_length,
        keep=frame_stack.compressor(spec.frame_stack),
        gradient_steps=sgd.incremental_update(
            num_steps, partial(begin, parts), partial(epochs_of, parts), partial(end, parts)
        ),
    )


def init(parts: Parts, key: Key) -> State:
    """Fresh parameters."""
    params = parts.network.init(key)
    return State(params, parts.optimizer.init(params), jnp.int32(0))


def explore(parts: Parts, state: State, obs: PyTree, memory: PyTree, noise: exploration.Noise) -> Decision:
    """Epsilon-greedy: each environment tosses its own coin."""
    value = parts.network.apply(state.params, obs)
    policy = distributions.EpsilonGreedy(value, epsilons(parts, state, noise.place))
    return Decision(policy.sample_from(noise.uniform), extras=value.max(-1))


def exploit(parts: Parts, state: State, obs: PyTree, memory: PyTree, noise: exploration.Noise) -> Decision:
    """The action of the highest value."""
    return Decision(distributions.EpsilonGreedy(parts.network.apply(state.params, obs), 0.0).mode())


def epsilons(parts: Parts, state: State, place: int | Array = 0) -> Array:
    """[N] f32: at a step of a rollout, of those environments that act together."""
    before = exploration.env_steps(parts.spec, parts.config.rollout_length, state.num_updates)
    now = before + place * parts.spec.total_num_envs
    return exploration.epsilons(parts.epsilon, parts.spec, now)


def update(parts: Parts, state: State, rollout: Rollout, key: Key) -> tuple[State, Metrics]:
    """Learns from a rollout, in several epochs of minibatches (algorithm 1)."""
    lesson = begin(parts, state, rollout)
    return end(parts, lesson, *sgd.run(epochs_of(parts, lesson), lesson.learner, lesson.rows, key))


def epochs_of(parts: Parts, lesson: Lesson) -> sgd.Epochs:
    """How a lesson is gone through."""
    return sgd.Epochs(
        num_epochs=parts.config.num_epochs,
        num_minibatches=parts.config.num_minibatches,
        axis_name=parts.spec.axis_name,
        gradient_step=partial(gradient_step, parts, lesson.frames),
        num_grad_workers=parts.spec.num_grad_workers,
    )


def begin(parts: Parts, state: State, rollout: Rollout) -> Lesson:
    """What is to be learned from one rollout, whose targets stay what they are now."""
    rows, kept = prepare(parts, state.params, normalize.clip_rewards(rollout, parts.config.clip_rewards))
    return Lesson(Learner(state.params, state.optimizer), rows, kept, state.num_updates + 1)


def end(parts: Parts, lesson: Lesson, learner: Learner, sums: Metrics, others: PyTree) -> tuple[State, Metrics]:
    """The agent after the update; metrics are means over gradient steps."""
    state = State(*learner, lesson.num_updates)
    num_steps = parts.config.num_epochs * parts.config.num_minibatches
    means = collectives.all_reduce_sum(jax.tree.map(lambda x: x / num_steps, sums), parts.spec.grad_axis)
    now = exploration.env_steps(parts.spec, parts.config.rollout_length, state.num_updates)
    return state, means | {
        "epsilon": exploration.mean(parts.epsilon, parts.spec, now),
        "learning_rate": parts.learning_rate(state.optimizer[-1].count),
    }


def prepare(parts: Parts, params: PyTree, rollout: Rollout) -> tuple[Batch, frame_stack.Frames | tuple[()]]:
    """Rows to learn from, [T * N, ...], and what their observations are made of.

    Targets are Peng's Q(lambda) (section 3.2 of the paper). The value of what follows the last step is looked up
    too, so that no row is lost or bootstrapped from itself.
    """
    config, steps = parts.config, rollout.steps
    best_at_end = parts.network.apply(params, rollout.next_obs).max(-1)
    next_best = jnp.concatenate([steps.extras[1:], best_at_end[None]])  # as they were when acting
    discount = config.gamma * steps.discount
    target = returns.lambda_returns(steps.reward, discount, next_best, steps.last, config.q_lambda)
    rows = minibatch.flatten(Batch((), steps.action, target, steps.valid.astype(jnp.float32)))
    obs, kept = frame_stack.encode_rollout(parts.spec.frame_stack, rollout)
    return rows._replace(obs=obs), kept


def gradient_step(
    parts: Parts, kept: frame_stack.Frames | tuple[()], learner: Learner, batch: Batch
) -> tuple[Learner, Metrics]:
    """One gradient step."""
    params, optimizer = learner
    batch = batch._replace(obs=frame_stack.decode(parts.spec.frame_stack, kept, batch.obs))
    gradient, metrics = minibatch.accumulate_grads(jax.grad(partial(loss, parts), has_aux=True), params, batch)
    gradient = collectives.all_reduce_sum(gradient, parts.spec.grad_axis)
    updates, optimizer = parts.optimizer.update(gradient, optimizer, params)
    return Learner(optax.apply_updates(params, updates), optimizer), metrics


def loss(parts: Parts, params: PyTree, batch: Batch) -> tuple[Array, Metrics]:
    """Half the squared distance to the target (equation 4 of the paper), a sum of weighted rows."""
    value = parts.network.apply(params, batch.obs)
    chosen = distributions.chosen(value, batch.action)
    distance = batch.target - chosen
    metrics = {"td_loss": 0.5 * distance**2, "q_value": chosen, "td_error_abs": jnp.abs(distance)}
    metrics = jax.tree.map(lambda x: jnp.sum(batch.weight * x), metrics)
    return metrics["td_loss"], metrics
