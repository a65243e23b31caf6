"""What differs from a learnt background: the `motion` stage's kernel, in NumPy.

All arithmetic is on integers, so that any device can give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CELL = 4
"""Side of a mask cell, in pixels of the shrunk picture."""
COUNTS = 513
"""Words that the scratch has beside one a pixel: a bin for every ratio, and the changed pixels."""

_STRIP = 64  # rows of the result
_DARKEST = 8 << 8  # below 8 codes a ratio says little
_BINS = 512
_NEAR = 16  # of 256: a change of light moves most of a picture by nearly the same ratio
_NOISE = 3  # of 256: a smaller change of light is left to the running mean


def difference(
    channels: Sequence[np.ndarray],
    state: np.ndarray,
    mask: np.ndarray,
    scratch: None,
    *,
    shrink: int,
    extra_bits: int,
    threshold: int,
    limit: int,
    slow: int,
    hold: int,
    first: bool = False,
) -> None:
    """Compare one picture with what ``state`` knows of the background, write ``mask``, and learn from the picture.

    ``channels`` are the luma plane or the R, G and B planes, (H, W) each, uint8 or uint16 with codes ``extra_bits``
    bits above codes of 8 bits. ``state`` is (4, H // shrink, W // shrink) uint16, written in place: the background
    ``B``, the one before it ``P``, a candidate for the next ``C`` (luma in 1/256 of an 8-bit code) and the candidate's
    ``age`` in pictures. ``mask`` is uint8, its sides those of the state over `CELL`, rounded up. ``shrink`` is a power
    of two, at most 16. Rows and columns of the picture that fill no block are left out. ``scratch`` is what
    `difference_scratch` gave for this size (None here).

    The definition, all in integers; ``>>`` and ``//`` round down; ``T`` is ``threshold`` in 1/256 codes, below 2**15:

    1. Luma. ``S`` = sum of a block of shrink × shrink samples; ``F = (S << 8) >> (2 log2(shrink) + extra_bits)``; of
       RGB ``F = (77 F_R + 150 F_G + 29 F_B) >> 8`` (BT.601's weights). If ``first``: B = P = C = F, age = 0, mask = 0.
    2. Light. Over the n pixels of every fourth row and column from the third on: ``R = min(256 F // max(B, 2048),
       511)``; ``g`` is the least value such that more than n // 2 of all ``R`` are at most ``g``. If ``|g - 256| >= 3``
       and more than n // 2 of all ``R`` are within 16 of ``g``, the light changed: each X of B, P, C becomes
       ``min(X g >> 8, 65535)``.
    3. Change. Where ``|F - B| > T`` and ``|F - P| <= T``, B and P are exchanged; where ``|F - B| > T`` and
       ``|F - P| > T`` the pixel has *changed*. More than ``limit`` such pixels are a cut: the same as ``first``.
       A changed pixel *stands out* where F is also more than T outside the range of B in its 3 × 3 neighbourhood (as
       far as that is in the picture): what shakes or flutters changes, but does not stand out.
    4. Mask. In each cell the number of changed pixels plus 16 times the number of those that stand out, 16 of either
       counted as 15.
    5. Background. Pixels that stand out keep theirs; of the other changed ones ``B += (F/2 - B/2) >> (slow + 1)``, of
       all others ``B += (F/2 - B/2) >> (slow - 1)`` and age = 0, where ``F/2 - B/2`` is ``(F >> 1) - (B >> 1)``.
    6. Candidate, of changed pixels. If age > 0 and ``|F - C| <= T``, age += 1 (to 65535), else C = F and age = 1. If
       then age >= ``hold``: P = B, B = F, age = 0.
    """
    picture = _luma(channels, shrink, extra_bits)
    if not first:
        _relight(picture, state)
        changed = _changed(picture, state, threshold)
        first = bool(np.count_nonzero(changed) > limit)
    if first:
        state[:3] = picture
        state[3] = 0
        mask[...] = 0
        return
    outside = changed & (_outside(picture, state[0]) > threshold)
    _count(changed, outside, mask)
    _follow(picture, state[0], changed, outside, slow)
    _settle(picture, state, changed, threshold, hold)


def difference_scratch(height: int, width: int) -> None:
    """Working memory for `difference` with a state of ``(4, height, width)``: none is needed on the CPU."""


def _luma(channels: Sequence[np.ndarray], shrink: int, extra_bits: int) -> np.ndarray:
    """(H // shrink, W // shrink) uint16."""
    parts = [_shrink(channel, shrink, extra_bits) for channel in channels]
    if len(parts) == 1:
        return parts[0].astype(np.uint16, copy=False)
    red, green, blue = (part.astype(np.uint32, copy=False) for part in parts)
    return ((77 * red + 150 * green + 29 * blue) >> 8).astype(np.uint16)


def _shrink(plane: np.ndarray, side: int, extra_bits: int) -> np.ndarray:
    down = 2 * (side.bit_length() - 1) + extra_bits - 8
    # 16 x 16 samples of 8 bits still fit into uint16, which is twice as fast.
    sums = _blocks(plane, side, np.uint16 if plane.itemsize == 1 else np.uint32)
    return sums << -down if down < 0 else sums >> down


def _blocks(array: np.ndarray, side: int, dtype: type) -> np.ndarray:
    """Sums over blocks of side × side."""
    height, width = array.shape[0] // side, array.shape[1] // side
    array = array[: height * side, : width * side]
    sums = np.empty((height, width), dtype)
    for top in range(0, height, _STRIP):  # what a strip needs stays in the processor's cache
        strip = array[top * side : (top + _STRIP) * side]
        rows: np.ndarray = strip[0::side].astype(dtype)
        for i in range(1, side):
            rows += strip[i::side]
        out = sums[top : top + _STRIP]
        out[...] = rows[:, 0::side]
        for i in range(1, side):
            out += rows[:, i::side]
    return sums


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``|a - b|`` of unsigned numbers."""
    apart: np.ndarray = np.maximum(a, b) - np.minimum(a, b)
    return apart


def _relight(picture: np.ndarray, state: np.ndarray) -> None:
    some = picture[2::4, 2::4].astype(np.uint32)
    ratios = np.minimum((some << 8) // np.maximum(state[0, 2::4, 2::4], _DARKEST), _BINS - 1)
    found = np.bincount(ratios.ravel(), minlength=_BINS)
    gain = int(np.searchsorted(found.cumsum(), ratios.size // 2, side="right"))
    near = found[max(0, gain - _NEAR) : gain + _NEAR + 1].sum()
    if abs(gain - 256) >= _NOISE and near > ratios.size // 2:
        state[:3] = np.minimum((state[:3].astype(np.uint32) * gain) >> 8, 65535)


def _changed(picture: np.ndarray, state: np.ndarray, threshold: int) -> np.ndarray:
    changed: np.ndarray = _apart(picture, state[0]) > threshold
    at = np.flatnonzero(changed)  # few, as a rule
    background, former = state[0].reshape(-1), state[1].reshape(-1)
    known = at[_apart(picture.reshape(-1)[at], former[at]) <= threshold]
    background[known], former[known] = former[known], background[known]
    changed.reshape(-1)[known] = False
    return changed


def _outside(picture: np.ndarray, background: np.ndarray) -> np.ndarray:
    """How far each pixel is outside the range of the background in its 3 × 3 neighbourhood."""
    low, high = _extreme(background, np.minimum), _extreme(background, np.maximum)
    out: np.ndarray = np.maximum(np.maximum(picture, high) - high, low - np.minimum(picture, low))
    return out


def _extreme(array: np.ndarray, most: np.ufunc) -> np.ndarray:
    rows = array.copy()
    most(rows[1:], array[:-1], out=rows[1:])
    most(rows[:-1], array[1:], out=rows[:-1])
    out = rows.copy()
    most(out[:, 1:], rows[:, :-1], out=out[:, 1:])
    most(out[:, :-1], rows[:, 1:], out=out[:, :-1])
    return out


def _count(changed: np.ndarray, outside: np.ndarray, mask: np.ndarray) -> None:
    both = np.zeros((mask.shape[0] * CELL, mask.shape[1] * CELL), np.uint16)
    inside = both[: changed.shape[0], : changed.shape[1]]
    np.multiply(outside, np.uint16(256), out=inside)
    inside += changed
    sums = _blocks(both, CELL, np.uint16)
    mask[...] = np.minimum(sums & 255, 15) | (np.minimum(sums >> 8, 15) << 4)


def _follow(picture: np.ndarray, background: np.ndarray, changed: np.ndarray, outside: np.ndarray, slow: int) -> None:
    towards = ((picture >> 1) - (background >> 1)).view(np.int16)  # halves, so that a sign fits into 16 bits
    towards >>= slow - 1
    towards *= ~outside
    at = np.flatnonzero(changed)
    towards.reshape(-1)[at] >>= 2
    background += towards.view(np.uint16)


def _settle(picture: np.ndarray, state: np.ndarray, changed: np.ndarray, threshold: int, hold: int) -> None:
    background, former, candidate, age = state.reshape(4, -1)
    at = np.flatnonzero(changed)
    now, before, years = picture.reshape(-1)[at], candidate[at], age[at]
    same = (years > 0) & (_apart(now, before) <= threshold)
    years = np.where(same, np.minimum(years, 65534) + 1, 1)
    candidate[at] = np.where(same, before, now)
    settled = years >= hold
    years[settled] = 0
    age[...] = 0
    age[at] = years
    moved = at[settled]
    former[moved] = background[moved]
    background[moved] = now[settled]
