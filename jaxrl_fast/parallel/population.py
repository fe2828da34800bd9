"""Describe the hyperparameters that differ between the members of one program, and the data that they share."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxrl_fast.types import Agent


class Varied(NamedTuple):
    """The hyperparameters that differ between members, and the function that makes one member's agent from them."""

    values: Mapping[str, Any]  # f32 [S] by name
    make: Callable[[Mapping[str, Any]], "Agent"]  # from scalars and data by name, which may be traced
    data: Mapping[str, Any] = MappingProxyType({})  # trees of arrays by name, which all members learn from
