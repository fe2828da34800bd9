"""Act by a distribution over actions, whose parameters a network outputs together with a value.

The parameters are those of the network, and "log_std" where the standard deviations are the same in all states.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from jaxrl_fast import networks
from jaxrl_fast.networks import views
from jaxrl_fast.options.explore import GSDE, StateDependent, squashes
from jaxrl_fast.options.ppo import PPO
from jaxrl_fast.rl import distributions, heads, product, state_noise, value_distributions
from jaxrl_fast.types import Box, Decision, EnvSpec, Key, PolicyInput, PyTree, Transition
from jaxrl_fast.types.spaces import Hybrid


class Policy(NamedTuple):
    """The distribution over actions, and the network that outputs its parameters."""

    head: heads.Head
    network: networks.ActorCritic
    gsde: GSDE | None = None  # with it, carries are pairs, of the memory and of the exploration noise

    @property
    def initial_carry(self) -> PyTree:
        """Return the carry of one environment at the start of an episode."""
        memory = self.network.initial_carry
        return (memory, state_noise.initial_carry(self.head)) if self.gsde else memory


class Sampled(NamedTuple):
    """The extras of a decision with a tanh policy, where the action is a function of the sample.

    Without a tanh policy, the extras are the policy only.
    """

    policy: PyTree  # the distribution of the sample
    sample: Array  # f32 [N, D], before the tanh; with choices [N, k + D]


def make(config: PPO, spec: EnvSpec) -> Policy:
    """Return the policy that the options choose. Raise ValueError if it does not fit the actions."""
    options = networks.options_of(config, num_atoms=value_distributions.num_atoms(config.value))
    chosen, sees = config.policy, views.views(config, spec.obs)
    squash = squashes(chosen)
    if chosen.kind != "gaussian" and not isinstance(spec.action, Box | Hybrid):
        raise ValueError(f"policy: {spec.id} has discrete actions, got {chosen.kind}; leave it out")
    if isinstance(chosen, GSDE) and isinstance(spec.action, Hybrid):
        raise ValueError(f"policy: {spec.id} has actions with discrete parts, got gsde; use tanh or state_dependent")
    if isinstance(chosen, GSDE) and isinstance(spec.action, Box):
        network = networks.actor_critic(spec.obs, spec.action.num_outputs, options, sees=sees, with_features=True)
        return Policy(state_noise.Head(spec.action, squash, network.num_features), network, chosen)
    log_std_offset = chosen.log_std_init if isinstance(chosen, StateDependent) else None
    make_head = product.ProductHead if isinstance(spec.action, Hybrid) else heads.head
    head = make_head(spec.action, squash, log_std_offset)
    return Policy(head, networks.actor_critic(spec.obs, head.num_outputs, options, sees=sees))


def init(policy: Policy, key: Key, log_std: float) -> dict[str, PyTree]:
    """Return fresh parameters, with this log standard deviation."""
    params = {"network": policy.network.init(key)}
    log_stds = policy.head.init(log_std)
    return params if log_stds is None else params | {"log_std": log_stds}


def sample(policy: Policy, params: PyTree, inputs: PolicyInput, carry: PyTree, noise: PyTree) -> Decision:
    """Sample actions for N observations. The extras of the decision are their distribution, or `Sampled`."""
    pi, output, carry = _act(policy, policy.network.step, params, inputs, carry)
    if policy.gsde:
        memory, own = carry[0], state_noise.renew(carry[1], policy.gsde.sample_freq, noise)
        noise, carry = state_noise.noise(output, params["log_std"], pi.log_std, own.matrix), (memory, own)
    x = pi.sample_from(noise)
    numbers = pi.numbers if isinstance(pi, product.Product) else pi
    is_action = not isinstance(
        numbers, distributions.TanhGaussian
    )  # else the sample cannot be recovered from the action
    return Decision(policy.head.to_action(x), carry, extras=pi if is_action else Sampled(pi, x))


def mode(policy: Policy, params: PyTree, inputs: PolicyInput, carry: PyTree) -> Decision:
    """Take the mode of the distribution."""
    pi, _, carry = _act(policy, policy.network.act, params, inputs, carry)
    return Decision(policy.head.to_action(pi.mode()), carry)


def outputs(policy: Policy, params: PyTree, batch: Any) -> tuple[Any, Array]:
    """Return the distributions over actions, and the outputs for values.

    Rows have `obs`, `action_mask`, `carry` and `reset`.
    """
    (output, value), _ = policy.network.unroll(params["network"], batch.obs, batch.carry, batch.reset)
    return policy.head.make(output, params.get("log_std"), batch.action_mask), value


def samples_of(steps: Transition) -> Sampled:
    """Return the distributions that acted in a rollout, and their samples."""
    return steps.extras if isinstance(steps.extras, Sampled) else Sampled(steps.extras, steps.action)


def _act(
    policy: Policy, step: Callable[..., tuple[Array, PyTree]], params: PyTree, inputs: PolicyInput, carry: PyTree
) -> tuple[Any, Array, PyTree]:
    """Return the distribution over actions for N observations, the actor's output, and the carry after these.

    `step` is the network's `step`, or its `act`, which does not change the critic's part of the carry.
    """
    output, memory = step(params["network"], inputs.obs, carry[0] if policy.gsde else carry)
    pi = policy.head.make(output, params.get("log_std"), inputs.action_mask)
    return pi, output, (memory, carry[1]) if policy.gsde else memory
