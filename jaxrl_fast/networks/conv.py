"""Define the convolution of images, as a flax module."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxrl_fast import kernels
from jaxrl_fast.networks.init import declare_kernel


class Conv(nn.Module):
    """A square convolution of [..., H, W, C], activated, with the parameters of flax's Conv.

    Bytes are pixels and are divided by 255; other types are cast to `dtype`.
    """

    channels: int
    side: int
    stride: int
    padding: str
    dtype: jnp.dtype
    activation: str = "none"

    @nn.compact
    def __call__(self, x):
        shape = (self.side, self.side, x.shape[-1], self.channels)
        kernel = declare_kernel(self, np.sqrt(2), shape).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.channels,)).astype(self.dtype)
        rows = x.reshape(-1, *x.shape[-3:])
        rows = rows if x.dtype == jnp.uint8 else rows.astype(self.dtype)
        y = kernels.conv2d(rows, kernel, bias, self.stride, self.padding, self.activation)
        return y.reshape(*x.shape[:-3], *y.shape[1:])
