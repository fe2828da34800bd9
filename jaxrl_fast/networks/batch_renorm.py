"""Define batch renormalization (Ioffe 2017), whose running statistics are variables in addition to the parameters.

The collection "batch_stats" holds the running statistics. A network with such layers has two modes. Its `train`
normalizes by the statistics of the batch, corrected towards the running ones, and returns the updated running ones. Its
`apply` uses the running ones, which `with_stats` adds to the parameters.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_fast.networks import flat
from jaxrl_fast.types import PyTree

STATS = "batch_stats"  # the collection
MAX_R, MAX_D, EPSILON = 3.0, 5.0, 1e-3  # bounds of the corrections, as in the paper; added to variances


class RenormOptions(NamedTuple):
    """The options of batch renormalization."""

    momentum: float  # decay rate of the running statistics per batch
    warmup: int  # batches that are normalized by their own statistics alone


class BatchRenorm(nn.Module):
    """Normalization of each feature of [..., F] over all other axes.

    With mean m and deviation s of the batch, and running ones M and S (no gradient flows through r and d):

        y = scale ((x - m) / s r + d) + offset,   r = clip(s / S, 1 / MAX_R, MAX_R),   d = clip((m - M) / S, +-MAX_D)

    In the first `warmup` batches r = 1 and d = 0. Then M += (1 - momentum) (m - M), and so the variance.
    """

    options: RenormOptions

    @nn.compact
    def __call__(self, x):
        size = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, size)
        offset = self.param("bias", nn.initializers.zeros, size)
        running_mean = self.variable(STATS, "mean", jnp.zeros, size)
        running_var = self.variable(STATS, "var", jnp.ones, size)
        num_batches = self.variable(STATS, "num_batches", jnp.zeros, (), jnp.int32)
        rows, deviation = x.reshape(-1, *size).astype(jnp.float32), jnp.sqrt(running_var.value + EPSILON)
        if self.is_initializing() or not self.is_mutable_collection(STATS):
            center, factor, d = running_mean.value, 1 / deviation, jnp.zeros(size)
        else:
            center = mean = rows.mean(0)
            var = rows.var(0)
            r = jnp.clip(jnp.sqrt(var + EPSILON) / deviation, 1 / MAX_R, MAX_R)
            d = jnp.clip((mean - running_mean.value) / deviation, -MAX_D, MAX_D)
            is_warm = num_batches.value >= self.options.warmup
            r, d = jax.lax.stop_gradient((jnp.where(is_warm, r, 1.0), jnp.where(is_warm, d, 0.0)))
            factor = r * jax.lax.rsqrt(var + EPSILON)
            share = 1 - self.options.momentum
            running_mean.value += share * (mean - running_mean.value)
            running_var.value += share * (var - running_var.value)
            num_batches.value = jnp.minimum(num_batches.value + 1, self.options.warmup)
        y = (rows - center[None]) * (scale * factor)[None] + (scale * d + offset)[None]
        return y.reshape(x.shape).astype(x.dtype)


def with_stats(params: PyTree, batch_stats: PyTree) -> PyTree:
    """Return the variables of `apply`: parameters, and running statistics if there are any."""
    return {**flat.unpack(params), STATS: flat.unpack(batch_stats)} if batch_stats else params
