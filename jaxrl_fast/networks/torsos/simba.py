"""Read observations of any shape, flattened, with residual blocks (Lee et al. 2025, SimBa)."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.networks.dense import Dense, LayerNorm
from jaxrl_fast.networks.options import Kind, Options
from jaxrl_fast.types import PyTree

EXPANSION = 4  # of the inner layer of a residual block


class ResidualMLP(nn.Module):
    """Residual blocks of one width W and a final normalization: [..., F] to [..., W].

    First a linear layer, then `num` blocks x + linear(activation(linear(LayerNorm(x)))) whose inner width is EXPANSION
    times W, then a LayerNorm.
    """

    width: int
    num: int
    activation: str
    dtype: jnp.dtype
    begins: bool = True  # has the linear layer
    ends: bool = True  # has the final normalization

    @nn.compact
    def __call__(self, x):
        x = Dense(self.width, 1.0, self.dtype)(x) if self.begins else x
        for _ in range(self.num):
            y = Dense(EXPANSION * self.width, np.sqrt(2), self.dtype, self.activation)(LayerNorm()(x))
            x = x + Dense(self.width, np.sqrt(2), self.dtype)(y)
        return LayerNorm()(x) if self.ends else x


def layers(obs: PyTree, options: Options, part: slice, after_memory: bool = False) -> ResidualMLP:
    """Return some of the blocks. Raise ValueError for options that simba does not support."""
    widths = options.hidden
    if len(set(widths)) > 1:
        got = ", ".join(map(str, widths))
        raise ValueError(f"network.hidden_sizes: simba's blocks must have one width, got {got}; repeat {widths[0]}")
    if options.batch_renorm or options.noisy:
        option, got = ("target", "none") if options.batch_renorm else ("noisy", "true")
        raise ValueError(f"{option}: network simba has layers of its own, got {got}; use network mlp")
    begins = part.start is None or after_memory
    return ResidualMLP(widths[0], len(widths[part]), options.activation, options.dtype, begins, part.stop is None)


KIND = Kind((128,), "relu", 512, layers)
