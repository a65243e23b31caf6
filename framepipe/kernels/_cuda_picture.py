"""Planes and pictures to pictures and tensors on a GPU: one launch whatever is asked for, and one for the whole batch.

All that a launch needs besides addresses is worked out once for each geometry and kept in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, Literal

import numpy as np

from framepipe.frame import FrameSpec, Planes
from framepipe.kernels._cuda_code import Program, blocks, by_value, cupy
from framepipe.kernels._cuda_source import SOURCE, TARGET, Struct, image_source, planes_source, slab_of, target
from framepipe.kernels._resample import Color, Method, Rect
from framepipe.kernels._tensor import Layout, Order

PLACE = np.dtype(
    [
        ("total", "u8"),
        ("total_magic", "u8"),
        ("magic", "u8", 2),
        ("source", "i4", 4),
        ("target", "i4", 4),
        ("pixel", "u4", 2),
        ("step", "u4", 2),
        ("color", "i4", 3),
        ("count", "i4"),
        ("team", "i4"),
        ("group", "i4"),
    ],
    align=True,
)
"""The part ``source`` of a picture and the part ``target`` of the result: x, y, width, height.

By area, ``pixel`` and ``step`` are the lengths of a source pixel and of an output interval in units, across and down,
and ``total`` the units of an output pixel. ``magic`` numbers stand for divisors: see ``divided`` in common.cuh. A warp
makes ``count`` times 32 pixels, or by area ``count`` times as many as it has teams of ``team`` lanes, each of which
loads ``group`` source pixels at a time.
"""

JOB = np.dtype([("source", SOURCE), ("target", TARGET), ("place", PLACE)], align=True)
_STRUCTS = {"Source": SOURCE, "Target": TARGET, "Place": PLACE, "Job": JOB}

_READERS = {
    "codes": "Codes", "separate": "Separate", "yuv_8": "Yuv<u8>", "yuv_16": "Yuv<u16>",
    "smooth_8": "Smooth<u8>", "smooth_16": "Smooth<u16>",
}  # fmt: skip
_FAST_CHROMA = ((1, 1), (1, 0), (0, 0))
_BLACK = (0, 0, 0)
_MANY_ACROSS = 64  # source pixels side by side in an output pixel: then a block makes it
_MOST_ROWS = 65535  # of blocks in a launch
_ENOUGH_BLOCKS = 2048  # of 8 warps, to keep the largest GPUs busy; more than these go on with a second tile, and so on
_MOST_ROUNDS = 4
_ENOUGH_WARPS = 1 << 13  # keep the largest GPUs busy


def _picture_program(reader: str) -> Program:
    macros = {"READER": _READERS[reader], **({"ONLY_COPY": "1"} if reader.startswith("smooth") else {})}
    return Program("source.cuh", "picture.cu", structs=_STRUCTS, macros=macros)


def _convert_program(sample: str, w_shift: int, h_shift: int) -> Program:
    macros = {"SAMPLE": sample, "CHROMA_W_SHIFT": str(w_shift), "CHROMA_H_SHIFT": str(h_shift)}
    return Program("source.cuh", "convert.cu", structs=_STRUCTS, macros=macros)


_pictures = {reader: _picture_program(reader) for reader in _READERS}
_converts = {(size, *shifts): _convert_program(f"u{8 * size}", *shifts) for size in (1, 2) for shifts in _FAST_CHROMA}
programs = (*_converts.values(), *_pictures.values())


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch but for its arrays."""

    program: Program
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    job: Struct

    def __call__(self, read: Any, out: Any) -> None:
        if self.grid[2]:
            self.program.launch(self.name, self.grid, self.block, (read, out, self.job))


def to_rgb(planes: Planes, out: Any, chroma: str) -> Any:
    """See `framepipe.kernels.cpu.to_rgb`."""
    slab, spec, n = slab_of(planes), planes.spec, planes.n
    if out is None:
        out = cupy().empty((n, *spec.upright_size[::-1], 3), np.uint8)
    if not hasattr(out, "strides"):
        for i, into in enumerate(_strict(out, n)):
            to_rgb(Planes(spec, 1, slab=slab[i : i + 1]), into[None], chroma)
        return out
    aligned = slab.data.ptr % 16 == 0
    _rgb(spec, n, slab.strides[0], aligned, out.shape, out.strides, out.dtype.name, chroma)(slab, out)
    return out


