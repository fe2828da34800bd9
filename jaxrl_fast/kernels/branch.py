"""Choose between two results: by a branch on a CPU, and by selection elsewhere.

A branch, or a loop of unknown length, stops an accelerator until the host has read the condition.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.utils import target


def cond(condition: Array, then: Callable[..., Any], otherwise: Callable[..., Any], *arguments: Any) -> Any:
    """Return `then(*arguments)` if the scalar `condition` is True, else `otherwise(*arguments)`, of the same shapes."""
    if target.platform() == "cpu":
        return jax.lax.cond(condition, then, otherwise, *arguments)
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), then(*arguments), otherwise(*arguments))
