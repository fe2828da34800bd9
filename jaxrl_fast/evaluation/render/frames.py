"""Draw image observations: the newest frame, enlarged."""

from typing import Any

import numpy as np

TARGET_SIZE = 336  # pixels of the longer side, reached by an integer factor


def is_image(obs: Any) -> bool:
    """Return whether observations are images: uint8 [H, W, C] with H, W >= 16."""
    shape = getattr(obs, "shape", ())
    return len(shape) == 3 and min(shape[:2]) >= 16 and getattr(obs, "dtype", None) == np.uint8


def newest_frame(obs: Any, frame_stack: int = 0) -> np.ndarray:
    """Return the newest of `frame_stack` frames uint8 [H, W, C], enlarged; in gray unless it has three channels."""
    image = np.asarray(obs)
    num_channels = image.shape[-1] // max(frame_stack, 1)
    frame = image[..., -3:] if num_channels == 3 else np.repeat(image[..., -1:], 3, axis=-1)
    return enlarge(frame)


def enlarge(image: np.ndarray) -> np.ndarray:
    """Return an image [H, W, 3] enlarged by an integer factor, with square pixels."""
    factor = max(round(TARGET_SIZE / max(image.shape[:2])), 1)
    return image.repeat(factor, axis=0).repeat(factor, axis=1)
