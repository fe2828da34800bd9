"""Export an MLP as arrays (npz) and a module of a few lines that computes the policy with numpy alone."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs.spaces import MAX_BYTE, describe_obs
from jaxrl_fast.evaluation.export.function import PolicyFunction, named, takes_numbers
from jaxrl_fast.evaluation.saved_run import SavedRun
from jaxrl_fast.networks import reading
from jaxrl_fast.options.algorithm import ActorCritic
from jaxrl_fast.options.dqn import DQN
from jaxrl_fast.options.explore import StateDependent, squashes
from jaxrl_fast.options.value import Mean
from jaxrl_fast.rl import distributions, normalize, value_distributions
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.types import Box, Discrete, MultiDiscrete
from jaxrl_fast.types.spaces import Hybrid

ACTOR = "learner/params/actor/params/"
NETWORKS = {"ppo": "params/network/params/", "dqn": "learner/params/params/", "pqn": "params/params/"}
NETWORKS |= {"sac": ACTOR, "td3": ACTOR, "ddpg": ACTOR, "reppo": "params/actor/network/params/"}
LAYER = r"(?:Noisy)?Dense_(\d+)/(kernel|bias)|LayerNorm_(\d+)/(scale|bias)"
PARTS = {"torso/mlp": "hidden", "streams_0": "value_hidden", "streams_1": "advantage_hidden"}
IGNORED = r"critic_(torso|head)/|.*/spread_(kernel|bias)$"  # parameters that greedy actions do not depend on
NUM_SAMPLES = 256  # observations by which the encoding is recognized

Arrays = dict[str, np.ndarray]


class Unsupported(ValueError):
    """Numpy alone does not compute this policy."""


def write(saved: SavedRun, function: PolicyFunction) -> tuple[Arrays, str]:
    """Return the arrays of policy.npz and the content of policy.py.

    Raises:
        ValueError: If the network is not an MLP of a built-in algorithm on one array.
    """
    try:
        return _write(saved, function)
    except Unsupported as error:
        others = "stablehlo or onnx" if takes_numbers(function) else "stablehlo"
        raise ValueError(f"to npz: {error}; use {others}") from None


def _write(saved: SavedRun, function: PolicyFunction) -> tuple[Arrays, str]:
    config = saved.settings.agent
    if saved.settings.algo not in NETWORKS:
        raise Unsupported(f"needs a built-in algorithm, got {saved.settings.algo}")
    if not hasattr(function.given.obs, "shape"):
        parts = len(jax.tree.leaves(function.given.obs))
        raise Unsupported(f"needs observations of one array, got {parts if parts > 1 else 'a part of several'}")
    if function.memory and not config.has_memory:
        of_noise = f"noise {config.noise.kind}" if isinstance(config, ActorCritic) else "policy gsde"
        raise Unsupported(f"cannot sample with noise that lasts for several steps, got {of_noise}")
    if function.memory:
        raise Unsupported("needs a policy without memory, got one with a memory")
    if (kind := config.network.kind) in ("simba", "flash"):
        raise Unsupported(f"needs network mlp, got {kind}")
    if (dtype := config.network.compute_dtype) != "float32":
        raise Unsupported(f"needs compute_dtype float32, got {dtype}")
    if function.noise and getattr(config, "noisy", False):
        raise Unsupported("cannot sample from noisy layers, got noisy true")
    arrays = _layers(saved)
    lines = [*_read(saved, function, arrays), *_network(config, arrays), *_decide(saved, function, arrays)]
    return arrays, "\n".join([*_head(saved, function, arrays), *(f"    {line}" for line in lines), ""])


def _layers(saved: SavedRun) -> Arrays:
    """Return the parameters by their names in policy.py."""
    prefix = NETWORKS[saved.settings.algo]
    state = checkpoint.names(saved.learners)
    params = {name.removeprefix(prefix): np.asarray(x) for name, x in state.items() if name.startswith(prefix)}
    heads = {"actor_head": "head", "heads_0": "head"}
    if any(name.startswith("heads_1") for name in params):
        heads = {"heads_0": "value", "heads_1": "advantage"}
    found: Arrays = {}
    for name, x in params.items():
        part, _, rest = name.rpartition("/")
        layer = re.fullmatch(rf"({'|'.join(PARTS)})/(?:{LAYER})", name)
        if layer:
            kind = layer[3] or {"scale": "scale", "bias": "offset"}[layer[5]]
            found[f"{PARTS[layer[1]]}{layer[2] or layer[4]}.{kind}"] = x
        elif part in heads and rest in ("kernel", "bias"):
            found[f"{heads[part]}.{rest}"] = x
        elif not re.match(IGNORED, name):
            raise Unsupported(f"needs a network of dense layers (mlp), got the parameter {name}")
    return found


def _head(saved: SavedRun, function: PolicyFunction, arrays: Arrays) -> Iterator[str]:
    """Yield the lines above the body of `policy`."""
    shapes = [f"{name} {spec.dtype}{['B', *spec.shape]}" for name, spec in _signature(function)]
    yield f'"""The policy of {saved.env.spec.id}: policy.npz and numpy. Written by jaxrl_fast."""'
    yield from ("from pathlib import Path", "", "import numpy as np", "")
    yield from ('A = dict(np.load(Path(__file__).with_name("policy.npz")))', "", "")
    yield from ("def dense(x, name):", '    return x @ A[name + ".kernel"] + A[name + ".bias"]', "", "")
    yield from ("def hidden(x, name):", "    x = dense(x, name)")
    if any(name.endswith(".offset") for name in arrays):
        yield "    x = x - x.mean(-1, keepdims=True)"
        yield "    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6))"
        yield '    x = x * A[name + ".scale"] + A[name + ".offset"]'
    relu = saved.settings.agent.network.activation == "relu"
    result = "np.maximum(x, 0)" if relu else "np.tanh(x)"
    yield from (f"    return {result}", "", "")
    yield f"def policy({', '.join(name for name, _ in _signature(function))}):"
    result = f"{function.action.dtype}{['B', *function.action.shape]}"
    yield f"    # {', '.join(shapes)} -> {result}".replace("'", "")


def _signature(function: PolicyFunction) -> list[tuple[str, Any]]:
    return [*named(function.given).items(), *((one.name, one.spec) for one in function.noise)]


def _read(saved: SavedRun, function: PolicyFunction, arrays: Arrays) -> Iterator[str]:
    """Yield the lines from an observation to the network's input."""
    obs, spec, encode = function.given.obs, saved.env.spec.obs, saved.env.view.encode_obs
    index, sample = np.arange(NUM_SAMPLES).astype(obs.dtype), _sample(obs)
    flat = lambda x: np.asarray(x, np.float32).reshape(NUM_SAMPLES, -1)
    columns, scale = _columns(flat(encode(sample)), flat(sample))
    if not obs.shape and np.array_equal(encode(index), np.eye(NUM_SAMPLES, *spec.shape)):
        yield f"x = np.eye({spec.shape[0]}, dtype=np.float32)[obs]"
    elif columns:
        yield f"x = np.asarray(obs).astype(np.{obs.dtype.name if obs.dtype != bool else 'bool_'})"
        yield "x = x.reshape(len(x), -1).astype(np.float32)"
        if columns != list(range(math.prod(obs.shape))):
            arrays["obs.columns"] = np.array(columns)
            yield 'x = x[:, A["obs.columns"]]'
        if scale != 1:
            yield f"x = x / np.float32({scale})"
    else:
        raise Unsupported(f"needs observations as vectors or as states 0, 1, ..., got {describe_obs(obs)}")
    stats = getattr(getattr(saved.learners, "learner", saved.learners), "observations", None)
    if stats is not None:
        arrays["obs.mean"] = np.asarray(stats.mean).reshape(-1)
        arrays["obs.scale"] = np.asarray(jax.lax.rsqrt(jnp.asarray(stats.var) + normalize.EPSILON)).reshape(-1)
        yield f'x = np.clip((x - A["obs.mean"]) * A["obs.scale"], -{normalize.CLIP}, {normalize.CLIP})'
    elif reading.is_image(spec, saved.settings.agent.network.observations):
        yield f"x = x / np.float32({reading.WHITE})"


