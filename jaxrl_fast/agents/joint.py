"""Present k independent choices as one: for algorithms that compute a value for each action.

The action with number j of all combinations stands for one option of each choice, in the order of
`numpy.unravel_index`. A value of each combination is exact: it assumes nothing about how choices act together. Its
price is the number of combinations, the product of the choices' numbers, at most MAX_ACTIONS.
"""

import math
from collections.abc import Callable
from functools import partial, reduce

import jax.numpy as jnp
import numpy as np

from jaxrl_fast.types import Agent, Array, Decision, Discrete, EnvSpec, Key, MultiDiscrete, PolicyInput, PyTree, Rollout

MAX_ACTIONS = 4096  # combinations, each with an output of the network


def spec_of(spec: EnvSpec, algorithm: str) -> EnvSpec:
    """Return the spec with one Discrete space in place of a MultiDiscrete one. Raise ValueError if it is too large."""
    assert isinstance(spec.action, MultiDiscrete)
    num = math.prod(spec.action.nums)
    if num > MAX_ACTIONS:
        problem = f"needs a value of each combination of choices, at most {MAX_ACTIONS:,}"
        raise ValueError(f"{algorithm}: {problem}, got {num:,} of {spec.id}; try ppo")
    return spec._replace(action=Discrete(num))


def agent_of(agent: Agent, spec: EnvSpec) -> Agent:
    """Return an agent for environments of `spec`, from the agent for `spec_of(spec)`."""
    assert isinstance(spec.action, MultiDiscrete)
    nums = spec.action.nums
    learning, steps = agent.learning, agent.learning.gradient_steps
    if steps is not None:
        prepare = lambda state, rollout, key: steps.prepare(state, _rollout(nums, rollout), key)
        learning = learning._replace(gradient_steps=steps._replace(prepare=prepare))
    return agent._replace(
        explore=partial(_decide, agent.explore, nums),
        exploit=partial(_decide, agent.exploit, nums),
        update=lambda state, rollout, key: agent.update(state, _rollout(nums, rollout), key),
        learning=learning,
    )


def split(nums: tuple[int, ...], action: Array) -> Array:
    """Return the options [..., k] of combinations [...]."""
    table = np.stack(np.unravel_index(np.arange(math.prod(nums)), nums), axis=-1)
    return jnp.asarray(table, jnp.int32)[action]


def join(nums: tuple[int, ...], action: Array) -> Array:
    """Return the combinations [...] of options [..., k]."""
    return reduce(lambda found, i: found * nums[i] + action[..., i], range(1, len(nums)), action[..., 0])


def join_mask(nums: tuple[int, ...], mask: Array | None) -> Array | None:
    """Return which combinations are allowed [..., prod(nums)]: those of allowed options, from a mask [..., sum(nums)].

    The result is None without a mask.
    """
    if mask is None:
        return None
    parts = jnp.split(mask, np.cumsum(nums)[:-1], axis=-1)
    pairs = lambda x, y: (x[..., :, None] & y[..., None, :]).reshape(*x.shape[:-1], -1)
    return reduce(pairs, parts)


def _decide(
    decide: Callable[..., Decision],
    nums: tuple[int, ...],
    state: PyTree,
    inputs: PolicyInput,
    carry: PyTree,
    noise: PyTree | Key,
) -> Decision:
    inputs = inputs._replace(action_mask=join_mask(nums, inputs.action_mask))
    decision = decide(state, inputs, carry, noise)
    return decision._replace(action=split(nums, decision.action))


def _rollout(nums: tuple[int, ...], rollout: Rollout) -> Rollout:
    steps = rollout.steps
    steps = steps._replace(action=join(nums, steps.action), action_mask=join_mask(nums, steps.action_mask))
    return rollout._replace(steps=steps, next_action_mask=join_mask(nums, rollout.next_action_mask))
