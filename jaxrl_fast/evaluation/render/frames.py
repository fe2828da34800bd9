"""Observations that are pictures already: the newest frame, enlarged."""

from typing import Any

import numpy as np

LARGE = 336  # pixels that the longer side gets to, by whole steps


def are(obs: Any) -> bool:
    """Images [H, W, C], by shape and dtype."""
    shape = getattr(obs, "shape", ())
    return len(shape) == 3 and min(shape[:2]) >= 16 and getattr(obs, "dtype", None) == np.uint8


def newest(obs: Any, frame_stack: int = 0) -> np.ndarray:
    """The newest of `frame_stack` frames of uint8 [H, W, C], in color if it has three channels, else in gray."""
    image = np.asarray(obs)
    num_channels = image.shape[-1] // max(frame_stack, 1)
    frame = image[..., -3:] if num_channels == 3 else np.repeat(image[..., -1:], 3, axis=-1)
    return enlarged(frame)


def enlarged(picture: np.ndarray) -> np.ndarray:
    """A picture [H, W, 3], each pixel a square of several."""
    times = max(round(LARGE / max(picture.shape[:2])), 1)
    return picture.repeat(times, axis=0).repeat(times, axis=1)