def _sample(like: Any) -> np.ndarray:
    """Return observations [NUM_SAMPLES, ...] of which no two entries are alike."""
    numbers = np.random.default_rng(0).integers(MAX_BYTE + 1, size=(NUM_SAMPLES, *like.shape))
    return (numbers % 2 if like.dtype == bool else numbers).astype(like.dtype)


def _columns(encoded: np.ndarray, raw: np.ndarray) -> tuple[list[int], int]:
    """Return which entry of the raw observation each encoded one is, and its divisor; [] if some are not an entry."""
    for scale in (1, MAX_BYTE + 1):
        places = {column.tobytes(): i for i, column in enumerate((raw / np.float32(scale)).T)}
        columns = [places.get(column.tobytes(), -1) for column in encoded.T]
        if -1 not in columns:
            return columns, scale
    return [], 1


def _network(config: Any, arrays: Arrays) -> Iterator[str]:
    """Yield the lines from the input to logits, means or values, `x` [B, num_outputs]."""
    count = lambda part: sum(name.startswith(part) and name.endswith(".kernel") for name in arrays)
    if count("hidden"):
        names = ", ".join(f'"hidden{i}"' for i in range(count("hidden")))
        yield from (f"for name in [{names}]:", "    x = hidden(x, name)")
    head = value_distributions.head_of(config.value if isinstance(config, DQN) else Mean(kind="mean"))
    if isinstance(head, value_distributions.CustomHead):
        raise Unsupported("needs value mean, c51 or quantile, got a custom one")
    shape = f".reshape(len(x), -1, {head.num})" if head.kind != "mean" else ""
    if "advantage.kernel" in arrays:
        assert count("value_hidden") == count("advantage_hidden") == 1
        yield f'value = dense(hidden(x, "value_hidden0"), "value"){shape}'
        yield f'advantage = dense(hidden(x, "advantage_hidden0"), "advantage"){shape}'
        yield "x = value + advantage - advantage.mean(1, keepdims=True)"
    else:
        yield f'x = dense(x, "head"){shape}'
    if head.kind == "c51":
        arrays["support"] = np.linspace(head.v_min, head.v_max, head.num, dtype=np.float32)
        yield "prob = np.exp(x - x.max(-1, keepdims=True))"
        yield 'x = (prob * A["support"]).sum(-1) / prob.sum(-1)'
    elif head.kind == "quantile":
        yield "x = x.mean(-1)"


