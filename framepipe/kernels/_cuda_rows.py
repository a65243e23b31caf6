"""The fast kernels of `framepipe.kernels._cuda_picture`: eight pixels of a row at a time, from aligned rows.

Planes of 4:2:0, 4:2:2 and 4:4:4 with repeated chroma that lie upright (or are brought so on the way to RGB), and RGB
pictures without gaps. Each function gives None for a geometry that it is not made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

import numpy as np

from framepipe.frame import FrameSpec
from framepipe.kernels._cuda_code import Program, blocks, by_value
from framepipe.kernels._cuda_place import PLACE, STRUCTS, Launch, job_of, launch, set_place
from framepipe.kernels._cuda_source import SOURCE, TARGET, Struct
from framepipe.kernels._resample import Color, Method, Rect, taps

Array = np.ndarray[Any, Any]
Rows = tuple[int, int, int] | Literal["images"]
"""What is read: bytes of a sample and shifts of the chroma planes, or RGB pictures."""

TILING = np.dtype(
    [
        ("columns", "i4"),
        ("rows", "i4"),
        ("across", "i4"),
        ("beside", "i4"),
        ("taps", "i4"),
        ("bits", "i4", 2),
        ("begins", "i4"),
        ("weights", "i4"),
        ("pixels", "i4"),
        ("pitch", "i4"),
        ("half", "u8"),
        ("magic", "u4"),
        ("shift", "i4"),
    ],
    align=True,
)
"""How resample.cu divides the work.

A warp makes ``rows`` rows of ``columns`` output columns, from 256 source columns at most; the 4 warps of a block make
rows below each other, and ``across`` blocks side by side make the part. ``beside`` rows have a border. The weights of a
column take ``taps`` words; those of bilinear are in units of ``2**bits / 2048``, across and down. ``begins``,
``weights`` and ``pixels`` are where these stand in shared memory, behind the sums; words of a column's weights are
``pitch`` bytes apart.

