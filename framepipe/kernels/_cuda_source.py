"""What the picture kernels read and write, as the structs that they take: planes, pictures and tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from framepipe.frame import FrameSpec, Planes
from framepipe.kernels._colour import FRACTION, coefficients

Struct = np.ndarray[Any, Any]
"""A structured array of no dimensions: a kernel's argument by value."""

SOURCE = np.dtype(
    [
        ("picture", "i8"),
        ("origin", "i4", 3),
        ("luma", "i4"),
        ("across", "i4"),
        ("down", "i4"),
        ("luma_pitch", "i4"),
        ("chroma_pitch", "i4"),
        ("chroma_step", "i4"),
        ("take", "u4", 2),
        ("turn", "i4", 6),
        ("width", "i4"),
        ("height", "i4"),
        ("turned", "i4"),
        ("w_shift", "i4"),
        ("h_shift", "i4"),
        ("chroma_width", "i4"),
        ("chroma_height", "i4"),
        ("wide", "i4"),
        ("shift", "i4"),
        ("mask", "u4"),
        ("y", "u4"),
        ("rv", "u4"),
        ("gu", "u4"),
        ("gv", "u4"),
        ("bu", "u4"),
        ("offsets", "i4", 3),
        ("factors", "u4", (5, 2)),
    ],
    align=True,
)
"""Pictures as they lie in memory, all in bytes; ``picture`` is how far they are apart.

``origin`` is where each component stands for the first pixel of the upright picture, from which ``across`` and ``down``
lead to the next; for chroma, whose planes may be smaller, it is the plane's first sample. ``luma`` is that of the luma
plane. ``take`` is which of 8 bytes are U's and which V's: a word of each, or samples by turns. ``turn`` takes (x, y) of
the upright picture to x (the first three) and y of the lying one, whose size is given; ``turned`` is 0 where they are
the same. Terms are kept above ``shift - 5`` bits (``mask``); ``offsets`` of the sums are moved up by as much.
``factors`` are what luma, V, U, V and U are multiplied by for red, green (where chroma's are negative) and blue, in the
lower and in the upper half of a word; only of samples of a byte.
"""

TARGET = np.dtype(
    [
        ("picture", "i8"),
        ("row", "i8"),
        ("channel", "i8"),
        ("column", "i4"),
        ("width", "i4"),
        ("height", "i4"),
        ("kind", "i4"),
        ("swap", "i4"),
        ("together", "i4"),
        ("factor", "f4", 3),
        ("offset", "f4", 3),
    ],
    align=True,
)
"""Bytes between pictures, rows, channels and columns; what is stored (``KINDS``), and whether as blue, green, red.

``together`` is 1 where the three channels of a pixel, and the pixels of a row, follow each other without a gap.
"""

KINDS = {"uint8": 0, "float16": 1, "float32": 2}


def slab_of(planes: Planes) -> Any:
    """The slab of planes on the device. Raises `ValueError` where there is none or it is too small."""
    slab, spec = planes.slab, planes.spec
    if slab is None:
        raise ValueError("these planes are the decoder's own frames in host memory; a GPU reads planes from a slab")
    if slab.ndim != 2 or slab.shape[0] < planes.n or slab.shape[1] < spec.nbytes or slab.strides[1] != 1:
        raise ValueError(f"a slab of shape {slab.shape} does not hold {planes.n} pictures of {spec.nbytes} bytes")
    return slab


@lru_cache(maxsize=256)
def planes_source(spec: FrameSpec, picture: int, smooth: bool = False) -> tuple[Struct, str]:
    """How to read pictures of ``spec`` that are ``picture`` bytes apart, and the name of the reader."""
    fmt = spec.format
    letters = {"yuv": "YUV", "rgb": "RGB", "gray": "YYY"}[fmt.model]
    layout, turn = spec.planes[fmt.components[letters[0]][0]], _turn(spec)
    step = layout.channels * fmt.itemsize
    source = _new_source(picture, spec.nbytes)
    source["turn"], source["turned"] = turn, spec.mirrored or spec.rotation != 0
    source["width"], source["height"] = spec.width, spec.height
    source["across"], source["down"] = (turn[i] * step + turn[3 + i] * layout.pitch for i in range(2))
    source["luma"], source["luma_pitch"] = _byte_of(spec, letters[0]), layout.pitch
    source["origin"] = [_byte_of(spec, letter) for letter in letters]
    start = turn[2] * step + turn[5] * layout.pitch
    source["origin"] += [start, 0, 0] if fmt.model == "yuv" else start
    source["wide"] = fmt.itemsize == 2
    _colour(source, spec)
    if fmt.model != "yuv":
        return source, "codes" if _are_codes(source, spec) else "separate"
    chroma, layout = fmt.planes[fmt.components["U"][0]], spec.planes[fmt.components["U"][0]]
    source["w_shift"], source["h_shift"] = chroma.w_shift, chroma.h_shift
    source["chroma_width"], source["chroma_height"] = layout.width, layout.height
    source["chroma_pitch"], source["chroma_step"] = layout.pitch, layout.channels * fmt.itemsize
    if layout.channels == 1:
        source["take"] = (0x3210, 0x7654)
    else:
        take = (0x6420, 0x7531) if fmt.itemsize == 1 else (0x5410, 0x7632)
        source["take"] = take if source["origin"][1] < source["origin"][2] else take[::-1]
    return source, f"{'smooth' if smooth and (chroma.w_shift or chroma.h_shift) else 'yuv'}_{8 * fmt.itemsize}"


