"""Draw MinAtar boards: a color for each channel, cell by cell."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_fast.evaluation.render.canvas import Canvas, View

CELL = 36  # pixels
BACKGROUND, EMPTY = "#12161d", "#1b212b"


class Piece(NamedTuple):
    """The color and shape of one channel of a board."""

    color: str
    size: float = 0.86  # of a cell


TRAIL = 0.42
SPEEDS = ("#77a8ee", "#6790cb", "#5879a8", "#4a6285", "#3d4d63")  # of cars, the fastest first
# The channels of each game and how they are drawn, from bottom to top.
GAMES: Mapping[str, Sequence[tuple[int, Piece]]] = {
    "Asterix": (
        (2, Piece("#5b6675", TRAIL)),
        (1, Piece("#e4572e")),
        (3, Piece("#f2c14e", 0.7)),
        (0, Piece("#4fb3ff")),
    ),
    "Breakout": (
        (3, Piece("#e07a3f", 0.92)),
        (2, Piece("#7b8798", TRAIL)),
        (1, Piece("#ffffff", 0.6)),
        (0, Piece("#4fb3ff")),
    ),
    "Freeway": (
        *((channel + 2, Piece(color, TRAIL)) for channel, color in enumerate(SPEEDS)),
        (1, Piece("#e4572e")),
        (0, Piece("#f2c14e")),
    ),
    "Seaquest": (
        (7, Piece("#3ccf91", 0.7)),  # oxygen left
        (8, Piece("#f2c14e", 0.4)),  # divers on board
        (3, Piece("#5b6675", TRAIL)),
        (9, Piece("#f2c14e", 0.6)),  # divers
        (5, Piece("#ff8fa3")),  # fish
        (6, Piece("#e4572e")),
        (4, Piece("#ff5252", 0.4)),
        (2, Piece("#ffffff", 0.4)),
        (1, Piece("#2d6ea8", 0.7)),  # the submarine's back
        (0, Piece("#4fb3ff")),
    ),
    "SpaceInvaders": (  # channels 2 and 3 are the direction of the aliens in 1
        (1, Piece("#7bd88f")),
        (5, Piece("#ff5252", 0.4)),
        (4, Piece("#ffffff", 0.4)),
        (0, Piece("#4fb3ff")),
    ),
}


def board(pieces: Sequence[tuple[int, Piece]], obs: Any) -> np.ndarray:
    """Return a board bool [H, W, C] as an image with CELL pixels per cell."""
    cells = np.asarray(obs).astype(bool)
    height, width, _ = cells.shape
    canvas = Canvas(View(-0.25, -0.25, width + 0.25, height + 0.25, width=round((width + 0.5) * CELL)), BACKGROUND)
    for row in range(height):
        for column in range(width):
            center = column + 0.5, height - row - 0.5
            canvas.box(center, (0.92, 0.92), 0.1, EMPTY)
            for channel, piece in pieces:
                if cells[row, column, channel]:
                    canvas.box(center, (piece.size, piece.size), 0.12, piece.color)
    return canvas.image()