def _decide(saved: SavedRun, function: PolicyFunction, arrays: Arrays) -> Iterator[str]:
    """Yield the lines from the network's output to the action."""
    space, to_env_action = saved.env.spec.action, saved.env.view.to_env_action
    law = function.noise[0].law if function.noise else ""
    masked, is_hybrid = function.given.action_mask is not None, isinstance(space, Hybrid)
    nums = space.nums if isinstance(space, MultiDiscrete | Hybrid) else ()
    is_joint = isinstance(space, MultiDiscrete) and saved.settings.algo != "ppo"  # see `agents.joint`
    cuts = np.cumsum(nums)[:-1].tolist()
    if is_hybrid:
        yield f"x, numbers = np.split(x, [{sum(nums)}], axis=-1)"
    if masked and not isinstance(space, Box):
        yield f"parts = np.split(np.asarray(action_mask, bool), {cuts}, axis=-1)"
        yield "allowed = np.concatenate([part | ~part.any(-1, keepdims=True) for part in parts], axis=-1)"
        if is_joint:
            yield f"first, *others = np.split(allowed, {cuts}, axis=-1)"
            yield from ("allowed = first", "for part in others:")
            yield "    allowed = (allowed[:, :, None] & part[:, None]).reshape(len(x), -1)"
        yield f"x = np.where(allowed, x, np.float32({distributions.FORBIDDEN!r}))"
    if law == "gumbel":
        yield "x = x + gumbel"
    choices = f"np.stack([part.argmax(-1) for part in np.split(x, {cuts}, axis=-1)], axis=-1)"
    if is_hybrid:
        yield from (f"choices = {choices}", "x = numbers")
    if is_hybrid or isinstance(space, Box):
        low, high = (np.asarray(to_env_action(jnp.full((1, *space.shape), x)))[0] for x in (-1.0, 1.0))
        num = len(nums)
        arrays["low"], arrays["high"] = low[num:], high[num:]
        yield from _continuous(saved, arrays, bool(law))
        yield 'x = x.reshape(len(x), *A["low"].shape)'
        yield 'x = 0.5 * (A["low"] + A["high"]) + 0.5 * (A["high"] - A["low"]) * x'
        yield 'x = np.clip(x, A["low"], A["high"])'
        yield f"return {'np.concatenate([choices, x], axis=-1)' if is_hybrid else 'x'}.astype(np.float32)"
        return
    if law == "gumbel" and isinstance(saved.settings.agent, ActorCritic):
        _check_learned(saved)
    first = np.asarray(to_env_action(space.zeros(1)))[0].tolist()
    start = f" + {first}" if np.any(first) else ""
    if isinstance(space, Discrete) or is_joint:
        yield "action = x.argmax(-1)"
        if law == "uniform":
            num = space.num if isinstance(space, Discrete) else math.prod(nums)
            yield f"count = {'allowed.sum(-1)' if masked else num}"
            yield "anything = np.minimum((uniform[:, 1] * count).astype(np.int32), count - 1)"
            if masked:
                yield "anything = (np.cumsum(allowed, -1) > anything[:, None]).argmax(-1)"
            yield f"action = np.where(uniform[:, 0] < {_epsilon(saved)!r}, anything, action)"
        if is_joint:
            yield f"action = np.stack(np.unravel_index(action, {nums}), axis=-1)"
    else:
        yield f"action = {choices}"
    yield f"return (action{start}).astype(np.int32)" if start else "return action.astype(np.int32)"


