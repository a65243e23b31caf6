"""A drawn scene whose truth is known: shapes that bounce over a textured background."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np

from framepipe.frame import FrameSpec
from framepipe.kernels._colour import LUMA_WEIGHTS, component
from framepipe.pixfmt import PixelFormat, PlaneFormat

# Light and dark in turn, all far from the background's middle grey in luma.
_COLOURS = (
    (0.97, 0.90, 0.30), (0.10, 0.12, 0.45), (0.95, 0.95, 0.95), (0.35, 0.05, 0.08),
    (0.60, 0.95, 0.70), (0.05, 0.20, 0.10), (0.98, 0.78, 0.62), (0.08, 0.08, 0.08),
)  # fmt: skip
_STRIP = 32
_FASTEST = 0.02  # of the picture's width or the lane's height, a picture


@dataclass(frozen=True, slots=True)
class _Swing:
    """There and back at constant speed between ``low`` and ``low + span``, ``turns`` times a period."""

    low: float
    span: float
    turns: int
    phase: float

    def at(self, part: float) -> int:
        t = (self.turns * part + self.phase) % 1.0
        return round(self.low + self.span * 2 * min(t, 1 - t))


@dataclass(frozen=True, slots=True)
class Shape:
    """A rectangle or ellipse (``label``) of one colour, RGB in 0..1, with sides in pixels."""

    id: int
    label: str
    rgb: tuple[float, float, float]
    width: int
    height: int
    x: _Swing
    y: _Swing

    def box(self, part: float) -> tuple[int, int, int, int]:
        """Edges ``x1, y1, x2, y2`` in pixels (the last two outside) at ``part`` of the period, in 0..1."""
        x, y = self.x.at(part), self.y.at(part)
        return x, y, x + self.width, y + self.height


def lanes(width: int, height: int, count: int, period: int, seed: int) -> list[Shape]:
    """``count`` shapes, each in a lane of its own so that no two ever touch; positions repeat after ``period``.

    Python's own generator is used: its numbers are the same on every version and platform.
    """
    rng = random.Random(seed)
    shapes = []
    for i in range(count):
        lane = height / count
        margin = 0.15 * lane
        h = max(2, round(lane * rng.uniform(0.40, 0.60)))
        w = max(2, min(width // 2, round(h * rng.uniform(0.7, 1.6))))
        x = _swing(rng, 0, width - w, _FASTEST * width * period, rng.choice((1, 2)))
        y = _swing(rng, i * lane + margin, lane - 2 * margin - h, _FASTEST * lane * period, rng.choice((1, 2, 3)))
        label = ("rectangle", "ellipse")[i % 2]
        shapes.append(Shape(i, label, _COLOURS[i % len(_COLOURS)], w, h, x, y))
    return shapes


def _swing(rng: random.Random, low: float, room: float, way: float, turns: int) -> _Swing:
    room = max(0.0, math.floor(room))
    span = min(room, way / (2 * turns))
    return _Swing(low + rng.random() * (room - span), span, turns, rng.random())


class Scene:
    """Renders pictures of ``spec``: picture ``i`` shows ``shapes`` at ``i / period``.

    Any format of `framepipe.pixfmt` is written directly from the formulas of the standards (H.273, 8.3), rounded
    to the nearest code; chroma of the background is the mean over each chroma sample. ``noise`` is the standard
    deviation, in codes of 8 bits, of noise on luma (or on R, G and B alike), the same each time a picture is drawn.
    """

    def __init__(self, spec: FrameSpec, shapes: list[Shape], period: int, seed: int, noise: float) -> None:
        self.spec = spec
        self.shapes = shapes
        self.period = period
        self._seed = seed
        self._noise = noise
        self._background = [np.zeros(_shape(layout), spec.format.dtype) for layout in spec.planes]
        for top, strip in _texture(spec.width, spec.height, seed):
            self._lay(top, strip)

    def render(self, i: int | None) -> av.VideoFrame:
        """Picture ``i`` as a frame of its own, without time stamp; None is the background alone."""
        frame = av.VideoFrame(self.spec.width, self.spec.height, self.spec.pix_fmt)
        planes = _writable(frame, self.spec)
        for plane, background in zip(planes, self._background, strict=True):
            np.copyto(plane, background)
        if i is not None:
            for shape in self.shapes:
                self._draw(planes, shape, shape.box(i / self.period))
        if self._noise:
            self._disturb(planes, 0 if i is None else i + 1)
        return frame

    def _lay(self, top: int, rgb: np.ndarray) -> None:
        for letter, values in _codes(rgb, self.spec).items():
            plane = self._plane(letter)
            at = component(self._background, self.spec, letter)
            codes = _shrink(values, plane).round().astype(at.dtype) << self.spec.format.shift
            at[top >> plane.h_shift :][: codes.shape[0]] = codes

    def _plane(self, letter: str) -> PlaneFormat:
        return self.spec.format.planes[self.spec.format.components[letter][0]]

    def _draw(self, planes: list[np.ndarray], shape: Shape, box: tuple[int, int, int, int]) -> None:
        for letter, value in _codes(np.array(shape.rgb, np.float32), self.spec).items():
            at, plane = component(planes, self.spec, letter), self._plane(letter)
            ws, hs = plane.w_shift, plane.h_shift
            x1, y1, x2, y2 = box[0] >> ws, box[1] >> hs, -(-box[2] >> ws), -(-box[3] >> hs)
            code = at.dtype.type(int(value.round()) << self.spec.format.shift)
            region = at[y1:y2, x1:x2]
            if shape.label == "rectangle":
                region[...] = code
            else:
                region[_ellipse(region.shape, (x1, y1), box, ws, hs)] = code

    def _disturb(self, planes: list[np.ndarray], salt: int) -> None:
        fmt = self.spec.format
        rng = np.random.default_rng((self._seed, salt))
        sigma = np.float32(self._noise * 2 ** (fmt.bits - 8))
        noise = rng.standard_normal((self.spec.height, self.spec.width), np.float32) * sigma
        for letter in "YRGB":
            if letter in fmt.components:
                at = component(planes, self.spec, letter)
                values = (at >> fmt.shift) + noise
                at[...] = values.round().clip(0, 2**fmt.bits - 1).astype(at.dtype) << fmt.shift


def _shape(layout: Any) -> tuple[int, ...]:
    size = (layout.height, layout.width)
    return size if layout.channels == 1 else (*size, layout.channels)


def _writable(frame: av.VideoFrame, spec: FrameSpec) -> list[np.ndarray]:
    """Views of a frame of our own, not yet handed to anybody."""
    views = []
    for plane, layout in zip(frame.planes, spec.planes, strict=True):
        line, row = plane.line_size, layout.row_samples * spec.format.itemsize
        samples = np.frombuffer(memoryview(plane), np.uint8, line * layout.height)
        rows = samples.reshape(layout.height, line)[:, :row]
        views.append(rows.view(spec.format.dtype).reshape(_shape(layout)))
    return views


def _ellipse(
    size: tuple[int, ...], at: tuple[int, int], box: tuple[int, int, int, int], ws: int, hs: int
) -> np.ndarray:
    """Which samples of a plane region at ``at`` have their centre in the ellipse that ``box`` (pixels) bounds."""
    x = ((at[0] + np.arange(size[1]) + 0.5) * 2**ws * 2 - box[0] - box[2]) / (box[2] - box[0])
    y = ((at[1] + np.arange(size[0]) + 0.5) * 2**hs * 2 - box[1] - box[3]) / (box[3] - box[1])
    inside: np.ndarray = x[None, :] ** 2 + y[:, None] ** 2 <= 1
    return inside


def _texture(width: int, height: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Soft blotches of grey to brown under tiles, RGB in 0.3..0.6: strips, (rows, width, 3) float32, and their tops.

    Strips of whole chroma rows stay in the processor's cache, which makes this several times faster.
    """
    rng = random.Random(f"background {seed}")
    across, down = 9, 6
    knots = np.array([[[rng.random() for _ in range(3)] for _ in range(across)] for _ in range(down)], np.float32)
    wide = _stretch(knots, np.linspace(0, across - 1, width, dtype=np.float32), 1)
    rows = np.linspace(0, down - 1, height, dtype=np.float32)
    tile = max(4, min(width, height) // 12)
    columns = np.arange(width) // tile
    for top in range(0, height, _STRIP):
        soft = _stretch(wide, rows[top : top + _STRIP], 0)
        tiles = (np.arange(top, top + len(soft))[:, None] // tile + columns) % 2
        yield top, np.float32(0.32) + np.float32(0.22) * soft + np.float32(0.05) * tiles[..., None].astype(np.float32)


def _stretch(knots: np.ndarray, at: np.ndarray, axis: int) -> np.ndarray:
    """Linear interpolation between ``knots`` at positions ``at`` along an axis."""
    low = np.minimum(at.astype(np.intp), knots.shape[axis] - 2)
    part = np.expand_dims(at - low, tuple(i for i in range(3) if i != axis)).astype(np.float32)
    out: np.ndarray = knots.take(low, axis) * (1 - part) + knots.take(low + 1, axis) * part
    return out


def _codes(rgb: np.ndarray, spec: FrameSpec) -> dict[str, np.ndarray]:
    """Codes, as unrounded floats, of each component of (…, 3) RGB in 0..1 (H.273, equations 24 to 42)."""
    fmt = spec.format
    top = 2**fmt.bits - 1
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    out: dict[str, np.ndarray] = {"R": red * top, "G": green * top, "B": blue * top}
    if fmt.model != "rgb":
        kr, kb = LUMA_WEIGHTS[spec.matrix]
        luma = kr * red + (1 - kr - kb) * green + kb * blue
        u, v = (blue - luma) / (2 - 2 * kb), (red - luma) / (2 - 2 * kr)
        out = _ranged(luma, u, v, fmt, spec.full_range)
    out["A"] = np.full_like(red, top)
    return {letter: values for letter, values in out.items() if letter in fmt.components}


def _ranged(
    luma: np.ndarray, u: np.ndarray, v: np.ndarray, fmt: PixelFormat, full_range: bool
) -> dict[str, np.ndarray]:
    top, unit, middle = 2**fmt.bits - 1, 2 ** (fmt.bits - 8), 2 ** (fmt.bits - 1)
    if full_range:
        return {"Y": luma * top, "U": (u * top + middle).clip(0, top), "V": (v * top + middle).clip(0, top)}
    return {"Y": (16 + 219 * luma) * unit, "U": 224 * u * unit + middle, "V": 224 * v * unit + middle}


def _shrink(values: np.ndarray, plane: PlaneFormat) -> np.ndarray:
    """Mean over each sample of a plane; the last row and column are repeated where sizes are odd."""
    for axis, shift in ((0, plane.h_shift), (1, plane.w_shift)):
        step = 1 << shift
        short = -values.shape[axis] % step
        if short:
            last = values.take([-1], axis)
            values = np.concatenate([values, *[last] * short], axis)
        if shift:
            parts = [values[i::step] if axis == 0 else values[:, i::step] for i in range(step)]
            values = np.mean(parts, axis=0)
    return values
