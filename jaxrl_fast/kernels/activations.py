"""Define the activations that every layer can apply."""

import jax
import jax.numpy as jnp
import numpy as np

ACTIVATIONS = {"none": lambda x: x, "tanh": jnp.tanh, "relu": jax.nn.relu}  # in the order of csrc/activations.h


def index(activation: str) -> np.int32:
    """Return the number of an activation in csrc/activations.h."""
    return np.int32(list(ACTIVATIONS).index(activation))