def _new_source(picture: int, nbytes: int) -> Struct:
    if nbytes >= 1 << 31:
        raise ValueError(f"a picture of {nbytes} bytes is too large: the kernels take less than 2 GiB")
    source = np.zeros((), SOURCE)
    source["picture"] = picture
    return source


def _byte_of(spec: FrameSpec, letter: str) -> int:
    """The byte of a picture at which the first sample of a component stands."""
    at, channel = spec.format.components[letter]
    return spec.planes[at].offset + channel * spec.format.itemsize


def _turn(spec: FrameSpec) -> tuple[int, int, int, int, int, int]:
    """x and y of the lying picture in those of the upright one."""
    right, bottom = spec.width - 1, spec.height - 1
    x, y = {
        0: ((1, 0, 0), (0, 1, 0)),
        90: ((0, -1, right), (1, 0, 0)),
        180: ((-1, 0, right), (0, -1, bottom)),
        270: ((0, 1, 0), (-1, 0, bottom)),
    }[spec.rotation]
    return (-x[0], -x[1], right - x[2], *y) if spec.mirrored else (*x, *y)


def _colour(source: Struct, spec: FrameSpec) -> None:
    k, down = coefficients(spec), spec.format.bits + spec.format.shift
    source["shift"] = down + FRACTION
    source["mask"] = (0xFFFFFFFF << down) & 0xFFFFFFFF
    for name in ("y", "rv", "gu", "gv", "bu"):
        source[name] = getattr(k, name)
    green, blue = (k.g0, k.b0) if spec.format.model == "yuv" else (k.r0, k.r0)
    source["offsets"] = [value << down for value in (k.r0, green, blue)]
    if spec.format.itemsize == 1 and spec.format.model == "yuv":
        terms = (k.y, k.rv, -k.gu & 0xFFFF, -k.gv & 0xFFFF, k.bu)
        source["factors"] = [(term, term << 16) for term in terms]


def _are_codes(source: Struct, spec: FrameSpec) -> bool:
    """Whether every sample comes out as it is."""
    if spec.format.itemsize == 2:
        return False
    samples = np.arange(256)
    codes = (samples * int(source["y"]) + int(source["offsets"][0])) >> int(source["shift"])
    return bool((np.clip(codes, 0, 255) == samples).all())


@lru_cache(maxsize=256)
def image_source(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Struct, str]:
    """How to read (N, H, W, 3) uint8 pictures, and the name of the reader."""
    source = _new_source(
        strides[0], sum(abs(stride) * side for stride, side in zip(strides[1:], shape[1:], strict=True))
    )
    source["origin"] = [channel * strides[3] for channel in range(3)]
    source["down"], source["across"] = strides[1:3]
    source["height"], source["width"] = shape[1:3]
    return source, "codes"


@lru_cache(maxsize=256)
def target(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    layout: str = "nhwc",
    order: str = "rgb",
    factor: bytes | None = None,
    offset: bytes | None = None,
) -> Struct:
    """How to write (N, 3, H, W) or (N, H, W, 3); without ``factor`` and ``offset`` the codes as they are.

    These are three float32 each, as bytes: a negative zero is not the same as the other. Raises `TypeError` for a
    dtype that cannot hold them.
    """
    if dtype not in KINDS or (dtype == "uint8" and factor is not None):
        raise TypeError(f"{'codes' if factor is None else 'float32 numbers'} cannot be written to {dtype}")
    y, x, c = (2, 3, 1) if layout == "nchw" else (1, 2, 3)
    out = np.zeros((), TARGET)
    out["picture"], out["row"], out["column"], out["channel"] = strides[0], strides[y], strides[x], strides[c]
    out["height"], out["width"] = shape[y], shape[x]
    out["kind"], out["swap"] = KINDS[dtype], order == "bgr"
    itemsize = np.dtype(dtype).itemsize
    out["together"] = strides[c] == itemsize and strides[x] == 3 * itemsize
    out["factor"] = 1.0 if factor is None else np.frombuffer(factor, np.float32)
    out["offset"] = 0.0 if offset is None else np.frombuffer(offset, np.float32)
    return out
