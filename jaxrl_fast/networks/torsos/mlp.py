"""Read observations of any shape, flattened, with dense layers."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.networks.batch_renorm import BatchRenorm, RenormOptions
from jaxrl_fast.networks.dense import Dense, LayerNorm, NoisyDense
from jaxrl_fast.networks.options import Kind, Options
from jaxrl_fast.types import PyTree


class MLP(nn.Module):
    """Dense layers, each followed by the activation: [..., *inputs] to [..., hidden[-1]].

    With `batch_renorm`, batch renormalization precedes every layer and follows the last one (Bhatt et al. 2024).
    """

    hidden: tuple[int, ...]
    activation: str
    layer_norm: bool
    dtype: jnp.dtype
    noisy: bool = False
    input_axes: int = 1  # of the first layer
    batch_renorm: RenormOptions | None = None

    @nn.compact
    def __call__(self, x):
        activation = "none" if self.layer_norm else self.activation
        renormalize = lambda x: BatchRenorm(self.batch_renorm)(x) if self.batch_renorm else x
        x = renormalize(x)
        for i, width in enumerate(self.hidden):
            layer = NoisyDense if self.noisy else Dense
            x = layer(width, np.sqrt(2), self.dtype, activation, 1 if i else self.input_axes)(x)
            x = LayerNorm(self.activation)(x) if self.layer_norm else x
            x = renormalize(x)
        return x


def layers(obs: PyTree, options: Options, part: slice, after_memory: bool = False, input_axes: int = 1) -> MLP:
    """Return some of the dense layers of a torso."""
    of_all = options.activation, options.layer_norm, options.dtype, options.noisy
    return MLP(options.hidden[part], *of_all, input_axes, options.batch_renorm)


KIND = Kind((64, 64), "tanh", 512, layers)
