"""Describe the hyperparameters that differ between the members of one program."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxrl_fast.types import Agent


class Varied(NamedTuple):
    """The hyperparameters that differ between members, and the function that makes one member's agent from them."""

    values: Mapping[str, Any]  # f32 [S] by name
    make: Callable[[Mapping[str, Any]], "Agent"]  # from scalars by name, which may be traced
