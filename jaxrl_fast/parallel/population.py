"""Hyperparameters in which the members of one program differ."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxrl_fast.types import Agent


class Varied(NamedTuple):
    """Hyperparameters in which members differ, and the agent that one member's make."""

    values: Mapping[str, Any]  # f32 [S] by name
    make: Callable[[Mapping[str, Any]], "Agent"]  # of scalars, which may be traced
