"""Rectangles and text on pictures on a GPU: marks travel as arguments of the launch, the font is in its code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from framepipe.kernels import _font
from framepipe.kernels._cuda_code import Program, by_value
from framepipe.kernels._draw import Mark

_MOST_MARKS, _MOST_LETTERS = 40, 2048  # a launch; together below the 4096 bytes that every GPU takes
_FIRST = 32  # the space, glyph 0
_CELL = _font.WIDTH + 1
_SEGMENT = 512  # letters of one mark; longer text goes on in further ones

MARK = np.dtype(
    [("box", "i4", 4), ("label", "i4", 4), ("color", "u1", 4), ("text", "u2"), ("letters", "u2")], align=True
)
"""Outline and label as x1, y1, x2, y2, the colour, and where its text stands in ``Marks.text``."""

MARKS = np.dtype(
    [
        ("row", "i8"),
        ("column", "i8"),
        ("channel", "i8"),
        ("width", "i4"),
        ("height", "i4"),
        ("thickness", "i4"),
        ("scale", "i4"),
        ("count", "i4"),
        ("marks", MARK, _MOST_MARKS),
        ("text", "u1", _MOST_LETTERS),
    ],
    align=True,
)
"""The picture (bytes between rows, columns and channels) and what is drawn on it."""


def _glyph_words() -> str:
    """Every glyph as one number: bit 5 * row + column."""
    words = []
    for letter in map(chr, range(_FIRST, 127)):
        dots = _font.glyphs()[letter].reshape(-1)
        words.append(f"{sum(1 << int(bit) for bit in np.flatnonzero(dots)):#x}ULL")
    return ", ".join(words)


program = Program("draw.cu", structs={"Mark": MARK, "Marks": MARKS}, macros={"GLYPH_WORDS": _glyph_words()})
_BLOCKS = 32  # that share a line or a label
_Rect = tuple[int, int, int, int]
_Row = tuple[_Rect, _Rect, tuple[int, int, int], bytes]
_NOTHING = (0, 0, 0, 0)


def draw_boxes(image: Any, marks: Iterable[Mark], thickness: int, scale: int) -> None:
    """See `framepipe.kernels.cpu.draw_boxes`."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"pictures are uint8 with 3 channels, not {image.dtype} {image.shape}")
    height, width = image.shape[:2]
    for rows in _launches(_rows(marks, width, height, thickness, scale)):
        text = b"".join(row[3] for row in rows)
        packed, begin = [], 0
        for box, label, color, letters in rows:
            packed.append((box, label, (*color, 0), begin, len(letters)))
            begin += len(letters)
        arguments = np.zeros((), MARKS)
        arguments["row"], arguments["column"], arguments["channel"] = image.strides
        arguments["width"], arguments["height"] = width, height
        arguments["thickness"], arguments["scale"], arguments["count"] = thickness, scale, len(rows)
        arguments["marks"][: len(rows)] = np.array(packed, MARK)
        arguments["text"][: len(text)] = np.frombuffer(text, np.uint8)
        program.launch("draw", (_BLOCKS, 5, len(rows)), (128, 1, 1), (image, by_value(arguments)))


def _launches(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    """As many marks at a time as a launch takes; later launches draw on top."""
    part: list[_Row] = []
    letters = 0
    for row in rows:
        if len(part) == _MOST_MARKS or letters + len(row[3]) > _MOST_LETTERS:
            yield part
            part, letters = [], 0
        part.append(row)
        letters += len(row[3])
    if part:
        yield part


def _rows(marks: Iterable[Mark], width: int, height: int, thickness: int, scale: int) -> Iterator[_Row]:
    """Outlines and labels in whole pixels, rounded as on the CPU."""
    for mark in marks:
        if not all(map(math.isfinite, mark.box)):
            continue
        x1, x2 = (round(min(max(side, -thickness), width + thickness)) for side in mark.box[0::2])
        y1, y2 = (round(min(max(side, -thickness), height + thickness)) for side in mark.box[1::2])
        labels: Iterator[tuple[_Rect, bytes]] = iter(())
        if mark.text and x1 < width and y1 < height and x2 > 0 and y2 > 0:
            labels = _labels(mark.text, x1, y1, (width, height), thickness, scale)
        label, text = next(labels, (_NOTHING, b""))
        yield (x1, y1, x2, y2), label, mark.color, text
        for label, text in labels:
            yield _NOTHING, label, mark.color, text


def _labels(
    words: str, x: int, y: int, size: tuple[int, int], thickness: int, scale: int
) -> Iterator[tuple[_Rect, bytes]]:
    """The band of a text in segments side by side, each of whole letters and with the gap before the first."""
    letters = _letters(words)
    across, down = (_CELL * len(letters) + 1) * scale, (_font.HEIGHT + 1) * scale
    x = max(0, min(x, size[0] - across))
    y = y - down if y >= down else max(0, y + thickness)
    for begin in range(0, len(letters), _SEGMENT):
        part = letters[begin : begin + _SEGMENT]
        left = x + _CELL * scale * begin
        if left >= size[0]:
            return
        yield (left, y, left + (_CELL * len(part) + 1) * scale, y + down), part


@lru_cache(maxsize=1024)
def _letters(words: str) -> bytes:
    """Numbers of glyphs; what the font lacks is shown as ``?``."""
    known = _font.glyphs()
    return bytes(ord(letter if letter in known else "?") - _FIRST for letter in words)
