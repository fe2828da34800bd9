"""Show the field of Paddles as numbers, as a board, or as a picture."""

from typing import Any

import jax.numpy as jnp

from jaxrl_fast.types import Array

SIDE = 84  # pixels of an image, as of Atari's frames in Mnih et al. 2015
BALL, PADDLES = 255, 200  # shades of gray
BALL_SIZE = 3  # pixels


def vector(size: tuple[int, int], params: Any, state: Any) -> Array:
    """Return float32 [9], scaled to about [-1, 1].

    The numbers are: ball x, y; velocity x, y; heights of the left and the right paddle; points of both players, as
    shares of the points that end a game; length of a paddle, as a share of the height.
    """
    half = jnp.asarray(size, jnp.float32) / 2
    return jnp.concatenate([
        state.ball / half,
        state.velocity / params.ball_speed,
        state.paddles / half[1],
        state.points.astype(jnp.float32) / params.points,
        jnp.full(1, params.paddle / size[1], jnp.float32),
    ])  # fmt: skip


def board(size: tuple[int, int], params: Any, state: Any) -> Array:
    """Return bool [height, width, 4]: left paddle, right paddle, ball, and where the ball was a step ago.

    The first row is the top.
    """
    columns = jnp.arange(size[0])
    middle = size[1] / 2 - 0.5 - jnp.arange(size[1])  # the height of a row's middle
    paddles = [
        (jnp.abs(middle - state.paddles[i]) <= params.paddle / 2)[:, None] & (columns == column)[None]
        for i, column in enumerate((0, size[0] - 1))
    ]
    return jnp.stack([*paddles, _cell(size, state.ball), _cell(size, state.before)], axis=-1)


def _cell(size: tuple[int, int], point: Array) -> Array:
    """Return bool [height, width]: the cell with a point of the field."""
    column = jnp.clip(jnp.floor(point[0] + size[0] / 2), 0, size[0] - 1)
    row = jnp.clip(jnp.floor(size[1] / 2 - point[1]), 0, size[1] - 1)
    return (jnp.arange(size[1]) == row)[:, None] & (jnp.arange(size[0]) == column)[None]


def image(size: tuple[int, int], params: Any, state: Any) -> Array:
    """Return a frame, uint8 [84, 84, 1]. The first row is the top."""
    pixels = jnp.arange(SIDE) + 0.5
    x, y = pixels * size[0] / SIDE - size[0] / 2, size[1] / 2 - pixels * size[1] / SIDE
    within = BALL_SIZE / 2 / SIDE * jnp.asarray(size, jnp.float32)
    middle = jnp.clip(state.ball, within - jnp.asarray(size) / 2, jnp.asarray(size) / 2 - within)
    ball = (jnp.abs(x - middle[0]) <= within[0])[None] & (jnp.abs(y - middle[1]) <= within[1])[:, None]
    near = [jnp.abs(y - state.paddles[i]) <= params.paddle / 2 for i in range(2)]
    paddle = near[0][:, None] & (jnp.arange(SIDE) < 2)[None] | near[1][:, None] & (jnp.arange(SIDE) >= SIDE - 2)[None]
    return jnp.where(ball, BALL, jnp.where(paddle, PADDLES, 0)).astype(jnp.uint8)[..., None]
