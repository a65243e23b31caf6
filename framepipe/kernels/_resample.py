"""Resampling of RGB pictures: the integer definition of every device, and its NumPy implementation.

Each method gives every output position of an axis a few source positions with whole weights that add up to the
same ``total`` (`taps`). A channel of an output pixel is::

    (sum over j, i of weight_y[j] * weight_x[i] * sample[index_y[j], index_x[i]] + total // 2) // total

with ``total = total_y * total_x`` and nothing rounded in between, so the order of the sums does not matter.
With n source and m output positions, output d has:

- ``nearest``: the source position under its centre, ``(2*d + 1) * n // (2*m)``;
- ``bilinear``: half-pixel centres and repeated edges. Its centre is at ``c = ((2*d + 1) * n - m) / (2*m)``; the
  fraction of c in 2048ths, rounded half up, is the weight of ``floor(c) + 1``, the rest that of ``floor(c)``;
- ``area``: the exact average over the interval ``[d * n/m, (d+1) * n/m)``, each source pixel weighted by the
  length that is inside, in units of ``gcd(n, m) / m`` of a pixel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, Literal

import numpy as np

from framepipe.kernels._scratch import scratch

Array = np.ndarray[Any, Any]
Method = Literal["nearest", "bilinear", "area"]
Rect = tuple[int, int, int, int]
"""x, y, width, height in pixels."""
Color = tuple[int, int, int]
"""Red, green, blue, 0 to 255."""

_BILINEAR_ONE = 2048
_STRIP_SAMPLES = 1 << 16
_MOST_IN_32_BITS = (1 << 32) // 256
"""255 times a total and half of it fit 32 bits below this: areas of up to 16 million pixels."""


@dataclass(frozen=True, eq=False, slots=True)
class Taps:
    """Source positions and weights of an axis: ``index`` and ``weight`` are (outputs, taps); unused taps weigh 0."""

    index: Array
    weight: Array
    total: int


@lru_cache(maxsize=64)
def taps(method: Method, n: int, m: int) -> Taps:
    """The taps from ``n`` source positions to ``m`` outputs. Callers must not change the arrays."""
    d = np.arange(m, dtype=np.int64)
    if method == "nearest":
        return _taps(((2 * d + 1) * n // (2 * m))[:, None], np.ones((m, 1)), 1)
    if method == "bilinear":
        centre = (2 * d + 1) * n - m
        low = centre // (2 * m)
        right = ((centre - low * 2 * m) * _BILINEAR_ONE + m) // (2 * m)
        index = np.clip(np.stack([low, low + 1], 1), 0, n - 1)
        weight = np.stack([_BILINEAR_ONE - right, right], 1)
        if not right.any():
            return _taps(index[:, :1], np.ones((m, 1)), 1)
        return _taps(index, weight, _BILINEAR_ONE)
    units = gcd(n, m)
    pixel, step = m // units, n // units  # lengths of a source pixel and of an output interval
    first = d * step // pixel
    last = -(-(d + 1) * step // pixel)
    i = first[:, None] + np.arange(int(np.max(last - first)))
    begin = np.maximum(i * pixel, (d * step)[:, None])
    end = np.minimum((i + 1) * pixel, ((d + 1) * step)[:, None])
    return _taps(np.minimum(i, n - 1), np.maximum(end - begin, 0), step)


def _taps(index: Array, weight: Array, total: int) -> Taps:
    return Taps(index.astype(np.intp), weight.astype(np.uint32), total)


def place(picture: Array, out: Array, method: Method, source: Rect | None, target: Rect | None, color: Color) -> None:
    """Resample the part ``source`` of a picture to the part ``target`` of ``out`` and fill the rest with ``color``."""
    if target is not None and target != (0, 0, out.shape[1], out.shape[0]):
        x, y, width, height = target
        for border in (out[:y], out[y + height :], out[y : y + height, :x], out[y : y + height, x + width :]):
            border[...] = np.array(color, np.uint8)
        out = cut(out, target)
    resample(picture if source is None else cut(picture, source), out, method)


def cut(picture: Array, rect: Rect) -> Array:
    """The view of a rectangle."""
    x, y, width, height = rect
    return picture[y : y + height, x : x + width]


def resample(picture: Array, out: Array, method: Method) -> None:
    """Resample (h, w, 3) uint8 to the size of ``out``, (H, W, 3) uint8; both with any strides.

    In strips of output rows in the calling thread.
    """
    (n_y, n_x), (m_y, m_x) = picture.shape[:2], out.shape[:2]
    if (n_y, n_x) == (m_y, m_x):
        np.copyto(out, picture)
        return
    vertical, horizontal = taps(method, n_y, m_y), taps(method, n_x, m_x)
    if method == "nearest":
        for top in range(0, m_y, 64):
            rows = vertical.index[top : top + 64, 0]
            out[top : top + 64] = picture[rows[:, None], horizontal.index[:, 0]]
        return
    total = vertical.total * horizontal.total
    kind = np.uint32 if total < _MOST_IN_32_BITS else np.uint64
    columns = (horizontal.index[..., None] * 3 + np.arange(3)).transpose(1, 0, 2).reshape(-1, m_x * 3)
    weights = np.repeat(horizontal.weight.T.astype(kind), 3, axis=1)
    step = max(1, _STRIP_SAMPLES // (n_x * 3))
    for top in range(0, m_y, step):
        part = slice(top, min(m_y, top + step))
        lines = _sum_rows(picture, vertical.index[part], vertical.weight[part])
        sums = _sum_columns(lines, columns, weights, kind)
        np.add(sums, kind(total // 2), out=sums)
        np.floor_divide(sums, kind(total), out=sums)
        np.copyto(out[part], sums.reshape(-1, m_x, 3), casting="unsafe")


def _sum_rows(picture: Array, index: Array, weight: Array) -> Array:
    """The vertical sums of some output rows: (rows, width * 3) uint32."""
    rows, width = len(index), picture.shape[1] * 3
    sums = scratch("rows", (rows, width), np.uint32)
    part = scratch("row_part", (rows, width), np.uint32)
    shape = (rows, picture.shape[1], 3)
    for t in range(index.shape[1]):
        into = part if t else sums
        np.copyto(into.reshape(shape), picture[index[:, t]])
        np.multiply(into, weight[:, t, None], out=into)
        if t:
            np.add(sums, part, out=sums)
    return sums


def _sum_columns(lines: Array, columns: Array, weights: Array, kind: Any) -> Array:
    """The horizontal sums of ``lines``: (rows, output width * 3)."""
    shape = (len(lines), columns.shape[1])
    sums = scratch("columns", shape, kind)
    part = scratch("column_part", shape, np.uint32)
    wide = scratch("column_wide", shape, kind)
    for t in range(len(columns)):
        np.take(lines, columns[t], axis=1, out=part, mode="clip")
        into = wide if t else sums
        np.multiply(part, weights[t], out=into)
        if t:
            np.add(sums, wide, out=sums)
    return sums
