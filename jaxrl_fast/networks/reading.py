"""Decide how networks read an observation: as an image, a board or a vector, with channels last or first."""

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

READINGS = ("image", "board", "vector")  # of an observation [H, W] or [H, W, C]
MIN_PICTURE_SIDE = 16  # bytes of smaller arrays are ids of objects, as in MiniGrid's 7x7, and not pixels
MAX_CHANNELS_FIRST = {"uint8": 12, "float32": 4}  # four frames of three colors; bool is always [H, W, C]
WHITE = 255  # the brightest shade


def is_image(obs: ShapeDtypeStruct, observations: str = "auto") -> bool:
    """Return whether an array like `obs` holds pixels from 0 to 255, and not ids of objects."""
    if observations != "auto" and len(obs.shape) in (2, 3):
        return observations == "image"
    sides = shape(obs, observations)[:2]
    return obs.dtype == jnp.uint8 and len(sides) > 1 and min(sides) >= MIN_PICTURE_SIDE


def only_image(parts: list[ShapeDtypeStruct], observations: str = "auto") -> int | None:
    """Return the index of the only part [H, W, C], or of the only image among several; None without either."""
    boards = [i for i, part in enumerate(parts) if len(part.shape) == 3]
    found = [i for i in boards if is_image(parts[i], observations)] or boards
    return found[0] if len(found) == 1 else None


def has_channels_first(obs: ShapeDtypeStruct, observations: str = "auto") -> bool:
    """Return whether an array like `obs` is an image [C, H, W]: a few channels, and sides of at least 16."""
    if len(obs.shape) != 3 or observations not in ("auto", "image"):
        return False
    channels, *sides = obs.shape
    return channels <= MAX_CHANNELS_FIRST.get(obs.dtype.name, 0) and min(sides) >= MIN_PICTURE_SIDE


def shape(obs: ShapeDtypeStruct, observations: str = "auto") -> tuple[int, ...]:
    """Return the shape of an array with its channels last."""
    return (*obs.shape[1:], obs.shape[0]) if has_channels_first(obs, observations) else obs.shape


def cast(spec: ShapeDtypeStruct, x: Array, dtype: jnp.dtype, observations: str = "auto") -> Array:
    """Return x [..., *shape] in `dtype`. Pixels are divided by 255, unless observations are already normalized."""
    is_normalized = x.dtype != spec.dtype
    x = x.astype(dtype)
    return x / WHITE if is_image(spec, observations) and not is_normalized else x


def channels_last(spec: ShapeDtypeStruct, x: Array, dtype: jnp.dtype, observations: str = "auto") -> Array:
    """Return x [..., *shape] converted by `cast`, an image [..., C, H, W] as [..., H, W, C]."""
    x = jnp.moveaxis(x, -3, -1) if has_channels_first(spec, observations) else x
    return cast(spec, x, dtype, observations)
