"""Compute several networks of the same shape together, for twin critics and larger ensembles."""

import jax
import jax.numpy as jnp

from jaxrl_fast.networks import Network, flat, network
from jaxrl_fast.networks.options import Options
from jaxrl_fast.types import PyTree


def critics(obs: PyTree, action_size: int, num: int, options: Options = Options()) -> Network:
    """Return `num` functions Q(obs, action) as one network: apply(params, (obs, action [..., D])) is [num, ... (, M)].

    With `num_atoms`, values are distributions of M numbers.
    """
    return ensemble(network(obs, None, options._replace(action_size=action_size)), num)


def ensemble(network: Network, num: int) -> Network:
    """Return `num` copies of a network with separate parameters, as one network.

    Parameters and outputs get a leading axis [num]; all copies have the same input, and each has separate noise. They
    have no memory.
    """

    def train(params, batch_stats, inputs):
        each = jax.vmap(network.train, (0, 0, None))
        output, after = each(flat.unpack(params), flat.unpack(batch_stats), inputs)
        return output, flat.like(after, batch_stats)

    return network._replace(
        init=lambda key: jax.lax.map(network.init, jax.random.split(key, num)),
        apply=lambda params, obs, noise=(): jax.vmap(network.apply, (0, None, 0))(flat.unpack(params), obs, noise),
        noise=lambda key, shape: jax.vmap(lambda key: network.noise(key, shape))(jax.random.split(key, num)),
        init_stats=lambda: jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *x.shape)), network.init_stats()),
        train=train,
    )
