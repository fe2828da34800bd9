"""Define the activations that every layer can apply, and call layers in C with theirs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.kernels import build

ACTIVATIONS = {"none": lambda x: x, "tanh": jnp.tanh, "relu": jax.nn.relu}  # in the order of csrc/activations.h


def call(name: str, results: Any, activation: str, numbers: Mapping[str, int], **layouts: Any) -> Callable[..., Any]:
    """Return the C function of a layer with its attributes: the activation, and the numbers as int32."""
    attributes = {"activation": list(ACTIVATIONS).index(activation), **numbers}
    found = build.call(name, results, vmap_method="broadcast_all", **layouts)
    return partial(found, **{name: np.int32(value) for name, value in attributes.items()})
