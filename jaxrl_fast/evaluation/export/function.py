"""Write a policy as a function of arrays: from one observation, perhaps random numbers and a memory, to one action.

A whole batch is `jax.vmap` of it, so that the number of rows may be a symbol. Layers are traced for any device.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, ShapeDtypeStruct
from jax.interpreters import partial_eval

from jaxrl_fast.evaluation.inputs import arrays_of, seen, takes_mask, without_none
from jaxrl_fast.evaluation.policy import remembers
from jaxrl_fast.evaluation.saved_run import SavedRun, row_agent
from jaxrl_fast.networks import views
from jaxrl_fast.rollout import initial_carry
from jaxrl_fast.types import Agent, Env, Key, PolicyInput, PyTree, SampleNoise
from jaxrl_fast.types.spaces import mask_size
from jaxrl_fast.utils import target
from jaxrl_fast.utils.random import key_of_seed

Whole = Callable[[PolicyInput], PolicyInput]
OBSERVED, MASK = "an observation as the environment returns it", "which actions are allowed; if none is, all are"
KEY = "key"  # the input of a sampled policy that draws its random numbers itself


class Noise(NamedTuple):
    """One array of random numbers that a sampled policy depends on."""

    name: str
    spec: ShapeDtypeStruct  # for one row
    law: str  # its distribution, or "" if the algorithm does not name it
    axis: int | None  # the axis of the rows in the agent's noise


class Memory(NamedTuple):
    """One array of the memory that a policy takes and returns."""

    name: str
    initial: np.ndarray  # at the start of an episode


class PolicyFunction(NamedTuple):
    """A policy for single rows, with all preprocessing of observations and scaling of actions."""

    act: Callable[..., tuple[Array, tuple[Array, ...]]]  # (given, arrays of `noise`, of `memory`) to action and memory
    draw: Callable[[Key], tuple[Array, ...]]  # the noise of one row
    given: PolicyInput  # ShapeDtypeStruct of what the environment returns: an observation, and a mask or None
    noise: tuple[Noise, ...]  # () for a greedy policy
    action: ShapeDtypeStruct
    memory: tuple[Memory, ...] = ()  # () for a policy without memory
    whole: Whole = lambda given: given  # to an input with the parts that are not read


class Input(NamedTuple):
    """One array that an exported policy takes or returns, as its card describes it."""

    name: str
    shape: tuple[Any, ...]  # "b" is the number of rows
    dtype: str
    meaning: str


def make(saved: SavedRun, sampled: bool) -> PolicyFunction:
    """Return the policy of a run with a single seed, greedy or as in training."""
    env, state = saved.env, jax.device_put(saved.learners)
    agent = row_agent(saved) if sampled else saved.agent
    if env.spec.players:
        raise ValueError(f"export: {env.spec.id} has players, each with a policy; use load(RUN).policies")
    decide = agent.explore if sampled else agent.exploit
    initial = initial_carry(agent, 1)
    is_memory = remembers(agent, decide, state, env.spec.obs)
    structure: Any
    parts, structure = jax.tree.flatten(_noise_of_row(agent, key_of_seed(0)))
    axes = _row_axes(agent)
    noise = _describe(agent, parts, axes) if sampled else ()
    places = [i for i, part in enumerate(parts) if _is_random(part)]

    def act(given, drawn, memory):
        """Return the environment's action for one input, and the next memory."""
        filled = list(parts)
        for i, one, x in zip(places, noise, drawn, strict=False):
            filled[i] = x if one.axis is None else jnp.expand_dims(x, one.axis)
        inputs = seen(env, whole(jax.tree.map(lambda x: x[None], given)))
        carry = with_memory(initial, is_memory, [x[None] for x in memory])
        decision = decide(state, inputs, carry, structure.unflatten(filled))
        following = tuple(x[0] for x, flag in zip(jax.tree.leaves(decision.carry), is_memory) if flag)
        return env.view.to_env_action(decision.action)[0], following

    def draw(key):
        """Return random numbers for one row."""
        found = jax.tree.leaves(_noise_of_row(agent, key))
        return tuple(x if (a := axes[i]) is None else jnp.squeeze(x, a) for i, x in enumerate(found) if i in places)

    mask: Any = ShapeDtypeStruct((mask_size(env.spec.action),), jnp.bool_)
    given = PolicyInput(arrays_of(env), mask if takes_mask(env) else None)
    whole: Whole = lambda given: given
    view, _ = views.views(saved.settings.agent, env.spec.obs)
    if view is not views.everything:
        given, whole = parts_read(env, given, view)
    parts_of_memory = [x for x, flag in zip(jax.tree.leaves(initial), is_memory, strict=True) if flag]
    names = ["memory"] if len(parts_of_memory) == 1 else [f"memory_{i + 1}" for i in range(len(parts_of_memory))]
    memory = tuple(Memory(name, np.asarray(x[0])) for name, x in zip(names, parts_of_memory, strict=True))
    with target.tracing_for("any"):
        action, _ = jax.eval_shape(act, given, tuple(one.spec for one in noise), tuple(one.initial for one in memory))
    return PolicyFunction(act, draw, given, noise, action, memory, whole)