A sum times ``magic`` plus ``half``, moved down by ``32 + shift`` bits, is the average.
"""

TILED_JOB = np.dtype([("source", SOURCE), ("target", TARGET), ("place", PLACE), ("tiling", TILING)], align=True)
_TILED_STRUCTS = {"Source": SOURCE, "Target": TARGET, "Place": PLACE, "Tiling": TILING, "TiledJob": TILED_JOB}

_CHROMA = ((1, 1), (1, 0), (0, 0))
_KINDS: tuple[Rows, ...] = (*((size, *shifts) for size in (1, 2) for shifts in _CHROMA), "images")
_ENOUGH_BLOCKS = 2048  # of 8 warps, to keep the largest GPUs busy; more than these go on with a second tile, and so on
_MOST_ROUNDS = 4
_MULTIPROCESSORS = 132  # of a large GPU
_PLACES = {"area": 5, "bilinear": 8}  # blocks of resample.cu that one of them has room for at a time
_ALONE = 0.2  # of the time that all these take, what one would still take if it did nothing: waiting
_MOST_TALL = {"area": 32, "bilinear": 8}  # rows that a warp goes down: by area it has some of the next ones' work done
_BEGINNING = 450  # instructions before a warp begins with its rows, about
_FEWEST_WARPS = 512  # below, a pixel's rows are better shared by lanes
_MOST_ACROSS = 64  # source columns of an output column
_MOST_SKIPPED = 8  # columns that bilinear converts for each that it makes
_MOST_COLUMNS = 512
_WARPS = 4  # of a block of resample.cu
_ROW_BYTES = _WARPS * (32 * 12 + 16)  # ROW_BYTES of these
_BEYOND = 16  # bytes behind a warp's sums, so that words of which not all weigh do not read those of the next warp
_SHARED_BYTES = 48 << 10  # what a launch may ask for without more ado


def _macros(rows: Rows) -> dict[str, str]:
    if isinstance(rows, str):
        return {"IMAGES": "1"}
    macros = {"SAMPLE": f"u{8 * rows[0]}", "CHROMA_W_SHIFT": str(rows[1]), "CHROMA_H_SHIFT": str(rows[2])}
    return macros | {"BYTES": "1"} if rows[0] == 1 else macros


def _program(rows: Rows, *files: str, structs: dict[str, np.dtype[Any]] = STRUCTS) -> Program:
    return Program("source.cuh", "rows.cuh", *files, structs=structs, macros=_macros(rows))


_converts = {rows: _program(rows, "convert.cu") for rows in _KINDS if rows != "images"}
_tensors = {rows: _program(rows, "place.cuh", "tensor.cu") for rows in _KINDS}
_resamples = {rows: _program(rows, "place.cuh", "resample.cu", structs=_TILED_STRUCTS) for rows in _KINDS}
programs = (*_converts.values(), *_tensors.values(), *_resamples.values())


def rows_of_planes(source: Struct, reader: str, spec: FrameSpec, aligned: bool) -> Rows | None:
    """What to read planes as, whose first is at a multiple of 16 bytes if ``aligned``."""
    rows = (spec.format.itemsize, int(source["w_shift"]), int(source["h_shift"]))
    return rows if reader.startswith("yuv") and rows in _KINDS and aligned and source["picture"] % 16 == 0 else None


def rows_of_images(shape: tuple[int, ...], strides: tuple[int, ...], aligned: bool) -> Rows | None:
    """What to read (N, H, W, 3) pictures as, the first of which is at a multiple of 8 bytes if ``aligned``."""
    apart = strides[1] if shape[0] == 1 else strides[0] | strides[1]
    return "images" if aligned and strides[2:] == (3, 1) and shape[2] % 8 == 0 and apart % 8 == 0 else None


def convert(rows: Rows, source: Struct, written: Struct, n: int) -> Launch | None:
    """Planes to RGB, also of turned and mirrored pictures."""
    if not written["together"] or rows == "images":
        return None
    width, height, tall = int(source["width"]), int(source["height"]), rows[2]
    job = job_of(source, written)
    if source["turned"]:
        grid = (blocks(width, 64), blocks(height, 32 << tall), n)
        return Launch(_converts[rows], "convert_turned", grid, (8, 32, 1), by_value(job))
    return launch(_converts[rows], "convert", _grid(width, height, tall, n), job)


def _grid(width: int, height: int, tall: int, n: int) -> tuple[int, int, int]:
    across, down = blocks(width, 256), blocks(height, 8 << tall)
    rounds = max(1, min(_MOST_ROUNDS, n * across * down // _ENOUGH_BLOCKS))
    return across, blocks(down, rounds), n


def tensor(rows: Rows, source: Struct, written: Struct, n: int) -> Launch | None:
    """Planes or pictures to tensors of their size."""
    if source["turned"] or not _is_dense(written) or (written["together"] and written["swap"]):
        return None
    name = "tensor_interleaved" if written["together"] else "tensor_planar"
    tall = 0 if isinstance(rows, str) else rows[2]
    grid = _grid(int(source["width"]), int(source["height"]), tall, n)
    return launch(_tensors[rows], name, grid, job_of(source, written))


def _is_dense(written: Struct) -> bool:
    """Whether a row, or of each channel a row, is without gaps."""
    itemsize = (1, 2, 4)[int(written["kind"])]
    return bool(written["together"] or written["column"] == itemsize)


def resample(
    rows: Rows, source: Struct, written: Struct, method: Method, rect: Rect, part: Rect, color: Color, n: int
) -> Launch | None:
    """The part ``rect`` of planes or pictures to the part ``part`` of the result, and its border."""
    if source["turned"] or method == "nearest" or not _is_dense(written):
        return None
    if method == "area" and (rect[3] < part[3] or rect[2] < part[2]):
        return None
    across, down = (_axis(method, rect[2 + axis], part[2 + axis]) for axis in (0, 1))
    if across.step * down.step == 1:
        across = replace(across, pixel=2, step=2)  # an average of one
    total, most = across.step * down.step, _MOST_ACROSS if method == "area" else _MOST_SKIPPED
    if 255 * total + total // 2 >= 1 << 31 or rect[2] >= most * part[2]:
        return None
    narrow = 255 * down.step < 1 << 16 and across.heaviest < 256
    found = _tiling(across, down, rect[0], narrow, n, method)
    if found is None:
        return None
    tiling, shared = found
    if n * blocks(rect[2], 256) * part[3] < _FEWEST_WARPS:
        return None
    job = job_of(source, written, TILED_JOB)
    place = job["place"]
    set_place(place, rect, part, color, method)
    place["pixel"], place["step"] = (across.pixel, down.pixel), (across.step, down.step)
    bytes_of_yuv = rows != "images" and rows[0] == 1
    fine = method == "area" and narrow and bytes_of_yuv and 255 * 32 * down.step < 1 << 16
    fine = fine and (255 * total + total // 2) * 32 < 1 << 31
    total *= 32 if fine else 1
    # Exact below 2**31: the magic number is too large by less than 1, and 2**(shift + 1) is at least the total.
    shift = (total - 1).bit_length() - 1
    times = -(-(1 << 32 + shift) // total)
    tiling["half"], tiling["magic"], tiling["shift"] = total // 2 * times, times, shift
    size, tall = (int(written["width"]), int(written["height"])), int(tiling["rows"])
    tiling["beside"] = 0 if part[2:] == size else size[1] - part[3] if part[2] == size[0] else size[1]
    tiles = int(tiling["across"]) * blocks(part[3], _WARPS * tall)
    job["tiling"] = tiling
    name = f"{method}_{'fine' if fine else 'narrow' if narrow else 'wide'}"
    return Launch(_resamples[rows], name, (tiles, 1, n), (32, _WARPS, 1), by_value(job), shared)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where each output's interval begins, how many source positions it touches, and the units of `PLACE`."""

    first: Array
    count: Array
    pixel: int
    step: int
    bits: int = 0

    @property
    def heaviest(self) -> int:
        return min(self.pixel, self.step)


