"""Define the record that describes a kind of torso."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn


class Kind(NamedTuple):
    """What distinguishes a kind of torso from others."""

    hidden: tuple[int, ...]  # default widths of the dense layers
    activation: str  # default
    min_rows: int  # the fewest rows of a gradient step that occupy a core of a CPU
    layers: Callable[..., nn.Module]  # dense layers, from (obs, options, part: slice, after_memory: bool)
    stem: Callable[..., nn.Module] | None = None  # from activation, layer_norm and dtype; None: observations are flat
    min_side: int = 1  # of an image or a board
