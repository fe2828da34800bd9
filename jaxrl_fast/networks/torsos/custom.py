"""Put a user's own flax module into a network: a map from observations to features.

The module is called with one batch axis: observations [B, *shape], float32 or `compute_dtype`, in the structure of the
environment's observation. Images come as [B, H, W, C] between 0 and 1. It returns features [B, F] or [B, ..., F], which
are flattened. It may have parameters, and no other variables.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from jaxrl_fast.networks import reading
from jaxrl_fast.networks.options import Kind, Options
from jaxrl_fast.networks.torsos import mlp
from jaxrl_fast.types import PyTree
from jaxrl_fast.utils import importing
from jaxrl_fast.utils.arguments import coerce, refuse_option
from jaxrl_fast.utils.errors import place, why
from jaxrl_fast.utils.parsing import as_annotated
from jaxrl_fast.utils.random import key_of_seed


class Custom(nn.Module):
    """A user's module, then dense layers."""

    obs: PyTree
    module: nn.Module
    mlp: nn.Module
    observations: str = "auto"

    def __call__(self, obs):
        specs = jax.tree.leaves(self.obs)
        pairs = zip(specs, jax.tree.leaves(obs), strict=True)
        parts = [reading.channels_last(spec, x, self.mlp.dtype, self.observations) for spec, x in pairs]
        batch = parts[0].shape[: parts[0].ndim - len(specs[0].shape)]
        parts = [x.reshape(-1, *x.shape[len(batch) :]) for x in parts]
        features = self.module(jax.tree.unflatten(jax.tree.structure(self.obs), parts))
        return self.mlp(features.reshape(*batch, math.prod(features.shape[1:])))


class JoinAction(nn.Module):
    """A user's module for critics: the action joins the features of the observation."""

    module: nn.Module

    def __call__(self, inputs):
        obs, action = inputs
        features = self.module(obs)
        return jnp.concatenate([features.reshape(features.shape[0], -1), action.astype(features.dtype)], axis=-1)


KIND = Kind((), "relu", 64, mlp.layers)


def is_custom(kind: str) -> bool:
    """Return whether a network's name is that of a user's class, "my_package.my_module:MyTorso"."""
    return ":" in kind


def make(obs: PyTree, options: Options, layers: nn.Module) -> Custom:
    """Return the user's module that the options name, checked on observations like `obs`, then dense layers.

    Raises ValueError for an unknown class or argument, and for an argument whose type is not that of its default. The
    module must map [B, *shape] to features [B, ...].
    """
    name, observations = options.kind, options.observations
    made = _construct(name, options.arguments)
    leaves, structure = jax.tree.flatten(obs)
    shapes = [ShapeDtypeStruct((2, *reading.shape(leaf, observations)), options.dtype) for leaf in leaves]
    batch = jax.tree.unflatten(structure, shapes)
    variables = _shapes(name, made.init, key_of_seed(0), batch)
    if state := sorted(set(variables) - {"params"}):
        problem = f"{name} must have parameters only, got {', '.join(state)}"
        raise ValueError(f"network: {problem}; use layers without state, such as LayerNorm")
    features = _shapes(name, made.apply, variables, batch)
    is_array = isinstance(features, ShapeDtypeStruct) and features.dtype.kind in "fV"  # V: bfloat16
    if not is_array or len(features.shape) < 2 or features.shape[0] != 2:
        got = f"{features.dtype}{list(features.shape)}" if hasattr(features, "shape") else type(features).__name__
        raise ValueError(f"network: {name} must return float features [2, F] for 2 observations, got {got}")
    return Custom(options.inputs(obs), JoinAction(made) if options.action_size else made, layers, observations)


def _shapes(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the shapes of a result. Raise ValueError with the line of the user's module that fails."""
    try:
        return jax.eval_shape(function, *arguments)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"network: {name} failed with {why(error)}{place(error)}") from error


def _construct(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    kind = importing.attribute(name, f"network {name!r}")
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        got = f"the class {importing.name_of(kind)}" if isinstance(kind, type) else f"type {type(kind).__name__}"
        raise ValueError(f"network: {name} must be a class derived from flax.linen.Module, got {got}")
    parameters = inspect.signature(kind).parameters.values()
    known = {p.name: as_annotated(p.default, p.annotation) for p in parameters if p.name not in importing.FLAX_FIELDS}
    for argument in arguments:
        if argument not in known:
            refuse_option(f"network {name}", argument, tuple(known))
    values = {a: coerce(f"network {name}", a, value, known[a]) for a, value in arguments.items()}
    try:
        return kind(**values)
    except Exception as error:
        hint = "; give it in network.options" if isinstance(error, TypeError) and " missing " in str(error) else ""
        raise ValueError(f"network: {name} cannot be made: {why(error)}{place(error)}{hint}") from error
