"""Draw initial parameters of a network, and noise for its noisy layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.types import Key, PyTree
from jaxrl_fast.utils.random import key_of_seed

KINDS = ("orthogonal", "lecun_normal", "lecun_uniform", "he_normal", "he_uniform")
GAINS = "gains"  # a collection with the kernels that `init_params` draws
OWN_FOLD = 1  # folded into the key of parameters that a module draws itself
TRUNCATED_STD = 0.87962566103423978  # of a standard normal number cut at -2 and 2


def init_params(module: nn.Module, inputs: PyTree, key: Key, kind: str = "orthogonal") -> PyTree:
    """Return the module's parameters: kernels that `declare_kernel` declared of this kind, others as declared.

    orthogonal                  orthonormal columns or rows, times the gain
    lecun_normal, lecun_uniform variance 1 / I for I inputs (LeCun et al. 1998, "Efficient BackProp", eq. 16)
    he_normal, he_uniform       variance gain^2 / I: 2 / I in hidden layers (He et al. 2015, "Delving deep into
                                rectifiers", eq. 10)

    Gains below 1, such as that of a policy's head, scale kernels of every kind. Normal numbers are cut at two standard
    deviations, as in `jax.nn.initializers.variance_scaling`. One draw serves all kernels; a draw for each would take
    most of a small agent's compile time.
    """
    variables = module.lazy_init(jax.random.fold_in(key, OWN_FOLD), inputs)
    params, structure = jax.tree.flatten_with_path({"params": variables["params"]})
    declared = {path[1:] for path, _ in jax.tree.leaves_with_path({GAINS: variables.get(GAINS, {})})}
    is_kernel = [path[1:] in declared for path, _ in params]
    sizes = [leaf.size if kernel else 0 for kernel, (_, leaf) in zip(is_kernel, params, strict=True)]
    noise = jnp.split(_draw(kind, key, sum(sizes)), np.cumsum(sizes)[:-1])
    leaves = [
        _kernel(kind, part.reshape(leaf.shape), leaf) if kernel else leaf
        for kernel, (_, leaf), part in zip(is_kernel, params, noise, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def declare_kernel(module: nn.Module, gain: float, shape: tuple[int, ...]) -> Array:
    """Return a module's parameter "kernel" [..., O]. `init_params` draws its initial values."""
    if module.is_initializing():
        module.variable(GAINS, "kernel", lambda: np.float32(gain))
    return module.param("kernel", nn.initializers.constant(gain), shape)


def _draw(kind: str, key: Key, num: int) -> Array:
    """Return independent numbers [num]: normal ones, or of variance 1 within bounds."""
    if kind == "orthogonal":
        return jax.random.normal(key, (num,))
    if kind.endswith("uniform"):
        return jax.random.uniform(key, (num,), minval=-np.sqrt(3), maxval=np.sqrt(3))
    return jax.random.truncated_normal(key, -2, 2, (num,)) / TRUNCATED_STD


def _kernel(kind: str, noise: Array, gain: Array) -> Array:
    """Return a kernel [..., O] from random numbers, and from gains that are all equal."""
    if kind == "orthogonal":
        return gain * orthogonal(noise)
    gain = jnp.minimum(gain, 1) if kind.startswith("lecun") else gain
    return gain * noise / np.sqrt(max(noise[..., 0].size, 1))


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