@lru_cache(maxsize=256)
def _rgb(
    spec: FrameSpec,
    n: int,
    picture: int,
    aligned: bool,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    chroma: str,
) -> _Launch:
    size = spec.upright_size
    if shape != (n, *size[::-1], 3) or dtype != "uint8":
        raise ValueError(f"the output is {dtype} {shape} instead of uint8 {(n, *size[::-1], 3)}")
    written = target(shape, strides, dtype)
    source, reader = planes_source(spec, picture, chroma == "bilinear")
    kind = (spec.format.itemsize, int(source["w_shift"]), int(source["h_shift"]))
    fast = reader.startswith("yuv") and kind in _converts and aligned and picture % 16 == 0
    if not (fast and written["together"]):
        return _picture(reader, source, written, "copy", size, n)
    job = np.zeros((), JOB)
    job["source"], job["target"] = source, written
    if spec.rotation:
        grid = (blocks(spec.width, 64), blocks(spec.height, 32 << kind[2]), n)
        return _Launch(_converts[kind], "convert_turned", grid, (8, 32, 1), by_value(job))
    across, down = blocks(spec.width, 256), blocks(spec.height, 8 << kind[2])
    rounds = max(1, min(_MOST_ROUNDS, n * across * down // _ENOUGH_BLOCKS))
    return _Launch(_converts[kind], "convert", (across, blocks(down, rounds), n), (32, 8, 1), by_value(job))


def resize(images: Any, out: Any, method: Method, source: Rect | None, part: Rect | None, color: Color) -> None:
    """See `framepipe.kernels.cpu.resize`; ``part`` is its ``target``."""
    for picture, into in _pairs(images, out):
        read = (picture.shape, picture.strides, picture.dtype.name)
        wrote = (into.shape, into.strides, into.dtype.name)
        _resized(*read, *wrote, method, source, part, color)(picture, into)


@lru_cache(maxsize=256)
def _resized(
    read: tuple[int, ...],
    read_strides: tuple[int, ...],
    read_dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    *how: Any,
) -> _Launch:
    _check_images(read, read_dtype)
    _check_images(shape, dtype)
    source, reader = image_source(read, read_strides)
    written = target(shape, strides, dtype)
    return _picture(reader, source, written, how[0], (read[2], read[1]), shape[0], *how[1:])


def normalize(images: Any, out: Any, factor: Any, offset: Any, layout: Layout, order: Order) -> None:
    """See `framepipe.kernels.cpu.normalize`."""
    numbers = _numbers(factor, offset)
    for picture, into in _pairs(images, out):
        read = (picture.shape, picture.strides, picture.dtype.name)
        wrote = (into.shape, into.strides, into.dtype.name)
        _normalized(*read, *wrote, layout, order, *numbers)(picture, into)


@lru_cache(maxsize=256)
def _normalized(
    read: tuple[int, ...], read_strides: tuple[int, ...], read_dtype: str, shape: tuple[int, ...], *how: Any
) -> _Launch:
    _check_images(read, read_dtype)
    written = _tensor(shape, *how)
    size = (read[2], read[1])
    if (int(written["width"]), int(written["height"])) != size:
        raise ValueError(f"an output of shape {shape} does not fit pictures of shape {read}")
    source, reader = image_source(read, read_strides)
    return _picture(reader, source, written, "copy", size, shape[0])


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
    slab, spec, n = slab_of(planes), planes.spec, planes.n
    if not hasattr(out, "strides"):
        for i, into in enumerate(_strict(out, n)):
            one = Planes(spec, 1, slab=slab[i : i + 1])
            to_tensor(one, into[None], method, source, part, color, factor, offset, layout, order)
        return
    wrote = (out.shape, out.strides, out.dtype.name, layout, order, *_numbers(factor, offset))
    _tensors(spec, n, slab.strides[0], wrote, (method, source, part, color))(slab, out)


@lru_cache(maxsize=256)
def _tensors(spec: FrameSpec, n: int, picture: int, wrote: tuple[Any, ...], how: tuple[Any, ...]) -> _Launch:
    written = _tensor(*wrote)
    if wrote[0][0] != n:
        raise ValueError(f"an output for {wrote[0][0]} pictures does not fit {n}")
    source, reader = planes_source(spec, picture)
    return _picture(reader, source, written, how[0], spec.upright_size, n, *how[1:])


def _numbers(factor: Any, offset: Any) -> tuple[bytes | None, bytes | None]:
    if factor is None or offset is None:
        return None, None
    return np.asarray(factor, np.float32).tobytes(), np.asarray(offset, np.float32).tobytes()


def _tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, layout: str, *how: Any) -> Struct:
    if len(shape) != 4 or shape[1 if layout == "nchw" else 3] != 3:
        raise ValueError(f"a tensor in {layout} has four dimensions and 3 channels, not {shape}")
    return target(shape, strides, dtype, layout, *how)


def _check_images(shape: tuple[int, ...], dtype: str) -> None:
    if len(shape) != 4 or shape[3] != 3 or dtype != "uint8":
        raise ValueError(f"pictures are uint8 with 3 channels, not {dtype} {shape}")


def _strict(parts: Any, n: int) -> Any:
    if len(parts) != n:
        raise ValueError(f"an output for {len(parts)} pictures does not fit {n}")
    return parts


def _pairs(images: Any, out: Any) -> Any:
    """(N, …) arrays of input and output: the whole batch at once, or one picture at a time where either is a list."""
    _strict(out, len(images))
    if hasattr(images, "strides") and hasattr(out, "strides"):
        return ((images, out),)
    return ((picture[None], into[None]) for picture, into in zip(images, out, strict=True))


def _picture(
    reader: str,
    source: Struct,
    written: Struct,
    method: Method | Literal["copy"],
    size: tuple[int, int],
    n: int,
    rect: Rect | None = None,
    part: Rect | None = None,
    color: Color = _BLACK,
) -> _Launch:
    """From pictures of ``size`` (width, height) to ``n`` results."""
    out = (int(written["width"]), int(written["height"]))
    rect, part = rect or (0, 0, *size), part or (0, 0, *out)
    for inner, room in ((rect, size), (part, out)):
        if min(inner[:2]) < 0 or min(inner[2:]) < 1 or inner[0] + inner[2] > room[0] or inner[1] + inner[3] > room[1]:
            raise ValueError(f"the rectangle {inner} is not inside a picture of {room[0]}x{room[1]}")
    if rect[2:] == part[2:]:
        method = "copy"
    job = np.zeros((), JOB)
    job["source"], job["target"] = source, written
    place = job["place"]
    place["source"], place["target"], place["color"] = rect, part, color
    _divisors(place, rect[2:], part[2:], method)
    place["count"] = 4 if n * out[1] * blocks(out[0], 128) >= _ENOUGH_WARPS else 1
    across, down = blocks(rect[2], part[2]), blocks(rect[3], part[3])  # about so many make a pixel by area
    place["group"] = 3 if blocks(across, 3) * 3 < blocks(across, 4) * 4 else 4
    place["team"] = team = _team(n * out[1] * blocks(out[0], 32), down) if method == "area" else 1
    name, grid = f"picture_{method}", (blocks(out[0], 32 // team * int(place["count"])), blocks(out[1], 8), n)
    if method == "area" and across >= _MANY_ACROSS and out[1] <= _MOST_ROWS:
        name, grid = "gather_area", (*out, n)
    return _Launch(_pictures[reader], name, grid, (32, 8, 1), by_value(job))


def _team(warps: int, rows: int) -> int:
    """How many lanes share a pixel that is made of ``rows``: more where there are few warps otherwise."""
    team = 1
    while team < 8 and 2 * team <= rows and warps * team < _ENOUGH_WARPS // 2:
        team *= 2
    return team


def _divisors(place: Struct, read: tuple[int, int], made: tuple[int, int], method: str) -> None:
    """The units of area, and the numbers that stand for divisions by what ``picture.cu`` divides by."""
    total = 1
    for axis, (n, m) in enumerate(zip(read, made, strict=True)):
        units = gcd(n, m)
        place["pixel"][axis], place["step"][axis] = m // units, n // units
        place["magic"][axis] = _magic(m // units if method == "area" else 2 * m)
        total *= n // units
    place["total"], place["total_magic"] = total, _magic(total)


def _magic(divisor: int) -> int:
    return 0 if divisor == 1 else -(-(1 << 64) // divisor)
