"""PPO: proximal policy optimisation with a clipped loss (Schulman et al. 2017), for discrete and continuous actions.

Deviations from the paper, all common: advantages are standardised in each minibatch, the value loss is clipped too,
the learning rate falls linearly. Rows whose action was ignored (resets) take part in nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import distributions, frames, gradients, minibatch, networks, normalize, returns
from jaxrl_fast.agents import configs
from jaxrl_fast.types import Agent, Array, Box, Decision, Discrete, EnvSpec, Key, Metrics, PyTree, Rollout

Config = configs.PPO


class State(NamedTuple):
    """All that PPO carries from update to update."""

    params: PyTree
    optimiser: PyTree
    observations: PyTree  # normalize.Stats of each leaf of an observation, or ()
    rewards: normalize.RewardScale | tuple[()]


class Batch(NamedTuple):
    """What the loss is about, row by row: [B, ...]."""

    obs: PyTree  # as the network sees it, or what stands for it until a gradient step
    action: Array
    policy: PyTree  # the distribution that acted
    value: Array  # before the first gradient step
    advantage: Array
    target: Array  # of the value
    weight: Array  # of the row in means: 0 where its action was ignored


class Learner(NamedTuple):
    """What gradient steps change."""

    params: PyTree
    optimiser: PyTree
    stopped: Array  # bool: the policy has moved too far, no step is taken any more


class Lesson(NamedTuple):
    """An update under way."""

    learner: Learner
    rows: Batch  # [T * N, ...]
    frames: frames.Frames | tuple[()]  # what their observations are made of, where they are kept as frames
    state: State  # as it will be afterwards, but for what gradient steps change
    explained: Array  # the variance of targets that values knew of


class Parts(NamedTuple):
    """What `make` builds once and the functions below share."""

    config: Config
    spec: EnvSpec
    network: networks.ActorCritic
    learning_rate: optax.Schedule
    optimiser: optax.GradientTransformation
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
        hidden=config.hidden,
        activation=config.activation,
        dtype=jnp.dtype(config.compute_dtype),
    )
    num_steps = config.num_epochs * config.num_minibatches  # of an update
    learning_rate = gradients.linear(config.learning_rate, config.anneal, num_updates * num_steps)
    gradient_step = gradients.optimiser(
        learning_rate,
        epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm,
        axis_name=spec.axis_name,
    )
    frame_stack = 0 if config.normalize_observations or spec.frame_stack < 2 else spec.frame_stack
    parts = Parts(config, spec, network, learning_rate, gradient_step, objective or loss, frame_stack)
    epochs = minibatch.Epochs(parts, begin, descend, end, gradients.total, standardise)
    return Agent(
        init=partial(init, parts),
        explore=partial(explore, parts),
        exploit=partial(exploit, parts),
        update=minibatch.whole(epochs),
        noise=partial(noise, spec.action),
        rollout_length=config.rollout_length,
        keep=frames.keeper(frame_stack),
        interrupt=interrupt,
        gradient_steps=minibatch.in_parts(epochs),
    )


def check(config: Config, spec: EnvSpec) -> None:
    """The numbers that set shapes; real numbers may be traced and are checked on the host."""
    num_rows = config.rollout_length * spec.num_envs
    minibatch.check(num_rows, config.num_minibatches)
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
        optimiser=parts.optimiser.init(params),
        observations=jax.tree.map(lambda x: normalize.init(x.shape), parts.spec.obs)
        if parts.config.normalize_observations
        else (),
        rewards=normalize.init_reward(parts.spec.num_envs) if parts.config.normalize_rewards else (),
    )


def interrupt(state: State) -> State:
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
    policy = act(parts, state.params, see(state, obs))
    return Decision(policy.sample_from(noise), extras=policy)


def exploit(parts: Parts, state: State, obs: PyTree, memory: PyTree, noise: Array) -> Decision:
    """The policy's mode."""
    return Decision(act(parts, state.params, see(state, obs)).mode())


def see(state: State, obs: PyTree) -> PyTree:
    """Observations as the network wants them."""
    if not state.observations:
        return obs
    return jax.tree.map(normalize.apply, state.observations, obs, is_leaf=_is_stats)


def act(parts: Parts, params: PyTree, obs: PyTree) -> PyTree:
    """The distribution over actions, [..., A or D]."""
    return distribution(parts, params, parts.network.actor(params["network"], obs))


def distribution(parts: Parts, params: PyTree, output: Array) -> PyTree:
    """The distribution that the actor's output means."""
    if isinstance(parts.spec.action, Discrete):
        return distributions.Categorical(output)
    kind = distributions.TanhGaussian if parts.config.squash else distributions.Gaussian
    return kind(output, jnp.broadcast_to(params["log_std"], output.shape))


def begin(parts: Parts, state: State, rollout: Rollout) -> Lesson:
    """What is to be learnt from one rollout."""
    rollout = normalize.clip_rewards(rollout, parts.config.clip_rewards)
    after, rows, kept, explained = prepare(parts, state, rollout)
    return Lesson(Learner(state.params, state.optimiser, jnp.bool_(False)), rows, kept, after, explained)


def end(parts: Parts, lesson: Lesson, learner: Learner, sums: tuple[Metrics, Array]) -> tuple[State, Metrics]:
    """The agent after the update; metrics are means over the gradient steps that were tried."""
    metrics, tried = sums
    means = gradients.total(jax.tree.map(lambda x: x / jnp.maximum(tried, 1), metrics), parts.spec.axis_name)
    learning_rate = parts.learning_rate(learner.optimiser[-1].count)
    state = lesson.state._replace(params=learner.params, optimiser=learner.optimiser)
    return state, means | {"explained_variance": lesson.explained, "learning_rate": learning_rate}


