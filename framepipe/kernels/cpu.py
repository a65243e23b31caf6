"""The kernels of the CPU, and the contract of those of every device.

Each function enqueues its work on the current stream (here: has done it when it returns), reads and writes arrays
of its device and allocates nothing that outlives the call. ``images`` is (N, H, W, 3) uint8 or, on the CPU, a
sequence of N (H, W, 3) arrays with any strides; ``out`` likewise. All but ``accuracy="fast"`` is defined in whole
numbers or in single float32 operations, so that every device gives the same bits: `framepipe.kernels._colour` and
`framepipe.kernels._resample` say how.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from framepipe.frame import Planes
from framepipe.kernels._colour import component, exact_rgb
from framepipe.kernels._difference import difference, difference_scratch
from framepipe.kernels._draw import draw_boxes
from framepipe.kernels._resample import Color, Method, Rect, place
from framepipe.kernels._scratch import scratch
from framepipe.kernels._swscale import fast_path, fast_rgb
from framepipe.kernels._tensor import Layout, Order, normalize_one, sum_min_max
from framepipe.kernels._tonemap import Tone, toning

__all__ = [
    "difference",
    "difference_scratch",
    "draw_boxes",
    "fast_path",
    "luma_stats",
    "normalize",
    "resize",
    "stats",
    "to_rgb",
    "to_tensor",
]

Accuracy = Literal["exact", "fast"]
Chroma = Literal["nearest", "bilinear"]


def to_rgb(
    planes: Planes,
    out: Any = None,
    *,
    accuracy: Accuracy = "exact",
    chroma: Chroma = "nearest",
    tone: Tone | None = None,
) -> Any:
    """Write the upright RGB of each picture to ``out``, (N, H, W, 3) uint8, and return it.

    ``exact`` is within 1 code of the standards' formulas with repeated chroma, ``fast`` within 3 at 8 bits and the
    same as ``exact`` where `fast_path` is False, ``chroma`` is ``bilinear`` or there is a ``tone``. Alpha is dropped.
    ``tone`` is how HDR becomes SDR (`framepipe.kernels._tonemap`); pictures that are SDR raise `ValueError` with it.

    On the CPU ``out`` may be None: the result is then a list of N (H, W, 3) arrays which may have padded rows. On
    the fast path they are libavfilter's own frames, recycled when dropped; otherwise new memory.
    """
    fast = accuracy == "fast" and chroma == "nearest" and tone is None and fast_path(planes.spec)
    if out is None and fast:
        return [fast_rgb(planes, i) for i in range(planes.n)]
    if out is None:
        width, height = planes.spec.upright_size
        out = [np.empty((height, width, 3), np.uint8) for _ in range(planes.n)]
    store = toning(planes.spec, tone) if tone else None
    for i in range(planes.n):
        if fast:
            np.copyto(out[i], fast_rgb(planes, i))
        else:
            exact_rgb(planes.picture(i), planes.spec, out[i], chroma=chroma, store=store)
    return out


def resize(
    images: Any,
    out: Any,
    *,
    method: Method,
    source: Rect | None = None,
    target: Rect | None = None,
    color: Color = (0, 0, 0),
) -> None:
    """Resample the part ``source`` of each picture to the part ``target`` of ``out``; the rest becomes ``color``.

    Rectangles are (x, y, width, height) in pixels; None is the whole picture.
    """
    for picture, into in zip(images, out, strict=True):
        place(picture, into, method, source, target, color)


def normalize(
    images: Any,
    out: Any,
    *,
    factor: np.ndarray[Any, Any] | None,
    offset: np.ndarray[Any, Any] | None,
    layout: Layout = "nchw",
    order: Order = "rgb",
) -> None:
    """``x * factor[c] + offset[c]`` of every sample, to (N, 3, H, W) or (N, H, W, 3).

    ``factor`` and ``offset`` are float32 numpy arrays of 3 in the order of the output's channels. The product and
    the sum are each rounded to float32 (no fused operation), then to ``out``'s float16 where it is that. With both
    None the samples are copied as they are, to uint8.
    """
    for picture, into in zip(images, out, strict=True):
        normalize_one(picture, into, factor, offset, layout, order)


def to_tensor(
    planes: Planes,
    out: Any,
    *,
    accuracy: Accuracy = "exact",
    method: Method = "bilinear",
    source: Rect | None = None,
    target: Rect | None = None,
    color: Color = (0, 0, 0),
    factor: np.ndarray[Any, Any] | None = None,
    offset: np.ndarray[Any, Any] | None = None,
    layout: Layout = "nchw",
    order: Order = "rgb",
    tone: Tone | None = None,
) -> None:
    """Planes to a tensor in one go: `to_rgb`, `resize`, `normalize`, with the same bits.

    ``source`` is a part of the upright picture, ``tone`` as in `to_rgb`. ``out`` is (N, 3, H, W) or (N, H, W, 3), of
    uint8 where ``factor`` and ``offset`` are None, else of float32 or float16.
    """
    width, height = planes.spec.upright_size
    size = tuple(out.shape[2:] if layout == "nchw" else out.shape[1:3])
    store = toning(planes.spec, tone) if tone else None
    for i in range(planes.n):
        if accuracy == "fast" and tone is None and fast_path(planes.spec):
            picture = fast_rgb(planes, i)
        else:
            picture = scratch("picture", (height, width, 3), np.uint8)
            exact_rgb(planes.picture(i), planes.spec, picture, store=store)
        if source is not None or target is not None or size != (height, width):
            resized = scratch("resized", (*size, 3), np.uint8)
            place(picture, resized, method, source, target, color)
            picture = resized
        normalize_one(picture, out[i], factor, offset, layout, order)


def stats(images: Any, out: Any) -> None:
    """Sum, minimum and maximum of red, green and blue of each picture to ``out``, (N, 3, 3) int64."""
    for picture, into in zip(images, out, strict=True):
        sum_min_max(picture, into)


def luma_stats(planes: Planes, out: Any) -> None:
    """Sum, minimum and maximum of each picture's luma samples as they lie in memory to ``out``, (N, 1, 3) int64."""
    for i in range(planes.n):
        sum_min_max(component(planes.picture(i), planes.spec, "Y")[..., None], out[i])
