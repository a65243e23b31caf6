"""Connected regions of a small grid of counts, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from framepipe.kernels._difference import CELL

_CELL_PIXELS = CELL * CELL
_FULL = _CELL_PIXELS - 1  # how the count of a cell is stored where all of its pixels changed
_BESIDE = 2  # cells


@dataclass(frozen=True, slots=True)
class Blob:
    """One region: ``box`` is ``x1, y1, x2, y2`` in cells, ``area`` how many of its pixels stand out, and ``fill`` the
    share of the box that changed."""

    box: tuple[float, float, float, float]
    area: int
    fill: float


def find_blobs(mask: np.ndarray, reach: int = 0, least: int = 4) -> list[Blob]:
    """Regions of cells where at least ``least`` pixels stand out, joined where ``2 * reach`` cells or fewer part them.

    ``mask`` is (rows, columns) uint8 as `framepipe.kernels._difference` defines it. A region takes in what merely
    changed beside it, so that an object is whole where it looks like its background. A box ends inside its outermost
    cells: their counts, against those of their neighbours, tell how far the object reaches into them.
    """
    changed, outside = mask & 15, mask >> 4
    seeds = outside >= least
    if not seeds.any():
        return []
    active, open_to = seeds, seeds | (changed >= least)
    for _ in range(_BESIDE):
        active = _grow(active, 1) & open_to
    return [_measure(changed, outside, active, runs) for runs in _regions(_grow(active, reach))]


def _measure(changed: np.ndarray, outside: np.ndarray, active: np.ndarray, runs: list[tuple[int, int, int]]) -> Blob:
    # One cell more on each side: the few pixels there are the fringe of this region, unless they are another's.
    y1, y2 = max(runs[0][0] - 1, 0), runs[-1][0] + 2
    x1, x2 = max(min(run[1] for run in runs) - 1, 0), max(run[2] for run in runs) + 1
    near = changed[y1:y2, x1:x2].astype(np.int32)
    cells = np.zeros(near.shape, bool)
    for row, begin, end in runs:
        cells[row - y1, begin - x1 : end - x1] = True
    near[~(cells | (_grow(cells, 1) & ~active[y1:y2, x1:x2]))] = 0
    left, right = _ends(near, 1)
    top, bottom = _ends(near, 0)
    size = max((right - left) * (bottom - top) * _FULL, 1.0)
    area = int(outside[y1:y2, x1:x2][cells].sum()) * _CELL_PIXELS // _FULL
    return Blob((x1 + left, y1 + top, x1 + right, y1 + bottom), area, min(1.0, int(near.sum()) / size))


def _ends(near: np.ndarray, axis: int) -> tuple[float, float]:
    """Where along an axis an object begins and ends, in cells, from its changed pixels in each cell."""
    sums, fullest = near.sum(1 - axis), near.max(1 - axis)
    inside = np.flatnonzero(sums > sums.max() // 16)  # stray pixels farther out are none of the object's
    first, last = int(inside[0]), int(inside[-1])
    if first == last:
        return first, last + 1

    def share(end: int, beside: int) -> float:
        # Of a straight end both are right; of a round one the fullest cell is the tip.
        return float(max(min(1.0, sums[end] / max(sums[beside], 1)), fullest[end] / _FULL))

    return first + 1 - share(first, first + 1), last + share(last, last - 1)


def _grow(cells: np.ndarray, reach: int) -> np.ndarray:
    """Cells within ``reach`` of a set one, diagonals included."""
    for _ in range(reach):
        rows = cells.copy()
        rows[1:] |= cells[:-1]
        rows[:-1] |= cells[1:]
        cells = rows.copy()
        cells[:, 1:] |= rows[:, :-1]
        cells[:, :-1] |= rows[:, 1:]
    return cells


def _runs(cells: np.ndarray) -> np.ndarray:
    """(n, 3) of row, first column and column after the last, in reading order."""
    edges = np.diff(np.pad(cells.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    rows, begins = np.nonzero(edges > 0)
    return np.stack([rows, begins, np.nonzero(edges < 0)[1]], axis=1)


def _regions(cells: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """The runs of each connected region (neighbours by a side or a corner), by union-find over runs of cells."""
    runs = [tuple(run) for run in _runs(cells).tolist()]
    parent = list(range(len(runs)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    above = 0  # the first run that may touch the present one from the row above
    for i, (row, begin, end) in enumerate(runs):
        while runs[above][0] < row - 1 or (runs[above][0] == row - 1 and runs[above][2] < begin):
            above += 1
        j = above
        while j < i and runs[j][0] == row - 1 and runs[j][1] <= end:
            parent[root(i)] = root(j)
            j += 1
    regions: dict[int, list[tuple[int, int, int]]] = {}
    for i, run in enumerate(runs):
        regions.setdefault(root(i), []).append(run)
    return list(regions.values())
