"""Define gray and resized frames once, for numpy on the host and for JAX on the device, with the same bits.

Weights are whole numbers, and every sum of products is below 2^24. So float32 holds each of them exactly, and the order
of sums has no effect. JAX is not imported, because worker processes import this.
"""

import functools
from typing import Any

import numpy as np

# Of red, green and blue, as in gymnasium's GrayscaleObservation (0.2125, 0.7154, 0.0721); in 65536ths.
LUMINANCE = np.array([13926, 46885, 4725], np.float32)
ONE = 4096  # the sum of the weights of a resized pixel on one axis


def change(gray: bool, size: tuple[int, int] | None, obs: Any, numpy: Any = np) -> Any:
    """Return gray or resized frames, uint8 [n, H', W', C'], of uint8 [n, H, W, C] or [n, H, W].

    Args:
        gray: Whether three channels become one.
        size: Height and width, by linear interpolation with antialiasing; None: unchanged.
        obs: Frames.
        numpy: The module of the arrays, numpy or jax.numpy.
    """
    x = obs if obs.ndim == 4 else obs[..., None]
    if gray and x.shape[-1] == 3:
        parts = [weight * x[..., i : i + 1].astype(numpy.float32) for i, weight in enumerate(LUMINANCE)]
        x = _scaled(numpy, parts[0] + parts[1] + parts[2], 2**16).astype(numpy.uint8)
    if size and size != x.shape[1:3]:
        rows, columns = weights(x.shape[1], size[0]), weights(x.shape[2], size[1])
        n, height, width, channels = x.shape
        x = numpy.matmul(rows[None], x.astype(numpy.float32).reshape(n, height, width * channels))
        x = _scaled(numpy, x, ONE // 16).reshape(n * size[0], width, channels)  # sixteenths, below 2^12
        x = _scaled(numpy, numpy.matmul(columns[None], x), ONE * 16).astype(numpy.uint8)
        x = x.reshape(n, *size, channels)
    return x


@functools.cache
def weights(length: int, new_length: int) -> np.ndarray:
    """Return the weights of old pixels in new ones on one axis, whole numbers f32 [new_length, length].

    They are the weights of `jax.image.resize` with method "linear" and antialiasing, rounded: a triangle around the
    center of the new pixel. Its width is two new or two old pixels, whichever is larger. Each row sums to ONE.
    """
    scale = length / new_length
    centers = (np.arange(new_length) + 0.5) * scale - 0.5
    triangle = np.maximum(1 - np.abs(np.arange(length)[None] - centers[:, None]) / max(scale, 1), 0)
    found = np.round(ONE * triangle / triangle.sum(1, keepdims=True))
    found[np.arange(new_length), found.argmax(1)] += ONE - found.sum(1)
    return found.astype(np.float32)


def _scaled(numpy: Any, x: Any, divisor: int) -> Any:
    """Return x / divisor, a power of two, to the nearest whole number; halves are rounded up."""
    return numpy.floor(x * np.float32(1 / divisor) + np.float32(0.5))
