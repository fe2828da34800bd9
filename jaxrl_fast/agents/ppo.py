"""PPO: proximal policy optimization with a clipped loss (Schulman et al. 2017), for discrete and continuous actions.

Deviations from the paper, all common: advantages are standardized in each minibatch, the value loss is clipped too,
the learning rate falls linearly. Rows whose action was ignored (resets) take part in nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import networks
from jaxrl_fast.agents.configs import ppo
from jaxrl_fast.parallel import collectives
from jaxrl_fast.rl import distributions, minibatch, normalize, optim, returns, sgd
from jaxrl_fast.rl.frame_stack import Frames, compressor, decode, encode_rollout
from jaxrl_fast.types import Agent, Array, Box, Decision, Discrete, EnvSpec, Key, Metrics, PyTree, Rollout, Transition

Config = ppo.PPO


class State(NamedTuple):
    """All that PPO carries from update to update."""

    params: PyTree
    optimizer: PyTree
    observations: PyTree  # normalize.Stats of each leaf of an observation, or ()
    rewards: normalize.RewardScale | tuple[()]


class Squashed(NamedTuple):
    """What is kept beside an action that is the tanh of what was drawn; beside others it is the policy alone."""

    policy: PyTree  # the distribution that it was drawn from
    drawn: Array  # f32 [N, D]


class Batch(NamedTuple):
    """What the loss is about, row by row: [B, ...]."""

    obs: PyTree  # as the network sees it, or what stands for it until a gradient step
    action: Array  # before the tanh, where actions are squashed
    policy: PyTree  # the distribution that acted
    log_prob: Array  # of the action by it
    value: Array  # before the first gradient step
    advantage: Array
    target: Array  # of the value
    weight: Array  # of the row in means: 0 where its action was ignored


class Learner(NamedTuple):
    """What gradient steps change."""

    params: PyTree
    optimizer: PyTree
    stopped: Array  # bool: the policy has moved too far, no step is taken any more


class Lesson(NamedTuple):
    """An update under way."""

    learner: Learner
    rows: Batch  # [T * N, ...]
    frames: Frames | tuple[()]  # what their observations are made of, where they are kept as frames
    state: State  # as it will be afterwards, but for what gradient steps and `others` change
    others: PyTree  # Moments: of targets and advantages [2], and of observations as far as they have statistics


class Parts(NamedTuple):
    """What `make` builds once and the functions below share."""

    config: Config
    spec: EnvSpec
    network: networks.ActorCritic
    learning_rate: optax.Schedule
    optimizer: optax.GradientTransformation
    objective: Callable[["Parts", PyTree, Batch], tuple[Array, Metrics]]
    frame_stack: int  # frames of an observation that is kept as its newest; 0: all of it is kept


def make(config: Config, spec: EnvSpec, num_updates: int, objective: Callable | None = None) -> Agent:
    """PPO for environments of this spec, its learning rate annealed over `num_updates` updates.

    An `objective` of one's own, (parts, params, batch) -> (sum of weighted rows, metrics), takes the place of `loss`;
    with `target_kl` "approx_kl" must be among its metrics.
    Raises ValueError where the numbers do not fit each other or the environment.
    """
    check(config, spec)
    num_outputs = spec.action.num if isinstance(spec.action, Discrete) else spec.action.shape[0]
    network = networks.actor_critic(
        spec.obs,
        num_outputs,
        kind=config.network,
        hidden=config.hidden_sizes,
        activation=config.activation,
        dtype=jnp.dtype(config.compute_dtype),
    )
    num_steps = config.num_epochs * config.num_minibatches  # of an update
    learning_rate = optim.linear_schedule(config.learning_rate, config.anneal_lr, num_updates * num_steps)
    optimizer = optim.make_optimizer(
        learning_rate,
        epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm,
    )
    frame_stack = 0 if config.normalize_observations or spec.frame_stack < 2 else spec.frame_stack
    parts = Parts(config, spec, network, learning_rate, optimizer, objective or loss, frame_stack)
    return Agent(
        init=partial(init, parts),
        explore=partial(explore, parts),
        exploit=partial(exploit, parts),
        update=partial(update, parts),
        noise=partial(noise, spec.action),
        rollout_length=config.rollout_length,
        keep=compressor(frame_stack),
        on_env_restart=on_env_restart,
        gradient_steps=sgd.incremental_update(
            num_steps, partial(begin, parts), partial(epochs_of, parts), partial(end, parts)
        ),
    )


def check(config: Config, spec: EnvSpec) -> None:
    """The numbers that set shapes; real numbers may be traced and are checked on the host."""
    num_rows = config.rollout_length * spec.num_envs
    minibatch.validate(num_rows, config.num_minibatches, spec.num_shards)
    if config.normalize_advantage and num_rows * spec.num_shards == config.num_minibatches:
        raise ValueError(
            f"{num_rows * spec.num_shards} steps per update in {config.num_minibatches} minibatches are one in each, "
            "whose advantage less its mean is 0; try fewer minibatches, or no normalize_advantage"
        )
    if isinstance(spec.action, Box) and len(spec.action.shape) != 1:
        raise ValueError(f"{spec.id}: ppo wants actions of shape [D], not {list(spec.action.shape)}")


def init(parts: Parts, key: Key) -> State:
    """Fresh parameters and no statistics."""
    params = {"network": parts.network.init(key)}
    if isinstance(parts.spec.action, Box):
        params["log_std"] = jnp.full(parts.spec.action.shape, parts.config.log_std_init, jnp.float32)
    return State(
        params=params,
        optimizer=parts.optimizer.init(params),
        observations=jax.tree.map(lambda x: normalize.init(x.shape), parts.spec.obs)
        if parts.config.normalize_observations
        else (),
        rewards=normalize.init_reward(parts.spec.num_envs) if parts.config.normalize_rewards else (),
    )


def on_env_restart(state: State) -> State:
    """The rewards so far belong to episodes that nobody goes on with."""
    scale = state.rewards and state.rewards._replace(total=jnp.zeros_like(state.rewards.total))
    return state._replace(rewards=scale)


def noise(action: Discrete | Box, key: Key, num_steps: int, num_envs: int) -> Array:
    """Gumbel noise [T, N, A] for discrete actions, normal noise [T, N, D] for continuous ones."""
    if isinstance(action, Discrete):
        return jax.random.gumbel(key, (num_steps, num_envs, action.num))
    return jax.random.normal(key, (num_steps, num_envs, *action.shape))


def explore(parts: Parts, state: State, obs: PyTree, memory: PyTree, noise: Array) -> Decision:
    """A sample of the policy."""
    pi = policy(parts, state.params, normalized(state, obs))
    drawn = pi.sample_from(noise)
    return Decision(to_action(pi, drawn), extras=Squashed(pi, drawn) if _is_squashed(pi) else pi)


def exploit(parts: Parts, state: State, obs: PyTree, memory: PyTree, noise: Array) -> Decision:
    """The policy's mode."""
    pi = policy(parts, state.params, normalized(state, obs))
    return Decision(to_action(pi, pi.mode()))


