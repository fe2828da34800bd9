"""Draw initial parameters of a network, and noise for its noisy layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.types import Key, PyTree
from jaxrl_fast.utils.random import key_of_seed


def init_params(module: nn.Module, obs: PyTree, key: Key) -> PyTree:
    """Return the module's parameters: kernels orthogonal times their gain, all others as the module declares them.

    One draw serves all kernels; a draw for each would take most of a small agent's compile time.
    """
    params, structure = jax.tree.flatten_with_path({"params": module.lazy_init(key, obs)["params"]})
    is_kernel = [path[-1].key == "kernel" for path, _ in params]
    sizes = [leaf.size if kernel else 0 for kernel, (_, leaf) in zip(is_kernel, params, strict=True)]
    noise = jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1])
    leaves = [
        leaf * orthogonal(part.reshape(leaf.shape)) if kernel else leaf
        for kernel, (_, leaf), part in zip(is_kernel, params, noise, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def layer_noise(module: nn.Module, obs: PyTree, key: Key, shape: tuple[int, ...]) -> PyTree:
    """Return normal noise [*shape, K] for each noisy layer, from one draw; () if no layer is noisy."""
    needed = jax.eval_shape(lambda: module.lazy_init(key_of_seed(0), obs)).get("noise", ())
    leaves, structure = jax.tree.flatten(needed)
    sizes = [leaf.size for leaf in leaves]
    parts = jnp.split(jax.random.normal(key, (*shape, sum(sizes))), np.cumsum(sizes)[:-1], axis=-1) if sizes else []
    return jax.tree.unflatten(structure, parts)


def orthogonal(noise: Array) -> Array:
    """Turn normal noise [..., O] into a uniformly random kernel with orthonormal columns, or rows if these are fewer.

    Signs follow the diagonal of R, or Q would not be uniform (Mezzadri 2007, "How to generate random matrices ...").
    """
    matrix = noise.reshape(-1, noise.shape[-1])
    wide = matrix.shape[0] < matrix.shape[1]
    q, r = jnp.linalg.qr(matrix.T if wide else matrix)
    q = q * jnp.sign(jnp.diagonal(r))[None]
    return (q.T if wide else q).reshape(noise.shape)
