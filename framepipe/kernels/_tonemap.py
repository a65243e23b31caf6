"""HDR planes to SDR RGB: the definition of every device, and its NumPy implementation.

Red, green and blue are the sums of `framepipe.kernels._colour` before their last shift: 32nds of an 8-bit code, from 0
to 8160, whatever the depth (samples beyond black and white are clipped to them). From there each step is a table or one
float32 operation, rounded once and never fused, so that every device gives the same bits:

1. Linear light of the display, in units of SDR's white (203 cd/m2, ITU-R BT.2408-7, 2.2). PQ is a table, the EOTF of
   SMPTE ST 2084 (ITU-R BT.2100-2, table 4). HLG is the inverse OETF of BT.2100-2, table 5, as a table, times
   ``Y ** (gamma - 1)`` of BT.2020's luminance: the OOTF of a display of 1000 cd/m2, whose gamma is 1.2.
2. BT.2020's primaries to BT.709's (ITU-R BT.2087-0); what would be below 0 is clipped to it. The primaries are always
   taken to be BT.2020's: BT.2100 has no others.
3. The curve, of the largest of the three, whose ratio then scales all of them: their proportions, and so the hue, are
   kept, and none gets above white. By luminance, saturated colours would, and clipping them changes their hue.
4. The inverse of the EOTF of SDR displays, a gamma of 2.4 (ITU-R BT.1886 with a black of 0). Not BT.709's OETF, which
   is of light before a camera: what is encoded here is what a display shows.

As light, the result is within 0.6 % of white of these formulas, about half of what a step of 10-bit codes makes there,
and grey is within 1 code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np

from framepipe.frame import FrameSpec
from framepipe.kernels._colour import FRACTION, LUMA_WEIGHTS, Store
from framepipe.kernels._scratch import scratch

Array = np.ndarray[Any, Any]
Curve = Literal["hable", "reinhard"]

TOP = 255 << FRACTION
"""White, in 32nds of a code."""
SDR_WHITE_NITS = 203.0
HLG_PEAK_NITS = 1000.0
PQ_PEAK_NITS = 10000.0
STEPS = 4095
"""Tables of what is between 0 and 1 go by its square root (or the root of that), in so many steps."""
SMALLEST = np.float32(2.0**-100)
"""Stands for a largest component of 0 where that divides."""


@dataclass(frozen=True, slots=True)
class Tone:
    """How HDR becomes SDR: the curve, and the luminance in cd/m2 that it makes white."""

    curve: Curve
    peak_nits: float = HLG_PEAK_NITS

    @staticmethod
    def of(curve: Curve | Literal["none"], peak_nits: float, spec: FrameSpec) -> Tone | None:
        """What to do with pictures of ``spec``: None where they are SDR, or ``curve`` is ``none``."""
        return None if curve == "none" or spec.transfer not in _LIGHT else Tone(curve, peak_nits)


@dataclass(frozen=True, slots=True)
class Steps:
    """The numbers of one way from HDR to SDR, all float32.

    ``light`` maps 32nds of a code to light. The curve's ratio is ``(p1 * m + p0) / ((q2 * m + q1) * m + q0)``, of the
    largest component ``m`` up to ``peak``, with ``ratio`` as (p0, p1, q0, q1, q2).
    """

    hlg: bool
    light: Array
    ratio: Array
    peak: np.float32


@lru_cache(maxsize=16)
def steps(transfer: str, tone: Tone) -> Steps:
    """What ``tone`` means for pictures of ``pq`` or ``hlg``. Raises `ValueError` for others."""
    if transfer not in _LIGHT:
        raise ValueError(f"pictures of transfer {transfer!r} are not tone mapped")
    # HLG never gets above its peak.
    nits = min(tone.peak_nits, HLG_PEAK_NITS) if transfer == "hlg" else tone.peak_nits
    peak = nits / SDR_WHITE_NITS
    ratio = _CURVES[tone.curve](peak)
    return Steps(transfer == "hlg", light(transfer), np.array(ratio, np.float32), np.float32(peak))


def _reinhard(peak: float) -> tuple[float, ...]:
    """``L * (1 + L / peak**2) / (1 + L)``, over L: Reinhard et al., SIGGRAPH 2002, equation 4."""
    return 1.0, 1 / peak**2, 1.0, 1.0, 0.0


def _hable(peak: float) -> tuple[float, ...]:
    """``U(2 * L) / U(2 * peak)``, over L: Hable, "Uncharted 2: HDR Lighting", GDC 2010, with his exposure of 2.

    ``U(x) = (x * (A*x + C*B) + D*E) / (x * (A*x + B) + D*F) - E/F``, which is ``x * (A*(F - E)*x + B*(C*F - E))`` over
    ``F * (x * (A*x + B) + D*F)``: without the difference of numbers that are nearly the same.
    """
    a, b, c, d, e, f = 0.15, 0.50, 0.10, 0.20, 0.02, 0.30
    p0, p1 = b * (c * f - e), a * (f - e)
    q0, q1, q2 = f * d * f, f * b, f * a
    x = 2 * peak
    white = x * (p1 * x + p0) / ((q2 * x + q1) * x + q0)
    return 2 * p0 / white, 4 * p1 / white, q0, 2 * q1, 4 * q2


_CURVES = {"reinhard": _reinhard, "hable": _hable}


def _pq(signal: Array) -> Array:
    """EOTF of SMPTE ST 2084: 0 to 1 to 0 to 10000 cd/m2."""
    m1, m2 = 2610 / 16384, 2523 / 4096 * 128
    c1, c2, c3 = 3424 / 4096, 2413 / 4096 * 32, 2392 / 4096 * 32
    root = signal ** (1 / m2)
    return PQ_PEAK_NITS * (np.maximum(root - c1, 0) / (c2 - c3 * root)) ** (1 / m1) / SDR_WHITE_NITS


def _hlg(signal: Array) -> Array:
    """Inverse OETF of HLG (BT.2100-2, table 5): 0 to 1 to light of the scene from 0 to 1."""
    a = 0.17883277
    b, c = 1 - 4 * a, 0.5 - a * np.log(4 * a)
    return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)


_LIGHT = {"pq": _pq, "hlg": _hlg}


@cache
def light(transfer: str) -> Array:
    """Light by 32nds of a code, float32: for ``pq`` of the display, for ``hlg`` of the scene."""
    return _LIGHT[transfer](np.arange(TOP + 1) / TOP).astype(np.float32)


@cache
def hlg_display() -> Array:
    """What makes the display's light of the scene's, by the fourth root of the scene's luminance, float32."""
    root = np.arange(STEPS + 1) / STEPS
    return (HLG_PEAK_NITS / SDR_WHITE_NITS * root ** (4 * 0.2)).astype(np.float32)


