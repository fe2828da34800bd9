"""Read images [H, W, C] with the convolutions of DQN.

nature   of at least 36x36 (Mnih et al. 2015, "Human-level control ...", methods)
dqn2013  the same, with a third of the work: two convolutions (Mnih et al. 2013, "Playing Atari ...", section 4.1)
"""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp

from jaxrl_fast.networks.conv import Conv
from jaxrl_fast.networks.dense import LayerNorm
from jaxrl_fast.networks.options import Kind
from jaxrl_fast.networks.torsos import mlp

MIN_SIDE = 36  # for three convolutions


class Convolutions(nn.Module):
    """'Valid' convolutions, each activated: [..., H, W, C] to [..., H', W', channels]."""

    layers: tuple[tuple[int, int, int], ...]  # (channels, kernel side, stride)
    activation: str
    layer_norm: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        activation = "none" if self.layer_norm else self.activation
        for channels, side, stride in self.layers:
            x = Conv(channels, side, stride, "VALID", self.dtype, activation)(x)
            x = LayerNorm(self.activation)(x) if self.layer_norm else x
        return x


KIND = Kind((512,), "relu", 8, mlp.layers, partial(Convolutions, ((32, 8, 4), (64, 4, 2), (64, 3, 1))), MIN_SIDE)
DQN2013 = Kind((256,), "relu", 8, mlp.layers, partial(Convolutions, ((16, 8, 4), (32, 4, 2))), MIN_SIDE)