def _continuous(saved: SavedRun, arrays: Arrays, sampled: bool) -> Iterator[str]:
    """Yield the lines from the network's output to actions in [-1, 1], `x` [B, D], perhaps with noise `normal`."""
    algo, config = saved.settings.algo, saved.settings.agent
    if algo == "ppo":
        depends = isinstance(config.policy, StateDependent)
        if depends:
            yield "x, log_std = np.split(x, 2, axis=-1)"
        if sampled and depends:
            yield f"x = x + np.exp(log_std + np.float32({config.policy.log_std_init!r})) * normal"
        elif sampled:
            arrays["std"] = np.exp(np.asarray(saved.learners.params["log_std"]))
            yield 'x = x + A["std"] * normal'
        yield "x = np.tanh(x)" if squashes(config.policy) else "x = np.clip(x, -1, 1)"
        return
    if sampled:
        _check_learned(saved)
    if algo in ("sac", "reppo"):
        from jaxrl_fast.agents.sac import LOG_STD  # REPPO's are the same

        yield "x, log_std = np.split(x, 2, axis=-1)"
        if sampled and getattr(config, "std_bounds", "clip") == "tanh":
            raise Unsupported("cannot sample with std_bounds tanh")
        if sampled:
            yield "x = x + np.exp(np.clip(log_std, {}, {})) * normal".format(*LOG_STD)
        yield "x = np.tanh(x)"
    else:
        yield "x = np.tanh(x)"
        if sampled:
            yield f"x = np.clip(x + np.float32({config.noise.std!r}) * normal, -1, 1)"


def _check_learned(saved: SavedRun) -> None:
    """Raise Unsupported for a sampled policy at a checkpoint where actions were still uniformly random."""
    if saved.env_steps < (start := saved.settings.agent.first_learning(saved.settings.options.num_envs)):
        raise Unsupported(f"cannot sample before the first gradient step at {start} steps, got {saved.env_steps}")


def _epsilon(saved: SavedRun) -> float:
    """Return the probability of a random action in the first training environment at the checkpoint."""
    from jaxrl_fast.rl import exploration

    config = saved.settings.agent
    schedule = dataclasses.replace(config.explore, apex_alpha=0.0)
    return float(exploration.epsilons(schedule, 1, jnp.int32(min(saved.env_steps, exploration.MAX_COUNT)))[0])