@cache
def sdr_codes() -> Array:
    """Codes by the square root of light, uint8."""
    root = np.arange(STEPS + 1) / STEPS
    return np.floor(255 * root ** (2 / 2.4) + 0.5).astype(np.uint8)


@cache
def to_bt709() -> Array:
    """(3, 3) float64: red, green and blue of BT.2020 in those of BT.709. Rows add up to 1: both have white D65."""
    found = np.linalg.inv(_to_xyz((0.64, 0.33), (0.30, 0.60), (0.15, 0.06)))
    return np.asarray(found @ _to_xyz((0.708, 0.292), (0.170, 0.797), (0.131, 0.046)))


def _to_xyz(*primaries: tuple[float, float]) -> Array:
    """By chromaticities x, y (SMPTE RP 177), for the white D65."""
    x, y = np.array([*primaries, (0.3127, 0.3290)]).T
    xyz = np.stack([x / y, np.ones(4), (1 - x - y) / y])
    return xyz[:, :3] * np.linalg.solve(xyz[:, :3], xyz[:, 3])


@cache
def differences() -> Array:
    """(3, 2) float32: how much of the two others' lead on a component is added to it; grey so stays grey."""
    matrix = to_bt709()
    return np.stack([matrix[c, [k for k in range(3) if k != c]] for c in range(3)]).astype(np.float32)


