"""Planes to RGB, exactly: the integer definition of every device, and its NumPy implementation.

The definition, for samples ``s`` as they lie in memory, ``bits`` and ``shift`` of the format and the whole numbers
of `Coefficients`; ``term(k, s) = (k * s) >> (bits + shift)`` in unsigned 32-bit arithmetic::

    R = clip((term(y, Y) + term(rv, V) + r0) >> 5, 0, 255)
    G = clip((term(y, Y) - term(gu, U) - term(gv, V) + g0) >> 5, 0, 255)
    B = clip((term(y, Y) + term(bu, U) + b0) >> 5, 0, 255)

Terms are 32nds of an 8-bit code and fit 16 bits; ``>>`` rounds towards minus infinity. Grey is ``term(y, Y) + r0``
in all three channels, and RGB of more than 8 bits the same for each of its own; 8-bit RGB is copied. The luma
sample at (x, y) goes with the chroma sample at (x >> w_shift, y >> h_shift). The result is within 1 code of the
standards' formulas (ITU-R BT.601-7, BT.709-6, BT.2020-2, SMPTE ST 240, FCC 73.682): it differs from the rounded
formula only where that is within 0.08 of a half.

``chroma="bilinear"`` interpolates the three sums beside ``term(y, Y)`` (offsets included) between chroma samples
that stand on the left luma column and half-way between luma rows, the usual place in 4:2:0; edges repeat. With
``u = x & (2**w_shift - 1)``, ``q = 2*y + 1 - 2**h_shift`` and ``v = q & (2**(h_shift+1) - 1)`` that is
``(sum of weight * sum + half) >> (w_shift + h_shift + 1)`` with the weights ``u`` and ``v`` to the right and below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from framepipe.frame import FrameSpec
from framepipe.kernels._scratch import scratch

Array = np.ndarray[Any, Any]
Store = Callable[[Array, Array, int], None]
"""Takes a channel of a strip before the last shift of the definition, (n, width) int16 that may be overwritten, the
strip of the picture, (n, width, 3) uint8, and the channel's number: 0, 1 and 2 by turns."""

FRACTION = 5
"""Bits below one 8-bit code in every term."""

# Kr, Kb of each matrix: ITU-T H.273, table 4.
LUMA_WEIGHTS = {
    "bt601": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020": (0.2627, 0.0593),
    "smpte240m": (0.212, 0.087),
    "fcc": (0.30, 0.11),
}

# A strip's scratch (about 20 bytes a pixel) stays in a second-level cache of 1 MiB and more.
_STRIP_PIXELS = 1 << 16


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The whole numbers of the definition above for one kind of picture."""

    bits: int
    y: int
    rv: int = 0
    gu: int = 0
    gv: int = 0
    bu: int = 0
    r0: int = 0
    g0: int = 0
    b0: int = 0


def coefficients(spec: FrameSpec) -> Coefficients:
    """The numbers for pictures of ``spec``; 0 for chroma where there is none."""
    full_range = spec.full_range or spec.format.model == "rgb"
    return _coefficients(spec.format.model, spec.format.bits, spec.matrix, full_range)


@lru_cache(maxsize=64)
def _coefficients(model: str, bits: int, matrix: str, full_range: bool) -> Coefficients:
    one = 1 << FRACTION
    step = 1 << (bits - 8)
    luma = 255 / ((1 << bits) - 1 if full_range else 219 * step)  # 8-bit codes a step of the sample
    black = 0 if full_range else 16 * step

    def whole(value: float) -> int:
        return round(value * (one << bits))

    if model != "yuv":
        # + one/2 rounds the final shift; + 1/2 makes up for the flooring of the one term.
        return Coefficients(bits, whole(luma), r0=_nearest(one * (0.5 - luma * black) + 0.5))
    kr, kb = LUMA_WEIGHTS[matrix]
    kg = 1 - kr - kb
    chroma = 255 / ((1 << bits) - 1 if full_range else 224 * step)
    rv, bu = 2 * (1 - kr) * chroma, 2 * (1 - kb) * chroma
    gu, gv = bu * kb / kg, rv * kr / kg
    middle = 128 * step
    base = one * (0.5 - luma * black)
    return Coefficients(
        bits,
        whole(luma),
        whole(rv),
        whole(gu),
        whole(gv),
        whole(bu),
        _nearest(base - one * rv * middle + 1.0),
        _nearest(base + one * (gu + gv) * middle - 0.5),
        _nearest(base - one * bu * middle + 1.0),
    )


def _nearest(value: float) -> int:
    return int(np.floor(value + 0.5))


def exact_rgb(
    planes: Sequence[Array], spec: FrameSpec, out: Array, *, chroma: str = "nearest", store: Store | None = None
) -> None:
    """Write one picture's upright RGB to ``out``, (height, width, 3) uint8 with any strides.

    ``planes`` are as `Planes.picture` gives them. Works in strips in the calling thread; no memory of its own
    after the first picture of a size. ``store`` may make something else of the three channels than their codes.
    """
    lying = spec.to_lying(out)
    if spec.format.model == "yuv":
        _yuv(planes, spec, lying, chroma, store or _store)
    elif spec.pix_fmt == "rgb24" and store is None:
        np.copyto(lying, planes[0])
    else:
        letters = "RGB" if spec.format.model == "rgb" else "YYY"
        _separate([component(planes, spec, letter) for letter in letters], spec, lying, store)


def component(planes: Sequence[Array], spec: FrameSpec, letter: str) -> Array:
    """The samples of one component, (height, width), still moved up by the format's ``shift``."""
    at, channel = spec.format.components[letter]
    plane = planes[at]
    return plane[..., channel] if plane.ndim == 3 else plane