def parts_read(env: Env, given: PolicyInput, view: views.View) -> tuple[PolicyInput, Whole]:
    """Return the parts of an input [...] that a view of agents' observations depends on.

    Also return the function from a batch of such parts [B, ...] to inputs with zeros in place of the others.
    """

    def read(given: PolicyInput) -> Any:
        inputs = seen(env, given)
        return view(inputs.obs), inputs.action_mask

    wide = jax.tree.map(lambda x: ShapeDtypeStruct((1, *x.shape), x.dtype), given)
    jaxpr = jax.make_jaxpr(read)(wide).jaxpr
    used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    structure: Any
    leaves, structure = jax.tree.flatten(given.obs)
    kept = [x if flag else None for x, flag in zip(leaves, used)]

    def whole(parts: PolicyInput) -> PolicyInput:
        present = iter(found := jax.tree.leaves(parts.obs))
        zeros = lambda x: jnp.zeros((found[0].shape[0], *x.shape), x.dtype)
        filled = [zeros(x) if part is None else next(present) for x, part in zip(leaves, kept, strict=True)]
        return parts._replace(obs=structure.unflatten(filled))

    return given._replace(obs=without_none(structure.unflatten(kept))), whole


def with_memory(carry: PyTree, is_memory: list[bool], memory: Iterable[Array]) -> PyTree:
    """Return a carry whose leaves that `is_memory` marks are replaced by the arrays of a memory."""
    leaves, structure = jax.tree.flatten(carry)
    given = iter(memory)
    return jax.tree.unflatten(structure, [next(given) if f else x for x, f in zip(leaves, is_memory, strict=True)])


def inputs(function: PolicyFunction, keyed: bool) -> list[Input]:
    """Return the inputs in their order: parts of an observation, mask, memory, then a key if `keyed`, or noise."""
    found = [
        Input(name, ("b", *spec.shape), str(spec.dtype), MASK if name == "action_mask" else OBSERVED)
        for name, spec in named(function.given).items()
    ] + remembered(function, "memory")
    if function.noise and keyed:
        key = jax.random.key_data(key_of_seed(0))
        return [*found, Input(KEY, key.shape, str(key.dtype), "PRNG key data: jax.random.key_data(jax.random.key(0))")]
    meaning = "random numbers, drawn again for each call: "
    return found + [
        Input(one.name, ("b", *one.spec.shape), str(one.spec.dtype), meaning + (one.law or "as the algorithm draws"))
        for one in function.noise
    ]


def remembered(function: PolicyFunction, name: str) -> list[Input]:
    """Return the arrays of the memory, as inputs or outputs of this name."""

    def meaning(x: np.ndarray) -> str:
        if name != "memory":
            return "the memory for the next step"
        return f"at the start of an episode {x.flat[0]:g}" if (x == x.flat[0]).all() else "see initial_memory"

    return [
        Input(one.name.replace("memory", name), ("b", *one.initial.shape), str(one.initial.dtype), meaning(one.initial))
        for one in function.memory
    ]


def takes_numbers(function: PolicyFunction) -> bool:
    """Return whether random numbers may be inputs of the policy, rather than a PRNG key for some of them."""
    return all(jnp.issubdtype(one.spec.dtype, jnp.floating) for one in function.noise)


def named(given: PolicyInput) -> dict[str, Any]:
    """Return the arrays of an input by name: "obs", or "obs_" and the path of each part, and "action_mask"."""
    found: dict[str, Any] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(given):
        name = jax.tree_util.keystr(path, simple=True, separator="_")
        others = (f"{name}_{number}" for number in itertools.count(2))  # "arm_pos", and the "pos" of "arm"
        found[next(other for other in itertools.chain([name], others) if other not in found)] = x
    return found


def _noise_of_row(agent: Agent, key: Key) -> PyTree:
    """Return the noise of one decision in one environment."""
    return jax.tree.map(lambda x: x[0], agent.sample_noise(key, 1, 1))


def _row_axes(agent: Agent) -> list[int | None]:
    """Return the axis of the rows in each part of a decision's noise; None where a part has no such axis."""
    shapes = [
        [x.shape[1:] for x in jax.tree.leaves(jax.eval_shape(lambda n=n: agent.sample_noise(key_of_seed(0), 1, n)))]
        for n in (1, 2)
    ]
    return [next((i for i, (a, b) in enumerate(zip(*pair)) if a != b), None) for pair in zip(*shapes)]


def _is_random(part: Array) -> bool:
    """Return whether a part of the noise is random; integers are numbers of steps."""
    return not jnp.issubdtype(part.dtype, jnp.integer)


def _describe(agent: Agent, parts: list[Array], axes: list[int | None]) -> tuple[Noise, ...]:
    """Return the names, shapes and distributions of the random parts of a decision's noise."""
    found: list[Noise] = []
    laws = agent.sample_noise.laws if isinstance(agent.sample_noise, SampleNoise) else ()
    for part, axis in zip(parts, axes, strict=True):
        if _is_random(part):
            shape = part.shape if axis is None else (*part.shape[:axis], *part.shape[axis + 1 :])
            law = laws[min(len(found), len(laws) - 1)] if laws else ""
            same = sum(one.law == law for one in found)
            name = (law or "noise") + (f"_{same + 1}" if same else "")
            found.append(Noise(name, ShapeDtypeStruct(shape, part.dtype), law, axis))
    return tuple(found)
