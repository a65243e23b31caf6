"""Rectangles and text on pictures, in NumPy: the `draw` stage's kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from framepipe.kernels import _font

Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Mark:
    """A box in pixels of the image (any floats: what is outside is cut off), its colour (RGB codes) and its text."""

    box: tuple[float, float, float, float]
    color: Color
    text: str = ""


def draw_boxes(image: np.ndarray, marks: Iterable[Mark], thickness: int, scale: int) -> None:
    """Draw ``marks`` into ``image``, (H, W, 3) uint8, in place; later ones are on top.

    Lines are ``thickness`` pixels wide and inside the box. Text stands in a band of the box's colour above it, or
    inside where there is no room above; one dot of the font is ``scale`` pixels.
    """
    height, width = image.shape[:2]
    for mark in marks:
        if not all(map(math.isfinite, mark.box)):
            continue
        x1, x2 = (round(min(max(side, -thickness), width + thickness)) for side in mark.box[0::2])
        y1, y2 = (round(min(max(side, -thickness), height + thickness)) for side in mark.box[1::2])
        _outline(image, (x1, y1, x2, y2), mark.color, thickness)
        if mark.text and x1 < width and y1 < height and x2 > 0 and y2 > 0:
            _label(image, (x1, y1), mark, thickness, scale)


def _outline(image: np.ndarray, box: tuple[int, int, int, int], color: Color, thickness: int) -> None:
    x1, y1, x2, y2 = box
    _fill(image, (x1, y1, x2, min(y1 + thickness, y2)), color)
    _fill(image, (x1, max(y2 - thickness, y1), x2, y2), color)
    _fill(image, (x1, y1, min(x1 + thickness, x2), y2), color)
    _fill(image, (max(x2 - thickness, x1), y1, x2, y2), color)


def _fill(image: np.ndarray, box: tuple[int, int, int, int], color: Color) -> None:
    x1, y1, x2, y2 = (max(side, 0) for side in box)  # a negative end would count from the other side
    image[y1:y2, x1:x2] = color


def _label(image: np.ndarray, at: tuple[int, int], mark: Mark, thickness: int, scale: int) -> None:
    picture = _band(mark.text, mark.color, scale)
    height, width = picture.shape[:2]
    x = max(0, min(at[0], image.shape[1] - width))
    y = at[1] - height
    if y < 0:
        y = max(0, at[1] + thickness)
    room = image[y : y + height, x : x + width]
    room[...] = picture[: room.shape[0], : room.shape[1]]


def _band(words: str, color: Color, scale: int) -> np.ndarray:
    dots = np.pad(_font.text(words), ((1, 0), (1, 1))).repeat(scale, 0).repeat(scale, 1)
    light = 299 * color[0] + 587 * color[1] + 114 * color[2] > 128_000
    ink = (0, 0, 0) if light else (255, 255, 255)
    return np.where(dots[..., None], np.array(ink, np.uint8), np.array(color, np.uint8))