def to_action(pi: PyTree, drawn: Array) -> Array:
    """What the environment is given, [..., D] or int32 [...], of what the policy drew."""
    return jnp.tanh(drawn) if _is_squashed(pi) else drawn


def normalized(state: State, obs: PyTree) -> PyTree:
    """Observations as the network sees them: less their mean, over their standard deviation, if that is asked for."""
    if not state.observations:
        return obs
    return jax.tree.map(normalize.apply, state.observations, obs, is_leaf=_is_stats)


def policy(parts: Parts, params: PyTree, obs: PyTree) -> PyTree:
    """The distribution over actions, [..., A or D]."""
    return distribution(parts, params, parts.network.actor(params["network"], obs))


def distribution(parts: Parts, params: PyTree, output: Array) -> PyTree:
    """The distribution that the actor's output means."""
    if isinstance(parts.spec.action, Discrete):
        return distributions.Categorical(output)
    kind = distributions.TanhGaussian if parts.config.tanh_squash else distributions.Gaussian
    return kind(output, jnp.broadcast_to(params["log_std"], output.shape))


def update(parts: Parts, state: State, rollout: Rollout, key: Key) -> tuple[State, Metrics]:
    """Learns from a rollout, in several epochs of minibatches (algorithm 1)."""
    lesson = begin(parts, state, rollout)
    return end(parts, lesson, *sgd.run(epochs_of(parts, lesson), lesson.learner, lesson.rows, key, lesson.others))


def epochs_of(parts: Parts, lesson: Lesson) -> sgd.Epochs:
    """How a lesson is gone through."""
    return sgd.Epochs(
        num_epochs=parts.config.num_epochs,
        num_minibatches=parts.config.num_minibatches,
        axis_name=parts.spec.axis_name,
        gradient_step=partial(gradient_step, parts, lesson.frames),
        standardized="advantage" if parts.config.normalize_advantage else "",
        num_grad_workers=parts.spec.num_grad_workers,
    )


def begin(parts: Parts, state: State, rollout: Rollout) -> Lesson:
    """What is to be learned from one rollout. Observations are seen by the statistics of before."""
    config = parts.config
    rollout = normalize.clip_rewards(rollout, config.clip_rewards)
    steps = rollout.steps
    after, reward = scaled(parts, state, steps)
    look = lambda stats, obs: normalize.seen(stats, obs, steps.valid)
    of_observations = state.observations and jax.tree.map(look, state.observations, steps.obs, is_leaf=_is_stats)
    if not parts.frame_stack:
        rollout = rollout._replace(steps=steps._replace(obs=normalized(state, steps.obs)))
    obs, kept = encode_rollout(parts.frame_stack, rollout)
    value, next_value = values(parts, state, rollout, obs, kept)
    discount = config.gamma * steps.discount
    advantage = returns.gae(reward, discount, value, next_value, steps.last, config.gae_lambda)
    target = advantage + value
    weight = steps.valid.astype(jnp.float32)
    acted = steps.extras if isinstance(steps.extras, Squashed) else Squashed(steps.extras, steps.action)
    log_prob = acted.policy.log_prob(acted.drawn)
    rows = minibatch.flatten(Batch((), acted.drawn, acted.policy, log_prob, value, advantage, target, weight))
    of_both = normalize.moments(jnp.stack([target, advantage]), weight, axis=(1, 2))
    learner = Learner(state.params, state.optimizer, jnp.bool_(False))
    return Lesson(learner, rows._replace(obs=obs), kept, after, (of_both, of_observations))


