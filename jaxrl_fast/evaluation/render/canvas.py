"""Draw shapes in world units with smooth edges: the drawing is made larger, then scaled down."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

OVERSAMPLING = 4  # pixels of the drawing per pixel of the image, in each direction
BACKGROUND, INK, SHADE, GRID = "#fbfaf7", "#27313d", "#8a94a3", "#d9dde3"
BLUE, ORANGE, GREEN = "#1f5fa8", "#d2691e", "#2f8f5b"
CAPTION_HEIGHT = 26  # pixels

Point = tuple[float, float]


class View(NamedTuple):
    """The visible part of the world; x points right, y up."""

    left: float
    bottom: float
    right: float
    top: float
    width: int  # pixels

    @property
    def scale(self) -> float:
        """Return the pixels per unit of the world, equal in both directions."""
        return self.width / (self.right - self.left)

    @property
    def height(self) -> int:
        """Return the height in pixels."""
        return round((self.top - self.bottom) * self.scale)

    def pixel(self, point: Point) -> Point:
        """Return column and row of a point of the world, from the image's upper left corner."""
        return (point[0] - self.left) * self.scale, (self.top - point[1]) * self.scale


class Canvas:
    """An image to draw on; later shapes cover earlier ones."""

    def __init__(self, view: View, background: str = BACKGROUND):
        self.view = view
        self.drawing = Image.new("RGB", (view.width * OVERSAMPLING, view.height * OVERSAMPLING), background)
        self.pen = ImageDraw.Draw(self.drawing)

    def polygon(self, points: Sequence[Point], color: str) -> None:
        """Draw a filled polygon."""
        self.pen.polygon([self._pixel(p) for p in points], fill=color)

    def line(self, points: Sequence[Point], width: float, color: str) -> None:
        """Draw a line with round ends and corners."""
        self.pen.line([self._pixel(p) for p in points], fill=color, width=round(self._length(width)))
        for point in points:
            self.disc(point, width / 2, color)

    def disc(self, center: Point, radius: float, color: str) -> None:
        """Draw a filled disc."""
        (x, y), r = self._pixel(center), self._length(radius)
        self.pen.ellipse((x - r, y - r, x + r, y + r), fill=color)

    def box(self, center: Point, size: Point, corner: float, color: str) -> None:
        """Draw a filled rectangle of this width and height, with rounded corners of radius `corner`."""
        (x, y), w, h = self._pixel(center), self._length(size[0]) / 2, self._length(size[1]) / 2
        self.pen.rounded_rectangle((x - w, y - h, x + w - 1, y + h - 1), self._length(corner), fill=color)

    def image(self) -> np.ndarray:
        """Return the image, uint8 [H, W, 3]."""
        return np.asarray(self.drawing.reduce(OVERSAMPLING))

    def _pixel(self, point: Point) -> Point:
        """Return column and row in the drawing."""
        x, y = self.view.pixel(point)
        return x * OVERSAMPLING, y * OVERSAMPLING

    def _length(self, length: float) -> float:
        """Return a length in pixels of the drawing."""
        return length * self.view.scale * OVERSAMPLING


def add_caption(image: np.ndarray, left: str, right: str) -> np.ndarray:
    """Return an image [H, W, 3] with a line of text below it: [H + CAPTION_HEIGHT, W, 3]."""
    height, width, _ = image.shape
    sheet = Image.new("RGB", (width, height + CAPTION_HEIGHT), BACKGROUND)
    sheet.paste(Image.fromarray(image))
    pen, middle = ImageDraw.Draw(sheet), height + CAPTION_HEIGHT // 2
    pen.line((0, height, width, height), fill=GRID)
    pen.text((10, middle), left, fill=INK, font=_font(), anchor="lm")
    pen.text((width - 10, middle), right, fill=SHADE, font=_font(), anchor="rm")
    return np.asarray(sheet)


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return the font of captions."""
    return ImageFont.load_default(size=13)
