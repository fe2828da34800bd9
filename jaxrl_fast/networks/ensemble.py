"""Compute several networks of the same shape together, for twin critics and larger ensembles."""

import jax
import jax.numpy as jnp

from jaxrl_fast.networks import Network, network
from jaxrl_fast.networks.options import Options
from jaxrl_fast.types import Array, Key, PyTree


def critics(obs: PyTree, action_size: int, num: int, options: Options = Options()) -> Network:
    """Return `num` functions Q(obs, action) as one network: apply(params, (obs, action [..., D])) is [num, ... (, M)].

    With `num_atoms`, values are distributions of M numbers.
    """
    one = network(obs, 1, options._replace(action_size=action_size))
    axis = -1 if options.num_atoms is None else -2
    apply = lambda params, inputs, noise=(): one.apply(params, inputs, noise).squeeze(axis)

    def train(params, batch_stats, inputs):
        value, batch_stats = one.train(params, batch_stats, inputs)
        return value.squeeze(axis), batch_stats

    return ensemble(one._replace(apply=apply, train=train), num)


def ensemble(network: Network, num: int) -> Network:
    """Return `num` copies of a network with separate parameters, as one network.

    Parameters and outputs get a leading axis [num]; all copies have the same input, and each has separate noise. They
    have no memory.
    """

    def init(key: Key) -> PyTree:
        return jax.lax.map(network.init, jax.random.split(key, num))

    def apply(params: PyTree, obs: PyTree, noise: PyTree = ()) -> Array:
        return jax.vmap(network.apply, in_axes=(0, None, 0))(params, obs, noise)

    def noise(key: Key, shape: tuple[int, ...]) -> PyTree:
        return jax.vmap(lambda key: network.noise(key, shape))(jax.random.split(key, num))

    def init_stats() -> PyTree:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *x.shape)), network.init_stats())

    train = jax.vmap(network.train, in_axes=(0, 0, None))
    return network._replace(init=init, apply=apply, noise=noise, init_stats=init_stats, train=train)
