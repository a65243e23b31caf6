"""Planes and pictures to pictures and tensors on a GPU: one launch whatever is asked for, and one for the whole batch.

All that a launch needs besides addresses is worked out once for each geometry and kept in host memory.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any, Literal

import numpy as np

from framepipe.frame import FrameSpec, Planes
from framepipe.kernels._cuda_code import Program, blocks, cupy
from framepipe.kernels._cuda_source import SOURCE, TARGET, Struct, image_source, planes_source, slab_of, target
from framepipe.kernels._resample import Color, Method, Rect
from framepipe.kernels._tensor import Layout, Order

PLACE = np.dtype(
    [
        ("total", "u8"),
        ("method", "i4"),
        ("count", "i4"),
        ("source", "i4", 4),
        ("target", "i4", 4),
        ("pixel", "u4", 2),
        ("step", "u4", 2),
        ("color", "i4", 3),
    ],
    align=True,
)
"""The part ``source`` of a picture and the part ``target`` of the result: x, y, width, height.

By area, ``pixel`` and ``step`` are the lengths of a source pixel and of an output interval in units, across and down,
and ``total`` the units of an output pixel. ``count`` is how many pixels a thread makes.
"""

convert_program = Program("source.cuh", "convert.cu", structs={"Source": SOURCE, "Target": TARGET})
picture_program = Program("source.cuh", "picture.cu", structs={"Source": SOURCE, "Target": TARGET, "Place": PLACE})

_METHODS = {"copy": 0, "nearest": 1, "bilinear": 2, "area": 3}
_FAST_CHROMA = {(1, 1): "420", (1, 0): "422", (0, 0): "444"}
_MANY_TAPS = 256  # of an output pixel: then a block makes it instead of a thread
_ENOUGH_WARPS = 1 << 13  # keep the largest GPUs busy


def to_rgb(planes: Planes, out: Any, chroma: str) -> Any:
    """See `framepipe.kernels.cpu.to_rgb`."""
    slab, spec, n = slab_of(planes), planes.spec, planes.n
    width, height = spec.upright_size
    if out is None:
        out = cupy().empty((n, height, width, 3), np.uint8)
    if not hasattr(out, "strides"):
        for i, into in enumerate(_strict(out, n)):
            to_rgb(Planes(spec, 1, slab=slab[i : i + 1]), into[None], chroma)
        return out
    if out.shape != (n, height, width, 3) or out.dtype != np.uint8:
        raise ValueError(f"the output is {out.dtype} {out.shape} instead of uint8 {(n, height, width, 3)}")
    aligned = (slab.data.ptr | slab.strides[0]) % 16 == 0
    kernel = _convert_kernel(spec, chroma) if aligned and n else None
    written = target(out.shape, out.strides, "uint8")
    if kernel is None or not written["together"]:
        source = planes_source(spec, slab.strides[0], chroma == "bilinear")
        _run(slab, out, *source, written, _place("copy", (width, height), (width, height), n, None, None, (0, 0, 0)))
        return out
    name, rows = kernel
    block = (8, 32, 1) if spec.rotation in (90, 270) else (32, 8, 1)
    grid = (blocks(spec.width, 8 * block[0]), blocks(spec.height, rows * block[1]), n)
    convert_program.launch(name, grid, block, (slab, out, planes_source(spec, slab.strides[0])[0], written))
    return out


@lru_cache(maxsize=256)
def _convert_kernel(spec: FrameSpec, chroma: str) -> tuple[str, int] | None:
    """The fast kernel for a format and the rows that a thread makes, or None."""
    fmt = spec.format
    if fmt.model != "yuv" or fmt.planes[fmt.components["Y"][0]].channels != 1:
        return None
    plane = fmt.planes[fmt.components["U"][0]]
    shifts = (plane.w_shift, plane.h_shift)
    if shifts not in _FAST_CHROMA or (chroma != "nearest" and any(shifts)):
        return None
    return f"convert_{_FAST_CHROMA[shifts]}_{8 * fmt.itemsize}", 1 << plane.h_shift


def resize(images: Any, out: Any, method: Method, source: Rect | None, part: Rect | None, color: Color) -> None:
    """See `framepipe.kernels.cpu.resize`; ``part`` is its ``target``."""
    for picture, into in _pairs(images, out):
        if into.dtype != np.uint8 or into.shape[3] != 3:
            raise ValueError(f"pictures are uint8 with 3 channels, not {into.dtype} {into.shape}")
        written = target(into.shape, into.strides, "uint8")
        size, inner = (picture.shape[2], picture.shape[1]), (into.shape[2], into.shape[1])
        place = _place(method, size, inner, len(into), source, part, color)
        _run(picture, into, *_image(picture), written, place)


def normalize(images: Any, out: Any, factor: Any, offset: Any, layout: Layout, order: Order) -> None:
    """See `framepipe.kernels.cpu.normalize`."""
    for picture, into in _pairs(images, out):
        written = _tensor(into, factor, offset, layout, order)
        size = (picture.shape[2], picture.shape[1])
        if (int(written["width"]), int(written["height"])) != size:
            raise ValueError(f"an output of shape {into.shape} does not fit pictures of shape {picture.shape}")
        place = _place("copy", size, size, len(into), None, None, (0, 0, 0))
        _run(picture, into, *_image(picture), written, place)


def to_tensor(
    planes: Planes,
    out: Any,
    method: Method,
    source: Rect | None,
    part: Rect | None,
    color: Color,
    factor: Any,
    offset: Any,
    layout: Layout,
    order: Order,
) -> None:
    """See `framepipe.kernels.cpu.to_tensor`; ``part`` is its ``target``."""
    slab, spec = slab_of(planes), planes.spec
    if not hasattr(out, "strides"):
        for i, into in enumerate(_strict(out, planes.n)):
            one = Planes(spec, 1, slab=slab[i : i + 1])
            to_tensor(one, into[None], method, source, part, color, factor, offset, layout, order)
        return
    if len(out) != planes.n:
        raise ValueError(f"an output for {len(out)} pictures does not fit {planes.n}")
    written = _tensor(out, factor, offset, layout, order)
    inner = (int(written["width"]), int(written["height"]))
    place = _place(method, spec.upright_size, inner, planes.n, source, part, color)
    _run(slab, out, *planes_source(spec, slab.strides[0]), written, place)


def _tensor(out: Any, factor: Any, offset: Any, layout: Layout, order: Order) -> Struct:
    if out.ndim != 4 or out.shape[1 if layout == "nchw" else 3] != 3:
        raise ValueError(f"a tensor in {layout} has four dimensions and 3 channels, not {out.shape}")
    if factor is None or offset is None:
        return target(out.shape, out.strides, out.dtype.name, layout, order)
    numbers = tuple(map(float, factor)), tuple(map(float, offset))
    return target(out.shape, out.strides, out.dtype.name, layout, order, *numbers)


def _image(picture: Any) -> tuple[Struct, str]:
    if picture.dtype != np.uint8 or picture.shape[3] != 3:
        raise ValueError(f"pictures are uint8 with 3 channels, not {picture.dtype} {picture.shape}")
    return image_source(picture.shape, picture.strides)


def _strict(parts: Any, n: int) -> Any:
    if len(parts) != n:
        raise ValueError(f"an output for {len(parts)} pictures does not fit {n}")
    return parts


def _pairs(images: Any, out: Any) -> Any:
    """(N, …) arrays of input and output: the whole batch at once, or one picture at a time where either is a list."""
    if len(images) != len(out):
        raise ValueError(f"an output for {len(out)} pictures does not fit {len(images)}")
    if hasattr(images, "strides") and hasattr(out, "strides"):
        return ((images, out),)
    return ((picture[None], into[None]) for picture, into in zip(images, out, strict=True))


@lru_cache(maxsize=256)
def _place(
    method: Method | Literal["copy"],
    size: tuple[int, int],
    out: tuple[int, int],
    n: int,
    source: Rect | None,
    part: Rect | None,
    color: Color,
) -> Struct:
    """From pictures of ``size`` to ``n`` of ``out`` (width, height)."""
    source, part = source or (0, 0, *size), part or (0, 0, *out)
    for rect, room in ((source, size), (part, out)):
        if min(rect[:2]) < 0 or min(rect[2:]) < 1 or rect[0] + rect[2] > room[0] or rect[1] + rect[3] > room[1]:
            raise ValueError(f"the rectangle {rect} is not inside a picture of {room[0]}x{room[1]}")
    place = np.zeros((), PLACE)
    place["method"] = _METHODS["copy" if source[2:] == part[2:] else method]
    place["source"], place["target"], place["color"] = source, part, color
    total = 1
    for axis in range(2):
        units = gcd(source[2 + axis], part[2 + axis])
        place["pixel"][axis], place["step"][axis] = part[2 + axis] // units, source[2 + axis] // units
        total *= source[2 + axis] // units
    place["total"] = total
    place["count"] = 4 if n * out[1] * blocks(out[0], 128) >= _ENOUGH_WARPS else 1
    return place


def _run(read: Any, out: Any, source: Struct, reader: str, written: Struct, place: Struct) -> None:
    """Launch over (N, …) arrays."""
    n, width, height = len(out), int(written["width"]), int(written["height"])
    if not n:
        return
    if place["method"] == _METHODS["area"] and _taps(place) >= _MANY_TAPS:
        name, grid = f"gather_{reader}", (width, height, n)
    else:
        name, grid = f"picture_{reader}", (blocks(width, 32 * int(place["count"])), blocks(height, 8), n)
    picture_program.launch(name, grid, (32, 8, 1), (read, out, source, written, place))


def _taps(place: Struct) -> int:
    """About how many source pixels an output pixel is made of."""
    across, down = (int(place["source"][2 + axis]) // int(place["target"][2 + axis]) for axis in range(2))
    return (across + 1) * (down + 1)
