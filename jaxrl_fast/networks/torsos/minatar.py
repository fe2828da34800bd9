"""Read small boards [H, W, C] with 16 3x3 convolutions (Young & Tian 2019, "MinAtar", section 3)."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast import kernels
from jaxrl_fast.networks.init import declare_kernel
from jaxrl_fast.networks.options import Kind, Options
from jaxrl_fast.networks.torsos import mlp
from jaxrl_fast.types import PyTree


class Boards(nn.Module):
    """One 'valid' convolution of small boards, activated: [..., H, W, C] to [..., F, H', W'], channels first.

    With `layer_norm`, each pixel's channels are normalized before the activation.
    """

    channels: int
    side: int
    activation: str
    layer_norm: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        shape = (self.side, self.side, x.shape[-1], self.channels)
        kernel = declare_kernel(self, np.sqrt(2), shape).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.channels,)).astype(self.dtype)
        scale = offset = None
        if self.layer_norm:
            scale = self.param("scale", nn.initializers.ones, (self.channels,)).astype(self.dtype)
            offset = self.param("offset", nn.initializers.zeros, (self.channels,)).astype(self.dtype)
        boards = x.reshape(-1, *x.shape[-3:])
        y = kernels.board_conv(boards, kernel, bias, scale, offset, self.activation)
        return y.reshape(*x.shape[:-3], *y.shape[1:])


def layers(obs: PyTree, options: Options, part: slice, after_memory: bool = False) -> mlp.MLP:
    """Return some of the dense layers of a torso.

    Features of boards keep their axes [F, H', W'] up to the first dense layer: `kernels.dense` reads them as they lie.
    """
    is_first = 0 in range(len(options.hidden))[part] and not after_memory
    is_alone = len(jax.tree.leaves(options.inputs(obs))) == 1
    return mlp.layers(obs, options, part, after_memory, 3 if is_first and is_alone else 1)


KIND = Kind((128,), "relu", 64, layers, partial(Boards, 16, 3), min_side=3)