@cache
def luminance() -> tuple[np.float32, np.float32, np.float32]:
    """Of red, green and blue, by BT.2020."""
    red, blue = LUMA_WEIGHTS["bt2020"]
    return np.float32(red), np.float32(1 - red - blue), np.float32(blue)


def toning(spec: FrameSpec, tone: Tone) -> Store:
    """What `framepipe.kernels._colour.exact_rgb` is to store with, for pictures of ``spec``."""
    found = steps(spec.transfer, tone)

    def store(value: Array, out: Array, channel: int) -> None:
        index = scratch("toning", (3, *value.shape), np.intp)
        np.subtract(value, 1 << (FRACTION - 1), out=index[channel])  # without what rounds
        if channel == 2:
            _tone(index, found, out)

    return store


def _tone(index: Array, found: Steps, out: Array) -> None:
    """Red, green and blue of a strip, (3, n, width), to codes in ``out``, (n, width, 3). ``index`` is used up."""
    shape = index.shape[1:]
    rgb, wide = (scratch(name, index.shape, np.float32) for name in ("toned", "bt2020"))
    largest, ratio, part = (scratch(name, shape, np.float32) for name in ("largest", "ratio", "below"))
    np.take(found.light, index, out=wide, mode="clip")
    _primaries(wide, rgb, part)
    np.max(rgb, axis=0, out=largest)
    if found.hlg:
        display = scratch("display", shape, np.float32)
        _hlg_display(wide, index[0], part, display)
        np.multiply(largest, display, out=largest)
        _ratio(found, largest, ratio, part)
        np.multiply(ratio, display, out=ratio)
    else:
        _ratio(found, largest, ratio, part)
    np.multiply(rgb, ratio, out=rgb)
    np.sqrt(rgb, out=rgb)
    codes = scratch("codes", shape, np.uint8)
    for channel in range(3):
        np.take(sdr_codes(), _step(rgb[channel], index[0]), out=codes, mode="clip")
        np.copyto(out[..., channel], codes)


def _primaries(wide: Array, out: Array, part: Array) -> None:
    """Light in BT.2020's primaries to what of it BT.709's can show, (3, n, width) each."""
    for channel, share in enumerate(differences()):
        first, second = (wide[other] for other in range(3) if other != channel)
        np.subtract(first, wide[channel], out=part)
        np.multiply(part, share[0], out=part)
        np.add(wide[channel], part, out=out[channel])
        np.subtract(second, wide[channel], out=part)
        np.multiply(part, share[1], out=part)
        np.add(out[channel], part, out=out[channel])
    np.maximum(out, np.float32(0), out=out)


def _step(root: Array, index: Array) -> Array:
    """Where a root from 0 to 1 (or hardly above) stands in a table; it is used up."""
    np.multiply(root, np.float32(STEPS), out=root)
    np.add(root, np.float32(0.5), out=root)
    np.copyto(index, root, casting="unsafe")
    return index


def _hlg_display(rgb: Array, index: Array, part: Array, out: Array) -> None:
    """`hlg_display` for a strip."""
    red, green, blue = luminance()
    np.multiply(rgb[0], red, out=out)
    np.multiply(rgb[1], green, out=part)
    np.add(out, part, out=out)
    np.multiply(rgb[2], blue, out=part)
    np.add(out, part, out=out)
    np.sqrt(out, out=out)
    np.sqrt(out, out=out)
    np.take(hlg_display(), _step(out, index), out=out, mode="clip")


def _ratio(found: Steps, largest: Array, out: Array, below: Array) -> None:
    """By how much the curve changes light whose largest component is given; ``largest`` is used up."""
    p0, p1, q0, q1, q2 = found.ratio
    m = below
    np.minimum(largest, found.peak, out=m)
    np.maximum(largest, SMALLEST, out=largest)
    np.divide(m, largest, out=largest)  # 1 up to the peak; beyond, what takes the largest component down to it
    np.multiply(m, p1, out=out)
    np.add(out, p0, out=out)
    np.multiply(out, largest, out=out)
    np.multiply(m, q2, out=largest)
    np.add(largest, q1, out=largest)
    np.multiply(largest, m, out=largest)
    np.add(largest, q0, out=largest)
    np.divide(out, largest, out=out)