def _strips(spec: FrameSpec) -> tuple[int, range]:
    """Rows of a strip, whole chroma rows (of 4 luma rows at most), and where strips begin."""
    rows = max(4, (_STRIP_PIXELS // spec.width) & ~3)
    rows = min(rows, -(-spec.height // 4) * 4)
    return rows, range(0, spec.height, rows)


def _separate(channels: Sequence[Array], spec: FrameSpec, out: Array, store: Store | None) -> None:
    """Red, green and blue (or grey thrice), each on its own."""
    k = coefficients(spec)
    identity = _coefficients("rgb", 8, "rgb", True)
    rows, starts = _strips(spec)
    values = scratch("luma", (rows, spec.width), np.int16)
    for top in starts:
        for c, samples in enumerate(channels):
            part = samples[top : top + rows]
            into = out[top : top + rows]
            if k == identity and store is None:
                np.copyto(into[..., c], part)
                continue
            value = values[: len(part)]
            _term(k.y, part, spec, value)
            np.add(value, np.int16(k.r0), out=value)
            (store or _store)(value, into, c)


def _store(value: Array, out: Array, channel: int) -> None:
    """32nds of a code to 8-bit codes; ``value`` is used up."""
    np.right_shift(value, FRACTION, out=value)
    np.clip(value, 0, 255, out=value)
    np.copyto(out[..., channel], value, casting="unsafe")


def _term(k: int, samples: Array, spec: FrameSpec, out: Array) -> None:
    """``term(k, samples)`` to the int16 ``out``."""
    unsigned = out.view(np.uint16)
    if spec.format.bits == 8:
        # (k * s) >> 8 in 16-bit lanes, twice as many at a time: k = 256 * high + low.
        part = scratch("part", out.shape, np.uint16)
        np.copyto(part, samples)
        np.multiply(part, np.uint16(k >> 8), out=unsigned)
        np.multiply(part, np.uint16(k & 255), out=part)
        np.right_shift(part, 8, out=part)
        np.add(unsigned, part, out=unsigned)
        return
    wide = scratch("wide", out.shape, np.uint32)
    _term32(k, samples, spec, wide)
    np.copyto(unsigned, wide, casting="unsafe")


def _term32(k: int, samples: Array, spec: FrameSpec, out: Array) -> None:
    np.copyto(out, samples)
    np.multiply(out, np.uint32(k), out=out)
    np.right_shift(out, spec.format.bits + spec.format.shift, out=out)


def _yuv(planes: Sequence[Array], spec: FrameSpec, out: Array, chroma: str, store: Store) -> None:
    y, u, v = (component(planes, spec, letter) for letter in "YUV")
    k = coefficients(spec)
    at = spec.format.planes[spec.format.components["U"][0]]
    rows, starts = _strips(spec)
    luma = scratch("luma", (rows, spec.width), np.int16)
    sums = scratch("sums", (rows, spec.width), np.int16)
    smooth = chroma == "bilinear" and (at.w_shift or at.h_shift)
    tall = 1 if smooth else 1 << at.h_shift
    for top in starts:
        part = y[top : top + rows]
        n = len(part)
        lines = -(-n // tall)  # an odd height keeps its last chroma row, for one row of luma
        _term(k.y, part, spec, luma[:n])
        if smooth:
            terms = _smooth(u, v, spec, k, range(top, top + n))
        else:
            first = top // tall
            terms = _repeat(_chroma(u, v, slice(first, first + lines), spec, k), at.w_shift)
            _offset(terms, k)
        covered = lines * tall  # rows beyond n are computed and not stored
        above = luma[:covered].reshape(lines, tall, spec.width)
        below = sums[:covered].reshape(lines, tall, spec.width)
        for c in range(3):
            np.add(above, terms[c][:, None, : spec.width], out=below)
            store(sums[:n], out[top : top + n], c)


def _chroma(u: Array, v: Array, lines: slice, spec: FrameSpec, k: Coefficients) -> Array:
    """What chroma rows add to red, take from green and add to blue, without offsets: (3, lines, width) uint32."""
    u, v = u[lines], v[lines]
    sums = scratch("chroma", (3, *u.shape), np.uint32)
    other = scratch("other", u.shape, np.uint32)
    _term32(k.rv, v, spec, sums[0])
    _term32(k.gu, u, spec, sums[1])
    _term32(k.gv, v, spec, other)
    _term32(k.bu, u, spec, sums[2])
    np.add(sums[1], other, out=sums[1])
    return sums


def _repeat(sums: Array, w_shift: int) -> Array:
    """int16 of ``sums``, each repeated ``2 ** w_shift`` times along its row."""
    if w_shift == 1:
        # Both halves of each 32-bit lane become the value: no strided copy.
        np.multiply(sums, np.uint32(0x10001), out=sums)
        return sums.view(np.int16)
    narrow = scratch("narrow", sums.shape, np.int16)
    np.copyto(narrow, sums, casting="unsafe")
    return np.repeat(narrow, 1 << w_shift, axis=-1) if w_shift else narrow


def _offset(sums: Array, k: Coefficients) -> None:
    """Signs and offsets of the definition, in place: int16 or int32."""
    kind = sums.dtype.type
    np.add(sums[0], kind(k.r0), out=sums[0])
    np.subtract(kind(k.g0), sums[1], out=sums[1])
    np.add(sums[2], kind(k.b0), out=sums[2])


def _smooth(u: Array, v: Array, spec: FrameSpec, k: Coefficients, rows: range) -> Array:
    """The sums for luma ``rows``, interpolated: (3, rows, width) int16."""
    at = spec.format.planes[spec.format.components["U"][0]]
    x = np.arange(spec.width)
    left = x >> at.w_shift
    right = np.minimum(left + 1, u.shape[1] - 1)
    across = (x & ((1 << at.w_shift) - 1)).astype(np.int32)
    q = 2 * np.arange(rows.start, rows.stop) + 1 - (1 << at.h_shift)
    above = q >> (at.h_shift + 1)
    down = (q & ((2 << at.h_shift) - 1)).astype(np.int32)[:, None]
    upper = np.clip(above, 0, u.shape[0] - 1)
    lower = np.clip(above + 1, 0, u.shape[0] - 1)
    first = int(upper[0])
    sums = _chroma(u, v, slice(first, int(lower[-1]) + 1), spec, k)
    low = sums.astype(np.int32)
    _offset(low, k)
    mixed = low[:, upper - first] * ((2 << at.h_shift) - down) + low[:, lower - first] * down
    full: Array = mixed[..., left] * ((1 << at.w_shift) - across) + mixed[..., right] * across
    shift = at.w_shift + at.h_shift + 1
    rounded: Array = (full + (1 << (shift - 1))) >> shift
    return rounded.astype(np.int16)