def scaled(parts: Parts, state: State, steps: Transition) -> tuple[State, Array]:
    """Rewards [T, N] as they are learned from, and the state with them in its statistics."""
    reward, rewards, axis_name = steps.reward, state.rewards, parts.spec.axis_name
    if not rewards:
        return state, reward
    rewards = normalize.update_reward(rewards, reward, steps.last, steps.valid, parts.config.gamma, axis_name)
    return state._replace(rewards=rewards), normalize.apply_reward(rewards, reward)


def values(parts: Parts, state: State, rollout: Rollout, obs: PyTree, kept: Frames | tuple[()]) -> tuple[Array, Array]:
    """The critic's of each step and of what follows it, f32 [T, N]: here in bulk, not step by step while acting.

    `obs` [T * N, ...] stand for the steps' observations, or are numbers of their frames in what was `kept`.
    """
    critic = partial(parts.network.critic, state.params["network"])
    if parts.frame_stack:  # stacks for a minibatch at a time
        look = partial(decode, parts.frame_stack, kept)
        value = jax.lax.map(lambda some: critic(look(some)), obs.reshape(parts.config.num_minibatches, -1))
    else:
        value = minibatch.map_chunks(critic, obs)
    value = value.reshape(rollout.steps.reward.shape)
    return value, jnp.concatenate([value[1:], critic(normalized(state, rollout.next_obs))[None]])


def explained_variance(of_both: normalize.Moments) -> Array:
    """1 - Var(target - value) / Var(target), f32 []: 1 where values knew all, 0 where no more than the mean.

    `of_both` [2]: of targets, and of advantages, which are target - value.
    """
    variance, unexplained = of_both.var
    return jnp.where(variance > 0, 1 - unexplained / jnp.maximum(variance, 1e-8), 0)


def end(
    parts: Parts, lesson: Lesson, learner: Learner, sums: tuple[Metrics, Array], others: PyTree
) -> tuple[State, Metrics]:
    """The agent after the update; metrics are means over the gradient steps that were tried."""
    (metrics, tried), (of_both, of_observations) = sums, others
    means = collectives.all_reduce_sum(jax.tree.map(lambda x: x / jnp.maximum(tried, 1), metrics), parts.spec.grad_axis)
    learning_rate = parts.learning_rate(learner.optimizer[-1].count)
    state = lesson.state._replace(params=learner.params, optimizer=learner.optimizer)
    if state.observations:
        merged = jax.tree.map(normalize.merge, state.observations, of_observations, is_leaf=_is_stats)
        state = state._replace(observations=merged)
    return state, means | {"explained_variance": explained_variance(of_both), "learning_rate": learning_rate}


def gradient_step(
    parts: Parts, kept: Frames | tuple[()], learner: Learner, batch: Batch
) -> tuple[Learner, tuple[Metrics, Array]]:
    """One gradient step, or none once the policy has moved too far: what comes after is computed and not counted."""
    params, optimizer, stopped = learner
    tried = ~stopped
    batch = batch._replace(obs=decode(parts.frame_stack, kept, batch.obs))
    gradient, metrics = minibatch.accumulate_grads(
        jax.grad(partial(parts.objective, parts), has_aux=True), params, batch
    )
    approx_kl = () if parts.config.target_kl is None else metrics["approx_kl"]
    gradient, approx_kl = collectives.all_reduce_sum((gradient, approx_kl), parts.spec.grad_axis)
    updates, next_optimizer = parts.optimizer.update(gradient, optimizer, params)
    after = optax.apply_updates(params, updates), next_optimizer
    if parts.config.target_kl is not None:
        stopped |= approx_kl > 1.5 * parts.config.target_kl
        after = jax.tree.map(partial(jnp.where, stopped), (params, optimizer), after)
    return Learner(*after, stopped), (jax.tree.map(lambda x: tried * x, metrics), tried.astype(jnp.float32))


def loss(parts: Parts, params: PyTree, batch: Batch) -> tuple[Array, Metrics]:
    """The loss of equation 9, a sum of weighted rows, and its parts.

    ratio r = pi(a|s) / pi_old(a|s);  policy loss = -min(r A, clip(r, 1 - eps, 1 + eps) A)  (equation 7),
    which is -A times r, or times the bound once r is beyond it on the side that A pulls to.
    """
    config = parts.config
    output, value = parts.network.both(params["network"], batch.obs)
    pi = distribution(parts, params, output)
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


def _is_squashed(pi: PyTree) -> bool:
    return isinstance(pi, distributions.TanhGaussian)


def _is_stats(x: PyTree) -> bool:
    return isinstance(x, normalize.Stats)
