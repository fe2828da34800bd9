"""Initial parameters of a network, and noise for its noisy layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.types import Key, PyTree


def init_params(module: nn.Module, obs: PyTree, key: Key) -> PyTree:
    """Parameters of the module, its kernels orthogonal times their gain, everything else as it declares.

    All kernels come from one draw: a generator for each would take most of the time that a small agent compiles.
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
    """Normal noise [*shape, K] for each noisy layer, from one draw; () where there is none."""
    needed = jax.eval_shape(lambda: module.lazy_init(jax.random.key(0), obs)).get("noise", ())
    leaves, structure = jax.tree.flatten(needed)
    sizes = [leaf.size for leaf in leaves]
    parts = jnp.split(jax.random.normal(key, (*shape, sum(sizes))), np.cumsum(sizes)[:-1], axis=-1) if sizes else []
    return jax.tree.unflatten(structure, parts)


def orthogonal(noise: Array) -> Array:
    """[..., O] normal noise to a uniformly random kernel of orthonormal columns, or rows where these are fewer.

    Signs follow R's diagonal, or Q would not be uniform (Mezzadri 2007, "How to generate random matrices ...").
    """
    matrix = noise.reshape(-1, noise.shape[-1])
    wide = matrix.shape[0] < matrix.shape[1]
    q, r = jnp.linalg.qr(matrix.T if wide else matrix)
    q = q * jnp.sign(jnp.diagonal(r))[None]
    return (q.T if wide else q).reshape(noise.shape)
