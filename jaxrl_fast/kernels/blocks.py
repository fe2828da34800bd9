"""Split images into blocks whose intermediate results fit a CPU's cache.

Without blocks, a pass over 128 images takes a CPU up to four times as long.
"""

from collections.abc import Callable

import jax
from jax import Array

from jaxrl_fast.utils import target

MAX_BOARDS, MAX_IMAGES = 128, 8  # images of a block


def in_blocks(function: Callable[[Array], Array], x: Array, max_size: int) -> Array:
    """Apply `function` to x [B, ...] in equal blocks of at most `max_size` rows, and to all rows at once off a CPU."""
    size = block_size(len(x), max_size)
    if size == len(x):
        return function(x)
    blocks = jax.lax.map(function, x.reshape(-1, size, *x.shape[1:]))
    return blocks.reshape(-1, *blocks.shape[2:])


def block_size(num_rows: int, max_size: int) -> int:
    """Return the rows of a block: the largest divisor of `num_rows` in [max_size / 2, max_size].

    Without such a divisor, and in code that is not for a CPU, that is `num_rows`.
    """
    if target.platform() != "cpu":
        return num_rows
    sizes = (size for size in range(min(max_size, num_rows), max_size // 2 - 1, -1) if size and num_rows % size == 0)
    return next(sizes, num_rows)


def image_block(num_images: int) -> int:
    """Return how many images a deep network sees at a time: all of them, or a block that fits a CPU's cache."""
    return block_size(num_images, MAX_IMAGES)