def _axis(method: Method, n: int, m: int) -> _Axis:
    if method == "area":
        units = gcd(n, m)
        pixel, step = m // units, n // units
        d = np.arange(m, dtype=np.int64)
        first = d * step // pixel
        return _Axis(first, -(-(d + 1) * step // pixel) - first, pixel, step)
    found = taps("bilinear", n, m)
    index = found.index
    right = np.where(index[:, 0] == index[:, -1], 0, found.weight[:, -1].astype(np.int64))
    unit = gcd(2048, int(np.gcd.reduce(right)))
    return _Axis(index[:, 0], 1 + (right > 0), 2048 // unit, 2048 // unit, unit.bit_length() - 1)


def _tiling(across: _Axis, down: _Axis, x: int, narrow: bool, n: int, method: Method) -> tuple[Struct, int] | None:
    """The cheapest way to divide the work, and the bytes of shared memory that it takes."""
    words = int(((across.count + 1 + 3) // 4 if narrow else across.count).max())
    sums = _WARPS * (3 * 256 * 4 + _BEYOND)  # narrow ones take half of it, and are those of two rows
    found = []
    for columns in _divisions(across, x):
        if sums + _ROW_BYTES + 128 * blocks(columns, 32) * (1 + words) <= _SHARED_BYTES:
            adding = (50 if narrow else 70) + words * (15 if narrow else 12)
            found.append((*_cost(columns, 1 + narrow, n, len(across.first), down, adding, method), columns))
    if not found:
        return None
    _, tall, columns = min(found)
    tiling = np.zeros((), TILING)
    tiling["columns"], tiling["rows"] = columns, tall
    tiling["across"] = blocks(len(across.first), columns)
    tiling["taps"], tiling["bits"] = words, (across.bits, down.bits)
    tiling["pixels"], tiling["begins"] = sums, sums + _ROW_BYTES
    pitch = tiling["pitch"] = 128 * blocks(columns, 32)
    tiling["weights"] = sums + _ROW_BYTES + pitch
    return tiling, sums + _ROW_BYTES + pitch * (1 + words)


def _cost(
    columns: int, together: int, n: int, width: int, down: _Axis, adding: int, method: Method
) -> tuple[float, int]:
    """What a division of the work costs, and for how many rows a warp does so.

    In instructions of a warp, about, times the rounds that the device needs for all blocks: ``adding`` are those that
    make 32 pixels of each of the rows that are made ``together``. The last round is the shorter the fewer blocks a
    multiprocessor has left. Columns of whole lines of memory, and then fewer blocks, are better where all is equal.
    """
    work, places = 60 + 100 * float(down.count.mean()), _PLACES[method]

    def cost(tall: int) -> float:
        tiles = n * blocks(width, columns) * blocks(len(down.first), _WARPS * tall)
        rounds, left = divmod(blocks(tiles, _MULTIPROCESSORS), places)
        time = rounds + (_ALONE + (1 - _ALONE) * left / places if left else 0)
        added = together * blocks(tall, together) * blocks(columns, 32) * adding
        return time * (work * tall + added + _BEGINNING) * (1 + 0.01 * (columns % 32 > 0)) + tiles * 1e-6

    return min((cost(tall), tall) for tall in (1, *range(together, _MOST_TALL[method] + 1, together)))


def _divisions(across: _Axis, x: int) -> Iterator[int]:
    """Output columns for whose source columns a warp has room."""
    m = len(across.first)
    for columns in (*range(1, 8), *range(8, min(m, _MOST_COLUMNS) + 4, 4)):
        begin = np.arange(0, m, columns)
        last = np.minimum(begin + columns, m) - 1
        spans = x + across.first[last] + across.count[last] - ((x + across.first[begin]) & ~7)
        if spans.max() > 256:
            break
        yield columns
