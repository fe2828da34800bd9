"""Draw the field of games/Paddles from what the players observe."""

from functools import partial
from typing import Any

import numpy as np

from jaxrl_fast.evaluation.render import frames, minatar
from jaxrl_fast.evaluation.render.canvas import BLUE, INK, ORANGE, SHADE, Canvas, View

VIEW = View(-1.1, -1.1, 1.1, 1.1, width=420)
BOARD = (
    (3, minatar.Piece("#5b6675", minatar.TRAIL)),
    (0, minatar.Piece("#4fb3ff")),
    (1, minatar.Piece("#f2c14e")),
    (2, minatar.Piece("#ffffff", 0.6)),
)


def field(obs: Any) -> np.ndarray:
    """Draw a vector [9] of `envs.games.views`, a board [H, W, 4] or an image [H, W, F], the newest frame last."""
    if np.ndim(obs) == 1:
        return vector(obs)
    of_board = partial(minatar.board, BOARD)
    return of_board(obs) if obs.dtype == bool else frames.newest_frame(obs[..., -1:])


def vector(obs: Any) -> np.ndarray:
    """Draw a vector: the field is a square, whatever its size; below it are the points of both players."""
    x, y, _, _, left, right, points, other_points, length = map(float, obs)
    canvas = Canvas(VIEW)
    for height in (-1.02, 1.02):
        canvas.line([(-1.05, height), (1.05, height)], 0.02, SHADE)
    for side, at, color in ((-1.0, left, BLUE), (1.0, right, ORANGE)):
        canvas.box((1.02 * side, at), (0.04, 2 * length), 0.01, color)
    for side, share, color in ((-1.0, points, BLUE), (1.0, other_points, ORANGE)):
        canvas.line([(side, -1.07), (side * (1 - share), -1.07)], 0.03, color)
    canvas.disc((x, y), 0.04, INK)
    return canvas.image()
