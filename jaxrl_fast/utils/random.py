"""Make PRNG keys from seeds."""

import jax

from jaxrl_fast.types import Array, Key


def key_of_seed(seed: int | Array) -> Key:
    """Return a threefry key, independent of `jax_default_prng_impl`.

    With `rbg` keys, `vmap` draws all numbers from the first key of a batch. Then environments begin alike, and a seed
    in a batch differs from the same seed alone.
    """
    return jax.random.key(seed, impl="threefry2x32")
