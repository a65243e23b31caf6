"""Planes and pictures to pictures and tensors on a GPU: one launch whatever is asked for, and one for the whole batch.

All that a launch needs besides addresses is worked out once for each geometry and kept in host memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np

from framepipe.frame import FrameSpec, Planes
from framepipe.kernels import _cuda_rows, _cuda_tonemap
from framepipe.kernels._cuda_code import Program, blocks, cupy
from framepipe.kernels._cuda_place import JOB, STRUCTS, Launch, job_of, launch, set_place
from framepipe.kernels._cuda_rows import Rows, rows_of_images, rows_of_planes
from framepipe.kernels._cuda_source import Struct, image_source, planes_source, slab_of, target
from framepipe.kernels._cuda_tonemap import TONED_JOB, TONED_SOURCE, toned_source
from framepipe.kernels._resample import Color, Method, Rect
from framepipe.kernels._tensor import Layout, Order
from framepipe.kernels._tonemap import Tone

_READERS = {
    "codes": "Codes", "separate": "Separate", "yuv_8": "Yuv<u8>", "yuv_16": "Yuv<u16>",
    "smooth_8": "Smooth<u8>", "smooth_16": "Smooth<u16>",
}  # fmt: skip
_BLACK = (0, 0, 0)
_MANY_ACROSS = 64  # source pixels side by side in an output pixel: then a block makes it
_MOST_ROWS = 65535  # of blocks in a launch
_ENOUGH_WARPS = 1 << 13  # keep the largest GPUs busy


def _program(reader: str) -> Program:
    macros = {"READER": _READERS[reader], **({"ONLY_COPY": "1"} if reader.startswith("smooth") else {})}
    return Program("source.cuh", "place.cuh", "picture.cu", structs=STRUCTS, macros=macros)


_pictures = {reader: _program(reader) for reader in _READERS} | _cuda_tonemap.programs
programs = (*_cuda_rows.programs, *_pictures.values())


def to_rgb(planes: Planes, out: Any, chroma: str, tone: Tone | None = None) -> Any:
    """See `framepipe.kernels.cpu.to_rgb`."""
    slab, spec, n = slab_of(planes), planes.spec, planes.n
    if out is None:
        out = cupy().empty((n, *spec.upright_size[::-1], 3), np.uint8)
    if not hasattr(out, "strides"):
        for i, into in enumerate(_strict(out, n)):
            to_rgb(Planes(spec, 1, slab=slab[i : i + 1]), into[None], chroma, tone)
        return out
    wrote = (out.shape, out.strides, out.dtype.name)
    _rgb(spec, n, slab.strides[0], _aligned(slab, 16), *wrote, chroma, tone)(slab, out)
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
    tone: Tone | None,
) -> Launch:
    size = spec.upright_size
    if shape != (n, *size[::-1], 3) or dtype != "uint8":
        raise ValueError(f"the output is {dtype} {shape} instead of uint8 {(n, *size[::-1], 3)}")
    written = target(shape, strides, dtype)
    source, reader = _source(spec, picture, tone, chroma == "bilinear")
    rows = rows_of_planes(source, reader, spec, aligned)
    fast = _cuda_rows.convert(rows, source, written, n) if rows else None
    return fast or _picture(None, reader, source, written, "copy", size, n)


def _source(spec: FrameSpec, picture: int, tone: Tone | None, smooth: bool = False) -> tuple[Struct, str]:
    return toned_source(spec, picture, tone, smooth) if tone else planes_source(spec, picture, smooth)


def resize(images: Any, out: Any, method: Method, source: Rect | None, part: Rect | None, color: Color) -> None:
    """See `framepipe.kernels.cpu.resize`; ``part`` is its ``target``."""
    for picture, into in _pairs(images, out):
        read = (picture.shape, picture.strides, picture.dtype.name)
        wrote = (into.shape, into.strides, into.dtype.name)
        _resized(*read, _aligned(picture, 8), *wrote, method, source, part, color)(picture, into)


@lru_cache(maxsize=256)
def _resized(
    read: tuple[int, ...],
    read_strides: tuple[int, ...],
    read_dtype: str,
    aligned: bool,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    *how: Any,
) -> Launch:
    _check_images(read, read_dtype)
    _check_images(shape, dtype)
    source, reader = image_source(read, read_strides)
    written = target(shape, strides, dtype)
    rows = rows_of_images(read, read_strides, aligned)
    return _picture(rows, reader, source, written, how[0], (read[2], read[1]), shape[0], *how[1:])


def normalize(images: Any, out: Any, factor: Any, offset: Any, layout: Layout, order: Order) -> None:
    """See `framepipe.kernels.cpu.normalize`."""
    numbers = _numbers(factor, offset)
    for picture, into in _pairs(images, out):
        read = (picture.shape, picture.strides, picture.dtype.name)
        wrote = (into.shape, into.strides, into.dtype.name)
        _normalized(*read, _aligned(picture, 8), *wrote, layout, order, *numbers)(picture, into)


@lru_cache(maxsize=256)
def _normalized(
    read: tuple[int, ...],
    read_strides: tuple[int, ...],
    read_dtype: str,
    aligned: bool,
    shape: tuple[int, ...],
    *how: Any,
) -> Launch:
    _check_images(read, read_dtype)
    written = _tensor(shape, *how)
    size = (read[2], read[1])
    if (int(written["width"]), int(written["height"])) != size:
        raise ValueError(f"an output of shape {shape} does not fit pictures of shape {read}")
    source, reader = image_source(read, read_strides)
    return _picture(rows_of_images(read, read_strides, aligned), reader, source, written, "copy", size, shape[0])


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
    tone: Tone | None = None,
) -> None:
    """See `framepipe.kernels.cpu.to_tensor`; ``part`` is its ``target``."""
    slab, spec, n = slab_of(planes), planes.spec, planes.n
    if not hasattr(out, "strides"):
        for i, into in enumerate(_strict(out, n)):
            one = Planes(spec, 1, slab=slab[i : i + 1])
            to_tensor(one, into[None], method, source, part, color, factor, offset, layout, order, tone)
        return
    wrote = (out.shape, out.strides, out.dtype.name, layout, order, *_numbers(factor, offset))
    _tensors(spec, n, slab.strides[0], _aligned(slab, 16), wrote, (method, source, part, color), tone)(slab, out)


@lru_cache(maxsize=256)
def _tensors(
    spec: FrameSpec,
    n: int,
    picture: int,
    aligned: bool,
    wrote: tuple[Any, ...],
    how: tuple[Any, ...],
    tone: Tone | None = None,
) -> Launch:
    written = _tensor(*wrote)
    if wrote[0][0] != n:
        raise ValueError(f"an output for {wrote[0][0]} pictures does not fit {n}")
    source, reader = _source(spec, picture, tone)
    rows = rows_of_planes(source, reader, spec, aligned)
    return _picture(rows, reader, source, written, how[0], spec.upright_size, n, *how[1:])


def _aligned(array: Any, nbytes: int) -> bool:
    return bool(array.data.ptr % nbytes == 0)


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
    rows: Rows | None,
    reader: str,
    source: Struct,
    written: Struct,
    method: Method | Literal["copy"],
    size: tuple[int, int],
    n: int,
    rect: Rect | None = None,
    part: Rect | None = None,
    color: Color = _BLACK,
) -> Launch:
    """From pictures of ``size`` (width, height) to ``n`` results."""
    out = (int(written["width"]), int(written["height"]))
    rect, part = rect or (0, 0, *size), part or (0, 0, *out)
    for inner, room in ((rect, size), (part, out)):
        if min(inner[:2]) < 0 or min(inner[2:]) < 1 or inner[0] + inner[2] > room[0] or inner[1] + inner[3] > room[1]:
            raise ValueError(f"the rectangle {inner} is not inside a picture of {room[0]}x{room[1]}")
    if rect[2:] == part[2:]:
        method = "copy"
    fast = None
    if rows and method != "copy":
        fast = _cuda_rows.resample(rows, source, written, method, rect, part, color, n)
    elif rows and rect[2:] == size and part[2:] == out:
        fast = _cuda_rows.tensor(rows, source, written, n)
    return fast or _general(reader, source, written, method, rect, part, color, n)


def _general(
    reader: str,
    source: Struct,
    written: Struct,
    method: Method | Literal["copy"],
    rect: Rect,
    part: Rect,
    color: Color,
    n: int,
) -> Launch:
    """For pictures of any format and any strides."""
    out = (int(written["width"]), int(written["height"]))
    job = job_of(source, written, TONED_JOB if source.dtype == TONED_SOURCE else JOB)
    place = job["place"]
    set_place(place, rect, part, color, method)
    place["count"] = 4 if n * out[1] * blocks(out[0], 128) >= _ENOUGH_WARPS else 1
    across, down = blocks(rect[2], part[2]), blocks(rect[3], part[3])  # about so many make a pixel by area
    place["group"] = 3 if blocks(across, 3) * 3 < blocks(across, 4) * 4 else 4
    place["team"] = team = _team(n * out[1] * blocks(out[0], 32), down) if method == "area" else 1
    name, grid = f"picture_{method}", (blocks(out[0], 32 // team * int(place["count"])), blocks(out[1], 8), n)
    if method == "area" and across >= _MANY_ACROSS and out[1] <= _MOST_ROWS:
        name, grid = "gather_area", (*out, n)
    return launch(_pictures[reader], name, grid, job)


def _team(warps: int, rows: int) -> int:
    """How many lanes share a pixel that is made of ``rows``: more where there are few warps otherwise."""
    team = 1
    while team < 8 and 2 * team <= rows and warps * team < _ENOUGH_WARPS // 2:
        team *= 2
    return team
