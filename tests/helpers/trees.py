"""Compare trees of arrays, and list the equations of JAX programs."""

import jax
import jax.numpy as jnp
import numpy as np


def same_bits(a, b):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    bits = lambda tree: [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]
    return all(np.array_equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def equations(jaxpr):
    """Yield all equations, including nested ones."""
    for equation in jaxpr.eqns:
        yield equation
        values = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
        for inner in values:
            yield from equations(inner) if hasattr(inner, "eqns") else ()
