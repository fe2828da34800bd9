"""SAC for discrete actions: expectations over all actions in place of samples (Christodoulou 2019).

The policy is categorical, and a critic has an output for each action. `agents.sac` makes the gradient steps.

Deviations from the paper: The target entropy is 0.89 of its maximum by default, as in CleanRL, not 0.98. With action
masks, the maximum is that of the allowed actions. The temperature's loss uses its logarithm.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast import networks, replay
from jaxrl_fast.agents import actor_critic, critics
from jaxrl_fast.agents.actor_critic import Context, Learner
from jaxrl_fast.networks.ensemble import ensemble
from jaxrl_fast.options.explore import Held, OrnsteinUhlenbeck
from jaxrl_fast.rl import normalize, off_policy
from jaxrl_fast.rl.bonuses import bc
from jaxrl_fast.rl.distributions import Categorical, chosen, masked
from jaxrl_fast.rl.off_policy import State
from jaxrl_fast.rl.value_distributions import Atoms
from jaxrl_fast.types import (
    Agent,
    Array,
    Box,
    Decision,
    Discrete,
    EnvSpec,
    Key,
    Metrics,
    PolicyInput,
    PyTree,
    SampleNoise,
)

ENTROPY_SHARE = 0.89  # of the largest entropy. With the paper's 0.98, two actions have probabilities of 0.58 and 0.42


class Noise(NamedTuple):
    """Random numbers for T decisions, [T, ...]."""

    step: Array  # [T] int32: 0, 1, 2 ...
    gumbel: Array  # [T, N, A] f32: independent standard Gumbel numbers


def check(config: Any, spec: EnvSpec) -> None:
    """Raise ValueError for options that do not fit the kind of actions."""
    if isinstance(spec.action, Box):
        if config.target_entropy_share is not None:
            problem = f"{spec.id} has continuous actions, whose entropy has no maximum"
            raise ValueError(f"target_entropy_share: {problem}, got {config.target_entropy_share}; use target_entropy")
        return
    if not isinstance(spec.action, Discrete):
        raise ValueError(f"sac: requires actions of one kind, got {spec.action} of {spec.id}; try ppo")
    if config.target_entropy is not None:
        problem = f"{spec.id} has discrete actions, got {config.target_entropy}"
        raise ValueError(f"target_entropy: {problem}; use target_entropy_share")
    if isinstance(config.noise, OrnsteinUhlenbeck | Held):
        raise ValueError(f"noise: {spec.id} has discrete actions, got {config.noise.kind}; leave it out")
    for name, needed in {"target_sigma": None, "std_bounds": "clip"}.items():
        if (given := getattr(config, name)) != needed:
            raise ValueError(f"{name}: {spec.id} has discrete actions, got {given}; leave it out")
    if config.network.kind == "flash":
        problem = f"{spec.id} has discrete actions, but flash normalizes batches of continuous ones"
        raise ValueError(f"network: {problem}, got flash; use auto")
    if config.crossq:
        raise ValueError(f"target: none requires continuous actions, got {spec.action} of {spec.id}; use average")


def critics_of(obs: PyTree, num_actions: int, num: int, options: networks.Options) -> networks.Network:
    """Return `num` functions Q(obs, .) of A actions as one network, with inputs (obs, int actions [...]).

    Its outputs are [num, ... (, M)]. With None for the actions, they are those of all actions, [num, ..., A (, M)].
    """
    whole = ensemble(networks.network(obs, num_actions, options), num)

    def apply(params: PyTree, inputs: tuple[PyTree, Array | None], noise: PyTree = ()) -> Array:
        output = whole.apply(params, inputs[0], noise)
        return output if inputs[1] is None else jax.vmap(chosen, (0, None))(output, inputs[1])

    return whole._replace(apply=apply)


def agent_of(context: Context, agent: Agent) -> Agent:
    """Return an agent that acts by a categorical policy, and otherwise as `agent`."""
    size = context.action_size
    return agent._replace(
        explore=partial(explore, context),
        exploit=partial(exploit, context),
        sample_noise=SampleNoise(partial(sample_noise, size), ("gumbel",)),
        initial_carry=(),
    )


def sample_noise(num_actions: int, key: Key, num_steps: int, num_envs: int) -> Noise:
    """Return the noise for T decisions among A actions."""
    gumbel = jax.random.gumbel(key, (num_steps, num_envs, num_actions))
    return Noise(jnp.arange(num_steps, dtype=jnp.int32), gumbel)


def policy(context: Context, params: PyTree, obs: PyTree, mask: Array | None) -> Categorical:
    """Return the distribution over the allowed actions."""
    return Categorical(masked(context.actor.apply(params, obs), mask))


def explore(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: Noise) -> Decision:
    """Sample actions [N]: uniformly among the allowed ones until the first gradient step, then from the policy."""
    now = off_policy.num_env_steps(context.ratio, state) + noise.step * context.ratio.num_envs
    obs = normalize.apply(state.learner.observations, inputs.obs)
    logits = policy(context, state.learner.params.actor, obs, inputs.action_mask).logits
    anything = masked(jnp.zeros_like(logits), inputs.action_mask)
    pi = Categorical(jnp.where(now < context.ratio.first_learning, anything, logits))
    return Decision(pi.sample_from(noise.gumbel), carry)


def exploit(context: Context, state: State, inputs: PolicyInput, carry: PyTree, noise: Noise) -> Decision:
    """Take the most probable actions [N]."""
    obs = normalize.apply(state.learner.observations, inputs.obs)
    return Decision(policy(context, state.learner.params.actor, obs, inputs.action_mask).mode(), carry)


def td_target(
    context: Context, learner: Learner, batch: replay.Sample, noise: None, key: Key
) -> tuple[None, Callable[[Array], Atoms]]:
    """Return None for all actions, and a function from the critics' outputs there to the target of Q(obs, action).

    The target is r + g sum_a pi(a|s') (min_i Q_i(s', a) - alpha log pi(a|s')) (eqs. 3 and 10), as one atom for each
    action with the weight pi(a|s'). For distributions, each action has those of `critics.minimum`. With
    `num_target_critics`, i runs over that many critics, drawn by the key.
    """
    config = context.config
    pi = policy(context, learner.params.actor, batch.next_obs, batch.next_action_mask)
    probs = pi.probs()
    cost = actor_critic.temperature(context, learner.params) * jnp.where(probs > 0, pi.log_probs(), 0)

    def target_of(output: Array) -> Atoms:
        if config.num_target_critics:
            output = output[jax.random.permutation(key, config.num_critics)[: config.num_target_critics]]
        num, rows, actions, *size = output.shape
        each = critics.minimum(context, output.reshape(num, rows * actions, *size))
        atom, weight = (x.reshape(rows, actions, -1) for x in each)
        value = batch.reward[:, None, None] + batch.discount[:, None, None] * (atom - cost[..., None])
        return Atoms(value.reshape(rows, -1), (probs[..., None] * weight).reshape(rows, -1))

    return None, target_of


def policy_loss(
    context: Context, learner: Learner, batch: replay.Sample, weight: Array, params: PyTree
) -> tuple[Array, tuple[Array, Metrics, None]]:
    """Return the weighted sum of sum_a pi(a|s) (alpha log pi(a|s) - min_i Q_i(s, a)) over the rows (eq. 12).

    With `num_target_critics` or quantiles, the mean over i replaces the minimum. Also returns by how much the entropy
    exceeds its target, f32 [] (eq. 11), metrics [B], and None for running statistics.
    """
    config = context.config
    pi = policy(context, params, batch.obs, batch.action_mask)
    values = critics.values(context, learner, batch.obs, None)
    takes_mean = config.num_target_critics or context.value_head.kind == "quantile"
    value = pi.expect(values.mean(0) if takes_mean else values.min(0))
    entropy = pi.entropy()
    losses = -actor_critic.temperature(context, learner.params) * entropy - value
    share = ENTROPY_SHARE if config.target_entropy_share is None else config.target_entropy_share
    mask = batch.action_mask
    excess = entropy - share * jnp.log(jnp.float32(context.action_size) if mask is None else mask.sum(-1))
    return (weight * losses).sum(), ((weight * excess).sum(), {"policy_loss": losses, "entropy": entropy}, None)


def cloning_costs(context: Context, params: PyTree, steps: bc.Demonstrations) -> Array:
    """Return -log pi(a|s) of the steps of a dataset, [B]."""
    return -policy(context, params, steps.obs, steps.action_mask).log_prob(steps.action)
