"""Random network distillation: a reward for observations that are new to a predictor (Burda et al. 2018).

A target network with random parameters, which never change, maps an observation to features. A predictor learns these
features on the observations that were visited. Its error is the intrinsic reward of the step to an observation
(section 2.2). A second value function, with a separate discount factor, learns the intrinsic returns (section 2.3).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast import networks
from jaxrl_fast.networks import torsos, views
from jaxrl_fast.rl import frame_stack, normalize, returns
from jaxrl_fast.rl.bonuses import annealed
from jaxrl_fast.rl.bonuses.record import Added, Bonus
from jaxrl_fast.rl.policies import Policy
from jaxrl_fast.types import Array, EnvSpec, Key, Metrics, Parallelism, PyTree, Rollout

CLIP = 5.0  # of standardized observations (section 2.4)


class State(NamedTuple):
    """What is not learned by gradient steps."""

    target: PyTree  # parameters of the target network
    seen: PyTree  # normalize.Stats of each leaf of the next observations, of their newest frame
    scale: normalize.RewardScale  # of intrinsic rewards, whose sums do not end with episodes
    key: Key


class Rows(NamedTuple):
    """The rows that the loss is computed from, [T, N, ...]."""

    obs: PyTree  # f32: the next observations, standardized
    features: Array  # [..., K]: the target network's
    weight: Array  # of the predictor's loss: 1 / share for rows that train it, else 0
    target: Array  # of the intrinsic value


class Context(NamedTuple):
    """The constants of the bonus, which all functions of this module share."""

    config: Any
    spec: EnvSpec
    parallelism: Parallelism
    view: views.View  # what the policy sees
    obs: PyTree  # ShapeDtypeStruct: the part of an observation whose novelty is measured
    target: networks.Network
    predictor: networks.Network
    critic: networks.Network


def make(config: Any, spec: EnvSpec, policy: Policy, num_updates: int, parallelism: Parallelism) -> Bonus:
    """Return the bonus. Its networks are those of the run's options without memory, the predictor two layers deeper.

    Raises ValueError if images are floating-point numbers, which a network would divide by 255 once standardized.
    """
    normalize.check_images(config, spec, "bonus rnd")
    options = networks.options_of(config)._replace(memory="none")
    view, critics_view = views.views(config, spec.obs)
    obs = view(jax.eval_shape(partial(frame_stack.newest, spec.frame_stack), spec.obs))
    hidden = torsos.resolve(obs, options).hidden
    deeper = options._replace(hidden=(*hidden, *2 * hidden[-1:]))
    network = partial(networks.network, obs, config.bonus.features)
    critic = views.through(critics_view, networks.network(critics_view(spec.obs), None, options))
    context = Context(config, spec, parallelism, view, obs, network(options), network(deeper), critic)
    return Bonus(partial(init, context), partial(prepare, context), partial(loss, context), summarize)


def init(context: Context, key: Key) -> tuple[PyTree, State]:
    """Return fresh parameters and empty statistics."""
    key_target, key_predictor, key_critic, key = jax.random.split(key, 4)
    learned = {"predictor": context.predictor.init(key_predictor), "critic": context.critic.init(key_critic)}
    scale = normalize.init_reward(context.spec.num_envs)
    return learned, State(context.target.init(key_target), normalize.init(context.obs), scale, key)


def prepare(context: Context, agent: Any, rollout: Rollout, advantage: Array) -> Added:
    """Return the weighted sum of the advantages of both rewards.

    Statistics of observations and rewards include this rollout before it is scored. The first rollout, of an untrained
    policy, initializes them, as random actions do in section 2.4.

    The advantages take part in the first exchange between shards, so that it follows that of the environment's rewards:
    sums over cores must follow one another (`parallel.collectives`).
    """
    config, axis_name = context.config.bonus, context.parallelism.axis_name
    state, valid = agent.bonus, rollout.steps.valid
    key, key_rows = jax.random.split(state.key)
    next_obs = successors(context, rollout)
    own_moments = normalize.seen(state.seen, next_obs, valid), normalize.moments(advantage, valid, (0, 1))
    seen = normalize.merge(state.seen, normalize.pool(own_moments, axis_name)[0])
    obs = normalize.apply(seen, next_obs, CLIP)
    features = frame_stack.map_rollout(partial(context.target.apply, state.target), obs)
    predicted = frame_stack.map_rollout(partial(context.predictor.apply, agent.params["bonus"]["predictor"]), obs)
    error = jnp.where(valid, distance(predicted, features), 0)
    scale = normalize.update_reward(state.scale, error, jnp.zeros_like(valid), valid, config.gamma, axis_name)
    reward = normalize.apply_reward(scale, error, clip=jnp.inf)
    own, target = advantages(context, agent, rollout, reward)
    trains = valid & (jax.random.uniform(annealed.of_shard(context.parallelism, key_rows), valid.shape) < config.share)
    return Added(
        state=state._replace(seen=seen, scale=scale, key=key),
        advantage=config.extrinsic_coef * advantage + config.coef * own,
        rows=Rows(obs, features, trains / config.share, target),
        metrics={},
        moments=normalize.moments(jnp.stack([target, own, reward]), valid, axis=(1, 2)),
    )


def summarize(moments: normalize.Moments) -> Metrics:
    """Return the metrics of a rollout from the moments [3] of its intrinsic targets, advantages and rewards."""
    of_values = jax.tree.map(lambda x: x[:2], moments)
    return {
        "intrinsic_reward": moments.mean[2],
        "intrinsic_explained_variance": normalize.explained_variance(of_values),
    }


def successors(context: Context, rollout: Rollout) -> PyTree:
    """Return the next observations [T, N, ...] as the policy sees them, of stacks the newest frame."""
    obs, newest = rollout.steps.obs, partial(frame_stack.newest, context.spec.frame_stack)
    obs = obs.newest if isinstance(obs, frame_stack.CompressedStack) else newest(obs)
    shift = lambda x, end: jnp.concatenate([x[1:], end[None]])
    return context.view(jax.tree.map(shift, obs, newest(rollout.next_obs)))


def distance(predicted: Array, features: Array) -> Array:
    """Return the mean squared difference of features, f32 [...] of [..., K]."""
    return ((predicted - features) ** 2).mean(-1)


def advantages(context: Context, agent: Any, rollout: Rollout, reward: Array) -> tuple[Array, Array]:
    """Return the advantages of intrinsic rewards and the targets of their value, f32 [T, N].

    By default, returns do not end with episodes. A reset then takes no time: the last observation has the value of the
    next episode's first one, and the discount of the reset row is 1.
    """
    config, steps = context.config, rollout.steps
    critic = partial(context.critic.apply, agent.params["bonus"]["critic"])
    next_obs = normalize.apply(agent.observations, rollout.next_obs)
    rollout = rollout._replace(steps=steps._replace(obs=normalize.apply(agent.observations, steps.obs)))
    is_stack = isinstance(steps.obs, frame_stack.CompressedStack)
    obs, kept = frame_stack.encode_rollout(context.spec.frame_stack if is_stack else 0, rollout)
    value = frame_stack.map_rollout(critic, obs, kept, config.num_minibatches)
    value = jnp.concatenate([value, critic(next_obs)[None]])
    if config.bonus.episodic:
        discount, last = config.bonus.gamma * steps.discount, steps.last
    else:
        discount, last = jnp.where(steps.valid, config.bonus.gamma, 1), jnp.zeros_like(steps.last)
        value = value.at[:-1].set(jnp.where(steps.valid, value[:-1], value[1:]))
    advantage = returns.gae(reward, discount, value[:-1], value[1:], last, config.gae_lambda)
    return advantage, advantage + value[:-1]


def loss(context: Context, params: PyTree, batch: Any) -> tuple[Array, Metrics]:
    """Return the loss of each row [...]: of the predictor, and of the intrinsic value as that of the value."""
    learned, rows = params["bonus"], batch.bonus
    predictor_loss = rows.weight * distance(context.predictor.apply(learned["predictor"], rows.obs), rows.features)
    value_loss = 0.5 * (context.critic.apply(learned["critic"], batch.obs) - rows.target) ** 2
    metrics = {"predictor_loss": predictor_loss, "intrinsic_value_loss": value_loss}
    return predictor_loss + context.config.value_coef * value_loss, metrics
