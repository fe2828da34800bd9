"""Compute several networks of the same shape together, for twin critics and larger ensembles."""

import jax

from jaxrl_fast.networks import Network
from jaxrl_fast.types import Array, Key, PyTree


def ensemble(network: Network, num: int) -> Network:
    """Return `num` copies of a network with separate parameters, as one network.

    Parameters and outputs get a leading axis [num]; all copies have the same input, and each has separate noise.
    """

    def init(key: Key) -> PyTree:
        return jax.lax.map(network.init, jax.random.split(key, num))

    def apply(params: PyTree, obs: PyTree, noise: PyTree = ()) -> Array:
        return jax.vmap(network.apply, in_axes=(0, None, 0))(params, obs, noise)

    def noise(key: Key, shape: tuple[int, ...]) -> PyTree:
        return jax.vmap(lambda key: network.noise(key, shape))(jax.random.split(key, num))

    return Network(init, apply, noise)