def prepare(parts: Parts, state: State, rollout: Rollout) -> tuple[State, Batch, frames.Frames | tuple[()], Array]:
    """The state with this rollout in its statistics, rows [T * N, ...], their frames, and the explained variance.

    Values are computed here, in bulk, rather than step by step while acting. Observations are seen by the statistics of
    before.
    """
    config, steps, axis_name = parts.config, rollout.steps, parts.spec.axis_name
    reward, rewards = steps.reward, state.rewards
    if rewards:
        rewards = normalize.update_reward(rewards, reward, steps.last, steps.valid, config.gamma, axis_name)
        reward = normalize.apply_reward(rewards, reward)
    take_in = lambda stats, obs: normalize.update(stats, obs, steps.valid, axis_name)
    observations = state.observations and jax.tree.map(take_in, state.observations, steps.obs, is_leaf=_is_stats)
    if not parts.frame_stack:
        rollout = rollout._replace(steps=steps._replace(obs=see(state, steps.obs)))
    obs, kept = frames.rows(parts.frame_stack, rollout)
    critic = partial(parts.network.critic, state.params["network"])
    if parts.frame_stack:  # stacks for a minibatch at a time
        look = partial(frames.look, parts.frame_stack, kept)
        value = jax.lax.map(lambda some: critic(look(some)), obs.reshape(config.num_minibatches, -1))
    else:
        value = critic(obs)
    value = value.reshape(reward.shape)
    next_value = jnp.concatenate([value[1:], critic(see(state, rollout.next_obs))[None]])
    discount = config.gamma * steps.discount
    advantage = returns.gae(reward, discount, value, next_value, steps.last, config.gae_lambda)
    target = advantage + value
    weight = steps.valid.astype(jnp.float32)
    rows = minibatch.flatten(Batch((), steps.action, steps.extras, value, advantage, target, weight))
    spread = _variance(target, weight, axis_name)
    explained = jnp.where(spread > 0, 1 - _variance(advantage, weight, axis_name) / jnp.maximum(spread, 1e-8), 0)
    return state._replace(observations=observations, rewards=rewards), rows._replace(obs=obs), kept, explained


def standardise(parts: Parts, batches: Batch) -> Batch:
    """Minibatches [K, B] with advantages of mean 0 and standard deviation 1 in each."""
    if not parts.config.normalize_advantage:
        return batches
    total = partial(gradients.total, axis_name=parts.spec.axis_name)
    mean = total((batches.weight * batches.advantage).sum(1, keepdims=True))
    distance = batches.advantage - mean
    variance = total((batches.weight * distance**2).sum(1, keepdims=True))
    return batches._replace(advantage=distance / (jnp.sqrt(variance) + 1e-8))


def descend(parts: Parts, lesson: Lesson, learner: Learner, batch: Batch) -> tuple[Learner, tuple[Metrics, Array]]:
    """One gradient step, or none once the policy has moved too far: what comes after is computed and not counted."""
    params, optimiser, stopped = learner
    tried = ~stopped
    batch = batch._replace(obs=frames.look(parts.frame_stack, lesson.frames, batch.obs))
    gradient, metrics = minibatch.accumulate(jax.grad(partial(parts.objective, parts), has_aux=True), params, batch)
    updates, next_optimiser = parts.optimiser.update(gradient, optimiser, params)
    after = optax.apply_updates(params, updates), next_optimiser
    if parts.config.target_kl is not None:
        stopped |= gradients.total(metrics["approx_kl"], parts.spec.axis_name) > 1.5 * parts.config.target_kl
        after = jax.tree.map(partial(jnp.where, stopped), (params, optimiser), after)
    return Learner(*after, stopped), (jax.tree.map(lambda x: tried * x, metrics), tried.astype(jnp.float32))


def loss(parts: Parts, params: PyTree, batch: Batch) -> tuple[Array, Metrics]:
    """The loss of equation 9, a sum of weighted rows, and its parts.

    ratio r = pi(a|s) / pi_old(a|s);  policy loss = -min(r A, clip(r, 1 - eps, 1 + eps) A)  (equation 7)
    """
    config = parts.config
    output, value = parts.network.both(params["network"], batch.obs)
    policy = distribution(parts, params, output)
    log_ratio = policy.log_prob(batch.action) - batch.policy.log_prob(batch.action)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    policy_loss = -jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
    error = (value - batch.target) ** 2
    if config.value_clip:
        near = batch.value + jnp.clip(value - batch.value, -config.clip, config.clip)
        error = jnp.maximum(error, (near - batch.target) ** 2)
    entropy = policy.entropy()
    total = policy_loss + config.value_coef * 0.5 * error - config.entropy_coef * entropy
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": 0.5 * error,
        "entropy": entropy,
        "approx_kl": ratio - 1 - log_ratio,  # Schulman 2020, "Approximating KL divergence", k3
        "clip_fraction": (jnp.abs(ratio - 1) > config.clip).astype(jnp.float32),
    }
    weigh = lambda x: jnp.sum(batch.weight * x)
    return weigh(total), jax.tree.map(weigh, metrics)


def _variance(x: Array, weight: Array, axis_name: str | None) -> Array:
    """Of all weighted elements on all devices."""
    count, total = gradients.total((weight.sum(), (weight * x).sum()), axis_name)
    count = jnp.maximum(count, 1)
    return gradients.total((weight * (x - total / count) ** 2).sum(), axis_name) / count


def _is_stats(x: PyTree) -> bool:
    return isinstance(x, normalize.Stats)
