"""A drawing in the world's own units, with smooth edges: drawn larger than it is shown, then scaled down."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

OVERSIZE = 4  # the drawing's pixels for one of the picture, in each direction
PAPER, INK, SHADE, GRID = "#fbfaf7", "#27313d", "#8a94a3", "#d9dde3"
BLUE, ORANGE, GREEN = "#1f5fa8", "#d2691e", "#2f8f5b"
CAPTION = 26  # pixels in height

Point = tuple[float, float]


class View(NamedTuple):
    """The part of the world that is seen; x goes right, y up."""

    left: float
    bottom: float
    right: float
    top: float
    width: int  # pixels

    @property
    def scale(self) -> float:
        """Pixels for one unit of the world, the same in both directions."""
        return self.width / (self.right - self.left)

    @property
    def height(self) -> int:
        """Pixels."""
        return round((self.top - self.bottom) * self.scale)

    def pixel(self, point: Point) -> Point:
        """Column and row where a point of the world lies, from the picture's upper left corner."""
        return (point[0] - self.left) * self.scale, (self.top - point[1]) * self.scale


class Canvas:
    """What is drawn first lies below."""

    def __init__(self, view: View, paper: str = PAPER):
        self.view = view
        self.image = Image.new("RGB", (view.width * OVERSIZE, view.height * OVERSIZE), paper)
        self.pen = ImageDraw.Draw(self.image)

    def polygon(self, points: Sequence[Point], color: str) -> None:
        """Filled."""
        self.pen.polygon([self._place(p) for p in points], fill=color)

    def line(self, points: Sequence[Point], width: float, color: str) -> None:
        """With round ends and corners."""
        self.pen.line([self._place(p) for p in points], fill=color, width=round(self._length(width)))
        for point in points:
            self.disc(point, width / 2, color)

    def disc(self, center: Point, radius: float, color: str) -> None:
        """Filled."""
        (x, y), r = self._place(center), self._length(radius)
        self.pen.ellipse((x - r, y - r, x + r, y + r), fill=color)

    def box(self, center: Point, size: Point, corner: float, color: str) -> None:
        """A filled rectangle of this width and height, its corners round with this radius."""
        (x, y), w, h = self._place(center), self._length(size[0]) / 2, self._length(size[1]) / 2
        self.pen.rounded_rectangle((x - w, y - h, x + w - 1, y + h - 1), self._length(corner), fill=color)

    def picture(self) -> np.ndarray:
        """uint8 [H, W, 3]"""
        return np.asarray(self.image.reduce(OVERSIZE))

    def _place(self, point: Point) -> Point:
        x, y = self.view.pixel(point)
        return x * OVERSIZE, y * OVERSIZE

    def _length(self, length: float) -> float:
        return length * self.view.scale * OVERSIZE


def captioned(picture: np.ndarray, left: str, right: str) -> np.ndarray:
    """A picture [H, W, 3] with a line of words below it: [H + CAPTION, W, 3]."""
    height, width, _ = picture.shape
    sheet = Image.new("RGB", (width, height + CAPTION), PAPER)
    sheet.paste(Image.fromarray(picture))
    pen, middle = ImageDraw.Draw(sheet), height + CAPTION // 2
    pen.line((0, height, width, height), fill=GRID)
    pen.text((10, middle), left, fill=INK, font=_font(), anchor="lm")
    pen.text((width - 10, middle), right, fill=SHADE, font=_font(), anchor="rm")
    return np.asarray(sheet)


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=13)
